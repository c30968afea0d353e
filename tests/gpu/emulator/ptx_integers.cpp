// Integers and bits: sections "Integer Arithmetic Instructions", "Logic and Shift Instructions", and comparisons.
#include "ptx.h"

#include <algorithm>

namespace emulator
{
namespace
{

// bfe: bits from `first` on, `count` of them; 8 bits of both are read.
uint32_t bits(uint32_t value, uint32_t first, uint32_t count)
{
    first &= 255;
    count &= 255;
    uint64_t const mask = count > 31 ? 0xFFFFFFFF : (uint64_t{1} << count) - 1;
    return first > 31 ? 0 : static_cast<uint32_t>(value >> first & mask);
}

// bfe.s32: the same, filled up with the sign: the last bit that is taken, or bit 31 where that lies after it.
uint32_t signedBits(uint32_t value, uint32_t first, uint32_t count)
{
    first &= 255;
    count &= 255;
    if (count == 0)
    {
        return 0;
    }
    bool const isNegative = value >> std::min(first + count - 1, 31U) & 1;
    uint32_t const there = first > 31 ? 0 : std::min(count, 32 - first);
    uint32_t const filling = there > 31 ? 0 : ~0U << there;
    return bits(value, first, count) | (isNegative ? filling : 0);
}

// prmt: each byte is one of the eight of b:a, or its sign eight times.
uint32_t permuted(uint32_t a, uint32_t b, uint32_t selector)
{
    uint64_t const all = uint64_t{b} << 32 | a;
    uint32_t result = 0;
    for (int k = 0; k < 4; ++k)
    {
        uint32_t const chosen = selector >> 4 * k & 15;
        auto const value = static_cast<uint8_t>(all >> 8 * (chosen & 7));
        uint32_t const sign = value & 128 ? 255 : 0;
        result |= (chosen & 8 ? sign : value) << 8 * k;
    }
    return result;
}

uint32_t quotient(uint32_t a, uint32_t b)
{
    if (b == 0)
    {
        fault("div.s32: divided by zero, whose result is not specified");
    }
    return static_cast<uint32_t>(int64_t{asSigned(a)} / asSigned(b));
}

int64_t product(uint32_t a, uint32_t b)
{
    return int64_t{asSigned(a)} * asSigned(b);
}

// out = f(a, b), and f(a, b, c) with c of 64 bits
template <typename F>
Operation widening(F f)
{
    return {"dww", [f](Context const& c, uint32_t) {
                for (int lane = 0; lane < kLanes; ++lane)
                {
                    c.wide(0)[lane] = f(c.word(1)[lane], c.word(2)[lane]);
                }
            }};
}

template <typename F>
Operation wideningSum(F f)
{
    return {"dwwd", [f](Context const& c, uint32_t) {
                for (int lane = 0; lane < kLanes; ++lane)
                {
                    c.wide(0)[lane] = f(c.word(1)[lane], c.word(2)[lane]) + c.wide(3)[lane];
                }
            }};
}

template <typename F>
Operation wideBinary(F f)
{
    return {"ddd", [f](Context const& c, uint32_t) {
                for (int lane = 0; lane < kLanes; ++lane)
                {
                    c.wide(0)[lane] = f(c.wide(1)[lane], c.wide(2)[lane]);
                }
            }};
}

template <typename F>
Operation predicates(F f)
{
    return {"ppp", [f](Context const& c, uint32_t) { c.predicate(0) = f(c.predicate(1), c.predicate(2)); }};
}

int64_t asSignedWide(uint64_t value)
{
    return static_cast<int64_t>(value);
}

// "Integer Arithmetic Instructions": add, sub, mul, mad, div, neg, min, max, bfe
void addArithmetic(Operations& table)
{
    using U = uint32_t;
    table["add.s32"] = binary("www", [](U a, U b) { return a + b; });
    table["sub.s32"] = binary("www", [](U a, U b) { return a - b; });
    table["mul.lo.s32"] = binary("www", [](U a, U b) { return a * b; });
    table["mad.lo.s32"] = ternary("wwww", [](U a, U b, U c) { return a * b + c; });
    table["div.s32"] = binary("www", quotient);
    table["neg.s32"] = unary("ww", [](U a) { return 0 - a; });
    table["max.s32"] = binary("www", [](U a, U b) { return asSigned(a) > asSigned(b) ? a : b; });
    table["min.s32"] = binary("www", [](U a, U b) { return asSigned(a) < asSigned(b) ? a : b; });
    table["bfe.u32"] = ternary("wwww", bits);
    table["bfe.s32"] = ternary("wwww", signedBits);
    table["prmt.b32"] = ternary("wwww", permuted);

    table["add.s64"] = wideBinary([](uint64_t a, uint64_t b) { return a + b; });
    table["sub.s64"] = wideBinary([](uint64_t a, uint64_t b) { return a - b; });
    table["mul.lo.s64"] = wideBinary([](uint64_t a, uint64_t b) { return a * b; });
    auto const ofSigned = [](U a, U b) { return static_cast<uint64_t>(product(a, b)); };
    auto const ofUnsigned = [](U a, U b) { return uint64_t{a} * b; };
    table["mul.hi.s32"] = binary("www", [](U a, U b) { return static_cast<U>(product(a, b) >> 32); });
    table["mad.lo.s64"] = {"dddd", [](Context const& c, uint32_t) {
                               for (int lane = 0; lane < kLanes; ++lane)
                               {
                                   c.wide(0)[lane] = c.wide(1)[lane] * c.wide(2)[lane] + c.wide(3)[lane];
                               }
                           }};
    table["max.s64"] = wideBinary([](uint64_t a, uint64_t b) { return asSignedWide(a) > asSignedWide(b) ? a : b; });
    table["min.s64"] = wideBinary([](uint64_t a, uint64_t b) { return asSignedWide(a) < asSignedWide(b) ? a : b; });
    table["mul.wide.s32"] = widening(ofSigned);
    table["mul.wide.u32"] = widening(ofUnsigned);
    table["mad.wide.s32"] = wideningSum(ofSigned);
    table["mad.wide.u32"] = wideningSum(ofUnsigned);
}

// "Logic and Shift Instructions": and, or, xor, shl, shr. Shifts by more than the width are shifts by the width.
void addLogic(Operations& table)
{
    using U = uint32_t;
    table["and.b32"] = binary("www", [](U a, U b) { return a & b; });
    table["or.b32"] = binary("www", [](U a, U b) { return a | b; });
    table["xor.b32"] = binary("www", [](U a, U b) { return a ^ b; });
    table["not.b32"] = unary("ww", [](U a) { return ~a; });
    table["popc.b32"] = unary("ww", [](U a) { return static_cast<U>(__builtin_popcount(a)); });
    table["or.b64"] = wideBinary([](uint64_t a, uint64_t b) { return a | b; });
    table["and.b16"] = binary("hhh", [](U a, U b) { return a & b; });
    table["or.b16"] = binary("hhh", [](U a, U b) { return a | b; });
    table["shl.b32"] = binary("www", [](U a, U n) { return n > 31 ? 0 : a << n; });
    table["shr.u32"] = binary("www", [](U a, U n) { return n > 31 ? 0 : a >> n; });
    table["shr.s32"] = binary("www", [](U a, U n) { return static_cast<U>(asSigned(a) >> std::min(n, 31U)); });
    table["shl.b16"] = binary("hhw", [](U a, U n) { return n > 15 ? 0 : (a << n) & 0xFFFF; });
    table["shr.u16"] = binary("hhw", [](U a, U n) { return n > 15 ? 0 : a >> n; });
    table["shl.b64"] = {"ddw", [](Context const& c, uint32_t) {
                            for (int lane = 0; lane < kLanes; ++lane)
                            {
                                U const n = c.word(2)[lane];
                                c.wide(0)[lane] = n > 63 ? 0 : c.wide(1)[lane] << n;
                            }
                        }};
    table["and.pred"] = predicates([](U a, U b) { return a & b; });
    table["or.pred"] = predicates([](U a, U b) { return a | b; });
    table["xor.pred"] = predicates([](U a, U b) { return a ^ b; });
}

} // namespace

void addIntegers(Operations& table)
{
    using U = uint32_t;
    addArithmetic(table);
    addLogic(table);
    // "Comparison and Selection Instructions": setp
    table["setp.lt.s32"] = comparison([](U a, U b) { return asSigned(a) < asSigned(b); });
    table["setp.le.s32"] = comparison([](U a, U b) { return asSigned(a) <= asSigned(b); });
    table["setp.gt.s32"] = comparison([](U a, U b) { return asSigned(a) > asSigned(b); });
    table["setp.ge.s32"] = comparison([](U a, U b) { return asSigned(a) >= asSigned(b); });
    table["setp.ge.u32"] = comparison([](U a, U b) { return a >= b; });
    table["setp.gt.u32"] = comparison([](U a, U b) { return a > b; });
    table["setp.ne.b16"] = comparison([](U a, U b) { return a != b; }, "phh");
    table["setp.eq.b64"] = wideComparison([](uint64_t a, uint64_t b) { return a == b; });
    table["setp.ne.b64"] = wideComparison([](uint64_t a, uint64_t b) { return a != b; });
    table["setp.lt.s64"] = wideComparison([](uint64_t a, uint64_t b) { return asSignedWide(a) < asSignedWide(b); });
    table["setp.lt.u32"] = comparison([](U a, U b) { return a < b; });
    table["setp.eq.b32"] = comparison([](U a, U b) { return a == b; });
    table["setp.ne.b32"] = comparison([](U a, U b) { return a != b; });
}

} // namespace emulator
