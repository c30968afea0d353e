// One line of machine code as nvdisasm prints it, read operand by operand.
#pragma once

#include "sass.h"

#include <string>
#include <vector>

namespace emulator::sass
{

// Readers take the next operand and fault where it is something else. `end` faults where something was left unread, so
// that nothing of a line goes unnoticed.
class Line
{
public:
    // text: "@!P0 IADD3.X R4, R5, UR6, RZ, P0, !PT". registers: of a thread; a higher number is refused.
    Line(std::string text, Constants& constants, std::map<std::string, uint32_t> const& labels, uint32_t registers);

    std::string const& opcode() const { return mOpcode; } // "IADD3"
    std::string const& name() const { return mName; } // "IADD3.X"
    PredicateSource guard() const { return mGuard; }

    // Modifiers: each may be read once.
    bool has(std::string const& modifier);
    void need(std::string const& modifier);
    void allow(std::initializer_list<char const*> modifiers); // they change nothing here
    std::string nextModifier(); // the first that was not read

    bool atEnd() const { return mNext == mOperands.size(); }
    bool predicateIsNext() const;
    bool isNext(std::string const& beginning) const;

    Source integer(); // register, immediate or word of the constant bank; with - or ~
    Source real(); // with - or | |
    bool half(Source& source); // one of a register's halves, "R4.H1"; whether it is the upper one
    Source wide(); // a pair
    Source signedWide(); // with -
    Source quad(int words); // as many registers, aligned to their number; RZ: zeros
    Source blockSource(int words); // any number of registers; RZ
    PredicateSource predicate();
    Source constant(uint32_t value) { return {mConstants.immediate(value), Change::kNONE}; } // reads no operand
    uint32_t immediate();
    std::string word(); // what is none of these, such as SR_TID.X
    Address sharedAddress();
    Address globalAddress();
    uint32_t label();
    uint16_t descriptors(bool& isTransposed); // "gdesc[UR4].tnspB": the first of four uniform registers

    void destination(Instruction& instruction, int words = 1);
    void block(Instruction& instruction, int words); // a destination of any number of registers
    uint8_t predicateResult();

    void end() const;
    [[noreturn]] void refuse(std::string const& why) const;

private:
    std::string mText, mOpcode, mName;
    std::vector<std::string> mModifiers, mOperands;
    size_t mNext = 0;
    PredicateSource mGuard;
    Constants& mConstants;
    std::map<std::string, uint32_t> const& mLabels;
    uint32_t mRegisters;

    std::string take();
    uint16_t registerRow(std::string const& token, int words, uint16_t ofZero, int alignment) const;
    uint16_t registerRow(std::string const& token, int words, uint16_t ofZero) const;
    uint16_t valueRow(std::string const& token, int words);
    PredicateSource readPredicate(std::string token) const;
};

} // namespace emulator::sass
