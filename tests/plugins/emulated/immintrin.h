// The AVX512 intrinsics that plugins/cpu/avx512.cpp uses, lane by lane in plain C++, after Intel's Intrinsics Guide. With
// this in place of the compiler's header, that file runs on any processor.
#pragma once

#include <cmath>
#include <cstdint>

typedef uint16_t __mmask16;

struct __m512
{
    float lane[16];
};

enum
{
    _MM_FROUND_TO_NEAREST_INT = 0,
    _MM_FROUND_NO_EXC = 8,
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
