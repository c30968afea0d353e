// One product, divided into pieces of equal work that threads may take in any order: first all conversions, then all products.
#pragma once

#include "linear.h"

#include <memory>
#include <new>
#include <type_traits>
#include <utility>

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

// A lambda that somebody else holds while this calls it: for parameters alone, because it keeps no temporary alive. Unlike std::function
// it needs no memory, so it throws nothing into a host in C.
template <typename Signature>
class Reference;

template <typename Result, typename... Arguments>
class Reference<Result(Arguments...)>
{
public:
    template <typename Function, typename = std::enable_if_t<!std::is_same<std::decay_t<Function>, Reference>::value>>
    Reference(Function const& function)
        : mFunction(&function)
        , mCall([](void const* held, Arguments... arguments) -> Result {
            return (*static_cast<Function const*>(held))(std::forward<Arguments>(arguments)...);
        })
    {
    }

    Result operator()(Arguments... arguments) const { return mCall(mFunction, std::forward<Arguments>(arguments)...); }

private:
    void const* mFunction;
    Result (*mCall)(void const* held, Arguments... arguments);
};

typedef Reference<void(int64_t)> Piece;

// Runs a function for 0 to count - 1, in any order, on any threads; false: it could not.
typedef Reference<bool(int64_t count, Piece piece)> Parallel;

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
Ran runLinear(Linear const& call, LinearLevel const& level, Parallel parallel, RowStore const* converted = nullptr);

// For a caller without threads.
inline constexpr auto onOneThread = [](int64_t count, Piece piece) {
    for (int64_t i = 0; i < count; ++i)
    {
        piece(i);
    }
    return true;
};

} // namespace adtp
