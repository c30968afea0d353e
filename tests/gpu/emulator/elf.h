// What a cubin, an ELF file, says of one of its kernels.
#pragma once

#include "program.h"

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace emulator
{

struct Cubin
{
    int architecture = 0; // 86 for sm_86
    std::vector<Parameter> parameters;
    uint32_t parameterBase = 0; // where parameters lie in constant bank 0
    uint32_t parameterBytes = 0;
    uint32_t threads = 0; // .reqntid; 0: any number
    uint32_t registers = 0; // of a thread
    uint32_t staticShared = 0; // bytes, without what the system reserves
    uint32_t reservedShared = 0; // bytes below the kernel's own
    uint32_t codeBytes = 0;
};

// The GPU that machine code is for, such as 86. `abi` is EI_OSABI, and `flags` is e_flags.
int architectureOf(uint8_t abi, uint32_t flags);

// Faults where the kernel is not there, where it has a stack, or where code or parameters would need relocation.
Cubin readCubin(uint8_t const* image, size_t bytes, std::string const& kernel);

} // namespace emulator
