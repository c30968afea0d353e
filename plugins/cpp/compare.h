// Numbers as kernels store them, and how a result is compared with attention in double. Needs neither CUDA nor TensorRT.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

namespace adtp
{

enum class Format
{
    kHALF,
    kBF16,
    kFLOAT,
};

struct Type
{
    Format format;
    char const* name;
    size_t bytes;
    double unit; // distance of 1 to the next number
};
Type const kTypes[] = {{Format::kHALF, "fp16", 2, std::ldexp(1.0, -10)}, {Format::kBF16, "bf16", 2, std::ldexp(1.0, -7)},
    {Format::kFLOAT, "fp32", 4, std::ldexp(1.0, -23)}};

// Numbers as the kernel stores them. Subnormals of fp16 do not occur here and become zero.
inline uint32_t bitsOf(float value)
{
    uint32_t bits = 0;
    std::memcpy(&bits, &value, sizeof(bits));
    return bits;
}

inline float fromBits(uint32_t bits)
{
    float value = 0;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
}

inline uint32_t encode(float value, Format format)
{
    uint32_t const bits = bitsOf(value);
    if (format == Format::kFLOAT)
    {
        return bits;
    }
    int32_t const dropped = format == Format::kBF16 ? 16 : 13;
    uint32_t const rounded = bits + (1U << (dropped - 1)) - 1 + ((bits >> dropped) & 1U); // to nearest, ties to even
    if (format == Format::kBF16)
    {
        return rounded >> 16;
    }
    int32_t const exponent = static_cast<int32_t>((rounded >> 23) & 0xFFU) - 127 + 15;
    uint32_t const sign = (rounded >> 16) & 0x8000U;
    return exponent < 1 ? sign : sign | static_cast<uint32_t>(exponent) << 10 | ((rounded >> 13) & 0x3FFU);
}

inline float decode(uint32_t bits, Format format)
{
    if (format == Format::kFLOAT)
    {
        return fromBits(bits);
    }
    if (format == Format::kBF16)
    {
        return fromBits(bits << 16);
    }
    uint32_t const sign = (bits & 0x8000U) << 16;
    uint32_t const exponent = (bits >> 10) & 0x1FU;
    if (exponent == 0x1F)
    {
        return fromBits(sign | 0x7F800000U | (bits & 0x3FFU) << 13);
    }
    float const subnormal = std::ldexp(static_cast<float>(bits & 0x3FFU), -24);
    return exponent == 0 ? (sign ? -subnormal : subnormal)
                         : fromBits(sign | (exponent - 15 + 127) << 23 | (bits & 0x3FFU) << 13);
}

// Numbers as they lie in memory; `count` of them, those that are not given all ones, which is NaN.
inline std::vector<unsigned char> toBytes(std::vector<float> const& numbers, size_t count, Type const& type)
{
    std::vector<unsigned char> bytes(count * type.bytes, 0xFF);
    for (size_t i = 0; i < numbers.size(); ++i)
    {
        uint32_t const bits = encode(numbers[i], type.format);
        std::memcpy(&bytes[i * type.bytes], &bits, type.bytes);
    }
    return bytes;
}

inline std::vector<float> fromBytes(std::vector<unsigned char> const& bytes, Type const& type)
{
    std::vector<float> numbers(bytes.size() / type.bytes);
    for (size_t i = 0; i < numbers.size(); ++i)
    {
        uint32_t bits = 0;
        std::memcpy(&bits, &bytes[i * type.bytes], type.bytes);
        numbers[i] = decode(bits, type.format);
    }
    return numbers;
}

struct Error
{
    double largest;
    double allowed;
};

struct Errors
{
    Error output;
    Error received; // relative; 0 where it was not wanted
};

// The larger of two; NaN where one of them is.
inline double larger(double one, double other)
{
    return std::isnan(one) || one >= other ? one : other;
}

// What a call was given and what it gave. received is empty where it was not wanted.
struct Values
{
    std::vector<float> q, k, v, out, received;
    std::vector<int32_t> bounds;
};

// Random q, k and v, of numbers that the type has, for sequences of these lengths.
inline Values randomValues(std::vector<int32_t> const& lengths, int32_t hidden, Type const& type)
{
    Values values{};
    values.bounds = {0};
    for (int32_t const length : lengths)
    {
        values.bounds.push_back(values.bounds.back() + length);
    }
    std::mt19937 random(42);
    std::normal_distribution<float> normal;
    for (auto* const numbers : {&values.q, &values.k, &values.v})
    {
        numbers->resize(static_cast<size_t>(values.bounds.back()) * hidden);
        for (float& number : *numbers)
        {
            number = decode(encode(normal(random), type.format), type.format);
        }
    }
    return values;
}

// Largest difference from attention in double, and how much there may be: the weights and the result are each rounded
// once to the type, half a unit in the last place each; the scores are summed in fp32. What was received is a sum of
// weights in fp32: a score of D terms is off by (D + 6) roundings, in the weight and in the sum that it is divided by.
inline Errors compare(Values const& values, int32_t numHeads, int32_t headSize, double scale, double unit)
{
    auto const& [q, k, v, out, received, bounds] = values;
    int32_t const hidden = numHeads * headSize;
    double largest = 0;
    double highestScore = 0;
    double highestValue = 0;
    int32_t longest = 0;
    std::vector<double> sums(q.size() / hidden);
    for (size_t b = 0; b + 1 < bounds.size(); ++b)
    {
        int32_t const begin = bounds[b];
        int32_t const end = bounds[b + 1];
        std::vector<double> weights(static_cast<size_t>(end - begin));
        longest = std::max(longest, end - begin);
        for (int32_t row = begin; row < end; ++row)
        {
            for (int32_t head = 0; head < numHeads; ++head)
            {
                double peak = -INFINITY;
                for (int32_t key = begin; key < end; ++key)
                {
                    double score = 0;
                    double magnitude = 0;
                    for (int32_t d = head * headSize; d < (head + 1) * headSize; ++d)
                    {
                        double const product = double{q[row * hidden + d]} * double{k[key * hidden + d]};
                        score += product;
                        magnitude += std::abs(product);
                    }
                    weights[key - begin] = score * scale;
                    peak = std::max(peak, score * scale);
                    highestScore = std::max(highestScore, magnitude * scale);
                }
                double total = 0;
                for (double& weight : weights)
                {
                    weight = std::exp(weight - peak);
                    total += weight;
                }
                for (int32_t key = begin; key < end; ++key)
                {
                    sums[key] += weights[key - begin] / total;
                }
                for (int32_t d = head * headSize; d < (head + 1) * headSize; ++d)
                {
                    double expected = 0;
                    for (int32_t key = begin; key < end; ++key)
                    {
                        expected += weights[key - begin] / total * double{v[key * hidden + d]};
                        highestValue = std::max(highestValue, std::abs(double{v[key * hidden + d]}));
                    }
                    double const difference = std::abs(expected - double{out[row * hidden + d]});
                    largest = larger(largest, difference);
                }
            }
        }
    }
    double largestReceived = 0;
    for (size_t i = 0; i < received.size(); ++i)
    {
        largestReceived = larger(largestReceived, std::abs(double{received[i]} - sums[i]) / sums[i]);
    }
    double const rounding = std::ldexp(1.0, -24);
    double const allowed
        = std::expm1(2 * (headSize + 6) * rounding * highestScore) + ((numHeads + 1) * longest + 4) * rounding;
    return {{largest, (unit + 8 * std::ldexp(1.0, -23) * (1 + highestScore)) * highestValue}, {largestReceived, allowed}};
}

} // namespace adtp
