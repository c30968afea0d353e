// Attention over packed sequences on a CPU: what it is given, and the processors it has code for.
#pragma once

#include "neon.h"

#include <cstddef>
#include <cstdint>

namespace adtp
{

constexpr float kLog2E = 1.44269504F;

enum class Type : int32_t
{
    kFloat,
    kHalf,
    kBfloat,
};

// What scores of one head get from the distance of a query and a key, beside a product of these two: a row of products with the query,
// and one with the key.
struct Distances
{
    float const* keys; // rows of (headSize, pitch): the query is multiplied by a column; null: there are no such terms
    float const* queries; // the same for the key
    int64_t pitch; // at least 16 more than the columns that are there, and not a power of 2: rows would share lines of a cache
    int32_t first; // the column that lies first
    int32_t const* buckets; // [position of the query - position of the key]: the column, for -reach to reach; rising
    int64_t reach; // distances beyond are like this one
};

// A few queries of one head of one sequence, and the keys that they attend to.
struct Block
{
    Type type; // of q, k, v and out; all sums are fp32
    void const* q; // row of the first query, at the head's first column
    void const* k; // row of the first key, at its head's first column
    void const* v;
    void* out; // row of the first query, at the head's first column
    int64_t stride; // elements between rows of q and out
    int64_t keyStride; // and between those of k and v
    int64_t keys; // at least 1
    int32_t queries; // 1 to Level::queries
    int32_t headSize; // D
    float scale; // factor on q @ k.T

    // Query i sees keys from[i] to to[i] - 1, at least one, both rising; they count from key -firstKey. Null: all see all.
    int32_t const* from;
    int32_t const* to;
    int64_t firstKey;

    // bias[position of the query - position of the key] is added to a score. It is in base-2 exponents, and may be read for
    // the positions of Level::queries queries. Null: nothing is added.
    float const* bias;
    Distances distances; // a block has these, a bias, or ends of what queries see
    int32_t const* positions; // of the queries, where a bias or distances are
    int32_t const* keyPositions;

    float* received; // (keys,): gets the sums of the softmax over these queries; null where nobody asks
    int64_t itself; // the key that is the first query, where what a token gives itself does not count; else -1
    float* scratch; // Level::scratch(...) elements, 64 bytes aligned
};

// The same code, compiled for one kind of processor.
struct Level
{
    char const* name; // "amx", "avx512_bf16", "avx512", "avx2", "neon" or "portable"
    int32_t queries; // most of a block
    // Elements; for the block with most keys. columns: of distances that texts reach, 0 without.
    size_t (*scratch)(Type type, int64_t keys, int32_t headSize, bool received, int64_t columns);
    void (*attend)(Block const& block);
    Level const* exact; // of a level that rounds to bf16, the one for calls that must stay exact; null of others
};

extern Level const kPortable;
#ifdef ADTP_X86
extern Level const kAvx2;
extern Level const kAvx512;
extern Level const kAvx512Bf16; // products of numbers that are rounded to bf16
#endif
#ifdef ADTP_AMX
extern Level const kAmx; // the same in tiles
#endif
#ifdef ADTP_NEON
extern Level const kNeon;
#endif

// A level by its name, null where this processor does not run it; for a null name the best that it runs in fp32.
Level const* level(char const* name);

// The best that it runs where products may be rounded to bf16.
Level const& levelInBf16();

} // namespace adtp
