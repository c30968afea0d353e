#include "chain.h"

#include <algorithm>
#include <atomic>
#include <thread>

namespace adtp
{
namespace
{

// Of a core's second level, for the numbers of a piece; weights pass through the rest.
constexpr int64_t kCacheBytes = 1 << 20;
constexpr int64_t kLeastRows = 64; // of a piece: each reads all weights
constexpr int64_t kMostRows = 256;
constexpr int64_t kNormRows = 32; // of a piece where products are divided by columns

bool hasSecond(Chain const& chain)
{
    return chain.second.k > 0;
}

// Rows of a piece; 0 where products are to be divided by columns.
int64_t rowsOfPieces(Chain const& chain, LinearLevel const& level)
{
    static int64_t const threads = std::max<int64_t>(1, std::thread::hardware_concurrency());
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
    int64_t const fit = std::clamp(kCacheBytes / bytes, kLeastRows, kMostRows);
    int64_t const pieces = roundUp(divideUp(m, fit), threads);
    return roundUp(divideUp(m, pieces), level.tileRows);
}

// `count` rows from `first` on through everything.
bool runRows(Chain const& chain, LinearLevel const& level, int64_t first, int64_t count)
{
    Linear one = chain.first, two = chain.second;
    one.x += first * one.k;
    one.m = two.m = count;
    RowStore in(one, level), between;
    std::unique_ptr<float[]> hidden;
    if (!in.ready())
    {
        return false;
    }
    if (hasSecond(chain))
    {
        between = RowStore(two, level);
        if (one.scale)
        {
            hidden.reset(new (std::nothrow) float[static_cast<size_t>(count * one.n)]);
        }
        if (!between.ready() || (one.scale && !hidden))
        {
            return false;
        }
        one.y = hidden.get();
        one.low = one.scale ? nullptr : between.rows().values;
        one.lowPitch = between.rows().pitch;
    }
    Linear& last = hasSecond(chain) ? two : one;
    last.y = chain.norm.y + first * chain.norm.n;
    level.convert(one, in.rows(), 0, count);
    level.multiply(one, in.rows(), 0, count, 0, divideUp(one.n, kColumns));
    if (hasSecond(chain))
    {
        if (one.scale)
        {
            two.x = hidden.get();
            level.convert(two, between.rows(), 0, count);
        }
        level.multiply(two, between.rows(), 0, count, 0, divideUp(two.n, kColumns));
    }
    level.addNorm(chain.norm, first, first + count);
    return true;
}

Ran productsByColumns(Chain const& chain, LinearLevel const& level, Parallel const& parallel)
{
    Linear one = chain.first, two = chain.second;
    one.y = chain.norm.y;
    Ran ran = Ran::kDone;
    if (!hasSecond(chain))
    {
        ran = runLinear(one, level, parallel);
    }
    else if (one.scale)
    {
        std::unique_ptr<float[]> const hidden(new (std::nothrow) float[static_cast<size_t>(one.m * one.n)]);
        if (!hidden)
        {
            return Ran::kShortOfMemory;
        }
        one.y = hidden.get();
        two.x = hidden.get();
        two.y = chain.norm.y;
        ran = runLinear(one, level, parallel);
        ran = ran == Ran::kDone ? runLinear(two, level, parallel) : ran;
    }
    else
    {
        RowStore const between(two, level);
        if (!between.ready())
        {
            return Ran::kShortOfMemory;
        }
        one.low = between.rows().values;
        one.lowPitch = between.rows().pitch;
        two.y = chain.norm.y;
        ran = runLinear(one, level, parallel);
        ran = ran == Ran::kDone ? runLinear(two, level, parallel, &between) : ran;
    }
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

Ran runChain(Chain const& chain, LinearLevel const& level, int64_t rows, Parallel const& parallel)
{
    int64_t const m = chain.first.m;
    rows = rows ? rows : rowsOfPieces(chain, level);
    if (rows <= 0)
    {
        return productsByColumns(chain, level, parallel);
    }
    std::atomic<bool> whole{true};
    bool const done = parallel(divideUp(m, rows), [&](int64_t piece) {
        if (!runRows(chain, level, piece * rows, std::min(rows, m - piece * rows)))
        {
            whole = false;
        }
    });
    return !done ? Ran::kStopped : whole ? Ran::kDone : Ran::kShortOfMemory;
}

} // namespace adtp
