// Loads, stores and asynchronous copies. What may be accessed is in machine.h.
#include "sass_line.h"
#include "sass_values.h"

namespace emulator::sass
{
namespace
{

Lanes sharedAddresses(Context const& context, Address const& address)
{
    Lanes const& row = context.warp->rows[address.row].lanes;
    Lanes const& uniform = context.warp->rows[address.uniformRow].lanes;
    Lanes result;
    for (int lane = 0; lane < kLanes; ++lane)
    {
        result[lane] = row[lane] * address.scale + uniform[lane] + static_cast<uint32_t>(address.offset);
    }
    return result;
}

WideLanes globalAddresses(Context const& context, Address const& address)
{
    WideLanes result = wide(context, {address.row, Change::kNONE});
    for (int lane = 0; lane < kLanes; ++lane)
    {
        result[lane] += static_cast<uint64_t>(address.offset);
    }
    return result;
}

// One address a lane, counted.
template <bool isShared>
auto counted(Context& context, Instruction const& instruction, uint32_t bytes)
{
    if constexpr (isShared)
    {
        Lanes const addresses = sharedAddresses(context, instruction.address);
        context.counters.shared(addresses, context.active, bytes);
        return addresses;
    }
    else
    {
        WideLanes const addresses = globalAddresses(context, instruction.address);
        context.counters.global(addresses, context.active, bytes);
        return addresses;
    }
}

template <bool isShared>
void decodeAddress(Line& line, Instruction& instruction)
{
    if (isShared)
    {
        instruction.address = line.sharedAddress();
        return;
    }
    line.need("E");
    instruction.address = line.globalAddress();
}

int wordsOf(Line& line)
{
    return line.has("128") ? 4 : line.has("64") ? 2 : 1;
}

// Instruction::immediate: bytes of an access. .U8, .U16: less than a register, which zeros fill up.
uint32_t bytesOf(Line& line, int words)
{
    return line.has("U8") ? 1 : line.has("U16") ? 2 : 4U * static_cast<uint32_t>(words);
}

// LDS[.64|.128] d, [...] [PTX ld.shared.b32, .v2, .v4, .b8, .b16]; LDG.E d, [...] [PTX ld.global.b32, .v2, .v4, .b8,
// .b16]. .E: an address of 64 bits.
template <bool isShared>
void load(Context& context, Instruction const& instruction)
{
    uint32_t const bytes = instruction.immediate;
    auto const addresses = counted<isShared>(context, instruction, bytes);
    Row* const to = &context.warp->rows[instruction.destination];
    for (int lane = 0; lane < kLanes; ++lane)
    {
        if (!bit(context.active, lane))
        {
            continue;
        }
        uint32_t words[4] = {};
        if constexpr (isShared)
        {
            std::memcpy(words, context.shared.read(addresses[lane], bytes, context.warp->id, "LDS"), bytes);
        }
        else
        {
            context.global.read(addresses[lane], bytes, words, "LDG");
        }
        for (int k = 0; k < instruction.words; ++k)
        {
            to[k].lanes[lane] = words[k];
        }
    }
}

template <bool isShared>
void decodeLoad(Line& line, Instruction& instruction)
{
    int const words = wordsOf(line);
    instruction.words = static_cast<uint8_t>(words);
    instruction.immediate = bytesOf(line, words);
    line.destination(instruction, words);
    decodeAddress<isShared>(line, instruction);
    instruction.execute = load<isShared>;
}

// STS[.64|.128] [...], a [PTX st.shared.b32, .v2, .v4, .b16]; STG.E [...], a [PTX st.global.b32, .v2, .v4, .b16]
template <bool isShared>
void store(Context& context, Instruction const& instruction)
{
    uint32_t const bytes = instruction.immediate;
    auto const addresses = counted<isShared>(context, instruction, bytes);
    auto const gather = [&](int lane) {
        std::array<uint32_t, 4> words{};
        for (int k = 0; k < instruction.words; ++k)
        {
            words[k] = context.warp->rows[instruction.source[0].row + k].lanes[lane];
        }
        return words;
    };
    for (int lane = 0; lane < kLanes; ++lane)
    {
        if (!bit(context.active, lane))
        {
            continue;
        }
        if constexpr (isShared)
        {
            context.shared.write(addresses[lane], bytes, gather(lane).data(), context.warp->id, "STS");
        }
        else
        {
            context.global.write(addresses[lane], bytes, gather(lane).data(), "STG");
        }
    }
    context.warp->needsFence = context.warp->needsFence || isShared;
    for (int lane = 0; lane < kLanes; ++lane) // which lane wins is not known
    {
        if (bit(context.active, lane))
        {
            void const* now;
            if constexpr (isShared)
            {
                now = context.shared.peek(addresses[lane]);
            }
            else
            {
                now = reinterpret_cast<void const*>(addresses[lane]);
            }
            if (std::memcmp(now, gather(lane).data(), bytes) != 0)
            {
                fault("two lanes write different values to one address");
            }
        }
    }
}

template <bool isShared>
void decodeStore(Line& line, Instruction& instruction)
{
    int const words = wordsOf(line);
    instruction.words = static_cast<uint8_t>(words);
    instruction.immediate = bytesOf(line, words);
    decodeAddress<isShared>(line, instruction);
    instruction.source[0] = line.quad(words);
    instruction.execute = store<isShared>;
}

// LDSM.16.M88[.4] d, [...]: one 8x8 matrix or four [PTX ldmatrix.sync.aligned.m8n8.x1, .x4.shared.b16]; MT88: transposed [.trans]
template <bool isTransposed>
void loadMatrix(Context& context, Instruction const& instruction)
{
    needAllLanes(context, "LDSM");
    Lanes const addresses = sharedAddresses(context, instruction.address);
    int const count = instruction.words;
    context.counters.shared(addresses, kAllLanes >> (kLanes - 8 * count), 16);
    std::array<Lanes*, 4> to{};
    for (int i = 0; i < count; ++i)
    {
        to[i] = &context.warp->rows[instruction.destination + i].lanes;
    }
    loadMatrices(context.shared, context.warp->id, addresses, 0, count, isTransposed, to);
}

void decodeLdsm(Line& line, Instruction& instruction)
{
    bool const isTransposed = line.has("MT88");
    if (!isTransposed)
    {
        line.need("M88");
    }
    line.need("16");
    instruction.words = line.has("4") ? 4 : 1;
    line.destination(instruction, instruction.words);
    instruction.address = line.sharedAddress();
    instruction.execute = isTransposed ? loadMatrix<true> : loadMatrix<false>;
}

// STSM.16.M88[.4] [...], a: the way back, of one matrix or four [PTX stmatrix.sync.aligned.m8n8.x1, .x4.shared.b16]
void storeMatrix(Context& context, Instruction const& instruction)
{
    needAllLanes(context, "STSM");
    Lanes const addresses = sharedAddresses(context, instruction.address);
    int const lanes = 8 * instruction.words;
    context.counters.shared(addresses, kAllLanes >> (kLanes - lanes), 16);
    Row const* const from = &context.warp->rows[instruction.source[0].row];
    for (int lane = 0; lane < lanes; ++lane)
    {
        // Lane 8 m + r has the address of row r of matrix m, of which lanes 4 r to 4 r + 3 hold two numbers each.
        int const matrix = lane / 8, first = lane % 8 * 4;
        context.shared.write(addresses[lane], 16, &from[matrix].lanes[first], context.warp->id, "STSM");
    }
    context.warp->needsFence = true;
}

void decodeStsm(Line& line, Instruction& instruction)
{
    line.need("16");
    line.need("M88");
    instruction.words = line.has("4") ? 4 : 1;
    instruction.address = line.sharedAddress();
    instruction.source[0] = line.quad(instruction.words);
    instruction.execute = storeMatrix;
}

// LDGSTS.E.BYPASS.128 [shared], [global][, p]: 16 bytes, or zeros where not p [PTX cp.async.cg.shared.global with a
// source size of 16 or 0]. LDGSTS.E.64, LDGSTS.E: 8 bytes, and 4 [PTX cp.async.ca.shared.global].
void copyAsync(Context& context, Instruction const& instruction)
{
    Lanes const to = sharedAddresses(context, instruction.address);
    WideLanes const from = globalAddresses(context, instruction.fromAddress);
    uint32_t const isRead = mask(context, instruction.predicate[0]);
    context.warp->needsFence = true;
    uint32_t const bytes = instruction.immediate;
    context.counters.shared(to, context.active, bytes);
    context.counters.global(from, context.active & isRead, bytes);
    for (int lane = 0; lane < kLanes; ++lane)
    {
        if (bit(context.active, lane))
        {
            Copy const copy{to[lane], from[lane], bytes, bit(isRead, lane) * bytes};
            issueCopy(*context.warp, context.shared, context.global, copy);
        }
    }
}

void decodeLdgsts(Line& line, Instruction& instruction)
{
    line.need("E");
    if (line.has("BYPASS"))
    {
        line.need("128");
        instruction.immediate = 16;
    }
    else
    {
        instruction.immediate = line.has("64") ? 8 : 4;
    }
    instruction.address = line.sharedAddress();
    instruction.fromAddress = line.globalAddress();
    if (!line.atEnd())
    {
        instruction.predicate[0] = line.predicate();
    }
    instruction.execute = copyAsync;
}

// LDGDEPBAR [PTX cp.async.commit_group]
void decodeCommit(Line&, Instruction& instruction)
{
    instruction.execute = [](Context& context, Instruction const&) { commitGroup(*context.warp); };
}

// DEPBAR.LE SB0, n: at most n groups are under way [PTX cp.async.wait_group n]. Of another scoreboard, and of a set of further ones
// in braces: loads into registers, which are there at once.
void decodeDepbar(Line& line, Instruction& instruction)
{
    line.need("LE");
    std::string const scoreboard = line.word();
    if (scoreboard != "SB0")
    {
        if (scoreboard.substr(0, 2) != "SB")
        {
            line.refuse("scoreboard");
        }
        line.immediate();
        while (!line.atEnd())
        {
            line.word();
        }
        instruction.execute = [](Context&, Instruction const&) {};
        return;
    }
    instruction.immediate = line.immediate();
    while (!line.atEnd())
    {
        line.word();
    }
    instruction.execute = [](Context& context, Instruction const& self) {
        waitGroups(*context.warp, context.shared, context.global, self.immediate);
    };
}

} // namespace

DecodeTable const& memoryInstructions()
{
    static DecodeTable const table = {
        {"LDS", decodeLoad<true>},
        {"LDG", decodeLoad<false>},
        {"STS", decodeStore<true>},
        {"STG", decodeStore<false>},
        {"LDSM", decodeLdsm},
        {"STSM", decodeStsm},
        {"LDGSTS", decodeLdgsts},
        {"LDGDEPBAR", decodeCommit},
        {"DEPBAR", decodeDepbar},
    };
    return table;
}

} // namespace emulator::sass
