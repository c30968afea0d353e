// The syntax of nvdisasm's lines. What it prints: "CUDA Binary Utilities", nvdisasm.
#include "sass_line.h"

#include "sass_tokens.h"

#include <algorithm>
#include <set>

namespace emulator::sass
{
Line::Line(std::string text, Constants& constants, std::map<std::string, uint32_t> const& labels, uint32_t registers)
    : mText(std::move(text))
    , mConstants(constants)
    , mLabels(labels)
    , mRegisters(registers)
{
    std::string rest = mText;
    if (rest[0] == '@')
    {
        size_t const space = rest.find(' ');
        mGuard = readPredicate(rest.substr(1, space - 1));
        rest = trimmed(rest.substr(space));
    }
    size_t const space = rest.find(' ');
    mName = rest.substr(0, space);
    mModifiers = split(mName, '.');
    mOpcode = mModifiers[0];
    mModifiers.erase(mModifiers.begin());
    if (space == std::string::npos)
    {
        return;
    }
    for (std::string operand : split(rest.substr(space), ','))
    {
        if (size_t const reuse = operand.find(".reuse"); reuse != std::string::npos)
        {
            operand.erase(reuse, 6); // a hint to the register file
        }
        // A return's base has no comma before it.
        size_t const label = operand.find(" `(");
        mOperands.push_back(operand.substr(0, label));
        if (label != std::string::npos)
        {
            mOperands.push_back(operand.substr(label + 1));
        }
    }
}

void Line::refuse(std::string const& why) const
{
    fault("machine code not known: " + why + " in: " + mText);
}

bool Line::has(std::string const& modifier)
{
    auto const found = std::find(mModifiers.begin(), mModifiers.end(), modifier);
    if (found == mModifiers.end())
    {
        return false;
    }
    mModifiers.erase(found);
    return true;
}

void Line::need(std::string const& modifier)
{
    if (!has(modifier))
    {
        refuse("no ." + modifier);
    }
}

void Line::allow(std::initializer_list<char const*> modifiers)
{
    for (char const* modifier : modifiers)
    {
        has(modifier);
    }
}

std::string Line::nextModifier()
{
    if (mModifiers.empty())
    {
        refuse("too few modifiers");
    }
    std::string const first = mModifiers.front();
    mModifiers.erase(mModifiers.begin());
    return first;
}

void Line::end() const
{
    if (!mModifiers.empty())
    {
        refuse("modifier ." + mModifiers.front());
    }
    if (!atEnd())
    {
        refuse("operand " + mOperands[mNext]);
    }
}

std::string Line::take()
{
    if (atEnd())
    {
        refuse("too few operands");
    }
    return mOperands[mNext++];
}

bool Line::isNext(std::string const& beginning) const
{
    return !atEnd() && startsWith(mOperands[mNext], beginning);
}

bool Line::predicateIsNext() const
{
    return isNext("P") || isNext("UP") || isNext("!");
}

uint16_t Line::registerRow(std::string const& token, int words, uint16_t ofZero) const
{
    return registerRow(token, words, ofZero, words);
}

// The row of "R4", "UR4", "RZ" or "URZ", the first of consecutive registers.
uint16_t Line::registerRow(std::string const& token, int words, uint16_t ofZero, int alignment) const
{
    bool const isUniform = startsWith(token, "UR");
    std::string const number = token.substr(std::min<size_t>(isUniform ? 2 : 1, token.size()));
    if ((!isUniform && token[0] != 'R') || (number != "Z" && !isNumber(number)))
    {
        refuse("operand " + token);
    }
    if (number == "Z")
    {
        return ofZero;
    }
    int const index = std::stoi(number);
    int const end = isUniform ? kUniformRegisters : static_cast<int>(mRegisters);
    if (index + words > end || index % alignment)
    {
        refuse("register " + token + " of " + std::to_string(end) + ", " + std::to_string(words) + " wide,");
    }
    return static_cast<uint16_t>((isUniform ? kFirstUniform : kFirstRegister) + index);
}

uint16_t Line::valueRow(std::string const& token, int words)
{
    if (isHex(token))
    {
        int64_t const value = hex(token);
        return mConstants.immediate(words == 2 ? static_cast<uint64_t>(value) : static_cast<uint32_t>(value));
    }
    if (startsWith(token, "c[0x0][0x") && token.back() == ']')
    {
        auto const offset = static_cast<uint32_t>(hex(token.substr(7, token.size() - 8)));
        return mConstants.bank(offset, static_cast<uint32_t>(words));
    }
    return registerRow(token, words, kZeroRows);
}

Source Line::integer()
{
    std::string token = take();
    Source source;
    if (token[0] == '~' || (token[0] == '-' && !isHex(token)))
    {
        source.change = token[0] == '~' ? Change::kINVERTED : Change::kNEGATED;
        token.erase(0, 1);
    }
    source.row = valueRow(token, 1);
    return source;
}

Source Line::real()
{
    std::string token = take();
    Source source;
    if (uint32_t bits = 0; readFloat(token, bits))
    {
        source.row = mConstants.immediate(bits);
        return source;
    }
    bool const isNegated = token[0] == '-';
    token.erase(0, isNegated);
    bool const isMagnitude = token.size() > 2 && token[0] == '|' && token.back() == '|';
    if (isMagnitude)
    {
        token = token.substr(1, token.size() - 2);
    }
    if (isHex(token))
    {
        refuse("operand " + token);
    }
    source.change = isMagnitude ? (isNegated ? Change::kNEGATED_MAGNITUDE : Change::kMAGNITUDE)
                                : (isNegated ? Change::kNEGATED : Change::kNONE);
    source.row = valueRow(token, 1);
    return source;
}

bool Line::half(Source& source)
{
    std::string const token = take();
    size_t const dot = std::min(token.find('.'), token.size());
    std::string const which = token.substr(dot);
    if (!which.empty() && which != ".H0_H0" && which != ".H1_H1" && which != ".H1")
    {
        refuse("operand " + token);
    }
    source.row = registerRow(token.substr(0, dot), 1, kZeroRows);
    return which.size() > 1 && which[2] == '1';
}

Source Line::wide()
{
    return {valueRow(take(), 2), Change::kNONE};
}

Source Line::signedWide()
{
    std::string token = take();
    bool const isNegated = token[0] == '-' && !isHex(token);
    token.erase(0, isNegated);
    return {valueRow(token, 2), isNegated ? Change::kNEGATED : Change::kNONE};
}

Source Line::quad(int words)
{
    std::string const token = take();
    if (token[0] == 'c')
    {
        return {valueRow(token, words), Change::kNONE};
    }
    return {registerRow(token, words, kZeroRows), Change::kNONE};
}

Source Line::blockSource(int words)
{
    return {registerRow(take(), words, kZeroRows, 1), Change::kNONE};
}

PredicateSource Line::readPredicate(std::string token) const
{
    PredicateSource source;
    source.inverted = token[0] == '!';
    token.erase(0, source.inverted);
    bool const isUniform = token[0] == 'U';
    std::string const number = token.substr(std::min<size_t>(isUniform ? 2 : 1, token.size()));
    if (token[isUniform] != 'P' || number.size() != 1 || (number != "T" && (number < "0" || number > "6")))
    {
        refuse("predicate " + token);
    }
    int const index = number == "T" ? kAlways : number[0] - '0';
    source.index = static_cast<uint8_t>(index + (isUniform ? kFirstUniformPredicate : 0));
    return source;
}

PredicateSource Line::predicate()
{
    return readPredicate(take());
}

uint8_t Line::predicateResult()
{
    PredicateSource const read = predicate();
    if (read.inverted)
    {
        refuse("inverted result");
    }
    return read.index % kFirstUniformPredicate == kAlways ? kUnwantedPredicate : read.index;
}

uint32_t Line::immediate()
{
    std::string const token = take();
    if (!isHex(token))
    {
        refuse("operand " + token);
    }
    return static_cast<uint32_t>(hex(token));
}

std::string Line::word()
{
    return take();
}

void Line::destination(Instruction& instruction, int words)
{
    std::string const token = take();
    instruction.isUniform = token[0] == 'U';
    instruction.destination = registerRow(token, words, kUnwantedRows);
    static std::set<std::string> const others = {"LDCU", "S2UR", "R2UR", "REDUX"};
    bool const isUniformOpcode = mOpcode[0] == 'U' || others.count(mOpcode);
    if (instruction.isUniform != isUniformOpcode)
    {
        refuse("result " + token);
    }
}

void Line::block(Instruction& instruction, int words)
{
    std::string const token = take();
    instruction.destination = registerRow(token, words, kUnwantedRows, 1);
    if (token[0] != 'R' || instruction.destination == kUnwantedRows)
    {
        refuse("result " + token);
    }
}

Address Line::sharedAddress()
{
    std::string const token = take();
    Address address;
    if (token.size() < 3 || token[0] != '[' || token.back() != ']')
    {
        refuse("operand " + token);
    }
    for (std::string const& part : split(token.substr(1, token.size() - 2), '+'))
    {
        if (isHex(part))
        {
            address.offset += hex(part);
        }
        else if (startsWith(part, "UR"))
        {
            address.uniformRow = registerRow(part, 1, kZeroRows);
        }
        else
        {
            size_t const dot = std::min(part.find('.'), part.size());
            std::string const scale = part.substr(dot);
            address.scale = scale == ".X4" ? 4 : scale == ".X8" ? 8 : scale == ".X16" ? 16 : 1;
            if (!scale.empty() && address.scale == 1)
            {
                refuse("operand " + token);
            }
            address.row = registerRow(part.substr(0, dot), 1, kZeroRows);
        }
    }
    return address;
}

Address Line::globalAddress()
{
    std::string token = take();
    Address address;
    if (startsWith(token, "desc[UR")) // how caches treat it
    {
        token.erase(0, token.find(']') + 1);
    }
    size_t const wide = token.find(".64");
    if (token[0] != '[' || token.back() != ']' || wide == std::string::npos)
    {
        refuse("operand " + token);
    }
    address.row = registerRow(token.substr(1, wide - 1), 2, kZeroRows);
    std::string const offset = token.substr(wide + 3, token.size() - wide - 4);
    if (!offset.empty())
    {
        if (offset[0] != '+' || !isHex(offset.substr(1)))
        {
            refuse("operand " + token);
        }
        address.offset = hex(offset.substr(1));
    }
    return address;
}

uint32_t Line::label()
{
    std::string const token = take();
    auto const found = token.size() > 3 ? mLabels.find(token.substr(2, token.size() - 3)) : mLabels.end();
    if (!startsWith(token, "`(") || found == mLabels.end())
    {
        refuse("label " + token);
    }
    return found->second;
}

uint16_t Line::descriptors(bool& isTransposed)
{
    std::string token = take();
    if (size_t const at = token.find(".tnspB"); at != std::string::npos)
    {
        token.erase(at, 6);
        isTransposed = true;
    }
    if (!startsWith(token, "gdesc[") || token.back() != ']')
    {
        refuse("operand " + token);
    }
    return registerRow(token.substr(6, token.size() - 7), 4, kZeroRows);
}

} // namespace emulator::sass
