#include "linear_pieces.h"

#include <algorithm>
#include <cstring>
#include <new>

#ifdef ADTP_X86
#ifdef _MSC_VER
#include <immintrin.h>
#include <intrin.h>
#else
#include <cpuid.h>
#endif
#endif

namespace adtp
{
namespace
{

constexpr int64_t kValuesOfPiece = 1 << 16; // that a thread rounds at once
constexpr int64_t kPieceRows = 96; // their bytes stay in a core's cache
constexpr int64_t kTileRows = 12; // what tiles of 6, 4 and 3 rows divide
constexpr int64_t kPieceProducts = 4000000; // multiply-adds
constexpr int64_t kWorthTwoThreads = 400000;
constexpr int64_t kTileBlocks = 4;

int64_t divideUp(int64_t x, int64_t y)
{
    return (x + y - 1) / y;
}

#ifdef ADTP_X86
#ifdef _MSC_VER
// Bits of CPUID's leaf 7 and, in its second part, of EAX; 0 where the system does not keep the registers in `state`.
struct Features
{
    int32_t ebx{0};
    int32_t ecx{0};
    int32_t eax1{0};

    explicit Features(uint64_t state)
    {
        int registers[4];
        __cpuid(registers, 1);
        int32_t const fmaAndSaved = 1 << 12 | 1 << 27;
        if ((registers[2] & fmaAndSaved) != fmaAndSaved || (_xgetbv(0) & state) != state)
        {
            return;
        }
        __cpuidex(registers, 7, 0);
        ebx = registers[1];
        ecx = registers[2];
        __cpuidex(registers, 7, 1);
        eax1 = registers[0];
    }
};

bool hasAvx2()
{
    return Features(0x6).ebx >> 5 & 1;
}

bool hasAvx2Vnni()
{
    return hasAvx2() && Features(0x6).eax1 >> 4 & 1;
}

bool hasAvx512()
{
    int32_t const fAndBw = 1 << 16 | 1 << 30;
    return (Features(0xE6).ebx & fAndBw) == fAndBw;
}

bool hasAvx512Vnni()
{
    return hasAvx512() && Features(0xE6).ecx >> 11 & 1;
}

bool hasAvx512Bf16()
{
    return hasAvx512Vnni() && Features(0xE6).eax1 >> 5 & 1;
}
#else
bool hasAvx2()
{
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}

bool hasAvx2Vnni()
{
    uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0; // compilers know the name "avxvnni" since 2024 alone
    return hasAvx2() && __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && (eax >> 4 & 1U);
}

bool hasAvx512()
{
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw");
}

bool hasAvx512Vnni()
{
    return hasAvx512() && __builtin_cpu_supports("avx512vnni");
}

bool hasAvx512Bf16()
{
    return hasAvx512Vnni() && __builtin_cpu_supports("avx512bf16");
}
#endif
#endif

} // namespace

LinearLevel const* linearLevel(char const* name)
{
#ifdef ADTP_X86
    struct
    {
        LinearLevel const& level;
        bool (*runsHere)();
    } const levels[] = {{kLinearAvx512Bf16, hasAvx512Bf16}, {kLinearAvx512Vnni, hasAvx512Vnni}, {kLinearAvx2Vnni, hasAvx2Vnni},
        {kLinearAvx512, hasAvx512}, {kLinearAvx2, hasAvx2}};
    for (auto const& one : levels)
    {
        if ((!name || std::strcmp(name, one.level.name) == 0) && one.runsHere())
        {
            return &one.level;
        }
    }
#endif
    return !name || std::strcmp(name, kLinearPortable.name) == 0 ? &kLinearPortable : nullptr;
}

LinearPieces::LinearPieces(Linear const& call, LinearLevel const& level)
    : mCall(call)
    , mLevel(level)
{
    if (call.m == 0 || call.n == 0)
    {
        return;
    }
    int64_t const products = call.m * call.k * call.n;
    mConverted = products < kWorthTwoThreads ? call.m : std::max<int64_t>(1, kValuesOfPiece / std::max<int64_t>(call.k, 1));
    mConversions = divideUp(call.m, mConverted);
    mRows = divideUp(divideUp(call.m, std::max<int64_t>(1, call.m / kPieceRows)), kTileRows) * kTileRows;
    mRowPieces = divideUp(call.m, mRows);
    int64_t const tiles = divideUp(divideUp(call.n, kColumns), kTileBlocks);
    mColumnPieces = std::clamp<int64_t>(
        products / mRowPieces / kPieceProducts, std::min<int64_t>(products > kWorthTwoThreads ? 2 : 1, tiles), tiles);
    auto const rows = static_cast<size_t>(call.m);
    mBytes.reset(new (std::nothrow) uint8_t[rows * static_cast<size_t>(groupsOf(call) * kGroupBytes)]);
    mScale.reset(new (std::nothrow) float[rows]);
    mZero.reset(new (std::nothrow) int32_t[rows]);
}

void LinearPieces::convert(int64_t piece) const
{
    int64_t const first = piece * mConverted;
    mLevel.convert(mCall, rows(), first, std::min(mCall.m, first + mConverted));
}

void LinearPieces::multiply(int64_t piece) const
{
    int64_t const first = piece / mColumnPieces * mRows, column = piece % mColumnPieces;
    int64_t const blocks = divideUp(mCall.n, kColumns), tiles = divideUp(blocks, kTileBlocks);
    int64_t const from = tiles * column / mColumnPieces * kTileBlocks;
    int64_t const end = std::min(blocks, tiles * (column + 1) / mColumnPieces * kTileBlocks);
    mLevel.multiply(mCall, rows(), first, std::min(mCall.m, first + mRows), from, end);
}

} // namespace adtp
