// Runs the C++ host's `adtp::launch`, without TensorRT, on the calls that a folder describes (host_calls.py).
//
//   launch_probe [--capturing] FOLDER
//
// With --capturing each call is prepared first, and the driver loads nothing while it is launched. Prints a line for each call: its name, then "ok" or what the host says.

#include "launch.h"
#include "probe.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>
#include <vector>

using namespace probe;

namespace
{

// Nothing is written where nothing could be read.
void write(std::vector<char> const& data, std::string const& path)
{
    if (!data.empty())
    {
        std::ofstream(path, std::ios::binary).write(data.data(), static_cast<std::streamsize>(data.size()));
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
    begin();

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
        write(downloaded(out, nothing.size()), folder + name + ".out");
        write(downloaded(sums, 4 * static_cast<size_t>(call.tokens)), folder + name + ".sums");
    }
    return 0;
}
