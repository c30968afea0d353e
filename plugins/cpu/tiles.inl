// Tiles of both products of attention, and what they share, for any vector type. Each processor's file defines `Vector` and `kSums` before
// it includes this.

#include "attention.h"

namespace adtp
{
namespace
{

constexpr int32_t kLanes = Vector::kLanes;
constexpr int32_t kVectors = 3; // of queries in a block
constexpr int64_t kBlockKeys = 128; // taken at once, unless somebody asks what keys received
constexpr float kLowest = -3.40282347e38F;

// A call of the template for as many keys, or rows, as are left: 1 to Most.
template <int32_t Most, typename Call>
inline void dispatch(int64_t left, Call const& call)
{
    if constexpr (Most > 1)
    {
        if (left < Most)
        {
            return dispatch<Most - 1>(left, call);
        }
    }
    call.template run<Most>();
}

// Run a kernel with as many vectors as a block's queries take.
template <template <int32_t> class Kernel>
inline void runFor(Block const& block)
{
    static_assert(kVectors == 3, "one call for each number of vectors");
    if (block.queries > 2 * kLanes)
    {
        Kernel<3>(block).run();
    }
    else if (block.queries > kLanes)
    {
        Kernel<2>(block).run();
    }
    else
    {
        Kernel<1>(block).run();
    }
}

} // namespace
} // namespace adtp

#include "scores.inl"
#include "values.inl"
