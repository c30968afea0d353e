// One bucket of a plan as a CUDA graph.
#pragma once

#include "memory.h"
#include "plan.h"
#include "runner.h"

#include <map>
#include <string>
#include <vector>

namespace adtp
{

// A kernel of the plan, loaded.
struct Ready
{
    uint32_t threads;
    uint32_t sharedBytes;
    void* library;
    void* function;
};

// Load a kernel into the current context, which is of this device. Empty, or what went wrong.
std::string load(adtp_kernel const& kernel, Device const& device, Ready& ready);

// A launch, and the arguments that its node has.
struct Step
{
    Launch const* launch;
    Ready const* kernel;
    bool isOfCall; // whether a call decides an argument or the number of programs
    uint32_t programs;
    std::vector<uint64_t> values; // of each argument, in the lower bytes
    void* node;
};

class Replay
{
public:
    explicit Replay(Bucket const& bucket)
        : mBucket(&bucket)
    {
    }
    Bucket const& bucket() const
    {
        return *mBucket;
    }

    // Build the graph: the inputs' copy, the launches and the outputs' copy, one after the other. Make it ready to launch, and upload
    // it on the legacy stream. Empty, or what went wrong.
    std::string build(std::map<std::string, Ready> const& kernels, Plan const& plan, Buffers& buffers, Context const& context);

    // Whether building failed for lack of memory.
    bool isTooMuch() const
    {
        return mIsTooMuch;
    }

    // Give those nodes new parameters that have others for this call than for the last one.
    std::string update(adtp_call const& call, uint64_t workspace);
    std::string launch(void* stream);

    // Launch the kernels one by one.
    std::string launchEach(adtp_call const& call, uint64_t workspace, void* stream) const;

    void free();

private:
    std::string addNodes(Buffers const& buffers, Context const& context);
    std::string instantiate();
    std::string failed(char const* call, Status status);
    std::string addCopy(CopyNode const& node, Context const& context, void*& last);

    Bucket const* mBucket;
    std::vector<Step> mSteps;
    void* mGraph = nullptr;
    void* mExec = nullptr;
    bool mIsTooMuch = false;
};

} // namespace adtp
