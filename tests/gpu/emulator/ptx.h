// PTX as the interpreter has it: operands are resolved to slots of registers, opcodes to operations.
// Sections named in the ptx_*.cpp files are those of NVIDIA's "Parallel Thread Execution ISA", version 8.7.
#pragma once

#include "program.h"

#include <functional>
#include <map>
#include <string>
#include <vector>

namespace emulator
{

using WideLanes = std::array<uint64_t, kLanes>;

// Registers of 16 and 32 bits, %tid.x, %ctaid.x, %nctaid.x and all constants share `words`.
struct PtxWarp : Warp
{
    std::vector<Lanes> words;
    std::vector<WideLanes> wides;
    std::vector<uint32_t> predicates; // a bit for each lane; behind those of the program, false and true
};

struct Operand
{
    uint32_t index = 0; // of a register's slot; of a parameter, its offset
    int32_t offset = 0; // of an address
};

struct Operation;

struct Instruction
{
    Operation const* operation = nullptr;
    std::vector<Operand> operands;
    int guard = -1; // predicate; -1: always
    bool isNegated = false;
    size_t target = 0; // of a branch
    std::string opcode, text;
};

struct Context
{
    PtxWarp& warp;
    SharedMemory& shared;
    GlobalMemory& global;
    Counters& counters;
    std::vector<uint8_t> const& parameters;
    Instruction const& instruction;

    Operand const& operand(size_t n) const { return instruction.operands[n]; }
    Lanes& word(size_t n) const { return warp.words[operand(n).index]; }
    WideLanes& wide(size_t n) const { return warp.wides[operand(n).index]; }
    uint32_t& predicate(size_t n) const { return warp.predicates[operand(n).index]; }
    // An operand that has the same value in all lanes.
    uint32_t same(size_t n) const;
};

// One opcode. `shape` has a letter for each operand, braces left out: w 32 bits, h 16 bits, n either, d 64 bits, p predicate,
// S address in shared memory, G in global memory, P parameter, L label.
// `execute` gets the lanes whose guard is true. What is not `isGuarded` is refused under a guard.
struct Operation
{
    std::string shape;
    std::function<void(Context const&, uint32_t mask)> execute;
    bool isGuarded = false;
};

using Operations = std::map<std::string, Operation>;

void addIntegers(Operations& table); // ptx_integers.cpp
void addFloats(Operations& table); // ptx_floats.cpp
void addMoves(Operations& table); // ptx_moves.cpp
void addMemory(Operations& table); // ptx_memory.cpp
void addWarps(Operations& table); // ptx_warps.cpp

// predicate = f(a, b) with operands of 64 bits
template <typename F>
Operation wideComparison(F f)
{
    return {"pdd", [f](Context const& c, uint32_t) {
                uint32_t result = 0;
                for (int lane = 0; lane < kLanes; ++lane)
                {
                    result |= uint32_t{f(c.wide(1)[lane], c.wide(2)[lane])} << lane;
                }
                c.predicate(0) = result;
            }};
}

// out = f(a), f(a, b) and f(a, b, c), lane by lane.
template <typename F>
Operation unary(char const* shape, F f)
{
    return {shape, [f](Context const& c, uint32_t) {
                Lanes& out = c.word(0);
                Lanes const& a = c.word(1);
                for (int lane = 0; lane < kLanes; ++lane)
                {
                    out[lane] = f(a[lane]);
                }
            }};
}

template <typename F>
Operation binary(char const* shape, F f)
{
    return {shape, [f](Context const& c, uint32_t) {
                Lanes& out = c.word(0);
                Lanes const& a = c.word(1);
                Lanes const& b = c.word(2);
                for (int lane = 0; lane < kLanes; ++lane)
                {
                    out[lane] = f(a[lane], b[lane]);
                }
            }};
}

template <typename F>
Operation ternary(char const* shape, F f)
{
    return {shape, [f](Context const& c, uint32_t) {
                Lanes& out = c.word(0);
                Lanes const& first = c.word(1);
                Lanes const& second = c.word(2);
                Lanes const& third = c.word(3);
                for (int lane = 0; lane < kLanes; ++lane)
                {
                    out[lane] = f(first[lane], second[lane], third[lane]);
                }
            }};
}

// predicate = f(a, b)
template <typename F>
Operation comparison(F f, char const* shape = "pww")
{
    return {shape, [f](Context const& c, uint32_t) {
                uint32_t result = 0;
                for (int lane = 0; lane < kLanes; ++lane)
                {
                    result |= uint32_t{f(c.word(1)[lane], c.word(2)[lane])} << lane;
                }
                c.predicate(0) = result;
            }};
}

class PtxKernel : public Kernel
{
public:
    std::vector<Instruction> code;
    static constexpr uint32_t kSpecials = 3;

    // Slots: registers first; then %tid.x, %ctaid.x and %nctaid.x; then constants.
    uint32_t wordRegisters = 0, wideRegisters = 0, predicates = 0;
    std::vector<uint32_t> constants;
    std::vector<uint64_t> wideConstants;

    void run(Launch const& launch, GlobalMemory& global, Counters& counters) override;

private:
    void start(PtxWarp& warp, int id, uint32_t block, uint32_t blocks) const;
};

} // namespace emulator
