// What the harness's comparison says of a right result, and of one with a number that was never written.

#include "compare.h"

#include <cstdio>

int main()
{
    using namespace adtp;
    std::vector<float> const ones(2 * 32, 1.0F);
    Values values{ones, ones, ones, ones, {1.0F, 1.0F}, {0, 2}};
    auto const compared = [&] { return compare(values, 1, 32, 1, std::ldexp(1.0, -23)); };
    bool const takes = compared().output.largest <= compared().output.allowed
        && compared().received.largest <= compared().received.allowed;
    values.out.front() = NAN; // all others, which come later, are right
    values.received.front() = NAN;
    std::printf("takes what is right: %d\n", takes);
    std::printf("keeps a NaN of the output: %d\n", std::isnan(compared().output.largest));
    std::printf("keeps a NaN of what was received: %d\n", std::isnan(compared().received.largest));
    std::printf("keeps a NaN as the worst case: %d\n", std::isnan(larger(larger(0, NAN), 0.5)));
}
