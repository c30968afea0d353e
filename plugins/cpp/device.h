// Memory on the GPU through the driver alone, for the harness.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <dlfcn.h>

namespace adtp
{

struct Cuda
{
    using Status = int32_t; // CUresult
    Status (*init)(uint32_t);
    Status (*deviceCount)(int32_t*);
    Status (*retain)(void**, int32_t);
    Status (*setCurrent)(void*);
    Status (*allocate)(uint64_t*, size_t);
    Status (*release)(uint64_t);
    Status (*upload)(uint64_t, void const*, size_t);
    Status (*download)(void*, uint64_t, size_t);
    Status (*synchronize)();

    // False where there is no driver or no GPU.
    bool load()
    {
        void* const library = dlopen("libcuda.so.1", RTLD_NOW);
        auto const get = [library](auto& function, char const* name) {
            void* const address = library ? dlsym(library, name) : nullptr;
            std::memcpy(&function, &address, sizeof(address));
            return address != nullptr;
        };
        int32_t count = 0;
        void* context = nullptr;
        return get(init, "cuInit") && get(deviceCount, "cuDeviceGetCount") && get(retain, "cuDevicePrimaryCtxRetain")
            && get(setCurrent, "cuCtxSetCurrent") && get(allocate, "cuMemAlloc_v2") && get(release, "cuMemFree_v2")
            && get(upload, "cuMemcpyHtoD_v2") && get(download, "cuMemcpyDtoH_v2")
            && get(synchronize, "cuCtxSynchronize") && init(0) == 0 && deviceCount(&count) == 0 && count > 0
            && retain(&context, 0) == 0 && setCurrent(context) == 0;
    }
};

// Memory on the device.
class Buffer
{
public:
    // Filled with `data`.
    Buffer(Cuda& cuda, void const* data, size_t bytes)
        : mCuda(cuda)
    {
        ok = cuda.allocate(&mAddress, std::max<size_t>(bytes, 1)) == 0 && (!bytes || cuda.upload(mAddress, data, bytes) == 0);
    }
    Buffer(Buffer const&) = delete;
    Buffer& operator=(Buffer const&) = delete;
    ~Buffer()
    {
        mCuda.release(mAddress);
    }
    void* get() const
    {
        return reinterpret_cast<void*>(mAddress);
    }
    bool read(void* data, size_t bytes) const
    {
        return mCuda.download(data, mAddress, bytes) == 0;
    }
    bool ok = false;

private:
    Cuda& mCuda;
    uint64_t mAddress = 0;
};

} // namespace adtp
