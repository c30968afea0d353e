// Comparisons, and choices by predicate.
#include "sass_line.h"
#include "sass_values.h"

namespace emulator::sass
{
namespace
{

template <typename Number>
bool holds(Comparison comparison, Number a, Number b)
{
    switch (comparison)
    {
    case Comparison::kEQ: return a == b;
    case Comparison::kNE: return a < b || a > b;
    case Comparison::kLT: return a < b;
    case Comparison::kLE: return a <= b;
    case Comparison::kGT: return a > b;
    case Comparison::kGE: return a >= b;
    case Comparison::kNEU: return !(a == b);
    case Comparison::kGEU: return !(a < b);
    case Comparison::kUNORDERED: return a != a || b != b;
    }
    return false;
}

enum class Type
{
    kSIGNED,
    kUNSIGNED,
    kFLOAT,
};

// What decides beside the numbers, in Instruction::immediate.
constexpr uint32_t kOr = 1, kExtended = 2;

// p = (what was compared) and q, or or q. Where .EX has more words below, those decide between equal ones.
void writeComparison(Context& context, Instruction const& instruction, uint32_t is, uint32_t areEqual)
{
    uint32_t const q = mask(context, instruction.predicate[0]);
    if (instruction.immediate & kExtended)
    {
        is = (is & ~areEqual) | (mask(context, instruction.predicate[1]) & areEqual);
    }
    writePredicate(context, instruction.predicateResult[0], instruction.immediate & kOr ? is | q : is & q);
}

// ISETP, FSETP p, PT, a, b, q: p = (a compared with b) and q [PTX setp.lt.s32 etc., setp.neu.f32 etc.]; .OR [PTX or.pred].
// .EX with r behind q: the upper words of 64 bits; r is the comparison of the lower ones [PTX setp.lt.s64 etc.].
template <Type type, Comparison comparison>
void compare(Context& context, Instruction const& instruction)
{
    Lanes scratch[2];
    constexpr bool isFloat = type == Type::kFLOAT;
    auto const [a, b] = sources<(isFloat ? real : integer)>(context, instruction, scratch);
    uint32_t result = 0, areEqual = 0;
    for (int lane = 0; lane < kLanes; ++lane)
    {
        bool const is = type == Type::kFLOAT ? holds(comparison, asFloat(a[lane]), asFloat(b[lane]))
            : type == Type::kSIGNED         ? holds(comparison, asSigned(a[lane]), asSigned(b[lane]))
                                            : holds(comparison, a[lane], b[lane]);
        result |= uint32_t{is} << lane;
        areEqual |= uint32_t{a[lane] == b[lane]} << lane;
    }
    writeComparison(context, instruction, result, areEqual);
}

// ISETP.S64, .U64: of pairs [PTX setp.lt.s64 etc., on sm_120]
template <bool isSigned, Comparison comparison>
void compareWide(Context& context, Instruction const& instruction)
{
    WideLanes const a = wide(context, instruction.source[0]), b = wide(context, instruction.source[1]);
    uint32_t result = 0;
    for (int lane = 0; lane < kLanes; ++lane)
    {
        bool const is = isSigned
            ? holds(comparison, static_cast<int64_t>(a[lane]), static_cast<int64_t>(b[lane]))
            : holds(comparison, a[lane], b[lane]);
        result |= uint32_t{is} << lane;
    }
    writeComparison(context, instruction, result, 0);
}

template <bool isSigned>
Execute compareWideBy(std::string const& name, Line const& line)
{
    using C = Comparison;
    static std::map<std::string, Execute> const all = {
        {"EQ", compareWide<isSigned, C::kEQ>},
        {"NE", compareWide<isSigned, C::kNE>},
        {"LT", compareWide<isSigned, C::kLT>},
        {"LE", compareWide<isSigned, C::kLE>},
        {"GT", compareWide<isSigned, C::kGT>},
        {"GE", compareWide<isSigned, C::kGE>},
    };
    auto const found = all.find(name);
    if (found == all.end())
    {
        line.refuse("comparison " + name);
    }
    return found->second;
}

template <Type type>
Execute compareBy(std::string const& name, Line const& line)
{
    using C = Comparison;
    static std::map<std::string, Execute> const all = {
        {"EQ", compare<type, C::kEQ>},
        {"NE", compare<type, C::kNE>},
        {"LT", compare<type, C::kLT>},
        {"LE", compare<type, C::kLE>},
        {"GT", compare<type, C::kGT>},
        {"GE", compare<type, C::kGE>},
    };
    static std::map<std::string, Execute> const unordered = {
        {"NEU", compare<type, C::kNEU>},
        {"GEU", compare<type, C::kGEU>},
        {"NAN", compare<type, C::kUNORDERED>},
    };
    if (auto const found = all.find(name); found != all.end())
    {
        return found->second;
    }
    auto const found = unordered.find(name);
    if (found == unordered.end() || type != Type::kFLOAT)
    {
        line.refuse("comparison " + name);
    }
    return found->second;
}

void decodeComparison(Line& line, Instruction& instruction, bool isFloat)
{
    std::string const comparison = line.nextModifier();
    bool const isUnsigned = line.has("U32"), isOr = line.has("OR"), isExtended = line.has("EX");
    bool const isWideSigned = line.has("S64"), isWideUnsigned = line.has("U64"), isWide = isWideSigned || isWideUnsigned;
    if (!isOr)
    {
        line.need("AND");
    }
    instruction.immediate = (isOr ? kOr : 0) | (isExtended ? kExtended : 0);
    instruction.predicateResult[0] = line.predicateResult();
    if (line.predicateResult() != kUnwantedPredicate)
    {
        line.refuse("second result");
    }
    for (int k = 0; k < 2; ++k)
    {
        instruction.source[k] = isFloat ? line.real() : isWide ? line.wide() : line.integer();
    }
    instruction.predicate[0] = line.predicate();
    if (isExtended)
    {
        instruction.predicate[1] = line.predicate();
    }
    if ((isFloat && (isUnsigned || isExtended || isWide)) || (isWide && isExtended))
    {
        line.refuse("type");
    }
    instruction.execute = isWideSigned ? compareWideBy<true>(comparison, line)
        : isWideUnsigned             ? compareWideBy<false>(comparison, line)
        : isFloat ? compareBy<Type::kFLOAT>(comparison, line)
        : isUnsigned              ? compareBy<Type::kUNSIGNED>(comparison, line)
                                  : compareBy<Type::kSIGNED>(comparison, line);
}

void decodeIsetp(Line& line, Instruction& instruction)
{
    decodeComparison(line, instruction, false);
}

void decodeFsetp(Line& line, Instruction& instruction)
{
    decodeComparison(line, instruction, true);
}

// SEL, FSEL d, a, b, p: a where p, else b [PTX selp.b32, selp.f32]
template <bool isFloat>
void select(Context& context, Instruction const& instruction)
{
    Lanes scratch[2], result;
    auto const [a, b] = sources<(isFloat ? real : integer)>(context, instruction, scratch);
    uint32_t const first = mask(context, instruction.predicate[0]);
    for (int lane = 0; lane < kLanes; ++lane)
    {
        result[lane] = bit(first, lane) ? a[lane] : b[lane];
    }
    write(context, instruction, result);
}

void decodeSel(Line& line, Instruction& instruction)
{
    line.destination(instruction);
    instruction.source = {line.integer(), line.integer()};
    instruction.predicate[0] = line.predicate();
    instruction.execute = select<false>;
}

void decodeFsel(Line& line, Instruction& instruction)
{
    line.destination(instruction);
    instruction.source = {line.real(), line.real()};
    instruction.predicate[0] = line.predicate();
    instruction.execute = select<true>;
}

} // namespace

DecodeTable const& compareInstructions()
{
    static DecodeTable const table = {
        {"ISETP", decodeIsetp},
        {"UISETP", decodeIsetp},
        {"FSETP", decodeFsetp},
        {"UFSETP", decodeFsetp},
        {"SEL", decodeSel},
        {"USEL", decodeSel},
        {"FSEL", decodeFsel},
        {"UFSEL", decodeFsel},
    };
    return table;
}

} // namespace emulator::sass
