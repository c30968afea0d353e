// AMX's tiles in plain C++, after Intel's Intrinsics Guide. Where this is included first (-include), amx.cpp and linear_amx.cpp run on
// processors that have AVX512_BF16 and no tiles, and sanitizers see what tiles read and write.
#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>

#ifdef __x86_64__ // where levels are chosen
#include "../../../plugins/cpu/processor.h"
#define hasAmx hasAvx512Bf16
#define hasAmxDq hasAvx512DqBf16
#endif

namespace tiles
{

constexpr int kTiles = 8;
constexpr int kRows = 16;
constexpr int kBytes = 64;

struct Registers
{
    int rows[kTiles];
    int bytes[kTiles];
    uint8_t of[kTiles][kRows][kBytes];
};

inline Registers& registers()
{
    static thread_local Registers made;
    return made;
}

inline void loadConfig(void const* p)
{
    uint8_t stored[64];
    std::memcpy(stored, p, sizeof stored);
    for (int i = 0; i < kTiles; ++i)
    {
        registers().bytes[i] = stored[16 + 2 * i] | stored[17 + 2 * i] << 8;
        registers().rows[i] = stored[48 + i];
    }
}

inline void release()
{
    registers() = {};
}

inline void zero(int tile)
{
    std::memset(registers().of[tile], 0, sizeof registers().of[tile]);
}

inline void load(int tile, void const* p, int64_t pitch)
{
    zero(tile);
    for (int row = 0; row < registers().rows[tile]; ++row)
    {
        std::memcpy(registers().of[tile][row], static_cast<uint8_t const*>(p) + row * pitch, registers().bytes[tile]);
    }
}

inline void store(int tile, void* p, int64_t pitch)
{
    for (int row = 0; row < registers().rows[tile]; ++row)
    {
        std::memcpy(static_cast<uint8_t*>(p) + row * pitch, registers().of[tile][row], registers().bytes[tile]);
    }
}

// Groups of four bytes: those of a row of x times those of a column of w.
template <typename Sum, typename Product>
inline void multiply(int sums, int x, int w, Product product)
{
    Registers& own = registers();
    for (int row = 0; row < own.rows[sums]; ++row)
    {
        for (int column = 0; column < own.bytes[sums] / 4; ++column)
        {
            Sum sum;
            std::memcpy(&sum, own.of[sums][row] + 4 * column, sizeof sum);
            sum += product(own.of[x][row], own.bytes[x] / 4, [&](int group) { return own.of[w][group] + 4 * column; });
            std::memcpy(own.of[sums][row] + 4 * column, &sum, sizeof sum);
        }
    }
}

inline void multiplyBytes(int sums, int x, int w) // of x without a sign, of w with one
{
    multiply<int32_t>(sums, x, w, [](uint8_t const* row, int groups, auto column) {
        int32_t total = 0;
        for (int i = 0; i < 4 * groups; ++i)
        {
            total += row[i] * static_cast<int8_t>(column(i / 4)[i % 4]);
        }
        return total;
    });
}

inline float fromBf16(uint8_t const* p) // subnormal numbers count as 0
{
    uint32_t const bits = static_cast<uint32_t>(p[0]) << 16 | static_cast<uint32_t>(p[1]) << 24;
    float wide;
    std::memcpy(&wide, &bits, sizeof wide);
    return std::fpclassify(wide) == FP_SUBNORMAL ? std::copysign(0.0F, wide) : wide;
}

inline void multiplyBf16(int sums, int x, int w) // even and odd columns are summed apart
{
    multiply<float>(sums, x, w, [](uint8_t const* row, int groups, auto column) {
        float total[2] = {};
        for (int i = 0; i < 2 * groups; ++i)
        {
            total[i % 2] = std::fma(fromBf16(row + 2 * i), fromBf16(column(i / 2) + 2 * (i % 2)), total[i % 2]);
        }
        return total[0] + total[1];
    });
}

} // namespace tiles

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbusd
#undef _tile_dpbf16ps
#define _tile_loadconfig tiles::loadConfig
#define _tile_release tiles::release
#define _tile_loadd tiles::load
#define _tile_stored tiles::store
#define _tile_zero tiles::zero
#define _tile_dpbusd tiles::multiplyBytes
#define _tile_dpbf16ps tiles::multiplyBf16
