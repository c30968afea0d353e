#include "replay.h"

#include <algorithm>
#include <utility>

namespace adtp
{
namespace
{

constexpr size_t kScratch = 2; // pointers to Triton's scratch memory, which kernels get after their arguments: none

bool isOfCall(Launch const& launch, bool areBuffersOwn)
{
    auto const varies = [=](Argument const& argument) {
        switch (argument.source)
        {
        case Source::kWORKSPACE:
        case Source::kCONSTANT: return false;
        case Source::kWEIGHT:
        case Source::kINPUT:
        case Source::kOUTPUT: return !areBuffersOwn;
        default: return true;
        }
    };
    return launch.programsPerText || std::any_of(launch.arguments.begin(), launch.arguments.end(), varies);
}

uint64_t addressOf(void const* pointer)
{
    return reinterpret_cast<uint64_t>(pointer);
}

uint64_t valueOf(Argument const& argument, adtp_call const& call, uint64_t workspace)
{
    switch (argument.source)
    {
    case Source::kWORKSPACE: return workspace + argument.value;
    case Source::kWEIGHT: return addressOf(call.weights[argument.index]) + argument.value;
    case Source::kINPUT: return addressOf(call.inputs[argument.index]) + argument.value;
    case Source::kOUTPUT: return addressOf(call.outputs[argument.index]) + argument.value;
    case Source::kCONSTANT: return argument.value;
    case Source::kTEXTS: return static_cast<uint64_t>(call.texts);
    case Source::kLENGTH: return static_cast<uint64_t>(call.length);
    case Source::kTOKENS: return static_cast<uint64_t>(call.tokens);
    }
    return 0;
}

std::vector<uint64_t> valuesOf(Launch const& launch, adtp_call const& call, uint64_t workspace)
{
    std::vector<uint64_t> values;
    values.reserve(launch.arguments.size());
    for (Argument const& argument : launch.arguments)
    {
        values.push_back(valueOf(argument, call, workspace));
    }
    return values;
}

uint32_t programsOf(Launch const& launch, int64_t texts)
{
    return static_cast<uint32_t>(launch.programs + launch.programsPerText * texts);
}

// Addresses of the values, as the driver takes them; of a value of 4 bytes these are the lower ones.
std::vector<void*> parametersOf(std::vector<uint64_t>& values)
{
    static_assert(sizeof(void*) == sizeof(uint64_t), "pointers of 64 bits");
    static uint64_t none = 0;
    std::vector<void*> parameters;
    parameters.reserve(values.size() + kScratch);
    for (uint64_t& value : values)
    {
        parameters.push_back(&value);
    }
    parameters.insert(parameters.end(), kScratch, &none);
    return parameters;
}

KernelNode nodeOf(Ready const& kernel, uint32_t programs, std::vector<void*>& parameters)
{
    return {kernel.function, programs, 1, 1, kernel.threads, 1, 1, kernel.sharedBytes, parameters.data(), nullptr, nullptr, nullptr};
}

} // namespace

std::string load(adtp_kernel const& kernel, Device const& device, Ready& ready)
{
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
    std::string error = load(*binary, kernel.symbol, device.number, loaded);
    ready = {kernel.threads, binary->sharedBytes, loaded.library, nullptr};
    return error.empty() ? bringIn(loaded.kernel, ready.function) : error;
}

std::string Replay::build(std::map<std::string, Ready> const& kernels, Plan const& plan, Buffers& buffers, Context const& context)
{
    std::vector<void*> nowhere(std::max({plan.weights.size(), mBucket->inputs.size(), mBucket->outputs.size()}));
    adtp_call const none{mBucket->texts, 0, mBucket->tokens, nowhere.data(), nowhere.data(), nowhere.data()};
    adtp_call const call = buffers.isForHost ? buffers.own(*mBucket, none) : none;
    for (Launch const& launch : mBucket->launches)
    {
        mSteps.push_back({&launch, &kernels.at(launch.variant), isOfCall(launch, buffers.isForHost),
            programsOf(launch, call.texts), valuesOf(launch, call, buffers.workspace), nullptr});
    }
    std::string const error = addNodes(buffers, context);
    return error.empty() ? instantiate() : error;
}

std::string Replay::failed(char const* call, Status status)
{
    mIsTooMuch = status == kOutOfMemory;
    return failure(call, status);
}

std::string Replay::addCopy(CopyNode const& node, Context const& context, void*& last)
{
    if (node.width == 0)
    {
        return {};
    }
    void* added = nullptr;
    Status const s = driver().cuGraphAddMemcpyNode(&added, mGraph, &last, last != nullptr, &node, context.get());
    last = added;
    return s ? failed("cuGraphAddMemcpyNode", s) : std::string{};
}

std::string Replay::addNodes(Buffers const& buffers, Context const& context)
{
    if (Status const s = driver().cuGraphCreate(&mGraph, 0))
    {
        return failed("cuGraphCreate", s);
    }
    void* last = nullptr;
    if (std::string error = addCopy(buffers.inputCopy(*mBucket), context, last); !error.empty())
    {
        return error;
    }
    for (Step& step : mSteps)
    {
        std::vector<void*> parameters = parametersOf(step.values);
        KernelNode const node = nodeOf(*step.kernel, step.programs, parameters);
        if (Status const s = driver().cuGraphAddKernelNode(&step.node, mGraph, &last, last != nullptr, &node))
        {
            return nameOf(*step.launch) + ": " + failed("cuGraphAddKernelNode", s);
        }
        last = step.node;
    }
    return addCopy(buffers.outputCopy(*mBucket), context, last);
}

std::string Replay::instantiate()
{
    if (Status const s = driver().cuGraphInstantiate(&mExec, mGraph, 0))
    {
        return failed("cuGraphInstantiate", s);
    }
    Status const s = driver().cuGraphUpload(mExec, nullptr); // else the first launch does
    return s ? failed("cuGraphUpload", s) : std::string{};
}

std::string Replay::update(adtp_call const& call, uint64_t workspace)
{
    for (Step& step : mSteps)
    {
        if (!step.isOfCall)
        {
            continue;
        }
        uint32_t const programs = programsOf(*step.launch, call.texts);
        bool changed = std::exchange(step.programs, 0) != programs; // 0 until the node has these parameters: else they are set again
        for (size_t i = 0; i < step.values.size(); ++i)
        {
            uint64_t const value = valueOf(step.launch->arguments[i], call, workspace);
            changed = std::exchange(step.values[i], value) != value || changed;
        }
        if (!changed)
        {
            step.programs = programs;
            continue;
        }
        std::vector<void*> parameters = parametersOf(step.values);
        KernelNode const node = nodeOf(*step.kernel, programs, parameters);
        if (Status const s = driver().cuGraphExecKernelNodeSetParams(mExec, step.node, &node))
        {
            return nameOf(*step.launch) + ": " + failure("cuGraphExecKernelNodeSetParams", s);
        }
        step.programs = programs;
    }
    return {};
}

std::string Replay::launch(void* stream)
{
    Status const s = driver().cuGraphLaunch(mExec, stream);
    return s ? failure("cuGraphLaunch", s) : std::string{};
}

std::string Replay::launchEach(adtp_call const& call, uint64_t workspace, void* stream) const
{
    for (Step const& step : mSteps)
    {
        std::vector<uint64_t> values = valuesOf(*step.launch, call, workspace);
        std::vector<void*> parameters = parametersOf(values);
        Ready const& kernel = *step.kernel;
        if (Status const s = driver().cuLaunchKernel(kernel.function, programsOf(*step.launch, call.texts), 1, 1, kernel.threads,
                1, 1, kernel.sharedBytes, stream, parameters.data(), nullptr))
        {
            return nameOf(*step.launch) + ": " + failure("cuLaunchKernel", s);
        }
    }
    return {};
}

void Replay::free()
{
    if (mExec)
    {
        driver().cuGraphExecDestroy(mExec);
    }
    if (mGraph)
    {
        driver().cuGraphDestroy(mGraph); // not before: its nodes name those of what was instantiated
    }
}

} // namespace adtp
