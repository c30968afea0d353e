// What a launch executed: instructions by name, memory traffic as the hardware would group it, tensor-core work.
#pragma once

#include "machine.h"

#include <cstdint>
#include <map>
#include <string>

namespace emulator
{

struct Counters
{
    std::map<std::string, uint64_t> instructions; // by opcode, one for each warp that executed it
    uint64_t tensorFlops = 0; // 2 m n k of each mma
    uint64_t sharedPasses = 0; // of the 32 banks, for loads, stores and ldmatrix
    uint64_t sharedPassesLeast = 0; // had there been no bank conflicts
    uint64_t sectors = 0; // of 32 bytes, of global memory
    uint64_t sectorsLeast = 0; // had all bytes of a warp's access been neighbours

    // One access of a warp: `bytes` (4, 8 or 16) for each lane of `mask`. 128 bytes go at a time.
    void shared(Lanes const& addresses, uint32_t mask, uint32_t bytes);
    void global(std::array<uint64_t, kLanes> const& addresses, uint32_t mask, uint32_t bytes);
};

} // namespace emulator
