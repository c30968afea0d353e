// Number formats of the tensor cores, and what the approximate instructions are modelled as.
#pragma once

#include <cstdint>
#include <cstring>

namespace emulator
{

inline float asFloat(uint32_t bits)
{
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline uint32_t asBits(float value)
{
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

inline int32_t asSigned(uint32_t bits)
{
    return static_cast<int32_t>(bits);
}

// IEEE 754 binary16, both ways; to nearest, ties to even. NaN becomes 0x7FFF, as PTX's cvt has it (PTX ISA, cvt).
float fromHalf(uint16_t half);
uint16_t toHalf(float value);

// bfloat16: the upper half of a float. To nearest, ties to even; NaN becomes 0x7FFF.
float fromBf16(uint16_t bits);
uint16_t toBf16(float value);

// cvt.rna.tf32.f32: 10 bits of mantissa, to nearest, ties away from zero. The lower 13 bits are zero.
uint32_t toTf32(uint32_t bits);

// Subnormal numbers become zeros of their sign (.ftz).
float flushed(float value);

// ex2.approx.ftz.f32. A model: the correctly rounded result, where a GPU may be 2 units in the last place away (PTX ISA, ex2).
float exp2Approximate(float value);

} // namespace emulator
