// Compiled with AVX-512 (F, BW, VNNI, BF16) and AMX (TILE, BF16, INT8); runs only where that is.
//
// A tile is 16 rows of 64 bytes. One of x times one of weights, as they lie in the file, are 64 bytes of 16 rows times as much of
// 16 columns. Four tiles hold sums, and two each of x and of weights are read for four products.
#define ADTP_VNNI
#define ADTP_BF16
#include "linear_avx512.inl"

namespace adtp
{
namespace
{

constexpr int64_t kTileRows = 16;
constexpr int64_t kTileBytes = 64; // of a row
constexpr int64_t kTileGroups = kTileBytes / kGroupBytes;
constexpr int64_t kWhole = kTileRows * kTileBytes;
constexpr int64_t kFewRows = 8; // of INT8, of which dot products are faster than tiles

struct alignas(64) TileConfig
{
    uint8_t palette = 1;
    uint8_t startRow = 0;
    uint8_t reserved[14] = {};
    uint16_t rowBytes[16] = {};
    uint8_t rows[16] = {};

    TileConfig()
    {
        for (int32_t i = 0; i < 8; ++i)
        {
            rowBytes[i] = kTileBytes;
            rows[i] = kTileRows;
        }
    }
};

// GCC's intrinsics take the number of a tile as it is written, so these are macros.
#define ADTP_MULTIPLY(sums, x, w) \
    if constexpr (Int8) \
    { \
        _tile_dpbusd(sums, x, w); \
    } \
    else \
    { \
        _tile_dpbf16ps(sums, x, w); \
    }

// Rows * 16 rows of x times Columns blocks of weights, K from its first to its last whole tile or the one behind.
template <bool Int8, int32_t Rows, int32_t Columns>
inline void multiplyTiles(uint8_t const* x, int64_t pitch, uint8_t const* w, int64_t block, int64_t tiles)
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
    }
}

#undef ADTP_MULTIPLY

template <typename Kind, int32_t Rows, int32_t Columns>
inline void tile(Linear const& call, LowRows const& rows, int64_t row, int64_t end, int64_t column)
{
    constexpr int64_t width = Columns * kLanes; // floats or integers of a row of sums
    int64_t const groups = groupsOf(call), tiles = groups / kTileGroups, left = groups % kTileGroups;
    int64_t const block = groups * kWhole / kTileGroups;
    auto const* const w = static_cast<uint8_t const*>(call.weight) + column / kColumns * block;
    uint8_t const* const x = rows.values + row * rows.pitch;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    multiplyTiles<Kind::kIsInt8, Rows, Columns>(x, rows.pitch, w, block, tiles);
    if (left)
    {
        alignas(64) uint8_t last[Columns * kWhole] = {}; // a tile would reach into the next block
        for (int32_t c = 0; c < Columns; ++c)
        {
            std::memcpy(last + c * kWhole, w + c * block + tiles * kWhole, static_cast<size_t>(left * kTileBytes));
        }
        multiplyTiles<Kind::kIsInt8, Rows, Columns>(x + tiles * kTileBytes, rows.pitch, last, kWhole, 1);
    }
    alignas(64) uint8_t sums[Rows * kTileRows * width * sizeof(float)];
    constexpr int64_t sumPitch = width * sizeof(float), lower = kTileRows * sumPitch;
    _tile_stored(0, sums, sumPitch);
    if constexpr (Columns == 2)
    {
        _tile_stored(1, sums + kTileBytes, sumPitch);
    }
    if constexpr (Rows == 2)
    {
        _tile_stored(2, sums + lower, sumPitch);
        if constexpr (Columns == 2)
        {
            _tile_stored(3, sums + lower + kTileBytes, sumPitch);
        }
    }
    for (int64_t r = row; r < end && r < row + Rows * kTileRows; ++r)
    {
        typename Kind::Sums one[1][Columns];
        std::memcpy(one, sums + (r - row) * sumPitch, sizeof(one));
        finish<Kind, 1, Columns>(call, rows, r, column, one);
    }
}

template <typename Kind, int32_t Columns>
inline void tileColumns(Linear const& call, LowRows const& rows, int64_t first, int64_t end, int64_t column)
{
    int64_t row = first;
    for (; row + kTileRows < end; row += 2 * kTileRows)
    {
        tile<Kind, 2, Columns>(call, rows, row, end, column);
    }
    if (row < end)
    {
        tile<Kind, 1, Columns>(call, rows, row, end, column);
    }
}

template <typename Kind>
void multiplyByTiles(Linear const& call, LowRows const& rows, int64_t first, int64_t end, int64_t firstBlock, int64_t endBlock)
{
    int64_t block = firstBlock;
    for (; block + 2 <= endBlock; block += 2)
    {
        tileColumns<Kind, 2>(call, rows, first, end, block * kColumns);
    }
    if (block < endBlock)
    {
        tileColumns<Kind, 1>(call, rows, first, end, block * kColumns);
    }
}

void multiplyAmx(Linear const& call, LowRows const& rows, int64_t first, int64_t end, int64_t firstBlock, int64_t endBlock)
{
    if (call.scale && end - first <= kFewRows) // a tile takes as long for any number of rows; sums of integers are the same
    {
        return multiply(call, rows, first, end, firstBlock, endBlock);
    }
    static int seen=0; if(seen++<3) __builtin_printf("W%%64=%d\n",(int)((uintptr_t)call.weight%64));
    TileConfig const config;
    _tile_loadconfig(&config);
    call.scale ? multiplyByTiles<Int8Product>(call, rows, first, end, firstBlock, endBlock)
               : multiplyByTiles<Bf16Product>(call, rows, first, end, firstBlock, endBlock);
    _tile_release(); // the system need not keep tiles that nothing is in
}

} // namespace

extern LinearLevel const kLinearAmx;
LinearLevel const kLinearAmx{"amx", Bf16::kRowBytes, 2 * kTileRows, kTileRows, kTileBytes, convert, multiplyAmx};
} // namespace adtp
