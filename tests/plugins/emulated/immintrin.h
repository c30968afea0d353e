// The AVX512 intrinsics that attention uses, plugins/cpu/avx512.cpp, avx512_bf16.cpp and amx.cpp, lane by lane in plain C++, after Intel's
// Intrinsics Guide.
// With this in place of the compiler's header, these files run on any processor.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

typedef uint16_t __mmask16;

struct __m512
{
    float lane[16];
};

struct __m512i
{
    uint16_t lane[32];
};

struct __m512bh
{
    uint16_t lane[32];
};

enum
{
    _MM_FROUND_TO_NEAREST_INT = 0,
    _MM_FROUND_TO_NEG_INF = 1,
    _MM_FROUND_NO_EXC = 8,
    _CMP_NLT_UQ = 21,
};

template <typename Function>
static inline __m512 eachLane(Function function)
{
    __m512 made;
    for (int i = 0; i < 16; ++i)
    {
        made.lane[i] = function(i);
    }
    return made;
}

static inline __m512 _mm512_set1_ps(float x)
{
    return eachLane([=](int) { return x; });
}

static inline __m512 _mm512_maskz_loadu_ps(__mmask16 mask, void const* p)
{
    return eachLane([=](int i) { return mask >> i & 1 ? static_cast<float const*>(p)[i] : 0.0F; });
}

static inline __m512 _mm512_loadu_ps(void const* p)
{
    return _mm512_maskz_loadu_ps(0xFFFF, p);
}

static inline void _mm512_mask_storeu_ps(void* p, __mmask16 mask, __m512 x)
{
    for (int i = 0; i < 16; ++i)
    {
        if (mask >> i & 1)
        {
            static_cast<float*>(p)[i] = x.lane[i];
        }
    }
}

static inline void _mm512_storeu_ps(void* p, __m512 x)
{
    _mm512_mask_storeu_ps(p, 0xFFFF, x);
}

static inline __m512 _mm512_add_ps(__m512 x, __m512 y)
{
    return eachLane([&](int i) { return x.lane[i] + y.lane[i]; });
}

static inline __m512 _mm512_sub_ps(__m512 x, __m512 y)
{
    return eachLane([&](int i) { return x.lane[i] - y.lane[i]; });
}

static inline __m512 _mm512_mul_ps(__m512 x, __m512 y)
{
    return eachLane([&](int i) { return x.lane[i] * y.lane[i]; });
}

static inline __m512 _mm512_div_ps(__m512 x, __m512 y)
{
    return eachLane([&](int i) { return x.lane[i] / y.lane[i]; });
}

static inline __m512 _mm512_fmadd_ps(__m512 x, __m512 y, __m512 z)
{
    return eachLane([&](int i) { return std::fma(x.lane[i], y.lane[i], z.lane[i]); });
}

static inline __m512 _mm512_max_ps(__m512 x, __m512 y) // the second where one is NaN
{
    return eachLane([&](int i) { return x.lane[i] > y.lane[i] ? x.lane[i] : y.lane[i]; });
}

static inline __m512 _mm512_roundscale_ps(__m512 x, int mode)
{
    return eachLane([&](int i) { return mode == 8 ? std::nearbyint(x.lane[i]) : NAN; });
}

static inline __m512 _mm512_scalef_ps(__m512 x, __m512 power)
{
    return eachLane([&](int i) { return x.lane[i] * std::exp2(std::floor(power.lane[i])); });
}

static inline __m512 _mm512_maskz_scalef_ps(__mmask16 mask, __m512 x, __m512 power)
{
    return eachLane([&](int i) { return mask >> i & 1 ? x.lane[i] * std::exp2(std::floor(power.lane[i])) : 0.0F; });
}

static inline __mmask16 _mm512_cmp_ps_mask(__m512 x, __m512 y, int) // not less than, which is true of NaN
{
    __mmask16 made = 0;
    for (int i = 0; i < 16; ++i)
    {
        made = static_cast<__mmask16>(made | (x.lane[i] < y.lane[i] ? 0 : 1) << i);
    }
    return made;
}

// Each quarter of the result takes its lanes from the same quarter of x and y.
static inline __m512 _mm512_unpacklo_ps(__m512 x, __m512 y)
{
    return eachLane([&](int i) { return (i % 2 ? y : x).lane[i / 4 * 4 + i % 4 / 2]; });
}

static inline __m512 _mm512_unpackhi_ps(__m512 x, __m512 y)
{
    return eachLane([&](int i) { return (i % 2 ? y : x).lane[i / 4 * 4 + i % 4 / 2 + 2]; });
}

static inline __m512 _mm512_shuffle_ps(__m512 x, __m512 y, int control)
{
    return eachLane([&](int i) { return (i % 4 < 2 ? x : y).lane[i / 4 * 4 + (control >> i % 4 * 2 & 3)]; });
}

// The lower two quarters are quarters of x, the upper two of y.
static inline __m512 _mm512_shuffle_f32x4(__m512 x, __m512 y, int control)
{
    return eachLane([&](int i) { return (i < 8 ? x : y).lane[(control >> i / 4 * 2 & 3) * 4 + i % 4]; });
}

// What is left of x below its whole part; 0 of infinity.
static inline __m512 _mm512_reduce_ps(__m512 x, int mode)
{
    return eachLane([&](int i) {
        float const whole = mode == (_MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC) ? std::floor(x.lane[i]) : NAN;
        return std::isinf(x.lane[i]) ? 0.0F : x.lane[i] - whole;
    });
}

static inline float fromBf16(uint16_t x)
{
    uint32_t const bits = static_cast<uint32_t>(x) << 16;
    float wide;
    std::memcpy(&wide, &bits, sizeof wide);
    return std::fpclassify(wide) == FP_SUBNORMAL ? std::copysign(0.0F, wide) : wide;
}

static inline uint16_t toBf16(float x) // ties to even; subnormal numbers count as 0
{
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    if (std::isnan(x))
    {
        return static_cast<uint16_t>(bits >> 16 | 0x40);
    }
    if (std::fpclassify(x) == FP_SUBNORMAL)
    {
        return static_cast<uint16_t>(bits >> 16 & 0x8000);
    }
    return static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

// The lower half is of y.
static inline __m512bh _mm512_cvtne2ps_pbh(__m512 x, __m512 y)
{
    __m512bh made;
    for (int i = 0; i < 32; ++i)
    {
        made.lane[i] = toBf16(i < 16 ? y.lane[i] : x.lane[i - 16]);
    }
    return made;
}

static inline __m512 _mm512_dpbf16_ps(__m512 sums, __m512bh x, __m512bh y)
{
    return eachLane([&](int i) {
        float const odd = std::fma(fromBf16(x.lane[2 * i + 1]), fromBf16(y.lane[2 * i + 1]), sums.lane[i]);
        return std::fma(fromBf16(x.lane[2 * i]), fromBf16(y.lane[2 * i]), odd);
    });
}

static inline __m512i _mm512_loadu_si512(void const* p)
{
    __m512i made;
    std::memcpy(&made, p, sizeof made);
    return made;
}

static inline __m512i _mm512_permutexvar_epi16(__m512i places, __m512i x)
{
    __m512i made;
    for (int i = 0; i < 32; ++i)
    {
        made.lane[i] = x.lane[places.lane[i] & 31];
    }
    return made;
}
