// Device and context of the emulated libcuda.so.1.
#include "driver.h"

#include <cstdio>
#include <cstdlib>

namespace emulator
{
namespace
{

thread_local void* currentContext = nullptr;

uint64_t numberOf(char const* name)
{
    char const* const value = std::getenv(name);
    return value && *value ? std::strtoull(value, nullptr, 10) : UINT64_MAX;
}

// All that lies in a context goes with it.
void destroyContext()
{
    Driver& all = driver();
    all.primary = nullptr;
    all.isSpoilt = false;
    all.legacy.failure = kSuccess;
    all.legacy.work.clear();
    all.streams.clear();
    all.events.clear();
    all.graphs.clear();
    all.execs.clear();
    all.inContext.clear();
    auto memory = all.memory.clear();
    memory.merge(all.pinned); // mapped memory is in both
    all.pinned.clear();
    for (uint64_t const address : all.registered)
    {
        memory.erase(address);
    }
    all.registered.clear();
    for (auto const& [address, bytes] : memory)
    {
        std::free(reinterpret_cast<void*>(address));
    }
    all.bytesAllocated = 0;
}

} // namespace

Driver& driver()
{
    static Driver instance;
    return instance;
}

Status context()
{
    return !driver().isInitialized               ? kNotInitialized
        : !currentContext                        ? kInvalidContext
        : currentContext != driver().primary     ? kContextDestroyed
        : driver().isSpoilt                      ? kLaunchFailed
                                                 : kSuccess;
}

bool takeMemory(uint64_t bytes)
{
    uint64_t const limit = numberOf("ADTP_EMULATOR_MEMORY");
    bool const fits = bytes <= limit && driver().bytesAllocated <= limit - bytes;
    driver().bytesAllocated += fits ? bytes : 0;
    return fits;
}

Status refusal(std::string const& function)
{
    char const* const value = std::getenv("ADTP_EMULATOR_REFUSE");
    std::string const told = value ? value : "";
    return told.rfind(function + "=", 0) == 0 ? static_cast<Status>(std::atoi(told.c_str() + function.size() + 1)) : kSuccess;
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

// Contexts differ in their address alone. The next one after the last release has another, so nobody takes it for the old one.
ADTP_API cuDevicePrimaryCtxRetain(void** context, int device)
{
    static uint64_t made = 0;
    std::lock_guard<std::mutex> const lock(driver().mutex);
    if (device)
    {
        return kInvalidDevice;
    }
    if (!driver().retained++)
    {
        driver().primary = reinterpret_cast<void*>(0xC0DE0000 + 16 * ++made);
    }
    *context = driver().primary;
    return kSuccess;
}

ADTP_API cuDevicePrimaryCtxRelease_v2(int device)
{
    std::lock_guard<std::mutex> const lock(driver().mutex);
    if (device)
    {
        return kInvalidDevice;
    }
    if (!driver().retained)
    {
        return kInvalidContext;
    }
    if (!--driver().retained)
    {
        destroyContext();
    }
    return kSuccess;
}

ADTP_API cuCtxSetCurrent(void* context)
{
    if (context && context != driver().primary)
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
