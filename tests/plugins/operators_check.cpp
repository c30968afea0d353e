// The attention operators for CPUs in all forms, called as a C function on random calls: against attention in double, with
// numbers that are not finite, and with bounds and positions that are none. For sanitizers, and for processors that only
// run in QEMU. Arguments: how many calls, and a library whose function is called in place of the one that is linked.

#include "loaded.h"
#include "ragged.h"
#include "types.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <random>
#include <vector>

extern "C" int32_t adtp_attend(adtp::Call const* call, char const* level);

namespace
{

using adtp::Call;
using adtp::Type;

std::mt19937 gRandom;
int32_t (*gAttend)(Call const*, char const*) = adtp_attend;

int64_t pick(int64_t low, int64_t high)
{
    return std::uniform_int_distribution<int64_t>(low, high)(gRandom);
}

// Numbers of a type, in memory that has not one byte more.
class Numbers
{
public:
    Numbers() = default;

    Numbers(Type type, int64_t count)
        : mType(type)
        , mBytes(static_cast<size_t>(count) * adtp::sizeOf(type))
    {
    }

    static Numbers random(Type type, int64_t count)
    {
        Numbers made(type, count);
        std::normal_distribution<float> normal;
        for (int64_t i = 0; i < count; ++i)
        {
            made.set(i, normal(gRandom));
        }
        return made;
    }

    void set(int64_t i, float value)
    {
        void* const place = adtp::at(mType, mBytes.data(), i);
        if (mType == Type::kFloat)
        {
            std::memcpy(place, &value, sizeof(value));
        }
        else
        {
            adtp::narrow(mType, &value, 1, 1, 1, place);
        }
    }

    double operator[](int64_t i) const
    {
        float value = 0;
        void const* const place = adtp::at(mType, mBytes.data(), i);
        if (mType == Type::kFloat)
        {
            std::memcpy(&value, place, sizeof(value));
        }
        else
        {
            adtp::widen(mType, place, 1, 1, 1, &value);
        }
        return value;
    }

    std::vector<uint8_t>& bytes() { return mBytes; }

private:
    Type mType{Type::kFloat};
    std::vector<uint8_t> mBytes;
};

struct Random
{
    Call call{};
    Numbers q, k, v, table, distanceKeys, distanceQueries;
    std::vector<int32_t> bounds{0}, positions; // of queries
    std::vector<int32_t> keyBounds{0}, keyPositions;
    std::vector<int32_t> buckets;
    bool asksReceived;
    bool inBf16{false}; // whether the level rounds what it multiplies to bf16

    Random()
    {
        call.type = static_cast<Type>(pick(0, 2));
        call.keyHeads = pick(1, 2);
        call.numHeads = call.keyHeads * pick(1, 3);
        call.headSize = pick(0, 3) ? pick(1, 40) : 64;
        call.scale = static_cast<float>(1 / std::sqrt(static_cast<double>(call.headSize)));
        call.sequences = pick(0, 6);
        int64_t const form = pick(0, 5);
        for (int64_t b = 0; b < call.sequences; ++b)
        {
            int64_t const length = pick(0, 5) ? pick(0, 30) : pick(100, 200);
            int64_t const asks = form == 4 ? pick(0, 3) : 0; // all, the last one, some, or none
            for (int64_t i = 0, place = pick(0, 3); i < length; ++i, place += pick(0, 9) ? 1 : pick(1, 9))
            {
                keyPositions.push_back(static_cast<int32_t>(place));
                if (asks == 0 || (asks == 1 && i == length - 1) || (asks == 2 && pick(0, 4) == 0))
                {
                    positions.push_back(static_cast<int32_t>(place));
                }
            }
            bounds.push_back(static_cast<int32_t>(positions.size()));
            keyBounds.push_back(static_cast<int32_t>(keyPositions.size()));
        }
        call.tokens = bounds.back();
        call.keys = keyBounds.back();
        call.back = call.ahead = form == 1 ? pick(1, 80) : -1;
        if (form == 4)
        {
            call.back = pick(0, 1) ? pick(0, 80) : -1;
            call.ahead = pick(0, 1) ? 0 : pick(-1, 80);
        }
        call.fromOthers = form == 2;
        asksReceived = call.fromOthers || pick(0, 1);
        call.isMean = asksReceived && form == 4 && call.ahead == 0;
        if (form == 3)
        {
            call.tableRows = 2 * (200 * 9 + 4) - 1;
            table = Numbers::random(call.type, call.tableRows * call.numHeads);
        }
        if (form == 5)
        {
            call.columns = pick(1, 60);
            call.numBuckets = 2 * pick(1, 100) - 1;
            distanceKeys = Numbers::random(call.type, call.columns * call.numHeads * call.headSize);
            distanceQueries = Numbers::random(call.type, call.columns * call.numHeads * call.headSize);
            for (int64_t i = 0; i < call.numBuckets; ++i)
            {
                buckets.push_back(static_cast<int32_t>(pick(0, call.columns - 1)));
            }
            std::sort(buckets.begin(), buckets.end());
        }
        q = Numbers::random(call.type, call.tokens * call.numHeads * call.headSize);
        k = Numbers::random(call.type, call.keys * call.keyHeads * call.headSize);
        v = Numbers::random(call.type, call.keys * call.keyHeads * call.headSize);
    }

    // Its answer; what nobody wrote stays NaN. Status as of adtp_attend.
    struct Answer
    {
        Numbers out;
        std::vector<float> received;
        int32_t status;
    };

    Answer run(char const* level)
    {
        bool const rounds = std::strcmp(level, "amx") == 0 || std::strcmp(level, "avx512_bf16") == 0;
        inBf16 = rounds && call.type == Type::kFloat && !asksReceived && !call.numBuckets;
        int64_t const size = call.tokens * call.numHeads * call.headSize;
        Answer answer{Numbers(call.type, size), std::vector<float>(static_cast<size_t>(call.keys), NAN), 0};
        for (int64_t i = 0; i < size; ++i)
        {
            answer.out.set(i, NAN);
        }
        call.q = q.bytes().data();
        call.k = k.bytes().data();
        call.v = v.bytes().data();
        call.out = answer.out.bytes().data();
        call.received = asksReceived ? answer.received.data() : nullptr;
        call.bounds = bounds.data();
        call.keyBounds = keyBounds.data();
        bool const placed = call.back >= 0 || call.ahead >= 0 || call.tableRows || call.numBuckets;
        call.positions = placed ? positions.data() : nullptr;
        call.keyPositions = placed ? keyPositions.data() : nullptr;
        call.table = call.tableRows ? table.bytes().data() : nullptr;
        call.distanceKeys = call.numBuckets ? distanceKeys.bytes().data() : nullptr;
        call.distanceQueries = call.numBuckets ? distanceQueries.bytes().data() : nullptr;
        call.buckets = call.numBuckets ? buckets.data() : nullptr;
        answer.status = gAttend(&call, level);
        return answer;
    }

    // The largest error, in units of what it may be: sums in fp32, as tests/ops/ragged_inputs.py derives it, and one
    // rounding to the type.
    double error(Answer const& answer) const
    {
        double worst = 0;
        std::vector<double> received(static_cast<size_t>(call.keys)), mayBe(received), queries(received);
        for (int64_t b = 0; b < call.sequences; ++b)
        {
            for (int64_t head = 0; head < call.numHeads; ++head)
            {
                for (int32_t query = bounds[b]; query < bounds[b + 1]; ++query)
                {
                    worst = std::max(worst, errorOf(answer, b, head, query, received, mayBe));
                    for (int32_t key = keyBounds[b]; head == 0 && key < keyBounds[b + 1]; ++key)
                    {
                        queries[key] += sees(keyPositions[key] - positions[query]);
                    }
                }
            }
        }
        double const w = std::ldexp(1.0, -24);
        for (size_t i = 0; call.received && i < received.size(); ++i)
        {
            double const divisor = call.isMean ? std::max(queries[i], 1.0) : 1.0;
            received[i] /= divisor;
            mayBe[i] = mayBe[i] / divisor + w * received[i];
            worst = std::max(worst, ratio(answer.received[i] - received[i], mayBe[i]));
        }
        return worst;
    }

private:
    bool sees(int64_t distance) const
    {
        return (call.back < 0 || distance >= -call.back) && (call.ahead < 0 || distance <= call.ahead);
    }

    double rounded(double x) const { return inBf16 ? adtp::fromBfloat(adtp::toBfloat(static_cast<float>(x))) : x; }

    // What a query is multiplied by; in bf16 it is rounded as an exponent of 2.
    double scaled(double query) const
    {
        float const scale = call.scale * adtp::kLog2E;
        return inBf16 ? rounded(static_cast<float>(query) * scale) * std::log(2.0) : query * double{call.scale};
    }

    static double ratio(double error, double allowed) { return std::isfinite(error) ? std::abs(error) / allowed : HUGE_VAL; }

    double errorOf(Answer const& answer, int64_t b, int64_t head, int32_t query, std::vector<double>& received,
        std::vector<double>& mayBe) const
    {
        double const w = std::ldexp(1.0, -24);
        double const least = std::numeric_limits<float>::min() * static_cast<double>(keyBounds[b + 1] - keyBounds[b]);
        int64_t const keyHead = head * call.keyHeads / call.numHeads;
        auto const row = [&](int64_t key) { return (key * call.keyHeads + keyHead) * call.headSize; };
        int64_t const own = (query * call.numHeads + head) * call.headSize;
        std::vector<double> weights;
        double peak = -HUGE_VAL, reach = 0, total = 0;
        for (int32_t key = keyBounds[b]; key < keyBounds[b + 1]; ++key)
        {
            int64_t const distance = keyPositions[key] - positions[query];
            double score = call.tableRows ? table[(distance + call.tableRows / 2) * call.numHeads + head] : 0.0;
            double size = std::abs(score);
            for (int64_t d = 0; d < call.headSize; ++d)
            {
                double const product = scaled(q[own + d]) * rounded(k[row(key) + d]);
                score += product;
                size += std::abs(product);
            }
            for (int64_t d = 0; call.numBuckets && d < call.headSize; ++d)
            {
                int64_t const middle = call.numBuckets / 2;
                int64_t const bucket = buckets[static_cast<size_t>(std::clamp<int64_t>(middle - distance, 0, 2 * middle))];
                int64_t const place = (head * call.headSize + d) * call.columns + bucket;
                double const first = q[own + d] * distanceKeys[place] * double{call.scale};
                double const second = k[row(key) + d] * distanceQueries[place] * double{call.scale};
                score += first + second;
                size += std::abs(first) + std::abs(second);
            }
            bool const seen = sees(distance);
            weights.push_back(seen ? score : -HUGE_VAL);
            peak = std::max(peak, weights.back());
            reach = seen ? std::max(reach, size) : reach;
        }
        for (double& weight : weights)
        {
            weight = std::exp(weight - peak);
            total += weight;
        }
        double const count = static_cast<double>(weights.size());
        int64_t const sums = call.numBuckets ? 2 : 1; // one may begin with the other
        double const weight = inBf16 ? std::ldexp(1.0, -8) + std::ldexp(1.0, -16) : 0.0; // one rounding, and powers of 2 to 2^-18
        double const change
            = std::expm1(2 * static_cast<double>(sums * call.headSize + 8) * w * reach) + (count + 4) * w + weight;
        double worst = 0;
        for (int64_t d = 0; d < call.headSize; ++d)
        {
            double exact = 0, absolute = 0, largest = 0;
            for (size_t i = 0; i < weights.size(); ++i)
            {
                double const value = rounded(v[row(keyBounds[b] + static_cast<int64_t>(i)) + d]);
                exact += weights[i] / total * value;
                absolute += weights[i] / total * std::abs(value);
                largest = std::max(largest, std::abs(value));
            }
            double const mixed = (change + (count + 1) * w) * absolute + least * largest;
            double const unit = call.type == Type::kHalf ? std::ldexp(1.0, -11) : call.type == Type::kBfloat ? std::ldexp(1.0, -8) : w;
            double const rounding = unit * (std::abs(exact) + mixed) + (call.type == Type::kHalf ? std::ldexp(1.0, -24) : 0.0);
            worst = std::max(worst, ratio(answer.out[own + d] - exact, mixed + rounding));
        }
        for (size_t i = 0; i < weights.size(); ++i)
        {
            size_t const key = static_cast<size_t>(keyBounds[b]) + i;
            double const weight = call.fromOthers && key == static_cast<size_t>(query) ? 0.0 : weights[i] / total;
            received[key] += weight;
            mayBe[key] += weight * (change + static_cast<double>(call.numHeads) * count * w) + least;
        }
        return worst;
    }
};

// Whether a number that is not finite changes nothing outside of its text.
bool staysInItsText(Random made, char const* level)
{
    Random::Answer clean = made.run(level);
    int64_t const text = pick(0, made.call.sequences - 1);
    int32_t const begin = made.bounds[text], end = made.bounds[text + 1];
    int32_t const firstKey = made.keyBounds[text], pastKey = made.keyBounds[text + 1];
    if (begin == end)
    {
        return true;
    }
    float const values[] = {NAN, INFINITY, -INFINITY};
    Numbers* const places[] = {&made.q, &made.k, &made.v};
    int64_t const input = pick(0, 2);
    int64_t const width = (input ? made.call.keyHeads : made.call.numHeads) * made.call.headSize;
    int64_t const row = input ? pick(firstKey, pastKey - 1) : pick(begin, end - 1);
    places[input]->set(row * width + pick(0, width - 1), values[pick(0, 2)]);
    Random::Answer dirty = made.run(level);
    for (int32_t row = 0; row < made.call.tokens; ++row)
    {
        size_t const rowBytes = clean.out.bytes().size() / static_cast<size_t>(made.call.tokens);
        size_t const at = static_cast<size_t>(row) * rowBytes;
        bool const inside = begin <= row && row < end;
        bool const same = std::memcmp(&clean.out.bytes()[at], &dirty.out.bytes()[at], rowBytes) == 0;
        if (!inside && !same)
        {
            return false;
        }
    }
    for (int32_t key = 0; made.asksReceived && key < made.call.keys; ++key)
    {
        if ((key < firstKey || pastKey <= key) && clean.received[key] != dirty.received[key])
        {
            return false;
        }
    }
    return true;
}

// Spoil bounds or positions somewhere. They may still be some: what counts is that nothing outside is read.
void spoil(Random& made)
{
    int32_t const top = std::numeric_limits<int32_t>::max();
    int32_t const numbers[] = {-1, top, -top - 1, static_cast<int32_t>(made.call.tokens) + 1, static_cast<int32_t>(pick(0, 300))};
    std::vector<int32_t>* const able[] = {&made.bounds, &made.keyBounds, &made.positions, &made.keyPositions, &made.buckets};
    std::vector<int32_t>* const chosen = able[pick(0, 4)];
    std::vector<int32_t>& spoilt = chosen->empty() ? made.bounds : *chosen;
    spoilt[static_cast<size_t>(pick(0, static_cast<int64_t>(spoilt.size()) - 1))] = numbers[pick(0, 4)];
}

} // namespace

int main(int argc, char** argv)
{
    int const calls = argc > 1 ? std::atoi(argv[1]) : 100;
    if (argc > 2)
    {
        adtp::load(argv[2], "adtp_attend", gAttend);
    }
    int failures = 0;
    for (char const* const level : {"amx", "avx512_bf16", "avx512", "avx2", "neon", "portable"})
    {
        if (Random().run(level).status == 1) // this processor does not run it
        {
            continue;
        }
        int refused = 0, same = 0;
        double worst = 0;
        for (int i = 0; i < calls; ++i)
        {
            gRandom.seed(static_cast<unsigned>(i));
            Random made;
            Random::Answer answer = made.run(level);
            double const error = answer.status == 0 ? made.error(answer) : HUGE_VAL;
            worst = std::max(worst, error);
            Random::Answer portable = made.run("portable");
            same += portable.out.bytes() == answer.out.bytes();
            bool const stays = made.call.sequences == 0 || staysInItsText(made, level);
            spoil(made);
            refused += made.run(level).status == 3;
            if (error > 1 || !stays)
            {
                std::printf("FAIL  %s, call %d: error %g, %s\n", level, i, error, stays ? "" : "leaves its text");
                ++failures;
            }
        }
        std::printf("%s  %s: %d calls, %g of what is allowed; %d like portable to the bit; %d of as many spoilt ones refused\n",
            failures ? "FAIL" : "ok  ", level, calls, worst, same, refused);
    }
    return failures ? 1 : 0;
}
