// Memory of the emulated libcuda.so.1, and copies.
#include "driver.h"

#include <cstdlib>

using namespace emulator;

namespace
{

void* newMemory(size_t bytes)
{
    void* memory = nullptr;
    if (posix_memalign(&memory, 256, bytes))
    {
        return nullptr;
    }
    std::memset(memory, 0xFF, bytes);
    return memory;
}

} // namespace

// Memory begins at multiples of 256 bytes, as on a GPU, and is full of 0xFF: a NaN in every type.
ADTP_API cuMemAlloc_v2(uint64_t* address, size_t bytes)
{
    if (Status const status = context())
    {
        return status;
    }
    std::lock_guard<std::mutex> const lock(driver().mutex);
    if (Status const status = allowedByCaptures())
    {
        return status;
    }
    if (bytes == 0)
    {
        return kInvalidValue;
    }
    void* const memory = takeMemory(bytes) ? newMemory(bytes) : nullptr;
    if (!memory)
    {
        return kOutOfMemory;
    }
    *address = reinterpret_cast<uint64_t>(memory);
    driver().memory.add(*address, bytes);
    logCall("allocate", ", \"bytes\": " + std::to_string(bytes));
    return kSuccess;
}

// Waits for all that the device has to do, which may use the memory.
ADTP_API cuMemFree_v2(uint64_t address)
{
    std::lock_guard<std::mutex> const lock(driver().mutex);
    if (!address)
    {
        return context();
    }
    if (Status const status = allowedByCaptures())
    {
        return status;
    }
    finishAll();
    bool const isHosts = driver().registered.count(address) || driver().pinned.count(address);
    uint64_t const bytes = isHosts ? 0 : driver().memory.remove(address);
    if (!bytes)
    {
        return kInvalidValue;
    }
    driver().bytesAllocated -= bytes;
    std::free(reinterpret_cast<void*>(address));
    return context();
}

// Host memory that the device copies from and to by itself; with the flag DEVICEMAP (2) kernels reach it, too.
ADTP_API cuMemHostAlloc(void** address, size_t bytes, unsigned flags)
{
    constexpr unsigned kMapped = 2;
    if (Status const status = context())
    {
        return status;
    }
    std::lock_guard<std::mutex> const lock(driver().mutex);
    if (Status const status = allowedByCaptures())
    {
        return status;
    }
    if (bytes == 0 || flags > 7)
    {
        return kInvalidValue;
    }
    *address = newMemory(bytes);
    if (!*address)
    {
        return kOutOfMemory;
    }
    driver().pinned[reinterpret_cast<uint64_t>(*address)] = bytes;
    if (flags & kMapped)
    {
        driver().memory.add(reinterpret_cast<uint64_t>(*address), bytes);
    }
    return kSuccess;
}

ADTP_API cuMemFreeHost(void* address)
{
    std::lock_guard<std::mutex> const lock(driver().mutex);
    if (Status const status = allowedByCaptures())
    {
        return status;
    }
    finishAll();
    if (!driver().pinned.erase(reinterpret_cast<uint64_t>(address)))
    {
        return kInvalidValue;
    }
    driver().memory.remove(reinterpret_cast<uint64_t>(address)); // if it was mapped
    std::free(address);
    return context();
}

// Memory that the host has already; with the flag DEVICEMAP (2) kernels reach it.
ADTP_API cuMemHostRegister_v2(void* address, size_t bytes, unsigned flags)
{
    constexpr unsigned kMapped = 2;
    if (Status const status = context())
    {
        return status;
    }
    std::lock_guard<std::mutex> const lock(driver().mutex);
    auto const at = reinterpret_cast<uint64_t>(address);
    if (flags != kMapped || !bytes || driver().memory.contains(at, 1))
    {
        return flags == kMapped ? kInvalidValue : kNotSupported;
    }
    driver().memory.add(at, bytes);
    driver().registered.insert(at);
    return kSuccess;
}

ADTP_API cuMemHostUnregister(void* address)
{
    std::lock_guard<std::mutex> const lock(driver().mutex);
    finishAll();
    auto const at = reinterpret_cast<uint64_t>(address);
    return driver().registered.erase(at) && driver().memory.remove(at) ? kSuccess : kInvalidValue;
}

// Addresses are one for host and device, as on every 64-bit system.
ADTP_API cuMemHostGetDevicePointer_v2(uint64_t* device, void* host, unsigned flags)
{
    if (Status const status = context())
    {
        return status;
    }
    std::lock_guard<std::mutex> const lock(driver().mutex);
    *device = reinterpret_cast<uint64_t>(host);
    return flags || !driver().memory.contains(*device, 1) ? kInvalidValue : kSuccess;
}

namespace
{

bool isPinned(uint64_t address, size_t bytes)
{
    auto const next = driver().pinned.upper_bound(address);
    return next != driver().pinned.begin() && address - std::prev(next)->first + bytes <= std::prev(next)->second;
}

// A copy between host and device memory, by its addresses and its direction.
Work copyWork(uint64_t to, uint64_t from, size_t bytes, bool isToDevice)
{
    Work work;
    work.what = Work::What::kCopy;
    work.to = to;
    work.from = from;
    work.bytes = bytes;
    work.isToDevice = isToDevice;
    return work;
}

// $ADTP_EMULATOR_LATE_UPLOADS: cuMemcpyHtoD from memory that is not pinned returns once it has taken the host's bytes, as CUDA's
// reference allows ("API synchronization behavior"). They come to the device before what the legacy stream does next, and before
// the work of blocking streams; other streams do not wait.
bool areUploadsLate()
{
    char const* const value = std::getenv("ADTP_EMULATOR_LATE_UPLOADS");
    return value && *value == '1';
}

int copyNow(uint64_t to, uint64_t from, size_t bytes, bool isToDevice)
{
    if (Status const status = context())
    {
        return status;
    }
    std::lock_guard<std::mutex> const lock(driver().mutex);
    if (Status const status = allowedByCaptures())
    {
        return status;
    }
    if (!driver().memory.contains(isToDevice ? to : from, bytes))
    {
        return kInvalidValue;
    }
    logCall("wait", isToDevice ? ", \"call\": \"cuMemcpyHtoD\"" : ", \"call\": \"cuMemcpyDtoH\"");
    Work work = copyWork(to, from, bytes, isToDevice);
    work.isLate = isToDevice && areUploadsLate() && !isPinned(from, bytes);
    if (work.isLate)
    {
        auto const* const begin = reinterpret_cast<uint8_t const*>(from);
        work.staged.assign(begin, begin + bytes);
    }
    return enqueue(&driver().legacy, std::move(work));
}

// The host goes on at once, but for a copy to memory that is not pinned.
int copyLater(uint64_t to, uint64_t from, size_t bytes, bool isToDevice, void* handle)
{
    if (Status const status = context())
    {
        return status;
    }
    std::lock_guard<std::mutex> const lock(driver().mutex);
    Stream* const stream = streamOf(handle);
    if (!stream)
    {
        return kInvalidHandle;
    }
    if (!driver().memory.contains(isToDevice ? to : from, bytes))
    {
        return kInvalidValue;
    }
    Work work = copyWork(to, from, bytes, isToDevice);
    if (isPinned(isToDevice ? from : to, bytes))
    {
        return enqueue(stream, std::move(work));
    }
    if (isCapturing(*stream))
    {
        return kNotSupported;
    }
    if (isToDevice)
    {
        auto const* const begin = reinterpret_cast<uint8_t const*>(from);
        work.staged.assign(begin, begin + bytes);
        return enqueue(stream, std::move(work));
    }
    if (Status const status = enqueue(stream, std::move(work)))
    {
        return status;
    }
    logCall("wait", ", \"call\": \"cuMemcpyDtoHAsync to pageable memory\"");
    return finish(*stream);
}

// CUDA_MEMCPY3D of cuda.h, of which one dimension is known here.
struct Side
{
    size_t x, y, z, level;
    unsigned type; // 1 host, 2 device
    uint64_t host, device;
    void *array, *reserved;
    size_t pitch, height;
};

struct Copy3d
{
    Side from, to;
    size_t width, height, depth;
};

} // namespace

namespace emulator
{

Status copyNodeWork(Work& work, void const* parameters)
{
    auto const& copy = *static_cast<Copy3d const*>(parameters);
    bool const isToDevice = copy.to.type == 2;
    if (copy.height != 1 || copy.depth != 1 || copy.from.type + copy.to.type != 3 || copy.from.x || copy.to.x)
    {
        return kNotSupported;
    }
    uint64_t const to = isToDevice ? copy.to.device : copy.to.host;
    uint64_t const from = isToDevice ? copy.from.host : copy.from.device;
    work = copyWork(to, from, copy.width, isToDevice);
    bool const isKnown
        = driver().memory.contains(isToDevice ? to : from, copy.width) && isPinned(isToDevice ? from : to, copy.width);
    return isKnown ? kSuccess : kInvalidValue;
}

void copy(Work const& work)
{
    if (!driver().memory.contains(work.isToDevice ? work.to : work.from, work.bytes))
    {
        fault("copy: device memory that is not there");
    }
    if (work.graph && !isPinned(work.isToDevice ? work.from : work.to, work.bytes))
    {
        fault("copy: pinned memory that is not there");
    }
    void const* const from = work.staged.empty() ? reinterpret_cast<void const*>(work.from) : work.staged.data();
    std::memcpy(reinterpret_cast<void*>(work.to), from, work.bytes);
}

} // namespace emulator

ADTP_API cuMemcpyHtoD_v2(uint64_t device, void const* host, size_t bytes)
{
    return copyNow(device, reinterpret_cast<uint64_t>(host), bytes, true);
}

ADTP_API cuMemcpyDtoH_v2(void* host, uint64_t device, size_t bytes)
{
    return copyNow(reinterpret_cast<uint64_t>(host), device, bytes, false);
}

ADTP_API cuMemcpyHtoDAsync_v2(uint64_t device, void const* host, size_t bytes, void* stream)
{
    return copyLater(device, reinterpret_cast<uint64_t>(host), bytes, true, stream);
}

ADTP_API cuMemcpyDtoHAsync_v2(void* host, uint64_t device, size_t bytes, void* stream)
{
    return copyLater(reinterpret_cast<uint64_t>(host), device, bytes, false, stream);
}
