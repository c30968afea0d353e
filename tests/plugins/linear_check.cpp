// Products in lower precision, alone and with a sum and norm behind them, in arrays without a byte to spare, for sanitizers; results of
// products against double.
#include "chain.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <initializer_list>
#include <vector>

namespace
{

// Weights of +-1 and rows of small whole numbers are exact in both precisions. In INT8 rows are halved by their factors first.
bool holds(adtp::LinearLevel const& level, int64_t m, int64_t k, int64_t n, bool int8, bool gelu)
{
    int64_t const values = int8 ? 4 : 2, groups = (k + values - 1) / values, blocks = (n + 15) / 16;
    std::vector<float> x(m * k), given, bias(n, 0.5F), scale(n, 1.0F), y(m * n, NAN);
    std::vector<float> const factors(k, 0.5F);
    std::vector<int32_t> sums(n, 0);
    std::vector<uint8_t> weight(blocks * groups * 64, 0);
    auto const sign = [](int64_t i, int64_t j) { return (i * 7 + j * 3) % 5 < 2 ? -1 : 1; };
    for (int64_t i = 0; i < m * k; ++i)
    {
        x[i] = i % k == 0 ? 255.0F - 100.0F : i % k == 1 ? -100.0F : static_cast<float>(i % 50); // a scale of 1 for k > 1
    }
    given = x;
    for (float& one : given)
    {
        one *= int8 ? 2.0F : 1.0F;
    }
    for (int64_t j = 0; j < n; ++j)
    {
        for (int64_t i = 0; i < k; ++i)
        {
            uint8_t* const place = weight.data() + ((j / 16 * groups + i / values) * 16 + j % 16) * 4 + i % values * (int8 ? 1 : 2);
            uint16_t const one = sign(i, j) < 0 ? 0xBF80 : 0x3F80;
            int8 ? void(*place = static_cast<uint8_t>(sign(i, j))) : void(std::memcpy(place, &one, 2));
            sums[j] += sign(i, j);
        }
    }
    adtp::Linear const call{given.data(), int8 ? factors.data() : nullptr, weight.data(), int8 ? scale.data() : nullptr,
        int8 ? sums.data() : nullptr, bias.data(), y.data(), m, k, n, gelu};
    adtp::LinearPieces const pieces(call, level);
    for (int64_t i = 0; i < pieces.conversions(); ++i)
    {
        pieces.convert(i);
    }
    for (int64_t i = 0; i < pieces.products(); ++i)
    {
        pieces.multiply(i);
    }
    for (int64_t r = 0; r < m; ++r)
    {
        for (int64_t j = 0; j < n; ++j)
        {
            double sum = 0.5;
            for (int64_t i = 0; i < k; ++i)
            {
                sum += static_cast<double>(x[r * k + i]) * sign(i, j);
            }
            double const want = gelu ? sum * std::erfc(-sum / std::sqrt(2.0)) / 2 : sum;
            if (!(std::abs(y[r * n + j] - want) <= 1e-6 * (std::abs(want) + 155 * static_cast<double>(k))))
            {
                std::printf("%s: %lld x %lld x %lld: %g instead of %g\n", level.name, static_cast<long long>(m),
                    static_cast<long long>(k), static_cast<long long>(n), static_cast<double>(y[r * n + j]), want);
                return false;
            }
        }
    }
    return true;
}

// Two products and a norm, in pieces and by columns: the same numbers.
bool isTheSameInPieces(adtp::LinearLevel const& level, int64_t m, int64_t k, int64_t inner, bool int8)
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
        if (adtp::runChain({one, two, norm}, level, rows, adtp::onOneThread) != adtp::Ran::kDone)
        {
            return false;
        }
        if (!before.empty() && std::memcmp(y.data(), before.data(), y.size() * sizeof(float)) != 0)
        {
            std::printf("%s: pieces of %lld rows change the result\n", level.name, static_cast<long long>(rows));
            return false;
        }
        for (float const one : y)
        {
            if (!std::isfinite(one))
            {
                return false;
            }
        }
        before = y;
    }
    return true;
}

} // namespace

int main()
{
    bool good = true;
    for (char const* const name : {"amx", "avx512_bf16", "avx512_vnni", "avx2_vnni", "avx512", "avx2", "portable"})
    {
        adtp::LinearLevel const* const level = adtp::linearLevel(name);
        if (!level)
        {
            continue;
        }
        std::printf("%s\n", name);
        for (int64_t const m : {0, 1, 5, 6, 13, 101})
        {
            for (int64_t const k : {2, 3, 4, 15, 16, 17, 33, 130})
            {
                good = good && (m == 101 || isTheSameInPieces(*level, m, k, 2 * k + 1, true));
                good = good && (m == 101 || isTheSameInPieces(*level, m, k, 2 * k + 1, false));
                for (int64_t const n : {1, 15, 16, 17, 63, 65, 129})
                {
                    good = good && holds(*level, m, k, n, true, m % 2) && holds(*level, m, k, n, false, m % 2);
                }
            }
        }
    }
    return good ? 0 : 1;
}
