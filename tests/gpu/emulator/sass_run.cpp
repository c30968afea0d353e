// A kernel of machine code: decoded when loaded, then run block by block.
#include "elf.h"
#include "sass.h"
#include "sass_line.h"
#include "sass_text.h"

#include <algorithm>
#include <cstring>

namespace emulator::sass
{
namespace
{

// Words of constant bank 0 that are no parameters: the stack's address, of which these kernels have none, and how
// caches treat memory. [kernels: they are read into R1, which nothing reads, and into desc[...]]
std::vector<uint32_t> systemWords(int architecture)
{
    if (architecture >= 100)
    {
        return {0x37C, 0x358, 0x35C};
    }
    return architecture >= 90 ? std::vector<uint32_t>{0x28, 0x208, 0x20C} : std::vector<uint32_t>{0x28, 0x118, 0x11C};
}

// The word with the number of blocks [PTX mov.u32 of %nctaid.x].
uint32_t blocksWord(int architecture)
{
    return architecture >= 100 ? 0x370 : 0xC;
}

} // namespace

Constants::Constants(int architecture, uint32_t parameterBase, uint32_t parameterBytes)
    : mParameterBase(parameterBase)
    , mParameterBytes(parameterBytes)
    , mBlocks(blocksWord(architecture))
    , mSystem(systemWords(architecture))
{
}

uint16_t Constants::immediate(uint64_t value)
{
    auto const [entry, isNew] = mImmediates.try_emplace(value, mRows);
    mRows = static_cast<uint16_t>(mRows + (isNew ? 2 : 0));
    return entry->second;
}

uint16_t Constants::bank(uint32_t offset, uint32_t words)
{
    for (uint32_t at = offset; at < offset + 4 * words; at += 4)
    {
        bool const isParameter = at >= mParameterBase && at + 4 <= mParameterBase + mParameterBytes;
        if (at % 4 || !(isParameter || at == mBlocks || std::count(mSystem.begin(), mSystem.end(), at)))
        {
            fault("constant bank: word " + std::to_string(at) + " is no parameter");
        }
    }
    auto const [entry, isNew] = mBank.try_emplace({offset, words}, mRows);
    mRows = static_cast<uint16_t>(mRows + (isNew ? words : 0));
    return entry->second;
}

void Constants::fill(std::vector<Row>& rows, std::vector<uint8_t> const& parameters, uint32_t blocks) const
{
    for (auto const& [value, row] : mImmediates)
    {
        rows[row].lanes.fill(static_cast<uint32_t>(value));
        rows[row + 1U].lanes.fill(static_cast<uint32_t>(value >> 32));
    }
    for (auto const& [place, row] : mBank)
    {
        auto const [offset, words] = place;
        for (uint32_t k = 0; k < words; ++k)
        {
            uint32_t value = offset + 4 * k == mBlocks ? blocks : 0;
            if (offset >= mParameterBase)
            {
                std::memcpy(&value, &parameters.at(offset + 4 * k - mParameterBase), sizeof value);
            }
            rows[row + k].lanes.fill(value);
        }
    }
}

namespace
{

Decode decoderOf(Line const& line)
{
    static std::array<DecodeTable const*, 10> const families = {
        &addInstructions(),
        &bitInstructions(),
        &compareInstructions(),
        &floatInstructions(),
        &convertInstructions(),
        &moveInstructions(),
        &memoryInstructions(),
        &matrixInstructions(),
        &warpgroupInstructions(),
        &controlInstructions(),
    };
    for (DecodeTable const* family : families)
    {
        if (auto const found = family->find(line.opcode()); found != family->end())
        {
            return found->second;
        }
    }
    line.refuse("instruction " + line.opcode());
}

class SassKernel : public Kernel
{
public:
    SassKernel(Cubin const& cubin, SassText const& text)
        : mConstants(cubin.architecture, cubin.parameterBase, cubin.parameterBytes)
        , mReserved(cubin.reservedShared)
        , mLines(text.lines)
    {
        for (std::string const& printed : mLines)
        {
            Line line(printed, mConstants, text.labels, std::min<uint32_t>(cubin.registers, kMostRegisters));
            Instruction instruction;
            instruction.guard = line.guard();
            decoderOf(line)(line, instruction);
            line.end();
            mCode.push_back(instruction);
            mNames.push_back(line.name());
        }
        mRegisters = cubin.registers;
    }

    void run(Launch const& launch, GlobalMemory& global, Counters& counters) override
    {
        SharedMemory shared;
        std::vector<SassWarp> warps(launch.threads / kLanes);
        for (SassWarp& warp : warps)
        {
            warp.rows.resize(mConstants.rows());
            mConstants.fill(warp.rows, launch.parameters, launch.programs);
        }
        std::vector<uint64_t> executed(mCode.size(), 0);
        for (uint32_t n = 0; n < launch.programs; ++n)
        {
            uint32_t const block = turn(n, launch.programs);
            shared.reset(mReserved + staticShared + launch.sharedBytes, mReserved);
            for (size_t id = 0; id < warps.size(); ++id)
            {
                start(warps[id], static_cast<int>(id));
            }
            Context context{shared, global, counters, block};
            runOne(context, warps, executed);
        }
        for (size_t i = 0; i < mCode.size(); ++i)
        {
            if (executed[i])
            {
                counters.instructions[mNames[i]] += executed[i];
            }
        }
    }

private:
    Constants mConstants;
    uint32_t mReserved, mRegisters = 0;
    std::vector<std::string> mLines, mNames;
    std::vector<Instruction> mCode;

    // Registers are not empty when a block begins, but nobody knows what is in them: NaN, and predicates that are
    // false.
    void start(SassWarp& warp, int id) const
    {
        warp.restart(id);
        std::memset(&warp.rows[kFirstRegister], 0xFF, mRegisters * sizeof(Row));
        std::memset(&warp.rows[kFirstUniform], 0xFF, kUniformRegisters * sizeof(Row));
        warp.predicates.fill(0);
        warp.predicates[kAlways] = warp.predicates[kFirstUniformPredicate + kAlways] = kAllLanes;
        warp.alive = warp.here = kAllLanes;
        warp.meetings.fill({});
        warp.others.clear();
        warp.products.clear();
        warp.needsFence = false;
    }

    void runOne(Context& context, std::vector<SassWarp>& warps, std::vector<uint64_t>& executed) const
    {
        size_t current = 0;
        auto const step = [&](SassWarp& warp) {
            context.warp = &warp;
            current = warp.next;
            if (current >= mCode.size())
            {
                fault("ran past the end");
            }
            Instruction const& instruction = mCode[warp.next++];
            uint32_t const guard = warp.predicates[instruction.guard.index];
            context.active = (instruction.guard.inverted ? ~guard : guard) & warp.here;
            if (!context.active)
            {
                return;
            }
            if (instruction.isUniform && context.active != warp.here)
            {
                fault("a uniform register that only some lanes write");
            }
            ++executed[current];
            instruction.execute(context, instruction);
        };
        try
        {
            runBlock(warps, context.shared, step);
        }
        catch (Fault const& what)
        {
            size_t const line = std::min(current, mLines.size() - 1);
            fault(what.what() + where(context.block, context.warp ? context.warp->id : -1, mLines[line]));
        }
    }
};

} // namespace
} // namespace emulator::sass

namespace emulator
{

std::unique_ptr<Kernel> loadCubin(uint8_t const* image, size_t bytes, std::string const& name)
{
    Cubin const cubin = readCubin(image, bytes, name);
    auto kernel = std::make_unique<sass::SassKernel>(cubin, sass::disassemble(image, bytes, name));
    kernel->name = name;
    kernel->parameters = cubin.parameters;
    kernel->parameterBytes = cubin.parameterBytes;
    kernel->threads = cubin.threads;
    kernel->registers = cubin.registers;
    kernel->staticShared = cubin.staticShared;
    return kernel;
}

} // namespace emulator
