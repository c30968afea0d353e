// The runner as a custom operator of ONNX Runtime's CUDA provider, adtp::AdtpEncoder: a model's whole stretch from ids to answers.
// Only sessions with that provider take the library: others find no kernel, and do not look at a function of the same name any more.
//
// Inputs: one variadic one. First those of the plan, then its weights. The first input is (B, S) ids; or (T,) ids, and then the
// second one is (B+1,) cu_seqlens. Outputs: float32. Attributes: `plan` (plugins/plan.py), and `shapes`: for each output its
// dimensions, which are numbers, texts, length or tokens, such as "texts 2; tokens 384".
#include "embedded.h"
#include "plan.h"
#include "runner.h"

#include "../cpu/onnxruntime.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <sstream>
#include <string>
#include <vector>

namespace ort
{

typedef Function<87, Status*, KernelInfo const*, char const*, char*, size_t*> KernelInfoGetString;
typedef Function<88, Status*, KernelContext const*, size_t*> GetInputCount;
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

// An input of a call. The first dimensions are enough.
struct Input
{
    void const* data;
    size_t rank;
    int64_t shape[2];
};

struct Encoder
{
    ort::Api api;
    std::string plan;
    size_t numInputs;
    size_t numWeights;
    std::vector<std::vector<std::string>> shapes; // of each output, its dimensions in words
    std::mutex mutex;
    std::unique_ptr<adtp_runner, FreeRunner> runner; // made by the first call: only then there is a context for sure

    ort::Status* compute(ort::KernelContext* context);
    ort::Status* read(ort::KernelContext const* context, size_t index, Input& input) const;
    ort::Status* write(ort::KernelContext* context, size_t index, adtp_call const& call, void*& data) const;
    std::string prepare();
};

ort::Status* refuse(ort::Api const& api, std::string const& why)
{
    return api.call<ort::CreateStatus>(ort::kInvalidArgument, (std::string(kName) + ": " + why).c_str());
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

ort::Status* Encoder::read(ort::KernelContext const* context, size_t index, Input& input) const
{
    ort::Value const* value = nullptr;
    ort::ShapeInfo* info = nullptr;
    ort::Status* status = api.call<ort::GetInput>(context, index, &value);
    if (!status)
    {
        status = api.call<ort::GetTensorTypeAndShape>(value, &info);
    }
    if (status)
    {
        return status;
    }
    status = api.call<ort::GetDimensionsCount>(static_cast<ort::ShapeInfo const*>(info), &input.rank);
    if (!status && input.rank <= 2)
    {
        status = api.call<ort::GetDimensions>(static_cast<ort::ShapeInfo const*>(info), &input.shape[0], input.rank);
    }
    api.call<ort::ReleaseShapeInfo>(info);
    void* data = nullptr;
    if (!status)
    {
        status = api.call<ort::GetTensorMutableData>(const_cast<ort::Value*>(value), &data);
    }
    input.data = data;
    return status;
}

ort::Status* Encoder::write(ort::KernelContext* context, size_t index, adtp_call const& call, void*& data) const
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
    return status ? status : api.call<ort::GetTensorMutableData>(value, &data);
}

ort::Status* Encoder::compute(ort::KernelContext* context)
{
    size_t count = 0;
    if (ort::Status* const status = api.call<ort::GetInputCount>(static_cast<ort::KernelContext const*>(context), &count))
    {
        return status;
    }
    if (count != numInputs + numWeights)
    {
        return refuse(api, "got " + std::to_string(count) + " inputs; accepted are the plan's " + std::to_string(numInputs)
                + " and its " + std::to_string(numWeights) + " weights");
    }
    std::vector<void const*> addresses(count);
    Input first{}, second{};
    for (size_t i = 0; i < count; ++i)
    {
        Input input{};
        if (ort::Status* const status = read(context, i, input))
        {
            return status;
        }
        addresses[i] = input.data;
        (i == 0 ? first : i == 1 ? second : input) = input;
    }
    bool const isPadded = first.rank == 2, isPacked = first.rank == 1 && second.rank == 1;
    if (!isPadded && !isPacked)
    {
        return refuse(api, "accepted are ids of shape (B, S), and ids of shape (T,) with cu_seqlens");
    }
    std::vector<void*> outputs(shapes.size());
    adtp_call call{isPadded ? first.shape[0] : second.shape[0] - 1, isPadded ? first.shape[1] : 0,
        isPadded ? first.shape[0] * first.shape[1] : first.shape[0], addresses.data() + numInputs, addresses.data(), outputs.data()};
    for (size_t i = 0; i < shapes.size(); ++i)
    {
        if (ort::Status* const status = write(context, i, call, outputs[i]))
        {
            return status;
        }
    }
    void* stream = nullptr;
    if (ort::Status* const status = api.call<ort::GetGpuComputeStream>(static_cast<ort::KernelContext const*>(context), &stream))
    {
        return status;
    }
    if (std::string const error = prepare(); !error.empty())
    {
        return refuse(api, error);
    }
    return adtp_runner_enqueue(runner.get(), &call, stream) ? refuse(api, adtp_runner_error()) : nullptr;
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

// "texts 2; tokens 384"; empty, or what is wrong.
std::string readShapes(std::string const& text, std::vector<std::vector<std::string>>& shapes)
{
    std::istringstream outputs(text);
    for (std::string output; std::getline(outputs, output, ';');)
    {
        std::vector<std::string>& shape = shapes.emplace_back();
        std::istringstream words(output);
        for (std::string word; words >> word;)
        {
            bool const isNumber = word.find_first_not_of("0123456789") == std::string::npos && word.size() < 10;
            if (!isNumber && word != "texts" && word != "length" && word != "tokens")
            {
                return "shapes: got '" + word + "'; accepted are numbers, texts, length and tokens";
            }
            shape.push_back(word);
        }
    }
    return {};
}

ort::Status* make(ort::Operator const*, void const* table, ort::KernelInfo const* info, void** kernel)
{
    ort::Api const api(table);
    std::string text, shapes;
    ort::Status* status = textOf(api, info, "plan", text);
    status = status ? status : textOf(api, info, "shapes", shapes);
    if (status)
    {
        return status;
    }
    Plan plan;
    std::string error = parse(text.c_str(), plan);
    auto made = std::unique_ptr<Encoder>(new (std::nothrow) Encoder{api, text, 0, 0, {}, {}, {}});
    error = !error.empty() ? error : !made ? "out of memory" : readShapes(shapes, made->shapes);
    if (!error.empty())
    {
        return refuse(api, error);
    }
    made->numInputs = plan.buckets.front().inputs.size();
    made->numWeights = plan.weights.size();
    if (made->shapes.size() != plan.buckets.front().outputs.size())
    {
        return refuse(api, "shapes: got " + std::to_string(made->shapes.size()) + "; accepted is one for each of the plan's "
                + std::to_string(plan.buckets.front().outputs.size()) + " outputs");
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
    made.createKernelV2 = &make;
    made.destroyKernel = [](void* kernel) { delete static_cast<Encoder*>(kernel); };
    made.computeV2 = [](void* kernel, ort::KernelContext* context) { return static_cast<Encoder*>(kernel)->compute(context); };
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
