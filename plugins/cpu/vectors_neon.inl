// Vectors of NEON: what attention and products both need.
#pragma once

#include <arm_neon.h>

#include <cstdint>

namespace adtp
{
namespace
{

struct Vector
{
    static constexpr int32_t kLanes = 4;
    float32x4_t value;

    static Vector of(float x) { return {vdupq_n_f32(x)}; }
    static Vector load(float const* p) { return {vld1q_f32(p)}; }
    static void store(float* p, Vector x) { vst1q_f32(p, x.value); }
    static Vector loadSome(float const* p, int32_t n)
    {
        float some[kLanes] = {};
        for (int32_t i = 0; n < kLanes && i < n; ++i)
        {
            some[i] = p[i];
        }
        return load(n < kLanes ? some : p);
    }
    static void storeSome(float* p, Vector x, int32_t n)
    {
        float some[kLanes];
        store(some, x);
        for (int32_t i = 0; i < n; ++i)
        {
            p[i] = some[i];
        }
    }
    static Vector max(Vector x, Vector y) // y where one is NaN
    {
        return {vbslq_f32(vcgtq_f32(x.value, y.value), x.value, y.value)};
    }
    static Vector multiplyAdd(Vector x, Vector y, Vector z) { return {vfmaq_f32(z.value, x.value, y.value)}; }
    static Vector round(Vector x) { return {vrndnq_f32(x.value)}; }
    static Vector timesPowerOf2(Vector x, Vector power) // both numbers, and their product, are normal
    {
        int32x4_t const exponent = vshlq_n_s32(vcvtnq_s32_f32(power.value), 23); // 0 where the power is NaN
        return {vreinterpretq_f32_s32(vaddq_s32(vreinterpretq_s32_f32(x.value), exponent))};
    }
    static void transpose(Vector (&x)[kLanes])
    {
        float32x4_t const low = vzip1q_f32(x[0].value, x[2].value); // rows 0 and 2 of columns 0 and 1
        float32x4_t const high = vzip2q_f32(x[0].value, x[2].value);
        float32x4_t const lowOdd = vzip1q_f32(x[1].value, x[3].value);
        float32x4_t const highOdd = vzip2q_f32(x[1].value, x[3].value);
        x[0].value = vzip1q_f32(low, lowOdd);
        x[1].value = vzip2q_f32(low, lowOdd);
        x[2].value = vzip1q_f32(high, highOdd);
        x[3].value = vzip2q_f32(high, highOdd);
    }
    friend Vector operator-(Vector x, Vector y) { return {vsubq_f32(x.value, y.value)}; }
    friend Vector operator+(Vector x, Vector y) { return {vaddq_f32(x.value, y.value)}; }
    friend Vector operator*(Vector x, Vector y) { return {vmulq_f32(x.value, y.value)}; }
    friend Vector operator/(Vector x, Vector y) { return {vdivq_f32(x.value, y.value)}; }
};

} // namespace
} // namespace adtp
