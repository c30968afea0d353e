// From one type of number to another.
#include "sass_line.h"
#include "sass_values.h"

#include <cmath>
#include <limits>

namespace emulator::sass
{
namespace
{

// I2F d, a; I2FP.F32.S32 d, a: to nearest [PTX cvt.rn.f32.s32]; .U32 [PTX cvt.rn.f32.u32]. .RP: up [PTX cvt.rp.f32.s32; it begins a
// division].
template <bool isUp, bool isUnsigned = false>
void fromInteger(Context& context, Instruction const& instruction)
{
    Lanes scratch, result;
    Lanes const& a = integer(context, instruction.source[0], scratch);
    for (int lane = 0; lane < kLanes; ++lane)
    {
        double const exact = isUnsigned ? static_cast<double>(a[lane]) : asSigned(a[lane]);
        auto const nearest = static_cast<float>(exact);
        bool const isBelow = isUp && double{nearest} < exact;
        result[lane] = asBits(isBelow ? std::nextafter(nearest, std::numeric_limits<float>::infinity()) : nearest);
    }
    write(context, instruction, result);
}

void decodeI2f(Line& line, Instruction& instruction)
{
    bool const isUp = line.has("RP"), isUnsigned = line.has("U32");
    if (line.opcode() == "I2FP" || line.opcode() == "UI2FP")
    {
        line.need("F32");
        if (!isUnsigned)
        {
            line.need("S32");
        }
    }
    if (isUp && isUnsigned)
    {
        line.refuse("an unsigned number, rounded up");
    }
    line.destination(instruction);
    instruction.source[0] = line.integer();
    instruction.execute = isUp ? fromInteger<true> : isUnsigned ? fromInteger<false, true> : fromInteger<false>;
}

// F2I.FTZ.U32.TRUNC.NTZ d, a: towards zero, into the range; NaN to zero [PTX cvt.rzi.ftz.u32.f32; in a division]
void toUnsigned(Context& context, Instruction const& instruction)
{
    Lanes scratch, result;
    Lanes const& a = real(context, instruction.source[0], scratch);
    for (int lane = 0; lane < kLanes; ++lane)
    {
        float const value = asFloat(a[lane]);
        result[lane] = !(value > 0) ? 0 : value >= 4294967296.0F ? ~0U : static_cast<uint32_t>(value);
    }
    write(context, instruction, result);
}

void decodeF2i(Line& line, Instruction& instruction)
{
    for (char const* modifier : {"FTZ", "U32", "TRUNC", "NTZ"})
    {
        line.need(modifier);
    }
    line.destination(instruction);
    instruction.source[0] = line.real();
    instruction.execute = toUnsigned;
}

// F2FP.F16.F32.PACK_AB d, a, b: a in the upper half, b in the lower one [PTX cvt.rn.f16x2.f32]; .BF16 [PTX
// cvt.rn.bf16x2.f32]. Before sm_89 the modifier .F32 is not printed, nor .F16.
template <bool isBf16>
void pack(Context& context, Instruction const& instruction)
{
    Lanes scratch[2], result;
    auto const [a, b] = sources<real>(context, instruction, scratch);
    auto const rounded = [](uint32_t bits) { return isBf16 ? toBf16(asFloat(bits)) : toHalf(asFloat(bits)); };
    for (int lane = 0; lane < kLanes; ++lane)
    {
        result[lane] = uint32_t{rounded(a[lane])} << 16 | rounded(b[lane]);
    }
    write(context, instruction, result);
}

void decodeF2fp(Line& line, Instruction& instruction)
{
    bool const isBf16 = line.has("BF16");
    line.allow({"F16", "F32"});
    line.need("PACK_AB");
    line.destination(instruction);
    instruction.source = {line.real(), line.real()};
    instruction.execute = isBf16 ? pack<true> : pack<false>;
}

// F2F.BF16.F32 d, a: in the lower half of d [PTX cvt.rn.bf16.f32]. No other form is known.
void decodeF2f(Line& line, Instruction& instruction)
{
    line.need("BF16");
    line.need("F32");
    line.destination(instruction);
    instruction.source[0] = line.real();
    instruction.execute = [](Context& context, Instruction const& self) {
        Lanes scratch, result;
        Lanes const& a = real(context, self.source[0], scratch);
        for (int lane = 0; lane < kLanes; ++lane)
        {
            result[lane] = toBf16(asFloat(a[lane]));
        }
        write(context, self, result);
    };
}

// HADD2.F32 d, -RZ, a.H0_H0: the lower half of a as a 32-bit float, a.H1_H1: the upper one [PTX cvt.f32.f16]. No other form is
// known. FHADD d, a[.H1], b: such a half plus a float, rounded once; .BF16 [kernels, on sm_120].
template <bool isBf16, bool isUpper>
void addHalf(Context& context, Instruction const& instruction)
{
    Lanes scratch, result;
    Lanes const& a = context.warp->rows[instruction.source[1].row].lanes;
    Lanes const& b = real(context, instruction.source[0], scratch);
    for (int lane = 0; lane < kLanes; ++lane)
    {
        auto const half = static_cast<uint16_t>(isUpper ? a[lane] >> 16 : a[lane]);
        float const value = isBf16 ? asFloat(uint32_t{half} << 16) : fromHalf(half);
        result[lane] = asBits(value + asFloat(b[lane]));
    }
    write(context, instruction, result);
}

void decodeHadd2(Line& line, Instruction& instruction)
{
    line.need("F32");
    line.destination(instruction);
    if (line.word() != "-RZ")
    {
        line.refuse("form");
    }
    bool const isUpper = line.half(instruction.source[1]);
    instruction.source[0] = line.constant(0x80000000); // -0, to which -0 may be added
    instruction.execute = isUpper ? addHalf<false, true> : addHalf<false, false>;
}

void decodeFhadd(Line& line, Instruction& instruction)
{
    bool const isBf16 = line.has("BF16");
    line.destination(instruction);
    bool const isUpper = line.half(instruction.source[1]);
    instruction.source[0] = line.real();
    instruction.execute = isBf16 ? (isUpper ? addHalf<true, true> : addHalf<true, false>)
                                 : (isUpper ? addHalf<false, true> : addHalf<false, false>);
}

} // namespace

DecodeTable const& convertInstructions()
{
    static DecodeTable const table = {
        {"I2F", decodeI2f},
        {"UI2F", decodeI2f},
        {"I2FP", decodeI2f},
        {"UI2FP", decodeI2f},
        {"HADD2", decodeHadd2},
        {"FHADD", decodeFhadd},
        {"F2F", decodeF2f},
        {"F2I", decodeF2i},
        {"UF2I", decodeF2i},
        {"F2FP", decodeF2fp},
    };
    return table;
}

} // namespace emulator::sass
