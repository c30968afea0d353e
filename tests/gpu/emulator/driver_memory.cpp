// Device, context, memory and streams of the emulated libcuda.so.1. Work is done when it is asked for, so that waiting is free.
#include "driver.h"

#include <cstdio>
#include <cstdlib>

namespace emulator
{
namespace
{

thread_local void* currentContext = nullptr;
char theContext; // only its address matters

} // namespace

Driver& driver()
{
    static Driver instance;
    return instance;
}

Status context()
{
    return !driver().isInitialized ? kNotInitialized
        : !currentContext          ? kInvalidContext
        : driver().isSpoilt        ? kLaunchFailed
                                   : kSuccess;
}

int capability()
{
    char const* const value = std::getenv("ADTP_EMULATOR_SM");
    return value ? std::atoi(value) : 86;
}

int sharedBytesOptIn()
{
    switch (capability())
    {
    case 80:
    case 87: return 163 * 1024;
    case 90:
    case 100:
    case 103: return 227 * 1024;
    default: return 99 * 1024; // 86, 89, 120, 121
    }
}

int driverVersion()
{
    return capability() < 100 ? 12000 : 12080;
}

int newestPtx()
{
    return capability() < 100 ? 80 : 87;
}

} // namespace emulator

using namespace emulator;

ADTP_API cuInit(unsigned)
{
    driver().isInitialized = true;
    return kSuccess;
}

ADTP_API cuDriverGetVersion(int* version)
{
    *version = driverVersion();
    return kSuccess;
}

ADTP_API cuDeviceGetCount(int* count)
{
    *count = 1;
    return driver().isInitialized ? kSuccess : kNotInitialized;
}

ADTP_API cuDeviceGet(int* device, int ordinal)
{
    *device = 0;
    return ordinal ? kInvalidDevice : kSuccess;
}

ADTP_API cuDeviceGetName(char* name, int bytes, int)
{
    std::snprintf(name, static_cast<size_t>(bytes), "emulated sm_%d", capability());
    return kSuccess;
}

ADTP_API cuDeviceGetAttribute(int* value, int attribute, int device)
{
    static std::map<int, int (*)()> const attributes = {
        {1, [] { return kMostThreads; }}, // CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK
        {8, [] { return kSharedBytesAlways; }}, // MAX_SHARED_MEMORY_PER_BLOCK
        {10, [] { return kLanes; }}, // WARP_SIZE
        {12, [] { return static_cast<int>(kRegisters); }}, // MAX_REGISTERS_PER_BLOCK
        {16, // MULTIPROCESSOR_COUNT
            [] {
                char const* const count = std::getenv("ADTP_EMULATOR_PROCESSORS");
                return count ? std::atoi(count) : 1;
            }},
        {75, [] { return capability() / 10; }}, // COMPUTE_CAPABILITY_MAJOR
        {76, [] { return capability() % 10; }}, // COMPUTE_CAPABILITY_MINOR
        {97, sharedBytesOptIn}, // MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
    };
    if (device)
    {
        return kInvalidDevice;
    }
    auto const found = attributes.find(attribute);
    if (found == attributes.end())
    {
        return kNotSupported;
    }
    *value = found->second();
    return kSuccess;
}

ADTP_API cuDevicePrimaryCtxRetain(void** context, int device)
{
    *context = &theContext;
    return device ? kInvalidDevice : kSuccess;
}

ADTP_API cuDevicePrimaryCtxRelease_v2(int device)
{
    return device ? kInvalidDevice : kSuccess;
}

ADTP_API cuCtxSetCurrent(void* context)
{
    if (context && context != &theContext)
    {
        return kInvalidContext;
    }
    currentContext = context;
    return kSuccess;
}

ADTP_API cuCtxGetCurrent(void** context)
{
    *context = currentContext;
    return driver().isInitialized ? kSuccess : kNotInitialized;
}

ADTP_API cuCtxGetDevice(int* device)
{
    *device = 0;
    return context();
}

ADTP_API cuCtxSynchronize()
{
    return context();
}

ADTP_API cuStreamSynchronize(void*)
{
    return context();
}

// Memory begins at multiples of 256 bytes, as on a GPU, and is full of 0xFF: a NaN in every type.
ADTP_API cuMemAlloc_v2(uint64_t* address, size_t bytes)
{
    if (Status const status = context())
    {
        return status;
    }
    void* memory = nullptr;
    if (bytes == 0)
    {
        return kInvalidValue;
    }
    if (posix_memalign(&memory, 256, bytes))
    {
        return kOutOfMemory;
    }
    std::memset(memory, 0xFF, bytes);
    *address = reinterpret_cast<uint64_t>(memory);
    std::lock_guard<std::mutex> const lock(driver().mutex);
    driver().memory.add(*address, bytes);
    return kSuccess;
}

ADTP_API cuMemFree_v2(uint64_t address)
{
    std::lock_guard<std::mutex> const lock(driver().mutex);
    if (!address)
    {
        return context();
    }
    if (!driver().memory.remove(address))
    {
        return kInvalidValue;
    }
    std::free(reinterpret_cast<void*>(address));
    return context();
}

namespace
{

int move(uint64_t device, void* to, void const* from, size_t bytes)
{
    if (Status const status = context())
    {
        return status;
    }
    std::lock_guard<std::mutex> const lock(driver().mutex);
    if (!driver().memory.contains(device, bytes))
    {
        return kInvalidValue;
    }
    std::memcpy(to, from, bytes);
    return kSuccess;
}

} // namespace

ADTP_API cuMemcpyHtoD_v2(uint64_t device, void const* host, size_t bytes)
{
    return move(device, reinterpret_cast<void*>(device), host, bytes);
}

ADTP_API cuMemcpyDtoH_v2(void* host, uint64_t device, size_t bytes)
{
    return move(device, host, reinterpret_cast<void const*>(device), bytes);
}

ADTP_API cuMemcpyHtoDAsync_v2(uint64_t device, void const* host, size_t bytes, void*)
{
    return cuMemcpyHtoD_v2(device, host, bytes);
}

ADTP_API cuMemcpyDtoHAsync_v2(void* host, uint64_t device, size_t bytes, void*)
{
    return cuMemcpyDtoH_v2(host, device, bytes);
}
