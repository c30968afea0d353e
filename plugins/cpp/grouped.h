// Launches the compiled kernels of grouped attention: the rules of plugins/grouped.py. A test compares the two.
#pragma once

#include "runner.h"

#include <cstdint>
#include <string>

namespace adtp
{

// What is launched: attention; before it, where it is wanted, each query's log-sum-exp, then what each key received.
enum class GroupedKernel
{
    kATTENTION,
    kLSE,
    kRECEIVED,
};

// A variant: for head sizes up to headBlock.
struct GroupedVariant
{
    GroupedKernel kind;
    char const* dtype; // "fp16", "bf16" or "fp32"
    int32_t headBlock;
    int32_t blockM; // rows of a tile
    adtp_kernel const* kernel;
};

extern GroupedVariant const kGroupedVariants[]; // of one kind and type, small head sizes first
extern int32_t const kNumGroupedVariants;

struct GroupedCall
{
    void const* q; // device addresses of row 0, multiples of 16
    void const* k;
    void const* v;
    void const* cuQ; // (B+1,) int32
    void const* cuK;
    void const* positionsQ; // (T,) int32
    void const* positionsK; // (T',) int32
    void* out; // (T, N*D), contiguous
    float* received; // (T',), or nullptr where it is not wanted
    char const* dtype;
    int32_t qStride; // elements between rows; multiples of 8
    int32_t kvStride;
    int32_t queries; // T
    int32_t keys; // T'
    int32_t texts; // B
    int32_t numHeads; // N
    int32_t kvHeads;
    int32_t headSize; // D
    float scale; // factor on q @ k.T
    int32_t windowBack; // -1 without a bound
    int32_t windowAhead;
};

// Whether there are kernels at all; empty, or what is wrong and what is accepted.
std::string checkGrouped(char const* dtype, int32_t headSize);

// Load all that calls of a kind may launch into the current context, as `prepare` does. Empty, or what went wrong.
std::string prepareGrouped(char const* dtype, int32_t headSize, bool received);

// Enqueue a call's kernels on a stream (a CUstream) of the current context. Empty, or what went wrong.
std::string launch(GroupedCall const& call, void* stream);

} // namespace adtp
