// Floating point: sections "Floating-Point Instructions", cvt between formats, and comparisons of floats.
#include "ptx.h"

#include <cmath>

namespace emulator
{
namespace
{

using U = uint32_t;

// Results that are no number have one bit pattern on a GPU ("Floating-Point Instructions": NaN payloads are not kept).
U result(float value)
{
    return std::isnan(value) ? 0x7FFFFFFF : asBits(value);
}

// max: of a number and a NaN the number; +0 is above -0.
U larger(U a, U b)
{
    float const x = asFloat(a), y = asFloat(b);
    if (x == 0 && y == 0)
    {
        return a & b;
    }
    return result(std::fmax(x, y));
}

bool isNumber(U a)
{
    return !std::isnan(asFloat(a));
}

} // namespace

void addFloats(Operations& table)
{
    // add, sub, mul without a rounding mode round to nearest even; a real compiler may fuse them, which only rounds less.
    table["add.f32"] = binary("www", [](U a, U b) { return result(asFloat(a) + asFloat(b)); });
    table["sub.f32"] = binary("www", [](U a, U b) { return result(asFloat(a) - asFloat(b)); });
    table["mul.f32"] = binary("www", [](U a, U b) { return result(asFloat(a) * asFloat(b)); });
    table["neg.f32"] = unary("ww", [](U a) { return a ^ 0x80000000; });
    table["abs.f32"] = unary("ww", [](U a) { return a & 0x7FFFFFFF; });
    table["max.f32"] = binary("www", larger);
    table["fma.rn.f32"]
        = ternary("wwww", [](U a, U b, U c) { return result(std::fma(asFloat(a), asFloat(b), asFloat(c))); });
    table["fma.rn.ftz.f32"] = ternary("wwww", [](U a, U b, U c) {
        return result(flushed(std::fma(flushed(asFloat(a)), flushed(asFloat(b)), flushed(asFloat(c)))));
    });
    // A model: rounded once, where a GPU may be 2 units in the last place away.
    table["div.full.f32"] = binary("www", [](U a, U b) { return result(asFloat(a) / asFloat(b)); });
    table["ex2.approx.ftz.f32"] = unary("ww", [](U a) { return result(exp2Approximate(asFloat(a))); });

    // Models, too: rounded once, where a GPU may be 2**-22.9 away.
    table["rsqrt.approx.ftz.f32"]
        = unary("ww", [](U a) { return result(flushed(static_cast<float>(1 / std::sqrt(double{flushed(asFloat(a))})))); });
    table["sqrt.approx.ftz.f32"] = unary("ww", [](U a) { return result(std::sqrt(flushed(asFloat(a)))); });

    // "Data Movement and Conversion Instructions": cvt. Of a pair the first operand goes to the upper half.
    table["cvt.rna.tf32.f32"] = unary("ww", toTf32);
    table["cvt.rn.f16x2.f32"]
        = binary("www", [](U a, U b) { return U{toHalf(asFloat(a))} << 16 | toHalf(asFloat(b)); });
    table["cvt.rn.bf16x2.f32"]
        = binary("www", [](U a, U b) { return U{toBf16(asFloat(a))} << 16 | toBf16(asFloat(b)); });
    table["cvt.rn.f16.f32"] = unary("hw", [](U a) { return U{toHalf(asFloat(a))}; });
    table["cvt.rn.bf16.f32"] = unary("hw", [](U a) { return U{toBf16(asFloat(a))}; });
    table["cvt.f32.f16"] = unary("wh", [](U a) { return asBits(fromHalf(static_cast<uint16_t>(a))); });
    table["cvt.f32.bf16"] = unary("wh", [](U a) { return a << 16; });
    table["cvt.rn.f32.s32"] = unary("ww", [](U a) { return asBits(static_cast<float>(asSigned(a))); });
    table["cvt.rn.f32.u32"] = unary("ww", [](U a) { return asBits(static_cast<float>(a)); });

    // "Comparison and Selection Instructions": setp. Ordered comparisons are false where one is no number.
    table["setp.lt.f32"] = comparison([](U a, U b) { return asFloat(a) < asFloat(b); });
    table["setp.le.f32"] = comparison([](U a, U b) { return asFloat(a) <= asFloat(b); });
    table["setp.gt.f32"] = comparison([](U a, U b) { return asFloat(a) > asFloat(b); });
    table["setp.ge.f32"] = comparison([](U a, U b) { return asFloat(a) >= asFloat(b); });
    table["setp.eq.f32"] = comparison([](U a, U b) { return asFloat(a) == asFloat(b); });
    table["setp.num.f32"] = comparison([](U a, U b) { return isNumber(a) && isNumber(b); });
}

} // namespace emulator
