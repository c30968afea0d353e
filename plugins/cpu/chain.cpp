#include "chain.h"

#include <algorithm>
#include <atomic>
#include <thread>

namespace adtp
{
namespace
{

constexpr int64_t kLeastRows = 64; // of a piece: each reads all weights
constexpr int64_t kMostRows = 256;
constexpr int64_t kNormRows = 32; // of a piece where products are divided by columns

std::atomic<int64_t> gThreads{0}; // 0: not set

int64_t threadsHere()
{
    int64_t const set = gThreads.load(std::memory_order_relaxed);
    static int64_t const all = std::max<int64_t>(1, std::thread::hardware_concurrency());
    return set > 0 ? set : all;
}

bool hasSecond(Chain const& chain)
{
    return chain.second.k > 0;
}

// Rows of a piece; 0 where products are to be divided by columns.
int64_t rowsOfPieces(Chain const& chain, LinearLevel const& level)
{
    int64_t const threads = threadsHere();
    int64_t const m = chain.first.m;
    if (m < threads * kLeastRows)
    {
        return 0;
    }
    int64_t bytes = rowBytes(chain.first, level) + 4 * chain.norm.n;
    if (hasSecond(chain))
    {
        bytes += rowBytes(chain.second, level) + (chain.first.scale ? 4 * chain.first.n : 0);
    }
    int64_t const fit = std::clamp(level.cacheBytes / bytes, kLeastRows, kMostRows);
    int64_t const pieces = roundUp(divideUp(m, fit), threads);
    return roundUp(divideUp(m, pieces), level.tileRows);
}

// Both products, each run as it is told: with rows that are converted, or null.
Ran runProducts(
    Chain const& chain, LinearLevel const& level, Reference<Ran(Linear const& call, RowStore const* converted)> run)
{
    Linear one = chain.first, two = chain.second;
    if (!hasSecond(chain))
    {
        one.y = chain.norm.y;
        return run(one, nullptr);
    }
    two.y = chain.norm.y;
    RowStore rows;
    std::unique_ptr<float[]> hidden;
    if (one.scale) // a row's scale takes all of it
    {
        hidden.reset(new (std::nothrow) float[static_cast<size_t>(one.m * one.n)]);
        one.y = hidden.get();
        two.x = hidden.get();
    }
    else
    {
        rows = RowStore(two, level);
        one.low = rows.rows().values;
        one.lowPitch = rows.rows().pitch;
    }
    if (!hidden && !rows.ready())
    {
        return Ran::kShortOfMemory;
    }
    Ran const ran = run(one, nullptr);
    return ran == Ran::kDone ? run(two, hidden ? nullptr : &rows) : ran;
}

// `count` rows from `first` on through everything.
Ran runRows(Chain chain, LinearLevel const& level, int64_t first, int64_t count)
{
    chain.first.x += first * chain.first.k;
    chain.first.m = chain.second.m = count;
    chain.norm.residual += first * chain.norm.n;
    chain.norm.y += first * chain.norm.n;
    Ran const ran = runProducts(chain, level, [&](Linear const& call, RowStore const* converted) {
        RowStore const own = converted ? RowStore() : RowStore(call, level);
        LowRows const& rows = (converted ? *converted : own).rows();
        if (!rows.values)
        {
            return Ran::kShortOfMemory;
        }
        if (!converted)
        {
            level.convert(call, rows, 0, count);
        }
        level.multiply(call, rows, 0, count, 0, divideUp(call.n, kColumns));
        return Ran::kDone;
    });
    if (ran == Ran::kDone)
    {
        level.addNorm(chain.norm, 0, count);
    }
    return ran;
}

Ran runByColumns(Chain const& chain, LinearLevel const& level, Parallel parallel)
{
    Ran const ran = runProducts(chain, level,
        [&](Linear const& call, RowStore const* converted) { return runLinear(call, level, parallel, converted); });
    if (ran != Ran::kDone)
    {
        return ran;
    }
    int64_t const m = chain.first.m;
    bool const done = parallel(divideUp(m, kNormRows), [&](int64_t piece) {
        level.addNorm(chain.norm, piece * kNormRows, std::min(m, (piece + 1) * kNormRows));
    });
    return done ? Ran::kDone : Ran::kStopped;
}

} // namespace

void setThreads(int64_t count)
{
    gThreads.store(count, std::memory_order_relaxed);
}

Ran runChain(Chain const& chain, LinearLevel const& level, int64_t rows, Parallel parallel)
{
    int64_t const m = chain.first.m;
    rows = rows ? rows : rowsOfPieces(chain, level);
    if (rows <= 0)
    {
        return runByColumns(chain, level, parallel);
    }
    std::atomic<bool> whole{true};
    bool const done = parallel(divideUp(m, rows), [&](int64_t piece) {
        if (runRows(chain, level, piece * rows, std::min(rows, m - piece * rows)) != Ran::kDone)
        {
            whole = false;
        }
    });
    return !done ? Ran::kStopped : whole ? Ran::kDone : Ran::kShortOfMemory;
}

} // namespace adtp
