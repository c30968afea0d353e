#include "numbers.h"

#include <cmath>

namespace emulator
{

float fromHalf(uint16_t half)
{
    uint32_t const sign = uint32_t(half & 0x8000) << 16;
    uint32_t const exponent = half >> 10 & 31;
    uint32_t const mantissa = half & 0x3FF;
    if (exponent == 31)
    {
        return asFloat(sign | 0x7F800000 | mantissa << 13);
    }
    if (exponent == 0 && mantissa == 0)
    {
        return asFloat(sign);
    }
    if (exponent == 0)
    {
        float const value = std::ldexp(static_cast<float>(mantissa), -24);
        return sign ? -value : value;
    }
    return asFloat(sign | (exponent + 112) << 23 | mantissa << 13);
}

uint16_t toHalf(float value)
{
    uint32_t const bits = asBits(value);
    uint32_t const sign = bits >> 16 & 0x8000;
    uint32_t const magnitude = bits & 0x7FFFFFFF;
    if (magnitude > 0x7F800000)
    {
        return 0x7FFF;
    }
    if (magnitude >= 0x477FF000) // halfway from 65504 to 65536, which ties to infinity
    {
        return static_cast<uint16_t>(sign | 0x7C00);
    }
    if (magnitude < 0x38800000) // a multiple of 2**-24; nearbyint ties to even
    {
        return static_cast<uint16_t>(sign | static_cast<uint32_t>(std::nearbyint(std::ldexp(asFloat(magnitude), 24))));
    }
    uint32_t const rounded = magnitude + 0xFFF + (magnitude >> 13 & 1);
    return static_cast<uint16_t>(sign | (rounded - 0x38000000) >> 13);
}

float fromBf16(uint16_t bits)
{
    return asFloat(uint32_t{bits} << 16);
}

uint16_t toBf16(float value)
{
    if (std::isnan(value))
    {
        return 0x7FFF;
    }
    uint32_t const bits = asBits(value);
    return static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

uint32_t toTf32(uint32_t bits)
{
    if ((bits & 0x7F800000) == 0x7F800000)
    {
        return bits & 0x7FFFFF ? 0x7FFFFFFF : bits;
    }
    return (bits + 0x1000) & 0xFFFFE000;
}

float flushed(float value)
{
    return std::fabs(value) < 1.17549435e-38F ? std::copysign(0.0F, value) : value;
}

float exp2Approximate(float value)
{
    return flushed(std::exp2(flushed(value)));
}

} // namespace emulator
