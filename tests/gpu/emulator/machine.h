// The parts of a CUDA processor that PTX and machine code share: memory with exact bounds, shared memory with a race
// check, asynchronous copies, tensor cores, and warps that run from barrier to barrier. Functional only: there is no time.
#pragma once

#include "numbers.h"

#include <array>
#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

namespace emulator
{

constexpr int kLanes = 32;
constexpr uint32_t kAllLanes = ~0U;

// One 32-bit register of a warp: a value for each lane.
using Lanes = std::array<uint32_t, kLanes>;

// What a kernel must not do. The text says what, where and in which warp.
struct Fault : std::runtime_error
{
    using std::runtime_error::runtime_error;
};

[[noreturn]] void fault(std::string const& what);

// Read from the environment before each launch.
struct Options
{
    bool earlyCopies = false; // ADTP_EMULATOR_EARLY: cp.async lands when issued; else when waited for
    bool truncate = false; // ADTP_EMULATOR_TRUNCATE: tensor cores align and cut sums; else exact, rounded once
    bool reverse = false; // ADTP_EMULATOR_REVERSE: the last block of a grid runs first, and the last warp of each block
    bool races = true; // ADTP_EMULATOR_NO_RACES turns it off: the check of shared memory
    bool forgive = false; // ADTP_EMULATOR_FORGIVE: a kernel that faults does not spoil the context
    uint64_t most = 1'000'000'000; // ADTP_EMULATOR_MOST: instructions of a block, above which it is taken not to end
};

Options const& options();
void readOptions();

// Which of `count` blocks or warps is the n-th that runs.
template <typename Count>
Count turn(Count n, Count count)
{
    return options().reverse ? count - 1 - n : n;
}

// ---------------------------------------------------------------------------------------------------- global memory

// Allocations of this process, each with its exact end. Addresses are host addresses.
class GlobalMemory
{
public:
    uint64_t bytesRead = 0;
    uint64_t bytesWritten = 0;

    void add(uint64_t address, uint64_t bytes);
    uint64_t remove(uint64_t address); // its bytes; 0 where nothing begins there
    std::map<uint64_t, uint64_t> clear(); // what there was: ends by begin
    bool contains(uint64_t address, uint64_t bytes) const;

    // Host pointer to `bytes` bytes. Faults where they are not all in one allocation, or not aligned to their number.
    uint8_t* at(uint64_t address, uint32_t bytes, char const* what);
    void read(uint64_t address, uint32_t bytes, void* to, char const* what);
    void write(uint64_t address, uint32_t bytes, void const* from, char const* what);

private:
    std::map<uint64_t, uint64_t> mEnds; // by begin
    uint64_t mLastBegin = 0, mLastEnd = 0;
};

// ---------------------------------------------------------------------------------------------------- shared memory

// Shared memory of a block. Each byte remembers who touched it since the last barrier of the block. Faults on:
// misalignment, bounds, reads of what nobody wrote, a race of two warps, a word that cp.async is still writing. That two
// warps write the same value is no race: Triton does so, harmlessly.
class SharedMemory
{
public:
    // All bytes are 0xFF, a NaN in every type. What lies below `reserved` belongs to the system.
    void reset(uint32_t bytes, uint32_t reserved = 0);
    uint8_t const* read(uint32_t address, uint32_t bytes, int warp, char const* what);
    void write(uint32_t address, uint32_t bytes, void const* data, int warp, char const* what);
    uint8_t const* peek(uint32_t address) const { return &mBytes[address]; } // of what was just written; no check
    void barrier() { ++mEpoch; }

    // An asynchronous write: from its issue until it is waited for nobody may touch the words.
    void beginCopy(uint32_t address, uint32_t bytes, int warp);
    void land(uint32_t address, uint32_t bytes, uint8_t const* from, uint32_t valid); // `valid` bytes, then zeros
    void endCopy(uint32_t address, uint32_t bytes, int warp);

    uint32_t size() const { return static_cast<uint32_t>(mBytes.size()); }

private:
    static constexpr int16_t kNobody = -1;

    struct Word
    {
        uint32_t writeEpoch = 0;
        uint32_t readEpoch = 0;
        std::array<int16_t, 4> writer{kNobody, kNobody, kNobody, kNobody}; // of each byte: the warp that wrote it last
        uint8_t written = 0; // which of its bytes in that epoch, a bit each
        uint8_t repeated = 0; // of those, what another warp then wrote with the same value
        uint16_t pending = 0; // copies under way
        std::array<uint64_t, 4> readers{}; // of each byte: warps, a bit each
    };

    std::vector<uint8_t> mBytes;
    std::vector<Word> mWords;
    uint32_t mEpoch = 1;
    uint32_t mReserved = 0;

    void checkBounds(uint32_t address, uint32_t bytes, char const* what) const;
    void noteRead(uint32_t address, uint32_t bytes, int warp, char const* what);
    void noteWrite(uint32_t address, uint32_t bytes, int warp, char const* what,
        uint8_t const* data = nullptr); // data: what is written, where that is known
};

// ------------------------------------------------------------------------------------------------------------- warps

// One lane's cp.async: `bytes` to shared memory, of which the first `valid` come from global memory, the others are 0.
struct Copy
{
    uint32_t to;
    uint64_t from;
    uint32_t bytes;
    uint32_t valid;
};

// What every warp has, whatever code it runs. Interpreters derive from it and add registers.
struct Warp
{
    int id = 0;
    size_t next = 0; // the next instruction's index
    bool atBarrier = false;
    bool done = false;
    std::vector<std::vector<Copy>> groups; // committed, oldest first
    std::vector<Copy> openGroup;

    void restart(int warp);
};

// PTX ISA, "Data Movement and Conversion Instructions: Asynchronous copy": cp.async, .commit_group, .wait_group N.
void issueCopy(Warp& warp, SharedMemory& shared, GlobalMemory& global, Copy const& copy);
void commitGroup(Warp& warp);
void waitGroups(Warp& warp, SharedMemory& shared, GlobalMemory& global, size_t left);

// Runs the warps of one block, each up to the next barrier, until all have ended. `step(warp)` executes one instruction.
// Faults where a barrier is reached by some warps and others have ended.
template <typename AnyWarp, typename Step>
void runBlock(std::vector<AnyWarp>& warps, SharedMemory& shared, Step step)
{
    for (uint64_t executed = 0;;)
    {
        size_t waiting = 0, ended = 0;
        for (size_t n = 0; n < warps.size(); ++n)
        {
            AnyWarp& warp = warps[turn(n, warps.size())];
            while (!warp.done && !warp.atBarrier)
            {
                if (++executed > options().most)
                {
                    fault("does not end");
                }
                step(warp);
            }
            waiting += warp.atBarrier;
            ended += warp.done;
        }
        if (ended == warps.size())
        {
            return;
        }
        if (waiting && ended)
        {
            fault("a barrier that only " + std::to_string(waiting) + " of " + std::to_string(warps.size()) + " warps reach");
        }
        for (AnyWarp& warp : warps)
        {
            warp.atBarrier = false;
        }
        shared.barrier();
    }
}

// ------------------------------------------------------------------------------------------------------ tensor cores

enum class Kind
{
    kHALF,
    kBF16,
    kTF32,
};

// D = A B + C of one warp, m16n8k16 (half, bf16) or m16n8k8 (tf32), fp32 accumulators. Fragments lie as in the PTX ISA,
// "Matrix Fragments for mma.m16n8k16 / .m16n8k8": A in 4 registers, B in 2, C and D in 4. D may be C.
void mma(Kind kind, std::array<Lanes*, 4> d, std::array<Lanes const*, 4> a, std::array<Lanes const*, 2> b,
    std::array<Lanes const*, 4> c);

// c + the products a[i] * b[i], as tensor cores add them under the options: exactly and rounded once, or (truncate) in
// steps of `step` products, aligned to the largest and cut. For shapes that mma does not have, such as wgmma.
float dot(float c, float const* a, float const* b, int count, int step);

// ldmatrix .x4 (PTX ISA, "Warp-level matrix load instruction: ldmatrix"): `count` 8x8 matrices of 16 bits, whose rows
// lane 8 * i + row has the address of, plus `offset`.
void loadMatrices(SharedMemory& shared, int warp, Lanes const& addresses, uint32_t offset, int count, bool transposed,
    std::array<Lanes*, 4> out);

} // namespace emulator
