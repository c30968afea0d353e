// Moves: between registers, from the constant bank and special registers, and between the lanes of a warp.
#include "sass_line.h"
#include "sass_tokens.h"
#include "sass_values.h"

namespace emulator::sass
{
namespace
{

// MOV d, a [PTX mov.b32]; LDC, ULDC, LDCU d, c[0x0][n]: a word of the constant bank, where the parameters lie [PTX
// ld.param]. .64, .128: two or four registers.
template <int words>
void move(Context& context, Instruction const& instruction)
{
    for (int k = 0; k < words; ++k)
    {
        write(context, instruction, context.warp->rows[instruction.source[0].row + k].lanes, k);
    }
}

void decodeMove(Line& line, Instruction& instruction)
{
    bool const isDouble = line.has("64"), isQuad = line.has("128");
    line.destination(instruction, isQuad ? 4 : isDouble ? 2 : 1);
    instruction.source[0] = isQuad ? line.quad(4) : isDouble ? line.wide() : line.integer();
    if (instruction.source[0].change != Change::kNONE)
    {
        line.refuse("changed operand");
    }
    instruction.execute = isQuad ? move<4> : isDouble ? move<2> : move<1>;
}

// HFMA2 d, -RZ, RZ, x, y: compilers put a constant into a register so, the upper half x and the lower half y as 16-bit
// floats [PTX mov.u32 of a constant, on sm_120]. No other form is known. .MMA: where it is computed.
void decodeHfma2(Line& line, Instruction& instruction)
{
    line.allow({"MMA"});
    line.destination(instruction);
    bool const isConstant = line.word() == "-RZ" && line.word() == "RZ";
    uint32_t upper = 0, lower = 0;
    if (!isConstant || !readFloat(line.word(), upper) || !readFloat(line.word(), lower))
    {
        line.refuse("form");
    }
    instruction.source[0] = line.constant(uint32_t{toHalf(asFloat(upper))} << 16 | toHalf(asFloat(lower)));
    instruction.execute = move<1>;
}

void decodeConstant(Line& line, Instruction& instruction)
{
    if (decodeMove(line, instruction); instruction.source[0].row < kFirstConstant)
    {
        line.refuse("operand that is not in the constant bank");
    }
}

Lanes const& sameInAllLanes(Context const& context, Lanes const& value, Lanes& scratch, char const* what)
{
    uint32_t const first = value[static_cast<size_t>(__builtin_ctz(context.active))];
    for (int lane = 0; lane < kLanes; ++lane)
    {
        if (bit(context.active, lane) && value[lane] != first)
        {
            fault(std::string(what) + " of a value that lanes disagree on");
        }
    }
    scratch.fill(first);
    return scratch;
}

// R2UR u, a: a register that is the same in all lanes becomes a uniform one [kernels]
void toUniform(Context& context, Instruction const& instruction)
{
    Lanes scratch;
    Lanes const& value = context.warp->rows[instruction.source[0].row].lanes;
    write(context, instruction, sameInAllLanes(context, value, scratch, "R2UR"));
}

void decodeR2ur(Line& line, Instruction& instruction)
{
    line.destination(instruction);
    instruction.source[0] = line.integer();
    if (instruction.source[0].change != Change::kNONE)
    {
        line.refuse("changed operand");
    }
    instruction.execute = toUniform;
}

// CS2R d:d+1, SRZ: zeros [PTX mov.b64 of 0]
void decodeCs2r(Line& line, Instruction& instruction)
{
    line.destination(instruction, 2);
    if (line.word() != "SRZ")
    {
        line.refuse("special register");
    }
    instruction.execute = move<2>;
}

// S2R, S2UR d, SR_...: the thread's number in its block, the block's in the grid [PTX mov.u32 of %tid.x, %ctaid.x]. The
// block's number in its cluster is 0, because there are no clusters.
void threadNumber(Context& context, Instruction const& instruction)
{
    Lanes result;
    for (int lane = 0; lane < kLanes; ++lane)
    {
        result[lane] = static_cast<uint32_t>(context.warp->id * kLanes + lane);
    }
    write(context, instruction, result);
}

void blockNumber(Context& context, Instruction const& instruction)
{
    Lanes result;
    result.fill(context.block);
    write(context, instruction, result);
}

void decodeS2r(Line& line, Instruction& instruction)
{
    static std::map<std::string, Execute> const registers = {
        {"SR_TID.X", threadNumber},
        {"SR_CTAID.X", blockNumber},
        {"SR_CgaCtaId", move<1>},
    };
    line.destination(instruction);
    std::string const name = line.word();
    auto const found = registers.find(name);
    if (found == registers.end() || (instruction.isUniform && name == "SR_TID.X"))
    {
        line.refuse("special register " + name);
    }
    instruction.execute = found->second;
}

// SHFL.BFLY p, d, a, b, c: a of lane (own ^ b) [PTX shfl.sync.bfly.b32]; SHFL.IDX: of lane b [PTX shfl.sync.idx.b32].
// SHFL.UP: of lane (own - b), and the own value where there is none [PTX shfl.sync.up.b32].
// c is 0x1f, or 0 with UP: the whole warp takes part, and p says that the lane was there.
enum class Shuffle
{
    kBUTTERFLY,
    kINDEX,
    kUP,
};

template <Shuffle kind>
void shuffle(Context& context, Instruction const& instruction)
{
    needAllLanes(context, "SHFL");
    Lanes scratch[3], result;
    auto const [a, b, c] = sources<integer>(context, instruction, scratch);
    uint32_t wasThere = 0;
    for (uint32_t lane = 0; lane < kLanes; ++lane)
    {
        if (c[lane] != (kind == Shuffle::kUP ? 0 : 0x1F))
        {
            fault("SHFL: within parts of a warp");
        }
        uint32_t const by = b[lane] & 31;
        bool const isInside = kind != Shuffle::kUP || by <= lane;
        uint32_t const from = kind == Shuffle::kBUTTERFLY ? lane ^ by : kind == Shuffle::kINDEX ? by : lane - by;
        result[lane] = a[isInside ? from : lane];
        wasThere |= uint32_t{isInside} << lane;
    }
    write(context, instruction, result);
    writePredicate(context, instruction.predicateResult[0], wasThere);
}

void decodeShfl(Line& line, Instruction& instruction)
{
    bool const isButterfly = line.has("BFLY"), isUp = line.has("UP");
    if (!isButterfly && !isUp)
    {
        line.need("IDX");
    }
    instruction.predicateResult[0] = line.predicateResult();
    line.destination(instruction);
    instruction.source = {line.integer(), line.integer(), line.integer()};
    instruction.execute = isButterfly ? shuffle<Shuffle::kBUTTERFLY>
        : isUp                        ? shuffle<Shuffle::kUP>
                                      : shuffle<Shuffle::kINDEX>;
}

// REDUX.SUM.S32 u, a: the sum over the warp; REDUX.MIN.S32: the least [PTX redux.sync.add.s32, .min.s32]
template <bool isMinimum>
void reduceLanes(Context& context, Instruction const& instruction)
{
    needAllLanes(context, "REDUX");
    Lanes scratch, result;
    Lanes const& a = integer(context, instruction.source[0], scratch);
    uint32_t total = a[0];
    for (int lane = 1; lane < kLanes; ++lane)
    {
        total = !isMinimum ? total + a[lane] : asSigned(a[lane]) < asSigned(total) ? a[lane] : total;
    }
    result.fill(total);
    write(context, instruction, result);
}

void decodeRedux(Line& line, Instruction& instruction)
{
    bool const isMinimum = line.has("MIN");
    if (!isMinimum)
    {
        line.need("SUM");
    }
    line.need("S32");
    line.destination(instruction);
    instruction.source[0] = line.integer();
    instruction.execute = isMinimum ? reduceLanes<true> : reduceLanes<false>;
}

} // namespace

DecodeTable const& moveInstructions()
{
    static DecodeTable const table = {
        {"MOV", decodeMove},
        {"UMOV", decodeMove},
        {"HFMA2", decodeHfma2},
        {"LDC", decodeConstant},
        {"ULDC", decodeConstant},
        {"LDCU", decodeConstant},
        {"R2UR", decodeR2ur},
        {"CS2R", decodeCs2r},
        {"S2R", decodeS2r},
        {"S2UR", decodeS2r},
        {"SHFL", decodeShfl},
        {"REDUX", decodeRedux},
    };
    return table;
}

} // namespace emulator::sass
