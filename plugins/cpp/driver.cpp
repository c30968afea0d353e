#include "driver.h"

#include <cstring>
#include <utility>

#ifdef _WIN32
#ifndef NOMINMAX // MinGW defines it itself
#define NOMINMAX
#endif
#define WIN32_LEAN_AND_MEAN
#include <windows.h>
#else
#include <dlfcn.h>
#endif

namespace adtp
{
namespace
{

constexpr int32_t kComputeCapabilityMajor = 75;
constexpr int32_t kComputeCapabilityMinor = 76;
constexpr int32_t kMultiprocessorCount = 16;
constexpr int32_t kMaxDynamicSharedSizeBytes = 8;
constexpr uint32_t kAlwaysAllowedSharedBytes = 48 * 1024;

void* symbol(char const* name)
{
#ifdef _WIN32
    static HMODULE const library = LoadLibraryA("nvcuda.dll");
    return library ? reinterpret_cast<void*>(GetProcAddress(library, name)) : nullptr;
#else
    static void* const library = dlopen("libcuda.so.1", RTLD_NOW);
    return library ? dlsym(library, name) : nullptr;
#endif
}

template <typename Function>
void resolve(Driver& driver, Function& function, char const* name)
{
    void* const address = symbol(name);
    static_assert(sizeof(function) == sizeof(address), "function and data pointers differ");
    std::memcpy(&function, &address, sizeof(address));
    if (!address && driver.missing.empty())
    {
        driver.missing = std::string("the CUDA driver (R525 or newer) is missing or lacks ") + name;
    }
}

} // namespace

Driver const& driver()
{
    static Driver const instance = [] {
        Driver found{};
        resolve(found, found.cuGetErrorString, "cuGetErrorString");
        resolve(found, found.cuInit, "cuInit");
        resolve(found, found.cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain");
        resolve(found, found.cuDevicePrimaryCtxRelease, "cuDevicePrimaryCtxRelease_v2");
        resolve(found, found.cuCtxGetCurrent, "cuCtxGetCurrent");
        resolve(found, found.cuCtxSetCurrent, "cuCtxSetCurrent");
        resolve(found, found.cuCtxGetDevice, "cuCtxGetDevice");
        resolve(found, found.cuDeviceGetAttribute, "cuDeviceGetAttribute");
        resolve(found, found.cuLibraryLoadData, "cuLibraryLoadData");
        resolve(found, found.cuLibraryUnload, "cuLibraryUnload");
        resolve(found, found.cuLibraryGetKernel, "cuLibraryGetKernel");
        resolve(found, found.cuKernelSetAttribute, "cuKernelSetAttribute");
        resolve(found, found.cuKernelGetFunction, "cuKernelGetFunction");
        resolve(found, found.cuLaunchKernel, "cuLaunchKernel");
        resolve(found, found.cuMemAlloc, "cuMemAlloc_v2");
        resolve(found, found.cuMemFree, "cuMemFree_v2");
        resolve(found, found.cuMemHostAlloc, "cuMemHostAlloc");
        resolve(found, found.cuMemFreeHost, "cuMemFreeHost");
        resolve(found, found.cuMemcpyHtoD, "cuMemcpyHtoD_v2");
        resolve(found, found.cuMemcpyDtoH, "cuMemcpyDtoH_v2");
        resolve(found, found.cuStreamCreate, "cuStreamCreate");
        resolve(found, found.cuStreamDestroy, "cuStreamDestroy_v2");
        resolve(found, found.cuStreamSynchronize, "cuStreamSynchronize");
        resolve(found, found.cuStreamIsCapturing, "cuStreamIsCapturing");
        resolve(found, found.cuStreamWaitEvent, "cuStreamWaitEvent");
        resolve(found, found.cuEventCreate, "cuEventCreate");
        resolve(found, found.cuEventDestroy, "cuEventDestroy_v2");
        resolve(found, found.cuEventRecord, "cuEventRecord");
        resolve(found, found.cuEventSynchronize, "cuEventSynchronize");
        resolve(found, found.cuGraphCreate, "cuGraphCreate");
        resolve(found, found.cuGraphDestroy, "cuGraphDestroy");
        resolve(found, found.cuGraphAddKernelNode, "cuGraphAddKernelNode_v2");
        resolve(found, found.cuGraphAddMemcpyNode, "cuGraphAddMemcpyNode");
        resolve(found, found.cuGraphInstantiate, "cuGraphInstantiateWithFlags");
        resolve(found, found.cuGraphUpload, "cuGraphUpload");
        resolve(found, found.cuGraphExecDestroy, "cuGraphExecDestroy");
        resolve(found, found.cuGraphExecKernelNodeSetParams, "cuGraphExecKernelNodeSetParams_v2");
        resolve(found, found.cuGraphLaunch, "cuGraphLaunch");
        return found;
    }();
    return instance;
}

std::string failure(char const* call, Status status)
{
    char const* text = nullptr;
    driver().cuGetErrorString(status, &text);
    // Illegal address, launch timeout, and others that spoil the context (cuda.h: "the process must be terminated").
    bool const isLost = status == 214 || status == 220 || (status >= 700 && status < 720 && status != 701);
    // Invalid image, no binary for the GPU, unsupported PTX version: what a driver answers to code it does not know.
    bool const isTooOld = status == 200 || status == 209 || status == 222;
    return std::string(call) + ": " + (text ? text : "unknown error") + " (" + std::to_string(status) + ")"
        + (isTooOld ? "; the driver may be too old: the kernels need R525, on RTX 50 R570" : "")
        + (isLost ? "; the GPU is lost to this process until nothing of it is loaded: load again" : "");
}

namespace
{

// Of a device of this number.
std::string describe(Device& device)
{
    int32_t major = 0;
    int32_t minor = 0;
    std::pair<int32_t, int32_t*> const asked[] = {{kComputeCapabilityMajor, &major}, {kComputeCapabilityMinor, &minor},
        {kMultiprocessorCount, &device.processors}};
    for (auto const& [attribute, value] : asked)
    {
        if (Status const s = driver().cuDeviceGetAttribute(value, attribute, device.number))
        {
            return failure("cuDeviceGetAttribute", s);
        }
    }
    device.architecture = 10 * major + minor;
    return {};
}

} // namespace

std::string ask(Device& device)
{
    Status const s = driver().cuCtxGetDevice(&device.number);
    return s ? failure("cuCtxGetDevice", s) : describe(device);
}

std::string obstacle(int32_t number, int32_t oldest)
{
    if (!driver().missing.empty())
    {
        return driver().missing;
    }
    if (Status const s = driver().cuInit(0))
    {
        return failure("cuInit", s);
    }
    Device device{number, 0, 0};
    std::string const error = describe(device);
    return !error.empty() || device.architecture >= oldest ? error : tooOld(device.architecture, oldest);
}

Binary const* binaryFor(Binary const* binaries, int32_t count, int32_t oldest, int32_t architecture)
{
    Binary const* ptx = nullptr;
    for (int32_t i = 0; i < count; ++i)
    {
        if (binaries[i].architecture == architecture)
        {
            return &binaries[i];
        }
        if (binaries[i].architecture == 0)
        {
            ptx = &binaries[i];
        }
    }
    return architecture > oldest ? ptx : nullptr;
}

std::string tooOld(int32_t architecture, int32_t oldest)
{
    return "no kernel for sm_" + std::to_string(architecture) + "; accepted are GPUs from sm_" + std::to_string(oldest) + " on";
}

std::string load(Binary const& binary, char const* symbol, int32_t device, Loaded& loaded)
{
    if (Status const s = driver().cuLibraryLoadData(&loaded.library, binary.data, nullptr, nullptr, 0, nullptr, nullptr, 0))
    {
        return failure("cuLibraryLoadData", s);
    }
    if (Status const s = driver().cuLibraryGetKernel(&loaded.kernel, loaded.library, symbol))
    {
        return failure("cuLibraryGetKernel", s);
    }
    if (binary.sharedBytes > kAlwaysAllowedSharedBytes)
    {
        auto const bytes = static_cast<int32_t>(binary.sharedBytes);
        if (Status const s = driver().cuKernelSetAttribute(kMaxDynamicSharedSizeBytes, bytes, loaded.kernel, device))
        {
            return failure("cuKernelSetAttribute", s);
        }
    }
    return {};
}

std::string bringIn(void* kernel, void*& function)
{
    Status const s = driver().cuKernelGetFunction(&function, kernel);
    return s ? failure("cuKernelGetFunction", s) : std::string{};
}

} // namespace adtp
