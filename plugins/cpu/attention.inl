// The kernel, for any vector type. Each processor's file defines what tiles.inl says before it includes this.
//
// Queries lie in the lanes of vectors, keys and columns of values are walked. So neither queries, keys nor values are
// copied, but for one transposed block of queries, and no step of the softmax crosses lanes. Blocks of keys are taken
// with a running softmax (Milakov and Gimelshein, arXiv 1805.02867; FlashAttention, Dao et al., NeurIPS 2022). Numbers of
// 16 bits are widened, a block of keys at a time.
//
// Everything is in an unnamed namespace, and nothing of the standard library is called: a function that the linker may
// share between files must not be compiled for one kind of processor.

#include "tiles.inl"
#include "types.h"

namespace adtp
{
namespace
{

// Products of fp32.
struct Single
{
    static Vector add(Vector x, Vector y, Vector sums) { return Vector::multiplyAdd(x, y, sums); }
};

// 2 to the power of x, for x <= 0. With fused multiply-adds it is off by at most 0.94 units in the last place, without by
// 1.21, as measured on every 13th number down to -100. From -125 down it is 0: what is hidden would make sums subnormal, which costs
// far more than all else. NaN stays NaN.
inline Vector powerOf2(Vector x)
{
    x = Vector::max(Vector::of(-125.0F), x);
    Vector const whole = Vector::round(x);
    Vector const part = x - whole; // exact, in [-0.5, 0.5]
    Vector power = Vector::of(0x1.41fbbcp-13F); // minimax of 2^part, relative error 2.0e-9
    power = Vector::multiplyAdd(power, part, Vector::of(0x1.5f3e54p-10F));
    power = Vector::multiplyAdd(power, part, Vector::of(0x1.3b2d4cp-7F));
    power = Vector::multiplyAdd(power, part, Vector::of(0x1.c6aee8p-5F));
    power = Vector::multiplyAdd(power, part, Vector::of(0x1.ebfbdcp-3F));
    power = Vector::multiplyAdd(power, part, Vector::of(0x1.62e430p-1F));
    power = Vector::multiplyAdd(power, part, Vector::of(1.0F));
    return Vector::timesPowerOf2(power, whole) - Vector::of(0x1p-125F);
}

} // namespace
} // namespace adtp

#include "distances.inl"

namespace adtp
{
namespace
{

// received[key] = sum over queries of weights[key][query] / total[query]; with block.itself, without those of key = query.
template <int32_t Vectors>
inline void receive(Block const& block, float* weights, float const* inverse)
{
    constexpr int32_t width = Vectors * kLanes;
    for (int32_t query = 0; block.itself >= 0 && query < block.queries; ++query)
    {
        weights[(block.itself + query) * width + query] = 0.0F;
    }
    Vector share[Vectors];
    for (int32_t i = 0; i < Vectors; ++i)
    {
        float some[kLanes];
        for (int32_t lane = 0; lane < kLanes; ++lane)
        {
            some[lane] = i * kLanes + lane < block.queries ? inverse[i * kLanes + lane] : 0.0F;
        }
        share[i] = Vector::load(some);
    }
    for (int64_t j = 0; j < block.keys; ++j)
    {
        Vector sum = Vector::load(weights + j * width) * share[0];
        for (int32_t i = 1; i < Vectors; ++i)
        {
            sum = Vector::multiplyAdd(Vector::load(weights + j * width + i * kLanes), share[i], sum);
        }
        float some[kLanes];
        Vector::store(some, sum);
        float total = 0.0F;
        for (float const one : some)
        {
            total += one;
        }
        block.received[j] = total;
    }
}

// Rows of weights that a block has at once.
inline int64_t weightRows(int64_t keys, bool received)
{
    return received || keys < kBlockKeys ? keys : kBlockKeys;
}

// Rows of fp32.
struct Rows
{
    float const* data;
    int64_t stride;
};

// Rows of the block's type, as they are or widened into `wide`.
inline Rows rowsOf(Block const& block, void const* data, int64_t stride, int64_t first, int64_t count, float* wide)
{
    void const* const place = at(block.type, data, first * stride);
    if (block.type == Type::kFloat)
    {
        return {static_cast<float const*>(place), stride};
    }
    widen(block.type, place, stride, count, block.headSize, wide);
    return {wide, block.headSize};
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
        , mOut(mQueries + block.headSize * kWidth)
        , mWide(block.type == Type::kFloat ? mOut : mOut + block.headSize * kWidth)
        , mWeights(block.type == Type::kFloat ? mOut : mWide + block.headSize * kBlockKeys)
        , mStep(block.type != Type::kFloat || !block.received ? kBlockKeys : block.keys)
        , mTerms(block, mLanes, mQueries, mWeights + weightRows(block.keys, block.received != nullptr) * kWidth)
    {
    }

    void run()
    {
        Rows const q = rowsOf(mBlock, mBlock.q, mBlock.stride, 0, mBlock.queries, mOut);
        transposeQueries<Vectors>(mBlock, q.data, q.stride, mQueries);
        mTerms.begin();
        Vector total[Vectors];
        for (int32_t i = 0; i < Vectors; ++i)
        {
            total[i] = Vector::of(0.0F);
            Vector::store(mPeak + i * kLanes, Vector::of(kLowest));
            Vector::store(mOnes + i * kLanes, Vector::of(1.0F));
        }
        int64_t const most = mBlock.received ? mBlock.keys : kBlockKeys;
        for (int64_t first = 0; first < mBlock.keys; first += most)
        {
            int64_t const keys = mBlock.keys - first < most ? mBlock.keys - first : most;
            weigh(first, keys, total);
            if (first + keys == mBlock.keys)
            {
                for (int32_t i = 0; i < Vectors; ++i)
                {
                    Vector::store(mInverse + i * kLanes, Vector::of(1.0F) / total[i]);
                }
            }
            mixValues(first, keys);
        }
        if (mBlock.type != Type::kFloat)
        {
            narrow(mBlock.type, mOut, mBlock.stride, mBlock.queries, mBlock.headSize, mBlock.out);
        }
        if (mBlock.received)
        {
            receive<Vectors>(mBlock, mWeights, mInverse);
        }
    }

private:
    static constexpr int32_t kWidth = Vectors * kLanes;
    static constexpr int32_t kTile = kTileKeys<Vectors>;

    // Weights of some keys below the highest score so far; total gets their sums.
    void weigh(int64_t first, int64_t keys, Vector (&total)[Vectors]) const
    {
        Vector highest[Vectors];
        for (int32_t i = 0; i < Vectors; ++i)
        {
            highest[i] = Vector::load(mPeak + i * kLanes);
        }
        for (int64_t step = 0; step < keys; step += mStep)
        {
            score(first + step, keys - step < mStep ? keys - step : mStep, mWeights + step * kWidth);
        }
        for (int32_t i = 0; i < Vectors; ++i)
        {
            Vector const old = highest[i];
            highest[i] = Vector::load(mPeak + i * kLanes);
            Vector const shrink = powerOf2(old - highest[i]);
            total[i] = total[i] * shrink;
            Vector::store(mShrink + i * kLanes, shrink);
        }
        for (int64_t j = 0; j < keys * Vectors; j += Vectors)
        {
            for (int32_t i = 0; i < Vectors; ++i)
            {
                float* const place = mWeights + (j + i) * kLanes;
                Vector const weight = powerOf2(Vector::load(place) - highest[i]);
                Vector::store(place, weight);
                total[i] = total[i] + weight;
            }
        }
    }

    void score(int64_t first, int64_t keys, float* scores) const
    {
        Rows const k = rowsOf(mBlock, mBlock.k, mBlock.keyStride, first, keys, mWide);
        for (int64_t j = 0; j < keys; j += kTile)
        {
            int64_t const key = first + j;
            int64_t const left = keys - j < kTile ? keys - j : kTile;
            if (mTerms.there())
            {
                mTerms.start(key, left, k.data + j * k.stride, k.stride, scores + j * kWidth);
            }
            bool const started = mTerms.there() || startIfNeeded<Vectors>(mBlock, mLanes, key, left, scores + j * kWidth);
            Scores<Vectors, Single> const part{
                mQueries, k.data + j * k.stride, k.stride, mBlock.headSize, scores + j * kWidth, mPeak, started};
            dispatch<kTile>(left, part);
        }
    }

    void mixValues(int64_t first, int64_t keys) const
    {
        bool const wide = mBlock.type == Type::kFloat;
        for (int64_t step = 0; step < keys; step += mStep)
        {
            int64_t const left = keys - step < mStep ? keys - step : mStep;
            Rows const v = rowsOf(mBlock, mBlock.v, mBlock.keyStride, first + step, left, mWide);
            Mix<Single> part{};
            part.weights = mWeights + step * kWidth;
            part.pitch = kWidth;
            part.v = v.data;
            part.vStride = v.stride;
            part.out = wide ? static_cast<float*>(mBlock.out) : mOut;
            part.stride = wide ? mBlock.stride : mBlock.headSize;
            part.keys = left;
            part.before = step ? mOnes : first ? mShrink : nullptr;
            part.after = first + step + left == mBlock.keys ? mInverse : mOnes;
            mix(part, mBlock.queries, mBlock.headSize);
        }
    }

    Block const& mBlock;
    Lanes const mLanes;
    float* const mPeak; // of each query, all four (kWidth,)
    float* const mShrink; // what the sums so far are worth below a higher peak
    float* const mOnes;
    float* const mInverse; // of each query's total
    float* const mQueries; // (headSize, kWidth)
    float* const mOut; // (kWidth, headSize) in fp32 and (kBlockKeys, headSize) of keys or values, of 16-bit blocks alone
    float* const mWide;
    float* const mWeights; // (keys taken at once, kWidth)
    int64_t const mStep; // keys that are scored and mixed at once
    Terms<Vectors> const mTerms;
};

void attend(Block const& block)
{
    runFor<Attention>(block);
}

size_t scratch(Type type, int64_t keys, int32_t headSize, bool received, int64_t columns)
{
    int64_t const widened = type == Type::kFloat ? 0 : headSize * (kVectors * kLanes + kBlockKeys);
    int64_t const rows = headSize + 4 + weightRows(keys, received);
    return static_cast<size_t>(rows * kVectors * kLanes + widened + distancesScratch(columns));
}

} // namespace
} // namespace adtp
