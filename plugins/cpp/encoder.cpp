#include "encoder.h"

#include "driver.h"
#include "embedded.h"
#include "parts.h"

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

std::string Encoder::enqueue(adtp_call const& call, std::vector<Array> const& given, std::vector<Array> const& made, void* stream)
{
    int64_t tokens = 0, texts = 0;
    adtp_runner_limits(runner.get(), &tokens, &texts);
    bool const isWhole = call.texts < 1 || call.tokens < 1 || (call.tokens <= tokens && call.texts <= texts);
    if (isWhole || !isDivisible(inputs, outputs, call))
    {
        return enqueueOne(call, given, made, stream); // which the runner refuses where it is too large
    }
    std::vector<int64_t> starts(call.texts + 1);
    for (int64_t i = 0; i <= call.texts; ++i)
    {
        starts[i] = i * call.length;
    }
    std::string const error = call.length ? "" : readBounds(given[1], call, stream, starts);
    return error.empty() ? enqueueParts(call, given, made, starts, stream) : error;
}

// starts: where each text begins, and where the last one ends.
std::string Encoder::enqueueParts(adtp_call const& call, std::vector<Array> const& given, std::vector<Array> const& made,
    std::vector<int64_t> const& starts, void* stream)
{
    Part most{};
    adtp_runner_limits(runner.get(), &most.tokens, &most.texts);
    auto const isPlace = [&](int64_t text) {
        return begins(given, inputs, call, text, starts[text]) && begins(made, outputs, call, text, starts[text]);
    };
    std::vector<Part> const parts = divide(starts, most, isPlace);
    if (parts.empty())
    {
        return enqueueOne(call, given, made, stream);
    }
    Bounds bounds;
    std::string error = call.length ? "" : bounds.upload(parts, starts);
    for (size_t i = 0; error.empty() && i < parts.size(); ++i)
    {
        Part const& part = parts[i];
        adtp_call const one{part.texts, call.length, std::max<int64_t>(part.tokens, 1), call.weights, nullptr, nullptr};
        std::vector<Array> const in = slicesOf(given, inputs, call, part, bounds.of(i)), out = slicesOf(made, outputs, call, part, nullptr);
        error = enqueueOne(one, in, out, stream);
    }
    Status const s = call.length ? 0 : driver().cuStreamSynchronize(stream); // before the bounds are freed
    return error.empty() && s ? failure("cuStreamSynchronize", s) : error;
}

std::string Encoder::enqueueOne(adtp_call const& call, std::vector<Array> const& given, std::vector<Array> const& made, void* stream)
{
    std::vector<void const*> in;
    std::vector<void*> out;
    std::transform(given.begin(), given.end(), std::back_inserter(in), [](Array const& array) { return array.data; });
    std::transform(made.begin(), made.end(), std::back_inserter(out), [](Array const& array) { return array.data; });
    adtp_call const whole{call.texts, call.length, call.tokens, call.weights, in.data(), out.data()};
    std::string error = checkRoom("input", given, &Bucket::inputs, read, call);
    error = error.empty() ? checkRoom("output", made, &Bucket::outputs, read, call) : error;
    return !error.empty() ? error : adtp_runner_enqueue(runner.get(), &whole, stream) ? adtp_runner_error() : "";
}

} // namespace adtp
