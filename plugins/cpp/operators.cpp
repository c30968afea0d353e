// The runner as a custom operator of ONNX Runtime's CUDA provider, adtp::AdtpEncoder: a model's whole stretch from ids to answers.
// Only sessions with that provider take the library: others find no kernel, and do not look at a function of the same name any more.
//
// Inputs: one variadic one. First those of the plan, then its weights. The first input is (B, S) ids; or (T,) ids, and then the
// second one is (B+1,) cu_seqlens. Outputs: float32. Attributes: `plan` (plugins/plan.py); `inputs` and `outputs`: for each of the
// plan's a type and axes (signature.h), such as "int64 texts length; int64 texts length" and "float32 texts 2". Padded calls beyond
// the largest bucket run in parts.
#include "arrays.h"
#include "driver.h"
#include "embedded.h"
#include "plan.h"
#include "runner.h"
#include "signature.h"

#include "../cpu/onnxruntime.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace ort
{

typedef Function<87, Status*, KernelInfo const*, char const*, char*, size_t*> KernelInfoGetString;
typedef Function<88, Status*, KernelContext const*, size_t*> GetInputCount;
typedef Function<193, Status*, KernelContext const*, void**> GetGpuComputeStream;

} // namespace ort

namespace adtp
{
namespace
{

constexpr char kName[] = "AdtpEncoder";

struct FreeRunner
{
    void operator()(adtp_runner* runner) const
    {
        adtp_runner_destroy(runner);
    }
};

struct Encoder
{
    ort::Api api;
    std::string plan;
    Plan read; // the plan
    std::vector<Said> inputs; // all but weights
    std::vector<Said> outputs;
    std::mutex mutex;
    std::unique_ptr<adtp_runner, FreeRunner> runner; // made with the kernel; without a context then, by the first call

    ort::Status* compute(ort::KernelContext* context);
    ort::Status* allocate(ort::KernelContext* context, size_t index, adtp_call const& call, Array& array) const;
    std::string prepare();
    int64_t textsAtOnce(adtp_call const& call, std::vector<Array> const& arrays) const;
    std::string enqueue(adtp_call const& call, std::vector<Array> const& given, std::vector<Array> const& made, void* stream);
};

ort::Status* refuse(ort::Api const& api, std::string const& why)
{
    return api.call<ort::CreateStatus>(ort::kInvalidArgument, (std::string(kName) + ": " + why).c_str());
}

// The operator's runner has one workspace, which replays of a capture would use beside other calls.
constexpr char kCaptured[] = "the session's stream is being captured; accepted are sessions without enable_cuda_graph: the operator "
                             "replays a CUDA graph itself";

bool isCaptured(void* stream)
{
    int32_t capturing = 0;
    Status const s = driver().missing.empty() ? driver().cuStreamIsCapturing(stream, &capturing) : 0;
    return capturing || s == kCaptureImplicit;
}

// Of this thread. Making a runner allocates memory and loads code, which no call should wait for, and which the driver forbids
// while any thread captures.
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
        std::fprintf(stderr, "%s: %s\n", kName, adtp_runner_warning(runner.get()));
    }
    return runner ? "" : adtp_runner_error();
}

ort::Status* Encoder::allocate(ort::KernelContext* context, size_t index, adtp_call const& call, Array& array) const
{
    std::vector<int64_t> const shape = shapeOf(outputs[index], call);
    ort::Value* value = nullptr;
    ort::Status* const status = api.call<ort::GetOutput>(context, index, shape.data(), shape.size(), &value);
    return status ? status : describe(api, value, array);
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

// given: the plan's inputs. Empty, or what went wrong.
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

ort::Status* Encoder::compute(ort::KernelContext* context)
{
    size_t count = 0;
    if (ort::Status* const status = api.call<ort::GetInputCount>(static_cast<ort::KernelContext const*>(context), &count))
    {
        return status;
    }
    if (count != inputs.size() + read.weights.size())
    {
        return refuse(api, "got " + std::to_string(count) + " inputs; accepted are the plan's " + std::to_string(inputs.size())
                + " and its " + std::to_string(read.weights.size()) + " weights");
    }
    std::vector<Array> given(count), made(outputs.size());
    std::vector<void const*> weights;
    for (size_t i = 0; i < count; ++i)
    {
        ort::Value const* value = nullptr;
        ort::Status* status = api.call<ort::GetInput>(static_cast<ort::KernelContext const*>(context), i, &value);
        status = status ? status : describe(api, value, given[i]);
        if (status)
        {
            return status;
        }
        if (i >= inputs.size())
        {
            weights.push_back(given[i].data);
        }
    }
    std::vector<int64_t> const& ids = given[0].shape;
    bool const isPadded = ids.size() == 2, isPacked = ids.size() == 1 && inputs.size() > 1 && given[1].shape.size() == 1;
    if (!isPadded && !isPacked)
    {
        return refuse(api, "accepted are ids of shape (B, S), and ids of shape (T,) with cu_seqlens");
    }
    adtp_call const call{isPadded ? ids[0] : given[1].shape[0] - 1, isPadded ? ids[1] : 0, isPadded ? ids[0] * ids[1] : ids[0],
        weights.data(), nullptr, nullptr};
    if (std::string const error = check(given, inputs, read.weights, call); !error.empty())
    {
        return refuse(api, error);
    }
    given.resize(inputs.size());
    for (size_t i = 0; i < outputs.size(); ++i)
    {
        if (ort::Status* const status = allocate(context, i, call, made[i]))
        {
            return status;
        }
    }
    void* stream = nullptr;
    if (ort::Status* const status = api.call<ort::GetGpuComputeStream>(static_cast<ort::KernelContext const*>(context), &stream))
    {
        return status;
    }
    std::string error = isCaptured(stream) ? kCaptured : prepare();
    error = error.empty() ? enqueue(call, given, made, stream) : error;
    return error.empty() ? nullptr : refuse(api, error);
}

// What `work` returns; nothing is thrown through ONNX Runtime's C interface.
template <typename Work>
ort::Status* guarded(ort::Api const& api, Work const& work)
{
    try
    {
        return work();
    }
    catch (std::exception const&)
    {
        return api.call<ort::CreateStatus>(ort::kInvalidArgument, "AdtpEncoder: out of memory");
    }
}

// An attribute that is a text.
ort::Status* textOf(ort::Api const& api, ort::KernelInfo const* info, char const* name, std::string& text)
{
    size_t bytes = 0;
    ort::Status* status = api.call<ort::KernelInfoGetString>(info, name, static_cast<char*>(nullptr), &bytes);
    if (!status)
    {
        text.resize(bytes);
        status = api.call<ort::KernelInfoGetString>(info, name, text.data(), &bytes);
        text.resize(std::strlen(text.c_str())); // with its zero, it was
    }
    return status;
}

ort::Status* make(ort::Api const& api, ort::KernelInfo const* info, void** kernel)
{
    std::string text, inputs, outputs;
    ort::Status* status = textOf(api, info, "plan", text);
    status = status ? status : textOf(api, info, "inputs", inputs);
    status = status ? status : textOf(api, info, "outputs", outputs);
    if (status)
    {
        return status;
    }
    auto made = std::unique_ptr<Encoder>(new Encoder{api, text, {}, {}, {}, {}, {}});
    std::string error = parse(text.c_str(), made->read);
    error = error.empty() ? read("inputs", inputs, made->read.buckets.front().inputs.size(), made->inputs) : error;
    error = error.empty() ? read("outputs", outputs, made->read.buckets.front().outputs.size(), made->outputs) : error;
    auto const isFloat = [](Said const& said) { return said.type->number == static_cast<int32_t>(ort::kFloat); };
    if (error.empty() && !std::all_of(made->outputs.begin(), made->outputs.end(), isFloat))
    {
        error = "outputs: accepted are those of type float32";
    }
    if (!error.empty())
    {
        return refuse(api, error);
    }
    error = hasContext() ? made->prepare() : std::string{};
    if (!error.empty())
    {
        return refuse(api, error);
    }
    *kernel = made.release();
    return nullptr;
}

ort::Operator makeOperator()
{
    ort::Operator made{};
    made.version = ort::kVersion;
    made.getName = [](ort::Operator const*) { return &kName[0]; };
    made.getProvider = [](ort::Operator const*) { return "CUDAExecutionProvider"; };
    made.getInputType = [](ort::Operator const*, size_t) { return ort::kUndefined; };
    made.getInputCount = made.getOutputCount = [](ort::Operator const*) -> size_t { return 1; };
    made.getOutputType = [](ort::Operator const*, size_t) { return ort::kFloat; };
    made.getInputCharacteristic = made.getOutputCharacteristic = [](ort::Operator const*, size_t) { return 2; }; // variadic
    made.getInputMemoryType = [](ort::Operator const*, size_t) { return 0; };
    made.getVariadicInputMinimum = made.getVariadicOutputMinimum = [](ort::Operator const*) { return 1; };
    made.getVariadicInputHomogeneity = [](ort::Operator const*) { return 0; }; // each its own type
    made.getVariadicOutputHomogeneity = [](ort::Operator const*) { return 1; };
    made.getStartVersion = made.getEndVersion = [](ort::Operator const*) { return 1; };
    made.createKernelV2 = [](ort::Operator const*, void const* table, ort::KernelInfo const* info, void** kernel) {
        ort::Api const api(table);
        return guarded(api, [&] { return make(api, info, kernel); });
    };
    made.destroyKernel = [](void* kernel) { delete static_cast<Encoder*>(kernel); };
    made.computeV2 = [](void* kernel, ort::KernelContext* context) {
        auto* const encoder = static_cast<Encoder*>(kernel);
        return guarded(encoder->api, [=] { return encoder->compute(context); });
    };
    return made;
}

ort::Domain* makeDomain(ort::Api const& api)
{
    static ort::Operator const encoder = makeOperator();
    ort::Domain* domain = nullptr;
    ort::Status* status = api.call<ort::CreateCustomOpDomain>("adtp", &domain);
    status = status ? status : api.call<ort::CustomOpDomainAdd>(domain, &encoder);
    return status ? nullptr : domain;
}

} // namespace
} // namespace adtp

// What `SessionOptions.register_custom_ops_library` calls.
extern "C" ADTP_RUNNER_API ort::Status* ADTP_ORT_CALL RegisterCustomOps(ort::SessionOptions* options, ort::ApiBase const* base)
{
    void const* const table = base->getApi(ort::kVersion);
    if (!table)
    {
        return adtp::refuse(ort::Api(base->getApi(1)), "needs ONNX Runtime 1.17 or newer"); // its oldest interface can say so
    }
    ort::Api const api(table);
    static ort::Domain* const domain = adtp::makeDomain(api);
    return domain ? api.call<ort::AddCustomOpDomain>(options, domain) : adtp::refuse(api, "no domain of operators");
}
