// Launches the compiled kernels through the CUDA driver, which is looked up when first needed.
#pragma once

#include <cstdint>
#include <string>

namespace adtp
{

struct Call
{
    void const* q; // device addresses of row 0, multiples of 16
    void const* k;
    void const* v;
    void const* cuSeqlens; // (B+1,) int32
    void* out; // (T, N*D), contiguous
    int32_t rowStride; // elements between rows of q, k and v; a multiple of 16
    int32_t tokens; // T
    int32_t sequences; // B
    int32_t numHeads; // N
    int32_t headSize; // D
    char const* dtype; // "fp16", "bf16" or "fp32"
    float scale; // factor on q @ k.T
    float* received; // (T,), the attention that each token received; nullptr where it is not wanted
};

// Whether there is a kernel at all; empty, or what is wrong and what is accepted.
std::string check(char const* dtype, int32_t headSize);

// Load all that calls of a kind may launch into the current context, so that launching loads nothing: that takes long where a
// GPU has no code of its own, and a stream that is being captured takes none. Empty, or what went wrong.
std::string prepare(char const* dtype, int32_t headSize, bool received);

// Enqueue a call's kernels on a stream (a CUstream) of the current context. Empty, or what went wrong.
std::string launch(Call const& call, void* stream);

} // namespace adtp
