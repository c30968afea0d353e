// Arithmetic in 32-bit floats. Each operation is rounded once, to nearest; the compiler must not contract or reorder.
#include "sass_line.h"
#include "sass_values.h"

#include <cmath>
#include <map>

namespace emulator::sass
{
namespace
{

// FADD d, a, b; FMUL d, a, b [PTX add.f32, sub.f32, mul.f32]. Subnormal numbers stay.
template <bool isProduct>
void addOrMultiply(Context& context, Instruction const& instruction)
{
    Lanes scratch[2], result;
    auto const [a, b] = sources<real>(context, instruction, scratch);
    for (int lane = 0; lane < kLanes; ++lane)
    {
        float const x = asFloat(a[lane]), y = asFloat(b[lane]);
        result[lane] = asBits(isProduct ? x * y : x + y);
    }
    write(context, instruction, result);
}

template <bool isProduct>
void decodeAddOrMultiply(Line& line, Instruction& instruction)
{
    line.destination(instruction);
    instruction.source = {line.real(), line.real()};
    instruction.execute = addOrMultiply<isProduct>;
}

// FFMA d, a, b, c: a * b + c, rounded once [PTX fma.rn.f32]; .FTZ: subnormal operands and results are zeros [PTX
// fma.rn.ftz.f32].
template <bool isFlushed>
void fusedMultiplyAdd(Context& context, Instruction const& instruction)
{
    Lanes scratch[3], result;
    auto const [a, b, c] = sources<real>(context, instruction, scratch);
    auto const value = [](uint32_t bits) { return isFlushed ? flushed(asFloat(bits)) : asFloat(bits); };
    for (int lane = 0; lane < kLanes; ++lane)
    {
        float const sum = std::fma(value(a[lane]), value(b[lane]), value(c[lane]));
        result[lane] = asBits(isFlushed ? flushed(sum) : sum);
    }
    write(context, instruction, result);
}

void decodeFfma(Line& line, Instruction& instruction)
{
    bool const isFlushed = line.has("FTZ");
    line.destination(instruction);
    instruction.source = {line.real(), line.real(), line.real()};
    instruction.execute = isFlushed ? fusedMultiplyAdd<true> : fusedMultiplyAdd<false>;
}

// FMNMX d, a, b, p: the smaller one where p, else the larger one; the number where one is NaN, and +0 is above -0 [PTX
// min.f32, max.f32].
void extremum(Context& context, Instruction const& instruction)
{
    constexpr uint32_t kNan = 0x7FFFFFFF;
    Lanes scratch[2], result;
    auto const [a, b] = sources<real>(context, instruction, scratch);
    uint32_t const smaller = mask(context, instruction.predicate[0]);
    for (int lane = 0; lane < kLanes; ++lane)
    {
        float const x = asFloat(a[lane]), y = asFloat(b[lane]);
        bool const isSmaller = bit(smaller, lane);
        bool const takesFirst = isSmaller ? x < y : x > y;
        uint32_t const ofEqual = isSmaller ? a[lane] | b[lane] : a[lane] & b[lane]; // differ in the sign of zero only
        uint32_t const ofNumbers = x == y ? ofEqual : takesFirst ? a[lane] : b[lane];
        uint32_t const ofOne = y == y ? b[lane] : kNan;
        result[lane] = x != x ? ofOne : y != y ? a[lane] : ofNumbers;
    }
    write(context, instruction, result);
}

void decodeFmnmx(Line& line, Instruction& instruction)
{
    line.destination(instruction);
    instruction.source = {line.real(), line.real()};
    instruction.predicate[0] = line.predicate();
    instruction.execute = extremum;
}

// MUFU.EX2 d, a [PTX ex2.approx.ftz.f32]; MUFU.RCP d, a [PTX rcp.approx.ftz.f32]; MUFU.RSQ d, a [PTX
// rsqrt.approx.ftz.f32]; MUFU.SQRT d, a [PTX sqrt.approx.ftz.f32]. Models: correctly rounded.
void exponential(Context& context, Instruction const& instruction)
{
    Lanes scratch, result;
    Lanes const& a = real(context, instruction.source[0], scratch);
    for (int lane = 0; lane < kLanes; ++lane)
    {
        result[lane] = asBits(exp2Approximate(asFloat(a[lane])));
    }
    write(context, instruction, result);
}

void reciprocal(Context& context, Instruction const& instruction)
{
    Lanes scratch, result;
    Lanes const& a = real(context, instruction.source[0], scratch);
    for (int lane = 0; lane < kLanes; ++lane)
    {
        result[lane] = asBits(flushed(1.0F / flushed(asFloat(a[lane]))));
    }
    write(context, instruction, result);
}

void reciprocalRoot(Context& context, Instruction const& instruction)
{
    Lanes scratch, result;
    Lanes const& a = real(context, instruction.source[0], scratch);
    for (int lane = 0; lane < kLanes; ++lane)
    {
        result[lane] = asBits(flushed(static_cast<float>(1 / std::sqrt(double{flushed(asFloat(a[lane]))}))));
    }
    write(context, instruction, result);
}

void root(Context& context, Instruction const& instruction)
{
    Lanes scratch, result;
    Lanes const& a = real(context, instruction.source[0], scratch);
    for (int lane = 0; lane < kLanes; ++lane)
    {
        result[lane] = asBits(std::sqrt(flushed(asFloat(a[lane]))));
    }
    write(context, instruction, result);
}

void decodeMufu(Line& line, Instruction& instruction)
{
    std::string const function = line.nextModifier();
    static std::map<std::string, Execute> const functions
        = {{"EX2", exponential}, {"RCP", reciprocal}, {"RSQ", reciprocalRoot}, {"SQRT", root}};
    auto const found = functions.find(function);
    if (found == functions.end())
    {
        line.refuse("function " + function);
    }
    line.destination(instruction);
    instruction.source[0] = line.real();
    instruction.execute = found->second;
}

} // namespace

DecodeTable const& floatInstructions()
{
    static DecodeTable const table = {
        {"FADD", decodeAddOrMultiply<false>},
        {"UFADD", decodeAddOrMultiply<false>},
        {"FMUL", decodeAddOrMultiply<true>},
        {"UFMUL", decodeAddOrMultiply<true>},
        {"FFMA", decodeFfma},
        {"FMNMX", decodeFmnmx},
        {"MUFU", decodeMufu},
    };
    return table;
}

} // namespace emulator::sass
