// The kernel, for any vector type. Each processor's file defines these before it includes this:
//
//   Vector: kLanes floats; and of vectors min, root, storeBytes and storeBf16(p, x, n)
//   Bf16, Int8: a group of a row times groups of kLanes columns, with
//     kRows: of a tile, kVectors: of its columns; together they fill the registers
//     Sums, Weights, Row; zero(), load(weights), broadcast(row), dot(sums, row, weights)
//   Bf16::value(sums): as floats. Int8::value(sums, columnSums, some, zero): the same less zero * columnSums, of which `some` are there.
//   Bf16::kRowBytes: of a group of a row, as storeBf16 writes it: two of bf16, or two floats rounded to it.
//
// Everything is in an unnamed namespace, and nothing of the standard library is called: a function that the linker may
// share between files must not be compiled for one kind of processor.

#ifdef __GNUC__
#define ADTP_UNROLL _Pragma("GCC unroll 12")
#else
#define ADTP_UNROLL
#endif

namespace adtp
{
namespace
{

constexpr int64_t kLanes = Vector::kLanes;
constexpr int64_t kBf16Bytes = Bf16::kRowBytes / 2; // of a value
constexpr int64_t kAnyTile = 12; // what tiles of 12, 6 and 4 rows divide
constexpr float kLeastScale = 1.17549435e-38F; // the smallest normal number: its inverse is finite

// x * (1 + erf(x / sqrt(2))) / 2, off by at most 5e-6, and by 1.5e-5 of a positive result: the next product rounds it to 8 bits. x is
// multiplied by the share of a normal distribution that lies below it. Between -kFar and kFar this is 1/2 and x times a polynomial of x * x,
// in which kFar * kFar is 1 and 0 is -1. Its ends are 1 and nearly 0, so values below -kFar, including minus infinity, are treated as -kFar.
// (The portable body returns NaN for minus infinity.) NaN stays NaN, because max returns its second argument then.
constexpr float kFar = 4.8203125F;
constexpr float kShare[] = {1.51123991e-3F, -4.37617768e-3F, 5.55704953e-3F, -7.55180605e-3F, 1.40405688e-2F, -2.24013776e-2F,
    3.08445804e-2F, -4.05580774e-2F, 5.27663305e-2F, -7.27022439e-2F, 1.46597624e-1F};
constexpr int32_t kShareTerms = sizeof(kShare) / sizeof(float);

inline Vector gelu(Vector x)
{
    Vector const above = Vector::max(Vector::of(-kFar), x);
    Vector const near = min(above, Vector::of(kFar));
    Vector const t = Vector::multiplyAdd(near * near, Vector::of(2.0F / (kFar * kFar)), Vector::of(-1.0F));
    Vector p = Vector::of(kShare[0]);
    ADTP_UNROLL for (int32_t i = 1; i < kShareTerms; ++i)
    {
        p = Vector::multiplyAdd(p, t, Vector::of(kShare[i]));
    }
    return above * Vector::multiplyAdd(near, p, Vector::of(0.5F));
}

// Where a column of the first row goes, and by how many values rows lie apart.
struct Place
{
    float* first;
    int64_t pitch;
};

inline Place placeOf(Linear const& call, int64_t column)
{
    if (!call.second)
    {
        return {call.y + column, call.n};
    }
    int64_t const width = call.n / 3;
    return column < width  ? Place{call.y + column, width}
        : column < 2 * width ? Place{call.second + column - width, width}
                             : Place{call.third + column - 2 * width, width};
}

// kVectors vectors of Rows rows. Columns from n on are zeros in the weights, and are not stored.
template <typename Kind, int32_t Rows, int32_t Vectors>
inline void finish(Linear const& call, LowRows const& rows, int64_t row, int64_t column, typename Kind::Sums const (&sums)[Rows][Vectors])
{
    ADTP_UNROLL for (int32_t v = 0; v < Vectors; ++v)
    {
        int64_t const c = column + v * kLanes;
        int64_t const left = call.n - c < kLanes ? call.n - c : kLanes;
        if (left <= 0)
        {
            return;
        }
        auto const some = static_cast<int32_t>(left);
        Vector const bias = Vector::loadSome(call.bias + c, some);
        Place const place = placeOf(call, c);
        ADTP_UNROLL for (int32_t r = 0; r < Rows; ++r)
        {
            Vector y = Kind::real(call, rows, row + r, c, some, sums[r][v]) + bias;
            y = call.gelu ? gelu(y) : y;
            if (call.low)
            {
                storeBf16(call.low + (row + r) * call.lowPitch + kBf16Bytes * c, y, some);
                continue;
            }
            float* const to = place.first + (row + r) * place.pitch;
            some == kLanes ? Vector::store(to, y) : Vector::storeSome(to, y, some);
        }
    }
}

struct Bf16Product : Bf16
{
    static constexpr bool kIsInt8 = false;

    static Vector real(Linear const&, LowRows const&, int64_t, int64_t, int32_t, Sums sums) { return value(sums); }
};

struct Int8Product : Int8
{
    static constexpr bool kIsInt8 = true;
    static constexpr int64_t kRowBytes = kGroupBytes;

    static Vector real(Linear const& call, LowRows const& rows, int64_t row, int64_t column, int32_t some, Sums sums)
    {
        Vector const whole = value(sums, call.sums + column, some, rows.zero[row]);
        return whole * Vector::loadSome(call.scale + column, some) * Vector::of(rows.scale[row]);
    }
};

template <typename Kind, int32_t Vectors>
struct Tile
{
    Linear const& call;
    LowRows const& rows;
    int64_t row;
    int64_t column;

    template <int32_t Rows>
    void run() const
    {
        int64_t const groups = groupsOf(call);
        uint8_t const* const x = rows.values + row * rows.pitch;
        auto const* const weights = static_cast<uint8_t const*>(call.weight) + column * groups * kGroupBytes;
        typename Kind::Sums sums[Rows][Vectors];
        ADTP_UNROLL for (int32_t r = 0; r < Rows; ++r)
        {
            ADTP_UNROLL for (int32_t v = 0; v < Vectors; ++v)
            {
                sums[r][v] = Kind::zero();
            }
        }
        for (int64_t g = 0; g < groups; ++g)
        {
            typename Kind::Weights w[Vectors];
            ADTP_UNROLL for (int32_t v = 0; v < Vectors; ++v)
            {
                int64_t const block = v * kLanes / kColumns, within = v * kLanes % kColumns;
                w[v] = Kind::load(weights + (block * groups + g) * kColumns * kGroupBytes + within * kGroupBytes);
            }
            ADTP_UNROLL for (int32_t r = 0; r < Rows; ++r)
            {
                typename Kind::Row const one = Kind::broadcast(x + r * rows.pitch + g * Kind::kRowBytes);
                ADTP_UNROLL for (int32_t v = 0; v < Vectors; ++v)
                {
                    sums[r][v] = Kind::dot(sums[r][v], one, w[v]);
                }
            }
        }
        finish<Kind, Rows, Vectors>(call, rows, row, column, sums);
    }
};

// A call of the template for as many rows as are left: 1 to Most.
template <int32_t Most, typename Call>
inline void dispatchRows(int64_t left, Call const& call)
{
    if constexpr (Most > 1)
    {
        if (left < Most)
        {
            return dispatchRows<Most - 1>(left, call);
        }
    }
    call.template run<Most>();
}

template <typename Kind, int32_t Vectors>
inline void columns(Linear const& call, LowRows const& rows, int64_t first, int64_t end, int64_t column)
{
    for (int64_t row = first; row < end; row += Kind::kRows)
    {
        dispatchRows<Kind::kRows>(end - row, Tile<Kind, Vectors>{call, rows, row, column});
    }
}

template <typename Kind>
inline void multiplyAs(
    Linear const& call, LowRows const& rows, int64_t first, int64_t end, int64_t firstBlock, int64_t endBlock)
{
    constexpr int64_t wide = Kind::kVectors * kLanes / kColumns; // blocks
    constexpr auto narrow = static_cast<int32_t>(kColumns / kLanes); // vectors of one block
    int64_t block = firstBlock;
    for (; block + wide <= endBlock; block += wide)
    {
        columns<Kind, Kind::kVectors>(call, rows, first, end, block * kColumns);
    }
    for (; block < endBlock; ++block)
    {
        columns<Kind, narrow>(call, rows, first, end, block * kColumns);
    }
}

void multiply(Linear const& call, LowRows const& rows, int64_t first, int64_t end, int64_t firstBlock, int64_t endBlock)
{
    call.scale ? multiplyAs<Int8Product>(call, rows, first, end, firstBlock, endBlock)
               : multiplyAs<Bf16Product>(call, rows, first, end, firstBlock, endBlock);
}

inline Vector loadUpTo(float const* x, int64_t left)
{
    return left >= kLanes ? Vector::load(x) : Vector::loadSome(x, static_cast<int32_t>(left));
}

inline float sumOf(Vector x)
{
    float lanes[kLanes];
    Vector::store(lanes, x);
    float sum = 0.0F;
    for (float const lane : lanes)
    {
        sum += lane;
    }
    return sum;
}

inline void storeUpTo(float* y, int64_t left, Vector x)
{
    left >= kLanes ? Vector::store(y, x) : Vector::storeSome(y, x, static_cast<int32_t>(left));
}

void addNorm(AddNorm const& call, int64_t first, int64_t end)
{
    auto const count = static_cast<float>(call.n);
    for (int64_t row = first; row < end; ++row)
    {
        float* const y = call.y + row * call.n;
        float const* const residual = call.residual + row * call.n;
        Vector sums = Vector::of(0.0F);
        for (int64_t i = 0; i < call.n; i += kLanes)
        {
            Vector const x = loadUpTo(y + i, call.n - i) + loadUpTo(residual + i, call.n - i);
            storeUpTo(y + i, call.n - i, x);
            sums = sums + x;
        }
        Vector const mean = Vector::of(sumOf(sums) / count);
        sums = Vector::of(0.0F);
        for (int64_t i = 0; i < call.n; i += kLanes)
        {
            storeUpTo(y + i, call.n - i, loadUpTo(y + i, call.n - i) - mean);
            Vector const x = loadUpTo(y + i, call.n - i); // read again, for the zeros behind a row
            sums = Vector::multiplyAdd(x, x, sums);
        }
        float roots[kLanes];
        Vector::store(roots, root(Vector::of(sumOf(sums) / count + call.epsilon)));
        Vector const factor = Vector::of(1.0F / roots[0]);
        for (int64_t i = 0; i < call.n; i += kLanes)
        {
            Vector const gamma = loadUpTo(call.gamma + i, call.n - i), beta = loadUpTo(call.beta + i, call.n - i);
            storeUpTo(y + i, call.n - i, Vector::multiplyAdd(loadUpTo(y + i, call.n - i) * factor, gamma, beta));
        }
    }
}

// What is rounded of a row, from column i on.
inline Vector smoothed(Linear const& call, float const* x, int64_t i)
{
    Vector const v = loadUpTo(x + i, call.k - i);
    return call.factors ? v * loadUpTo(call.factors + i, call.k - i) : v;
}

// Its scale holds the row's smallest and largest value, and 0, which is one of its 256 numbers.
inline void quantize(Linear const& call, LowRows const& rows, int64_t row)
{
    float const* const x = call.x + row * call.k;
    uint8_t* const values = rows.values + row * rows.pitch;
    Vector low = Vector::of(0.0F);
    Vector high = low;
    Vector bad = low;
    for (int64_t i = 0; i < call.k; i += kLanes)
    {
        Vector const v = smoothed(call, x, i);
        low = min(v, low);
        high = Vector::max(v, high);
        bad = Vector::multiplyAdd(v, Vector::of(0.0F), bad); // NaN of NaN and of infinity
    }
    float lows[kLanes], highs[kLanes], bads[kLanes];
    Vector::store(lows, low);
    Vector::store(highs, high);
    Vector::store(bads, bad);
    float least = 0.0F, largest = 0.0F, wrong = 0.0F;
    for (int64_t i = 0; i < kLanes; ++i)
    {
        least = lows[i] < least ? lows[i] : least;
        largest = highs[i] > largest ? highs[i] : largest;
        wrong += bads[i];
    }
    float scale = largest / 255.0F - least / 255.0F; // each alone, because a difference may be infinite
    scale = scale < kLeastScale ? kLeastScale : scale;
    if (wrong != 0.0F) // it is NaN: no number of the row is made an integer
    {
        for (int64_t i = 0; i < call.k; ++i)
        {
            values[i] = 0;
        }
        rows.scale[row] = wrong;
        rows.zero[row] = 0;
        return;
    }
    float const inverse = 1.0F / scale;
    float zeros[kLanes];
    Vector::store(zeros, Vector::round(Vector::of(-least * inverse)));
    rows.scale[row] = scale;
    rows.zero[row] = static_cast<int32_t>(zeros[0]);
    for (int64_t i = 0; i < call.k; i += kLanes)
    {
        int64_t const left = call.k - i < kLanes ? call.k - i : kLanes;
        Vector u = Vector::round(smoothed(call, x, i) * Vector::of(inverse)) + Vector::of(zeros[0]);
        u = Vector::max(u, Vector::of(0.0F)); // the clip to 255 is in storeBytes
        storeBytes(values + i, u, static_cast<int32_t>(left));
    }
}

void convert(Linear const& call, LowRows const& rows, int64_t first, int64_t end)
{
    for (int64_t row = first; row < end; ++row)
    {
        if (call.scale)
        {
            quantize(call, rows, row);
            continue;
        }
        uint8_t* const values = rows.values + row * rows.pitch;
        for (int64_t i = 0; i < call.k; i += kLanes)
        {
            int64_t const left = call.k - i < kLanes ? call.k - i : kLanes;
            storeBf16(values + kBf16Bytes * i, loadUpTo(call.x + row * call.k + i, left), static_cast<int32_t>(left));
        }
    }
}

} // namespace
} // namespace adtp
