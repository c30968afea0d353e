// Parts of the attention kernels that round queries, keys, weights and values to bf16 and multiply them in pairs. Sums and the softmax are
// fp32. Files that include this are compiled with AVX-512 (F, BW, DQ, BF16).
//
// A lane holds a pair: in scores of neighbouring columns, in values of neighbouring keys.
#include "vectors_avx512.inl"

namespace adtp
{
constexpr int32_t kSums = 24; // vectors of a tile; they leave 8 of 32 registers to its factors
} // namespace adtp

#include "tiles.inl"

namespace adtp
{
namespace
{

constexpr uint16_t kInTurns[2 * kLanes]
    = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};

// Pairs of neighbours: those of x, then those of y.
inline Vector neighbours(Vector x, Vector y)
{
    return {as<__m512>(_mm512_cvtne2ps_pbh(y.value, x.value))};
}

// Pairs of a number of x and the one of y in the same lane.
inline Vector pairs(Vector x, Vector y)
{
    return {as<__m512>(_mm512_permutexvar_epi16(_mm512_loadu_si512(kInTurns), as<__m512i>(neighbours(x, y).value)))};
}

// 16 columns of a row, with zeros behind the last. Whole: there are so many, which need not be counted.
template <bool Whole>
inline Vector columns(float const* row, int32_t column, int32_t size)
{
    int32_t const left = size - column;
    return Whole || left >= kLanes ? Vector::load(row + column) : left > 0 ? Vector::loadSome(row + column, left) : Vector::of(0.0F);
}

// 2 to the power of x, for x <= 0, off by at most 2^-18: weights become bf16. What vreduceps leaves of minus infinity is 0, and vscalefps
// takes the whole part of its exponent. Below 2^-126 it is 0, so what is hidden is: Intel takes 50 ns for a vector with a subnormal number.
// NaN stays NaN.
inline Vector roughPowerOf2(Vector x)
{
    Vector const part{_mm512_reduce_ps(x.value, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC)}; // in [0, 1)
    Vector power = Vector::of(0.013425154F); // minimax of 2^part, and 1 of 0
    power = Vector::multiplyAdd(power, part, Vector::of(0.052245374F));
    power = Vector::multiplyAdd(power, part, Vector::of(0.24127856F));
    power = Vector::multiplyAdd(power, part, Vector::of(0.69304515F));
    power = Vector::multiplyAdd(power, part, Vector::of(1.0F));
    __mmask16 const isNormal = _mm512_cmp_ps_mask(x.value, _mm512_set1_ps(-126.0F), _CMP_NLT_UQ);
    return {_mm512_maskz_scalef_ps(isNormal, power.value, x.value)};
}

inline int64_t multipleOf(int64_t step, int64_t count)
{
    return (count + step - 1) / step * step;
}

// Elements of a row of pairs.
inline int64_t keyPitch(int32_t headSize)
{
    return multipleOf(kLanes, (headSize + 1) / 2);
}

inline int64_t valuePitch(int32_t headSize)
{
    return multipleOf(kLanes, headSize);
}

inline int64_t pairsOf(int64_t count)
{
    return (count + 1) / 2;
}

inline int64_t keysAtOnce(int64_t keys)
{
    return keys < kBlockKeys ? keys : kBlockKeys;
}

// The softmax of a block's queries, over as many keys as have been scored.
template <int32_t Vectors>
struct Softmax
{
    static constexpr int64_t kSize = 3 * Vectors * kLanes;

    float* peak; // of each query, all three (Vectors * kLanes,)
    float* shrink; // what the sums so far are worth below a higher peak
    float* inverse; // of each query's total
    Vector highest[Vectors];
    Vector total[Vectors];

    explicit Softmax(float* memory)
        : peak(memory)
        , shrink(peak + Vectors * kLanes)
        , inverse(shrink + Vectors * kLanes)
    {
        for (int32_t i = 0; i < Vectors; ++i)
        {
            highest[i] = Vector::of(kLowest);
            total[i] = Vector::of(0.0F);
            Vector::store(peak + i * kLanes, highest[i]);
        }
    }

    // Shrink what was summed below the old peak, after scores have raised it.
    void shrinkToPeak()
    {
        for (int32_t i = 0; i < Vectors; ++i)
        {
            Vector const old = highest[i];
            highest[i] = Vector::load(peak + i * kLanes);
            Vector const below = roughPowerOf2(old - highest[i]);
            total[i] = total[i] * below;
            Vector::store(shrink + i * kLanes, below);
        }
    }

    // Of scores of vector i, below the peak.
    Vector weight(float const* scores, int32_t i) const { return roughPowerOf2(Vector::load(scores) - highest[i]); }

    // Weights of all keys are in the total.
    void finish()
    {
        for (int32_t i = 0; i < Vectors; ++i)
        {
            Vector::store(inverse + i * kLanes, Vector::of(1.0F) / total[i]);
        }
    }
};

// queries[column / 2][query] = q * scale in base-2 exponents, a pair of columns; what is not there is 0.
template <int32_t Vectors>
inline void layQueries(Block const& block, float* queries)
{
    Vector const scale = Vector::of(block.scale * kLog2E);
    auto const q = static_cast<float const*>(block.q);
    int32_t const size = block.headSize;
    for (int32_t i = 0; i < Vectors; ++i)
    {
        for (int32_t d = 0; d < size; d += 2 * kLanes)
        {
            Vector square[kLanes];
            for (int32_t lane = 0; lane < kLanes; ++lane)
            {
                int32_t const query = i * kLanes + lane;
                float const* const row = q + query * block.stride;
                square[lane] = query < block.queries
                    ? neighbours(columns<false>(row, d, size) * scale, columns<false>(row, d + kLanes, size) * scale)
                    : Vector::of(0.0F);
            }
            Vector::transpose(square);
            for (int32_t c = 0; c < kLanes; ++c)
            {
                Vector::store(queries + ((d / 2 + c) * Vectors + i) * kLanes, square[c]);
            }
        }
    }
}

// out[key][column / 2], a pair of columns.
template <bool Whole>
inline void layKeys(Block const& block, int64_t first, int64_t keys, float* out)
{
    auto row = static_cast<float const*>(block.k) + first * block.keyStride;
    int32_t const size = block.headSize;
    for (int64_t left = keys; left > 0; --left, row += block.keyStride)
    {
        for (int32_t d = 0; d < size; d += 2 * kLanes, out += kLanes)
        {
            Vector::store(out, neighbours(columns<Whole>(row, d, size), columns<Whole>(row, d + kLanes, size)));
        }
    }
}

// out[key / 2][column], a pair of keys. A last key without a partner has zeros, and so have its weights.
template <bool Whole>
inline void layValues(Block const& block, int64_t first, int64_t keys, float* out)
{
    int64_t const stride = block.keyStride;
    auto row = static_cast<float const*>(block.v) + first * stride;
    int32_t const size = block.headSize;
    for (int64_t left = keys; left > 1; left -= 2, row += 2 * stride)
    {
        for (int32_t d = 0; d < size; d += kLanes, out += kLanes)
        {
            Vector::store(out, pairs(columns<Whole>(row, d, size), columns<Whole>(row + stride, d, size)));
        }
    }
    for (int32_t d = 0; keys % 2 && d < size; d += kLanes, out += kLanes)
    {
        Vector::store(out, pairs(columns<Whole>(row, d, size), Vector::of(0.0F)));
    }
}

// The two above, with fewer questions where a head's columns fill vectors.
inline void layKeys(Block const& block, int64_t first, int64_t keys, float* out)
{
    block.headSize % (2 * kLanes) ? layKeys<false>(block, first, keys, out) : layKeys<true>(block, first, keys, out);
}

inline void layValues(Block const& block, int64_t first, int64_t keys, float* out)
{
    block.headSize % kLanes ? layValues<false>(block, first, keys, out) : layValues<true>(block, first, keys, out);
}

} // namespace
} // namespace adtp
