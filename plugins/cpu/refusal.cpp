#include "reach.h"

#include <algorithm>

namespace adtp
{
namespace
{

bool rise(int32_t const* bounds, int64_t sequences, int64_t rows)
{
    return bounds[0] == 0 && bounds[sequences] == rows && std::is_sorted(bounds, bounds + sequences + 1);
}

// What is wrong with the positions of a sequence; null where nothing is.
char const* wrongPositions(Call const& call, int32_t const* begin, int32_t const* end)
{
    if (begin != end && (*begin < 0 || !std::is_sorted(begin, end)))
    {
        return "positions must rise from 0 or more in each text";
    }
    if (begin != end && call.table && end[-1] > call.tableRows / 2)
    {
        return "positions must be below P, of table (2P-1, N)";
    }
    return nullptr;
}

bool wrongBuckets(Call const& call)
{
    int32_t const* const end = call.buckets + call.numBuckets;
    return call.buckets[0] < 0 || end[-1] >= call.columns || !std::is_sorted(call.buckets, end);
}

} // namespace

char const* refusal(Call const& call)
{
    if (!rise(call.bounds, call.sequences, call.tokens))
    {
        return call.grouped ? "cu_q must be (B+1,) and rise from 0 to T" : "cu_seqlens must be (B+1,) and rise from 0 to T";
    }
    if (!rise(call.keyBounds, call.sequences, call.keys))
    {
        return "cu_k must be (B+1,) and rise from 0 to T'";
    }
    if (call.fromOthers && !std::equal(call.bounds, call.bounds + call.sequences + 1, call.keyBounds))
    {
        return "keys must be the queries where received attention leaves out what a token gives itself";
    }
    if (call.buckets && wrongBuckets(call))
    {
        return "buckets must rise, and be columns of distance_keys and distance_queries";
    }
    for (int64_t b = 0; b < call.sequences; ++b)
    {
        bool blind = call.bounds[b] != call.bounds[b + 1] && call.keyBounds[b] == call.keyBounds[b + 1];
        if (call.positions)
        {
            int32_t const* const own = call.positions;
            int32_t const* const places = call.keyPositions;
            char const* wrong = wrongPositions(call, own + call.bounds[b], own + call.bounds[b + 1]);
            wrong = wrong ? wrong : wrongPositions(call, places + call.keyBounds[b], places + call.keyBounds[b + 1]);
            if (wrong)
            {
                return wrong;
            }
        }
        if (hasReach(call))
        {
            eachReach(call, b, [&](int32_t, int32_t from, int32_t to) { blind = blind || from >= to; });
        }
        if (blind)
        {
            return "every query must see a key";
        }
    }
    return nullptr;
}

} // namespace adtp
