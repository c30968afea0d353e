// Reads PTX as Triton writes it: one statement on each line. Whatever it does not know it refuses, with the line.
#include "ptx.h"
#include "ptx_text.h"

#include <cctype>
#include <sstream>

namespace emulator
{
namespace
{

Operations const& operations()
{
    static Operations const table = [] {
        Operations all;
        addIntegers(all);
        addFloats(all);
        addMoves(all);
        addMemory(all);
        addWarps(all);
        return all;
    }();
    return table;
}

class Parser
{
public:
    explicit Parser(std::string const& name)
        : mKernel(std::make_unique<PtxKernel>())
    {
        mKernel->name = name;
    }

    void line(std::string const& text);
    std::unique_ptr<PtxKernel> finish();

private:
    // What a constant's slot is moved by at the end, when the number of registers is known.
    static constexpr uint32_t kConstant = 1U << 31, kThread = 1U << 30, kBlock = kThread + 1,
                              kBlocks = kThread + 2, kHalf = 1U << 29;

    std::unique_ptr<PtxKernel> mKernel;
    bool mIsInside = false, mIsFound = false;
    std::map<std::string, uint32_t> mParameters, mKnown;
    std::map<uint64_t, uint32_t> mKnownWide;
    std::map<std::string, size_t> mLabels;
    std::vector<std::pair<size_t, std::string>> mBranches;
    uint32_t mHalves = 0;

    void declaration(std::string const& text);
    void parameter(std::vector<std::string> const& words);
    void instruction(std::string const& text);
    Operand operand(char shape, std::string const& text);
    uint32_t word(std::string const& text, char shape);
    uint32_t wide(std::string const& text);
    uint32_t constant(uint32_t value);
    uint32_t slot(char shape, uint32_t index) const;
};

void Parser::line(std::string const& raw)
{
    std::string const text = trimmed(raw);
    if (startsWith(text, ".visible .entry "))
    {
        mIsInside = text == ".visible .entry " + mKernel->name + "(";
        mIsFound |= mIsInside;
        return;
    }
    if (!mIsInside || text.empty() || text == "{" || text == "}" || text == "(" || text == ")")
    {
        return;
    }
    if (text.front() == '.')
    {
        declaration(text);
    }
    else if (text.front() == '$' && text.back() == ':')
    {
        mLabels[text.substr(0, text.size() - 1)] = mKernel->code.size();
    }
    else if (text.back() == ';')
    {
        instruction(text);
    }
    else
    {
        fault("PTX line not known: " + text);
    }
}

void Parser::declaration(std::string const& text)
{
    std::vector<std::string> const words = pieces(text);
    if (words[0] == ".param")
    {
        parameter(words);
    }
    else if (words[0] == ".reqntid")
    {
        mKernel->threads = number(words[1]);
    }
    else if (words[0] == ".reg" && words.size() == 3)
    {
        uint32_t const count = number(words[2].substr(words[2].find('<') + 1));
        uint32_t* const counts[] = {&mKernel->predicates, &mHalves, &mKernel->wordRegisters, &mKernel->wideRegisters};
        char const* const types[] = {".pred", ".b16", ".b32", ".b64"};
        for (int i = 0; i < 4; ++i)
        {
            if (words[1] == types[i])
            {
                *counts[i] = count;
                return;
            }
        }
        fault("PTX registers not known: " + text);
    }
    else
    {
        fault("PTX directive not known: " + text);
    }
}

void Parser::parameter(std::vector<std::string> const& words)
{
    uint32_t const bytes = words[1] == ".u64" ? 8 : words[1] == ".u32" || words[1] == ".f32" ? 4 : 0;
    if (!bytes)
    {
        fault("PTX parameter not known: " + words[1]);
    }
    uint32_t const offset = (mKernel->parameterBytes + bytes - 1) / bytes * bytes;
    mParameters[words.back()] = offset;
    mKernel->parameters.push_back({offset, bytes});
    mKernel->parameterBytes = offset + bytes;
}

void Parser::instruction(std::string const& text)
{
    Instruction found;
    found.text = text;
    std::string rest = text.substr(0, text.size() - 1);
    if (rest[0] == '@')
    {
        size_t const end = rest.find_first_of(" \t");
        found.isNegated = rest[1] == '!';
        size_t const begin = found.isNegated ? 2 : 1;
        found.guard = static_cast<int>(operand('p', rest.substr(begin, end - begin)).index);
        rest = trimmed(rest.substr(end));
    }
    size_t const end = rest.find_first_of(" \t");
    found.opcode = rest.substr(0, end);
    std::vector<std::string> const operands = pieces(end == std::string::npos ? "" : rest.substr(end));
    if (found.opcode == "mov.b32" && operands.size() == 3) // between a register and its halves
    {
        found.opcode += startsWith(operands[0], "%rs") ? ".apart" : ".together";
    }
    auto const operation = operations().find(found.opcode);
    if (operation == operations().end())
    {
        fault("PTX instruction not known: " + text);
    }
    found.operation = &operation->second;
    if (found.guard >= 0 && !found.operation->isGuarded)
    {
        fault("PTX instruction not known under a guard: " + text);
    }
    std::string const& shape = found.operation->shape;
    if (operands.size() != shape.size())
    {
        fault("PTX instruction with " + std::to_string(operands.size()) + " operands: " + text);
    }
    for (size_t i = 0; i < operands.size(); ++i)
    {
        if (shape[i] == 'L')
        {
            mBranches.emplace_back(mKernel->code.size(), operands[i]);
            continue;
        }
        found.operands.push_back(operand(shape[i], operands[i]));
    }
    mKernel->code.push_back(std::move(found));
}

Operand Parser::operand(char shape, std::string const& text)
{
    Operand result;
    std::string base = text;
    size_t const plus = text.find('+');
    if (plus != std::string::npos && (shape == 'S' || shape == 'G'))
    {
        base = text.substr(0, plus);
        result.offset = std::stoi(text.substr(plus + 1));
    }
    switch (shape)
    {
    case 'w':
    case 'h':
    case 'n':
    case 'S': result.index = word(base, shape); break;
    case 'd':
    case 'G': result.index = wide(base); break;
    case 'p':
        if (base == "0" || base == "-1")
        {
            result.index = kConstant + (base == "-1");
            break;
        }
        if (!startsWith(base, "%p"))
        {
            fault("PTX predicate not known: " + base);
        }
        result.index = number(base.substr(2));
        break;
    case 'P':
        if (!mParameters.count(base))
        {
            fault("PTX parameter not known: " + base);
        }
        result.index = mParameters[base];
        break;
    default: fault("PTX operand not known: " + text);
    }
    return result;
}

uint32_t Parser::constant(uint32_t value)
{
    auto const [known, isNew] = mKnown.try_emplace(std::to_string(value), mKernel->constants.size());
    if (isNew)
    {
        mKernel->constants.push_back(value);
    }
    return kConstant + known->second;
}

uint32_t Parser::word(std::string const& text, char shape)
{
    if (startsWith(text, "%tid.x"))
    {
        return kThread;
    }
    if (startsWith(text, "%ctaid.x"))
    {
        return kBlock;
    }
    if (startsWith(text, "%nctaid.x"))
    {
        return kBlocks;
    }
    if (startsWith(text, "%rs") && (shape == 'h' || shape == 'n'))
    {
        return kHalf + number(text.substr(3));
    }
    if (startsWith(text, "%r") && text.size() > 2 && std::isdigit(static_cast<unsigned char>(text[2])) && shape != 'h')
    {
        return number(text.substr(2));
    }
    if (text == "global_smem") // the block's dynamic shared memory, which begins at 0
    {
        return constant(0);
    }
    if (startsWith(text, "0f"))
    {
        return constant(static_cast<uint32_t>(std::stoul(text.substr(2), nullptr, 16)));
    }
    if (text[0] != '%' && (startsWith(text, "0x") || std::isdigit(static_cast<unsigned char>(text.back()))))
    {
        return constant(static_cast<uint32_t>(std::stoll(text, nullptr, 0)));
    }
    fault("PTX operand not known: " + text);
}

uint32_t Parser::wide(std::string const& text)
{
    if (startsWith(text, "%rd"))
    {
        return number(text.substr(3));
    }
    if (text[0] == '%')
    {
        fault("PTX operand not of 64 bits: " + text);
    }
    auto const value = static_cast<uint64_t>(std::stoll(text, nullptr, 0));
    auto const [known, isNew] = mKnownWide.try_emplace(value, mKernel->wideConstants.size());
    if (isNew)
    {
        mKernel->wideConstants.push_back(value);
    }
    return kConstant + known->second;
}

uint32_t Parser::slot(char shape, uint32_t index) const
{
    bool const isWide = shape == 'd' || shape == 'G';
    uint32_t const registers = isWide ? mKernel->wideRegisters : mKernel->wordRegisters; // halves are counted already
    uint32_t const specials = isWide ? 0 : PtxKernel::kSpecials;
    if (index >= kConstant)
    {
        return registers + specials + (index - kConstant);
    }
    if (index >= kThread)
    {
        return registers + (index - kThread);
    }
    bool const isHalf = index >= kHalf;
    uint32_t const count = isHalf ? mHalves : isWide ? registers : registers - mHalves;
    uint32_t const n = isHalf ? index - kHalf : index;
    if (n >= count)
    {
        fault("PTX register that is not declared: " + std::to_string(n) + " of " + std::to_string(count));
    }
    return isHalf ? registers - mHalves + n : n;
}

std::unique_ptr<PtxKernel> Parser::finish()
{
    if (!mIsFound)
    {
        fault("no kernel " + mKernel->name);
    }
    mKernel->wordRegisters += mHalves;
    for (Instruction& instruction : mKernel->code)
    {
        std::string const& shape = instruction.operation->shape;
        for (size_t i = 0; i < instruction.operands.size(); ++i)
        {
            uint32_t& index = instruction.operands[i].index;
            if (shape[i] == 'p' && index >= kConstant)
            {
                index = mKernel->predicates + (index - kConstant);
                continue;
            }
            if (shape[i] == 'p' && index >= mKernel->predicates)
            {
                fault("PTX predicate that is not declared: " + instruction.text);
            }
            if (shape[i] != 'p' && shape[i] != 'P')
            {
                index = slot(shape[i], index);
            }
        }
        if (instruction.guard >= static_cast<int>(mKernel->predicates))
        {
            fault("PTX predicate that is not declared: " + instruction.text);
        }
    }
    for (auto const& [at, label] : mBranches)
    {
        if (!mLabels.count(label))
        {
            fault("PTX label that is not there: " + label);
        }
        mKernel->code[at].target = mLabels[label];
    }
    return std::move(mKernel);
}

} // namespace

std::unique_ptr<Kernel> loadPtx(std::string const& text, std::string const& name)
{
    Parser parser(name);
    std::istringstream lines(text);
    for (std::string line; std::getline(lines, line);)
    {
        try
        {
            parser.line(line);
        }
        catch (std::logic_error const&) // of std::stoul and its like
        {
            fault("PTX line not known: " + line);
        }
    }
    return parser.finish();
}

} // namespace emulator
