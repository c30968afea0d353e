// Products with AVX-512 (F, BW). ADTP_VNNI and ADTP_BF16: dot products of that extension in place of widening.
#include "linear.h"
#include "vectors_avx512.inl"

#include <cstring>

namespace adtp
{
namespace
{

inline __m512i upperHalves()
{
    return _mm512_set1_epi32(static_cast<int32_t>(0xFFFF0000U));
}

inline void storeBytes(uint8_t* p, Vector x, int32_t n) // whole numbers from 0; above 255 they become that
{
    _mm512_mask_cvtusepi32_storeu_epi8(p, firstLanes(n), _mm512_cvtps_epi32(x.value));
}

inline void storeBf16(uint8_t* p, Vector x, int32_t n)
{
#ifdef ADTP_BF16
    auto const some = as<__m256i>(_mm512_cvtneps_pbh(x.value));
    _mm512_mask_cvtepi32_storeu_epi16(p, firstLanes(n), _mm512_cvtepu16_epi32(some));
#else
    __m512i const bits = _mm512_castps_si512(x.value);
    __m512i const odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i const above = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
    __mmask16 const isNumber = _mm512_cmp_ps_mask(x.value, x.value, _CMP_ORD_Q);
    __m512i const rounded = _mm512_mask_and_epi32(bits, isNumber, above, upperHalves());
    _mm512_mask_storeu_epi32(p, firstLanes(n), rounded);
#endif
}

inline Vector min(Vector x, Vector y)
{
    return {_mm512_min_ps(x.value, y.value)};
}

inline Vector root(Vector x)
{
    return {_mm512_sqrt_ps(x.value)};
}

inline __m512i broadcastGroup(uint8_t const* p)
{
    int32_t group;
    std::memcpy(&group, p, sizeof(group));
    return _mm512_set1_epi32(group);
}

#ifdef ADTP_BF16
struct Bf16
{
    static constexpr int32_t kRows = 6;
    static constexpr int32_t kVectors = 4;
    static constexpr int64_t kRowBytes = 4;
    typedef __m512 Sums;
    typedef __m512i Weights;
    typedef __m512i Row;

    static Sums zero() { return _mm512_setzero_ps(); }
    static Weights load(uint8_t const* p) { return _mm512_loadu_si512(p); }
    static Row broadcast(uint8_t const* p) { return broadcastGroup(p); }
    static Sums dot(Sums sums, Row x, Weights w) { return _mm512_dpbf16_ps(sums, as<__m512bh>(x), as<__m512bh>(w)); }
    static Vector value(Sums sums) { return {sums}; }
};
#else
struct Bf16
{
    static constexpr int32_t kRows = 12;
    static constexpr int32_t kVectors = 2;
    static constexpr int64_t kRowBytes = 8;
    struct Pair // a bf16 with zeros behind it is a float
    {
        __m512 even;
        __m512 odd;
    };
    typedef __m512 Sums;
    typedef Pair Weights;
    typedef Pair Row;

    static Sums zero() { return _mm512_setzero_ps(); }
    static Weights load(uint8_t const* p)
    {
        __m512i const both = _mm512_loadu_si512(p), odd = _mm512_and_si512(both, upperHalves());
        return {_mm512_castsi512_ps(_mm512_slli_epi32(both, 16)), _mm512_castsi512_ps(odd)};
    }
    static Row broadcast(uint8_t const* p)
    {
        return {_mm512_castsi512_ps(broadcastGroup(p)), _mm512_castsi512_ps(broadcastGroup(p + 4))};
    }
    static Sums dot(Sums sums, Row x, Weights w)
    {
        return _mm512_fmadd_ps(x.odd, w.odd, _mm512_fmadd_ps(x.even, w.even, sums));
    }
    static Vector value(Sums sums) { return {sums}; }
};
#endif

struct Int8Sums
{
    typedef __m512i Sums;

    static Sums zero() { return _mm512_setzero_si512(); }
    static Vector value(Sums sums, int32_t const* columnSums, int32_t some, int32_t zero)
    {
        __m512i const below = _mm512_mullo_epi32(_mm512_maskz_loadu_epi32(firstLanes(some), columnSums), _mm512_set1_epi32(zero));
        return {_mm512_cvtepi32_ps(_mm512_sub_epi32(sums, below))};
    }
};

#ifdef ADTP_VNNI
struct Int8 : Int8Sums
{
    static constexpr int32_t kRows = 6;
    static constexpr int32_t kVectors = 4;
    typedef __m512i Weights;
    typedef __m512i Row;

    static Weights load(uint8_t const* p) { return _mm512_loadu_si512(p); }
    static Row broadcast(uint8_t const* p) { return broadcastGroup(p); }
    static Sums dot(Sums sums, Row x, Weights w) { return _mm512_dpbusd_epi32(sums, x, w); }
};
#else
struct Int8 : Int8Sums // in 16 bits, because vpmaddubsw saturates
{
    static constexpr int32_t kRows = 5;
    static constexpr int32_t kVectors = 4;
    struct Pair
    {
        __m512i even;
        __m512i odd;
    };
    typedef Pair Weights;
    typedef Pair Row;

    static Weights load(uint8_t const* p)
    {
        __m512i const w = _mm512_loadu_si512(p);
        return {_mm512_srai_epi16(_mm512_slli_epi16(w, 8), 8), _mm512_srai_epi16(w, 8)};
    }
    static Row broadcast(uint8_t const* p)
    {
        __m512i const x = broadcastGroup(p);
        return {_mm512_and_si512(x, _mm512_set1_epi16(0xFF)), _mm512_srli_epi16(x, 8)};
    }
    static Sums dot(Sums sums, Row x, Weights w)
    {
        __m512i const four = _mm512_add_epi32(_mm512_madd_epi16(x.even, w.even), _mm512_madd_epi16(x.odd, w.odd));
        return _mm512_add_epi32(sums, four);
    }
};
#endif

} // namespace
} // namespace adtp

#include "linear.inl"
