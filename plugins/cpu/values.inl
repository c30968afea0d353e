// The second product of attention: weights times values. Part of tiles.inl.

namespace adtp
{
namespace
{

constexpr int32_t kRows = kSums / 2; // queries of a tile, which has two vectors of columns

// out[row] = (out[row] * before[row] + sum over keys of weights[key][row] * v[key]) * after[row], for some columns. Products: as of scores;
// where it takes pairs, `keys` counts these.
template <typename Products>
struct Mix
{
    float const* weights; // of the first of these rows; keys lie `pitch` apart
    int64_t pitch;
    float const* v;
    float* out;
    int64_t vStride;
    int64_t stride; // of out
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
                value[c] = loadColumns<Vectors>(v + j * vStride, c);
            }
            for (int32_t r = 0; r < Rows; ++r)
            {
                Vector const weight = Vector::of(weights[j * pitch + r]);
                for (int32_t c = 0; c < Vectors; ++c)
                {
                    sums[r][c] = Products::add(weight, value[c], sums[r][c]);
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

template <typename Products, int32_t Vectors>
struct MixRows
{
    Mix<Products> const& mix;

    template <int32_t Rows>
    void run() const
    {
        mix.template tile<Rows, Vectors>();
    }
};

// The weights of some keys times their values, into `out`: `queries` rows of `headSize` columns.
template <typename Products>
inline void mix(Mix<Products> part, int32_t queries, int32_t headSize)
{
    Mix<Products> const whole = part;
    int32_t const tiles = (queries + kRows - 1) / kRows;
    for (int32_t column = 0; column < headSize;)
    {
        bool const two = headSize - column >= 2 * kLanes;
        part.columns = headSize - column < kLanes ? headSize - column : kLanes;
        part.v = whole.v + column;
        for (int32_t t = 0, row = 0; t < tiles; ++t)
        {
            int32_t const rows = (queries - row + tiles - t - 1) / (tiles - t); // tiles of even height
            part.weights = whole.weights + row;
            part.out = whole.out + row * whole.stride + column;
            part.before = whole.before ? whole.before + row : nullptr;
            part.after = whole.after + row;
            two ? dispatch<kRows>(rows, MixRows<Products, 2>{part}) : dispatch<kRows>(rows, MixRows<Products, 1>{part});
            row += rows;
        }
        column += two ? 2 * kLanes : kLanes;
    }
}

} // namespace
} // namespace adtp
