// Machine code as text: what nvdisasm prints of a cubin.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace emulator::sass
{

struct SassText
{
    std::vector<std::string> lines; // one for each instruction, without address and semicolon
    std::map<std::string, uint32_t> labels; // index of the instruction that follows each
};

// Runs the program that ADTP_EMULATOR_NVDISASM names. Where ADTP_EMULATOR_CACHE names a folder, what it printed is kept
// there under a hash of the cubin, and is read from there the next time: it takes longer than to execute a small
// kernel.
SassText disassemble(uint8_t const* image, size_t bytes, std::string const& kernel);

} // namespace emulator::sass
