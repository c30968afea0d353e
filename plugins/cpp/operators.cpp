// The runner as a custom operator of ONNX Runtime's CUDA provider, adtp::AdtpEncoder: a model's whole stretch from ids to answers.
// Only sessions with that provider take the library: others find no kernel, and do not look at a function of the same name any more.
//
// Inputs: one variadic one. First those of the plan, then its weights. The first input is (B, S) ids; or (T,) ids, and then the
// second one is (B+1,) cu_seqlens. Outputs: float32. Attributes: `plan` (plugins/plan.py); `types`: the element type of each of the
// plan's inputs, such as "int64 int32"; and `shapes`: for each output its dimensions, which are numbers, texts, length or tokens,
// such as "texts 2; tokens 384". A call's arrays have these types and fit the bucket; whether they are as large as the first
// input says, only the model knows.
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
typedef Function<60, Status*, ShapeInfo const*, Element*> GetElementType;
typedef Function<64, Status*, ShapeInfo const*, size_t*> GetElementCount;
typedef Function<193, Status*, KernelContext const*, void**> GetGpuComputeStream;
constexpr auto kUndefined = static_cast<Element>(0); // any type

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

// An input or an output of a call. The first dimensions are enough.
struct Array
{
    void* data;
    ElementType const* type; // null for others
    uint64_t bytes;
    size_t rank;
    int64_t shape[2];
};

struct Encoder
{
    ort::Api api;
    std::string plan;
    Plan read; // the plan
    std::vector<ElementType const*> types; // of each input but weights
    std::vector<std::vector<std::string>> shapes; // of each output, its dimensions in words
    std::mutex mutex;
    std::unique_ptr<adtp_runner, FreeRunner> runner; // made with the kernel; without a context then, by the first call

    ort::Status* compute(ort::KernelContext* context);
    ort::Status* describe(ort::Value const* value, Array& array) const;
    ort::Status* allocate(ort::KernelContext* context, size_t index, adtp_call const& call, Array& array) const;
    std::string check(adtp_call const& call, std::vector<Array> const& inputs, std::vector<Array> const& outputs) const;
    std::string prepare();
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

ort::Status* Encoder::describe(ort::Value const* value, Array& array) const
{
    ort::ShapeInfo* owned = nullptr;
    if (ort::Status* const status = api.call<ort::GetTensorTypeAndShape>(value, &owned))
    {
        return status;
    }
    ort::ShapeInfo const* const info = owned;
    ort::Element element = ort::kUndefined;
    size_t count = 0;
    ort::Status* status = api.call<ort::GetElementType>(info, &element);
    status = status ? status : api.call<ort::GetElementCount>(info, &count);
    status = status ? status : api.call<ort::GetDimensionsCount>(info, &array.rank);
    if (!status && array.rank <= 2)
    {
        status = api.call<ort::GetDimensions>(info, &array.shape[0], array.rank);
    }
    api.call<ort::ReleaseShapeInfo>(owned);
    array.type = typeOf([=](ElementType const& type) { return type.number == element; });
    array.bytes = array.type ? count * array.type->bytes : 0;
    return status ? status : api.call<ort::GetTensorMutableData>(const_cast<ort::Value*>(value), &array.data);
}

ort::Status* Encoder::allocate(ort::KernelContext* context, size_t index, adtp_call const& call, Array& array) const
{
    std::vector<int64_t> shape;
    for (std::string const& word : shapes[index])
    {
        shape.push_back(word == "texts" ? call.texts
                : word == "length"      ? call.length
                : word == "tokens"      ? call.tokens
                                        : std::strtoll(word.c_str(), nullptr, 10));
    }
    ort::Value* value = nullptr;
    ort::Status* const status
        = api.call<ort::GetOutput>(context, index, static_cast<int64_t const*>(shape.data()), shape.size(), &value);
    return status ? status : describe(value, array);
}

// Empty, or which array is of another type or size. Calls that fit no bucket are left to the runner.
std::string Encoder::check(adtp_call const& call, std::vector<Array> const& inputs, std::vector<Array> const& outputs) const
{
    auto const bytes = [](char const* name, size_t i, Array const& array, char const* accepted, uint64_t wanted) {
        return std::string(name) + " " + std::to_string(i) + " has " + std::to_string(array.bytes) + " bytes; accepted are " + accepted
            + std::to_string(wanted);
    };
    auto const bucket = std::find_if(read.buckets.begin(), read.buckets.end(), [&](Bucket const& one) {
        return fits(one, call.tokens, call.texts);
    });
    for (size_t i = 0; i < inputs.size(); ++i)
    {
        Array const& array = inputs[i];
        size_t const weight = i - types.size();
        if (i < types.size() && array.type != types[i])
        {
            return "input " + std::to_string(i) + " is of type " + (array.type ? array.type->name : "another") + "; accepted is "
                + types[i]->name;
        }
        if (i < types.size() && bucket != read.buckets.end() && array.bytes > bucket->inputs[i])
        {
            return bytes("input", i, array, "at most ", bucket->inputs[i]);
        }
        if (i >= types.size() && array.bytes != read.weights[weight])
        {
            return bytes("weight", weight, array, "", read.weights[weight]);
        }
    }
    for (size_t i = 0; i < outputs.size(); ++i)
    {
        if (bucket != read.buckets.end() && outputs[i].bytes > bucket->outputs[i])
        {
            return bytes("output", i, outputs[i], "at most ", bucket->outputs[i]);
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
    if (count != types.size() + read.weights.size())
    {
        return refuse(api, "got " + std::to_string(count) + " inputs; accepted are the plan's " + std::to_string(types.size())
                + " and its " + std::to_string(read.weights.size()) + " weights");
    }
    std::vector<Array> inputs(std::max<size_t>(count, 2));
    std::vector<void const*> addresses;
    for (size_t i = 0; i < count; ++i)
    {
        ort::Value const* value = nullptr;
        ort::Status* status = api.call<ort::GetInput>(static_cast<ort::KernelContext const*>(context), i, &value);
        status = status ? status : describe(value, inputs[i]);
        if (status)
        {
            return status;
        }
        addresses.push_back(inputs[i].data);
    }
    Array const &first = inputs[0], &second = inputs[1];
    bool const isPadded = first.rank == 2, isPacked = first.rank == 1 && second.rank == 1;
    if (!isPadded && !isPacked)
    {
        return refuse(api, "accepted are ids of shape (B, S), and ids of shape (T,) with cu_seqlens");
    }
    inputs.resize(count);
    std::vector<Array> arrays(shapes.size());
    std::vector<void*> outputs;
    adtp_call call{isPadded ? first.shape[0] : second.shape[0] - 1, isPadded ? first.shape[1] : 0,
        isPadded ? first.shape[0] * first.shape[1] : first.shape[0], addresses.data() + types.size(), addresses.data(), nullptr};
    for (size_t i = 0; i < shapes.size(); ++i)
    {
        if (ort::Status* const status = allocate(context, i, call, arrays[i]))
        {
            return status;
        }
        outputs.push_back(arrays[i].data);
    }
    call.outputs = outputs.data();
    if (std::string const error = check(call, inputs, arrays); !error.empty())
    {
        return refuse(api, error);
    }
    void* stream = nullptr;
    if (ort::Status* const status = api.call<ort::GetGpuComputeStream>(static_cast<ort::KernelContext const*>(context), &stream))
    {
        return status;
    }
    if (std::string error = isCaptured(stream) ? kCaptured : prepare(); !error.empty())
    {
        return refuse(api, error);
    }
    return adtp_runner_enqueue(runner.get(), &call, stream) ? refuse(api, adtp_runner_error()) : nullptr;
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
    std::string text, types, shapes;
    ort::Status* status = textOf(api, info, "plan", text);
    status = status ? status : textOf(api, info, "types", types);
    status = status ? status : textOf(api, info, "shapes", shapes);
    if (status)
    {
        return status;
    }
    auto made = std::unique_ptr<Encoder>(new Encoder{api, text, {}, {}, {}, {}, {}});
    std::string error = parse(text.c_str(), made->read);
    error = error.empty() ? readTypes(types, made->read.buckets.front().inputs.size(), made->types) : error;
    error = error.empty() ? readShapes(shapes, made->shapes) : error;
    if (!error.empty())
    {
        return refuse(api, error);
    }
    size_t const numOutputs = made->read.buckets.front().outputs.size();
    if (made->shapes.size() != numOutputs)
    {
        return refuse(api, "shapes: got " + std::to_string(made->shapes.size()) + "; accepted is one for each of the plan's "
                + std::to_string(numOutputs) + " outputs");
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
