// AdtpRaggedAttentionGrouped, its form with a window, and the one that says what keys received, for TensorRT and TensorRT-RTX: names,
// version and fields as in plugins/tensorrt_grouped.py.
#include "grouped.h"
#include "plugin.h"

#include <cstring>
#include <iterator>
#include <new>
#include <string>

namespace adtp
{
namespace
{

using namespace nvinfer1;

constexpr char const* kNames[]
    = {"AdtpRaggedAttentionGrouped", "AdtpRaggedAttentionGroupedWindow", "AdtpRaggedAttentionGroupedReceived"};
constexpr int32_t kReceived = 2; // its place there
constexpr int32_t kNumInputs = 7; // q (T, N*D); k, v (T', KV*D); cu_q, cu_k (B+1,), positions_q (T,), positions_k (T',) int32
constexpr int32_t kNumStates = 3;
constexpr char const* kFields[] = {"num_heads", "kv_heads", "window_back", "window_ahead"};
constexpr int32_t kNumIntegers = 4;

// The fields, in this order, and scale.
struct Numbers
{
    int32_t integers[kNumIntegers];
    float scale;

    int32_t numHeads() const { return integers[0]; }
    int32_t kvHeads() const { return integers[1]; }
    bool areRight() const
    {
        return numHeads() > 0 && kvHeads() > 0 && numHeads() % kvHeads() == 0 && integers[2] >= -1 && integers[3] >= -1 && scale > 0.F;
    }
};

char const* nameOf(DataType type)
{
    switch (type)
    {
    case DataType::kHALF: return "fp16";
    case DataType::kBF16: return "bf16";
    case DataType::kFLOAT: return "fp32";
    default: return "another type";
    }
}

class Plugin final : public IPluginV3,
                     public IPluginV3OneCore,
                     public IPluginV3OneBuild,
                     public IPluginV3OneRuntime
{
public:
    Plugin(int32_t form, Numbers const& numbers)
        : mForm(form)
        , mNumbers(numbers)
        , mCollection{kNumIntegers + 1, mFields}
    {
        for (int32_t i = 0; i < kNumIntegers; ++i)
        {
            mFields[i] = PluginField(kFields[i], &mNumbers.integers[i], PluginFieldType::kINT32, 1);
        }
        mFields[kNumIntegers] = PluginField("scale", &mNumbers.scale, PluginFieldType::kFLOAT32, 1);
    }
    Plugin(Plugin const&) = delete; // mFields points into the object
    Plugin& operator=(Plugin const&) = delete;

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
        return new (std::nothrow) Plugin(mForm, mNumbers);
    }

    // Core

    char const* getPluginName() const noexcept override
    {
        return kNames[mForm];
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
        return mForm == kReceived ? 2 : 1; // (T, N*D), and received (T',) fp32
    }

    int32_t getOutputDataTypes(
        DataType* outputs, int32_t numOutputs, DataType const* inputs, int32_t numInputs) const noexcept override
    {
        if (numOutputs != getNbOutputs() || numInputs != kNumInputs)
        {
            return failOnNumbers();
        }
        outputs[0] = inputs[0];
        if (mForm == kReceived)
        {
            outputs[1] = DataType::kFLOAT;
        }
        return 0;
    }

    int32_t getOutputShapes(DimsExprs const* inputs, int32_t numInputs, DimsExprs const*, int32_t, DimsExprs* outputs,
        int32_t numOutputs, IExprBuilder&) noexcept override
    {
        if (numOutputs != getNbOutputs() || numInputs != kNumInputs)
        {
            return failOnNumbers();
        }
        outputs[0] = inputs[0];
        if (mForm == kReceived)
        {
            outputs[1].nbDims = 1;
            outputs[1].d[0] = inputs[1].d[0];
        }
        return 0;
    }

    bool supportsFormatCombination(
        int32_t position, DynamicPluginTensorDesc const* tensors, int32_t numInputs, int32_t numOutputs) noexcept override
    {
        if (numInputs != kNumInputs || numOutputs != getNbOutputs())
        {
            return false;
        }
        PluginTensorDesc const& found = tensors[position].desc;
        DataType const type = tensors[0].desc.type;
        bool const isFloating = type == DataType::kHALF || type == DataType::kBF16 || type == DataType::kFLOAT;
        bool const isInteger = position >= kNumStates && position < kNumInputs;
        DataType const wanted = isInteger ? DataType::kINT32 : position > kNumInputs ? DataType::kFLOAT : type;
        return found.format == TensorFormat::kLINEAR && isFloating && found.type == wanted;
    }

    int32_t configurePlugin(DynamicPluginTensorDesc const* inputs, int32_t numInputs, DynamicPluginTensorDesc const*,
        int32_t) noexcept override
    {
        if (numInputs != kNumInputs)
        {
            return failOnNumbers();
        }
        PluginTensorDesc descriptions[kNumInputs];
        for (int32_t i = 0; i < kNumInputs; ++i)
        {
            descriptions[i] = inputs[i].desc;
        }
        return checkShapes(descriptions);
    }

    // Run

    int32_t onShapeChange(
        PluginTensorDesc const* inputs, int32_t numInputs, PluginTensorDesc const*, int32_t) noexcept override
    {
        if (numInputs != kNumInputs)
        {
            return failOnNumbers();
        }
        int32_t status = checkShapes(inputs);
        status = status ? status : checkSizes(inputs);
        if (status == 0)
        {
            // Builders come by as well, on machines without a GPU. What goes wrong here, enqueue meets again and says.
            prepareGrouped(nameOf(inputs[0].type), headSize(inputs[0].dims), mForm == kReceived);
        }
        return status;
    }

    int32_t enqueue(PluginTensorDesc const* inputs, PluginTensorDesc const*, void const* const* in, void* const* out,
        void*, cudaStream_t stream) noexcept override
    {
        auto const size = [&](int32_t input, int32_t axis) { return static_cast<int32_t>(inputs[input].dims.d[axis]); };
        GroupedCall const call{in[0], in[1], in[2], in[3], in[4], in[5], in[6], out[0],
            mForm == kReceived ? static_cast<float*>(out[1]) : nullptr, nameOf(inputs[0].type), size(0, 1), size(1, 1), size(0, 0),
            size(1, 0), size(3, 0) - 1, mNumbers.numHeads(), mNumbers.kvHeads(), headSize(inputs[0].dims), mNumbers.scale,
            mNumbers.integers[2], mNumbers.integers[3]};
        std::string const error = launch(call, stream);
        return error.empty() ? 0 : fail(error);
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
    int32_t fail(std::string const& what) const noexcept
    {
        return report(std::string(kNames[mForm]) + ": " + what);
    }

    int32_t failOnNumbers() const noexcept
    {
        return fail("takes q, k, v, cu_q, cu_k, positions_q and positions_k, and has "
            + std::string(mForm == kReceived ? "two outputs" : "one output"));
    }

    int32_t headSize(Dims const& q) const
    {
        return static_cast<int32_t>(q.d[1] / mNumbers.numHeads());
    }

    int32_t checkShapes(PluginTensorDesc const* inputs) const noexcept
    {
        Dims const &q = inputs[0].dims, &k = inputs[1].dims, &v = inputs[2].dims;
        if (q.nbDims != 2 || k.nbDims != 2 || v.nbDims != 2 || k.d[0] != v.d[0] || k.d[1] != v.d[1] || inputs[1].type != inputs[0].type
            || inputs[2].type != inputs[0].type)
        {
            return fail("q must be (T, N*D), k and v (T', KV*D), of one type");
        }
        for (int32_t i = kNumStates; i < kNumInputs; ++i)
        {
            if (inputs[i].dims.nbDims != 1 || inputs[i].type != DataType::kINT32)
            {
                return fail("cu_q, cu_k, positions_q and positions_k must be of one axis, int32");
            }
        }
        if (q.d[1] < 1 || q.d[1] % mNumbers.numHeads() || q.d[1] * mNumbers.kvHeads() != k.d[1] * mNumbers.numHeads())
        {
            return fail("q of " + std::to_string(q.d[1]) + " and k of " + std::to_string(k.d[1]) + " columns are no "
                + std::to_string(mNumbers.numHeads()) + " and " + std::to_string(mNumbers.kvHeads()) + " heads of one size");
        }
        std::string const error = checkGrouped(nameOf(inputs[0].type), headSize(q));
        return error.empty() ? 0 : fail(error);
    }

    // Of tensors that are there: while an engine is configured, sizes may be unknown.
    int32_t checkSizes(PluginTensorDesc const* inputs) const noexcept
    {
        auto const size = [&](int32_t input) { return inputs[input].dims.d[0]; };
        if (size(3) < 2 || size(3) != size(4) || size(5) != size(0) || size(6) != size(1))
        {
            return fail("cu_q and cu_k must be (B+1,), positions_q (T,) and positions_k (T',); got " + std::to_string(size(3)) + ", "
                + std::to_string(size(4)) + ", " + std::to_string(size(5)) + " and " + std::to_string(size(6)) + " for "
                + std::to_string(size(0)) + " queries and " + std::to_string(size(1)) + " keys");
        }
        return 0;
    }

    int32_t mForm;
    Numbers mNumbers;
    PluginField mFields[kNumIntegers + 1];
    PluginFieldCollection mCollection;
};

class Creator final : public IPluginCreatorV3One
{
public:
    explicit Creator(int32_t form)
        : mForm(form)
    {
    }

    IPluginV3* createPlugin(char const*, PluginFieldCollection const* fields, TensorRTPhase) noexcept override
    {
        Numbers numbers{{0, 0, -2, -2}, 0.F};
        for (int32_t i = 0; fields && i < fields->nbFields; ++i)
        {
            PluginField const& field = fields->fields[i];
            for (int32_t j = 0; j < kNumIntegers; ++j)
            {
                if (std::strcmp(field.name, kFields[j]) == 0 && field.type == PluginFieldType::kINT32 && field.length == 1)
                {
                    std::memcpy(&numbers.integers[j], field.data, sizeof(int32_t));
                }
            }
            if (std::strcmp(field.name, "scale") == 0 && field.type == PluginFieldType::kFLOAT32 && field.length == 1)
            {
                std::memcpy(&numbers.scale, field.data, sizeof(float));
            }
        }
        if (!numbers.areRight())
        {
            report(std::string(kNames[mForm])
                + ": fields: needs num_heads (int32, at least 1), kv_heads (int32, a divisor of it), window_back and window_ahead (int32, "
                  "at least -1) and scale (float32, above 0)");
            return nullptr;
        }
        return new (std::nothrow) Plugin(mForm, numbers);
    }

    PluginFieldCollection const* getFieldNames() noexcept override
    {
        static PluginField const names[] = {PluginField(kFields[0], nullptr, PluginFieldType::kINT32, 1),
            PluginField(kFields[1], nullptr, PluginFieldType::kINT32, 1), PluginField(kFields[2], nullptr, PluginFieldType::kINT32, 1),
            PluginField(kFields[3], nullptr, PluginFieldType::kINT32, 1), PluginField("scale", nullptr, PluginFieldType::kFLOAT32, 1)};
        static PluginFieldCollection const collection{kNumIntegers + 1, names};
        return &collection;
    }

    char const* getPluginName() const noexcept override
    {
        return kNames[mForm];
    }
    char const* getPluginVersion() const noexcept override
    {
        return "1";
    }
    char const* getPluginNamespace() const noexcept override
    {
        return "";
    }

private:
    int32_t mForm;
};

} // namespace

IPluginCreatorInterface& groupedCreator(int32_t form)
{
    static Creator creators[] = {Creator(0), Creator(1), Creator(kReceived)};
    return creators[form];
}

} // namespace adtp
