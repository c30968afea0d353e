// Products with NEON. ADTP_SDOT: dot products of bytes in place of widening.
//
// These instructions multiply signed by signed bytes. So a row's numbers are stored less 128, and so is its zero point where it is taken
// off: sums of (u - 128) * w less (zero - 128) times the sum of w are the integers that all other levels have.
#include "linear.h"
#include "vectors_neon.inl"

#include <cstring>

namespace adtp
{
namespace
{

inline void storeBytes(uint8_t* p, Vector x, int32_t n) // whole numbers from 0, less 128; above 255 they become that
{
    uint16x4_t const words = vqmovn_u32(vcvtq_u32_f32(x.value));
    uint8x8_t const bytes = veor_u8(vqmovn_u16(vcombine_u16(words, words)), vdup_n_u8(128));
    uint32_t const four = vget_lane_u32(vreinterpret_u32_u8(bytes), 0);
    if (n == Vector::kLanes)
    {
        std::memcpy(p, &four, sizeof(four));
        return;
    }
    for (int32_t i = 0; i < n; ++i)
    {
        p[i] = static_cast<uint8_t>(four >> 8 * i);
    }
}

inline void storeBf16(uint8_t* p, Vector x, int32_t n)
{
    uint32x4_t const bits = vreinterpretq_u32_f32(x.value);
    uint32x4_t const odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    uint32x4_t const above = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7FFF)));
    uint32x4_t const rounded = vandq_u32(above, vdupq_n_u32(0xFFFF0000U));
    Vector const y = {vbslq_f32(vceqq_f32(x.value, x.value), vreinterpretq_f32_u32(rounded), x.value)};
    auto* const place = reinterpret_cast<float*>(p);
    n < Vector::kLanes ? Vector::storeSome(place, y, n) : Vector::store(place, y);
}

inline Vector min(Vector x, Vector y)
{
    return {vbslq_f32(vcltq_f32(x.value, y.value), x.value, y.value)};
}

inline Vector root(Vector x)
{
    return {vsqrtq_f32(x.value)};
}

struct Bf16
{
    static constexpr int32_t kRows = 4;
    static constexpr int32_t kVectors = 4;
    static constexpr int64_t kRowBytes = 8;
    struct Pair // a bf16 with zeros behind it is a float
    {
        float32x4_t even;
        float32x4_t odd;
    };
    typedef float32x4_t Sums;
    typedef Pair Weights;
    typedef float32x2_t Row;

    static Sums zero() { return vdupq_n_f32(0.0F); }
    static Weights load(uint8_t const* p)
    {
        uint32x4_t const both = vreinterpretq_u32_u8(vld1q_u8(p)), odd = vandq_u32(both, vdupq_n_u32(0xFFFF0000U));
        return {vreinterpretq_f32_u32(vshlq_n_u32(both, 16)), vreinterpretq_f32_u32(odd)};
    }
    static Row broadcast(uint8_t const* p) { return vreinterpret_f32_u8(vld1_u8(p)); }
    static Sums dot(Sums sums, Row x, Weights w) { return vfmaq_lane_f32(vfmaq_lane_f32(sums, w.even, x, 0), w.odd, x, 1); }
    static Vector value(Sums sums) { return {sums}; }
};

inline uint32_t group(uint8_t const* p)
{
    uint32_t bytes;
    std::memcpy(&bytes, p, sizeof(bytes));
    return bytes;
}

// Bytes of a row, whose source Clang does not see. For dot products it would repeat them in all lanes, which is one more operation on a
// vector. Else it would move weights to a lower half, because both halves of a row are the same.
template <typename Bytes>
inline Bytes asItIs(Bytes x)
{
#ifdef __clang__
    __asm__("" : "+w"(x));
#endif
    return x;
}

// Of sums of (u - 128) * w.
inline Vector lessZero(int32x4_t sums, int32_t const* columnSums, int32_t some, int32_t zero)
{
    int32_t own[Vector::kLanes] = {};
    for (int32_t i = 0; some < Vector::kLanes && i < some; ++i)
    {
        own[i] = columnSums[i];
    }
    int32x4_t const all = vld1q_s32(some < Vector::kLanes ? own : columnSums);
    return {vcvtq_f32_s32(vmlsq_n_s32(sums, all, zero - 128))};
}

#ifdef ADTP_SDOT
struct Int8
{
    static constexpr int32_t kRows = 6;
    static constexpr int32_t kVectors = 4;
    typedef int32x4_t Sums;
    typedef int8x16_t Weights;
    typedef int8x8_t Row;

    static Sums zero() { return vdupq_n_s32(0); }
    static Weights load(uint8_t const* p) { return vreinterpretq_s8_u8(vld1q_u8(p)); }
    static Row broadcast(uint8_t const* p) // its first four bytes are multiplied
    {
        return asItIs(vcreate_s8(group(p)));
    }
    static Sums dot(Sums sums, Row x, Weights w) { return vdotq_lane_s32(sums, w, x, 0); }
    static Vector value(Sums sums, int32_t const* columnSums, int32_t some, int32_t zero)
    {
        return lessZero(sums, columnSums, some, zero);
    }
};
#else
struct Int8 // products in 16 bits; two may be 2^15 together, so neighbours are added in 32
{
    static constexpr int32_t kRows = 2;
    static constexpr int32_t kVectors = 4;
    struct Halves // of groups: two sums for each of four columns
    {
        int32x4_t low;
        int32x4_t high;
    };
    typedef Halves Sums;
    typedef int8x16_t Weights;
    typedef int8x16_t Row;

    static Sums zero() { return {vdupq_n_s32(0), vdupq_n_s32(0)}; }
    static Weights load(uint8_t const* p) { return vreinterpretq_s8_u8(vld1q_u8(p)); }
    static Row broadcast(uint8_t const* p)
    {
        return asItIs(vreinterpretq_s8_u32(vdupq_n_u32(group(p))));
    }
    static Sums dot(Sums sums, Row x, Weights w)
    {
        int16x8_t const low = vmull_s8(vget_low_s8(w), vget_low_s8(x));
        return {vpadalq_s16(sums.low, low), vpadalq_s16(sums.high, vmull_high_s8(w, x))};
    }
    static Vector value(Sums sums, int32_t const* columnSums, int32_t some, int32_t zero)
    {
        return lessZero(vpaddq_s32(sums.low, sums.high), columnSums, some, zero);
    }
};
#endif

} // namespace
} // namespace adtp

#include "linear.inl"
