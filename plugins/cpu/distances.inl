// What scores get from distances, as in DeBERTa: queries times keys of distances, and keys times queries of distances. Part of
// attention.inl.
//
// The first product is made once for a block, for all columns that its keys may need. The second is made key by key, for the columns that
// the block's queries are away from it: as many as there are queries where none was dropped, and fewer where buckets are wide. So there
// is no more of either than of the product of queries and keys, and no number is kept for a pair of tokens.

namespace adtp
{
namespace
{

constexpr int32_t kAlong = 4; // rows that are multiplied at once

// Columns that a row of products has room for: whole vectors are written.
inline int64_t paddedColumns(int64_t columns)
{
    return (columns + kLanes - 1) / kLanes * kLanes;
}

inline int32_t columnOf(Distances const& terms, int64_t distance)
{
    return terms.buckets[distance < -terms.reach ? -terms.reach : distance > terms.reach ? terms.reach : distance];
}

inline int64_t distancesScratch(int64_t columns)
{
    return columns ? paddedColumns(columns) * (kVectors * kLanes + 1) : 0;
}

// out[row][column] = sum over d of x[row][d] * table[d][column].
struct Along
{
    float const* x;
    int64_t stride; // between rows of x
    int64_t step; // and its columns
    float const* table; // at the first column; whole vectors are read
    int64_t pitch; // of the table
    int64_t columns; // that are wanted
    int32_t headSize;
    float* out;
    int64_t outPitch; // at least paddedColumns(columns)

    // Chains: sums that a number is added up in; rows times chains hide an addition's latency.
    template <int32_t Rows, int32_t Chains>
    void run() const
    {
        int64_t column = 0;
        for (; column + 3 * kLanes <= columns; column += 3 * kLanes)
        {
            tile<Rows, Chains, 3>(column);
        }
        for (; column < columns; column += kLanes)
        {
            tile<Rows, Chains, 1>(column);
        }
    }

private:
    template <int32_t Rows, int32_t Chains, int32_t Vectors>
    void tile(int64_t column) const
    {
        Vector sums[Chains][Rows][Vectors];
        for (int32_t chain = 0; chain < Chains; ++chain)
        {
            for (int32_t r = 0; r < Rows; ++r)
            {
                for (int32_t c = 0; c < Vectors; ++c)
                {
                    sums[chain][r][c] = Vector::of(0.0F);
                }
            }
        }
        int32_t d = 0;
        for (; d + Chains <= headSize; d += Chains)
        {
            for (int32_t chain = 0; chain < Chains; ++chain)
            {
                add<Rows, Vectors>(column, d + chain, sums[chain]);
            }
        }
        for (; d < headSize; ++d)
        {
            add<Rows, Vectors>(column, d, sums[0]);
        }
        for (int32_t r = 0; r < Rows; ++r)
        {
            for (int32_t c = 0; c < Vectors; ++c)
            {
                Vector sum = sums[0][r][c];
                for (int32_t chain = 1; chain < Chains; ++chain)
                {
                    sum = sum + sums[chain][r][c];
                }
                Vector::store(out + r * outPitch + column + c * kLanes, sum);
            }
        }
    }

    template <int32_t Rows, int32_t Vectors>
    void add(int64_t column, int32_t d, Vector (&sums)[Rows][Vectors]) const
    {
        Vector value[Vectors];
        for (int32_t c = 0; c < Vectors; ++c)
        {
            value[c] = Vector::load(table + d * pitch + column + c * kLanes);
        }
        for (int32_t r = 0; r < Rows; ++r)
        {
            Vector const factor = Vector::of(x[r * stride + d * step]);
            for (int32_t c = 0; c < Vectors; ++c)
            {
                sums[r][c] = Vector::multiplyAdd(factor, value[c], sums[r][c]);
            }
        }
    }
};

// Both terms of a block; nothing where it has none.
template <int32_t Vectors>
class Terms
{
public:
    // queries: (headSize, kWidth), scaled. scratch: distancesScratch(...) elements.
    Terms(Block const& block, Lanes const& lanes, float const* queries, float* scratch)
        : mBlock(block)
        , mLanes(lanes)
        , mQueries(queries)
        , mFirst(there() ? column(0, block.keys - 1) : 0)
        , mColumns(there() ? column(block.queries - 1, 0) - mFirst + 1 : 0)
        , mPitch(paddedColumns(mColumns))
        , mOfQueries(scratch)
        , mOfKey(scratch + mPitch * kWidth)
    {
    }

    bool there() const { return mBlock.distances.keys != nullptr; }

    // Multiply the columns that any of the keys needs by the queries.
    void begin() const
    {
        Distances const& terms = mBlock.distances;
        for (int64_t column = 0; there() && column < mColumns; column += kAlong)
        {
            // Columns past the last one are there in the table, and in the scratch.
            Along const part{terms.keys + (mFirst - terms.first) + column, 1, terms.pitch, mQueries, kWidth, kWidth,
                mBlock.headSize, mOfQueries + column * kWidth, kWidth};
            part.run<kAlong, 1>();
        }
    }

    // What the sums of some keys' scores begin with: both terms.
    void start(int64_t first, int64_t keys, float const* k, int64_t stride, float* scores) const
    {
        Distances const& terms = mBlock.distances;
        float const scale = mBlock.scale * kLog2E;
        for (int64_t key = first; key < first + keys; ++key, k += stride, scores += kWidth)
        {
            int32_t const low = column(0, key);
            int64_t const columns = column(mBlock.queries - 1, key) - low + 1;
            Along const part{k, 0, 1, terms.queries + (low - terms.first), terms.pitch, columns, mBlock.headSize, mOfKey, 0};
            part.run<1, kAlong>();
            float const* const own = mOfQueries + (low - mFirst) * kWidth;
            if (columns == 1) // all queries are as far away: the rule in long texts
            {
                Vector const same = Vector::of(scale * mOfKey[0]);
                for (int32_t i = 0; i < Vectors; ++i)
                {
                    Vector::store(scores + i * kLanes, Vector::load(own + i * kLanes) + same);
                }
                continue;
            }
            int64_t const place = mBlock.keyPositions[key];
            for (int32_t lane = 0; lane < kWidth; ++lane)
            {
                int32_t const at = columnOf(terms, mLanes.places[lane] - place) - low;
                scores[lane] = own[at * kWidth + lane] + scale * mOfKey[at];
            }
        }
    }

private:
    static constexpr int32_t kWidth = Vectors * kLanes;

    int32_t column(int32_t query, int64_t key) const
    {
        return columnOf(mBlock.distances, int64_t{mBlock.positions[query]} - mBlock.keyPositions[key]);
    }

    Block const& mBlock;
    Lanes const& mLanes;
    float const* const mQueries;
    int32_t const mFirst; // column of the distance from the first query to the last key
    int64_t const mColumns; // from there to that from the last query to the first key
    int64_t const mPitch;
    float* const mOfQueries; // (mPitch, kWidth)
    float* const mOfKey; // (mPitch,)
};

} // namespace
} // namespace adtp
