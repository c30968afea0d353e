#include "launch.h"

#include "choice.h"
#include "driver.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

namespace adtp
{
namespace
{

// A kernel ready to launch on a device. Loaded once for the process and never unloaded.
std::string loadOnce(Binary const& binary, char const* symbol, int32_t device, void*& kernel)
{
    static std::mutex mutex;
    static std::map<std::pair<Binary const*, int32_t>, void*> loaded;
    std::lock_guard<std::mutex> const lock(mutex);
    void*& known = loaded[{&binary, device}];
    if (!known)
    {
        Loaded found{};
        if (std::string error = load(binary, symbol, device, found); !error.empty())
        {
            return error;
        }
        known = found.kernel;
    }
    kernel = known;
    return {};
}

Binary const* binaryFor(Variant const& variant, Device const& device)
{
    return adtp::binaryFor(variant.binaries, kNumBinaries, kOldestArchitecture, device.architecture);
}

bool isMultipleOf16(void const* address)
{
    return reinterpret_cast<uintptr_t>(address) % 16 == 0;
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

// Bring a variant into the current context.
std::string prepareOne(Variant const& variant, Device const& device)
{
    Binary const* const binary = binaryFor(variant, device);
    if (!binary)
    {
        return tooOld(device.architecture, kOldestArchitecture);
    }
    void* kernel = nullptr;
    if (std::string error = loadOnce(*binary, variant.symbol, device.number, kernel); !error.empty())
    {
        return error;
    }
    void* function = nullptr;
    return bringIn(kernel, function);
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
    Binary const* const binary = binaryFor(*variant, device);
    if (!binary)
    {
        return tooOld(device.architecture, kOldestArchitecture);
    }
    if (call.sequences < 0)
    {
        return "cu_seqlens has no number; accepted is at least one";
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
    void* kernel = nullptr;
    if (std::string error = loadOnce(*binary, variant->symbol, device.number, kernel); !error.empty())
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
