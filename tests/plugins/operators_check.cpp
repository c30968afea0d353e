// The attention operators for CPUs, called as a C function, against attention in double: for processors that only run in QEMU.

#include "compare.h"

#include <cstdio>

// plugins/cpu/operators.cpp has it; the call is plugins/cpu/ragged.h's.
struct OperatorCall
{
    float const *q, *k, *v;
    float *out, *received;
    int32_t const* bounds;
    int64_t sequences, numHeads, headSize;
    float scale;
};
extern "C" int32_t adtp_attend(OperatorCall const* call, char const* level);

int main()
{
    using namespace adtp;
    int failures = 0;
    std::vector<std::vector<int32_t>> const cases = {{1}, {3, 4, 5}, {15, 16, 17}, {0, 5, 0}, {127, 1, 129}};
    for (int32_t const headSize : {12, 32, 64, 128})
    {
        for (auto const& lengths : cases)
        {
            int32_t const numHeads = 3;
            Values values = randomValues(lengths, numHeads * headSize, kTypes[2]);
            values.out.assign(values.q.size(), NAN);
            values.received.assign(static_cast<size_t>(values.bounds.back()), NAN);
            auto const scale = static_cast<float>(1 / std::sqrt(1.0 * headSize));
            OperatorCall const call{values.q.data(), values.k.data(), values.v.data(), values.out.data(),
                values.received.data(), values.bounds.data(), static_cast<int64_t>(values.bounds.size()) - 1, numHeads, headSize,
                scale};
            int32_t const status = adtp_attend(&call, nullptr);
            Errors const errors = compare(values, numHeads, headSize, double{scale}, kTypes[2].unit);
            bool const holds = status == 0 && errors.output.largest <= errors.output.allowed
                && errors.received.largest <= errors.received.allowed;
            std::printf("%s  head size %d, %g and %g of what is allowed\n", holds ? "ok  " : "FAIL", headSize,
                errors.output.largest / errors.output.allowed, errors.received.largest / errors.received.allowed);
            failures += holds ? 0 : 1;
        }
    }
    return failures ? 1 : 0;
}
