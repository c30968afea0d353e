// Which variant of a kernel to launch: the rule of plugins/choice.py, which says why. A test compares them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <tuple>

namespace adtp
{

constexpr int64_t kFewPrograms = 2; // of a processor

inline int64_t dividedUp(int64_t number, int64_t by)
{
    return (number + by - 1) / by;
}

// One of `begin` to `end`, which have blockM, blockN and meanLengthUpTo: variants of one kernel, type and head size, short
// sequences first; the last one has no limit. `end` where there is none.
template <typename Variant>
Variant const* chosen(Variant const* begin, Variant const* end, int64_t tokens, int64_t sequences, int64_t numHeads,
    int64_t processors)
{
    Variant const* const usual = std::find_if(begin, end, [&](Variant const& variant) {
        return variant.meanLengthUpTo == 0 || tokens <= variant.meanLengthUpTo * sequences;
    });
    int64_t const mean = dividedUp(tokens, std::max<int64_t>(sequences, 1));
    if (usual == end || dividedUp(mean, usual->blockM) * sequences * numHeads > kFewPrograms * processors)
    {
        return usual;
    }
    auto const rank = [&](Variant const& variant) { return std::make_tuple(dividedUp(mean, variant.blockN), &variant != usual); };
    Variant const* best = usual;
    for (Variant const* variant = begin; variant != end; ++variant)
    {
        if (variant->blockM <= mean && rank(*variant) < rank(*best))
        {
            best = variant;
        }
    }
    return best;
}

} // namespace adtp
