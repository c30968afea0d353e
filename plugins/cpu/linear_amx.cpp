// Compiled with AVX-512 (F, BW, VNNI, BF16) and AMX (TILE, BF16, INT8); runs only where that is.
//
// A tile is 16 rows of 64 bytes. One of x times one of weights, as they lie in the file, are 64 bytes of 16 rows times as much of
// 16 columns. Four tiles hold sums, and two each of x and of weights are read for four products.
#define ADTP_VNNI
#define ADTP_BF16
#include "amx.h"
#include "linear_avx512.inl"

namespace adtp
{
namespace
{

constexpr int64_t kTileGroups = kTileBytes / kGroupBytes;
constexpr int64_t kWhole = kTileRows * kTileBytes;
constexpr int32_t kAtOnce = 4; // rows whose sums become results
constexpr int64_t kFewRows = 8; // of INT8, of which dot products are faster than tiles

// GCC's intrinsics take the number of a tile as it is written, so these are macros.
#define ADTP_MULTIPLY(sums, x, w) \
    if constexpr (Kind::kIsInt8) \
    { \
        _tile_dpbusd(sums, x, w); \
    } \
    else \
    { \
        _tile_dpbf16ps(sums, x, w); \
    }

// Sums that are not results yet. They become it while tiles are multiplied, which other units of the processor do.
template <typename Kind, int32_t Columns>
class Pending
{
public:
    static constexpr int64_t kPitch = Columns * kTileBytes; // of a row of sums

    Pending(Linear const& call, LowRows const& rows, int64_t end)
        : mCall(call)
        , mRows(rows)
        , mEnd(end)
    {
    }

    // Where the sums of the next tiles go: the others are still read.
    uint8_t* next() { return mSums[mNext]; }

    // Those at `next` are there: of rows of x from `row` on, up to two tiles of them.
    void put(int64_t row, int64_t column)
    {
        finishAll();
        mFrom = mSums[mNext];
        mNext = 1 - mNext;
        mRow = row;
        mPast = row + 2 * kTileRows < mEnd ? row + 2 * kTileRows : mEnd;
        mColumn = column;
    }

    void finishSome()
    {
        if (mRow + kAtOnce <= mPast)
        {
            take<kAtOnce>();
        }
        else if (mRow < mPast)
        {
            take<1>();
        }
    }

    void finishAll()
    {
        while (mRow < mPast)
        {
            finishSome();
        }
    }

private:
    template <int32_t Rows>
    void take()
    {
        typename Kind::Sums sums[Rows][Columns];
        std::memcpy(sums, mFrom, sizeof(sums));
        finish<Kind, Rows, Columns>(mCall, mRows, mRow, mColumn, sums);
        mRow += Rows;
        mFrom += Rows * kPitch;
    }

    Linear const& mCall;
    LowRows const& mRows;
    int64_t mEnd;
    alignas(64) uint8_t mSums[2][2 * kTileRows * kPitch];
    int32_t mNext{0};
    uint8_t const* mFrom{nullptr};
    int64_t mRow{0};
    int64_t mPast{0};
    int64_t mColumn{0};
};

// Rows * 16 rows of x times Columns blocks of weights, over `tiles` tiles of K.
template <typename Kind, int32_t Rows, int32_t Columns>
inline void multiplyTiles(
    uint8_t const* x, int64_t pitch, uint8_t const* w, int64_t block, int64_t tiles, Pending<Kind, Columns>& pending)
{
    for (int64_t t = 0; t < tiles; ++t, x += kTileBytes, w += kWhole)
    {
        _tile_loadd(4, x, pitch);
        _tile_loadd(6, w, kTileBytes);
        ADTP_MULTIPLY(0, 4, 6)
        if constexpr (Columns == 2)
        {
            _tile_loadd(7, w + block, kTileBytes);
            ADTP_MULTIPLY(1, 4, 7)
        }
        if constexpr (Rows == 2)
        {
            _tile_loadd(5, x + kTileRows * pitch, pitch);
            ADTP_MULTIPLY(2, 5, 6)
            if constexpr (Columns == 2)
            {
                ADTP_MULTIPLY(3, 5, 7)
            }
        }
        pending.finishSome();
    }
}

#undef ADTP_MULTIPLY

template <typename Kind, int32_t Rows, int32_t Columns>
inline void tile(Linear const& call, LowRows const& rows, int64_t row, int64_t column, Pending<Kind, Columns>& pending)
{
    int64_t const groups = groupsOf(call), tiles = groups / kTileGroups, left = groups % kTileGroups;
    int64_t const block = groups * kWhole / kTileGroups;
    auto const* const w = static_cast<uint8_t const*>(call.weight) + column / kColumns * block;
    uint8_t const* const x = rows.values + row * rows.pitch;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    multiplyTiles<Kind, Rows, Columns>(x, rows.pitch, w, block, tiles, pending);
    if (left)
    {
        alignas(64) uint8_t last[Columns * kWhole] = {}; // a tile would reach into the next block
        for (int32_t c = 0; c < Columns; ++c)
        {
            std::memcpy(last + c * kWhole, w + c * block + tiles * kWhole, static_cast<size_t>(left * kTileBytes));
        }
        storeForTiles();
        multiplyTiles<Kind, Rows, Columns>(x + tiles * kTileBytes, rows.pitch, last, kWhole, 1, pending);
        storeForTiles();
    }
    constexpr int64_t pitch = Pending<Kind, Columns>::kPitch, lower = kTileRows * pitch;
    uint8_t* const sums = pending.next();
    _tile_stored(0, sums, pitch);
    if constexpr (Columns == 2)
    {
        _tile_stored(1, sums + kTileBytes, pitch);
    }
    if constexpr (Rows == 2)
    {
        _tile_stored(2, sums + lower, pitch);
        if constexpr (Columns == 2)
        {
            _tile_stored(3, sums + lower + kTileBytes, pitch);
        }
    }
    pending.put(row, column);
}

template <typename Kind, int32_t Columns>
inline void tileColumns(
    Linear const& call, LowRows const& rows, int64_t first, int64_t end, int64_t column, Pending<Kind, Columns>& pending)
{
    int64_t row = first;
    for (; row + kTileRows < end; row += 2 * kTileRows)
    {
        tile<Kind, 2, Columns>(call, rows, row, column, pending);
    }
    if (row < end)
    {
        tile<Kind, 1, Columns>(call, rows, row, column, pending);
    }
}

template <typename Kind>
void multiplyByTiles(Linear const& call, LowRows const& rows, int64_t first, int64_t end, int64_t firstBlock, int64_t endBlock)
{
    Pending<Kind, 2> pending(call, rows, end);
    int64_t block = firstBlock;
    for (; block + 2 <= endBlock; block += 2)
    {
        tileColumns<Kind, 2>(call, rows, first, end, block * kColumns, pending);
    }
    pending.finishAll();
    if (block < endBlock)
    {
        Pending<Kind, 1> last(call, rows, end);
        tileColumns<Kind, 1>(call, rows, first, end, block * kColumns, last);
        last.finishAll();
    }
}

void multiplyAmx(Linear const& call, LowRows const& rows, int64_t first, int64_t end, int64_t firstBlock, int64_t endBlock)
{
    if (call.scale && end - first <= kFewRows) // a tile takes as long for any number of rows; sums of integers are the same
    {
        return multiply(call, rows, first, end, firstBlock, endBlock);
    }
    Tiles const tiles;
    call.scale ? multiplyByTiles<Int8Product>(call, rows, first, end, firstBlock, endBlock)
               : multiplyByTiles<Bf16Product>(call, rows, first, end, firstBlock, endBlock);
}

} // namespace

extern LinearLevel const kLinearAmx;
LinearLevel const kLinearAmx{"amx", Bf16::kRowBytes, 2 * kTileRows, kTileRows, kTileBytes, 2 * kCacheBytes, convert, multiplyAmx, addNorm};
} // namespace adtp
