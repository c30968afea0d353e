// Libraries, kernels and launches of the emulated libcuda.so.1. Refuses what a driver refuses.
#include "driver.h"
#include "elf.h"

#include <algorithm>
#include <cstdlib>

using namespace emulator;

namespace
{

template <typename T>
T field(char const* image, size_t offset)
{
    T value;
    std::memcpy(&value, image + offset, sizeof value);
    return value;
}

// Length of an ELF file: its table of sections or of segments is last (System V ABI, "ELF Header").
size_t elfBytes(char const* image)
{
    uint64_t const sections = field<uint64_t>(image, 40) + uint64_t{field<uint16_t>(image, 58)} * field<uint16_t>(image, 60);
    uint64_t const segments = field<uint64_t>(image, 32) + uint64_t{field<uint16_t>(image, 54)} * field<uint16_t>(image, 56);
    return std::max(sections, segments);
}

// Machine code runs on GPUs of its major version from its minor one on; PTX on all from its own on, if the driver knows it
// (CUDA C++ Programming Guide, "Binary Compatibility" and "PTX Compatibility").
Status checkMachineCode(char const* image)
{
    int const code = architectureOf(field<uint8_t>(image, 7), field<uint32_t>(image, 48)), gpu = capability();
    return code / 10 == gpu / 10 && code % 10 <= gpu % 10 ? kSuccess : kNoBinaryForGpu;
}

Status checkPtx(std::string const& text)
{
    size_t const version = text.find(".version "), target = text.find(".target sm_");
    if (version == std::string::npos || target == std::string::npos)
    {
        return kInvalidPtx;
    }
    char* rest = nullptr;
    long const major = std::strtol(text.c_str() + version + 9, &rest, 10);
    if (10 * major + std::strtol(rest + 1, nullptr, 10) > newestPtx())
    {
        return kUnsupportedPtxVersion;
    }
    return std::atoi(text.c_str() + target + 11) > capability() ? kNoBinaryForGpu : kSuccess;
}

// $ADTP_EMULATOR_CAPTURING: the stream is being captured. Then code that is not in the context yet cannot be loaded any more.
bool isSaidToCapture()
{
    char const* const value = std::getenv("ADTP_EMULATOR_CAPTURING");
    return value && *value == '1';
}

// Bring a kernel into the context, as its first launch does (CUDA C++ Programming Guide, "Lazy Loading").
Status bringIn(Kernel* kernel, bool inCapture)
{
    if (!driver().kernels.count(kernel))
    {
        return kInvalidHandle;
    }
    if (inCapture && !driver().inContext.count(kernel))
    {
        return kCaptureUnsupported;
    }
    driver().inContext.insert(kernel);
    return kSuccess;
}

Status checkLaunch(Kernel const& kernel, Launch const& launch)
{
    if (!launch.programs || launch.programs > 0x7FFFFFFF || !launch.threads || launch.threads > kMostThreads
        || (kernel.threads && launch.threads != kernel.threads) || launch.sharedBytes > kernel.maxDynamicShared)
    {
        return kInvalidValue;
    }
    if (launch.threads % kLanes)
    {
        return kNotSupported;
    }
    uint32_t const registers = (kernel.registers + 7) / 8 * 8; // they are given in eights
    return registers * launch.threads > kRegisters ? kLaunchOutOfResources : kSuccess;
}

} // namespace

namespace emulator
{

Status kernelWork(Work& work, Kernel* kernel, uint32_t programs, uint32_t threads, uint32_t sharedBytes, void** parameters,
    bool inCapture)
{
    if (Status const status = bringIn(kernel, inCapture || isSaidToCapture()))
    {
        return status;
    }
    work.what = Work::What::kKernel;
    work.kernel = kernel;
    work.launch = {programs, threads, sharedBytes, std::vector<uint8_t>(kernel->parameterBytes)};
    if (Status const status = checkLaunch(*kernel, work.launch))
    {
        return status;
    }
    for (size_t i = 0; i < kernel->parameters.size(); ++i)
    {
        auto const [offset, bytes] = kernel->parameters[i];
        std::memcpy(&work.launch.parameters[offset], parameters[i], bytes);
    }
    return kSuccess;
}

} // namespace emulator

ADTP_API cuLibraryLoadData(
    void** out, char const* image, void*, void**, unsigned jitOptions, void*, void**, unsigned libraryOptions)
{
    std::lock_guard<std::mutex> const lock(driver().mutex);
    if (!driver().isInitialized)
    {
        return kNotInitialized;
    }
    if (!out || !image || jitOptions || libraryOptions)
    {
        return kInvalidValue;
    }
    if (isSaidToCapture())
    {
        return kCaptureUnsupported;
    }
    if (Status const status = allowedByCaptures())
    {
        return status;
    }
    auto library = std::make_unique<Library>();
    library->isPtx = std::memcmp(image, "\177ELF", 4) != 0;
    library->image = library->isPtx ? std::string(image) : std::string(image, elfBytes(image));
    if (Status const status = library->isPtx ? checkPtx(library->image) : checkMachineCode(image))
    {
        return status;
    }
    *out = library.get();
    driver().libraries[*out] = std::move(library);
    return kSuccess;
}

ADTP_API cuLibraryUnload(void* handle)
{
    std::lock_guard<std::mutex> const lock(driver().mutex);
    auto const library = driver().libraries.find(handle);
    if (library == driver().libraries.end())
    {
        return kInvalidHandle;
    }
    finishAll();
    for (auto const& [name, kernel] : library->second->kernels)
    {
        driver().kernels.erase(kernel.get());
        driver().inContext.erase(kernel.get());
    }
    driver().libraries.erase(library);
    return kSuccess;
}

// A real driver compiles PTX when it loads it; here code is read when its kernel is asked for.
ADTP_API cuLibraryGetKernel(Kernel** out, void* handle, char const* name)
{
    std::lock_guard<std::mutex> const lock(driver().mutex);
    auto const found = driver().libraries.find(handle);
    if (found == driver().libraries.end())
    {
        return kInvalidHandle;
    }
    Library& library = *found->second;
    auto& kernel = library.kernels[name];
    try
    {
        if (!kernel)
        {
            kernel = library.isPtx
                ? loadPtx(library.image, name)
                : loadCubin(reinterpret_cast<uint8_t const*>(library.image.data()), library.image.size(), name);
        }
    }
    catch (std::exception const& what)
    {
        driver().lastFault = what.what();
        library.kernels.erase(name);
        return kNotFound;
    }
    driver().kernels[kernel.get()] = &library;
    *out = kernel.get();
    return kSuccess;
}

ADTP_API cuKernelSetAttribute(int attribute, int value, Kernel* kernel, int device)
{
    constexpr int kMaxDynamicShared = 8; // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    std::lock_guard<std::mutex> const lock(driver().mutex);
    if (!driver().kernels.count(kernel))
    {
        return kInvalidHandle;
    }
    if (device)
    {
        return kInvalidDevice;
    }
    if (attribute != kMaxDynamicShared)
    {
        return kNotSupported;
    }
    if (value < 0 || value + static_cast<int>(kernel->staticShared) > sharedBytesOptIn())
    {
        return kInvalidValue;
    }
    kernel->maxDynamicShared = static_cast<uint32_t>(value);
    return kSuccess;
}

ADTP_API cuKernelGetFunction(Kernel** function, Kernel* kernel)
{
    std::lock_guard<std::mutex> const lock(driver().mutex);
    *function = kernel; // a kernel may stand for its function, and does so here
    return bringIn(kernel, isSaidToCapture());
}

ADTP_API cuLaunchKernel(Kernel* kernel, unsigned gridX, unsigned gridY, unsigned gridZ, unsigned blockX, unsigned blockY,
    unsigned blockZ, unsigned sharedBytes, void* handle, void** parameters, void** extra)
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
    Work work;
    if (gridY != 1 || gridZ != 1 || blockY != 1 || blockZ != 1 || extra)
    {
        return driver().kernels.count(kernel) ? kNotSupported : kInvalidHandle; // these kernels have one dimension
    }
    Status const status = kernelWork(work, kernel, gridX, blockX, sharedBytes, parameters, isCapturing(*stream));
    return status ? status : enqueue(stream, std::move(work));
}
