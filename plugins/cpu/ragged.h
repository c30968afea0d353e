// One call of an operator, divided into pieces of equal work that threads may take in any order.
#pragma once

#include "attention.h"

#include <memory>

namespace adtp
{

struct Call
{
    void const* q; // (T, N*D) of `type`, contiguous, and so is out
    void const* k; // (T', M*D) of `type`, contiguous, and so is v
    void const* v;
    void* out;
    float* received; // (T',) or null
    int32_t const* bounds; // (B+1,), of queries: from 0 to T, rising
    int32_t const* keyBounds; // (B+1,), of keys: from 0 to T', rising
    int32_t const* positions; // (T,), of queries, where a table or a reach is: from 0 on, rising in each sequence
    int32_t const* keyPositions; // (T',), of keys; the same numbers as those of queries where keys are the same tokens
    void const* table; // (2P-1, N) of `type`, biases by distance, positions below P; null: none
    void const* distanceKeys; // (N*D, rows) of `type`: a query's score gets its product with the column of the distance; null: none
    void const* distanceQueries; // the same of keys
    int32_t const* buckets; // (numBuckets,): the column of each distance from key to query, rising; the middle one is that of 0
    int64_t tokens; // T
    int64_t keys; // T'
    int64_t sequences; // B
    int64_t numHeads; // N
    int64_t keyHeads; // M, a divisor of N
    int64_t headSize; // D
    int64_t tableRows; // 2P-1
    int64_t columns; // of distanceKeys and distanceQueries
    int64_t numBuckets; // odd
    int64_t back; // a query sees keys so far before its position, and so far ahead of it; -1: any
    int64_t ahead;
    float scale;
    Type type;
    int32_t fromOthers; // whether `received` leaves out what a token gives itself; keys are the queries then
    int32_t isMean; // whether `received` is divided by the number of queries that see the key; a reach is bounded then
    int32_t grouped; // whether bounds are called cu_q and cu_k, for messages alone
};

// What is wrong with the numbers of a call, whose sizes are right; null where nothing is.
char const* refusal(Call const& call);

class Ragged
{
public:
    // The call must not be one that `refusal` refuses.
    Ragged(Call const& call, Level const& level);

    // How many pieces there are; 0 where there is nothing to do.
    int64_t pieces() const { return mPieces; }

    // Compute one piece. False: there is no memory for it.
    bool run(int64_t piece) const;

    // Sum up what tokens received, after all pieces.
    void finish() const;

    // Whether there was memory for what pieces share.
    bool ready() const { return mReady; }

private:
    struct Place // of a sequence in the order of work
    {
        int64_t heads; // each has blocks of its own
        int64_t queries; // of one head; where a text has one, that of each head that shares keys
        int64_t keys;
        int64_t blocks; // of queries, of one head
        int64_t seen; // keys of all blocks of one head
        int64_t cost; // of one head
    };

    struct Span // keys of a block
    {
        int64_t first;
        int64_t keys;
    };

    bool look();
    void average(int64_t sequence) const;
    bool layBiases();
    bool layDistances();
    Distances distances(int64_t head) const;
    void place(int64_t sequence);
    Span span(int64_t sequence, int64_t block) const;
    Block block(int64_t sequence, int64_t head, int64_t index, Span keys) const;

    Call mCall;
    Level const& mLevel;
    bool mReady{false};
    int64_t mCost{0}; // of all
    int64_t mMostKeys{0}; // of a block
    int64_t mPieces{0};
    int64_t mReach{0}; // the largest position
    int32_t mFirstColumn{0}; // of mDistances
    int64_t mColumns{0};
    int64_t mDistancePitch{0};
    std::unique_ptr<Place[]> mPlaces; // (B,)
    std::unique_ptr<int32_t[]> mSeen; // (2, T) where a reach is: first key that each query sees, and the one after the last
    std::unique_ptr<float[]> mBiases; // (N, pitch()) by distance from key to query, -mReach to mReach and room for a block
    std::unique_ptr<float[]> mDistances; // (2, N*D, mDistancePitch): the columns of distanceKeys and distanceQueries that texts reach
    std::unique_ptr<float[]> mPartial; // what keys received from each block, in the order of work

    // Whether the queries of a block are the heads of one token, which share keys, and not tokens of one head.
    bool sharesKeys(Place const& it) const { return it.heads < mCall.numHeads; }

    int64_t pitch() const { return 2 * mReach + 1 + mLevel.queries; }
};

} // namespace adtp
