// Integer sums, products and extrema. Opcodes that begin with U are the same on uniform registers.
#include "sass_line.h"
#include "sass_values.h"

#include <algorithm>

namespace emulator::sass
{
namespace
{

// IADD3 d, [p, [q,]] a, b, c: d = a + b + c [PTX add.s32, sub.s32]. The carry, 0 to 2, goes to p and q, and IADD3.X
// adds two predicates [PTX add.cc.u32, addc.u32]. Which of p and q is set by a carry of one is not known; where only
// one is wanted, a carry of two would be lost and faults.
void addThree(Context& context, Instruction const& instruction)
{
    Lanes scratch[3], sum;
    auto const [a, b, c] = sources<integer>(context, instruction, scratch);
    for (int lane = 0; lane < kLanes; ++lane)
    {
        sum[lane] = a[lane] + b[lane] + c[lane];
    }
    write(context, instruction, sum);
}

// -x is added as ~x + 1, so that the carry says that nothing was borrowed [PTX sub.cc.u32, sub.s64].
void addThreeWithCarry(Context& context, Instruction const& instruction)
{
    Lanes scratch[3], sum;
    std::array<Source, 3> inverted = instruction.source;
    uint64_t ones = 0;
    for (Source& source : inverted)
    {
        ones += source.change == Change::kNEGATED;
        source.change = source.change == Change::kNONE ? Change::kNONE : Change::kINVERTED;
    }
    Lanes const& a = integer(context, inverted[0], scratch[0]);
    Lanes const& b = integer(context, inverted[1], scratch[1]);
    Lanes const& c = integer(context, inverted[2], scratch[2]);
    uint32_t const in[] = {mask(context, instruction.predicate[0]), mask(context, instruction.predicate[1])};
    uint32_t atLeastOne = 0, two = 0;
    for (int lane = 0; lane < kLanes; ++lane)
    {
        uint64_t const all = uint64_t{a[lane]} + b[lane] + c[lane] + bit(in[0], lane) + bit(in[1], lane) + ones;
        sum[lane] = static_cast<uint32_t>(all);
        atLeastOne |= uint32_t{all >> 32 != 0} << lane;
        two |= uint32_t{all >> 33 != 0} << lane;
    }
    auto const& [carry, second] = instruction.predicateResult;
    if (carry != kUnwantedPredicate && second == kUnwantedPredicate && (two & context.active))
    {
        fault("IADD3: a carry of two");
    }
    write(context, instruction, sum);
    writePredicate(context, carry, atLeastOne);
    writePredicate(context, second, two);
}

// IADD3.64, IADD.64 [PTX add.s64, sub.s64, on sm_120]
void addWide(Context& context, Instruction const& instruction)
{
    WideLanes sum = wide(context, instruction.source[0]);
    WideLanes const b = wide(context, instruction.source[1]);
    WideLanes const c = wide(context, instruction.source[2]);
    for (int lane = 0; lane < kLanes; ++lane)
    {
        sum[lane] += b[lane] + c[lane];
    }
    writeWide(context, instruction, sum);
}

void decodeIadd3(Line& line, Instruction& instruction)
{
    bool const isWide = line.has("64"), isExtended = line.has("X");
    line.destination(instruction, isWide ? 2 : 1);
    for (int k = 0; k < 2 && line.predicateIsNext(); ++k)
    {
        instruction.predicateResult[k] = line.predicateResult();
    }
    auto const& [carry, second] = instruction.predicateResult;
    bool const hasCarry = carry != kUnwantedPredicate || second != kUnwantedPredicate;
    for (Source& source : instruction.source)
    {
        source = isWide ? line.signedWide() : line.integer();
    }
    if ((isExtended || hasCarry) && isWide)
    {
        line.refuse("carry of 64 bits");
    }
    if (isExtended)
    {
        instruction.predicate[0] = line.predicate();
        instruction.predicate[1] = line.predicate();
    }
    else
    {
        instruction.predicate[0].inverted = instruction.predicate[1].inverted = true; // !PT: nothing to add
    }
    instruction.execute = isWide ? addWide : isExtended || hasCarry ? addThreeWithCarry : addThree;
}

// IADD.64 d, a, b
void decodeIadd(Line& line, Instruction& instruction)
{
    line.need("64");
    line.destination(instruction, 2);
    instruction.source = {line.signedWide(), line.signedWide()};
    instruction.execute = addWide;
}

// VIADD d, a, b: d = a + b [PTX add.s32, on sm_90]
void decodeViadd(Line& line, Instruction& instruction)
{
    line.destination(instruction);
    instruction.source = {line.integer(), line.integer()};
    instruction.execute = addThree;
}

// IMAD d, a, b, c: the lower 32 bits of a * b + c [PTX mad.lo.s32]; .X adds a carry [PTX mad.hi.cc.u32 with addc].
// .MOV, .IADD, .SHL say what the compiler uses it for; .U32 matters for .WIDE and .HI only.
void multiplyAdd(Context& context, Instruction const& instruction)
{
    Lanes scratch[3], result;
    auto const [a, b, c] = sources<integer>(context, instruction, scratch);
    uint32_t const carry = mask(context, instruction.predicate[0]);
    for (int lane = 0; lane < kLanes; ++lane)
    {
        result[lane] = a[lane] * b[lane] + c[lane] + bit(carry, lane);
    }
    write(context, instruction, result);
}

// IMAD.WIDE d:d+1, a, b, c:c+1 [PTX mad.wide.s32]; .U32 unsigned. .HI: the upper half of the same sum [PTX mul.hi.s32].
template <bool isSigned, bool isHigh>
void multiplyAddWide(Context& context, Instruction const& instruction)
{
    Lanes scratch[2];
    auto const [a, b] = sources<integer>(context, instruction, scratch);
    WideLanes sum = wide(context, instruction.source[2]);
    for (int lane = 0; lane < kLanes; ++lane)
    {
        sum[lane] += isSigned ? static_cast<uint64_t>(int64_t{asSigned(a[lane])} * asSigned(b[lane]))
                              : uint64_t{a[lane]} * b[lane];
    }
    if (!isHigh)
    {
        writeWide(context, instruction, sum);
        return;
    }
    Lanes upper;
    for (int lane = 0; lane < kLanes; ++lane)
    {
        upper[lane] = static_cast<uint32_t>(sum[lane] >> 32);
    }
    write(context, instruction, upper);
}

void decodeImad(Line& line, Instruction& instruction)
{
    bool const isWide = line.has("WIDE"), isHigh = line.has("HI");
    bool const isExtended = line.has("X"), isSigned = !line.has("U32");
    line.allow({"MOV", "IADD", "SHL"});
    line.destination(instruction, isWide ? 2 : 1);
    instruction.source = {line.integer(), line.integer()};
    instruction.source[2] = isWide || isHigh ? line.wide() : line.integer();
    instruction.predicate[0].inverted = true; // no carry
    auto const& [a, b, c] = instruction.source;
    bool const hasNegated = a.change != Change::kNONE || b.change != Change::kNONE;
    if ((isWide || isHigh) && (isExtended || hasNegated))
    {
        line.refuse("carry or negation in a product of 64 bits");
    }
    if (isExtended)
    {
        instruction.predicate[0] = line.predicate();
    }
    instruction.execute = isWide ? (isSigned ? multiplyAddWide<true, false> : multiplyAddWide<false, false>)
        : isHigh                 ? (isSigned ? multiplyAddWide<true, true> : multiplyAddWide<false, true>)
                                 : multiplyAdd;
}

// LEA d, [p,] a, b, n: d = (a << n) + b, p its carry. LEA.HI d, a, b, c, n: the upper word of c:a << n, plus b. .X adds
// a carry; with .SX32 the upper word c is the sign of a. [PTX shl.b64 and add.s64 of an address; kernels]
template <bool isHigh>
void loadEffectiveAddress(Context& context, Instruction const& instruction)
{
    Lanes scratch[3], result;
    auto const [a, b, c] = sources<integer>(context, instruction, scratch);
    uint32_t const in = mask(context, instruction.predicate[0]);
    bool const isSign = instruction.words == 2;
    uint32_t carry = 0;
    for (int lane = 0; lane < kLanes; ++lane)
    {
        uint32_t const upper = isSign ? static_cast<uint32_t>(asSigned(a[lane]) >> 31) : c[lane];
        uint32_t const shifted = isHigh
            ? static_cast<uint32_t>((uint64_t{upper} << 32 | a[lane]) << instruction.immediate >> 32)
            : a[lane] << instruction.immediate;
        uint64_t const sum = uint64_t{shifted} + b[lane] + bit(in, lane);
        result[lane] = static_cast<uint32_t>(sum);
        carry |= static_cast<uint32_t>(sum >> 32) << lane;
    }
    write(context, instruction, result);
    writePredicate(context, instruction.predicateResult[0], carry);
}

void decodeLea(Line& line, Instruction& instruction)
{
    bool const isHigh = line.has("HI"), isExtended = line.has("X"), isSign = line.has("SX32");
    line.destination(instruction);
    if (line.predicateIsNext())
    {
        instruction.predicateResult[0] = line.predicateResult();
    }
    instruction.source = {line.integer(), line.integer()};
    if (isHigh && !isSign)
    {
        instruction.source[2] = line.integer();
    }
    instruction.words = isSign ? 2 : 1;
    instruction.immediate = line.immediate();
    instruction.predicate[0].inverted = true;
    if (isExtended)
    {
        instruction.predicate[0] = line.predicate();
    }
    auto const& [a, b, c] = instruction.source;
    bool const hasNegated = a.change != Change::kNONE || b.change != Change::kNONE;
    if (instruction.immediate > 31 || hasNegated || (!isHigh && (isExtended || isSign)))
    {
        line.refuse("form");
    }
    instruction.execute = isHigh ? loadEffectiveAddress<true> : loadEffectiveAddress<false>;
}

// IABS d, a [PTX abs.s32]
void absolute(Context& context, Instruction const& instruction)
{
    Lanes scratch, result;
    Lanes const& a = integer(context, instruction.source[0], scratch);
    for (int lane = 0; lane < kLanes; ++lane)
    {
        result[lane] = asSigned(a[lane]) < 0 ? 0 - a[lane] : a[lane];
    }
    write(context, instruction, result);
}

void decodeIabs(Line& line, Instruction& instruction)
{
    line.destination(instruction);
    instruction.source[0] = line.integer();
    instruction.execute = absolute;
}

// IMNMX, VIMNMX d, a, b, p: the smaller one where p, else the larger one; signed [PTX min.s32, max.s32]. VIMNMX3 d, a, b, c, p:
// of three. VIADDMNMX d, a, b, c, p: of a + b and c [PTX add.s32 and min.s32, max.s32, on sm_90]. .RELU: and at least 0.
enum class Extremum
{
    kOF_TWO,
    kOF_THREE,
    kOF_SUM,
};

template <Extremum kind>
void extremum(Context& context, Instruction const& instruction)
{
    Lanes scratch[3], result;
    auto const [a, b, c] = sources<integer>(context, instruction, scratch);
    uint32_t const smaller = mask(context, instruction.predicate[0]);
    auto const better = [](bool isSmaller, int32_t x, int32_t y) { return isSmaller ? std::min(x, y) : std::max(x, y); };
    for (int lane = 0; lane < kLanes; ++lane)
    {
        bool const isSmaller = bit(smaller, lane);
        int32_t found = kind == Extremum::kOF_SUM ? asSigned(a[lane] + b[lane])
                                                  : better(isSmaller, asSigned(a[lane]), asSigned(b[lane]));
        found = kind == Extremum::kOF_TWO ? found : better(isSmaller, found, asSigned(c[lane]));
        result[lane] = static_cast<uint32_t>(instruction.immediate ? std::max(found, 0) : found);
    }
    write(context, instruction, result);
}

// IMNMX.S64 PT, PT, d, a, b, p, !PT: of pairs [PTX min.s64, max.s64, on sm_120]. The other predicates are for longer numbers.
void extremumWide(Context& context, Instruction const& instruction)
{
    WideLanes const a = wide(context, instruction.source[0]), b = wide(context, instruction.source[1]);
    WideLanes result;
    uint32_t const smaller = mask(context, instruction.predicate[0]);
    for (int lane = 0; lane < kLanes; ++lane)
    {
        bool const isLess = static_cast<int64_t>(a[lane]) < static_cast<int64_t>(b[lane]);
        result[lane] = isLess == bool(bit(smaller, lane)) ? a[lane] : b[lane];
    }
    writeWide(context, instruction, result);
}

void decodeExtremum(Line& line, Instruction& instruction)
{
    if (line.has("S64"))
    {
        bool const wantsNone = line.predicateResult() == kUnwantedPredicate && line.predicateResult() == kUnwantedPredicate;
        line.destination(instruction, 2);
        instruction.source = {line.wide(), line.wide()};
        instruction.predicate[0] = line.predicate();
        if (!wantsNone || line.word() != "!PT")
        {
            line.refuse("form");
        }
        instruction.execute = extremumWide;
        return;
    }
    bool const isOfTwo = line.opcode() != "VIMNMX3" && line.opcode() != "VIADDMNMX";
    line.allow({"S32"});
    instruction.immediate = line.has("RELU");
    line.destination(instruction);
    instruction.source = {line.integer(), line.integer()};
    if (!isOfTwo)
    {
        instruction.source[2] = line.integer();
    }
    instruction.predicate[0] = line.predicate();
    instruction.execute = isOfTwo          ? extremum<Extremum::kOF_TWO>
        : line.opcode() == "VIADDMNMX" ? extremum<Extremum::kOF_SUM>
                                       : extremum<Extremum::kOF_THREE>;
}

} // namespace

DecodeTable const& addInstructions()
{
    static DecodeTable const table = {
        {"IADD3", decodeIadd3},
        {"UIADD3", decodeIadd3},
        {"IADD", decodeIadd},
        {"VIADD", decodeViadd},
        {"IMAD", decodeImad},
        {"UIMAD", decodeImad},
        {"LEA", decodeLea},
        {"ULEA", decodeLea},
        {"IABS", decodeIabs},
        {"IMNMX", decodeExtremum},
        {"VIMNMX", decodeExtremum},
        {"VIMNMX3", decodeExtremum},
        {"VIADDMNMX", decodeExtremum},
        {"UVIMNMX", decodeExtremum},
    };
    return table;
}

} // namespace emulator::sass
