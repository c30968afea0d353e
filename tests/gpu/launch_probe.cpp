// Runs the C++ host's `adtp::launch`, without TensorRT, on the calls that a folder describes (host_calls.py).
//
//   launch_probe [--capturing] FOLDER
//
// With --capturing each call is prepared first, and the driver loads nothing while it is launched. Prints a line for each call: its name, then "ok" or what the host says.

#include "launch.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <fstream>
#include <iterator>
#include <map>
#include <sstream>
#include <string>
#include <vector>

namespace
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

void checked(int status, char const* what)
{
    if (status)
    {
        std::fprintf(stderr, "%s: %d\n", what, status);
        std::exit(2);
    }
}

std::vector<char> contentOf(std::string const& path)
{
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
}

uint64_t uploaded(std::vector<char> const& bytes)
{
    uint64_t address = 0;
    checked(symbol<int(uint64_t*, size_t)>("cuMemAlloc_v2")(&address, bytes.empty() ? 1 : bytes.size()), "cuMemAlloc");
    checked(symbol<int(uint64_t, void const*, size_t)>("cuMemcpyHtoD_v2")(address, bytes.data(), bytes.size()), "cuMemcpyHtoD");
    return address;
}

void download(uint64_t address, size_t bytes, std::string const& path)
{
    std::vector<char> data(bytes);
    if (symbol<int(void*, uint64_t, size_t)>("cuMemcpyDtoH_v2")(data.data(), address, bytes) == 0)
    {
        std::ofstream(path, std::ios::binary).write(data.data(), static_cast<std::streamsize>(bytes));
    }
}

} // namespace

int main(int count, char** arguments)
{
    bool const capturing = count == 3 && std::strcmp(arguments[1], "--capturing") == 0;
    if (count != 2 + capturing)
    {
        return 2;
    }
    std::string const folder = std::string(arguments[count - 1]) + "/";
    void* context = nullptr;
    checked(symbol<int(unsigned)>("cuInit")(0), "cuInit");
    checked(symbol<int(void**, int)>("cuDevicePrimaryCtxRetain")(&context, 0), "cuDevicePrimaryCtxRetain");
    checked(symbol<int(void*)>("cuCtxSetCurrent")(context), "cuCtxSetCurrent");

    std::ifstream calls(folder + "calls.txt");
    std::string name, dtype;
    adtp::Call call{};
    bool packed = false, received = false;
    while (calls >> name >> dtype >> call.headSize >> call.numHeads >> call.tokens >> call.sequences >> call.rowStride >> packed
        >> received >> call.scale)
    {
        size_t const elementBytes = dtype == "fp32" ? 4 : 2;
        size_t const rowBytes = elementBytes * static_cast<size_t>(call.headSize) * static_cast<size_t>(call.numHeads);
        std::vector<char> const nothing(rowBytes * static_cast<size_t>(call.tokens), '\xFF'); // NaN in every type
        uint64_t at[3];
        for (int i = 0; i < 3; ++i)
        {
            at[i] = packed && i ? at[0] + static_cast<uint64_t>(i) * rowBytes
                                : uploaded(contentOf(folder + name + (packed ? ".qkv" : i == 0 ? ".q" : i == 1 ? ".k" : ".v")));
        }
        uint64_t const out = uploaded(nothing);
        uint64_t const sums = uploaded(std::vector<char>(4 * static_cast<size_t>(call.tokens), '\xFF'));
        auto const pointer = [](uint64_t address) { return reinterpret_cast<void*>(address); };
        call.q = pointer(at[0]);
        call.k = pointer(at[1]);
        call.v = pointer(at[2]);
        call.cuSeqlens = pointer(uploaded(contentOf(folder + name + ".cu")));
        call.out = pointer(out);
        call.dtype = dtype.c_str();
        call.received = received ? static_cast<float*>(pointer(sums)) : nullptr;
        std::string error = adtp::check(call.dtype, call.headSize);
        if (error.empty() && capturing)
        {
            error = adtp::prepare(call.dtype, call.headSize, received);
            setenv("ADTP_EMULATOR_CAPTURING", "1", 1);
        }
        if (error.empty())
        {
            error = adtp::launch(call, nullptr);
        }
        unsetenv("ADTP_EMULATOR_CAPTURING");
        std::printf("%s %s\n", name.c_str(), error.empty() ? "ok" : error.c_str());
        download(out, nothing.size(), folder + name + ".out");
        download(sums, 4 * static_cast<size_t>(call.tokens), folder + name + ".sums");
    }
    return 0;
}
