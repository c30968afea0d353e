// The inputs of the attention operators, and what is wrong with their shapes.
#pragma once

#include "tensors.h"

namespace adtp
{
namespace
{

constexpr size_t kCuSeqlens = 3; // after q, k and v
constexpr size_t kPositions = 4;
constexpr size_t kTable = 5;
constexpr size_t kKeyBounds = 4; // of grouped queries: cu_q, cu_k, positions_q, positions_k
constexpr size_t kOwnPositions = 5;
constexpr size_t kKeyPositions = 6;
constexpr size_t kDistanceKeys = 5; // of disentangled attention: distance_keys, distance_queries, buckets
constexpr size_t kDistanceQueries = 6;
constexpr size_t kBuckets = 7;
constexpr size_t kMostInputs = 8;

enum class By // what scores depend on, beside q and k
{
    kNothing,
    kDistance, // inputs: positions and a table
    kWindow, // input: positions; attribute: window
    kDisentangled, // inputs: positions, distance_keys, distance_queries and buckets
    kReach, // inputs: bounds and positions of queries and of keys; attributes: kv_heads, window_back, window_ahead
};

// What is wrong with the shapes of grouped attention's inputs, whose queries may be other tokens than its keys; null where nothing is.
inline char const* wrongSides(int64_t numHeads, int64_t keyHeads, Input const (&in)[kMostInputs])
{
    if (in[0].rank != 2 || in[1].rank != 2 || in[2].rank != 2 || in[1].shape[0] != in[2].shape[0]
        || in[1].shape[1] != in[2].shape[1] || in[0].shape[1] % numHeads
        || in[0].shape[1] / numHeads * keyHeads != in[1].shape[1])
    {
        return "q must be (T, N*D), and k and v (T', kv_heads*D)";
    }
    if (in[kCuSeqlens].rank != 1 || in[kKeyBounds].rank != 1 || in[kCuSeqlens].shape[0] < 1
        || in[kCuSeqlens].shape[0] != in[kKeyBounds].shape[0])
    {
        return "cu_q and cu_k must be (B+1,) and rise from 0 to T and T'";
    }
    if (in[kOwnPositions].rank != 1 || in[kKeyPositions].rank != 1 || in[kOwnPositions].shape[0] != in[0].shape[0]
        || in[kKeyPositions].shape[0] != in[1].shape[0])
    {
        return "positions_q must be (T,), and positions_k (T',)";
    }
    return nullptr;
}

// The same of what scores depend on, beside q and k.
inline char const* wrongTables(By by, int64_t numHeads, Input const (&in)[kMostInputs])
{
    if (by != By::kNothing && (in[kPositions].rank != 1 || in[kPositions].shape[0] != in[0].shape[0]))
    {
        return "positions must be (T,)";
    }
    Input const& table = in[kTable];
    if (by == By::kDistance && (table.rank != 2 || table.shape[0] % 2 == 0 || table.shape[1] != numHeads))
    {
        return "table must be (2P-1, N)";
    }
    if (by != By::kDisentangled)
    {
        return nullptr;
    }
    Input const& keys = in[kDistanceKeys];
    if (keys.rank != 2 || keys.shape[0] != in[0].shape[1] || keys.shape[1] < 1
        || !in[kDistanceQueries].is({keys.shape[0], keys.shape[1]}))
    {
        return "distance_keys and distance_queries must share one shape (H, R)";
    }
    return in[kBuckets].rank != 1 || in[kBuckets].shape[0] % 2 == 0 ? "buckets must be (2P-1,)" : nullptr;
}

// The same of all inputs of an operator.
inline char const* wrongShape(By by, int64_t numHeads, int64_t keyHeads, Input const (&in)[kMostInputs])
{
    if (by == By::kReach)
    {
        return wrongSides(numHeads, keyHeads, in);
    }
    for (size_t i = 0; i < kCuSeqlens; ++i)
    {
        if (in[i].rank != 2 || in[i].shape[0] != in[0].shape[0] || in[i].shape[1] != in[0].shape[1])
        {
            return "q, k and v must share one shape (T, H)";
        }
    }
    if (in[0].shape[1] % numHeads)
    {
        return "num_heads must divide H";
    }
    if (in[kCuSeqlens].rank != 1 || in[kCuSeqlens].shape[0] < 1)
    {
        return "cu_seqlens must be (B+1,) and rise from 0 to T";
    }
    return wrongTables(by, numHeads, in);
}

} // namespace
} // namespace adtp
