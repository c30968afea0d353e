// Runs the blocks of a PTX kernel.
#include "ptx.h"

namespace emulator
{

void PtxKernel::start(PtxWarp& warp, int id, uint32_t block, uint32_t blocks) const
{
    constexpr uint32_t kUnset = ~0U; // a NaN as a float, far outside of everything as an address
    warp.restart(id);
    warp.words.assign(wordRegisters + kSpecials + constants.size(), {});
    warp.wides.assign(wideRegisters + wideConstants.size(), {});
    warp.predicates.assign(predicates + 2, 0);
    warp.predicates.back() = kAllLanes;
    for (uint32_t i = 0; i < wordRegisters; ++i)
    {
        warp.words[i].fill(kUnset);
    }
    for (uint32_t i = 0; i < wideRegisters; ++i)
    {
        warp.wides[i].fill(~uint64_t{0});
    }
    for (int lane = 0; lane < kLanes; ++lane)
    {
        warp.words[wordRegisters][lane] = static_cast<uint32_t>(id * kLanes + lane);
    }
    warp.words[wordRegisters + 1].fill(block);
    warp.words[wordRegisters + 2].fill(blocks);
    for (size_t i = 0; i < constants.size(); ++i)
    {
        warp.words[wordRegisters + kSpecials + i].fill(constants[i]);
    }
    for (size_t i = 0; i < wideConstants.size(); ++i)
    {
        warp.wides[wideRegisters + i].fill(wideConstants[i]);
    }
}

void PtxKernel::run(Launch const& launch, GlobalMemory& global, Counters& counters)
{
    SharedMemory shared;
    std::vector<PtxWarp> warps(launch.threads / kLanes);
    std::vector<uint64_t> executed(code.size(), 0);
    for (uint32_t n = 0; n < launch.programs; ++n)
    {
        uint32_t const block = turn(n, launch.programs);
        shared.reset(launch.sharedBytes);
        for (size_t id = 0; id < warps.size(); ++id)
        {
            start(warps[id], static_cast<int>(id), block, launch.programs);
        }
        auto const step = [&](PtxWarp& warp) {
            if (warp.next >= code.size())
            {
                fault("ran past the end" + where(block, warp.id, name));
            }
            Instruction const& instruction = code[warp.next];
            ++executed[warp.next++];
            uint32_t mask = kAllLanes;
            if (instruction.guard >= 0)
            {
                uint32_t const guard = warp.predicates[static_cast<size_t>(instruction.guard)];
                mask = instruction.isNegated ? ~guard : guard;
            }
            try
            {
                instruction.operation->execute({warp, shared, global, counters, launch.parameters, instruction}, mask);
            }
            catch (Fault const& what)
            {
                fault(what.what() + where(block, warp.id, instruction.text));
            }
        };
        try
        {
            runBlock(warps, shared, step);
        }
        catch (Fault const& what)
        {
            std::string const text = what.what();
            fault(text.back() == ']' ? text : text + where(block, -1, name));
        }
    }
    for (size_t i = 0; i < code.size(); ++i)
    {
        if (executed[i])
        {
            counters.instructions[code[i].opcode] += executed[i];
        }
    }
}

} // namespace emulator
