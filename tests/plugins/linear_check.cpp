// Products in lower precision, alone and with a sum and norm behind them, in arrays without a byte to spare, for sanitizers; results of
// products against double. With the path of a library, its functions are called in place of those that are linked.
#include "linear_product.h"
#include "loaded.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <initializer_list>
#include <vector>

namespace
{

constexpr double kEps = 0x1p-23; // of fp32
constexpr double kGeluError = 5e-6, kGeluRounds = 1e-6; // linear_calls.py has the same

bool failed(char const* level, Product const& product, char const* what)
{
    std::printf("%s, %s: %lld x %lld x %lld: %s\n", level, product.int8 ? "int8" : "bf16", static_cast<long long>(product.m),
        static_cast<long long>(product.k), static_cast<long long>(product.n), what);
    return false;
}

// Weights of +-1 and rows of small whole numbers are exact in both precisions. In INT8 rows are halved by their factors first.
bool holds(char const* level, int64_t m, int64_t k, int64_t n, bool int8, bool gelu)
{
    Product product(m, k, n, int8);
    product.gelu = gelu;
    std::fill(product.factors.begin(), product.factors.end(), 0.5F);
    std::fill(product.bias.begin(), product.bias.end(), 0.5F);
    auto const sign = [](int64_t i, int64_t j) { return (i * 7 + j * 3) % 5 < 2 ? -1 : 1; };
    std::vector<float> x(m * k);
    for (int64_t i = 0; i < m * k; ++i)
    {
        x[i] = i % k == 0 ? 255.0F - 100.0F : i % k == 1 ? -100.0F : static_cast<float>(i % 50); // a scale of 1 for k > 1
        product.x[i] = x[i] * (int8 ? 2.0F : 1.0F);
    }
    for (int64_t j = 0; j < n; ++j)
    {
        for (int64_t i = 0; i < k; ++i)
        {
            product.set(j, i, static_cast<float>(sign(i, j)));
        }
    }
    std::vector<float> const y = product.run(level);
    for (int64_t at = 0; at < m * n; ++at)
    {
        int64_t const r = at / n, j = at % n;
        double sum = 0.5;
        for (int64_t i = 0; i < k; ++i)
        {
            sum += static_cast<double>(x[r * k + i]) * sign(i, j);
        }
        double const want = gelu ? sum * std::erfc(-sum / std::sqrt(2.0)) / 2 : sum;
        if (!(std::abs(y[at] - want) <= 1e-6 * (std::abs(want) + 155 * static_cast<double>(k))))
        {
            std::printf("%g instead of %g\n", static_cast<double>(y[at]), want);
            return failed(level, product, "whole numbers");
        }
    }
    return true;
}

// A row of 8 bits whose scale is 1, its extremes among it, and the whole numbers that it is rounded to. `halves`: its ends and others lie
// between an even and an odd one, and the upper end would become 256.
void fillExact(float* x, int64_t* whole, int64_t k, bool halves, bool low)
{
    float const half = halves ? 0.5F : 0.0F;
    int64_t zero = 0;
    do
    {
        zero = halves ? 2 * between(1, 127) : between(0, 255);
        x[0] = half - static_cast<float>(zero);
        x[1] = static_cast<float>(255 - zero) + half;
    } while (x[1] / 255.0F - x[0] / 255.0F != 1.0F);
    whole[0] = -zero;
    whole[1] = 255 - zero;
    for (int64_t i = 2; i < k; ++i)
    {
        whole[i] = (low ? halves : between(halves, 255)) - zero;
        bool const isHalf = halves && whole[i] % 2 == 0;
        x[i] = static_cast<float>(whole[i]) + (isHalf ? std::copysign(0.5F, static_cast<float>(whole[i])) : 0.0F);
    }
}

// With scales of 1, results are the sums themselves, in every level.
bool hasExactSums(char const* level)
{
    Product product(between(1, 20), between(2, 200), between(1, 80), true);
    int64_t const m = product.m, k = product.k, n = product.n;
    for (int64_t at = 0; at < n * k; ++at)
    {
        product.set(at / k, at % k, static_cast<float>(at < k ? -128 : between(-128, 127)));
    }
    std::vector<int64_t> whole(m * k);
    for (int64_t r = 0; r < m; ++r)
    {
        fillExact(product.x.data() + r * k, whole.data() + r * k, k, r % 2 == 1, r == 0);
    }
    std::vector<float> const y = product.run(level);
    for (int64_t at = 0; at < m * n; ++at)
    {
        int64_t sum = 0;
        for (int64_t i = 0; i < k; ++i)
        {
            sum += whole[at / n * k + i] * static_cast<int64_t>(product.stored[at % n * k + i]);
        }
        if (y[at] != static_cast<float>(sum))
        {
            return failed(level, product, "another sum");
        }
    }
    return true;
}

// Rows and weights of any size, and a bias.
Product anyProduct(int64_t m, int64_t k, int64_t n, bool int8)
{
    Product product(m, k, n, int8);
    product.gelu = between(0, 1) == 1;
    for (int64_t r = 0; r < m; ++r)
    {
        float const size = std::exp(normal()), middle = normal();
        for (int64_t i = 0; i < k; ++i)
        {
            float const x = normal() * size + middle;
            bool const isTie = between(0, 7) == 0; // of two numbers in bf16
            product.x[r * k + i] = isTie ? adtp::fromBits((adtp::bitsOf(x) & 0xFFFF0000U) | 0x8000U) : x;
        }
    }
    bool const smooth = between(0, 1) == 1;
    for (float& factor : product.factors)
    {
        factor = smooth ? std::exp(normal()) : 1.0F;
    }
    for (int64_t j = 0; j < n; ++j)
    {
        product.bias[j] = normal();
        for (int64_t i = 0; i < k; ++i)
        {
            product.set(j, i, int8 ? static_cast<float>(between(-127, 127)) : normal());
        }
    }
    for (float& scale : product.scale)
    {
        scale = std::exp(normal()) / 1000.0F;
    }
    return product;
}

// A row as it is rounded, in double.
std::vector<double> roundedRow(Product const& product, int64_t r)
{
    std::vector<double> rounded(product.k);
    std::vector<float> row(product.x.begin() + r * product.k, product.x.begin() + (r + 1) * product.k);
    float low = 0.0F, high = 0.0F;
    for (int64_t i = 0; i < product.k; ++i)
    {
        rounded[i] = static_cast<double>(adtp::fromBfloat(adtp::toBfloat(row[i])));
        row[i] *= product.int8 ? product.factors[i] : 1.0F;
        low = std::min(low, row[i]);
        high = std::max(high, row[i]);
    }
    float const scale = std::max(high / 255.0F - low / 255.0F, 1.17549435e-38F), inverse = 1.0F / scale;
    float const zero = std::nearbyint(-low * inverse);
    for (int64_t i = 0; product.int8 && i < product.k; ++i)
    {
        float const u = std::clamp(std::nearbyint(row[i] * inverse) + zero, 0.0F, 255.0F);
        rounded[i] = static_cast<double>(u - zero) * static_cast<double>(scale);
    }
    return rounded;
}

// The bound is that of `expected` in linear_calls.py.
bool isWithinBounds(char const* level, Product const& product)
{
    std::vector<float> const y = product.run(level);
    for (int64_t r = 0; r < product.m; ++r)
    {
        std::vector<double> const x = roundedRow(product, r);
        for (int64_t j = 0; j < product.n; ++j)
        {
            double sum = 0, size = 0;
            for (int64_t i = 0; i < product.k; ++i)
            {
                double const one = x[i] * product.stored[j * product.k + i] * (product.int8 ? static_cast<double>(product.scale[j]) : 1);
                sum += one;
                size += std::abs(one);
            }
            double const bias = product.bias[j], whole = sum + bias;
            double const summed = product.int8 ? 4 * std::abs(sum) : (static_cast<double>(product.k) + 4) * size;
            double allowed = kEps * (summed + 2 * (std::abs(sum) + std::abs(bias))), want = whole;
            if (product.gelu)
            {
                want = whole * std::erfc(-whole / std::sqrt(2.0)) / 2;
                allowed = 1.2 * allowed + kGeluError + kGeluRounds * std::abs(want);
            }
            if (!(std::abs(static_cast<double>(y[r * product.n + j]) - want) <= allowed))
            {
                return failed(level, product, "more than rounding");
            }
        }
    }
    return true;
}

// A row depends on itself alone, and a number that is none spoils its row alone, and all of it.
bool staysInItsRow(char const* level, Product product, float wrong)
{
    int64_t const m = product.m, k = product.k, n = product.n, r = between(0, m - 1);
    std::vector<float> const before = product.run(level), alone = product.row(r).run(level);
    if (!isSame(alone.data(), before.data() + r * n, n))
    {
        return failed(level, product, "a row depends on its neighbours");
    }
    product.x[r * k + between(0, k - 1)] = wrong;
    std::vector<float> const after = product.run(level);
    bool const isNan = product.int8 || std::isnan(wrong);
    bool const isAny = !isNan && product.gelu; // of which minus infinity is 0
    for (int64_t j = 0; j < n; ++j)
    {
        float const y = after[r * n + j];
        if (!(isNan ? std::isnan(y) : isAny || !std::isfinite(y)))
        {
            return failed(level, product, "a number that is none is lost");
        }
    }
    return (isSame(after.data(), before.data(), r * n) && isSame(&after[r * n] + n, &before[r * n] + n, (m - r - 1) * n))
        || failed(level, product, "a number that is none leaves its row");
}

// Three results, each in an array of its own, are the columns of one.
bool isTheSameInThree(char const* level, int64_t m, int64_t k, int64_t n, bool int8)
{
    Product const product = anyProduct(m, k, n, int8);
    int64_t const width = n / 3;
    std::vector<float> const whole = product.run(level);
    std::vector<float> first(m * width, NAN), second(first), third(first);
    adtp::Linear call = product.callTo(first.data());
    call.second = second.data();
    call.third = third.data();
    bool good = gRun.linear(&call, level) == 0;
    for (int64_t r = 0; r < m; ++r)
    {
        float const* row = whole.data() + r * n;
        for (std::vector<float> const* part : {&first, &second, &third})
        {
            good = good && isSame(part->data() + r * width, row, width);
            row += width;
        }
    }
    return good || failed(level, product, "three results");
}

// Two products and a norm, in pieces and by columns: the same numbers.
bool isTheSameInPieces(char const* level, int64_t m, int64_t k, int64_t inner, bool int8)
{
    auto const weights = [int8](int64_t from, int64_t to) {
        int64_t const values = int8 ? 4 : 2;
        std::vector<uint8_t> made((to + 15) / 16 * ((from + values - 1) / values) * 64, 0);
        for (size_t i = 0; i < made.size(); ++i)
        {
            made[i] = static_cast<uint8_t>(int8 ? i % 5 : i % 2 ? 0x3C : i % 7);
        }
        return made;
    };
    auto const first = weights(k, inner), second = weights(inner, k);
    std::vector<float> x(m * k), y(m * k, NAN), before, bias(inner + k, 0.5F), scale(inner + k, 1e-3F);
    std::vector<float> const factors(k, 1.5F);
    std::vector<int32_t> sums(inner + k, 2);
    for (size_t i = 0; i < x.size(); ++i)
    {
        x[i] = static_cast<float>(i % 11);
    }
    adtp::Linear const one{x.data(), int8 ? factors.data() : nullptr, first.data(), int8 ? scale.data() : nullptr,
        int8 ? sums.data() : nullptr, bias.data(), nullptr, m, k, inner, 1};
    adtp::Linear const two{nullptr, nullptr, second.data(), int8 ? scale.data() + inner : nullptr, int8 ? sums.data() + inner : nullptr,
        bias.data() + inner, nullptr, m, inner, k, 0};
    for (int64_t const rows : {-1, 1, 5, 100})
    {
        std::fill(y.begin(), y.end(), NAN);
        adtp::AddNorm const norm{x.data(), bias.data(), scale.data(), y.data(), k, 1e-5F};
        adtp::Chain const chain{one, two, norm};
        if (gRun.chain(&chain, level, rows) != 0)
        {
            return false;
        }
        if (!before.empty() && !isSame(y.data(), before.data(), m * k))
        {
            std::printf("%s: pieces of %lld rows change the result\n", level, static_cast<long long>(rows));
            return false;
        }
        if (!std::all_of(y.begin(), y.end(), [](float value) { return std::isfinite(value); }))
        {
            return false;
        }
        before = y;
    }
    return true;
}

bool areAllSizesRight(char const* level)
{
    bool good = true;
    for (int64_t const m : {0, 1, 5, 6, 13, 101})
    {
        for (int64_t const k : {2, 3, 4, 15, 16, 17, 33, 130})
        {
            good = good && (m == 101 || isTheSameInPieces(level, m, k, 2 * k + 1, true));
            good = good && (m == 101 || isTheSameInPieces(level, m, k, 2 * k + 1, false));
            good = good && (m == 0 || (isTheSameInThree(level, m, k, 48, true) && isTheSameInThree(level, m, k, 240, false)));
            for (int64_t const n : {1, 15, 16, 17, 63, 65, 129})
            {
                good = good && holds(level, m, k, n, true, m % 2) && holds(level, m, k, n, false, m % 2);
            }
        }
    }
    return good;
}

bool areRandomOnesRight(char const* level)
{
    bool good = true;
    gRandom.seed(1);
    for (int64_t i = 0; i < 40; ++i)
    {
        good = good && hasExactSums(level);
        good = good && isWithinBounds(level, anyProduct(between(0, 40), between(1, 70), between(1, 150), i % 2));
        for (float const wrong : {NAN, adtp::fromBits(0x7FFFFFFF), INFINITY, -INFINITY}) // the second is NaN, too
        {
            good = good && staysInItsRow(level, anyProduct(between(1, 20), between(1, 70), between(1, 70), i % 2), wrong);
        }
    }
    return good;
}

} // namespace

int main(int argc, char** argv)
{
    if (argc > 1)
    {
        adtp::load(argv[1], "adtp_linear", gRun.linear);
        adtp::load(argv[1], "adtp_chain", gRun.chain);
    }
    else
    {
        std::printf("best: %s\n", adtp::linearLevel(nullptr)->name);
    }
    bool good = true;
    for (char const* const name :
        {"amx", "avx512_bf16", "avx512_vnni", "avx2_vnni", "avx512", "avx2", "neon_dotprod", "neon", "portable"})
    {
        if (Product(1, 4, 16, false).run(name).empty())
        {
            continue;
        }
        std::printf("%s\n", name);
        good = good && areAllSizesRight(name) && areRandomOnesRight(name);
    }
    return good ? 0 : 1;
}
