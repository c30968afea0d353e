// Names: of errors, and of the driver's own functions, which cuda-python asks for by name.
#include "driver.h"

#include <cstdio>
#include <cstdlib>
#include <dlfcn.h>

ADTP_API cuInit(unsigned);

namespace emulator
{
namespace
{

// CRC-32 as zlib has it, so that who reads the log can tell which binary ran.
uint32_t checksum(std::string const& data)
{
    uint32_t crc = ~0U;
    for (char const c : data)
    {
        crc ^= static_cast<uint8_t>(c);
        for (int bit = 0; bit < 8; ++bit)
        {
            crc = crc & 1 ? crc >> 1 ^ 0xEDB88320 : crc >> 1;
        }
    }
    return ~crc;
}

std::string quoted(std::string const& text)
{
    std::string result = "\"";
    for (char const c : text)
    {
        result += c == '"' || c == '\\' ? std::string("\\") + c : c < ' ' ? std::string(" ") : std::string(1, c);
    }
    return result + "\"";
}

} // namespace

void logCall(std::string const& did, std::string const& fields)
{
    char const* const path = std::getenv("ADTP_EMULATOR_CALLS");
    if (FILE* const file = path && *path ? std::fopen(path, "a") : nullptr)
    {
        std::fputs(("{\"did\": " + quoted(did) + fields + "}\n").c_str(), file);
        std::fclose(file);
    }
}

void logLaunch(
    Kernel const& kernel, Launch const& launch, Counters const& counters, GlobalMemory const& memory, std::string const& failure)
{
    char const* const path = std::getenv("ADTP_EMULATOR_LOG");
    FILE* const file = path && *path ? std::fopen(path, "a") : nullptr;
    if (!file)
    {
        return;
    }
    Library const& library = *driver().kernels.at(const_cast<Kernel*>(&kernel));
    uint64_t total = 0;
    std::string byName;
    for (auto const& [name, count] : counters.instructions)
    {
        total += count;
        byName += (byName.empty() ? "" : ", ") + quoted(name) + ": " + std::to_string(count);
    }
    auto const number = [](uint64_t value) { return std::to_string(value); };
    std::string const line = "{\"crc32\": " + number(checksum(library.image)) + ", \"symbol\": " + quoted(kernel.name)
        + ", \"capability\": " + number(static_cast<uint64_t>(capability())) + ", \"programs\": " + number(launch.programs)
        + ", \"threads\": " + number(launch.threads) + ", \"shared_bytes\": " + number(launch.sharedBytes)
        + ", \"failure\": " + (failure.empty() ? "null" : quoted(failure)) + ", \"instructions\": " + number(total)
        + ", \"tensor_flops\": " + number(counters.tensorFlops) + ", \"bytes_read\": " + number(memory.bytesRead)
        + ", \"bytes_written\": " + number(memory.bytesWritten) + ", \"sectors\": " + number(counters.sectors)
        + ", \"sectors_least\": " + number(counters.sectorsLeast) + ", \"shared_passes\": " + number(counters.sharedPasses)
        + ", \"shared_passes_least\": " + number(counters.sharedPassesLeast) + ", \"by_name\": {" + byName + "}}\n";
    std::fputs(line.c_str(), file);
    std::fclose(file);
}

} // namespace emulator

using namespace emulator;

// What the kernel did wrong follows the driver's own words, so that a host's message has it.
ADTP_API cuGetErrorString(int status, char const** text)
{
    static std::map<int, char const*> const texts = {
        {kSuccess, "no error"},
        {kInvalidValue, "invalid argument"},
        {kOutOfMemory, "out of memory"},
        {kNotInitialized, "initialization error"},
        {kInvalidDevice, "invalid device ordinal"},
        {kInvalidImage, "device kernel image is invalid"},
        {kInvalidContext, "invalid device context"},
        {kNoBinaryForGpu, "no kernel image is available for execution on the device"},
        {kInvalidPtx, "a PTX JIT compilation failed"},
        {kUnsupportedPtxVersion, "the provided PTX was compiled with an unsupported toolchain."},
        {kInvalidHandle, "invalid resource handle"},
        {kCaptureUnsupported, "operation not permitted when stream is capturing"},
        {kNotFound, "named symbol not found"},
        {kLaunchOutOfResources, "too many resources requested for launch"},
        {kLaunchFailed, "unspecified launch failure"},
        {kNotSupported, "operation not supported"},
        {kNotReady, "device not ready"},
        {kContextDestroyed, "context is destroyed"},
        {kCaptureInvalidated, "operation failed due to a previous error during capture"},
        {kCaptureIsolation, "dependency created on uncaptured work in another stream"},
        {kCaptureImplicit, "operation would make the legacy stream depend on a capturing blocking stream"},
        {kCaptureWrongThread, "attempt to terminate a thread-local capture sequence from another thread"},
    };
    thread_local std::string withFault;
    std::lock_guard<std::mutex> const lock(driver().mutex);
    auto const found = texts.find(status);
    if (found == texts.end())
    {
        *text = nullptr;
        return kInvalidValue;
    }
    withFault = found->second;
    if ((status == kLaunchFailed || status == kNotFound) && !driver().lastFault.empty())
    {
        withFault += ": " + driver().lastFault;
    }
    *text = withFault.c_str();
    return kSuccess;
}

ADTP_API cuGetErrorName(int, char const** text)
{
    *text = "CUDA_ERROR";
    return kSuccess;
}

ADTP_API cuGetProcAddress_v2(char const* symbol, void** address, int, uint64_t, int* status)
{
    static void* const self = [] {
        Dl_info info;
        dladdr(reinterpret_cast<void*>(&cuInit), &info);
        return dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD);
    }();
    *address = dlsym(self, (std::string(symbol) + "_v2").c_str()); // the newer one, as cuda.h names it
    *address = *address ? *address : dlsym(self, symbol);
    if (status)
    {
        *status = *address ? 0 : 1; // CU_GET_PROC_ADDRESS_SUCCESS, _SYMBOL_NOT_FOUND
    }
    return *address ? kSuccess : kNotFound;
}
