// The runner as a custom operator of ONNX Runtime's CUDA provider, adtp::AdtpEncoder: a model's whole stretch from ids to answers.
// Only sessions with that provider take the library: others find no kernel, and do not look at a function of the same name any more.
//
// Inputs: one variadic one. First those of the plan, then its weights. The first input is (B, S) ids; or (T,) ids, and then the
// second one is (B+1,) cu_seqlens. Outputs: float32. Attributes: `plan` (plugins/plan.py); `inputs` and `outputs`: for each of the
// plan's a type and axes (signature.h), such as "int64 texts length; int64 texts length" and "float32 texts 2". Calls beyond the
// largest bucket run in parts.
#include "encoder.h"

#include "../cpu/onnxruntime.h"

#include <cstring>
#include <exception>
#include <memory>
#include <string>
#include <vector>

namespace ort
{

typedef Function<87, Status*, KernelInfo const*, char const*, char*, size_t*> KernelInfoGetString;
typedef Function<88, Status*, KernelContext const*, size_t*> GetInputCount;
typedef Function<193, Status*, KernelContext const*, void**> GetGpuComputeStream;
typedef Function<60, Status*, ShapeInfo const*, Element*> GetElementType;
typedef Function<64, Status*, ShapeInfo const*, size_t*> GetElementCount;
constexpr auto kUndefined = static_cast<Element>(0); // any type

} // namespace ort

namespace adtp
{
namespace
{

constexpr char kName[] = "AdtpEncoder";

ort::Status* describe(ort::Api const& api, ort::Value const* value, Array& array)
{
    ort::ShapeInfo* owned = nullptr;
    if (ort::Status* const status = api.call<ort::GetTensorTypeAndShape>(value, &owned))
    {
        return status;
    }
    ort::ShapeInfo const* const info = owned;
    ort::Element element = ort::kUndefined;
    size_t count = 0, rank = 0;
    ort::Status* status = api.call<ort::GetElementType>(info, &element);
    status = status ? status : api.call<ort::GetElementCount>(info, &count);
    status = status ? status : api.call<ort::GetDimensionsCount>(info, &rank);
    array.shape.resize(rank);
    status = status ? status : api.call<ort::GetDimensions>(info, array.shape.data(), rank);
    api.call<ort::ReleaseShapeInfo>(owned);
    array.type = typeOf([=](ElementType const& type) { return type.number == element; });
    array.bytes = array.type ? count * array.type->bytes : 0;
    void* data = nullptr;
    status = status ? status : api.call<ort::GetTensorMutableData>(const_cast<ort::Value*>(value), &data);
    array.data = static_cast<char*>(data);
    return status;
}

struct Kernel
{
    ort::Api api;
    Encoder encoder;

    ort::Status* compute(ort::KernelContext* context);
    ort::Status* allocate(ort::KernelContext* context, size_t index, adtp_call const& call, Array& array) const;
};

// The operator's runner has one workspace, which replays of a capture would use beside other calls.
constexpr char kCaptured[] = "the session's stream is being captured; accepted are sessions without enable_cuda_graph: the operator "
                             "replays a CUDA graph itself";

ort::Status* refuse(ort::Api const& api, std::string const& why)
{
    return api.call<ort::CreateStatus>(ort::kInvalidArgument, (std::string(kName) + ": " + why).c_str());
}

ort::Status* Kernel::allocate(ort::KernelContext* context, size_t index, adtp_call const& call, Array& array) const
{
    std::vector<int64_t> const shape = shapeOf(encoder.outputs[index], call);
    ort::Value* value = nullptr;
    ort::Status* const status = api.call<ort::GetOutput>(context, index, shape.data(), shape.size(), &value);
    return status ? status : describe(api, value, array);
}

ort::Status* Kernel::compute(ort::KernelContext* context)
{
    size_t count = 0;
    if (ort::Status* const status = api.call<ort::GetInputCount>(static_cast<ort::KernelContext const*>(context), &count))
    {
        return status;
    }
    std::vector<Array> given(count), made(encoder.outputs.size());
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
        if (i >= encoder.inputs.size())
        {
            weights.push_back(given[i].data);
        }
    }
    adtp_call call{};
    call.weights = weights.data();
    if (std::string const error = encoder.describe(given, call); !error.empty())
    {
        return refuse(api, error);
    }
    given.resize(encoder.inputs.size());
    for (size_t i = 0; i < encoder.outputs.size(); ++i)
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
    std::string error = isCaptured(stream) ? kCaptured : encoder.prepare();
    error = error.empty() ? encoder.enqueue(call, given, made, stream) : error;
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
        return api.call<ort::CreateStatus>(ort::kFail, "AdtpEncoder: out of memory");
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
    auto made = std::unique_ptr<Kernel>(new Kernel{api, {}});
    std::string error = made->encoder.parse(text, inputs, outputs);
    if (!error.empty())
    {
        return refuse(api, error);
    }
    error = hasContext() ? made->encoder.prepare() : std::string{};
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
    made.destroyKernel = [](void* kernel) { delete static_cast<Kernel*>(kernel); };
    made.computeV2 = [](void* kernel, ort::KernelContext* context) {
        auto* const made = static_cast<Kernel*>(kernel);
        return guarded(made->api, [=] { return made->compute(context); });
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
