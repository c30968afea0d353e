// Loads, stores, asynchronous copies: section "Data Movement and Conversion Instructions".
#include "ptx.h"

namespace emulator
{
namespace
{

Lanes sharedAddresses(Context const& c, size_t n)
{
    Lanes addresses = c.word(n);
    for (uint32_t& address : addresses)
    {
        address += static_cast<uint32_t>(c.operand(n).offset);
    }
    return addresses;
}

WideLanes globalAddresses(Context const& c, size_t n)
{
    WideLanes addresses = c.wide(n);
    for (uint64_t& address : addresses)
    {
        address += static_cast<uint64_t>(int64_t{c.operand(n).offset});
    }
    return addresses;
}

template <int Words>
void loadGlobal(Context const& c, uint32_t mask)
{
    WideLanes const addresses = globalAddresses(c, Words);
    c.counters.global(addresses, mask, 4 * Words);
    for (int lane = 0; lane < kLanes; ++lane)
    {
        if (mask >> lane & 1)
        {
            uint32_t values[Words];
            c.global.read(addresses[lane], 4 * Words, values, "ld.global");
            for (int word = 0; word < Words; ++word)
            {
                c.word(word)[lane] = values[word];
            }
        }
    }
}

template <int Words>
void loadShared(Context const& c, uint32_t mask)
{
    Lanes const addresses = sharedAddresses(c, Words);
    c.counters.shared(addresses, mask, 4 * Words);
    for (int lane = 0; lane < kLanes; ++lane)
    {
        if (mask >> lane & 1)
        {
            uint32_t values[Words];
            std::memcpy(values, c.shared.read(addresses[lane], 4 * Words, c.warp.id, "ld.shared"), 4 * Words);
            for (int word = 0; word < Words; ++word)
            {
                c.word(word)[lane] = values[word];
            }
        }
    }
}

template <int Words>
void gather(Context const& c, int lane, uint32_t* values)
{
    for (int word = 0; word < Words; ++word)
    {
        values[word] = c.word(1 + word)[lane];
    }
}

template <int Words>
void storeGlobal(Context const& c, uint32_t mask)
{
    WideLanes const addresses = globalAddresses(c, 0);
    c.counters.global(addresses, mask, 4 * Words);
    uint32_t values[Words];
    for (int lane = 0; lane < kLanes; ++lane)
    {
        if (mask >> lane & 1)
        {
            gather<Words>(c, lane, values);
            c.global.write(addresses[lane], 4 * Words, values, "st.global");
        }
    }
    for (int lane = 0; lane < kLanes; ++lane) // which lane wins is not specified
    {
        gather<Words>(c, lane, values);
        if ((mask >> lane & 1) && std::memcmp(reinterpret_cast<void*>(addresses[lane]), values, 4 * Words) != 0)
        {
            fault("st.global: two lanes write different values to one address");
        }
    }
}

template <int Words>
void storeShared(Context const& c, uint32_t mask)
{
    Lanes const addresses = sharedAddresses(c, 0);
    c.counters.shared(addresses, mask, 4 * Words);
    uint32_t values[Words];
    for (int lane = 0; lane < kLanes; ++lane)
    {
        if (mask >> lane & 1)
        {
            gather<Words>(c, lane, values);
            c.shared.write(addresses[lane], 4 * Words, values, c.warp.id, "st.shared");
        }
    }
    for (int lane = 0; lane < kLanes; ++lane)
    {
        gather<Words>(c, lane, values);
        if ((mask >> lane & 1) && std::memcmp(c.shared.peek(addresses[lane]), values, 4 * Words) != 0)
        {
            fault("st.shared: two lanes write different values to one address");
        }
    }
}

// cp.async.cg.shared.global [to], [from], 16, bytes: 16 bytes, of which those behind `bytes` are zeros.
void copy(Context const& c, uint32_t mask)
{
    constexpr uint32_t kBytes = 16; // the only size that .cg takes
    if (c.same(2) != kBytes)
    {
        fault("cp.async.cg: copies 16 bytes");
    }
    Lanes const to = sharedAddresses(c, 0);
    WideLanes const from = globalAddresses(c, 1);
    c.counters.shared(to, mask, kBytes);
    uint32_t reading = 0;
    for (int lane = 0; lane < kLanes; ++lane)
    {
        if (mask >> lane & 1)
        {
            uint32_t const valid = c.word(3)[lane];
            issueCopy(c.warp, c.shared, c.global, {to[lane], from[lane], kBytes, valid});
            reading |= uint32_t{valid > 0} << lane;
        }
    }
    c.counters.global(from, reading, kBytes);
}

} // namespace

void addMemory(Operations& table)
{
    table["ld.global.b32"] = {"wG", loadGlobal<1>, true};
    table["ld.global.v4.b32"] = {"wwwwG", loadGlobal<4>, true};
    table["st.global.b32"] = {"Gw", storeGlobal<1>, true};
    table["st.global.v4.b32"] = {"Gwwww", storeGlobal<4>, true};
    table["ld.shared.b32"] = {"wS", loadShared<1>, true};
    table["ld.shared.v2.b32"] = {"wwS", loadShared<2>, true};
    table["ld.shared.v4.b32"] = {"wwwwS", loadShared<4>, true};
    table["st.shared.b32"] = {"Sw", storeShared<1>, true};
    table["st.shared.v2.b32"] = {"Sww", storeShared<2>, true};
    table["st.shared.v4.b32"] = {"Swwww", storeShared<4>, true};
    table["cp.async.cg.shared.global"] = {"SGww", copy, true};
    table["cp.async.commit_group"] = {"", [](Context const& c, uint32_t) { commitGroup(c.warp); }};
    table["cp.async.wait_group"]
        = {"w", [](Context const& c, uint32_t) { waitGroups(c.warp, c.shared, c.global, c.same(0)); }};
}

} // namespace emulator
