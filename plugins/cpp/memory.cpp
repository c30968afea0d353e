#include "memory.h"

#include <algorithm>
#include <cstring>

namespace adtp
{
namespace
{

constexpr uint64_t kAlignment = 256; // of each array, in bytes: that of the driver's own allocations

uint64_t aligned(uint64_t bytes)
{
    return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

// Where each of these arrays begins, one after the other; the end comes last.
std::vector<uint64_t> offsetsOf(std::vector<uint64_t> const& bytes)
{
    std::vector<uint64_t> offsets{0};
    for (uint64_t const one : bytes)
    {
        offsets.push_back(offsets.back() + aligned(one));
    }
    return offsets;
}

struct Sizes
{
    uint64_t workspace, inputs, outputs;
};

// What the first buckets of a plan need.
Sizes sizesOf(Plan const& plan, size_t count, bool isForHost)
{
    Sizes sizes{0, 0, 0};
    for (size_t i = 0; i < count; ++i)
    {
        Bucket const& bucket = plan.buckets[i];
        sizes.workspace = std::max(sizes.workspace, aligned(bucket.workspaceBytes));
        sizes.inputs = std::max(sizes.inputs, isForHost ? offsetsOf(bucket.inputs).back() : 0);
        sizes.outputs = std::max(sizes.outputs, isForHost ? offsetsOf(bucket.outputs).back() : 0);
    }
    return sizes;
}

CopyNode copyOf(CopyNode::Side from, CopyNode::Side to, uint64_t bytes)
{
    from.pitch = to.pitch = bytes;
    from.height = to.height = 1;
    return {from, to, bytes, 1, 1};
}

CopyNode::Side onHost(void const* address)
{
    CopyNode::Side side{};
    side.type = CopyNode::kHOST;
    side.host = address;
    return side;
}

CopyNode::Side onDevice(uint64_t address)
{
    CopyNode::Side side{};
    side.type = CopyNode::kDEVICE;
    side.device = address;
    return side;
}

void* pointer(uint64_t address)
{
    return reinterpret_cast<void*>(address);
}

} // namespace

std::string Context::take(int32_t device)
{
    if (Status const s = driver().cuInit(0))
    {
        return failure("cuInit", s);
    }
    if (device < 0)
    {
        Status const s = driver().cuCtxGetCurrent(&mContext);
        return s ? failure("cuCtxGetCurrent", s)
            : mContext ? std::string{}
                       : "this thread has no CUDA context; accepted is one that is current (cudaSetDevice makes one)";
    }
    if (Status const s = driver().cuDevicePrimaryCtxRetain(&mContext, device))
    {
        return failure("cuDevicePrimaryCtxRetain", s);
    }
    mRetained = device;
    return {};
}

Context::~Context()
{
    if (mRetained >= 0)
    {
        driver().cuDevicePrimaryCtxRelease(mRetained);
    }
}

Context::Current::Current(Context const& context)
{
    if (context.get())
    {
        driver().cuCtxGetCurrent(&mBefore);
        mChanged = mBefore != context.get();
    }
    if (mChanged)
    {
        driver().cuCtxSetCurrent(context.get());
    }
}

Context::Current::~Current()
{
    if (mChanged)
    {
        driver().cuCtxSetCurrent(mBefore);
    }
}

std::string Buffers::upload(std::vector<uint64_t> const& bytes, void const* const* weights)
{
    std::vector<uint64_t> const offsets = offsetsOf(bytes);
    if (Status const s = bytes.empty() ? 0 : driver().cuMemAlloc(&mWeights, offsets.back()))
    {
        return failure("cuMemAlloc", s) + " for weights of " + std::to_string(offsets.back()) + " bytes";
    }
    for (size_t i = 0; i < bytes.size(); ++i)
    {
        mOwnWeights.push_back(pointer(mWeights + offsets[i]));
        if (Status const s = driver().cuMemcpyHtoD(mWeights + offsets[i], weights[i], bytes[i]))
        {
            return failure("cuMemcpyHtoD", s);
        }
    }
    return {};
}

std::string Buffers::prepare(Plan const& plan, void const* const* hostWeights)
{
    if (!isForHost)
    {
        return {};
    }
    if (std::string error = upload(plan.weights, hostWeights); !error.empty())
    {
        return error;
    }
    Sizes const sizes = sizesOf(plan, plan.buckets.size(), true);
    mPinnedInputBytes = sizes.inputs;
    void* pinned = nullptr;
    if (Status const s = driver().cuMemHostAlloc(&pinned, std::max<uint64_t>(sizes.inputs + sizes.outputs, 1), 0))
    {
        return failure("cuMemHostAlloc", s);
    }
    mPinned = static_cast<char*>(pinned);
    std::memset(mPinned, 0, sizes.inputs); // graphs copy whole places, and calls may fill less
    constexpr uint32_t kNonBlocking = 1;
    Status const s = driver().cuStreamCreate(&stream, kNonBlocking);
    return s ? failure("cuStreamCreate", s) : std::string{};
}

Status Buffers::allocate(Plan const& plan, size_t count)
{
    Sizes const sizes = sizesOf(plan, count, isForHost);
    uint64_t const bytes = sizes.workspace + sizes.inputs + sizes.outputs;
    Status const s = bytes ? driver().cuMemAlloc(&workspace, bytes) : 0;
    mInputs = workspace + sizes.workspace;
    mOutputs = mInputs + sizes.inputs;
    return s;
}

void Buffers::release()
{
    if (workspace)
    {
        driver().cuMemFree(workspace);
    }
    workspace = 0;
}

void Buffers::free()
{
    if (stream)
    {
        driver().cuStreamDestroy(stream);
    }
    if (mPinned)
    {
        driver().cuMemFreeHost(mPinned);
    }
    release();
    if (mWeights)
    {
        driver().cuMemFree(mWeights);
    }
}

adtp_call Buffers::own(Bucket const& bucket, adtp_call const& call)
{
    mOwnInputs.clear();
    mOwnOutputs.clear();
    std::vector<uint64_t> const inputs = offsetsOf(bucket.inputs), outputs = offsetsOf(bucket.outputs);
    for (size_t i = 0; i < bucket.inputs.size(); ++i)
    {
        mOwnInputs.push_back(pointer(mInputs + inputs[i]));
    }
    for (size_t i = 0; i < bucket.outputs.size(); ++i)
    {
        mOwnOutputs.push_back(pointer(mOutputs + outputs[i]));
    }
    return {call.texts, call.length, call.tokens, mOwnWeights.data(), mOwnInputs.data(), mOwnOutputs.data()};
}

CopyNode Buffers::inputCopy(Bucket const& bucket) const
{
    return copyOf(onHost(mPinned), onDevice(mInputs), isForHost ? offsetsOf(bucket.inputs).back() : 0);
}

CopyNode Buffers::outputCopy(Bucket const& bucket) const
{
    return copyOf(onDevice(mOutputs), onHost(mPinned + mPinnedInputBytes), isForHost ? offsetsOf(bucket.outputs).back() : 0);
}

void Buffers::stage(Bucket const& bucket, void const* const* inputs, uint64_t const* bytes) const
{
    std::vector<uint64_t> const offsets = offsetsOf(bucket.inputs);
    for (size_t i = 0; i < bucket.inputs.size(); ++i)
    {
        if (bytes[i])
        {
            std::memcpy(mPinned + offsets[i], inputs[i], bytes[i]);
        }
    }
}

void Buffers::collect(Bucket const& bucket, void* const* outputs, uint64_t const* bytes) const
{
    std::vector<uint64_t> const offsets = offsetsOf(bucket.outputs);
    for (size_t i = 0; i < bucket.outputs.size(); ++i)
    {
        if (bytes[i])
        {
            std::memcpy(outputs[i], mPinned + mPinnedInputBytes + offsets[i], bytes[i]);
        }
    }
}

std::string Buffers::check(char const* name, std::vector<uint64_t> const& places, uint64_t const* bytes)
{
    for (size_t i = 0; i < places.size(); ++i)
    {
        if (bytes[i] > places[i])
        {
            return std::string(name) + " " + std::to_string(i) + " has " + std::to_string(bytes[i]) + " bytes; accepted are at most "
                + std::to_string(places[i]);
        }
    }
    return {};
}

} // namespace adtp
