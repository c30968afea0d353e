// Products of rows with constant weights in lower precision on a CPU: what they are given, and the processors they have code for.
#pragma once

#include "neon.h"

#include <cstddef>
#include <cstdint>

namespace adtp
{

// y = x @ weights + bias, with an erf GELU, off by at most 5e-6, where it is asked for.
//
// bf16: rows are rounded to it, products are summed in fp32. INT8: each row has its own scale and zero point,
// u = round(x * factors / scale) + zero in 0..255, and products are summed in int32.
//
// Weights lie in groups of four bytes down a column, of 16 columns one after the other: (N/16, K/4, 16, 4) of int8,
// (N/16, K/2, 16, 2) of bf16, with zeros where K or N is no multiple. 64 bytes are what a dot product of AVX-512 reads.
struct Linear
{
    float const* x; // (M, K), contiguous
    float const* factors; // (K,) of INT8, by which each row is multiplied before it is rounded; null: none
    void const* weight;
    float const* scale; // (N,) of int8 weights; null: they are bf16
    int32_t const* sums; // (N,) of int8 weights, over K; null for bf16
    float const* bias; // (N,)
    float* y; // (M, N), contiguous
    int64_t m;
    int64_t k;
    int64_t n;
    int32_t gelu;
    // Where it is given, results go there in place of y, as rows in bf16 that another product takes.
    uint8_t* low = nullptr;
    int64_t lowPitch = 0;
    // Where they are given, y has the first third of the columns, and these have the others: (M, N/3) each, N/3 a multiple of kColumns.
    float* second = nullptr;
    float* third = nullptr;
};

// y = the norm of y + residual over each row of N, times gamma, plus beta.
struct AddNorm
{
    float const* residual; // (M, N)
    float const* gamma; // (N,)
    float const* beta; // (N,)
    float* y; // (M, N)
    int64_t n;
    float epsilon;
};

constexpr int64_t kGroupBytes = 4; // of a column, and of a row in INT8, that are multiplied at once
constexpr int64_t kColumns = 16; // of a block of weights

// Groups of K values.
inline int64_t groupsOf(Linear const& call)
{
    int64_t const values = call.scale ? 4 : 2;
    return (call.k + values - 1) / values;
}

// The rows of x in lower precision.
struct LowRows
{
    uint8_t* values; // (M, pitch), zeros behind the values of a row; of INT8, a level may store them in a form of its own
    int64_t pitch; // bytes of a row
    float* scale; // (M,), of INT8 alone; NaN where the row has a NaN or an infinity
    int32_t* zero; // (M,)
};

constexpr int64_t kCacheBytes = 1 << 20; // of a core's second level, on most processors

// The same code, compiled for one kind of processor.
struct LinearLevel
{
    char const* name;
    int64_t bf16Bytes; // of a group of a row in bf16: 4, or 8 where its values are kept as floats
    int64_t tileRows; // a piece has a multiple of them
    int64_t readRows; // are read at once: the rows of a call are padded to a multiple, with any bytes
    int64_t readBytes; // of a row likewise, with zeros
    int64_t cacheBytes; // of a core, for the numbers of a piece of a chain
    void (*convert)(Linear const& call, LowRows const& rows, int64_t first, int64_t end);
    void (*multiply)(Linear const& call, LowRows const& rows, int64_t first, int64_t end, int64_t firstBlock, int64_t endBlock);
    void (*addNorm)(AddNorm const& call, int64_t first, int64_t end);
};

extern LinearLevel const kLinearPortable;
#ifdef ADTP_X86
extern LinearLevel const kLinearAvx2;
extern LinearLevel const kLinearAvx2Vnni;
extern LinearLevel const kLinearAvx512;
extern LinearLevel const kLinearAvx512Vnni;
extern LinearLevel const kLinearAvx512Bf16;
#ifdef ADTP_AMX
extern LinearLevel const kLinearAmx;
#endif
#endif
#ifdef ADTP_NEON
extern LinearLevel const kLinearNeon;
#ifdef ADTP_DOTPROD
extern LinearLevel const kLinearNeonDotprod;
#endif
#endif

// A level by its name, null where this processor does not run it; for a null name the fastest.
LinearLevel const* linearLevel(char const* name);

} // namespace adtp
