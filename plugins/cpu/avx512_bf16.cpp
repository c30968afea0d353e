// Compiled with AVX-512 (F, BW, DQ, BF16); runs only where that is. Attention whose queries, keys, weights and values are rounded to bf16
// and multiplied in pairs, at twice fp32's rate. Sums and the softmax are fp32.
//
// A lane holds a pair: in scores of neighbouring columns, in values of neighbouring keys. So each block of queries lays a block of keys,
// and then one of values, out in pairs, which takes a seventh of its time.
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

struct Pairs
{
    static Vector add(Vector x, Vector y, Vector sums)
    {
        return {_mm512_dpbf16_ps(sums.value, as<__m512bh>(x.value), as<__m512bh>(y.value))};
    }
};

constexpr int32_t kColumns = 2 * kLanes; // that a vector of pairs has
constexpr uint16_t kInTurns[kColumns]
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
// takes the whole part of its exponent, so what is hidden is 0.
inline Vector roughPowerOf2(Vector x)
{
    Vector const part{_mm512_reduce_ps(x.value, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC)}; // in [0, 1)
    Vector power = Vector::of(0.013425154F); // minimax of 2^part, and 1 of 0
    power = Vector::multiplyAdd(power, part, Vector::of(0.052245374F));
    power = Vector::multiplyAdd(power, part, Vector::of(0.24127856F));
    power = Vector::multiplyAdd(power, part, Vector::of(0.69304515F));
    power = Vector::multiplyAdd(power, part, Vector::of(1.0F));
    return Vector::timesPowerOf2(power, x);
}

// Elements of a row of pairs.
inline int64_t keyPitch(int32_t headSize)
{
    return (headSize + kColumns - 1) / kColumns * kLanes;
}

inline int64_t valuePitch(int32_t headSize)
{
    return (headSize + kLanes - 1) / kLanes * kLanes;
}

inline int64_t pairsOf(int64_t count)
{
    return (count + 1) / 2;
}

inline int64_t keysAtOnce(int64_t keys)
{
    return keys < kBlockKeys ? keys : kBlockKeys;
}

template <int32_t Vectors>
class Attention
{
public:
    explicit Attention(Block const& block)
        : mBlock(block)
        , mLanes(block)
        , mPeak(block.scratch)
        , mShrink(mPeak + kWidth)
        , mOnes(mShrink + kWidth)
        , mInverse(mOnes + kWidth)
        , mQueries(mInverse + kWidth)
        , mScores(mQueries + pairsOf(block.headSize) * kWidth)
        , mRows(mScores + keysAtOnce(block.keys) * kWidth)
    {
    }

    void run() const
    {
        layQueries();
        Vector total[Vectors];
        for (int32_t i = 0; i < Vectors; ++i)
        {
            total[i] = Vector::of(0.0F);
            Vector::store(mPeak + i * kLanes, Vector::of(kLowest));
            Vector::store(mOnes + i * kLanes, Vector::of(1.0F));
        }
        for (int64_t first = 0; first < mBlock.keys; first += kBlockKeys)
        {
            int64_t const keys = keysAtOnce(mBlock.keys - first);
            weigh(first, keys, total);
            bool const last = first + keys == mBlock.keys;
            for (int32_t i = 0; last && i < Vectors; ++i)
            {
                Vector::store(mInverse + i * kLanes, Vector::of(1.0F) / total[i]);
            }
            mixValues(first, keys, last);
        }
    }

private:
    static constexpr int32_t kWidth = Vectors * kLanes;

    // mRows[key][column / 2], a pair of columns.
    template <bool Whole>
    void layKeys(int64_t first, int64_t keys) const
    {
        int64_t const stride = mBlock.keyStride;
        auto row = static_cast<float const*>(mBlock.k) + first * stride;
        int32_t const size = mBlock.headSize;
        float* out = mRows;
        for (int64_t left = keys; left > 0; --left, row += stride)
        {
            for (int32_t d = 0; d < size; d += kColumns, out += kLanes)
            {
                Vector::store(out, neighbours(columns<Whole>(row, d, size), columns<Whole>(row, d + kLanes, size)));
            }
        }
    }

    // mRows[key / 2][column], a pair of keys. A last key without a partner has zeros, and so have its weights.
    template <bool Whole>
    void layValues(int64_t first, int64_t keys) const
    {
        int64_t const stride = mBlock.keyStride;
        auto row = static_cast<float const*>(mBlock.v) + first * stride;
        int32_t const size = mBlock.headSize;
        float* out = mRows;
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

    // mQueries[column / 2][query] = q * scale in base-2 exponents, a pair of columns; lanes without a query are 0.
    void layQueries() const
    {
        Vector const scale = Vector::of(mBlock.scale * kLog2E);
        auto const q = static_cast<float const*>(mBlock.q);
        int64_t const stride = mBlock.stride;
        int32_t const size = mBlock.headSize, queries = mBlock.queries;
        for (int32_t i = 0; i < Vectors; ++i)
        {
            for (int32_t d = 0; d < size; d += kColumns)
            {
                Vector square[kLanes];
                for (int32_t lane = 0; lane < kLanes; ++lane)
                {
                    int32_t const query = i * kLanes + lane;
                    float const* const row = q + query * stride;
                    square[lane] = query < queries
                        ? neighbours(columns<false>(row, d, size) * scale, columns<false>(row, d + kLanes, size) * scale)
                        : Vector::of(0.0F);
                }
                Vector::transpose(square);
                for (int32_t c = 0; c < kLanes && d + 2 * c < size; ++c)
                {
                    Vector::store(mQueries + ((d / 2 + c) * Vectors + i) * kLanes, square[c]);
                }
            }
        }
    }

    void score(int64_t first, int64_t keys) const
    {
        constexpr int32_t tile = kTileKeys<Vectors>;
        int64_t const pitch = keyPitch(mBlock.headSize);
        mBlock.headSize % kColumns ? layKeys<false>(first, keys) : layKeys<true>(first, keys);
        auto const columnPairs = static_cast<int32_t>(pairsOf(mBlock.headSize));
        for (int64_t j = 0; j < keys; j += tile)
        {
            int64_t const key = first + j;
            int64_t const left = keys - j < tile ? keys - j : tile;
            bool const started = mBlock.bias || key < mLanes.begin || key + left > mLanes.end;
            if (started)
            {
                startScores<Vectors>(mBlock, mLanes, key, left, mScores + j * kWidth);
            }
            Scores<Vectors, Pairs> const part{
                mQueries, mRows + j * pitch, pitch, columnPairs, mScores + j * kWidth, mPeak, started};
            dispatch<tile>(left, part);
        }
    }

    // Weights of some keys below the highest score so far, as pairs of keys, where scores were; total gets their sums.
    void weigh(int64_t first, int64_t keys, Vector (&total)[Vectors]) const
    {
        Vector highest[Vectors];
        for (int32_t i = 0; i < Vectors; ++i)
        {
            highest[i] = Vector::load(mPeak + i * kLanes);
        }
        score(first, keys);
        for (int32_t i = 0; i < Vectors; ++i)
        {
            Vector const old = highest[i];
            highest[i] = Vector::load(mPeak + i * kLanes);
            Vector const shrink = roughPowerOf2(old - highest[i]);
            total[i] = total[i] * shrink;
            Vector::store(mShrink + i * kLanes, shrink);
        }
        float const* in = mScores;
        float* out = mScores;
        for (int64_t left = keys; left > 1; left -= 2, in += 2 * kWidth, out += kWidth)
        {
            for (int32_t i = 0; i < Vectors; ++i)
            {
                Vector const weight = roughPowerOf2(Vector::load(in + i * kLanes) - highest[i]);
                Vector const next = roughPowerOf2(Vector::load(in + kWidth + i * kLanes) - highest[i]);
                total[i] = total[i] + (weight + next);
                Vector::store(out + i * kLanes, pairs(weight, next));
            }
        }
        for (int32_t i = 0; keys % 2 && i < Vectors; ++i)
        {
            Vector const weight = roughPowerOf2(Vector::load(in + i * kLanes) - highest[i]);
            total[i] = total[i] + weight;
            Vector::store(out + i * kLanes, pairs(weight, Vector::of(0.0F)));
        }
    }

    void mixValues(int64_t first, int64_t keys, bool last) const
    {
        int64_t const pitch = valuePitch(mBlock.headSize);
        mBlock.headSize % kLanes ? layValues<false>(first, keys) : layValues<true>(first, keys);
        Mix<Pairs> part{};
        part.weights = mScores;
        part.pitch = kWidth;
        part.v = mRows;
        part.vStride = pitch;
        part.out = static_cast<float*>(mBlock.out);
        part.stride = mBlock.stride;
        part.keys = pairsOf(keys);
        part.before = first ? mShrink : nullptr;
        part.after = last ? mInverse : mOnes;
        mix(part, mBlock.queries, mBlock.headSize);
    }

    Block const& mBlock;
    Lanes const mLanes;
    float* const mPeak; // of each query, all four (kWidth,)
    float* const mShrink; // what the sums so far are worth below a higher peak
    float* const mOnes;
    float* const mInverse; // of each query's total
    float* const mQueries; // (headSize / 2, kWidth)
    float* const mScores; // (keys taken at once, kWidth)
    float* const mRows; // of as many keys, or of their values
};

// Received attention decides which tokens stay. Products with distances, and numbers of 16 bits, are in no file that rounds to bf16.
bool isForFp32(Type type, bool received, bool distances)
{
    return type != Type::kFloat || received || distances;
}

void attend(Block const& block)
{
    bool const exact = isForFp32(block.type, block.received != nullptr, block.distances.keys != nullptr);
    exact ? kAvx512.attend(block) : runFor<Attention>(block);
}

size_t scratch(Type type, int64_t keys, int32_t headSize, bool received, int64_t columns)
{
    if (isForFp32(type, received, columns != 0))
    {
        return kAvx512.scratch(type, keys, headSize, received, columns);
    }
    int64_t const atOnce = keysAtOnce(keys);
    int64_t const ofKeys = atOnce * keyPitch(headSize), ofValues = pairsOf(atOnce) * valuePitch(headSize);
    int64_t const rows = 4 + pairsOf(headSize) + atOnce;
    return static_cast<size_t>(rows * kVectors * kLanes + (ofKeys > ofValues ? ofKeys : ofValues));
}

} // namespace

extern Level const kAvx512Bf16;
Level const kAvx512Bf16{"avx512_bf16", kVectors * kLanes, kLanes, scratch, attend};

} // namespace adtp
