#include "linear_pieces.h"

#ifdef ADTP_X86
#include "processor.h"
#endif
#ifdef ADTP_DOTPROD
#include "processor_arm.h"
#endif

#include <algorithm>
#include <cstring>
#include <new>

namespace adtp
{
namespace
{

constexpr int64_t kValuesOfPiece = 1 << 16; // that a thread rounds at once
constexpr int64_t kPieceRows = 96; // their bytes stay in a core's cache
constexpr int64_t kPieceProducts = 4000000; // multiply-adds
constexpr int64_t kWorthTwoThreads = 400000;
constexpr int64_t kTileBlocks = 4;
constexpr size_t kCacheLine = 64;

bool everywhere()
{
    return true;
}

} // namespace

LinearLevel const* linearLevel(char const* name)
{
    struct
    {
        LinearLevel const& level;
        bool (*runsHere)();
        bool pays; // Intel's vdpbf16ps does the work of two fp32 multiply-adds in the time of four
    } const levels[] = {
#ifdef ADTP_AMX
        {kLinearAmx, hasAmx, true},
#endif
#ifdef ADTP_X86
        {kLinearAvx512Bf16, hasAvx512Bf16, !Features::isIntel()},
        {kLinearAvx512Vnni, hasAvx512Vnni, true},
        {kLinearAvx2Vnni, hasAvx2Vnni, true},
        {kLinearAvx512, hasAvx512Bw, true},
        {kLinearAvx2, hasAvx2, true},
#endif
#ifdef ADTP_DOTPROD
        {kLinearNeonDotprod, hasDotprod, true},
#endif
#ifdef ADTP_NEON
        {kLinearNeon, everywhere, true},
#endif
        {kLinearPortable, everywhere, true},
    };
    for (auto const& one : levels)
    {
        if ((name ? std::strcmp(name, one.level.name) == 0 : one.pays) && one.runsHere())
        {
            return &one.level;
        }
    }
    return nullptr;
}

RowStore::RowStore(Linear const& call, LinearLevel const& level)
{
    int64_t const pitch = rowBytes(call, level), rows = roundUp(call.m, level.readRows);
    mBytes.reset(new (std::nothrow) uint8_t[static_cast<size_t>(rows * pitch) + kCacheLine - 1]);
    if (call.scale)
    {
        mScale.reset(new (std::nothrow) float[static_cast<size_t>(rows)]);
        mZero.reset(new (std::nothrow) int32_t[static_cast<size_t>(rows)]);
    }
    if (!mBytes || (call.scale && !(mScale && mZero)))
    {
        return;
    }
    size_t const over = reinterpret_cast<uintptr_t>(mBytes.get()) % kCacheLine;
    mRows = {mBytes.get() + (kCacheLine - over) % kCacheLine, pitch, mScale.get(), mZero.get()};
    int64_t const used = call.scale ? call.k : call.k * level.bf16Bytes / 2;
    for (int64_t row = 0; row < call.m && used < pitch; ++row) // a product that writes rows leaves what is behind them
    {
        std::memset(mRows.values + row * pitch + used, 0, static_cast<size_t>(pitch - used));
    }
}

LinearPieces::LinearPieces(Linear const& call, LinearLevel const& level, RowStore const* converted)
    : mCall(call)
    , mLevel(level)
{
    if (call.m == 0 || call.n == 0)
    {
        return;
    }
    int64_t const products = call.m * call.k * call.n;
    mConverted = products < kWorthTwoThreads ? call.m : std::max<int64_t>(1, kValuesOfPiece / std::max<int64_t>(call.k, 1));
    mConversions = converted ? 0 : divideUp(call.m, mConverted);
    mRows = roundUp(divideUp(call.m, std::max<int64_t>(1, call.m / kPieceRows)), level.tileRows);
    mRowPieces = divideUp(call.m, mRows);
    int64_t const tiles = divideUp(divideUp(call.n, kColumns), kTileBlocks);
    mColumnPieces = std::clamp<int64_t>(
        products / mRowPieces / kPieceProducts, std::min<int64_t>(products > kWorthTwoThreads ? 2 : 1, tiles), tiles);
    mOwn = converted ? RowStore() : RowStore(call, level);
    mRowsOfX = converted ? converted->rows() : mOwn.rows();
}

void LinearPieces::convert(int64_t piece) const
{
    int64_t const first = piece * mConverted;
    mLevel.convert(mCall, mRowsOfX, first, std::min(mCall.m, first + mConverted));
}

void LinearPieces::multiply(int64_t piece) const
{
    int64_t const first = piece / mColumnPieces * mRows, column = piece % mColumnPieces;
    int64_t const blocks = divideUp(mCall.n, kColumns), tiles = divideUp(blocks, kTileBlocks);
    int64_t const from = tiles * column / mColumnPieces * kTileBlocks;
    int64_t const end = std::min(blocks, tiles * (column + 1) / mColumnPieces * kTileBlocks);
    mLevel.multiply(mCall, mRowsOfX, first, std::min(mCall.m, first + mRows), from, end);
}

Ran runLinear(Linear const& call, LinearLevel const& level, Parallel parallel, RowStore const* converted)
{
    LinearPieces const pieces(call, level, converted);
    if (!pieces.ready())
    {
        return Ran::kShortOfMemory;
    }
    bool const done = parallel(pieces.conversions(), [&](int64_t piece) { pieces.convert(piece); })
        && parallel(pieces.products(), [&](int64_t piece) { pieces.multiply(piece); });
    return done ? Ran::kDone : Ran::kStopped;
}

} // namespace adtp
