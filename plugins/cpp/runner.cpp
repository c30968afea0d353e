#include "runner.h"

#include "driver.h"
#include "memory.h"
#include "plan.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace adtp
{
namespace
{

constexpr size_t kScratch = 2; // pointers to Triton's scratch memory, which kernels get after their arguments: none

// A kernel of the plan, loaded.
struct Ready
{
    uint32_t threads;
    uint32_t sharedBytes;
    void* library;
    void* function;
};

// A launch with the arguments that its node has.
struct Step
{
    Launch const* launch;
    Ready const* kernel;
    bool isOfCall; // whether a call decides an argument or the number of programs
    uint32_t programs;
    std::vector<uint64_t> values; // of each argument, in the lower bytes
    void* node;
};

struct Replay
{
    Bucket const* bucket;
    std::vector<Step> steps;
    void* graph;
    void* exec;
};

bool isOfCall(Launch const& launch, bool areBuffersOwn)
{
    auto const varies = [=](Argument const& argument) {
        bool const isAddress = argument.source == Source::kWEIGHT || argument.source == Source::kINPUT || argument.source == Source::kOUTPUT;
        return isAddress ? !areBuffersOwn : argument.source != Source::kWORKSPACE && argument.source != Source::kCONSTANT;
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

// Addresses of the values, as the driver takes them; the values may be of 4 bytes, which are the lower ones.
std::vector<void*> parametersOf(std::vector<uint64_t>& values)
{
    static_assert(sizeof(void*) == sizeof(uint64_t), "pointers of 64 bits");
    std::vector<void*> parameters;
    for (uint64_t& value : values)
    {
        parameters.push_back(&value);
    }
    static uint64_t none = 0;
    parameters.insert(parameters.end(), kScratch, &none);
    return parameters;
}

KernelNode nodeOf(Step const& step, uint32_t programs, std::vector<void*>& parameters)
{
    Ready const& kernel = *step.kernel;
    return {kernel.function, programs, 1, 1, kernel.threads, 1, 1, kernel.sharedBytes, parameters.data(), nullptr, nullptr, nullptr};
}

std::string nameOf(Launch const& launch)
{
    return launch.variant + (launch.note.empty() ? "" : " (" + launch.note + ")");
}

} // namespace
} // namespace adtp

using namespace adtp;

struct adtp_runner
{
    Plan plan;
    Context context;
    Buffers buffers;
    std::map<std::string, Ready> kernels;
    std::vector<Replay> replays; // smaller ones first
    std::mutex mutex; // of what follows, and of the nodes
    void* done = nullptr; // an event: the last call's end
    std::string lost; // why nothing works any more

    ~adtp_runner();
    std::string make(adtp_kernel const* given, int32_t count, void const* const* weights);
    std::string enqueue(adtp_call const& call, void* stream);
    std::string run(adtp_call const& call, uint64_t const* inputBytes, uint64_t const* outputBytes);

private:
    std::string loadKernels(adtp_kernel const* given, int32_t count);
    std::string loadKernel(adtp_kernel const& kernel, Device const& device);
    std::string build(Replay& replay);
    std::string addNodes(Replay& replay);
    std::string find(adtp_call const& call, Replay*& found);
    std::string checkAddresses(adtp_call const& call) const;
    std::string update(Replay& replay, adtp_call const& call);
    std::string replay(Replay& one, adtp_call const& call, void* stream);
    std::string launchEach(Replay const& replay, adtp_call const& call, void* stream) const;
    std::string failed(char const* call, Status status);
};

// What a call of the driver says; remembered where the context is lost with it (cuda.h: errors that a process must end for).
std::string adtp_runner::failed(char const* call, Status status)
{
    std::string const what = failure(call, status);
    bool const isLost = status == 214 || status == 220 || (status >= 700 && status < 800 && status != 701);
    if (isLost)
    {
        lost = what + ": the GPU is lost; load again";
    }
    return isLost ? lost : what;
}

std::string adtp_runner::loadKernel(adtp_kernel const& kernel, Device const& device)
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
    Ready& ready = kernels[kernel.variant];
    ready = {kernel.threads, binary->sharedBytes, loaded.library, nullptr};
    return error.empty() ? bringIn(loaded.kernel, ready.function) : error;
}

std::string adtp_runner::loadKernels(adtp_kernel const* given, int32_t count)
{
    Device device{};
    if (std::string error = ask(device); !error.empty())
    {
        return error;
    }
    for (Bucket const& bucket : plan.buckets)
    {
        for (Launch const& launch : bucket.launches)
        {
            adtp_kernel const* const kernel = std::find_if(
                given, given + count, [&](adtp_kernel const& one) { return launch.variant == one.variant; });
            if (kernel == given + count)
            {
                return "the plan launches " + nameOf(launch) + ", and there is no such kernel";
            }
            std::string types;
            for (Argument const& argument : launch.arguments)
            {
                types += argument.type;
            }
            if (types != kernel->arguments)
            {
                return "the plan launches " + nameOf(launch) + " with arguments " + types + "; accepted are " + kernel->arguments
                    + " (p pointer, i int32, l int64, f float32)";
            }
            if (std::string error = kernels.count(launch.variant) ? "" : loadKernel(*kernel, device); !error.empty())
            {
                return kernel->variant + (": " + error);
            }
        }
    }
    return {};
}

std::string adtp_runner::make(adtp_kernel const* given, int32_t count, void const* const* weights)
{
    if (std::string error = loadKernels(given, count); !error.empty())
    {
        return error;
    }
    if (Status const s = driver().cuEventCreate(&done, 2)) // CU_EVENT_DISABLE_TIMING
    {
        return failure("cuEventCreate", s);
    }
    if (std::string error = buffers.allocate(plan, weights); !error.empty())
    {
        return error;
    }
    replays.reserve(buffers.buckets);
    for (size_t i = 0; i < buffers.buckets; ++i)
    {
        replays.push_back({&plan.buckets[i], {}, nullptr, nullptr});
        std::string const error = build(replays.back());
        if (!error.empty() && (i == 0 || buffers.buckets > i))
        {
            return error;
        }
    }
    return {};
}

// Where the memory for a graph is missing, its bucket and all larger ones are left out, but for the smallest.
std::string adtp_runner::build(Replay& replay)
{
    Bucket const& bucket = *replay.bucket;
    std::vector<void*> const nothing(std::max({plan.weights.size(), bucket.inputs.size(), bucket.outputs.size()}));
    adtp_call const none{bucket.texts, 0, bucket.tokens, nothing.data(), nothing.data(), nothing.data()};
    adtp_call const call = buffers.isForHost ? buffers.own(none) : none;
    for (Launch const& launch : bucket.launches)
    {
        replay.steps.push_back({&launch, &kernels.at(launch.variant), isOfCall(launch, buffers.isForHost),
            programsOf(launch, call.texts), valuesOf(launch, call, buffers.workspace), nullptr});
    }
    if (std::string error = addNodes(replay); !error.empty())
    {
        return error;
    }
    Status const status = driver().cuGraphInstantiate(&replay.exec, replay.graph, 0);
    if (status == kOutOfMemory && replays.size() > 1)
    {
        driver().cuGraphDestroy(replay.graph);
        replays.pop_back();
        buffers.keep(plan, replays.size());
        return "left out";
    }
    return status ? failure("cuGraphInstantiate", status) : std::string{};
}

// The inputs' copy, the launches and the outputs' copy, one after the other.
std::string adtp_runner::addNodes(Replay& replay)
{
    if (Status const s = driver().cuGraphCreate(&replay.graph, 0))
    {
        return failure("cuGraphCreate", s);
    }
    void* last = nullptr;
    auto const copy = [&](CopyNode const& node) -> std::string {
        if (node.width == 0)
        {
            return {};
        }
        void* added = nullptr;
        if (Status const s = driver().cuGraphAddMemcpyNode(&added, replay.graph, &last, last != nullptr, &node, context.get()))
        {
            return failure("cuGraphAddMemcpyNode", s);
        }
        last = added;
        return {};
    };
    if (std::string error = copy(buffers.inputCopy(*replay.bucket)); !error.empty())
    {
        return error;
    }
    for (Step& step : replay.steps)
    {
        std::vector<void*> parameters = parametersOf(step.values);
        KernelNode const node = nodeOf(step, step.programs, parameters);
        if (Status const s = driver().cuGraphAddKernelNode(&step.node, replay.graph, &last, last != nullptr, &node))
        {
            return nameOf(*step.launch) + ": " + failure("cuGraphAddKernelNode", s);
        }
        last = step.node;
    }
    return copy(buffers.outputCopy(*replay.bucket));
}

// The smallest bucket that a call fits.
std::string adtp_runner::find(adtp_call const& call, Replay*& found)
{
    constexpr int64_t most = INT32_MAX;
    if (call.texts < 1 || call.tokens < 1 || call.length < 0 || call.texts > most || call.tokens > most || call.length > most)
    {
        return "got " + std::to_string(call.texts) + " texts, " + std::to_string(call.tokens) + " tokens, length "
            + std::to_string(call.length) + "; accepted are at least 1 text and 1 token";
    }
    auto const place = std::find_if(replays.begin(), replays.end(), [&](Replay const& replay) {
        return call.tokens <= replay.bucket->tokens && call.texts <= replay.bucket->texts;
    });
    if (place == replays.end())
    {
        Bucket const& largest = *replays.back().bucket;
        return "got " + std::to_string(call.tokens) + " tokens of " + std::to_string(call.texts) + " texts; accepted are at most "
            + std::to_string(largest.tokens) + " tokens of " + std::to_string(largest.texts) + " texts: split the call";
    }
    found = &*place;
    return {};
}

std::string adtp_runner::checkAddresses(adtp_call const& call) const
{
    Bucket const& bucket = plan.buckets.front();
    auto const wrong = [](char const* name, void const* const* addresses, size_t count) -> std::string {
        for (size_t i = 0; i < count; ++i)
        {
            if (!addresses[i] || addressOf(addresses[i]) % 16)
            {
                return std::string(name) + " " + std::to_string(i) + " is at address " + std::to_string(addressOf(addresses[i]))
                    + "; accepted are multiples of 16 above 0";
            }
        }
        return {};
    };
    std::string error = wrong("weight", call.weights, plan.weights.size());
    error = error.empty() ? wrong("input", call.inputs, bucket.inputs.size()) : error;
    return error.empty() ? wrong("output", call.outputs, bucket.outputs.size()) : error;
}

// Give those nodes new parameters that have others for this call than for the last one of their bucket.
std::string adtp_runner::update(Replay& replay, adtp_call const& call)
{
    for (Step& step : replay.steps)
    {
        if (!step.isOfCall)
        {
            continue;
        }
        uint32_t const programs = programsOf(*step.launch, call.texts);
        std::vector<uint64_t> values = valuesOf(*step.launch, call, buffers.workspace);
        if (programs == step.programs && values == step.values)
        {
            continue;
        }
        std::vector<void*> parameters = parametersOf(values);
        KernelNode const node = nodeOf(step, programs, parameters);
        if (Status const s = driver().cuGraphExecKernelNodeSetParams(replay.exec, step.node, &node))
        {
            return nameOf(*step.launch) + ": " + failed("cuGraphExecKernelNodeSetParams", s);
        }
        step.programs = programs;
        step.values = std::move(values);
    }
    return {};
}

std::string adtp_runner::replay(Replay& one, adtp_call const& call, void* stream)
{
    if (std::string error = update(one, call); !error.empty())
    {
        return error;
    }
    if (Status const s = driver().cuStreamWaitEvent(stream, done, 0)) // all calls use one workspace
    {
        return failed("cuStreamWaitEvent", s);
    }
    if (Status const s = driver().cuGraphLaunch(one.exec, stream))
    {
        return failed("cuGraphLaunch", s);
    }
    Status const s = driver().cuEventRecord(done, stream);
    return s ? failed("cuEventRecord", s) : std::string{};
}

std::string adtp_runner::launchEach(Replay const& replay, adtp_call const& call, void* stream) const
{
    for (Step const& step : replay.steps)
    {
        std::vector<uint64_t> values = valuesOf(*step.launch, call, buffers.workspace);
        std::vector<void*> parameters = parametersOf(values);
        if (Status const s = driver().cuLaunchKernel(step.kernel->function, programsOf(*step.launch, call.texts), 1, 1,
                step.kernel->threads, 1, 1, step.kernel->sharedBytes, stream, parameters.data(), nullptr))
        {
            return nameOf(*step.launch) + ": " + failure("cuLaunchKernel", s);
        }
    }
    return {};
}

std::string adtp_runner::enqueue(adtp_call const& call, void* stream)
{
    Replay* found = nullptr;
    std::string error = find(call, found);
    error = error.empty() ? checkAddresses(call) : error;
    if (!error.empty() || buffers.isForHost)
    {
        return error.empty() ? "the runner was made for host memory" : error;
    }
    Context::Current const current(context);
    std::lock_guard<std::mutex> const lock(mutex);
    if (!lost.empty())
    {
        return lost;
    }
    int32_t capturing = 0;
    if (Status const s = driver().cuStreamIsCapturing(stream, &capturing))
    {
        return failed("cuStreamIsCapturing", s);
    }
    return capturing ? launchEach(*found, call, stream) : replay(*found, call, stream);
}

std::string adtp_runner::run(adtp_call const& call, uint64_t const* inputBytes, uint64_t const* outputBytes)
{
    Replay* found = nullptr;
    if (std::string error = find(call, found); !error.empty())
    {
        return error;
    }
    Bucket const& bucket = *found->bucket;
    std::string error = buffers.isForHost ? "" : "the runner was made for a device's memory";
    error = error.empty() ? Buffers::check("input", bucket.inputs, inputBytes) : error;
    error = error.empty() ? Buffers::check("output", bucket.outputs, outputBytes) : error;
    if (!error.empty())
    {
        return error;
    }
    Context::Current const current(context);
    std::lock_guard<std::mutex> const lock(mutex);
    if (!lost.empty())
    {
        return lost;
    }
    buffers.stage(bucket, call.inputs, inputBytes);
    if (error = replay(*found, buffers.own(call), buffers.stream); !error.empty())
    {
        return error;
    }
    if (Status const s = driver().cuEventSynchronize(done))
    {
        return failed("cuEventSynchronize", s);
    }
    buffers.collect(bucket, call.outputs, outputBytes);
    return {};
}

adtp_runner::~adtp_runner()
{
    Context::Current const current(context);
    if (done)
    {
        driver().cuEventSynchronize(done);
        driver().cuEventDestroy(done);
    }
    for (Replay const& replay : replays)
    {
        if (replay.exec)
        {
            driver().cuGraphExecDestroy(replay.exec);
        }
        driver().cuGraphDestroy(replay.graph);
    }
    buffers.free();
    for (auto const& [name, kernel] : kernels)
    {
        driver().cuLibraryUnload(kernel.library);
    }
}

namespace
{

thread_local std::string lastError;

int32_t told(std::string const& error)
{
    lastError = error;
    return error.empty() ? 0 : 1;
}

// device: whose primary context to take; the current context where it is below 0.
adtp_runner* create(char const* plan, adtp_kernel const* kernels, int32_t count, void const* const* weights, int32_t device)
{
    auto runner = std::make_unique<adtp_runner>();
    std::string error = driver().missing;
    error = error.empty() ? parse(plan, runner->plan) : error;
    error = error.empty() ? runner->context.take(device) : error;
    if (error.empty())
    {
        Context::Current const current(runner->context);
        runner->buffers.isForHost = device >= 0;
        error = runner->make(kernels, count, weights);
    }
    return told(error) ? nullptr : runner.release();
}

} // namespace

adtp_runner* adtp_runner_create(char const* plan, adtp_kernel const* kernels, int32_t num_kernels)
{
    return create(plan, kernels, num_kernels, nullptr, -1);
}

adtp_runner* adtp_runner_create_for_host(
    char const* plan, adtp_kernel const* kernels, int32_t num_kernels, void const* const* weights, int32_t device)
{
    return create(plan, kernels, num_kernels, weights, device < 0 ? 0 : device);
}

void adtp_runner_destroy(adtp_runner* runner)
{
    delete runner;
}

int32_t adtp_runner_enqueue(adtp_runner* runner, adtp_call const* call, void* stream)
{
    return told(runner->enqueue(*call, stream));
}

int32_t adtp_runner_run(adtp_runner* runner, adtp_call const* call, uint64_t const* input_bytes, uint64_t const* output_bytes)
{
    return told(runner->run(*call, input_bytes, output_bytes));
}

void adtp_runner_limits(adtp_runner const* runner, int64_t* tokens, int64_t* texts)
{
    Bucket const& largest = *runner->replays.back().bucket;
    *tokens = largest.tokens;
    *texts = largest.texts;
}

char const* adtp_runner_warning(adtp_runner const* runner)
{
    return runner->buffers.warning.c_str();
}

char const* adtp_runner_error(void)
{
    return lastError.c_str();
}
