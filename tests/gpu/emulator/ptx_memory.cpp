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

// One address a lane, counted.
template <bool isShared>
auto counted(Context const& c, size_t n, uint32_t mask, uint32_t bytes)
{
    if constexpr (isShared)
    {
        Lanes const addresses = sharedAddresses(c, n);
        c.counters.shared(addresses, mask, bytes);
        return addresses;
    }
    else
    {
        WideLanes const addresses = globalAddresses(c, n);
        c.counters.global(addresses, mask, bytes);
        return addresses;
    }
}

// `Count` registers of type T: of 64 bits, or of 32 or 16, which what is narrower fills up with zeros.
template <bool isShared, int Count, typename T = uint32_t>
void load(Context const& c, uint32_t mask)
{
    constexpr uint32_t kBytes = sizeof(T) * Count;
    auto const addresses = counted<isShared>(c, Count, mask, kBytes);
    for (int lane = 0; lane < kLanes; ++lane)
    {
        if (!(mask >> lane & 1))
        {
            continue;
        }
        T values[Count];
        if constexpr (isShared)
        {
            std::memcpy(values, c.shared.read(addresses[lane], kBytes, c.warp.id, "ld.shared"), kBytes);
        }
        else
        {
            c.global.read(addresses[lane], kBytes, values, "ld.global");
        }
        for (int n = 0; n < Count; ++n)
        {
            if constexpr (sizeof(T) == 8)
            {
                c.wide(n)[lane] = values[n];
            }
            else
            {
                c.word(n)[lane] = values[n];
            }
        }
    }
}

template <bool isShared, int Count, typename T = uint32_t>
void store(Context const& c, uint32_t mask)
{
    constexpr uint32_t kBytes = sizeof(T) * Count;
    auto const addresses = counted<isShared>(c, 0, mask, kBytes);
    auto const gather = [&](int lane) {
        std::array<T, Count> values;
        for (int n = 0; n < Count; ++n)
        {
            if constexpr (sizeof(T) == 8)
            {
                values[n] = c.wide(1 + n)[lane];
            }
            else
            {
                values[n] = static_cast<T>(c.word(1 + n)[lane]);
            }
        }
        return values;
    };
    for (int lane = 0; lane < kLanes; ++lane)
    {
        if (mask >> lane & 1)
        {
            if constexpr (isShared)
            {
                c.shared.write(addresses[lane], kBytes, gather(lane).data(), c.warp.id, "st.shared");
            }
            else
            {
                c.global.write(addresses[lane], kBytes, gather(lane).data(), "st.global");
            }
        }
    }
    for (int lane = 0; lane < kLanes; ++lane) // which lane wins is not specified
    {
        if (!(mask >> lane & 1))
        {
            continue;
        }
        void const* now;
        if constexpr (isShared)
        {
            now = c.shared.peek(addresses[lane]);
        }
        else
        {
            now = reinterpret_cast<void const*>(addresses[lane]);
        }
        if (std::memcmp(now, gather(lane).data(), kBytes) != 0)
        {
            fault(std::string(isShared ? "st.shared" : "st.global") + ": two lanes write different values to one address");
        }
    }
}

// cp.async.cg.shared.global [to], [from], 16, bytes: 16 bytes, of which those after `bytes` are zeros. .ca copies 4 or 8, too.
template <bool isAnySize>
void copy(Context const& c, uint32_t mask)
{
    uint32_t const bytes = c.same(2);
    if (bytes != 16 && !(isAnySize && (bytes == 4 || bytes == 8)))
    {
        fault("cp.async: copies 16 bytes, or with .ca 4 or 8");
    }
    Lanes const to = sharedAddresses(c, 0);
    WideLanes const from = globalAddresses(c, 1);
    c.counters.shared(to, mask, bytes);
    uint32_t reading = 0;
    for (int lane = 0; lane < kLanes; ++lane)
    {
        if (mask >> lane & 1)
        {
            uint32_t const valid = c.word(3)[lane];
            issueCopy(c.warp, c.shared, c.global, {to[lane], from[lane], bytes, valid});
            reading |= uint32_t{valid > 0} << lane;
        }
    }
    c.counters.global(from, reading, bytes);
}

} // namespace

void addMemory(Operations& table)
{
    table["ld.global.b32"] = {"wG", load<false, 1>, true};
    table["ld.global.b8"] = {"hG", load<false, 1, uint8_t>, true};
    table["ld.global.b16"] = {"hG", load<false, 1, uint16_t>, true};
    table["ld.global.b64"] = {"dG", load<false, 1, uint64_t>, true};
    table["ld.global.v2.b32"] = {"wwG", load<false, 2>, true};
    table["ld.global.v4.b32"] = {"wwwwG", load<false, 4>, true};
    table["st.global.b32"] = {"Gw", store<false, 1>, true};
    table["st.global.b16"] = {"Gh", store<false, 1, uint16_t>, true};
    table["st.global.v2.b32"] = {"Gww", store<false, 2>, true};
    table["st.global.v4.b32"] = {"Gwwww", store<false, 4>, true};
    table["ld.shared.b32"] = {"wS", load<true, 1>, true};
    table["ld.shared.b8"] = {"hS", load<true, 1, uint8_t>, true};
    table["ld.shared.b16"] = {"nS", load<true, 1, uint16_t>, true};
    table["ld.shared.v4.b16"] = {"hhhhS", load<true, 4, uint16_t>, true};
    table["ld.shared.v2.b64"] = {"ddS", load<true, 2, uint64_t>, true};
    table["ld.shared.v2.b32"] = {"wwS", load<true, 2>, true};
    table["ld.shared.v4.b32"] = {"wwwwS", load<true, 4>, true};
    table["st.shared.b32"] = table["st.shared::cta.b32"] = {"Sw", store<true, 1>, true};
    table["st.shared.b16"] = {"Sh", store<true, 1, uint16_t>, true};
    table["st.shared.v2.b8"] = {"Shh", store<true, 2, uint8_t>, true};
    table["st.shared.v2.b64"] = {"Sdd", store<true, 2, uint64_t>, true};
    table["st.shared.v2.b32"] = {"Sww", store<true, 2>, true};
    table["st.shared.v4.b32"] = {"Swwww", store<true, 4>, true};
    table["cp.async.cg.shared.global"] = {"SGww", copy<false>, true};
    table["cp.async.ca.shared.global"] = {"SGww", copy<true>, true};
    table["cp.async.commit_group"] = {"", [](Context const& c, uint32_t) { commitGroup(c.warp); }};
    table["cp.async.wait_group"]
        = {"w", [](Context const& c, uint32_t) { waitGroups(c.warp, c.shared, c.global, c.same(0)); }};
}

} // namespace emulator
