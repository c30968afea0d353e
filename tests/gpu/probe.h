// What programs need that run the C++ hosts on an emulated GPU: its driver, memory, files.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <dlfcn.h>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

namespace probe
{

template <typename Function>
Function* symbol(char const* name)
{
    static void* const library = dlopen("libcuda.so.1", RTLD_NOW);
    void* const address = library ? dlsym(library, name) : nullptr;
    if (!address)
    {
        std::fprintf(stderr, "no %s\n", name);
        std::exit(2);
    }
    return reinterpret_cast<Function*>(address);
}

inline void checked(int status, char const* what)
{
    if (status)
    {
        std::fprintf(stderr, "%s: %d\n", what, status);
        std::exit(2);
    }
}

inline std::vector<char> contentOf(std::string const& path)
{
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
}

inline uint64_t uploaded(std::vector<char> const& bytes)
{
    uint64_t address = 0;
    checked(symbol<int(uint64_t*, size_t)>("cuMemAlloc_v2")(&address, bytes.empty() ? 1 : bytes.size()), "cuMemAlloc");
    checked(symbol<int(uint64_t, void const*, size_t)>("cuMemcpyHtoD_v2")(address, bytes.data(), bytes.size()), "cuMemcpyHtoD");
    return address;
}

// What lies at an address; nothing where the driver refuses.
inline std::vector<char> downloaded(uint64_t address, size_t bytes)
{
    std::vector<char> data(bytes);
    bool const done = symbol<int(void*, uint64_t, size_t)>("cuMemcpyDtoH_v2")(data.data(), address, bytes) == 0;
    return done ? data : std::vector<char>{};
}

// The primary context, current for this thread.
inline void begin()
{
    void* context = nullptr;
    checked(symbol<int(unsigned)>("cuInit")(0), "cuInit");
    checked(symbol<int(void**, int)>("cuDevicePrimaryCtxRetain")(&context, 0), "cuDevicePrimaryCtxRetain");
    checked(symbol<int(void*)>("cuCtxSetCurrent")(context), "cuCtxSetCurrent");
}

inline void* pointer(uint64_t address)
{
    return reinterpret_cast<void*>(address);
}

} // namespace probe
