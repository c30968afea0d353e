// One call of the operator, divided into pieces of equal work that threads may take in any order.
#pragma once

#include "attention.h"

#include <memory>

namespace adtp
{

struct Call
{
    float const* q; // (T, N*D), contiguous, and so are k, v and out
    float const* k;
    float const* v;
    float* out;
    float* received; // (T,) or null
    int32_t const* bounds; // (B+1,), from 0 to T, rising
    int64_t sequences; // B
    int64_t numHeads; // N
    int64_t headSize; // D
    float scale;
};

class Ragged
{
public:
    Ragged(Call const& call, Level const& level);

    // How many pieces there are; 0 where there is nothing to do.
    int64_t pieces() const { return mPieces; }

    // Compute one piece. False: there is no memory for it.
    bool run(int64_t piece) const;

    // Sum up what tokens received, after all pieces.
    void finish() const;

    bool ready() const { return !mCall.received || mPartial || mPieces == 0; }

private:
    struct Place // of a sequence in the order of work
    {
        int64_t keys;
        int64_t blocks; // of queries, of one head
        int64_t cost; // of a block
    };

    Place place(int64_t sequence) const;

    Call mCall;
    Level const& mLevel;
    int64_t mCost{0}; // of all
    int64_t mLongest{0};
    int64_t mPieces{0};
    std::unique_ptr<float[]> mPartial; // (blocks, keys) of each head of each sequence: what keys received
};

} // namespace adtp
