// Which keys the queries of a call see, where that has an end.
#pragma once

#include "ragged.h"

namespace adtp
{

inline bool hasReach(Call const& call)
{
    return call.back >= 0 || call.ahead >= 0;
}

// Tell which keys each query of a sequence sees, in turn: use(query, first, past). Positions rise, so both ends only move on.
template <typename Use>
void eachReach(Call const& call, int64_t sequence, Use const& use)
{
    int32_t const* const own = call.positions + call.bounds[sequence];
    int32_t const* const places = call.keyPositions + call.keyBounds[sequence];
    int32_t const queries = call.bounds[sequence + 1] - call.bounds[sequence];
    int32_t const keys = call.keyBounds[sequence + 1] - call.keyBounds[sequence];
    for (int32_t query = 0, from = 0, to = 0; query < queries; ++query)
    {
        int64_t const place = own[query];
        while (call.back >= 0 && from < keys && place - places[from] > call.back)
        {
            ++from;
        }
        while (to < keys && (call.ahead < 0 || places[to] - place <= call.ahead))
        {
            ++to;
        }
        use(query, from, to);
    }
}

} // namespace adtp
