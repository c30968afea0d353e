// The first product of attention: queries times keys. Part of tiles.inl.

namespace adtp
{
namespace
{

constexpr float kHidden = -1e30F; // for each key between one and the nearest that a query sees: far below all scores

// Where a block's queries are, for what depends on it. Lanes without a query are like the last one.
struct Lanes
{
    int32_t places[kVectors * kLanes]; // positions
    float from[kVectors * kLanes]; // first and last key that each sees, from the block's first
    float last[kVectors * kLanes]; // exact below 2^24 keys
    bool consecutive; // each position is the one before it plus 1
    int64_t begin; // keys that all see
    int64_t end;

    explicit Lanes(Block const& block)
        : consecutive(block.positions)
        , begin(block.from ? block.from[block.queries - 1] - block.firstKey : 0)
        , end(block.from ? block.to[0] - block.firstKey : block.keys)
    {
        for (int32_t lane = 0; lane < kVectors * kLanes && (block.positions || block.from); ++lane)
        {
            int32_t const query = lane < block.queries ? lane : block.queries - 1;
            places[lane] = block.positions ? block.positions[query] : 0;
            from[lane] = block.from ? static_cast<float>(block.from[query] - block.firstKey) : 0;
            last[lane] = block.from ? static_cast<float>(block.to[query] - block.firstKey - 1) : 0;
            consecutive = consecutive && (lane == 0 || query < lane || places[lane] == places[lane - 1] + 1);
        }
    }
};

// What the sums of some keys' scores begin with: biases, and kHidden for each step out of sight.
template <int32_t Vectors>
inline void startScores(Block const& block, Lanes const& lanes, int64_t first, int64_t keys, float* scores)
{
    Vector const none = Vector::of(0.0F);
    for (int64_t key = first; key < first + keys; ++key, scores += Vectors * kLanes)
    {
        float const* const bias = block.bias ? block.bias - block.keyPositions[key] : nullptr;
        for (int32_t lane = 0; bias && !lanes.consecutive && lane < Vectors * kLanes; ++lane)
        {
            scores[lane] = bias[lanes.places[lane]];
        }
        for (int32_t i = 0; bias && lanes.consecutive && i < Vectors; ++i)
        {
            Vector::store(scores + i * kLanes, Vector::load(bias + lanes.places[0] + i * kLanes));
        }
        Vector const place = Vector::of(static_cast<float>(key));
        for (int32_t i = 0; block.from && i < Vectors; ++i)
        {
            Vector const before = Vector::max(none, Vector::load(lanes.from + i * kLanes) - place);
            Vector const after = Vector::max(none, place - Vector::load(lanes.last + i * kLanes));
            Vector const start = bias ? Vector::load(scores + i * kLanes) : none;
            Vector::store(scores + i * kLanes, Vector::multiplyAdd(before + after, Vector::of(kHidden), start));
        }
    }
}

// The same where it is needed; returns whether it is.
template <int32_t Vectors>
inline bool startIfNeeded(Block const& block, Lanes const& lanes, int64_t first, int64_t keys, float* scores)
{
    bool const needed = block.bias || first < lanes.begin || first + keys > lanes.end;
    if (needed)
    {
        startScores<Vectors>(block, lanes, first, keys, scores);
    }
    return needed;
}

template <int32_t Vectors>
constexpr int32_t kTileKeys = kSums / Vectors < 12 ? kSums / Vectors : 12; // 12 sums hide an addition's latency

// Products: how two vectors are multiplied and added to sums. Where it takes pairs of numbers, `headSize` counts these.
template <int32_t Vectors, typename Products>
struct Scores
{
    float const* queries;
    float const* k;
    int64_t stride;
    int32_t headSize;
    float* scores;
    float* peak;
    bool started;

    template <int32_t Keys>
    void run() const
    {
        started ? tile<Keys, true>() : tile<Keys, false>();
    }

    // scores[key][query] = k[key] . q[query] for `Keys` keys, added to what is there where that is `Started`; peak is raised
    // to the highest of each query.
    template <int32_t Keys, bool Started>
    void tile() const
    {
        Vector sums[Keys][Vectors];
        for (int32_t j = 0; j < Keys; ++j)
        {
            for (int32_t i = 0; i < Vectors; ++i)
            {
                sums[j][i] = Started ? Vector::load(scores + (j * Vectors + i) * kLanes) : Vector::of(0.0F);
            }
        }
        for (int32_t d = 0; d < headSize; ++d)
        {
            Vector query[Vectors];
            for (int32_t i = 0; i < Vectors; ++i)
            {
                query[i] = Vector::load(queries + (d * Vectors + i) * kLanes);
            }
            for (int32_t j = 0; j < Keys; ++j)
            {
                Vector const key = Vector::of(k[j * stride + d]);
                for (int32_t i = 0; i < Vectors; ++i)
                {
                    sums[j][i] = Products::add(key, query[i], sums[j][i]);
                }
            }
        }
        for (int32_t i = 0; i < Vectors; ++i)
        {
            Vector highest = Vector::load(peak + i * kLanes);
            for (int32_t j = 0; j < Keys; ++j)
            {
                highest = Vector::max(sums[j][i], highest);
                Vector::store(scores + (j * Vectors + i) * kLanes, sums[j][i]);
            }
            Vector::store(peak + i * kLanes, highest);
        }
    }
};

// queries[column][query] = q * scale in base-2 exponents; lanes without a query are 0.
template <int32_t Vectors>
inline void transposeQueries(Block const& block, float const* q, int64_t stride, float* queries)
{
    Vector const scale = Vector::of(block.scale * kLog2E);
    for (int32_t i = 0; i < Vectors; ++i)
    {
        for (int32_t d = 0; d < block.headSize; d += kLanes)
        {
            int32_t const columns = block.headSize - d < kLanes ? block.headSize - d : kLanes;
            Vector square[kLanes];
            for (int32_t lane = 0; lane < kLanes; ++lane)
            {
                int32_t const query = i * kLanes + lane;
                bool const there = query < block.queries;
                float const* const row = q + (there ? query * stride + d : 0);
                square[lane] = !there    ? Vector::of(0.0F)
                    : columns == kLanes ? Vector::load(row)
                                        : Vector::loadSome(row, columns);
            }
            Vector::transpose(square);
            for (int32_t c = 0; c < columns; ++c)
            {
                Vector::store(queries + ((d + c) * Vectors + i) * kLanes, square[c] * scale);
            }
        }
    }
}

} // namespace
} // namespace adtp
