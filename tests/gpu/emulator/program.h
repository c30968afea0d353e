// What the driver knows of a kernel, whether it was PTX or machine code.
#pragma once

#include "counters.h"
#include "machine.h"

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace emulator
{

struct Parameter
{
    uint32_t offset; // in the block of parameters
    uint32_t bytes;
};

struct Launch
{
    uint32_t programs; // blocks of the grid, along x
    uint32_t threads; // of a block, along x; a multiple of 32
    uint32_t sharedBytes; // dynamic
    std::vector<uint8_t> parameters; // as long as parameterBytes
};

class Kernel
{
public:
    std::string name;
    std::vector<Parameter> parameters;
    uint32_t parameterBytes = 0;
    uint32_t threads = 0; // that a launch must have; 0: any number
    uint32_t registers = 0; // of a thread; 0: not known (PTX)
    uint32_t staticShared = 0; // bytes
    uint32_t maxDynamicShared = 48 * 1024; // bytes; cuKernelSetAttribute raises it

    virtual ~Kernel() = default;

    // Executes all blocks, one after the other, and adds what was executed to `counters`. Throws Fault; the text ends with
    // the block, the warp and the instruction in brackets (see `where`).
    virtual void run(Launch const& launch, GlobalMemory& global, Counters& counters) = 0;
};

// " [block 3, warp 1: text of the instruction]"; a warp below 0 is left out.
std::string where(uint32_t block, int warp, std::string const& instruction);

// Both throw Fault for what they do not know, by name: an instruction, a modifier, a kernel that is not there.
std::unique_ptr<Kernel> loadPtx(std::string const& text, std::string const& name);
std::unique_ptr<Kernel> loadCubin(uint8_t const* image, size_t bytes, std::string const& name);

} // namespace emulator
