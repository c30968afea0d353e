// Compiled with AVX-512 (F, BW, DQ, BF16) and AMX (TILE, BF16); runs only where that is. Both products of attention in tiles, so fast that
// most of a block's time is the softmax.
//
// A tile of keys as they are laid out, times one of queries, gives scores of 16 keys. Weights are turned while they are computed, so that
// each row of a tile belongs to one query.
#include "amx.h"
#include "bf16.inl"

namespace adtp
{
namespace
{

constexpr int64_t kBytes = sizeof(float);
constexpr int32_t kMostColumns = 4; // tiles of sums

// GCC's intrinsics take the number of a tile as it is written, so these are macros.
#define ADTP_BEGIN(column) \
    if constexpr (Columns > column) \
    { \
        if (started) \
        { \
            _tile_loadd(column, out + column * kTileRows, kBytes * outPitch); \
        } \
        else \
        { \
            _tile_zero(column); \
        } \
    }
#define ADTP_ADD(column, of_y) \
    if constexpr (Columns > column) \
    { \
        _tile_loadd(of_y, y + column * kTileRows, kBytes * yPitch); \
        _tile_dpbf16ps(column, 4, of_y); \
    }
#define ADTP_END(column) \
    if constexpr (Columns > column) \
    { \
        _tile_stored(column, out + column * kTileRows, kBytes * outPitch); \
    }

// out[16][16 * Columns] = x[16][pairs] * y[pairs][16 * Columns], over `tiles` tiles of pairs; added to what is there where that is
// `started`. Pitches count elements.
template <int32_t Columns>
inline void multiply(
    float const* x, int64_t xPitch, float const* y, int64_t yPitch, int64_t tiles, bool started, float* out, int64_t outPitch)
{
    static_assert(Columns <= kMostColumns && kLanes == kTileRows, "each has a tile of sums");
    ADTP_BEGIN(0)
    ADTP_BEGIN(1)
    ADTP_BEGIN(2)
    ADTP_BEGIN(3)
    for (int64_t t = 0; t < tiles; ++t, x += kLanes, y += kLanes * yPitch)
    {
        _tile_loadd(4, x, kBytes * xPitch);
        ADTP_ADD(0, 5)
        ADTP_ADD(1, 6)
        ADTP_ADD(2, 7)
        ADTP_ADD(3, 5)
    }
    ADTP_END(0)
    ADTP_END(1)
    ADTP_END(2)
    ADTP_END(3)
}

#undef ADTP_BEGIN
#undef ADTP_ADD
#undef ADTP_END

// How many tiles hold pairs of so many keys.
inline int64_t tilesOf(int64_t keys)
{
    return (keys + 2 * kTileRows - 1) / (2 * kTileRows);
}

// Pairs of keys in a row of weights.
inline int64_t weightPitch(int64_t keys)
{
    return tilesOf(keysAtOnce(keys)) * kLanes;
}

template <int32_t Vectors>
class Attention
{
public:
    explicit Attention(Block const& block)
        : mBlock(block)
        , mLanes(block)
        , mSoftmax(block.scratch)
        , mQueries(block.scratch + Softmax<Vectors>::kSize)
        , mSums(mQueries + keyPitch(block.headSize) * kWidth)
        , mScores(mSums + valuePitch(block.headSize) * kWidth)
        , mWeights(mScores + multipleOf(kTileRows, keysAtOnce(block.keys)) * kWidth)
        , mKeys(mWeights + weightPitch(block.keys) * kWidth)
        , mValues(mKeys + multipleOf(kTileRows, keysAtOnce(block.keys)) * keyPitch(block.headSize))
    {
    }

    void run()
    {
        layQueries<Vectors>(mBlock, mQueries);
        prefetchOut();
        for (int64_t first = 0; first < mBlock.keys; first += kBlockKeys)
        {
            int64_t const keys = keysAtOnce(mBlock.keys - first);
            layKeys(mBlock, first, keys, mKeys);
            layValues(mBlock, first, keys, mValues);
            padValues(keys);
            score(first, keys);
            raise(keys);
            mSoftmax.shrinkToPeak();
            weigh(keys);
            mixValues(first, keys);
        }
        give();
    }

private:
    static constexpr int32_t kWidth = Vectors * kLanes;

    // Early, because `give` would wait for the memory that it writes.
    void prefetchOut() const
    {
        auto row = static_cast<char const*>(mBlock.out);
        for (int32_t query = 0; query < mBlock.queries; ++query, row += kBytes * mBlock.stride)
        {
            for (int64_t byte = 0; byte < kBytes * mBlock.headSize; byte += kTileBytes)
            {
                __builtin_prefetch(row + byte, 1);
            }
        }
    }

    // Tiles read more values than there are: they get zeros there.
    void padValues(int64_t keys) const
    {
        int64_t const pitch = valuePitch(mBlock.headSize), past = tilesOf(keys) * kTileRows * pitch;
        for (int64_t i = pairsOf(keys) * pitch; i < past; i += kLanes)
        {
            Vector::store(mValues + i, Vector::of(0.0F));
        }
    }

    // Tiles are whole, so they also read and write rows behind the last key, which nothing else reads.
    void score(int64_t first, int64_t keys) const
    {
        int64_t const pitch = keyPitch(mBlock.headSize);
        for (int64_t j = 0; j < keys; j += kTileRows)
        {
            int64_t const left = keys - j < kTileRows ? keys - j : kTileRows;
            float* const scores = mScores + j * kWidth;
            bool const started = startIfNeeded<Vectors>(mBlock, mLanes, first + j, left, scores);
            storeForTiles();
            multiply<Vectors>(mKeys + j * pitch, pitch, mQueries, kWidth, pitch / kLanes, started, scores, kWidth);
        }
    }

    // After all products: what a tile has just stored is slow to load.
    void raise(int64_t keys) const
    {
        for (int32_t i = 0; i < Vectors; ++i)
        {
            constexpr int32_t turns = 4; // a maximum does not wait for the one before it
            Vector highest[turns];
            for (Vector& one : highest)
            {
                one = mSoftmax.highest[i];
            }
            float const* score = mScores + i * kLanes;
            int64_t left = keys;
            for (; left >= turns; left -= turns, score += turns * kWidth)
            {
                for (int32_t j = 0; j < turns; ++j)
                {
                    highest[j] = Vector::max(Vector::load(score + j * kWidth), highest[j]);
                }
            }
            for (; left > 0; --left, score += kWidth)
            {
                highest[0] = Vector::max(Vector::load(score), highest[0]);
            }
            Vector const all = Vector::max(Vector::max(highest[0], highest[1]), Vector::max(highest[2], highest[3]));
            Vector::store(mSoftmax.peak + i * kLanes, all);
        }
    }

    // Weights relative to the peak, turned 32 keys at a time.
    void weigh(int64_t keys)
    {
        int64_t const pitch = weightPitch(mBlock.keys), whole = keys - keys % (2 * kLanes);
        for (int32_t i = 0; i < Vectors; ++i)
        {
            float const* const scores = mScores + i * kLanes;
            float* const weights = mWeights + i * kLanes * pitch;
            for (int64_t key = 0; key < whole; key += 2 * kLanes)
            {
                turn<true>(scores + key * kWidth, 2 * kLanes, i, weights + key / 2);
            }
            if (whole < keys)
            {
                turn<false>(scores + whole * kWidth, keys - whole, i, weights + whole / 2);
            }
        }
    }

    // Of up to 32 keys and 16 queries, whose rows they become; zeros for keys that are not there.
    template <bool Whole>
    void turn(float const* scores, int64_t keys, int32_t i, float* weights)
    {
        Vector const none = Vector::of(0.0F);
        Vector square[kLanes];
        Vector total = mSoftmax.total[i];
        for (int32_t pair = 0; pair < kLanes; ++pair, scores += 2 * kWidth)
        {
            Vector const weight = Whole || 2 * pair < keys ? mSoftmax.weight(scores, i) : none;
            Vector const next = Whole || 2 * pair + 1 < keys ? mSoftmax.weight(scores + kWidth, i) : none;
            total = total + (weight + next);
            square[pair] = pairs(weight, next);
        }
        mSoftmax.total[i] = total;
        Vector::transpose(square);
        for (int32_t query = 0; query < kLanes; ++query)
        {
            Vector::store(weights + query * weightPitch(mBlock.keys), square[query]);
        }
    }

    struct MixTiles
    {
        float const* weights;
        int64_t weightPitch;
        float const* values;
        int64_t pitch; // of values and sums
        int64_t tiles; // of keys
        bool started;
        float* sums;

        template <int32_t Columns>
        void run() const
        {
            multiply<Columns>(weights, weightPitch, values, pitch, tiles, started, sums, pitch);
        }
    };

    void mixValues(int64_t first, int64_t keys) const
    {
        int64_t const pitch = valuePitch(mBlock.headSize);
        for (int32_t query = 0; first && query < mBlock.queries; ++query)
        {
            multiplyRow(mSums + query * pitch, mSoftmax.shrink[query], mSums + query * pitch, static_cast<int32_t>(pitch));
        }
        storeForTiles();
        MixTiles part{mWeights, weightPitch(mBlock.keys), nullptr, pitch, tilesOf(keys), first != 0, nullptr};
        for (int32_t i = 0; i < Vectors; ++i, part.weights += kTileRows * part.weightPitch)
        {
            for (int64_t column = 0; column < pitch; column += kMostColumns * kLanes)
            {
                part.values = mValues + column;
                part.sums = mSums + i * kTileRows * pitch + column;
                dispatch<kMostColumns>((pitch - column) / kLanes, part);
            }
        }
    }

    void give()
    {
        mSoftmax.finish();
        auto out = static_cast<float*>(mBlock.out);
        for (int32_t query = 0; query < mBlock.queries; ++query, out += mBlock.stride)
        {
            multiplyRow(mSums + query * valuePitch(mBlock.headSize), mSoftmax.inverse[query], out, mBlock.headSize);
        }
    }

    static void multiplyRow(float const* row, float factor, float* out, int32_t size)
    {
        for (int32_t d = 0; d < size; d += kLanes)
        {
            Vector const scaled = Vector::load(row + d) * Vector::of(factor);
            size - d < kLanes ? Vector::storeSome(out + d, scaled, size - d) : Vector::store(out + d, scaled);
        }
    }

    Block const& mBlock;
    Lanes const mLanes;
    Softmax<Vectors> mSoftmax;
    float* const mQueries; // (headSize / 2, kWidth), pairs of columns
    float* const mSums; // (kWidth, headSize) of weights times values
    float* const mScores; // (keys taken at once, kWidth)
    float* const mWeights; // (kWidth, keys / 2), pairs of as many keys
    float* const mKeys; // (keys, headSize / 2), pairs of columns
    float* const mValues; // (keys / 2, headSize), pairs of keys
};

void attend(Block const& block)
{
    Tiles const tiles;
    runFor<Attention>(block);
}

size_t scratch(Type, int64_t keys, int32_t headSize, bool, int64_t)
{
    int64_t const atOnce = multipleOf(kTileRows, keysAtOnce(keys));
    int64_t const rows = keyPitch(headSize) + valuePitch(headSize) + atOnce + weightPitch(keys);
    int64_t const laid = atOnce * keyPitch(headSize) + weightPitch(keys) * valuePitch(headSize);
    return static_cast<size_t>(Softmax<kVectors>::kSize + rows * kVectors * kLanes + laid);
}

} // namespace

extern Level const kAmx;
Level const kAmx{"amx", kVectors * kLanes, scratch, attend, &kAvx512};

} // namespace adtp
