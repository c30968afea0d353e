// The kernel, for any vector type. Each processor's file defines `Vector` and `kSums` before it includes this.
//
// Queries lie in the lanes of vectors, keys and columns of values are walked. So neither queries, keys nor values are
// copied, but for one transposed block of queries, and no step of the softmax crosses lanes. Blocks of keys are taken
// with a running softmax (Milakov and Gimelshein, arXiv 1805.02867; FlashAttention, Dao et al., NeurIPS 2022).
//
// Everything is in an unnamed namespace, and nothing of the standard library is called: a function that the linker may
// share between files must not be compiled for one kind of processor.

#include "attention.h"

namespace adtp
{
namespace
{

constexpr int32_t kLanes = Vector::kLanes;
constexpr int32_t kVectors = 3; // of queries in a block
constexpr int32_t kRows = kSums / 2; // queries of a tile of the second product, which has two vectors of columns
constexpr int64_t kBlockKeys = 128; // taken at once, unless somebody asks what keys received
constexpr float kLog2E = 1.44269504F;
constexpr float kLowest = -3.40282347e38F;

// 2 to the power of x, for x <= 0. With fused multiply-adds it is off by at most 0.94 units in the last place, without by
// 1.21, as measured on every 13th number down to -125. Below that it stays 2^-125. NaN stays NaN.
inline Vector powerOf2(Vector x)
{
    x = Vector::max(Vector::of(-125.0F), x);
    Vector const whole = Vector::round(x);
    Vector const part = x - whole; // exact, in [-0.5, 0.5]
    Vector power = Vector::of(0x1.41fbbcp-13F); // minimax of 2^part, relative error 2.0e-9
    power = Vector::multiplyAdd(power, part, Vector::of(0x1.5f3e54p-10F));
    power = Vector::multiplyAdd(power, part, Vector::of(0x1.3b2d4cp-7F));
    power = Vector::multiplyAdd(power, part, Vector::of(0x1.c6aee8p-5F));
    power = Vector::multiplyAdd(power, part, Vector::of(0x1.ebfbdcp-3F));
    power = Vector::multiplyAdd(power, part, Vector::of(0x1.62e430p-1F));
    power = Vector::multiplyAdd(power, part, Vector::of(1.0F));
    return Vector::timesPowerOf2(power, whole);
}

// scores[key][query] = k[key] . q[query] for `Keys` keys; peak is raised to the highest of each query.
template <int32_t Keys, int32_t Vectors>
inline void scoreTile(float const* queries, float const* k, int64_t stride, int32_t headSize, float* scores, float* peak)
{
    Vector sums[Keys][Vectors];
    for (auto& row : sums)
    {
        for (Vector& sum : row)
        {
            sum = Vector::of(0.0F);
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
                sums[j][i] = Vector::multiplyAdd(key, query[i], sums[j][i]);
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

// A call of the template for as many keys, or rows, as are left: 1 to Most.
template <int32_t Most, typename Call>
inline void dispatch(int64_t left, Call const& call)
{
    if constexpr (Most > 1)
    {
        if (left < Most)
        {
            return dispatch<Most - 1>(left, call);
        }
    }
    call.template run<Most>();
}

template <int32_t Vectors>
struct Scores
{
    float const* queries;
    float const* k;
    int64_t stride;
    int32_t headSize;
    float* scores;
    float* peak;

    template <int32_t Keys>
    void run() const
    {
        scoreTile<Keys, Vectors>(queries, k, stride, headSize, scores, peak);
    }
};

// out[row] = (out[row] * before[row] + sum over keys of weights[key][row] * v[key]) * after[row], for some columns.
struct Mix
{
    float const* weights; // of the first of these rows; keys lie `pitch` apart
    int64_t pitch;
    float const* v;
    float* out;
    int64_t stride;
    int64_t keys;
    int32_t columns; // of the last vector, 1 to kLanes
    float const* before; // null where nothing is in `out` yet
    float const* after;

    template <int32_t Rows, int32_t Vectors>
    void tile() const
    {
        Vector sums[Rows][Vectors];
        for (int32_t r = 0; r < Rows; ++r)
        {
            for (int32_t c = 0; c < Vectors; ++c)
            {
                sums[r][c] = before ? loadColumns<Vectors>(out + r * stride, c) * Vector::of(before[r]) : Vector::of(0.0F);
            }
        }
        for (int64_t j = 0; j < keys; ++j)
        {
            Vector value[Vectors];
            for (int32_t c = 0; c < Vectors; ++c)
            {
                value[c] = loadColumns<Vectors>(v + j * stride, c);
            }
            for (int32_t r = 0; r < Rows; ++r)
            {
                Vector const weight = Vector::of(weights[j * pitch + r]);
                for (int32_t c = 0; c < Vectors; ++c)
                {
                    sums[r][c] = Vector::multiplyAdd(weight, value[c], sums[r][c]);
                }
            }
        }
        for (int32_t r = 0; r < Rows; ++r)
        {
            for (int32_t c = 0; c < Vectors; ++c)
            {
                float* const place = out + r * stride + c * kLanes;
                Vector const sum = sums[r][c] * Vector::of(after[r]);
                Vectors == 2 || columns == kLanes ? Vector::store(place, sum) : Vector::storeSome(place, sum, columns);
            }
        }
    }

    template <int32_t Vectors>
    Vector loadColumns(float const* row, int32_t c) const
    {
        return Vectors == 2 || columns == kLanes ? Vector::load(row + c * kLanes) : Vector::loadSome(row, columns);
    }
};

template <int32_t Vectors>
struct MixRows
{
    Mix const& mix;

    template <int32_t Rows>
    void run() const
    {
        mix.tile<Rows, Vectors>();
    }
};

// The weights of a block of keys times its values, into `out`.
inline void mix(Block const& block, Mix part, int64_t firstKey)
{
    float const* const weights = part.weights;
    float const* const before = part.before;
    float const* const after = part.after;
    int32_t const tiles = (block.queries + kRows - 1) / kRows;
    for (int32_t column = 0; column < block.headSize;)
    {
        bool const two = block.headSize - column >= 2 * kLanes;
        part.columns = block.headSize - column < kLanes ? block.headSize - column : kLanes;
        for (int32_t t = 0, row = 0; t < tiles; ++t)
        {
            int32_t const rows = (block.queries - row + tiles - t - 1) / (tiles - t); // tiles of even height
            part.weights = weights + row;
            part.v = block.v + firstKey * block.stride + column;
            part.out = block.out + row * block.stride + column;
            part.before = before ? before + row : nullptr;
            part.after = after + row;
            two ? dispatch<kRows>(rows, MixRows<2>{part}) : dispatch<kRows>(rows, MixRows<1>{part});
            row += rows;
        }
        column += two ? 2 * kLanes : kLanes;
    }
}

// queries[column][query] = q * scale in base-2 exponents; lanes without a query are 0.
template <int32_t Vectors>
inline void transposeQueries(Block const& block, float* queries)
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
                float const* const row = block.q + query * block.stride + d;
                square[lane] = query >= block.queries ? Vector::of(0.0F)
                    : columns == kLanes              ? Vector::load(row)
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

// received[key] = sum over queries of weights[key][query] / total[query].
template <int32_t Vectors>
inline void receive(Block const& block, float const* weights, float const* inverse)
{
    constexpr int32_t width = Vectors * kLanes;
    Vector share[Vectors];
    for (int32_t i = 0; i < Vectors; ++i)
    {
        float some[kLanes];
        for (int32_t lane = 0; lane < kLanes; ++lane)
        {
            some[lane] = i * kLanes + lane < block.queries ? inverse[i * kLanes + lane] : 0.0F;
        }
        share[i] = Vector::load(some);
    }
    for (int64_t j = 0; j < block.keys; ++j)
    {
        Vector sum = Vector::load(weights + j * width) * share[0];
        for (int32_t i = 1; i < Vectors; ++i)
        {
            sum = Vector::multiplyAdd(Vector::load(weights + j * width + i * kLanes), share[i], sum);
        }
        float some[kLanes];
        Vector::store(some, sum);
        float total = 0.0F;
        for (float const one : some)
        {
            total += one;
        }
        block.received[j] = total;
    }
}

template <int32_t Vectors>
inline void attendWith(Block const& block)
{
    constexpr int32_t width = Vectors * kLanes;
    constexpr int32_t tile = kSums / Vectors < 12 ? kSums / Vectors : 12; // keys; 12 sums hide an addition's latency
    float* const queries = block.scratch; // (headSize, width)
    float* const peak = queries + block.headSize * width; // of each query, all (width,)
    float* const before = peak + width; // what the sums so far are worth below a higher peak
    float* const after = before + width;
    float* const weights = after + width; // (keys of a block, width)
    transposeQueries<Vectors>(block, queries);
    Vector total[Vectors];
    for (int32_t i = 0; i < Vectors; ++i)
    {
        total[i] = Vector::of(0.0F);
        Vector::store(peak + i * kLanes, Vector::of(kLowest));
        Vector::store(after + i * kLanes, Vector::of(1.0F));
    }
    int64_t const most = block.received ? block.keys : kBlockKeys;
    for (int64_t first = 0; first < block.keys; first += most)
    {
        int64_t const keys = block.keys - first < most ? block.keys - first : most;
        float const* const k = block.k + first * block.stride;
        Vector old[Vectors];
        for (int32_t i = 0; i < Vectors; ++i)
        {
            old[i] = Vector::load(peak + i * kLanes);
        }
        for (int64_t j = 0; j < keys; j += tile)
        {
            dispatch<tile>(keys - j,
                Scores<Vectors>{queries, k + j * block.stride, block.stride, block.headSize, weights + j * width, peak});
        }
        Vector highest[Vectors];
        for (int32_t i = 0; i < Vectors; ++i)
        {
            highest[i] = Vector::load(peak + i * kLanes);
            Vector const shrink = powerOf2(old[i] - highest[i]);
            total[i] = total[i] * shrink;
            Vector::store(before + i * kLanes, shrink);
        }
        for (int64_t j = 0; j < keys * Vectors; j += Vectors)
        {
            for (int32_t i = 0; i < Vectors; ++i)
            {
                float* const place = weights + (j + i) * kLanes;
                Vector const weight = powerOf2(Vector::load(place) - highest[i]);
                Vector::store(place, weight);
                total[i] = total[i] + weight;
            }
        }
        if (first + keys == block.keys)
        {
            for (int32_t i = 0; i < Vectors; ++i)
            {
                Vector::store(after + i * kLanes, Vector::of(1.0F) / total[i]);
            }
        }
        Mix const part{weights, width, nullptr, nullptr, block.stride, keys, 0, first ? before : nullptr, after};
        mix(block, part, first);
    }
    if (block.received)
    {
        receive<Vectors>(block, weights, after);
    }
}

void attend(Block const& block)
{
    static_assert(kVectors == 3, "one call for each number of vectors");
    if (block.queries > 2 * kLanes)
    {
        attendWith<3>(block);
    }
    else if (block.queries > kLanes)
    {
        attendWith<2>(block);
    }
    else
    {
        attendWith<1>(block);
    }
}

size_t scratch(int64_t keys, int32_t headSize, bool received)
{
    int64_t const rows = received || keys < kBlockKeys ? keys : kBlockKeys;
    return static_cast<size_t>((headSize + 3 + rows) * kVectors * kLanes);
}

} // namespace
} // namespace adtp
