// How instructions read operands and write results: all lanes at once, in loops that compilers turn into vector code.
#pragma once

#include "sass.h"

#include <tuple>
#include <utility>

namespace emulator::sass
{

using WideLanes = std::array<uint64_t, kLanes>;

// ------------------------------------------------------------------------------------------------------------ sources

// A 32-bit integer. `scratch` holds it where it had to be changed.
inline Lanes const& integer(Context const& context, Source source, Lanes& scratch)
{
    Lanes const& value = context.warp->rows[source.row].lanes;
    if (source.change == Change::kNONE)
    {
        return value;
    }
    uint32_t const flip = kAllLanes; // -x is ~x + 1
    uint32_t const add = source.change == Change::kNEGATED;
    for (int lane = 0; lane < kLanes; ++lane)
    {
        scratch[lane] = (value[lane] ^ flip) + add;
    }
    return scratch;
}

// The bits of a 32-bit float.
inline Lanes const& real(Context const& context, Source source, Lanes& scratch)
{
    Lanes const& value = context.warp->rows[source.row].lanes;
    if (source.change == Change::kNONE)
    {
        return value;
    }
    uint32_t const keep = source.change == Change::kNEGATED ? ~0U : 0x7FFFFFFFU;
    uint32_t const flip = source.change == Change::kMAGNITUDE ? 0 : 0x80000000U;
    for (int lane = 0; lane < kLanes; ++lane)
    {
        scratch[lane] = (value[lane] & keep) ^ flip;
    }
    return scratch;
}

template <auto& read, size_t... Index>
auto readSources(Context const& context, Instruction const& instruction, Lanes* scratch, std::index_sequence<Index...>)
{
    return std::tie(read(context, instruction.source[Index], scratch[Index])...);
}

// An instruction's first operands, as many as there is scratch: sources<integer>(...) or sources<real>(...).
template <auto& read, size_t Count>
auto sources(Context const& context, Instruction const& instruction, Lanes (&scratch)[Count])
{
    return readSources<read>(context, instruction, scratch, std::make_index_sequence<Count>{});
}

// A pair of registers, the lower half first.
inline WideLanes wide(Context const& context, Source source)
{
    Lanes const& low = context.warp->rows[source.row].lanes;
    Lanes const& high = context.warp->rows[source.row + 1].lanes;
    WideLanes value;
    for (int lane = 0; lane < kLanes; ++lane)
    {
        value[lane] = low[lane] | uint64_t{high[lane]} << 32;
        value[lane] = source.change == Change::kNEGATED ? 0 - value[lane] : value[lane];
    }
    return value;
}

// A predicate as a mask of lanes.
inline uint32_t mask(Context const& context, PredicateSource source)
{
    uint32_t const value = context.warp->predicates[source.index];
    return source.inverted ? ~value : value;
}

inline uint32_t bit(uint32_t mask, int lane)
{
    return mask >> lane & 1;
}

// ------------------------------------------------------------------------------------------------------------ results

// Into the instruction's register number `part`, in active lanes only.
inline void write(Context& context, Instruction const& instruction, Lanes const& value, int part = 0)
{
    Lanes& to = context.warp->rows[instruction.destination + part].lanes;
    if (context.active == kAllLanes || instruction.isUniform)
    {
        to = value;
        return;
    }
    for (int lane = 0; lane < kLanes; ++lane)
    {
        to[lane] = bit(context.active, lane) ? value[lane] : to[lane];
    }
}

inline void writeWide(Context& context, Instruction const& instruction, WideLanes const& value)
{
    Lanes low, high;
    for (int lane = 0; lane < kLanes; ++lane)
    {
        low[lane] = static_cast<uint32_t>(value[lane]);
        high[lane] = static_cast<uint32_t>(value[lane] >> 32);
    }
    write(context, instruction, low, 0);
    write(context, instruction, high, 1);
}

inline void writePredicate(Context& context, uint8_t index, uint32_t value)
{
    uint32_t& to = context.warp->predicates[index];
    bool const isUniform = index >= kFirstUniformPredicate;
    to = isUniform ? value : (to & ~context.active) | (value & context.active);
}

// For instructions that need the whole warp.
inline void needAllLanes(Context const& context, char const* what)
{
    if (context.active != kAllLanes)
    {
        fault(std::string(what) + " by some lanes only");
    }
}

} // namespace emulator::sass
