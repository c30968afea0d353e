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

// ISETP, FSETP p, PT, a, b, q: p = (a compared with b) and q [PTX setp.lt.s32 etc., setp.neu.f32 etc.]
template <Type type, Comparison comparison>
void compare(Context& context, Instruction const& instruction)
{
    Lanes scratch[2];
    constexpr bool isFloat = type == Type::kFLOAT;
    auto const [a, b] = sources<(isFloat ? real : integer)>(context, instruction, scratch);
    uint32_t result = 0;
    for (int lane = 0; lane < kLanes; ++lane)
    {
        bool const is = type == Type::kFLOAT ? holds(comparison, asFloat(a[lane]), asFloat(b[lane]))
            : type == Type::kSIGNED         ? holds(comparison, asSigned(a[lane]), asSigned(b[lane]))
                                            : holds(comparison, a[lane], b[lane]);
        result |= uint32_t{is} << lane;
    }
    writePredicate(context, instruction.predicateResult[0], result & mask(context, instruction.predicate[0]));
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
    bool const isUnsigned = line.has("U32");
    line.need("AND");
    instruction.predicateResult[0] = line.predicateResult();
    if (line.predicateResult() != kUnwantedPredicate)
    {
        line.refuse("second result");
    }
    instruction.source[0] = isFloat ? line.real() : line.integer();
    instruction.source[1] = isFloat ? line.real() : line.integer();
    instruction.predicate[0] = line.predicate();
    if (isFloat && isUnsigned)
    {
        line.refuse("type");
    }
    instruction.execute = isFloat ? compareBy<Type::kFLOAT>(comparison, line)
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
        {"SEL", decodeSel},
        {"USEL", decodeSel},
        {"FSEL", decodeFsel},
    };
    return table;
}

} // namespace emulator::sass
