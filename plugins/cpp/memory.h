// The context that a runner lives in, and the memory that it has.
#pragma once

#include "driver.h"
#include "plan.h"
#include "runner.h"

#include <string>
#include <vector>

namespace adtp
{

class Context
{
public:
    Context() = default;
    Context(Context const&) = delete;
    Context& operator=(Context const&) = delete;
    ~Context();

    // The current one where `device` is below 0, else that device's primary one, for as long as this lives. Empty, or why not.
    std::string take(int32_t device);
    void* get() const
    {
        return mContext;
    }

    // Makes the context current for this thread while it lives.
    class Current
    {
    public:
        explicit Current(Context const& context);
        Current(Current const&) = delete;
        Current& operator=(Current const&) = delete;
        ~Current();

    private:
        void* mBefore = nullptr;
        bool mChanged = false;
    };

private:
    void* mContext = nullptr;
    int32_t mRetained = -1; // device whose primary context is retained
};

// A workspace for all buckets. Of a runner for host memory, the weights as well, and for inputs and outputs a place on the device
// and one in pinned memory, from which and to which a graph copies. Its streams and addresses stay while the runner does.
struct Buffers
{
    bool isForHost = false;
    uint64_t workspace = 0;
    void* stream = nullptr;

    // Of a runner for host memory: a stream, pinned memory, and the weights on the device. Empty, or what went wrong.
    std::string prepare(Plan const& plan, void const* const* hostWeights);

    // What the first `count` buckets need on the device. And give it back.
    Status allocate(Plan const& plan, size_t count);
    void release();
    void free(); // all

    // The same call on the runner's own memory.
    adtp_call own(Bucket const& bucket, adtp_call const& call);

    // Copies of all inputs and of all outputs; of width 0 where there are none, or where the runner is for a device's memory.
    CopyNode inputCopy(Bucket const& bucket) const;
    CopyNode outputCopy(Bucket const& bucket) const;

    // Between the caller's memory and pinned memory.
    void stage(Bucket const& bucket, void const* const* inputs, uint64_t const* bytes) const;
    void collect(Bucket const& bucket, void* const* outputs, uint64_t const* bytes) const;

    // Empty, or which of a call's arrays is larger than its place.
    static std::string check(char const* name, std::vector<uint64_t> const& places, uint64_t const* bytes);

private:
    uint64_t mWeights = 0;
    uint64_t mInputs = 0; // on the device, behind the workspace
    uint64_t mOutputs = 0;
    char* mPinned = nullptr; // inputs, then outputs
    uint64_t mPinnedInputBytes = 0;
    std::vector<void const*> mOwnWeights;
    std::vector<void const*> mOwnInputs; // of the last call
    std::vector<void*> mOwnOutputs;

    std::string upload(std::vector<uint64_t> const& bytes, void const* const* weights);
};

} // namespace adtp
