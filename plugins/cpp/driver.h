// The CUDA driver, looked up when first needed, and compiled kernels brought into it. What of cuda.h is needed here has names of
// our own, so that building needs no CUDA toolkit.
#pragma once

#include "kernels.h"

#include <cstddef>
#include <cstdint>
#include <string>

namespace adtp
{

using Status = int32_t; // CUresult
constexpr Status kOutOfMemory = 2;
constexpr Status kCaptureImplicit = 906; // of the legacy stream, which would have to wait for one that is being captured

// CUDA_KERNEL_NODE_PARAMS_v2
struct KernelNode
{
    void* function;
    uint32_t gridX, gridY, gridZ, blockX, blockY, blockZ, sharedBytes;
    void** parameters;
    void** extra;
    void* kernel; // in place of a function
    void* context;
};

// CUDA_MEMCPY3D, one row of it
struct CopyNode
{
    struct Side
    {
        size_t x, y, z, level;
        uint32_t type;
        void const* host;
        uint64_t device;
        void* array;
        void* reserved;
        size_t pitch, height;
    };
    static constexpr uint32_t kHOST = 1;
    static constexpr uint32_t kDEVICE = 2;
    Side from, to;
    size_t width, height, depth;
};

struct Driver
{
    Status (*cuGetErrorString)(Status, char const**);
    Status (*cuInit)(uint32_t);
    Status (*cuDevicePrimaryCtxRetain)(void**, int32_t);
    Status (*cuDevicePrimaryCtxRelease)(int32_t);
    Status (*cuCtxGetCurrent)(void**);
    Status (*cuCtxSetCurrent)(void*);
    Status (*cuCtxGetDevice)(int32_t*);
    Status (*cuDeviceGetAttribute)(int32_t*, int32_t, int32_t);
    Status (*cuLibraryLoadData)(void**, void const*, void*, void**, uint32_t, void*, void**, uint32_t);
    Status (*cuLibraryUnload)(void*);
    Status (*cuLibraryGetKernel)(void**, void*, char const*);
    Status (*cuKernelSetAttribute)(int32_t, int32_t, void*, int32_t);
    Status (*cuKernelGetFunction)(void**, void*);
    Status (*cuLaunchKernel)(void*, uint32_t, uint32_t, uint32_t, uint32_t, uint32_t, uint32_t, uint32_t, void*, void**, void**);
    Status (*cuMemAlloc)(uint64_t*, size_t);
    Status (*cuMemFree)(uint64_t);
    Status (*cuMemHostAlloc)(void**, size_t, uint32_t);
    Status (*cuMemFreeHost)(void*);
    Status (*cuMemcpyHtoD)(uint64_t, void const*, size_t);
    Status (*cuMemcpyDtoH)(void*, uint64_t, size_t);
    Status (*cuStreamCreate)(void**, uint32_t);
    Status (*cuStreamDestroy)(void*);
    Status (*cuStreamSynchronize)(void*);
    Status (*cuStreamIsCapturing)(void*, int32_t*);
    Status (*cuStreamWaitEvent)(void*, void*, uint32_t);
    Status (*cuEventCreate)(void**, uint32_t);
    Status (*cuEventDestroy)(void*);
    Status (*cuEventRecord)(void*, void*);
    Status (*cuEventSynchronize)(void*);
    Status (*cuGraphCreate)(void**, uint32_t);
    Status (*cuGraphDestroy)(void*);
    Status (*cuGraphAddKernelNode)(void**, void*, void* const*, size_t, KernelNode const*);
    Status (*cuGraphAddMemcpyNode)(void**, void*, void* const*, size_t, CopyNode const*, void*);
    Status (*cuGraphInstantiate)(void**, void*, uint64_t);
    Status (*cuGraphUpload)(void*, void*);
    Status (*cuGraphExecDestroy)(void*);
    Status (*cuGraphExecKernelNodeSetParams)(void*, void*, KernelNode const*);
    Status (*cuGraphLaunch)(void*, void*);
    std::string missing; // why the driver cannot be used; empty where it can
};

Driver const& driver();

// What a call answered, in words.
std::string failure(char const* call, Status status);

struct Device
{
    int32_t number;
    int32_t architecture; // 86 for sm_86
    int32_t processors;
};

// The device of the current context. Empty, or what went wrong.
std::string ask(Device& device);

// Empty, or why nothing runs on a device, which needs no context: no driver, no such device, one that is older than all kernels.
std::string obstacle(int32_t device, int32_t oldest);

// A GPU's own machine code, or PTX, which GPUs newer than `oldest` take; nullptr for older ones.
Binary const* binaryFor(Binary const* binaries, int32_t count, int32_t oldest, int32_t architecture);
std::string tooOld(int32_t architecture, int32_t oldest);

// Code in the driver, for every context of a device. The owner unloads the library, or lets it stay.
struct Loaded
{
    void* library;
    void* kernel;
};
std::string load(Binary const& binary, char const* symbol, int32_t device, Loaded& loaded);

// Bring a kernel into the current context: libraries are lazy, and a context gets code when it is first asked for.
std::string bringIn(void* kernel, void*& function);

} // namespace adtp
