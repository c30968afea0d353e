// One or two products with the sum and norm behind them: what a layer does to each token alone. Pieces of rows go through all of it while
// they lie in a core's cache. Where there are too few rows for that, each product is divided by columns, too.
#pragma once

#include "linear_pieces.h"

namespace adtp
{

// y = the norm of (x through the products) + residual. Without a second product its k is 0. Both are of one precision, and the y of
// the last one is the norm's; that of a first one of two is not used.
struct Chain
{
    Linear first;
    Linear second;
    AddNorm norm;
};

// rows: of a piece; 0: as many as suit the caches and threads here, or products by columns; negative: products by columns.
Ran runChain(Chain const& chain, LinearLevel const& level, int64_t rows, Parallel parallel);

// Set how many threads later calls run on. The default is the number of processors, even where the process may use fewer.
void setThreads(int64_t count);

} // namespace adtp
