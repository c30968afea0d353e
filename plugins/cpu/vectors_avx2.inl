// Vectors of AVX2 with FMA: what attention and products both need.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace adtp
{
namespace
{

inline __m256i firstLanes(int32_t n)
{
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

struct Vector
{
    static constexpr int32_t kLanes = 8;
    __m256 value;

    static Vector of(float x) { return {_mm256_set1_ps(x)}; }
    static Vector load(float const* p) { return {_mm256_loadu_ps(p)}; }
    static void store(float* p, Vector x) { _mm256_storeu_ps(p, x.value); }
    static Vector loadSome(float const* p, int32_t n) { return {_mm256_maskload_ps(p, firstLanes(n))}; }
    static void storeSome(float* p, Vector x, int32_t n) { _mm256_maskstore_ps(p, firstLanes(n), x.value); }
    static Vector max(Vector x, Vector y) { return {_mm256_max_ps(x.value, y.value)}; } // y where one is NaN
    static Vector multiplyAdd(Vector x, Vector y, Vector z) { return {_mm256_fmadd_ps(x.value, y.value, z.value)}; }
    static Vector round(Vector x)
    {
        return {_mm256_round_ps(x.value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
    }
    static Vector timesPowerOf2(Vector x, Vector power) // both numbers, and their product, are normal
    {
        __m256i const exponent = _mm256_slli_epi32(_mm256_cvtps_epi32(power.value), 23);
        return {_mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(x.value), exponent))};
    }
    static void transpose(Vector (&x)[kLanes])
    {
        __m256 pairs[8];
        __m256 fours[8];
        for (int32_t i = 0; i < 8; i += 2)
        {
            pairs[i] = _mm256_unpacklo_ps(x[i].value, x[i + 1].value);
            pairs[i + 1] = _mm256_unpackhi_ps(x[i].value, x[i + 1].value);
        }
        for (int32_t i = 0; i < 8; i += 4)
        {
            for (int32_t j = 0; j < 2; ++j)
            {
                fours[i + 2 * j] = _mm256_shuffle_ps(pairs[i + j], pairs[i + j + 2], 0x44);
                fours[i + 2 * j + 1] = _mm256_shuffle_ps(pairs[i + j], pairs[i + j + 2], 0xEE);
            }
        }
        for (int32_t i = 0; i < 4; ++i)
        {
            x[i].value = _mm256_permute2f128_ps(fours[i], fours[i + 4], 0x20);
            x[i + 4].value = _mm256_permute2f128_ps(fours[i], fours[i + 4], 0x31);
        }
    }
    friend Vector operator-(Vector x, Vector y) { return {_mm256_sub_ps(x.value, y.value)}; }
    friend Vector operator+(Vector x, Vector y) { return {_mm256_add_ps(x.value, y.value)}; }
    friend Vector operator*(Vector x, Vector y) { return {_mm256_mul_ps(x.value, y.value)}; }
    friend Vector operator/(Vector x, Vector y) { return {_mm256_div_ps(x.value, y.value)}; }
};

} // namespace
} // namespace adtp
