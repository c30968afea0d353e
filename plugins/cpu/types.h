// Numbers of 16 bits. Each file that includes this has its own copy, so that none is compiled for one kind of processor
// and called on another; loops over these functions have no branches, so compilers make vectors of them.
#pragma once

#include "attention.h"

#include <cstring>

namespace adtp
{
namespace
{

inline uint32_t bitsOf(float x)
{
    uint32_t bits = 0;
    std::memcpy(&bits, &x, sizeof(bits));
    return bits;
}

inline float fromBits(uint32_t bits)
{
    float x = 0;
    std::memcpy(&x, &bits, sizeof(x));
    return x;
}

inline float fromHalf(uint16_t half)
{
    uint32_t const bits = half;
    // The exponent is 112 lower than that of the same float; the product also normalizes what is subnormal.
    uint32_t const number = bitsOf(fromBits((bits & 0x7FFFU) << 13) * 0x1p112F);
    uint32_t const endless = (bits & 0x7C00U) == 0x7C00U ? 0x7F800000U : 0U; // infinity and NaN
    return fromBits(number | endless | (bits & 0x8000U) << 16);
}

inline float fromBfloat(uint16_t bfloat)
{
    return fromBits(uint32_t{bfloat} << 16);
}

// To nearest, ties to even; so is the next.
inline uint16_t toHalf(float x)
{
    uint32_t const bits = bitsOf(x);
    uint32_t const number = bits & 0x7FFFFFFFU;
    uint32_t const normal = ((number + 0xFFFU + (number >> 13 & 1U)) >> 13) - (112U << 10);
    uint32_t const subnormal = bitsOf(fromBits(number) + 0.5F) - 0x3F000000U; // the sum rounds to multiples of 2^-24
    uint32_t half = number < 0x38800000U ? subnormal : normal;
    half = number >= 0x477FF000U ? 0x7C00U : half;
    half = number > 0x7F800000U ? 0x7E00U : half;
    return static_cast<uint16_t>(half | (bits >> 16 & 0x8000U));
}

inline uint16_t toBfloat(float x)
{
    uint32_t const bits = bitsOf(x);
    uint32_t const rounded = (bits + 0x7FFFU + (bits >> 16 & 1U)) >> 16;
    return static_cast<uint16_t>((bits & 0x7FFFFFFFU) > 0x7F800000U ? bits >> 16 | 0x40U : rounded);
}

inline size_t sizeOf(Type type)
{
    return type == Type::kFloat ? sizeof(float) : sizeof(uint16_t);
}

// The place of an element.
inline void const* at(Type type, void const* data, int64_t element)
{
    return static_cast<char const*>(data) + element * static_cast<int64_t>(sizeOf(type));
}

inline void* at(Type type, void* data, int64_t element)
{
    return static_cast<char*>(data) + element * static_cast<int64_t>(sizeOf(type));
}

// wide[row][column] of `count` rows that lie `stride` elements apart.
inline void widen(Type type, void const* rows, int64_t stride, int64_t count, int32_t columns, float* wide)
{
    for (int64_t row = 0; row < count; ++row, wide += columns)
    {
        auto const from = static_cast<uint16_t const*>(at(type, rows, row * stride));
        for (int32_t c = 0; type == Type::kHalf && c < columns; ++c)
        {
            wide[c] = fromHalf(from[c]);
        }
        for (int32_t c = 0; type == Type::kBfloat && c < columns; ++c)
        {
            wide[c] = fromBfloat(from[c]);
        }
    }
}

// The inverse.
inline void narrow(Type type, float const* wide, int64_t stride, int64_t count, int32_t columns, void* rows)
{
    for (int64_t row = 0; row < count; ++row, wide += columns)
    {
        auto const to = static_cast<uint16_t*>(at(type, rows, row * stride));
        for (int32_t c = 0; type == Type::kHalf && c < columns; ++c)
        {
            to[c] = toHalf(wide[c]);
        }
        for (int32_t c = 0; type == Type::kBfloat && c < columns; ++c)
        {
            to[c] = toBfloat(wide[c]);
        }
    }
}

} // namespace
} // namespace adtp
