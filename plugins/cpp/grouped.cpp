#include "grouped.h"

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

// A window as wide as the kernels add to positions, which lie below it. Wider ones see no more.
constexpr int32_t kFarthest = 1 << 30;

// A kernel on a device: loaded once for the process, and never unloaded.
struct OnDevice
{
    void* kernel;
    uint32_t sharedBytes;
};

std::string loadOnce(adtp_kernel const& kernel, Device const& device, OnDevice& found)
{
    static std::mutex mutex;
    static std::map<std::pair<adtp_kernel const*, int32_t>, OnDevice> known;
    std::lock_guard<std::mutex> const lock(mutex);
    auto const place = known.find({&kernel, device.number});
    if (place != known.end())
    {
        found = place->second;
        return {};
    }
    std::vector<Binary> binaries;
    for (int32_t i = 0; i < kernel.num_binaries; ++i)
    {
        adtp_binary const& one = kernel.binaries[i];
        binaries.push_back({one.architecture, one.data, one.bytes, one.shared_bytes});
    }
    Binary const* const binary
        = binaryFor(binaries.data(), kernel.num_binaries, kernel.oldest_architecture, device.architecture);
    if (!binary)
    {
        return tooOld(device.architecture, kernel.oldest_architecture);
    }
    Loaded loaded{};
    if (std::string error = load(*binary, kernel.symbol, device.number, loaded); !error.empty())
    {
        return error;
    }
    found = {loaded.kernel, binary->sharedBytes};
    known[{&kernel, device.number}] = found;
    return {};
}

// Log-sum-exps lie in the memory of the output until attention fills it: a head of 8 numbers has room for one in fp32.
std::vector<GroupedKernel> kernelsOf(bool received)
{
    return received ? std::vector<GroupedKernel>{GroupedKernel::kLSE, GroupedKernel::kRECEIVED, GroupedKernel::kATTENTION}
                    : std::vector<GroupedKernel>{GroupedKernel::kATTENTION};
}

// The variant of the smallest head size that is enough; nullptr where there is none.
GroupedVariant const* variantOf(GroupedKernel kind, char const* dtype, int32_t headSize)
{
    auto const fits = [&](GroupedVariant const& variant) {
        return variant.kind == kind && std::strcmp(variant.dtype, dtype) == 0 && headSize <= variant.headBlock;
    };
    GroupedVariant const* const end = kGroupedVariants + kNumGroupedVariants;
    GroupedVariant const* const found = std::find_if(kGroupedVariants, end, fits);
    return found == end ? nullptr : found;
}

// Enqueue one of a call's kernels.
std::string launchOne(GroupedVariant const& variant, GroupedCall call, Device const& device, void* stream)
{
    bool const ofKeys = variant.kind == GroupedKernel::kRECEIVED;
    int64_t const tiles = int64_t{ofKeys ? call.keys : call.queries} / variant.blockM + call.texts;
    int64_t const programs = ofKeys ? tiles : tiles * call.numHeads;
    if (programs == 0)
    {
        return {};
    }
    if (programs > INT32_MAX)
    {
        return "more tokens and heads than one launch takes";
    }
    call.windowBack = std::min(call.windowBack, kFarthest);
    call.windowAhead = std::min(call.windowAhead, kFarthest);
    OnDevice found{};
    if (std::string error = loadOnce(*variant.kernel, device, found); !error.empty())
    {
        return error;
    }
    std::vector<void*> arguments{&call.q, &call.k};
    if (variant.kind == GroupedKernel::kATTENTION)
    {
        arguments.push_back(&call.v);
    }
    // `out` is where log-sum-exps are, too
    arguments.insert(arguments.end(), {&call.cuQ, &call.cuK, &call.positionsQ, &call.positionsK, &call.out});
    if (ofKeys)
    {
        arguments.push_back(&call.received);
    }
    void* none = nullptr; // Triton's scratch memory, which these kernels have none of
    arguments.insert(arguments.end(),
        {&call.qStride, &call.kvStride, &call.queries, &call.keys, &call.texts, &call.numHeads, &call.kvHeads, &call.headSize,
            &call.scale, &call.windowBack, &call.windowAhead, &none, &none});
    if (Status const s = driver().cuLaunchKernel(found.kernel, static_cast<uint32_t>(programs), 1, 1, variant.kernel->threads, 1, 1,
            found.sharedBytes, stream, arguments.data(), nullptr))
    {
        return failure("cuLaunchKernel", s);
    }
    return {};
}

// Ask for the device of the current context. Empty, or what went wrong.
std::string deviceHere(Device& device)
{
    return driver().missing.empty() ? ask(device) : driver().missing;
}

} // namespace

std::string checkGrouped(char const* dtype, int32_t headSize)
{
    if (headSize > 0 && headSize % 8 == 0 && variantOf(GroupedKernel::kATTENTION, dtype, headSize))
    {
        return {};
    }
    std::map<std::string, int32_t> most;
    for (int32_t i = 0; i < kNumGroupedVariants; ++i)
    {
        int32_t& size = most[kGroupedVariants[i].dtype];
        size = std::max(size, kGroupedVariants[i].headBlock);
    }
    std::string accepted;
    for (auto const& [type, size] : most)
    {
        accepted += (accepted.empty() ? "" : ", ") + type + " up to " + std::to_string(size);
    }
    return std::string("got ") + dtype + " with head size " + std::to_string(headSize) + "; accepted are multiples of 8: " + accepted;
}

std::string prepareGrouped(char const* dtype, int32_t headSize, bool received)
{
    Device device{};
    std::string error = deviceHere(device);
    for (GroupedKernel const kind : kernelsOf(received))
    {
        GroupedVariant const* const variant = variantOf(kind, dtype, headSize);
        OnDevice found{};
        void* function = nullptr;
        if (error.empty())
        {
            error = variant ? loadOnce(*variant->kernel, device, found) : checkGrouped(dtype, headSize);
        }
        if (error.empty())
        {
            error = bringIn(found.kernel, function);
        }
    }
    return error;
}

std::string launch(GroupedCall const& call, void* stream)
{
    void const* const addresses[] = {call.q, call.k, call.v, call.out};
    auto const isAligned = [](void const* address) { return reinterpret_cast<uintptr_t>(address) % 16 == 0; };
    if (!std::all_of(std::begin(addresses), std::end(addresses), isAligned) || call.qStride % 8 || call.kvStride % 8)
    {
        return "addresses (in bytes) must be multiples of 16, and row strides (in elements) of 8";
    }
    Device device{};
    std::string error = checkGrouped(call.dtype, call.headSize);
    error = error.empty() ? deviceHere(device) : error;
    for (GroupedKernel const kind : kernelsOf(call.received != nullptr))
    {
        if (error.empty())
        {
            error = launchOne(*variantOf(kind, call.dtype, call.headSize), call, device, stream);
        }
    }
    return error;
}

} // namespace adtp
