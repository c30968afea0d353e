// Products in lower precision on a CPU, with numbers of a test's own, as the operators and their library run them.
#pragma once

#include "chain.h"
#include "types.h"

#include <cmath>
#include <cstring>
#include <random>
#include <vector>

namespace
{

// What the library exports: 0, or 1 where this processor does not run the level.
struct Functions
{
    int32_t (*linear)(adtp::Linear const* call, char const* level);
    int32_t (*chain)(adtp::Chain const* call, char const* level, int64_t rows);
};

Functions gRun{
    [](adtp::Linear const* call, char const* name) {
        adtp::LinearLevel const* const level = adtp::linearLevel(name);
        return !level ? 1 : adtp::runLinear(*call, *level, adtp::onOneThread) == adtp::Ran::kDone ? 0 : 2;
    },
    [](adtp::Chain const* call, char const* name, int64_t rows) {
        adtp::LinearLevel const* const level = adtp::linearLevel(name);
        return !level ? 1 : adtp::runChain(*call, *level, rows, adtp::onOneThread) == adtp::Ran::kDone ? 0 : 2;
    }};

std::mt19937 gRandom;

int64_t between(int64_t first, int64_t last)
{
    return std::uniform_int_distribution<int64_t>(first, last)(gRandom);
}

float normal()
{
    return std::normal_distribution<float>()(gRandom);
}

bool isSame(float const* one, float const* other, int64_t count)
{
    return std::memcmp(one, other, static_cast<size_t>(count) * sizeof(float)) == 0;
}

// One call, without numbers at first.
struct Product
{
    int64_t m, k, n;
    bool int8;
    bool gelu = false;
    std::vector<float> x, factors, bias, scale;
    std::vector<int32_t> sums;
    std::vector<uint8_t> packed;
    std::vector<double> stored; // (N, K), without its scale

    Product(int64_t rows, int64_t depth, int64_t columns, bool isInt8)
        : m(rows)
        , k(depth)
        , n(columns)
        , int8(isInt8)
        , x(rows * depth)
        , factors(isInt8 ? depth : 0, 1.0F)
        , bias(columns, 0.0F)
        , scale(isInt8 ? columns : 0, 1.0F)
        , sums(isInt8 ? columns : 0, 0)
        , packed((columns + 15) / 16 * groups() * 64, 0)
        , stored(columns * depth)
    {
    }

    int64_t values() const { return int8 ? 4 : 2; }
    int64_t groups() const { return (k + values() - 1) / values(); }

    // A weight, rounded to bf16, or a whole number.
    void set(int64_t j, int64_t i, float weight)
    {
        uint8_t* const place = packed.data() + ((j / 16 * groups() + i / values()) * 16 + j % 16) * 4 + i % values() * (int8 ? 1 : 2);
        uint16_t const low = adtp::toBfloat(weight);
        int8 ? void(*place = static_cast<uint8_t>(static_cast<int32_t>(weight))) : void(std::memcpy(place, &low, 2));
        stored[j * k + i] = static_cast<double>(int8 ? weight : adtp::fromBfloat(low));
        if (int8)
        {
            sums[j] += static_cast<int32_t>(weight);
        }
    }

    std::vector<float> run(char const* level) const
    {
        std::vector<float> y(m * n, NAN);
        adtp::Linear const call = callTo(y.data());
        return gRun.linear(&call, level) == 0 ? y : std::vector<float>();
    }

    adtp::Linear callTo(float* y) const
    {
        return {x.data(), int8 ? factors.data() : nullptr, packed.data(), int8 ? scale.data() : nullptr, int8 ? sums.data() : nullptr,
            bias.data(), y, m, k, n, gelu};
    }

    Product row(int64_t r) const
    {
        Product one = *this;
        one.m = 1;
        one.x.assign(x.begin() + r * k, x.begin() + (r + 1) * k);
        return one;
    }
};

} // namespace
