// Launches the plugin's kernels with `launch.cpp` alone, without TensorRT's headers, and compares with attention in double.
//
//   launch_check comparison           checks the comparison itself
//   launch_check launch [LONGEST]     launches all kernels, of cases whose sequences are not longer than LONGEST
//
// Prints a line for each check; exits 0 if all hold, and with 3 where there is neither a GPU nor a stand-in for one.

#include "compare.h"
#include "device.h"
#include "launch.h"

#include <cstdio>
#include <cstdlib>
#include <string>

using namespace adtp;

namespace
{

int failures = 0;

void check(bool holds, std::string const& what)
{
    std::printf("%s  %s\n", holds ? "ok  " : "FAIL", what.c_str());
    failures += holds ? 0 : 1;
}

void comparison()
{
    std::vector<float> const ones(2 * 32, 1.0F);
    Values values{ones, ones, ones, ones, {1.0F, 1.0F}, {0, 2}};
    auto const compared = [&] { return compare(values, 1, 32, 1, std::ldexp(1.0, -23)); };
    check(compared().output.largest <= compared().output.allowed, "takes what is right");
    values.out.front() = NAN;
    values.received.front() = NAN;
    check(std::isnan(compared().output.largest), "a NaN of the output stays, whatever comes later");
    check(std::isnan(compared().received.largest), "a NaN of what was received stays, whatever comes later");
    check(std::isnan(larger(larger(0, NAN), 0.5)), "a NaN stays the worst case");
}

// One call; what was received as well where it is wanted.
std::string run(Cuda& cuda, Type const& type, Values& values, int32_t numHeads, int32_t headSize, bool received)
{
    size_t const count = values.q.size();
    auto const tokens = values.bounds.back();
    std::vector<float> sums(received ? static_cast<size_t>(tokens) : 0, NAN);
    Buffer const q(cuda, toBytes(values.q, count, type).data(), count * type.bytes);
    Buffer const k(cuda, toBytes(values.k, count, type).data(), count * type.bytes);
    Buffer const v(cuda, toBytes(values.v, count, type).data(), count * type.bytes);
    Buffer const out(cuda, toBytes({}, count, type).data(), count * type.bytes);
    Buffer const bounds(cuda, values.bounds.data(), values.bounds.size() * sizeof(int32_t));
    Buffer const summed(cuda, sums.data(), sums.size() * sizeof(float));
    Call const call{q.get(), k.get(), v.get(), bounds.get(), out.get(), numHeads * headSize, tokens,
        static_cast<int32_t>(values.bounds.size()) - 1, numHeads, headSize, type.name,
        static_cast<float>(1 / std::sqrt(1.0 * headSize)), received ? static_cast<float*>(summed.get()) : nullptr};
    if (std::string const error = launch(call, nullptr); !error.empty())
    {
        return error;
    }
    std::vector<unsigned char> bytes(count * type.bytes);
    if (cuda.synchronize() || !out.read(bytes.data(), bytes.size()) || !summed.read(sums.data(), sums.size() * sizeof(float)))
    {
        return "the kernel failed";
    }
    values.out = fromBytes(bytes, type);
    values.received = sums;
    return {};
}

void launchAll(Cuda& cuda, int32_t longest)
{
    std::vector<std::vector<int32_t>> const cases
        = {{1}, {4, 17, 9, 32, 6}, {63, 64, 65}, {0, 5, 0}, std::vector<int32_t>(130, 1), {2, 300, 1, 7}};
    for (Type const& type : kTypes)
    {
        for (int32_t const headSize : {32, 64, 128})
        {
            for (bool const received : {false, true})
            {
                double worst = 0;
                std::string error;
                for (auto const& lengths : cases)
                {
                    if (*std::max_element(lengths.begin(), lengths.end()) <= longest)
                    {
                        Values values = randomValues(lengths, 3 * headSize, type);
                        error += run(cuda, type, values, 3, headSize, received);
                        Errors const errors = compare(
                            values, 3, headSize, double{static_cast<float>(1 / std::sqrt(1.0 * headSize))}, type.unit);
                        worst = larger(worst, errors.output.largest / errors.output.allowed);
                        worst = larger(worst, errors.received.largest / errors.received.allowed);
                    }
                }
                check(error.empty() && worst <= 1,
                    std::string(type.name) + ", head size " + std::to_string(headSize) + (received ? ", received: " : ": ")
                        + std::to_string(worst) + " of what rounding allows " + error);
            }
        }
    }
}

} // namespace

int main(int argc, char** argv)
{
    if (argc > 1 && std::string(argv[1]) == "comparison")
    {
        comparison();
        return failures ? 1 : 0;
    }
    Cuda cuda{};
    if (!cuda.load())
    {
        Call const call{nullptr, nullptr, nullptr, nullptr, nullptr, 64, 1, 1, 1, 64, "fp16", 1, nullptr};
        std::printf("no GPU; launch says: %s\n", launch(call, nullptr).c_str());
        return 3;
    }
    launchAll(cuda, argc > 2 ? std::atoi(argv[2]) : INT32_MAX);
    return failures ? 1 : 0;
}
