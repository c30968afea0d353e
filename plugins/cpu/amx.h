// Intel's tiles: registers of 16 rows of 64 bytes.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace adtp
{
namespace
{

constexpr int64_t kTileRows = 16;
constexpr int64_t kTileBytes = 64; // of a row

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

// GCC's intrinsics do not say which memory they read, so it might leave out what is stored for them alone.
inline void storeForTiles()
{
#if defined(__GNUC__) && !defined(__clang__)
    __asm__ volatile("" ::: "memory");
#endif
}

// All eight tiles, whole, for as long as this exists. Then the system need not keep tiles that nothing is in.
class Tiles
{
public:
    Tiles()
    {
        TileConfig const config;
        storeForTiles();
        _tile_loadconfig(&config);
    }

    ~Tiles() { _tile_release(); }

    Tiles(Tiles const&) = delete;
    Tiles& operator=(Tiles const&) = delete;
};

} // namespace
} // namespace adtp
