// Machine code, decoded once and then executed: registers as rows of lanes, instructions with their operands resolved.
//
// NVIDIA documents the names of these instructions ("CUDA Binary Utilities", Instruction Set Reference), not what they
// do. What is said beside each instruction is a reading. Its evidence is named in brackets:
//   [PTX name]  ptxas makes it of that PTX instruction, which the PTX ISA defines; tests/gpu/test_sass_*.py compile
//               such lines and compare the machine code's results with NumPy's
//   [kernels]   it is in the shipped kernels, whose results agree with the PTX and with float64
// There is no time here: no scoreboards, no stalls, no caches. Lanes of a warp run together, but between BSSY and BSYNC, where one
// path after the other is run: elsewhere a branch that lanes disagree on faults.
#pragma once

#include "program.h"

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace emulator::sass
{

// A register of a warp, aligned for vector instructions.
struct alignas(64) Row
{
    Lanes lanes;
};

// Every operand that is a value is the index of a row: zeros, a place for results that nobody wants, registers, uniform
// registers, and from kFirstConstant on the kernel's immediates and its words of the constant bank.
constexpr uint16_t kZeroRows = 0; // as many as the widest operand has registers, 4
constexpr uint16_t kUnwantedRows = 4;
constexpr uint16_t kFirstRegister = 8; // R0 to R254
constexpr uint16_t kFirstUniform = kFirstRegister + 255; // UR0 to UR254; values are the same in all lanes
constexpr uint16_t kFirstConstant = kFirstUniform + 255;
constexpr int kMostRegisters = 255;
constexpr int kUniformRegisters = 64; // that these kernels use at most

// P0 to P6, PT, UP0 to UP6, UPT as masks of lanes, and a place for results that nobody wants.
constexpr uint8_t kAlways = 7;
constexpr uint8_t kFirstUniformPredicate = 8;
constexpr uint8_t kUnwantedPredicate = 16;

struct Instruction;

// How a matrix lies in shared memory (PTX ISA, "Matrix-descriptor Format"). Atoms have 8 rows of `width` bytes, 16
// without swizzling.
struct Descriptor
{
    uint32_t start;
    // bytes from one atom to the next: along K where K-major and not swizzled; along N where transposed
    uint32_t leading;
    uint32_t stride; // bytes from one atom to the next in the other direction
    uint32_t width;
};

// A product of a warpgroup that is under way.
struct Product
{
    Instruction const* instruction;
    Descriptor left, right;
};

// Where lanes meet again that BSSY let part.
struct Meeting
{
    uint32_t expected = 0, arrived = 0;
    size_t next = 0; // where they go on
};

constexpr int kMeetings = 16; // B0 to B15

struct SassWarp : Warp
{
    std::vector<Row> rows;
    std::array<uint32_t, 17> predicates;
    uint32_t alive = kAllLanes; // lanes that have not exited
    uint32_t here = kAllLanes; // of these, those that run now; the others wait
    std::array<Meeting, kMeetings> meetings;
    std::vector<std::pair<uint32_t, size_t>> others; // lanes that went another way, and their next instruction
    std::vector<Product> products; // oldest first
    bool needsFence = false; // it has written shared memory that the tensor cores of a warpgroup do not see yet
};

enum class Change : uint8_t
{
    kNONE,
    kNEGATED,
    kINVERTED, // bit by bit
    kMAGNITUDE,
    kNEGATED_MAGNITUDE,
};

struct Source
{
    uint16_t row = kZeroRows;
    Change change = Change::kNONE;
};

struct PredicateSource
{
    uint8_t index = kAlways;
    bool inverted = false;
};

// [R4.X8+UR6+0x100] or desc[UR4][R4.64+0x100]
struct Address
{
    uint16_t row = kZeroRows; // of two rows in global memory
    uint16_t uniformRow = kZeroRows;
    uint32_t scale = 1;
    int64_t offset = 0;
};

enum class Comparison : uint8_t
{
    kEQ,
    kNE, // of floats: ordered and different
    kLT,
    kLE,
    kGT,
    kGE,
    kNEU, // "U": or unordered
    kGEU,
    kUNORDERED,
};

struct Context;
using Execute = void (*)(Context&, Instruction const&);

struct Instruction
{
    Execute execute = nullptr;
    PredicateSource guard; // lanes that execute it
    bool isUniform = false; // what it writes is the same for all lanes
    uint16_t destination = kUnwantedRows;
    std::array<uint8_t, 2> predicateResult{kUnwantedPredicate, kUnwantedPredicate};
    std::array<Source, 3> source;
    std::array<PredicateSource, 3> predicate;
    Address address;
    Address fromAddress; // LDGSTS: the global one
    uint8_t words = 1; // 32-bit registers of a load or store
    uint32_t immediate = 0;
    uint32_t target = 0; // index of an instruction
};

// What executes an instruction. `active` lanes are alive and pass the guard; there is at least one.
struct Context
{
    SharedMemory& shared;
    GlobalMemory& global;
    Counters& counters;
    uint32_t block;
    SassWarp* warp = nullptr;
    uint32_t active = 0;
};

// Values that instructions have in common and that the launch fills in.
class Constants
{
public:
    explicit Constants(int architecture, uint32_t parameterBase, uint32_t parameterBytes);

    uint16_t immediate(uint64_t value); // first of two rows: its lower and upper half
    uint16_t bank(uint32_t offset, uint32_t words); // first of `words` rows; faults outside of what is known
    uint16_t rows() const { return mRows; }
    void fill(std::vector<Row>& rows, std::vector<uint8_t> const& parameters, uint32_t blocks) const;

private:
    uint32_t mParameterBase, mParameterBytes, mBlocks;
    std::vector<uint32_t> mSystem; // offsets of words that these kernels read and that change nothing here
    uint16_t mRows = kFirstConstant;
    std::map<uint64_t, uint16_t> mImmediates;
    std::map<std::pair<uint32_t, uint32_t>, uint16_t> mBank; // by offset and words
};

class Line;

// Reads the operands of one line into an instruction. Faults on a modifier or operand that it does not know.
using Decode = void (*)(Line&, Instruction&);
using DecodeTable = std::map<std::string, Decode>; // by the opcode without modifiers

// One for each family of instructions, each in a file of its own.
DecodeTable const& addInstructions();
DecodeTable const& bitInstructions();
DecodeTable const& compareInstructions();
DecodeTable const& floatInstructions();
DecodeTable const& convertInstructions();
DecodeTable const& moveInstructions();
DecodeTable const& memoryInstructions();
DecodeTable const& matrixInstructions();
DecodeTable const& warpgroupInstructions();
DecodeTable const& controlInstructions();

} // namespace emulator::sass
