// Bits: logic, shifts, counts, and predicates as bits of a register.
#include "sass_line.h"
#include "sass_values.h"

namespace emulator::sass
{
namespace
{

// Bit number 4 a + 2 b + c of `table` is the result where the operands have bits a, b, c (PTX ISA, lop3.b32).
inline uint32_t lookUp(uint32_t a, uint32_t b, uint32_t c, std::array<uint32_t, 8> const& minterms)
{
    auto const& m = minterms;
    uint32_t const without = (m[0] & ~b & ~c) | (m[1] & ~b & c) | (m[2] & b & ~c) | (m[3] & b & c);
    uint32_t const with = (m[4] & ~b & ~c) | (m[5] & ~b & c) | (m[6] & b & ~c) | (m[7] & b & c);
    return (~a & without) | (a & with);
}

std::array<uint32_t, 8> mintermsOf(uint32_t table)
{
    std::array<uint32_t, 8> minterms;
    for (int k = 0; k < 8; ++k)
    {
        minterms[k] = 0 - (table >> k & 1);
    }
    return minterms;
}

// LOP3.LUT [p,] d, a, b, c, table, q [PTX lop3.b32]; p: is the result not zero, or q [PTX and.b32 with setp.ne;
// kernels].
void logic(Context& context, Instruction const& instruction)
{
    Lanes scratch[3], result;
    auto const [a, b, c] = sources<integer>(context, instruction, scratch);
    auto const minterms = mintermsOf(instruction.immediate);
    uint32_t isNotZero = 0;
    for (int lane = 0; lane < kLanes; ++lane)
    {
        result[lane] = lookUp(a[lane], b[lane], c[lane], minterms);
    }
    for (int lane = 0; lane < kLanes; ++lane)
    {
        isNotZero |= uint32_t{result[lane] != 0} << lane;
    }
    write(context, instruction, result);
    writePredicate(context, instruction.predicateResult[0], isNotZero | mask(context, instruction.predicate[0]));
}

void decodeLop3(Line& line, Instruction& instruction)
{
    line.need("LUT");
    if (line.predicateIsNext())
    {
        instruction.predicateResult[0] = line.predicateResult();
    }
    line.destination(instruction);
    instruction.source = {line.integer(), line.integer(), line.integer()};
    instruction.immediate = line.immediate();
    instruction.predicate[0] = line.predicate();
    instruction.execute = logic;
}

// PLOP3.LUT p, PT, a, b, c, table, table of the second result, which nobody wants [PTX and.pred; kernels]
void predicateLogic(Context& context, Instruction const& instruction)
{
    uint32_t const result = lookUp(mask(context, instruction.predicate[0]), mask(context, instruction.predicate[1]),
        mask(context, instruction.predicate[2]), mintermsOf(instruction.immediate));
    writePredicate(context, instruction.predicateResult[0], result);
}

void decodePlop3(Line& line, Instruction& instruction)
{
    line.need("LUT");
    instruction.predicateResult[0] = line.predicateResult();
    if (line.predicateResult() != kUnwantedPredicate)
    {
        line.refuse("second result");
    }
    for (PredicateSource& source : instruction.predicate)
    {
        source = line.predicate();
    }
    instruction.immediate = line.immediate();
    line.immediate();
    instruction.execute = predicateLogic;
}

// SHF d, low, n, high: a shift of 64 bits. .L.U32 with high RZ: low << n [PTX shl.b32]. .L.U64.HI: the upper word [PTX
// shl.b64]. .R.U32.HI and .R.S32.HI with low RZ: high >> n [PTX shr.u32, shr.s32]. A register n above 31 is not known.
enum Shift : uint8_t
{
    kLEFT,
    kLEFT_HIGH,
    kRIGHT_UNSIGNED,
    kRIGHT_SIGNED,
};

template <Shift shift>
void funnelShift(Context& context, Instruction const& instruction)
{
    Lanes scratch[3], result;
    Lanes const& low = integer(context, instruction.source[0], scratch[0]);
    Lanes const& count = integer(context, instruction.source[1], scratch[1]);
    Lanes const& high = integer(context, instruction.source[2], scratch[2]);
    for (int lane = 0; lane < kLanes; ++lane)
    {
        uint32_t const n = count[lane] & 31;
        result[lane] = shift == kLEFT ? low[lane] << n
            : shift == kLEFT_HIGH     ? static_cast<uint32_t>((uint64_t{high[lane]} << 32 | low[lane]) << n >> 32)
            : shift == kRIGHT_SIGNED  ? static_cast<uint32_t>(asSigned(high[lane]) >> n)
                                      : high[lane] >> n;
    }
    for (int lane = 0; lane < kLanes; ++lane)
    {
        if (bit(context.active, lane) && count[lane] > 31)
        {
            fault("SHF: shift by " + std::to_string(count[lane]));
        }
    }
    write(context, instruction, result);
}

void decodeShf(Line& line, Instruction& instruction)
{
    bool const isLeft = line.has("L"), isHigh = line.has("HI");
    if (!isLeft)
    {
        line.need("R");
    }
    std::string const number = line.nextModifier();
    line.destination(instruction);
    instruction.source = {line.integer(), line.integer(), line.integer()};
    uint16_t const low = instruction.source[0].row, high = instruction.source[2].row;
    if (isLeft && number == "U32" && !isHigh && high == kZeroRows)
    {
        instruction.execute = funnelShift<kLEFT>;
    }
    else if (isLeft && number == "U64" && isHigh)
    {
        instruction.execute = funnelShift<kLEFT_HIGH>;
    }
    else if (!isLeft && isHigh && low == kZeroRows && (number == "U32" || number == "S32"))
    {
        instruction.execute = number == "S32" ? funnelShift<kRIGHT_SIGNED> : funnelShift<kRIGHT_UNSIGNED>;
    }
    else
    {
        line.refuse("form");
    }
}

// SGXT d, a, n: the lower n bits with the sign of the uppermost, or zeros with .U32 [PTX bfe.s32, bfe.u32; kernels]
template <bool isSigned>
void extendSign(Context& context, Instruction const& instruction)
{
    Lanes scratch, result;
    Lanes const& a = integer(context, instruction.source[0], scratch);
    uint32_t const unused = 32 - instruction.immediate;
    for (int lane = 0; lane < kLanes; ++lane)
    {
        uint32_t const up = a[lane] << unused;
        result[lane] = isSigned ? static_cast<uint32_t>(asSigned(up) >> unused) : up >> unused;
    }
    write(context, instruction, result);
}

void decodeSgxt(Line& line, Instruction& instruction)
{
    bool const isSigned = !line.has("U32");
    line.destination(instruction);
    instruction.source[0] = line.integer();
    instruction.immediate = line.immediate();
    if (instruction.immediate < 1 || instruction.immediate > 31)
    {
        line.refuse("number of bits");
    }
    instruction.execute = isSigned ? extendSign<true> : extendSign<false>;
}

// PRMT d, a, selector, c: each byte of d is one of the eight of c:a, or its sign eight times [PTX prmt.b32]
void permute(Context& context, Instruction const& instruction)
{
    Lanes scratch[3], result;
    auto const [a, selector, c] = sources<integer>(context, instruction, scratch);
    for (int lane = 0; lane < kLanes; ++lane)
    {
        uint64_t const all = uint64_t{c[lane]} << 32 | a[lane];
        result[lane] = 0;
        for (int k = 0; k < 4; ++k)
        {
            uint32_t const chosen = selector[lane] >> 4 * k & 15;
            auto const value = static_cast<uint8_t>(all >> 8 * (chosen & 7));
            uint32_t const byte = chosen & 8 ? (value & 0x80 ? 0xFF : 0) : value;
            result[lane] |= byte << 8 * k;
        }
    }
    write(context, instruction, result);
}

void decodePrmt(Line& line, Instruction& instruction)
{
    line.destination(instruction);
    instruction.source = {line.integer(), line.integer(), line.integer()};
    instruction.execute = permute;
}

// POPC d, a [PTX popc.b32]
void countBits(Context& context, Instruction const& instruction)
{
    Lanes scratch, result;
    Lanes const& a = integer(context, instruction.source[0], scratch);
    for (int lane = 0; lane < kLanes; ++lane)
    {
        result[lane] = static_cast<uint32_t>(__builtin_popcount(a[lane]));
    }
    write(context, instruction, result);
}

void decodePopc(Line& line, Instruction& instruction)
{
    line.destination(instruction);
    instruction.source[0] = line.integer();
    instruction.execute = countBits;
}

// P2R d, PR, RZ, bits: d has predicate k at bit k where `bits` has one, and zeros elsewhere [kernels, with R2P]
void predicatesToRegister(Context& context, Instruction const& instruction)
{
    Lanes result;
    for (int lane = 0; lane < kLanes; ++lane)
    {
        uint32_t predicates = 0;
        for (int k = 0; k < kAlways; ++k)
        {
            predicates |= bit(context.warp->predicates[k], lane) << k;
        }
        result[lane] = predicates & instruction.immediate;
    }
    write(context, instruction, result);
}

void decodeP2r(Line& line, Instruction& instruction)
{
    line.destination(instruction);
    if (line.word() != "PR" || line.word() != "RZ")
    {
        line.refuse("form");
    }
    instruction.immediate = line.immediate();
    instruction.execute = predicatesToRegister;
}

// R2P PR, a, bits: predicate k becomes bit k of a where `bits` has one [kernels, with P2R]
void registerToPredicates(Context& context, Instruction const& instruction)
{
    Lanes scratch;
    Lanes const& a = integer(context, instruction.source[0], scratch);
    for (int k = 0; k < kAlways; ++k)
    {
        uint32_t value = 0;
        for (int lane = 0; lane < kLanes; ++lane)
        {
            value |= (a[lane] >> k & 1) << lane;
        }
        if (instruction.immediate >> k & 1)
        {
            writePredicate(context, static_cast<uint8_t>(k), value);
        }
    }
}

void decodeR2p(Line& line, Instruction& instruction)
{
    if (line.word() != "PR")
    {
        line.refuse("form");
    }
    instruction.source[0] = line.integer();
    instruction.immediate = line.immediate();
    instruction.execute = registerToPredicates;
}

} // namespace

DecodeTable const& bitInstructions()
{
    static DecodeTable const table = {
        {"LOP3", decodeLop3},
        {"ULOP3", decodeLop3},
        {"PLOP3", decodePlop3},
        {"UPLOP3", decodePlop3},
        {"PRMT", decodePrmt},
        {"SHF", decodeShf},
        {"USHF", decodeShf},
        {"SGXT", decodeSgxt},
        {"USGXT", decodeSgxt},
        {"POPC", decodePopc},
        {"P2R", decodeP2r},
        {"R2P", decodeR2p},
    };
    return table;
}

} // namespace emulator::sass
