// Products with AVX2 and FMA. ADTP_VNNI: dot products of AVX-VNNI in place of widening.
#include "linear.h"
#include "vectors_avx2.inl"

#include <cstring>

namespace adtp
{
namespace
{

inline __m256i upperHalves()
{
    return _mm256_set1_epi32(static_cast<int32_t>(0xFFFF0000U));
}

inline void storeBytes(uint8_t* p, Vector x, int32_t n) // whole numbers from 0; above 255 they become that
{
    __m256i const whole = _mm256_cvtps_epi32(x.value);
    __m128i const words = _mm_packus_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
    uint8_t bytes[16];
    _mm_storeu_si128(reinterpret_cast<__m128i*>(bytes), _mm_packus_epi16(words, words));
    std::memcpy(p, bytes, static_cast<size_t>(n));
}

inline void storeBf16(uint8_t* p, Vector x, int32_t n)
{
    __m256i const bits = _mm256_castps_si256(x.value);
    __m256i const odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i const above = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF)));
    __m256 const rounded = _mm256_castsi256_ps(_mm256_and_si256(above, upperHalves()));
    __m256 const isNan = _mm256_cmp_ps(x.value, x.value, _CMP_UNORD_Q);
    _mm256_maskstore_ps(reinterpret_cast<float*>(p), firstLanes(n), _mm256_blendv_ps(rounded, x.value, isNan));
}

inline Vector min(Vector x, Vector y)
{
    return {_mm256_min_ps(x.value, y.value)};
}

inline Vector root(Vector x)
{
    return {_mm256_sqrt_ps(x.value)};
}

inline __m256i broadcastGroup(uint8_t const* p)
{
    int32_t group;
    std::memcpy(&group, p, sizeof(group));
    return _mm256_set1_epi32(group);
}

inline __m256i loadBytes(uint8_t const* p)
{
    return _mm256_loadu_si256(reinterpret_cast<__m256i const*>(p));
}

struct Bf16
{
    static constexpr int32_t kRows = 4;
    static constexpr int32_t kVectors = 2;
    static constexpr int64_t kRowBytes = 8;
    struct Pair // a bf16 with zeros behind it is a float
    {
        __m256 even;
        __m256 odd;
    };
    typedef __m256 Sums;
    typedef Pair Weights;
    typedef Pair Row;

    static Sums zero() { return _mm256_setzero_ps(); }
    static Weights load(uint8_t const* p)
    {
        __m256i const both = loadBytes(p), odd = _mm256_and_si256(both, upperHalves());
        return {_mm256_castsi256_ps(_mm256_slli_epi32(both, 16)), _mm256_castsi256_ps(odd)};
    }
    static Row broadcast(uint8_t const* p)
    {
        return {_mm256_castsi256_ps(broadcastGroup(p)), _mm256_castsi256_ps(broadcastGroup(p + 4))};
    }
    static Sums dot(Sums sums, Row x, Weights w)
    {
        return _mm256_fmadd_ps(x.odd, w.odd, _mm256_fmadd_ps(x.even, w.even, sums));
    }
    static Vector value(Sums sums) { return {sums}; }
};

struct Int8Sums
{
    typedef __m256i Sums;

    static Sums zero() { return _mm256_setzero_si256(); }
    static Vector value(Sums sums, int32_t const* columnSums, int32_t some, int32_t zero)
    {
        __m256i const own = _mm256_maskload_epi32(columnSums, firstLanes(some));
        return {_mm256_cvtepi32_ps(_mm256_sub_epi32(sums, _mm256_mullo_epi32(own, _mm256_set1_epi32(zero))))};
    }
};

#ifdef ADTP_VNNI
struct Int8 : Int8Sums
{
    static constexpr int32_t kRows = 6;
    static constexpr int32_t kVectors = 2;
    typedef __m256i Weights;
    typedef __m256i Row;

    static Weights load(uint8_t const* p) { return loadBytes(p); }
    static Row broadcast(uint8_t const* p) { return broadcastGroup(p); }
    static Sums dot(Sums sums, Row x, Weights w) { return _mm256_dpbusd_avx_epi32(sums, x, w); }
};
#else
struct Int8 : Int8Sums // in 16 bits, because vpmaddubsw saturates
{
    static constexpr int32_t kRows = 4;
    static constexpr int32_t kVectors = 2;
    struct Pair
    {
        __m256i even;
        __m256i odd;
    };
    typedef Pair Weights;
    typedef Pair Row;

    static Weights load(uint8_t const* p)
    {
        __m256i const w = loadBytes(p);
        return {_mm256_srai_epi16(_mm256_slli_epi16(w, 8), 8), _mm256_srai_epi16(w, 8)};
    }
    static Row broadcast(uint8_t const* p)
    {
        __m256i const x = broadcastGroup(p);
        return {_mm256_and_si256(x, _mm256_set1_epi16(0xFF)), _mm256_srli_epi16(x, 8)};
    }
    static Sums dot(Sums sums, Row x, Weights w)
    {
        __m256i const four = _mm256_add_epi32(_mm256_madd_epi16(x.even, w.even), _mm256_madd_epi16(x.odd, w.odd));
        return _mm256_add_epi32(sums, four);
    }
};
#endif

} // namespace
} // namespace adtp

#include "linear.inl"
