#include "runner.h"

#include "driver.h"
#include "memory.h"
#include "plan.h"
#include "replay.h"

#include <algorithm>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

using namespace adtp;

struct adtp_runner
{
    Plan plan;
    Context context;
    Buffers buffers;
    std::map<std::string, Ready> kernels;
    std::vector<Replay> replays; // smaller ones first
    std::mutex mutex; // threads take turns at the graphs, the workspace and the event
    void* done = nullptr; // an event: the end of the last call, and before the first one of what was uploaded
    std::string warning;

    ~adtp_runner();
    std::string make(adtp_kernel const* given, int32_t count, void const* const* weights);

    // Find the bucket of a call on a device's memory, or on the host's. Empty, or what is wrong with the call.
    std::string find(adtp_call const& call, Replay*& found);
    std::string find(adtp_call const& call, uint64_t const* inputBytes, uint64_t const* outputBytes, Replay*& found);

    std::string enqueue(Replay& found, adtp_call const& call, void* stream);
    std::string run(Replay& found, adtp_call const& call, uint64_t const* inputBytes, uint64_t const* outputBytes);

private:
    std::string loadKernels(adtp_kernel const* given, int32_t count);
    std::string build(size_t count, bool& isTooMuch);
    void warnOf(size_t count);
    std::string record(void* stream);
    void freeReplays();
    std::string findBucket(adtp_call const& call, Replay*& found);
    std::string checkAddresses(adtp_call const& call) const;
    std::string replay(Replay& one, adtp_call const& call, void* stream);
};

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
            if (std::string error = match(launch, kernel->arguments); !error.empty())
            {
                return error;
            }
            if (std::string error = kernels.count(launch.variant) ? "" : load(*kernel, device, kernels[launch.variant]); !error.empty())
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
    if (std::string error = buffers.prepare(plan, weights); !error.empty())
    {
        return error;
    }
    for (size_t count = plan.buckets.size();; --count)
    {
        bool isTooMuch = false;
        std::string const error = build(count, isTooMuch);
        if (!error.empty() && isTooMuch && count > 1)
        {
            freeReplays();
            continue;
        }
        warnOf(count);
        return error.empty() ? record(nullptr) : error;
    }
}

// A call's end, or that of uploads, which take place on the legacy stream and may go on after the driver has returned: replays
// are on other streams, which do not wait for that one.
std::string adtp_runner::record(void* stream)
{
    Status const s = driver().cuEventRecord(done, stream);
    return s ? failure("cuEventRecord", s) : std::string{};
}

// The memory and the graphs of the first buckets.
std::string adtp_runner::build(size_t count, bool& isTooMuch)
{
    Status const status = buffers.allocate(plan, count);
    isTooMuch = status == kOutOfMemory;
    if (status)
    {
        return failure("cuMemAlloc", status) + " for a workspace of " + std::to_string(plan.buckets[count - 1].tokens) + " tokens";
    }
    replays.reserve(count);
    for (size_t i = 0; i < count; ++i)
    {
        Replay& one = replays.emplace_back(plan.buckets[i]);
        if (std::string error = one.build(kernels, plan, buffers, context); !error.empty())
        {
            isTooMuch = one.isTooMuch();
            return error;
        }
    }
    return {};
}

void adtp_runner::freeReplays()
{
    for (Replay& one : replays)
    {
        one.free();
    }
    replays.clear();
    buffers.release();
}

void adtp_runner::warnOf(size_t count)
{
    if (count < plan.buckets.size())
    {
        auto const sizes = [](Bucket const& bucket, char const* of) {
            return std::to_string(bucket.tokens) + of + std::to_string(bucket.texts);
        };
        warning = "the GPU's free memory is enough for " + sizes(plan.buckets[count - 1], " tokens of ")
            + " texts at a time, not for " + sizes(plan.buckets.back(), " of ") + ": larger calls run in parts";
    }
}

// The smallest bucket that a call fits.
std::string adtp_runner::findBucket(adtp_call const& call, Replay*& found)
{
    constexpr int64_t most = INT32_MAX;
    if (call.texts < 1 || call.tokens < 1 || call.length < 0 || call.texts > most || call.tokens > most || call.length > most)
    {
        return "got " + std::to_string(call.texts) + " texts, " + std::to_string(call.tokens) + " tokens, length "
            + std::to_string(call.length) + "; accepted are at least 1 text and 1 token";
    }
    auto const place = std::find_if(replays.begin(), replays.end(), [&](Replay const& replay) {
        return fits(replay.bucket(), call.tokens, call.texts);
    });
    if (place == replays.end())
    {
        Bucket const& largest = replays.back().bucket();
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
            if (!addresses[i] || reinterpret_cast<uint64_t>(addresses[i]) % 16)
            {
                return std::string(name) + " " + std::to_string(i) + " is at address "
                    + std::to_string(reinterpret_cast<uint64_t>(addresses[i])) + "; accepted are multiples of 16 above 0";
            }
        }
        return {};
    };
    std::string error = wrong("weight", call.weights, plan.weights.size());
    error = error.empty() ? wrong("input", call.inputs, bucket.inputs.size()) : error;
    return error.empty() ? wrong("output", call.outputs, bucket.outputs.size()) : error;
}

std::string adtp_runner::replay(Replay& one, adtp_call const& call, void* stream)
{
    if (std::string error = one.update(call, buffers.workspace); !error.empty())
    {
        return error;
    }
    if (Status const s = driver().cuStreamWaitEvent(stream, done, 0)) // all calls use one workspace
    {
        return failure("cuStreamWaitEvent", s);
    }
    if (std::string error = one.launch(stream); !error.empty())
    {
        return error;
    }
    std::string const error = record(stream);
    if (!error.empty())
    {
        driver().cuStreamSynchronize(stream); // the next call would not wait for this replay, which has the workspace
    }
    return error;
}

std::string adtp_runner::find(adtp_call const& call, Replay*& found)
{
    std::string const error = buffers.isForHost ? "the runner was made for host memory" : findBucket(call, found);
    return error.empty() ? checkAddresses(call) : error;
}

std::string adtp_runner::find(adtp_call const& call, uint64_t const* inputBytes, uint64_t const* outputBytes, Replay*& found)
{
    std::string error = buffers.isForHost ? findBucket(call, found) : "the runner was made for a device's memory";
    error = error.empty() ? Buffers::check("input", found->bucket().inputs, inputBytes) : error;
    return error.empty() ? Buffers::check("output", found->bucket().outputs, outputBytes) : error;
}

std::string adtp_runner::enqueue(Replay& found, adtp_call const& call, void* stream)
{
    Context::Current const current(context);
    std::lock_guard<std::mutex> const lock(mutex);
    int32_t capturing = 0;
    if (Status const s = driver().cuStreamIsCapturing(stream, &capturing))
    {
        return failure("cuStreamIsCapturing", s);
    }
    return capturing ? found.launchEach(call, buffers.workspace, stream) : replay(found, call, stream);
}

std::string adtp_runner::run(Replay& found, adtp_call const& call, uint64_t const* inputBytes, uint64_t const* outputBytes)
{
    Bucket const& bucket = found.bucket();
    Context::Current const current(context);
    std::lock_guard<std::mutex> const lock(mutex);
    buffers.stage(bucket, call.inputs, inputBytes);
    std::string error = replay(found, buffers.own(bucket, call), buffers.stream);
    Status const s = error.empty() ? driver().cuEventSynchronize(done) : 0;
    error = s ? failure("cuEventSynchronize", s) : error;
    if (!error.empty())
    {
        driver().cuStreamSynchronize(buffers.stream); // a replay may be under way, and the next call writes its inputs
        return error;
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
    freeReplays();
    buffers.free();
    for (auto const& [name, kernel] : kernels)
    {
        if (kernel.library)
        {
            driver().cuLibraryUnload(kernel.library);
        }
    }
}

namespace
{

thread_local std::string lastError;

constexpr int32_t kWRONG_CALL = 1;
constexpr int32_t kDRIVER_FAILED = 2;

int32_t told(std::string const& error, int32_t code)
{
    lastError = error;
    return error.empty() ? 0 : code;
}

// What `work` returns; nothing is thrown through C, where a plan, a call or their messages take more memory than there is.
template <typename Result, typename Work>
Result guarded(Result failed, Work const& work)
{
    try
    {
        return work();
    }
    catch (std::exception const&)
    {
        lastError = "out of memory"; // short enough to need none itself
        return failed;
    }
}

// device: whose primary context to take; the current context where it is below 0.
adtp_runner* make(char const* plan, adtp_kernel const* kernels, int32_t count, void const* const* weights, int32_t device)
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
    return told(error, kDRIVER_FAILED) ? nullptr : runner.release();
}

adtp_runner* create(char const* plan, adtp_kernel const* kernels, int32_t count, void const* const* weights, int32_t device)
{
    return guarded<adtp_runner*>(nullptr, [&] { return make(plan, kernels, count, weights, device); });
}

} // namespace

char const* adtp_runner_obstacle(int32_t device, int32_t oldest_architecture)
{
    return guarded("out of memory", [&] { return told(obstacle(device, oldest_architecture), kDRIVER_FAILED) ? lastError.c_str() : ""; });
}

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
    return guarded(kDRIVER_FAILED, [&] {
        Replay* found = nullptr;
        int32_t const wrong = told(runner->find(*call, found), kWRONG_CALL);
        return wrong ? wrong : told(runner->enqueue(*found, *call, stream), kDRIVER_FAILED);
    });
}

int32_t adtp_runner_run(adtp_runner* runner, adtp_call const* call, uint64_t const* input_bytes, uint64_t const* output_bytes)
{
    return guarded(kDRIVER_FAILED, [&] {
        Replay* found = nullptr;
        int32_t const wrong = told(runner->find(*call, input_bytes, output_bytes, found), kWRONG_CALL);
        return wrong ? wrong : told(runner->run(*found, *call, input_bytes, output_bytes), kDRIVER_FAILED);
    });
}

void adtp_runner_limits(adtp_runner const* runner, int64_t* tokens, int64_t* texts)
{
    Bucket const& largest = runner->replays.back().bucket();
    *tokens = largest.tokens;
    *texts = largest.texts;
}

char const* adtp_runner_warning(adtp_runner const* runner)
{
    return runner->warning.c_str();
}

char const* adtp_runner_error(void)
{
    return lastError.c_str();
}
