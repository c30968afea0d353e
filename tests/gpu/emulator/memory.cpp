// Global and shared memory, and the copies from one to the other.
#include "machine.h"

#include <algorithm>
#include <utility>

namespace emulator
{

void GlobalMemory::add(uint64_t address, uint64_t bytes)
{
    mEnds[address] = address + bytes;
}

uint64_t GlobalMemory::remove(uint64_t address)
{
    mLastBegin = mLastEnd = 0;
    auto const found = mEnds.find(address);
    uint64_t const bytes = found == mEnds.end() ? 0 : found->second - address;
    mEnds.erase(address);
    return bytes;
}

std::map<uint64_t, uint64_t> GlobalMemory::clear()
{
    mLastBegin = mLastEnd = 0;
    return std::exchange(mEnds, {});
}

bool GlobalMemory::contains(uint64_t address, uint64_t bytes) const
{
    auto const next = mEnds.upper_bound(address);
    return next != mEnds.begin() && bytes <= std::prev(next)->second - address && address <= std::prev(next)->second;
}

uint8_t* GlobalMemory::at(uint64_t address, uint32_t bytes, char const* what)
{
    if (address % bytes)
    {
        fault(std::string(what) + ": global address is not aligned to " + std::to_string(bytes) + " bytes");
    }
    if (address < mLastBegin || address + bytes > mLastEnd)
    {
        auto const next = mEnds.upper_bound(address);
        if (next == mEnds.begin())
        {
            fault(std::string(what) + ": global address before all allocations");
        }
        auto const [begin, end] = *std::prev(next);
        if (address + bytes > end)
        {
            fault(std::string(what) + ": global access ends " + std::to_string(address + bytes - end)
                + " bytes after an allocation of " + std::to_string(end - begin));
        }
        mLastBegin = begin;
        mLastEnd = end;
    }
    return reinterpret_cast<uint8_t*>(address);
}

void GlobalMemory::read(uint64_t address, uint32_t bytes, void* to, char const* what)
{
    std::memcpy(to, at(address, bytes, what), bytes);
    bytesRead += bytes;
}

void GlobalMemory::write(uint64_t address, uint32_t bytes, void const* from, char const* what)
{
    std::memcpy(at(address, bytes, what), from, bytes);
    bytesWritten += bytes;
}

void SharedMemory::reset(uint32_t bytes, uint32_t reserved)
{
    mBytes.assign(bytes, 0xFF);
    mWords.assign((bytes + 3) / 4, {});
    mEpoch = 1;
    mReserved = reserved;
}

void SharedMemory::checkBounds(uint32_t address, uint32_t bytes, char const* what) const
{
    if (address % bytes)
    {
        fault(std::string(what) + ": shared address " + std::to_string(address) + " is not aligned to "
            + std::to_string(bytes) + " bytes");
    }
    if (address < mReserved || uint64_t{address} + bytes > mBytes.size())
    {
        fault(std::string(what) + ": " + std::to_string(bytes) + " bytes at shared address " + std::to_string(address)
            + "; the block has " + std::to_string(mReserved) + " to " + std::to_string(mBytes.size()));
    }
}

void SharedMemory::noteRead(uint32_t address, uint32_t bytes, int warp, char const* what)
{
    if (!options().races)
    {
        return;
    }
    uint32_t const end = address + bytes;
    for (uint32_t i = address / 4; i < (end + 3) / 4; ++i)
    {
        Word& word = mWords[i];
        if (word.pending)
        {
            fault(std::string(what) + ": reads a word that cp.async is still writing");
        }
        if (word.readEpoch != mEpoch)
        {
            word.readEpoch = mEpoch;
            word.readers.fill(0);
        }
        for (uint32_t at = std::max(address, 4 * i); at < std::min(end, 4 * i + 4); ++at)
        {
            int16_t const writer = word.writer[at % 4];
            if (writer == kNobody)
            {
                fault(std::string(what) + ": reads shared memory that nobody wrote");
            }
            if (writer != warp && word.writeEpoch == mEpoch && word.written >> at % 4 & 1)
            {
                fault(std::string(what) + ": race: reads what another warp wrote, without a barrier");
            }
            word.readers[at % 4] |= uint64_t{1} << warp;
        }
    }
}

void SharedMemory::noteWrite(uint32_t address, uint32_t bytes, int warp, char const* what, uint8_t const* data)
{
    if (!options().races)
    {
        return;
    }
    uint32_t const end = address + bytes;
    for (uint32_t i = address / 4; i < (end + 3) / 4; ++i)
    {
        Word& word = mWords[i];
        if (word.pending)
        {
            fault(std::string(what) + ": writes a word that cp.async is still writing");
        }
        if (word.writeEpoch != mEpoch)
        {
            word.writeEpoch = mEpoch;
            word.written = word.repeated = 0;
        }
        for (uint32_t at = std::max(address, 4 * i); at < std::min(end, 4 * i + 4); ++at)
        {
            auto const bit = static_cast<uint8_t>(1U << at % 4);
            bool const isAnothers = word.written & bit && word.writer[at % 4] != warp;
            bool const isSame = data && data[at - address] == mBytes[at];
            if (isSame && isAnothers)
            {
                word.repeated |= bit;
                continue;
            }
            if (isAnothers || (word.repeated & bit && !isSame))
            {
                fault(std::string(what) + ": race: two warps write different values without a barrier");
            }
            if (word.readEpoch == mEpoch && (word.readers[at % 4] & ~(uint64_t{1} << warp)))
            {
                fault(std::string(what) + ": race: writes what another warp read, without a barrier");
            }
            word.writer[at % 4] = static_cast<int16_t>(warp);
            word.written |= bit;
        }
    }
}

uint8_t const* SharedMemory::read(uint32_t address, uint32_t bytes, int warp, char const* what)
{
    checkBounds(address, bytes, what);
    noteRead(address, bytes, warp, what);
    return &mBytes[address];
}

void SharedMemory::write(uint32_t address, uint32_t bytes, void const* data, int warp, char const* what)
{
    checkBounds(address, bytes, what);
    noteWrite(address, bytes, warp, what, static_cast<uint8_t const*>(data));
    std::memcpy(&mBytes[address], data, bytes);
}

void SharedMemory::beginCopy(uint32_t address, uint32_t bytes, int warp)
{
    checkBounds(address, bytes, "cp.async");
    noteWrite(address, bytes, warp, "cp.async");
    for (uint32_t i = address / 4; i < (address + bytes + 3) / 4; ++i)
    {
        ++mWords[i].pending;
    }
}

void SharedMemory::land(uint32_t address, uint32_t bytes, uint8_t const* from, uint32_t valid)
{
    std::memset(&mBytes[address], 0, bytes);
    if (valid)
    {
        std::memcpy(&mBytes[address], from, valid);
    }
}

void SharedMemory::endCopy(uint32_t address, uint32_t bytes, int warp)
{
    for (uint32_t i = address / 4; i < (address + bytes + 3) / 4; ++i)
    {
        --mWords[i].pending;
    }
    noteWrite(address, bytes, warp, "cp.async");
}

namespace
{

void land(SharedMemory& shared, GlobalMemory& global, Copy const& copy)
{
    shared.land(copy.to, copy.bytes, copy.valid ? global.at(copy.from, copy.valid, "cp.async") : nullptr, copy.valid);
}

} // namespace

void issueCopy(Warp& warp, SharedMemory& shared, GlobalMemory& global, Copy const& copy)
{
    if (copy.valid > copy.bytes)
    {
        fault("cp.async: more bytes to read than to write");
    }
    if (copy.valid)
    {
        global.at(copy.from, copy.valid, "cp.async");
        global.bytesRead += copy.valid;
    }
    shared.beginCopy(copy.to, copy.bytes, warp.id);
    if (options().earlyCopies)
    {
        land(shared, global, copy);
    }
    warp.openGroup.push_back(copy);
}

void commitGroup(Warp& warp)
{
    warp.groups.push_back(std::move(warp.openGroup));
    warp.openGroup.clear();
}

void waitGroups(Warp& warp, SharedMemory& shared, GlobalMemory& global, size_t left)
{
    while (warp.groups.size() > left)
    {
        for (Copy const& copy : warp.groups.front())
        {
            if (!options().earlyCopies)
            {
                land(shared, global, copy);
            }
            shared.endCopy(copy.to, copy.bytes, warp.id);
        }
        warp.groups.erase(warp.groups.begin());
    }
}

} // namespace emulator
