// Attention over packed sequences on a CPU: what it is given, and the processors it has code for.
#pragma once

#include <cstddef>
#include <cstdint>

namespace adtp
{

// A few queries of one head of one sequence. They attend to all keys of the sequence.
struct Block
{
    float const* q; // row of the first query, at the head's first column
    float const* k; // row of the sequence's first key, at the head's first column
    float const* v;
    float* out; // row of the first query, at the head's first column
    int64_t stride; // elements between rows
    int64_t keys; // of the sequence, at least 1
    int32_t queries; // 1 to Level::queries
    int32_t headSize; // D
    float scale; // factor on q @ k.T
    float* received; // (keys,): gets the sums of the softmax over these queries; null where nobody asks
    float* scratch; // Level::scratch(...) elements, 64 bytes aligned
};

// The same code, compiled for one kind of processor.
struct Level
{
    char const* name; // "avx512", "avx2" or "portable"
    int32_t queries; // most of a block
    int32_t lanes; // queries are computed in multiples of it
    size_t (*scratch)(int64_t keys, int32_t headSize, bool received); // elements, for the longest sequence of a batch
    void (*attend)(Block const& block);
};

extern Level const kPortable;
#ifdef ADTP_X86
extern Level const kAvx2;
extern Level const kAvx512;
#endif

// A level by its name, null where this processor does not run it; for a null name the best that it runs.
Level const* level(char const* name);

} // namespace adtp
