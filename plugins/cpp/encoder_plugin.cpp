// AdtpEncoder for TensorRT: a model's whole stretch from ids to answers. Inputs, outputs and fields are those of operators.cpp; fields
// are texts. The runner is made by the first call whose stream is not being captured: TensorRT wants one such call before a capture.
// Each execution context has a runner of its own, so that nobody else uses the workspace of what was captured.
#include "encoder.h"
#include "plugin.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <iterator>

namespace adtp
{
namespace
{

using namespace nvinfer1;

constexpr char kName[] = "AdtpEncoder";
constexpr char const* kFields[] = {"plan", "inputs", "outputs"};
constexpr int32_t kNumFields = 3;
constexpr char kNotPrepared[] = "the stream is being captured, and this execution context has not run yet; enqueue once before the capture";

struct Named
{
    char const* name; // in signature.h
    DataType type;
};

constexpr Named kNames[] = {{"float32", DataType::kFLOAT}, {"float16", DataType::kHALF}, {"bfloat16", DataType::kBF16},
    {"int8", DataType::kINT8}, {"uint8", DataType::kUINT8}, {"int32", DataType::kINT32}, {"int64", DataType::kINT64},
    {"bool", DataType::kBOOL}, {"float8e4m3fn", DataType::kFP8}};

int32_t fail(std::string const& what) noexcept
{
    return report(std::string(kName) + ": " + what);
}

// What `work` returns; nothing is thrown through TensorRT.
template <typename Result, typename Work>
Result guarded(Result failed, Work const& work) noexcept
{
    try
    {
        return work();
    }
    catch (std::exception const&)
    {
        report("AdtpEncoder: out of memory");
        return failed;
    }
}

// Null for types that no plan has.
ElementType const* elementOf(DataType type)
{
    auto const* const named = std::find_if(std::begin(kNames), std::end(kNames), [=](Named const& one) { return one.type == type; });
    return named == std::end(kNames) ? nullptr
                                     : typeOf([=](ElementType const& one) { return std::strcmp(one.name, named->name) == 0; });
}

Array arrayOf(PluginTensorDesc const& tensor, void const* data)
{
    ElementType const* const type = elementOf(tensor.type);
    std::vector<int64_t> const shape(tensor.dims.d, tensor.dims.d + std::max(tensor.dims.nbDims, 0));
    uint64_t bytes = type ? type->bytes : 0;
    for (int64_t const size : shape)
    {
        bytes *= static_cast<uint64_t>(size);
    }
    return {static_cast<char*>(const_cast<void*>(data)), type, bytes, shape};
}

class EncoderPlugin final : public IPluginV3,
                            public IPluginV3OneCore,
                            public IPluginV3OneBuild,
                            public IPluginV3OneRuntime
{
public:
    explicit EncoderPlugin(std::string const (&texts)[kNumFields])
    {
        std::copy(std::begin(texts), std::end(texts), mTexts);
        for (int32_t i = 0; i < kNumFields; ++i)
        {
            mFields[i] = PluginField(kFields[i], mTexts[i].data(), PluginFieldType::kCHAR, static_cast<int32_t>(mTexts[i].size()));
        }
    }
    EncoderPlugin(EncoderPlugin const&) = delete; // mFields points into the object
    EncoderPlugin& operator=(EncoderPlugin const&) = delete;

    // Null where the fields are wrong; the application's logger has why.
    static IPluginV3* make(std::string const (&texts)[kNumFields]) noexcept
    {
        return guarded<IPluginV3*>(nullptr, [&]() -> IPluginV3* {
            auto made = std::make_unique<EncoderPlugin>(texts);
            std::string const error = made->mEncoder.parse(texts[0], texts[1], texts[2]);
            return error.empty() || !fail(error) ? made.release() : nullptr;
        });
    }

    IPluginCapability* getCapabilityInterface(PluginCapabilityType type) noexcept override
    {
        switch (type)
        {
        case PluginCapabilityType::kCORE: return static_cast<IPluginV3OneCore*>(this);
        case PluginCapabilityType::kBUILD: return static_cast<IPluginV3OneBuild*>(this);
        case PluginCapabilityType::kRUNTIME: return static_cast<IPluginV3OneRuntime*>(this);
        }
        return nullptr;
    }

    IPluginV3* clone() noexcept override
    {
        return make(mTexts);
    }

    // Core

    char const* getPluginName() const noexcept override
    {
        return kName;
    }
    char const* getPluginVersion() const noexcept override
    {
        return "1";
    }
    char const* getPluginNamespace() const noexcept override
    {
        return "";
    }

    // Build

    int32_t getNbOutputs() const noexcept override
    {
        return static_cast<int32_t>(mEncoder.outputs.size());
    }

    int32_t getOutputDataTypes(
        DataType* outputs, int32_t numOutputs, DataType const*, int32_t numInputs) const noexcept override
    {
        std::fill_n(outputs, numOutputs, DataType::kFLOAT);
        return checkNumbers(numInputs, numOutputs);
    }

    int32_t getOutputShapes(DimsExprs const* inputs, int32_t numInputs, DimsExprs const*, int32_t, DimsExprs* outputs,
        int32_t numOutputs, IExprBuilder& builder) noexcept override
    {
        if (checkNumbers(numInputs, numOutputs))
        {
            return -1;
        }
        DimsExprs const& ids = inputs[0];
        bool const isPadded = ids.nbDims == 2;
        if (!isPadded && (ids.nbDims != 1 || mEncoder.inputs.size() < 2 || inputs[1].nbDims != 1))
        {
            return fail("accepted are ids of shape (B, S), and ids of shape (T,) with cu_seqlens");
        }
        auto const sum = [&](IDimensionExpr const* one, int64_t more) {
            return builder.operation(DimensionOperation::kSUM, *one, *builder.constant(more));
        };
        IDimensionExpr const* const texts = isPadded ? ids.d[0] : sum(inputs[1].d[0], -1);
        auto const size = [&](std::string const& axis) {
            return axis == "texts" ? texts
                : axis == "bounds" ? sum(texts, 1)
                : axis == "length" ? (isPadded ? ids.d[1] : builder.constant(0))
                : axis != "tokens" ? builder.constant(sizeOf(axis, 0, 0, 0))
                : isPadded         ? builder.operation(DimensionOperation::kPROD, *ids.d[0], *ids.d[1])
                                   : ids.d[0];
        };
        for (int32_t i = 0; i < numOutputs; ++i)
        {
            std::vector<std::string> const& axes = mEncoder.outputs[i].axes;
            outputs[i].nbDims = static_cast<int32_t>(axes.size());
            std::transform(axes.begin(), axes.end(), outputs[i].d, size);
        }
        return 0;
    }

    bool supportsFormatCombination(
        int32_t position, DynamicPluginTensorDesc const* tensors, int32_t numInputs, int32_t numOutputs) noexcept override
    {
        return guarded(false, [&] {
            PluginTensorDesc const& found = tensors[position].desc;
            size_t const place = position, inputs = mEncoder.inputs.size();
            if (!isOurs(numInputs, numOutputs) || found.format != TensorFormat::kLINEAR)
            {
                return false;
            }
            if (position >= numInputs)
            {
                return found.type == DataType::kFLOAT;
            }
            Array const array = arrayOf(found, nullptr); // a weight's type is whatever has its bytes: its kernels know it
            return place < inputs ? array.type == mEncoder.inputs[place].type : array.bytes == mEncoder.read.weights[place - inputs];
        });
    }

    int32_t configurePlugin(DynamicPluginTensorDesc const*, int32_t numInputs, DynamicPluginTensorDesc const*,
        int32_t numOutputs) noexcept override
    {
        return checkNumbers(numInputs, numOutputs);
    }

    // Run

    int32_t onShapeChange(
        PluginTensorDesc const* inputs, int32_t numInputs, PluginTensorDesc const*, int32_t) noexcept override
    {
        return guarded(-1, [&] {
            std::vector<Array> given;
            adtp_call call{};
            std::transform(inputs, inputs + numInputs, std::back_inserter(given),
                [](PluginTensorDesc const& one) { return arrayOf(one, nullptr); });
            std::string const error = mEncoder.describe(given, call);
            return error.empty() ? 0 : fail(error);
        });
    }

    int32_t enqueue(PluginTensorDesc const* inputs, PluginTensorDesc const*, void const* const* in, void* const* out,
        void*, cudaStream_t stream) noexcept override
    {
        return guarded(-1, [&] {
            std::string const error = run(inputs, in, out, stream);
            return error.empty() ? 0 : fail(error);
        });
    }

    IPluginV3* attachToContext(IPluginResourceContext*) noexcept override
    {
        return clone();
    }

    PluginFieldCollection const* getFieldsToSerialize() noexcept override
    {
        return &mCollection;
    }

private:
    bool isOurs(int32_t numInputs, int32_t numOutputs) const noexcept
    {
        return numOutputs == getNbOutputs()
            && static_cast<size_t>(numInputs) == mEncoder.inputs.size() + mEncoder.read.weights.size();
    }

    int32_t checkNumbers(int32_t numInputs, int32_t numOutputs) const noexcept
    {
        return isOurs(numInputs, numOutputs) ? 0 : guarded(-1, [&] {
            return fail("got " + std::to_string(numInputs) + " inputs and " + std::to_string(numOutputs)
                + " outputs; accepted are the plan's " + std::to_string(mEncoder.inputs.size()) + " inputs, its "
                + std::to_string(mEncoder.read.weights.size()) + " weights and " + std::to_string(getNbOutputs()) + " outputs");
        });
    }

    std::string run(PluginTensorDesc const* inputs, void const* const* in, void* const* out, void* stream)
    {
        std::vector<Array> given, made;
        for (size_t i = 0; i < mEncoder.inputs.size() + mEncoder.read.weights.size(); ++i)
        {
            given.push_back(arrayOf(inputs[i], in[i]));
        }
        adtp_call call{};
        call.weights = in + mEncoder.inputs.size();
        std::string error = mEncoder.describe(given, call);
        if (error.empty() && isCaptured(stream))
        {
            error = mEncoder.runner ? "" : kNotPrepared;
        }
        else if (error.empty())
        {
            error = mEncoder.prepare();
        }
        given.resize(mEncoder.inputs.size());
        for (size_t i = 0; i < mEncoder.outputs.size(); ++i)
        {
            PluginTensorDesc desc{};
            std::vector<int64_t> const shape = shapeOf(mEncoder.outputs[i], call);
            desc.dims.nbDims = static_cast<int32_t>(shape.size());
            std::copy(shape.begin(), shape.end(), desc.dims.d);
            desc.type = DataType::kFLOAT;
            made.push_back(arrayOf(desc, out[i]));
        }
        return error.empty() ? mEncoder.enqueue(call, given, made, stream) : error;
    }

    Encoder mEncoder;
    std::string mTexts[kNumFields];
    PluginField mFields[kNumFields];
    PluginFieldCollection mCollection{kNumFields, mFields};
};

class EncoderCreator final : public IPluginCreatorV3One
{
public:
    IPluginV3* createPlugin(char const*, PluginFieldCollection const* fields, TensorRTPhase) noexcept override
    {
        return guarded<IPluginV3*>(nullptr, [&]() -> IPluginV3* {
            std::string texts[kNumFields];
            for (int32_t i = 0; fields && i < fields->nbFields; ++i)
            {
                PluginField const& field = fields->fields[i];
                auto const* const name = std::find_if(std::begin(kFields), std::end(kFields),
                    [&](char const* one) { return std::strcmp(one, field.name) == 0; });
                if (name != std::end(kFields) && field.type == PluginFieldType::kCHAR)
                {
                    std::string& text = texts[name - kFields];
                    text.assign(static_cast<char const*>(field.data), field.length);
                    text.resize(std::strlen(text.c_str())); // some give a text with its zero
                }
            }
            if (std::any_of(std::begin(texts), std::end(texts), [](std::string const& text) { return text.empty(); }))
            {
                fail("fields: needs plan, inputs and outputs, which are texts");
                return nullptr;
            }
            return EncoderPlugin::make(texts);
        });
    }

    PluginFieldCollection const* getFieldNames() noexcept override
    {
        static PluginField const names[] = {PluginField(kFields[0], nullptr, PluginFieldType::kCHAR, 0),
            PluginField(kFields[1], nullptr, PluginFieldType::kCHAR, 0), PluginField(kFields[2], nullptr, PluginFieldType::kCHAR, 0)};
        static PluginFieldCollection const collection{kNumFields, names};
        return &collection;
    }

    char const* getPluginName() const noexcept override
    {
        return kName;
    }
    char const* getPluginVersion() const noexcept override
    {
        return "1";
    }
    char const* getPluginNamespace() const noexcept override
    {
        return "";
    }
};

} // namespace

IPluginCreatorInterface& encoderCreator()
{
    static EncoderCreator creator;
    return creator;
}

} // namespace adtp
