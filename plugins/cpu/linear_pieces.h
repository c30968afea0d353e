// One product, divided into pieces of equal work that threads may take in any order: first all conversions, then all products.
#pragma once

#include "linear.h"

#include <functional>
#include <memory>
#include <new>

namespace adtp
{

inline int64_t divideUp(int64_t x, int64_t y)
{
    return (x + y - 1) / y;
}

inline int64_t roundUp(int64_t x, int64_t y)
{
    return divideUp(x, y) * y;
}

// Bytes of a row of x in lower precision.
inline int64_t rowBytes(Linear const& call, LinearLevel const& level)
{
    return roundUp(groupsOf(call) * (call.scale ? kGroupBytes : level.bf16Bytes), level.readBytes);
}

// Room for the rows of x in lower precision.
class RowStore
{
public:
    RowStore() = default;
    RowStore(Linear const& call, LinearLevel const& level);

    // False: memory is short.
    bool ready() const { return mRows.values != nullptr; }

    LowRows const& rows() const { return mRows; }

private:
    std::unique_ptr<uint8_t[]> mBytes;
    std::unique_ptr<float[]> mScale;
    std::unique_ptr<int32_t[]> mZero;
    LowRows mRows{};
};

enum class Ran
{
    kDone,
    kShortOfMemory,
    kStopped, // `Parallel` said no
};

// Runs a function for 0 to count - 1, in any order, on any threads; false: it could not.
typedef std::function<bool(int64_t count, std::function<void(int64_t)> const& piece)> Parallel;

class LinearPieces
{
public:
    // converted: rows in lower precision that are there; null: they are made of the call's x.
    LinearPieces(Linear const& call, LinearLevel const& level, RowStore const* converted = nullptr);

    // False: memory is short.
    bool ready() const { return products() == 0 || mRowsOfX.values; }

    // How many pieces there are; 0 where there is nothing to do.
    int64_t conversions() const { return mConversions; }
    int64_t products() const { return mRowPieces * mColumnPieces; }

    void convert(int64_t piece) const;
    void multiply(int64_t piece) const;

private:
    Linear mCall;
    LinearLevel const& mLevel;
    int64_t mConverted{0}; // rows of a conversion
    int64_t mConversions{0};
    int64_t mRows{0}; // of a product
    int64_t mRowPieces{0};
    int64_t mColumnPieces{0};
    RowStore mOwn;
    LowRows mRowsOfX{};
};

// One product. converted: as of `LinearPieces`.
Ran runLinear(Linear const& call, LinearLevel const& level, Parallel const& parallel, RowStore const* converted = nullptr);

// For a caller without threads.
bool onOneThread(int64_t count, std::function<void(int64_t)> const& piece);

} // namespace adtp
