#include "launch.h"

#include "choice.h"
#include "kernels.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

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

// The part of cuda.h that is needed here, under names of our own, so that building needs no CUDA toolkit.
using Status = int32_t; // CUresult
using Library = void*; // CUlibrary
using Kernel = void*; // CUkernel
constexpr int32_t kComputeCapabilityMajor = 75;
constexpr int32_t kComputeCapabilityMinor = 76;
constexpr int32_t kMultiprocessorCount = 16;
constexpr int32_t kMaxDynamicSharedSizeBytes = 8;
constexpr uint32_t kAlwaysAllowedSharedBytes = 48 * 1024;

struct Driver
{
    Status (*cuGetErrorString)(Status, char const**);
    Status (*cuCtxGetDevice)(int32_t*);
    Status (*cuDeviceGetAttribute)(int32_t*, int32_t, int32_t);
    Status (*cuLibraryLoadData)(Library*, void const*, void*, void**, uint32_t, void*, void**, uint32_t);
    Status (*cuLibraryGetKernel)(Kernel*, Library, char const*);
    Status (*cuKernelSetAttribute)(int32_t, int32_t, Kernel, int32_t);
    Status (*cuKernelGetFunction)(void**, Kernel);
    Status (*cuLaunchKernel)(Kernel, uint32_t, uint32_t, uint32_t, uint32_t, uint32_t, uint32_t, uint32_t, void*,
        void**, void**);
    std::string missing; // why the driver cannot be used; empty where it can
};

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

Driver const& driver()
{
    static Driver const instance = [] {
        Driver found{};
        resolve(found, found.cuGetErrorString, "cuGetErrorString");
        resolve(found, found.cuCtxGetDevice, "cuCtxGetDevice");
        resolve(found, found.cuDeviceGetAttribute, "cuDeviceGetAttribute");
        resolve(found, found.cuLibraryLoadData, "cuLibraryLoadData");
        resolve(found, found.cuLibraryGetKernel, "cuLibraryGetKernel");
        resolve(found, found.cuKernelSetAttribute, "cuKernelSetAttribute");
        resolve(found, found.cuKernelGetFunction, "cuKernelGetFunction");
        resolve(found, found.cuLaunchKernel, "cuLaunchKernel");
        return found;
    }();
    return instance;
}

std::string failure(char const* call, Status status)
{
    char const* text = nullptr;
    driver().cuGetErrorString(status, &text);
    // Invalid image, no binary for the GPU, unsupported PTX version: what a driver answers to code it does not know.
    bool const isTooOld = status == 200 || status == 209 || status == 222;
    return std::string(call) + ": " + (text ? text : "unknown error") + " (" + std::to_string(status) + ")"
        + (isTooOld ? "; the driver may be too old: the kernels need R525, on RTX 50 R570" : "");
}

// A GPU's own machine code, or PTX; nullptr for GPUs older than that.
Binary const* binaryFor(Variant const& variant, int32_t architecture)
{
    Binary const* ptx = nullptr;
    for (int32_t i = 0; i < kNumBinaries; ++i)
    {
        if (variant.binaries[i].architecture == architecture)
        {
            return &variant.binaries[i];
        }
        if (variant.binaries[i].architecture == 0)
        {
            ptx = &variant.binaries[i];
        }
    }
    return architecture > kOldestArchitecture ? ptx : nullptr;
}

// A kernel ready to launch on a device. Loaded once for the process and never unloaded.
std::string load(Binary const& binary, char const* symbol, int32_t device, Kernel& kernel)
{
    static std::mutex mutex;
    static std::map<std::pair<Binary const*, int32_t>, Kernel> loaded;
    std::lock_guard<std::mutex> const lock(mutex);
    Kernel& known = loaded[{&binary, device}];
    if (!known)
    {
        Library library = nullptr;
        Kernel found = nullptr;
        if (Status const s = driver().cuLibraryLoadData(&library, binary.data, nullptr, nullptr, 0, nullptr, nullptr, 0))
        {
            return failure("cuLibraryLoadData", s);
        }
        if (Status const s = driver().cuLibraryGetKernel(&found, library, symbol))
        {
            return failure("cuLibraryGetKernel", s);
        }
        if (binary.sharedBytes > kAlwaysAllowedSharedBytes)
        {
            auto const bytes = static_cast<int32_t>(binary.sharedBytes);
            if (Status const s = driver().cuKernelSetAttribute(kMaxDynamicSharedSizeBytes, bytes, found, device))
            {
                return failure("cuKernelSetAttribute", s);
            }
        }
        known = found;
    }
    kernel = known;
    return {};
}

bool isMultipleOf16(void const* address)
{
    return reinterpret_cast<uintptr_t>(address) % 16 == 0;
}

struct Device
{
    int32_t number;
    int32_t architecture; // 86 for sm_86
    int32_t processors;
};

// The device of the current context. Empty, or what went wrong.
std::string ask(Device& device)
{
    if (Status const s = driver().cuCtxGetDevice(&device.number))
    {
        return failure("cuCtxGetDevice", s);
    }
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

// What is launched, in this order. Log-sum-exps lie in the memory of the output until attention fills it: a head of 32 numbers
// has room for one in fp32. A workspace would not do, because builders do not know the largest T.
std::vector<Kind> kernelsOf(bool received)
{
    return received ? std::vector<Kind>{Kind::kLSE, Kind::kRECEIVED, Kind::kATTENTION} : std::vector<Kind>{Kind::kATTENTION};
}

// The variants of a kernel, from the first up to the last, short sequences first.
std::pair<Variant const*, Variant const*> variantsOf(Kind kind, char const* dtype, int32_t headSize)
{
    auto const fits = [&](Variant const& variant) {
        return variant.kind == kind && std::strcmp(variant.dtype, dtype) == 0 && variant.headSize == headSize;
    };
    Variant const* const first = std::find_if(kVariants, kVariants + kNumVariants, fits);
    return {first, std::find_if_not(first, kVariants + kNumVariants, fits)};
}

std::string tooOld(Device const& device)
{
    return "no kernel for sm_" + std::to_string(device.architecture) + "; accepted are GPUs from sm_"
        + std::to_string(kOldestArchitecture) + " on";
}

// Bring a variant into the current context.
std::string prepareOne(Variant const& variant, Device const& device)
{
    Binary const* const binary = binaryFor(variant, device.architecture);
    if (!binary)
    {
        return tooOld(device);
    }
    Kernel kernel = nullptr;
    if (std::string error = load(*binary, variant.symbol, device.number, kernel); !error.empty())
    {
        return error;
    }
    void* function = nullptr; // libraries are lazy: a context gets code when it is first asked for
    Status const s = driver().cuKernelGetFunction(&function, kernel);
    return s ? failure("cuKernelGetFunction", s) : std::string{};
}

// Enqueue one of a call's kernels.
std::string launchOne(Kind kind, Call call, Device const& device, void* stream)
{
    auto const [first, last] = variantsOf(kind, call.dtype, call.headSize);
    if (first == last)
    {
        return check(call.dtype, call.headSize);
    }
    Variant const* const variant = chosen(first, last, call.tokens, call.sequences, call.numHeads, device.processors);
    Binary const* const binary = binaryFor(*variant, device.architecture);
    if (!binary)
    {
        return tooOld(device);
    }
    int64_t const tiles = int64_t{call.tokens} / variant->blockM + call.sequences;
    int64_t const programs = kind == Kind::kRECEIVED ? tiles : tiles * call.numHeads;
    if (programs == 0)
    {
        return {};
    }
    if (programs > INT32_MAX)
    {
        return "more tokens and heads than one launch takes";
    }
    Kernel kernel = nullptr;
    if (std::string error = load(*binary, variant->symbol, device.number, kernel); !error.empty())
    {
        return error;
    }
    std::vector<void*> arguments{&call.q, &call.k};
    if (kind == Kind::kATTENTION)
    {
        arguments.push_back(&call.v);
    }
    arguments.insert(arguments.end(), {&call.cuSeqlens, &call.out});
    if (kind == Kind::kRECEIVED)
    {
        arguments.push_back(&call.received);
    }
    void* none = nullptr; // Triton's scratch memory, which these kernels have none of
    arguments.insert(arguments.end(),
        {&call.rowStride, &call.tokens, &call.sequences, &call.numHeads, &call.scale, &none, &none});
    if (Status const s = driver().cuLaunchKernel(kernel, static_cast<uint32_t>(programs), 1, 1, variant->threads, 1, 1,
            binary->sharedBytes, stream, arguments.data(), nullptr))
    {
        return failure("cuLaunchKernel", s);
    }
    return {};
}

} // namespace

std::string check(char const* dtype, int32_t headSize)
{
    std::string accepted;
    for (int32_t i = 0; i < kNumVariants; ++i)
    {
        Variant const& variant = kVariants[i];
        if (std::strcmp(variant.dtype, dtype) == 0 && variant.headSize == headSize)
        {
            return {};
        }
        std::string const kind = std::string(variant.dtype) + " with head size " + std::to_string(variant.headSize);
        if (accepted.find(kind) == std::string::npos)
        {
            accepted += (accepted.empty() ? "" : ", ") + kind;
        }
    }
    return std::string("got ") + dtype + " with head size " + std::to_string(headSize) + "; accepted are " + accepted;
}

std::string prepare(char const* dtype, int32_t headSize, bool received)
{
    if (!driver().missing.empty())
    {
        return driver().missing;
    }
    Device device{};
    if (std::string error = ask(device); !error.empty())
    {
        return error;
    }
    for (Kind const kind : kernelsOf(received))
    {
        auto const [first, last] = variantsOf(kind, dtype, headSize);
        for (Variant const* variant = first; variant != last; ++variant)
        {
            if (std::string error = prepareOne(*variant, device); !error.empty())
            {
                return error;
            }
        }
    }
    return {};
}

std::string launch(Call const& call, void* stream)
{
    if (!driver().missing.empty())
    {
        return driver().missing;
    }
    void const* const addresses[] = {call.q, call.k, call.v, call.out};
    if (!std::all_of(std::begin(addresses), std::end(addresses), isMultipleOf16) || call.rowStride % 16)
    {
        return "addresses (in bytes) and the row stride (in elements) must be multiples of 16";
    }
    Device device{};
    if (std::string error = ask(device); !error.empty())
    {
        return error;
    }
    for (Kind const kind : kernelsOf(call.received != nullptr))
    {
        if (std::string error = launchOne(kind, call, device, stream); !error.empty())
        {
            return error;
        }
    }
    return {};
}

} // namespace adtp
