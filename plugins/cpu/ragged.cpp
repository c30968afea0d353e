#include "ragged.h"

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

} // namespace

Ragged::Ragged(Call const& call, Level const& level)
    : mCall(call)
    , mLevel(level)
{
    int64_t partial = 0;
    for (int64_t b = 0; b < mCall.sequences; ++b)
    {
        Place const it = place(b);
        mCost += mCall.numHeads * it.blocks * it.cost;
        mLongest = std::max(mLongest, it.keys);
        partial += mCall.numHeads * it.blocks * it.keys;
    }
    int64_t const products = mCost * mLevel.queries * mCall.headSize * 2;
    mPieces = mCost == 0 ? 0 : std::clamp<int64_t>(products / kPieceCost, 1, kMostPieces);
    if (mCall.received && mPieces > 0)
    {
        mPartial.reset(new (std::nothrow) float[static_cast<size_t>(partial)]);
    }
}

Ragged::Place Ragged::place(int64_t sequence) const
{
    int64_t const keys = int64_t{mCall.bounds[sequence + 1]} - mCall.bounds[sequence];
    return {keys, (keys + mLevel.queries - 1) / mLevel.queries, keys + kFixedCost};
}

bool Ragged::run(int64_t piece) const
{
    auto const headSize = static_cast<int32_t>(mCall.headSize);
    size_t const scratch = mLevel.scratch(mLongest, headSize, mCall.received != nullptr);
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
    int64_t const stride = mCall.numHeads * mCall.headSize;
    int64_t done = 0; // work of the sequences before
    float* partial = mPartial.get();
    for (int64_t b = 0; b < mCall.sequences && done < end; ++b)
    {
        Place const it = place(b);
        int64_t const blocks = mCall.numHeads * it.blocks;
        auto const from = [&](int64_t work) { // the first block that begins there or later
            return work <= done ? 0 : std::min((work - done + it.cost - 1) / it.cost, blocks);
        };
        int64_t const row = mCall.bounds[b];
        int64_t const last = from(end);
        for (int64_t block = from(begin); block < last; ++block)
        {
            int64_t const column = block / it.blocks * mCall.headSize;
            int64_t const query = block % it.blocks * mLevel.queries;
            int64_t const keys = row * stride + column;
            int64_t const first = (row + query) * stride + column;
            mLevel.attend({mCall.q + first, mCall.k + keys, mCall.v + keys, mCall.out + first, stride, it.keys,
                static_cast<int32_t>(std::min<int64_t>(it.keys - query, mLevel.queries)), headSize, mCall.scale,
                partial ? partial + block * it.keys : nullptr, static_cast<float*>(aligned)});
        }
        done += blocks * it.cost;
        partial = partial ? partial + blocks * it.keys : nullptr;
    }
    return true;
}

void Ragged::finish() const
{
    if (!mCall.received)
    {
        return;
    }
    float const* partial = mPartial.get();
    for (int64_t b = 0; b < mCall.sequences; ++b)
    {
        Place const it = place(b);
        float* const received = mCall.received + mCall.bounds[b];
        std::fill_n(received, it.keys, 0.0F);
        for (int64_t block = 0; block < mCall.numHeads * it.blocks; ++block, partial += it.keys)
        {
            for (int64_t key = 0; key < it.keys; ++key)
            {
                received[key] += partial[key];
            }
        }
    }
}

} // namespace adtp
