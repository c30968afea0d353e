// Vectors of AVX512F: what attention and products both need.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace adtp
{
namespace
{

// The same bits as another type of vector. Not every compiler casts these.
template <typename To, typename From>
inline To as(From const& from)
{
    static_assert(sizeof(To) == sizeof(From), "of one size");
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

inline __mmask16 firstLanes(int32_t n)
{
    return static_cast<__mmask16>((1U << n) - 1U);
}

struct Vector
{
    static constexpr int32_t kLanes = 16;
    __m512 value;

    static Vector of(float x) { return {_mm512_set1_ps(x)}; }
    static Vector load(float const* p) { return {_mm512_loadu_ps(p)}; }
    static void store(float* p, Vector x) { _mm512_storeu_ps(p, x.value); }
    static Vector loadSome(float const* p, int32_t n) { return {_mm512_maskz_loadu_ps(firstLanes(n), p)}; }
    static void storeSome(float* p, Vector x, int32_t n) { _mm512_mask_storeu_ps(p, firstLanes(n), x.value); }
    static Vector max(Vector x, Vector y) { return {_mm512_max_ps(x.value, y.value)}; } // y where one is NaN
    static Vector multiplyAdd(Vector x, Vector y, Vector z) { return {_mm512_fmadd_ps(x.value, y.value, z.value)}; }
    static Vector round(Vector x)
    {
        return {_mm512_roundscale_ps(x.value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
    }
    static Vector timesPowerOf2(Vector x, Vector power) { return {_mm512_scalef_ps(x.value, power.value)}; }
    static void transpose(Vector (&x)[kLanes])
    {
        __m512 pairs[16];
        __m512 fours[16];
        for (int32_t i = 0; i < 16; i += 2)
        {
            pairs[i] = _mm512_unpacklo_ps(x[i].value, x[i + 1].value);
            pairs[i + 1] = _mm512_unpackhi_ps(x[i].value, x[i + 1].value);
        }
        for (int32_t i = 0; i < 16; i += 4)
        {
            for (int32_t j = 0; j < 2; ++j)
            {
                fours[i + 2 * j] = _mm512_shuffle_ps(pairs[i + j], pairs[i + j + 2], 0x44);
                fours[i + 2 * j + 1] = _mm512_shuffle_ps(pairs[i + j], pairs[i + j + 2], 0xEE);
            }
        }
        // fours[i + c] holds column 4 * quarter + c of rows i to i + 3 in each quarter.
        for (int32_t c = 0; c < 4; ++c)
        {
            __m512 const low = _mm512_shuffle_f32x4(fours[c], fours[c + 4], 0x88);
            __m512 const high = _mm512_shuffle_f32x4(fours[c + 8], fours[c + 12], 0x88);
            __m512 const lowOdd = _mm512_shuffle_f32x4(fours[c], fours[c + 4], 0xDD);
            __m512 const highOdd = _mm512_shuffle_f32x4(fours[c + 8], fours[c + 12], 0xDD);
            x[c].value = _mm512_shuffle_f32x4(low, high, 0x88);
            x[c + 4].value = _mm512_shuffle_f32x4(lowOdd, highOdd, 0x88);
            x[c + 8].value = _mm512_shuffle_f32x4(low, high, 0xDD);
            x[c + 12].value = _mm512_shuffle_f32x4(lowOdd, highOdd, 0xDD);
        }
    }
    friend Vector operator-(Vector x, Vector y) { return {_mm512_sub_ps(x.value, y.value)}; }
    friend Vector operator+(Vector x, Vector y) { return {_mm512_add_ps(x.value, y.value)}; }
    friend Vector operator*(Vector x, Vector y) { return {_mm512_mul_ps(x.value, y.value)}; }
    friend Vector operator/(Vector x, Vector y) { return {_mm512_div_ps(x.value, y.value)}; }
};

} // namespace
} // namespace adtp
