// Compiled with AVX-512 (F, BW, DQ, BF16); runs only where that is. Attention with products of pairs of bf16, at twice fp32's rate.
//
// Each block of queries lays a block of keys, and then one of values, out in pairs, which takes a seventh of its time.
#include "bf16.inl"

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

template <int32_t Vectors>
class Attention
{
public:
    explicit Attention(Block const& block)
        : mBlock(block)
        , mLanes(block)
        , mSoftmax(block.scratch)
        , mOnes(block.scratch + Softmax<Vectors>::kSize)
        , mQueries(mOnes + kWidth)
        , mScores(mQueries + keyPitch(block.headSize) * kWidth)
        , mRows(mScores + keysAtOnce(block.keys) * kWidth)
    {
    }

    void run()
    {
        layQueries<Vectors>(mBlock, mQueries);
        for (int32_t i = 0; i < Vectors; ++i)
        {
            Vector::store(mOnes + i * kLanes, Vector::of(1.0F));
        }
        for (int64_t first = 0; first < mBlock.keys; first += kBlockKeys)
        {
            int64_t const keys = keysAtOnce(mBlock.keys - first);
            layKeys(mBlock, first, keys, mRows);
            score(first, keys);
            mSoftmax.shrinkToPeak();
            weigh(keys);
            bool const last = first + keys == mBlock.keys;
            if (last)
            {
                mSoftmax.finish();
            }
            layValues(mBlock, first, keys, mRows);
            mixValues(first, keys, last);
        }
    }

private:
    static constexpr int32_t kWidth = Vectors * kLanes;

    void score(int64_t first, int64_t keys) const
    {
        constexpr int32_t tile = kTileKeys<Vectors>;
        int64_t const pitch = keyPitch(mBlock.headSize);
        auto const columnPairs = static_cast<int32_t>(pairsOf(mBlock.headSize));
        for (int64_t j = 0; j < keys; j += tile)
        {
            int64_t const left = keys - j < tile ? keys - j : tile;
            bool const started = startIfNeeded<Vectors>(mBlock, mLanes, first + j, left, mScores + j * kWidth);
            Scores<Vectors, Pairs> const part{
                mQueries, mRows + j * pitch, pitch, columnPairs, mScores + j * kWidth, mSoftmax.peak, started};
            dispatch<tile>(left, part);
        }
    }

    // Weights below the peak, as pairs of keys, where scores were.
    void weigh(int64_t keys)
    {
        Softmax<Vectors> softmax = mSoftmax; // in registers: what is stored could change a member
        float const* in = mScores;
        float* out = mScores;
        for (int64_t left = keys; left > 1; left -= 2, in += 2 * kWidth, out += kWidth)
        {
            for (int32_t i = 0; i < Vectors; ++i)
            {
                Vector const weight = softmax.weight(in + i * kLanes, i), next = softmax.weight(in + kWidth + i * kLanes, i);
                softmax.total[i] = softmax.total[i] + (weight + next);
                Vector::store(out + i * kLanes, pairs(weight, next));
            }
        }
        for (int32_t i = 0; keys % 2 && i < Vectors; ++i)
        {
            Vector const weight = softmax.weight(in + i * kLanes, i);
            softmax.total[i] = softmax.total[i] + weight;
            Vector::store(out + i * kLanes, pairs(weight, Vector::of(0.0F)));
        }
        mSoftmax = softmax;
    }

    void mixValues(int64_t first, int64_t keys, bool last) const
    {
        Mix<Pairs> part{};
        part.weights = mScores;
        part.pitch = kWidth;
        part.v = mRows;
        part.vStride = valuePitch(mBlock.headSize);
        part.out = static_cast<float*>(mBlock.out);
        part.stride = mBlock.stride;
        part.keys = pairsOf(keys);
        part.before = first ? mSoftmax.shrink : nullptr;
        part.after = last ? mSoftmax.inverse : mOnes;
        mix(part, mBlock.queries, mBlock.headSize);
    }

    Block const& mBlock;
    Lanes const mLanes;
    Softmax<Vectors> mSoftmax;
    float* const mOnes; // (kWidth,)
    float* const mQueries; // (headSize / 2, kWidth)
    float* const mScores; // (keys taken at once, kWidth)
    float* const mRows; // of as many keys, or of their values
};

void attend(Block const& block)
{
    runFor<Attention>(block);
}

size_t scratch(Type, int64_t keys, int32_t headSize, bool, int64_t)
{
    int64_t const atOnce = keysAtOnce(keys);
    int64_t const ofKeys = atOnce * keyPitch(headSize), ofValues = pairsOf(atOnce) * valuePitch(headSize);
    int64_t const rows = 1 + keyPitch(headSize) + atOnce;
    return static_cast<size_t>(Softmax<kVectors>::kSize + rows * kVectors * kLanes + (ofKeys > ofValues ? ofKeys : ofValues));
}

} // namespace

extern Level const kAvx512Bf16;
Level const kAvx512Bf16{"avx512_bf16", kVectors * kLanes, scratch, attend, &kAvx512};

} // namespace adtp
