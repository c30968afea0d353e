#include "ragged.h"

#include "reach.h"
#include "types.h"

#include <algorithm>
#include <new>

namespace adtp
{
namespace
{

constexpr int64_t kFixedCost = 16; // of a block of queries, in keys
constexpr int64_t kPieceCost = 1 << 18; // multiply-adds that are worth a thread's while
constexpr int64_t kMostPieces = 512;
constexpr size_t kAlignment = 64;

float number(Type type, void const* data, int64_t element)
{
    void const* const place = at(type, data, element);
    switch (type)
    {
    case Type::kHalf: return fromHalf(*static_cast<uint16_t const*>(place));
    case Type::kBfloat: return fromBfloat(*static_cast<uint16_t const*>(place));
    default: return *static_cast<float const*>(place);
    }
}

// Received attention decides which tokens stay. Products with distances, and numbers of 16 bits, are in no file that rounds to bf16.
bool mustBeExact(Call const& call)
{
    return call.received || call.buckets || call.type != Type::kFloat;
}

} // namespace

Ragged::Ragged(Call const& call, Level const& level)
    : mCall(call)
    , mLevel(level.exact && mustBeExact(call) ? *level.exact : level)
    , mPlaces(new (std::nothrow) Place[static_cast<size_t>(call.sequences)])
{
    if (!mPlaces || (hasReach(mCall) && !look()) || (mCall.table && !layBiases()) || (mCall.buckets && !layDistances()))
    {
        return;
    }
    int64_t seen = 0;
    for (int64_t b = 0; b < mCall.sequences; ++b)
    {
        place(b);
        mCost += mPlaces[b].heads * mPlaces[b].cost;
        seen += mCall.numHeads * mPlaces[b].seen;
    }
    if (mCall.received)
    {
        mPartial.reset(new (std::nothrow) float[static_cast<size_t>(seen)]);
    }
    mReady = !mCall.received || mPartial;
    int64_t const products = mCost * mLevel.queries * mCall.headSize * 2;
    mPieces = mCost == 0 || !mReady ? 0 : std::clamp<int64_t>(products / kPieceCost, 1, kMostPieces);
}

// Find which keys each query sees. False: there is no memory.
bool Ragged::look()
{
    mSeen.reset(new (std::nothrow) int32_t[static_cast<size_t>(2 * mCall.tokens)]);
    for (int64_t b = 0; mSeen && b < mCall.sequences; ++b)
    {
        int32_t* const first = mSeen.get() + mCall.bounds[b];
        int32_t* const end = first + mCall.tokens;
        eachReach(mCall, b, [&](int32_t query, int32_t from, int32_t to) {
            first[query] = from;
            end[query] = to;
        });
    }
    return mSeen != nullptr;
}

// Lay each head's biases out by distance. False: there is no memory.
bool Ragged::layBiases()
{
    for (int64_t i = 0; i < mCall.tokens; ++i)
    {
        mReach = std::max<int64_t>(mReach, mCall.positions[i]);
    }
    mBiases.reset(new (std::nothrow) float[static_cast<size_t>(mCall.numHeads * pitch())]());
    for (int64_t distance = -mReach; mBiases && distance <= mReach; ++distance)
    {
        int64_t const row = mCall.tableRows / 2 - distance; // the table's distances are from query to key
        for (int64_t head = 0; head < mCall.numHeads; ++head)
        {
            mBiases[static_cast<size_t>(head * pitch() + mReach + distance)]
                = number(mCall.type, mCall.table, row * mCall.numHeads + head) * kLog2E;
        }
    }
    return mBiases != nullptr;
}

// Lay out in fp32 the columns that the longest text needs. False: there is no memory.
bool Ragged::layDistances()
{
    int64_t span = 0;
    for (int64_t b = 0; b < mCall.sequences; ++b)
    {
        if (mCall.bounds[b] != mCall.bounds[b + 1])
        {
            int32_t const last = mCall.positions[mCall.bounds[b + 1] - 1];
            span = std::max<int64_t>(span, int64_t{last} - mCall.positions[mCall.bounds[b]]);
        }
    }
    int64_t const reach = mCall.numBuckets / 2;
    span = std::min(span, reach);
    mFirstColumn = mCall.buckets[reach - span];
    mColumns = int64_t{mCall.buckets[reach + span]} - mFirstColumn + 1;
    int64_t const line = static_cast<int64_t>(kAlignment / sizeof(float));
    mDistancePitch = (mColumns / (2 * line) * 2 + 3) * line; // an odd number of lines: rows do not share a cache's sets
    int64_t const rows = mCall.numHeads * mCall.headSize;
    mDistances.reset(new (std::nothrow) float[static_cast<size_t>(2 * rows * mDistancePitch)]());
    float* out = mDistances.get();
    for (void const* const table : {mCall.distanceKeys, mCall.distanceQueries})
    {
        for (int64_t row = 0; out && row < rows; ++row, out += mDistancePitch)
        {
            void const* const from = at(mCall.type, table, row * mCall.columns + mFirstColumn);
            if (mCall.type == Type::kFloat)
            {
                std::copy_n(static_cast<float const*>(from), mColumns, out);
            }
            else
            {
                widen(mCall.type, from, 0, 1, static_cast<int32_t>(mColumns), out);
            }
        }
    }
    return out != nullptr;
}

Distances Ragged::distances(int64_t head) const
{
    if (!mDistances)
    {
        return {};
    }
    float const* const keys = mDistances.get() + head * mCall.headSize * mDistancePitch;
    float const* const queries = keys + mCall.numHeads * mCall.headSize * mDistancePitch;
    int64_t const reach = mCall.numBuckets / 2;
    return {keys, queries, mDistancePitch, mFirstColumn, mCall.buckets + reach, reach};
}

void Ragged::place(int64_t sequence)
{
    Place& it = mPlaces[sequence];
    it.queries = int64_t{mCall.bounds[sequence + 1]} - mCall.bounds[sequence];
    it.heads = mCall.numHeads;
    if (it.queries == 1 && !mCall.received)
    {
        // As in generation, a token at a time. The heads of a group see the same keys, which are read once for all of them.
        it.heads = mCall.keyHeads;
        it.queries = mCall.numHeads / mCall.keyHeads;
    }
    it.keys = int64_t{mCall.keyBounds[sequence + 1]} - mCall.keyBounds[sequence];
    it.blocks = (it.queries + mLevel.queries - 1) / mLevel.queries;
    it.seen = 0;
    for (int64_t index = 0; index < it.blocks; ++index)
    {
        int64_t const keys = span(sequence, index).keys;
        it.seen += keys;
        mMostKeys = std::max(mMostKeys, keys);
    }
    it.cost = it.seen + it.blocks * kFixedCost;
}

Ragged::Span Ragged::span(int64_t sequence, int64_t block) const
{
    Place const& it = mPlaces[sequence];
    if (!mSeen)
    {
        return {0, it.keys};
    }
    bool const grouped = sharesKeys(it);
    int64_t const query = grouped ? 0 : block * mLevel.queries;
    int64_t const last = grouped ? 0 : std::min(query + mLevel.queries, it.queries) - 1;
    int32_t const* const first = mSeen.get() + mCall.bounds[sequence];
    return {first[query], first[mCall.tokens + last] - first[query]};
}

Block Ragged::block(int64_t sequence, int64_t head, int64_t index, Span keys) const
{
    Place const& it = mPlaces[sequence];
    bool const grouped = sharesKeys(it);
    int64_t const query = index * mLevel.queries;
    int64_t const row = mCall.bounds[sequence] + (grouped ? 0 : query);
    int64_t const keyRow = mCall.keyBounds[sequence] + keys.first;
    int64_t const width = mCall.numHeads * mCall.headSize;
    int64_t const stride = grouped ? mCall.headSize : width;
    int64_t const keyStride = mCall.keyHeads * mCall.headSize;
    int64_t const key = keyRow * keyStride + head * mCall.keyHeads / it.heads * mCall.headSize;
    int64_t const own = mCall.bounds[sequence] * width + head * (width / it.heads) + query * stride;
    Block made{};
    made.type = mCall.type;
    made.q = at(mCall.type, mCall.q, own);
    made.k = at(mCall.type, mCall.k, key);
    made.v = at(mCall.type, mCall.v, key);
    made.out = at(mCall.type, mCall.out, own);
    made.stride = stride;
    made.keyStride = keyStride;
    made.keys = keys.keys;
    made.queries = static_cast<int32_t>(std::min<int64_t>(it.queries - query, mLevel.queries));
    made.headSize = static_cast<int32_t>(mCall.headSize);
    made.scale = mCall.scale;
    bool const differs = mSeen && !grouped; // what the queries see
    made.from = differs ? mSeen.get() + row : nullptr;
    made.to = differs ? mSeen.get() + mCall.tokens + row : nullptr;
    made.firstKey = keys.first;
    made.bias = mBiases ? mBiases.get() + head * pitch() + mReach : nullptr;
    made.distances = distances(head);
    bool const placed = mBiases || mDistances;
    made.positions = placed ? mCall.positions + row : nullptr;
    made.keyPositions = placed ? mCall.keyPositions + keyRow : nullptr;
    made.itself = mCall.fromOthers ? query - keys.first : -1;
    return made;
}

bool Ragged::run(int64_t piece) const
{
    auto const headSize = static_cast<int32_t>(mCall.headSize);
    size_t const scratch = mLevel.scratch(mCall.type, mMostKeys, headSize, mCall.received != nullptr, mColumns);
    std::unique_ptr<float[]> const memory(new (std::nothrow) float[scratch + kAlignment / sizeof(float)]);
    if (!memory)
    {
        return false;
    }
    void* aligned = memory.get();
    size_t space = scratch * sizeof(float) + kAlignment;
    std::align(kAlignment, scratch * sizeof(float), aligned, space);

    // The blocks whose work begins in this piece's share of all work.
    int64_t const begin = mCost * piece / mPieces;
    int64_t const end = mCost * (piece + 1) / mPieces;
    int64_t done = 0; // work of the sequences before
    float* partial = mPartial.get();
    for (int64_t b = 0; b < mCall.sequences && done < end; ++b)
    {
        Place const& it = mPlaces[b];
        int64_t const firstHead = it.blocks && begin > done ? std::min((begin - done) / it.cost, it.heads) : 0;
        for (int64_t head = firstHead; head < it.heads && done + head * it.cost < end; ++head)
        {
            int64_t work = done + head * it.cost;
            float* received = partial ? partial + head * it.seen : nullptr;
            for (int64_t index = 0; index < it.blocks; ++index)
            {
                Span const keys = span(b, index);
                if (begin <= work && work < end)
                {
                    Block one = block(b, head, index, keys);
                    one.received = received;
                    one.scratch = static_cast<float*>(aligned);
                    mLevel.attend(one);
                }
                work += keys.keys + kFixedCost;
                received = received ? received + keys.keys : nullptr;
            }
        }
        done += it.heads * it.cost;
        partial = partial ? partial + mCall.numHeads * it.seen : nullptr;
    }
    return true;
}

void Ragged::finish() const
{
    if (!mCall.received)
    {
        return;
    }
    std::fill_n(mCall.received, mCall.keys, 0.0F);
    float const* partial = mPartial.get();
    for (int64_t b = 0; b < mCall.sequences; ++b)
    {
        for (int64_t block = 0; block < mCall.numHeads * mPlaces[b].blocks; ++block)
        {
            Span const keys = span(b, block % mPlaces[b].blocks);
            float* const received = mCall.received + mCall.keyBounds[b] + keys.first;
            for (int64_t key = 0; key < keys.keys; ++key)
            {
                received[key] += *partial++;
            }
        }
        if (mCall.isMean)
        {
            average(b);
        }
    }
}

// Divide what each key received by the number of queries that see it. Both ends of what they see rise, so counts of both do.
void Ragged::average(int64_t sequence) const
{
    Place const& it = mPlaces[sequence];
    int32_t const* const first = mSeen.get() + mCall.bounds[sequence];
    int32_t const* const past = first + mCall.tokens;
    for (int64_t key = 0, begun = 0, ended = 0; key < it.keys; ++key)
    {
        while (begun < it.queries && first[begun] <= key)
        {
            ++begun;
        }
        while (ended < it.queries && past[ended] <= key)
        {
            ++ended;
        }
        mCall.received[mCall.keyBounds[sequence] + key] /= static_cast<float>(std::max<int64_t>(begun - ended, 1));
    }
}

} // namespace adtp
