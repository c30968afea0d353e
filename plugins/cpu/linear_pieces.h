// One product, divided into pieces of equal work that threads may take in any order: first all conversions, then all products.
#pragma once

#include "linear.h"

#include <memory>

namespace adtp
{

class LinearPieces
{
public:
    LinearPieces(Linear const& call, LinearLevel const& level);

    // False: memory is short.
    bool ready() const { return mConversions == 0 || (mBytes && mScale && mZero); }

    // How many pieces there are; 0 where there is nothing to do.
    int64_t conversions() const { return mConversions; }
    int64_t products() const { return mRowPieces * mColumnPieces; }

    void convert(int64_t piece) const;
    void multiply(int64_t piece) const;

private:
    LowRows rows() const { return {mFirst, mPitch, mScale.get(), mZero.get()}; }

    Linear mCall;
    LinearLevel const& mLevel;
    int64_t mPitch{0}; // bytes of a converted row
    int64_t mConverted{0}; // rows of a conversion
    int64_t mConversions{0};
    int64_t mRows{0}; // of a product
    int64_t mRowPieces{0};
    int64_t mColumnPieces{0};
    std::unique_ptr<uint8_t[]> mBytes;
    uint8_t* mFirst{nullptr}; // of them that begins a line of the cache
    std::unique_ptr<float[]> mScale;
    std::unique_ptr<int32_t[]> mZero;
};

} // namespace adtp
