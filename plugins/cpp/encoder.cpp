#include "encoder.h"

#include "driver.h"
#include "embedded.h"

#include <algorithm>
#include <cstdio>
#include <iterator>

namespace adtp
{
namespace
{

// Empty, or which launch's kernel is not built in: then plan and library are of different versions.
std::string missingKernel(Plan const& plan)
{
    auto const isThere = [](Launch const& launch) {
        return std::any_of(kKernels, kKernels + kNumKernels, [&](adtp_kernel const& one) { return launch.variant == one.variant; });
    };
    for (Bucket const& bucket : plan.buckets)
    {
        auto const launch = std::find_if_not(bucket.launches.begin(), bucket.launches.end(), isThere);
        if (launch != bucket.launches.end())
        {
            return "the plan launches " + nameOf(*launch) + ", and this library has no such kernel; accepted are plans of the version of "
                   "adtp-export that built it";
        }
    }
    return {};
}

} // namespace

std::string Encoder::parse(std::string const& text, std::string const& saidOfInputs, std::string const& saidOfOutputs)
{
    plan = text;
    std::string error = adtp::parse(plan.c_str(), read);
    error = error.empty() ? missingKernel(read) : error;
    error = error.empty() ? adtp::read("inputs", saidOfInputs, read.buckets.front().inputs.size(), inputs) : error;
    error = error.empty() ? adtp::read("outputs", saidOfOutputs, read.buckets.front().outputs.size(), outputs) : error;
    auto const isFloat = [](Said const& said) { return std::string(said.type->name) == "float32"; };
    bool const areFloat = !error.empty() || std::all_of(outputs.begin(), outputs.end(), isFloat);
    return areFloat ? error : "outputs: accepted are those of type float32";
}

std::string Encoder::describe(std::vector<Array> const& given, adtp_call& call) const
{
    if (given.size() != inputs.size() + read.weights.size())
    {
        return "got " + std::to_string(given.size()) + " inputs; accepted are the plan's " + std::to_string(inputs.size())
            + " and its " + std::to_string(read.weights.size()) + " weights";
    }
    std::vector<int64_t> const& ids = given[0].shape;
    bool const isPadded = ids.size() == 2, isPacked = ids.size() == 1 && inputs.size() > 1 && given[1].shape.size() == 1;
    if (!isPadded && !isPacked)
    {
        return "accepted are ids of shape (B, S), and ids of shape (T,) with cu_seqlens";
    }
    call.texts = isPadded ? ids[0] : given[1].shape[0] - 1;
    call.length = isPadded ? ids[1] : 0;
    call.tokens = isPadded ? ids[0] * ids[1] : ids[0];
    return check(given, inputs, read.weights, call);
}

bool isCaptured(void* stream)
{
    int32_t capturing = 0;
    Status const s = driver().missing.empty() ? driver().cuStreamIsCapturing(stream, &capturing) : 0;
    return capturing || s == kCaptureImplicit;
}

bool hasContext()
{
    void* context = nullptr;
    return driver().missing.empty() && !driver().cuCtxGetCurrent(&context) && context;
}

std::string Encoder::prepare()
{
    std::lock_guard<std::mutex> const lock(mutex);
    if (runner)
    {
        return {};
    }
    runner.reset(adtp_runner_create(plan.c_str(), kKernels, kNumKernels));
    if (runner && *adtp_runner_warning(runner.get()))
    {
        std::fprintf(stderr, "AdtpEncoder: %s\n", adtp_runner_warning(runner.get()));
    }
    return runner ? "" : adtp_runner_error();
}

// Texts of a part: all of them where the call fits, or where it cannot be divided, which the runner then refuses. Parts begin at
// multiples of 16 bytes.
int64_t Encoder::textsAtOnce(adtp_call const& call, std::vector<Array> const& arrays) const
{
    int64_t tokens = 0, texts = 0;
    adtp_runner_limits(runner.get(), &tokens, &texts);
    if (!call.length || (call.tokens <= tokens && call.texts <= texts))
    {
        return call.texts;
    }
    int64_t multiple = 1;
    for (Array const& array : arrays)
    {
        if (array.shape.empty() || array.shape[0] != call.texts)
        {
            return call.texts;
        }
        while (array.bytes / call.texts * multiple % 16)
        {
            multiple *= 2;
        }
    }
    int64_t const most = std::min(texts, tokens / call.length);
    return most < multiple ? call.texts : most - most % multiple;
}

std::string Encoder::enqueue(adtp_call const& call, std::vector<Array> const& given, std::vector<Array> const& made, void* stream)
{
    std::vector<Array> arrays = given;
    arrays.insert(arrays.end(), made.begin(), made.end());
    int64_t const step = textsAtOnce(call, arrays);
    for (int64_t begin = 0; begin < std::max<int64_t>(call.texts, 1); begin += std::max<int64_t>(step, 1))
    {
        auto const from = [&](Array const& array) { return array.data + (begin ? array.bytes / call.texts * begin : 0); };
        int64_t const texts = std::min(step, call.texts - begin);
        std::vector<void const*> in;
        std::vector<void*> out;
        std::transform(given.begin(), given.end(), std::back_inserter(in), from);
        std::transform(made.begin(), made.end(), std::back_inserter(out), from);
        int64_t const tokens = texts == call.texts ? call.tokens : texts * call.length;
        adtp_call const part{texts, call.length, tokens, call.weights, in.data(), out.data()};
        std::string error = checkRoom("input", given, &Bucket::inputs, read, call, part);
        error = error.empty() ? checkRoom("output", made, &Bucket::outputs, read, call, part) : error;
        if (!error.empty() || adtp_runner_enqueue(runner.get(), &part, stream))
        {
            return error.empty() ? adtp_runner_error() : error;
        }
    }
    return {};
}

} // namespace adtp
