#include "counters.h"

#include <algorithm>

namespace emulator
{

void Counters::shared(Lanes const& addresses, uint32_t mask, uint32_t bytes)
{
    constexpr uint32_t kBanks = 32;
    int const together = static_cast<int>(128 / bytes); // lanes
    for (int first = 0; first < kLanes; first += together)
    {
        // Lanes that want different words of one bank take turns; the same word goes to all that want it.
        uint32_t words[kBanks][kLanes];
        int counts[kBanks] = {};
        for (int lane = first; lane < first + together; ++lane)
        {
            for (uint32_t byte = 0; byte < bytes && (mask >> lane & 1); byte += 4)
            {
                uint32_t const word = (addresses[lane] + byte) / 4;
                uint32_t const bank = word % kBanks;
                if (std::find(words[bank], words[bank] + counts[bank], word) == words[bank] + counts[bank])
                {
                    words[bank][counts[bank]++] = word;
                }
            }
        }
        int const passes = *std::max_element(counts, counts + kBanks);
        sharedPasses += static_cast<uint64_t>(passes);
        sharedPassesLeast += passes > 0;
    }
}

void Counters::global(std::array<uint64_t, kLanes> const& addresses, uint32_t mask, uint32_t bytes)
{
    constexpr uint32_t kSector = 32; // bytes; an aligned access of at most 16 lies in one
    std::array<uint64_t, kLanes> wanted;
    auto end = wanted.begin();
    for (int lane = 0; lane < kLanes; ++lane)
    {
        if (mask >> lane & 1)
        {
            *end++ = addresses[lane];
        }
    }
    std::sort(wanted.begin(), end);
    end = std::unique(wanted.begin(), end); // lanes that want the same get the same
    sectorsLeast += (static_cast<uint64_t>(end - wanted.begin()) * bytes + kSector - 1) / kSector;
    std::transform(wanted.begin(), end, wanted.begin(), [](uint64_t address) { return address / kSector; });
    sectors += static_cast<uint64_t>(std::unique(wanted.begin(), end) - wanted.begin());
}

} // namespace emulator
