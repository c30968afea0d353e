// AdtpRaggedAttention and AdtpRaggedAttentionReceived for TensorRT and TensorRT-RTX: names, version and fields as in
// plugins/tensorrt.py, so that an engine built with one host loads with the other.

#include "kernels.h"
#include "launch.h"
#include "plugin.h"

#include <cstdio>
#include <cstring>
#include <iterator>
#include <mutex>
#include <new>
#include <string>

#ifdef _WIN32
#define ADTP_EXPORT __declspec(dllexport)
#else
#define ADTP_EXPORT __attribute__((visibility("default")))
#endif

namespace adtp
{

using namespace nvinfer1;

static ILoggerFinder* loggerFinder = nullptr;

int32_t report(std::string const& message) noexcept
{
    if (ILogger* const logger = loggerFinder ? loggerFinder->findLogger() : nullptr)
    {
        logger->log(ILogger::Severity::kERROR, message.c_str());
    }
    else
    {
        std::fprintf(stderr, "%s\n", message.c_str());
    }
    return -1;
}

namespace
{

constexpr char const* kName = "AdtpRaggedAttention";
constexpr char const* kNameReceived = "AdtpRaggedAttentionReceived";
constexpr char const* kVersion = "1";
constexpr char const* kNamespace = "";
constexpr int32_t kNumInputs = 4; // q, k, v (T, H) and cu_seqlens (B+1,) int32

int32_t fail(bool received, std::string const& what) noexcept
{
    return report(std::string(received ? kNameReceived : kName) + ": " + what);
}

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
    Plugin(bool received, int32_t numHeads, float scale)
        : mReceived(received)
        , mNumHeads(numHeads)
        , mScale(scale)
        , mFields{PluginField("num_heads", &mNumHeads, PluginFieldType::kINT32, 1),
              PluginField("scale", &mScale, PluginFieldType::kFLOAT32, 1)}
        , mCollection{2, mFields}
    {
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
        return new (std::nothrow) Plugin(mReceived, mNumHeads, mScale);
    }

    // Core

    char const* getPluginName() const noexcept override
    {
        return mReceived ? kNameReceived : kName;
    }
    char const* getPluginVersion() const noexcept override
    {
        return kVersion;
    }
    char const* getPluginNamespace() const noexcept override
    {
        return kNamespace;
    }

    // Build

    int32_t getNbOutputs() const noexcept override
    {
        return mReceived ? 2 : 1; // (T, H), and received (T,) fp32
    }

    int32_t getOutputDataTypes(
        DataType* outputs, int32_t numOutputs, DataType const* inputs, int32_t numInputs) const noexcept override
    {
        if (numOutputs != getNbOutputs() || numInputs != kNumInputs)
        {
            return failOnNumbers();
        }
        outputs[0] = inputs[0];
        if (mReceived)
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
        if (mReceived)
        {
            outputs[1].nbDims = 1;
            outputs[1].d[0] = inputs[0].d[0];
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
        DataType const wanted = position == 3 ? DataType::kINT32 : position > kNumInputs ? DataType::kFLOAT : type;
        return found.format == TensorFormat::kLINEAR && isFloating && found.type == wanted;
    }

    int32_t configurePlugin(DynamicPluginTensorDesc const* inputs, int32_t numInputs, DynamicPluginTensorDesc const*,
        int32_t) noexcept override
    {
        if (numInputs != kNumInputs)
        {
            return fail("takes q, k, v and cu_seqlens");
        }
        PluginTensorDesc const descriptions[] = {inputs[0].desc, inputs[1].desc, inputs[2].desc, inputs[3].desc};
        return checkShapes(descriptions);
    }

    // Run

    int32_t onShapeChange(
        PluginTensorDesc const* inputs, int32_t numInputs, PluginTensorDesc const*, int32_t) noexcept override
    {
        if (numInputs != kNumInputs)
        {
            return fail("takes q, k, v and cu_seqlens");
        }
        int32_t const status = checkShapes(inputs);
        if (status == 0)
        {
            // Builders come by as well, on machines without a GPU. What goes wrong here, enqueue meets again and says.
            prepare(nameOf(inputs[0].type), static_cast<int32_t>(inputs[0].dims.d[1] / mNumHeads), mReceived);
        }
        return status;
    }

    int32_t enqueue(PluginTensorDesc const* inputs, PluginTensorDesc const*, void const* const* in, void* const* out,
        void*, cudaStream_t stream) noexcept override
    {
        auto const hidden = static_cast<int32_t>(inputs[0].dims.d[1]);
        Call const call{in[0], in[1], in[2], in[3], out[0], hidden, static_cast<int32_t>(inputs[0].dims.d[0]),
            static_cast<int32_t>(inputs[3].dims.d[0] - 1), mNumHeads, hidden / mNumHeads, nameOf(inputs[0].type),
            mScale, mReceived ? static_cast<float*>(out[1]) : nullptr};
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
        return adtp::fail(mReceived, what);
    }

    int32_t failOnNumbers() const noexcept
    {
        return fail(mReceived ? "takes q, k, v and cu_seqlens, and has two outputs"
                              : "takes q, k, v and cu_seqlens, and has one output");
    }

    int32_t checkShapes(PluginTensorDesc const* inputs) const noexcept
    {
        Dims const& q = inputs[0].dims;
        for (int32_t i = 0; i < 3; ++i)
        {
            Dims const& dims = inputs[i].dims;
            if (dims.nbDims != 2 || dims.d[0] != q.d[0] || dims.d[1] != q.d[1] || inputs[i].type != inputs[0].type)
            {
                return fail("q, k, v must share one shape (T, H) and one type");
            }
        }
        if (inputs[3].dims.nbDims != 1 || inputs[3].type != DataType::kINT32)
        {
            return fail("cu_seqlens must be (B+1,) int32");
        }
        if (q.d[1] < 1 || q.d[1] % mNumHeads)
        {
            return fail("num_heads = " + std::to_string(mNumHeads) + " must divide H = " + std::to_string(q.d[1]));
        }
        std::string const error = check(nameOf(inputs[0].type), static_cast<int32_t>(q.d[1] / mNumHeads));
        return error.empty() ? 0 : fail(error);
    }

    bool mReceived;
    int32_t mNumHeads;
    float mScale;
    PluginField mFields[2];
    PluginFieldCollection mCollection;
};

class Creator final : public IPluginCreatorV3One
{
public:
    explicit Creator(bool received)
        : mReceived(received)
    {
    }

    IPluginV3* createPlugin(char const*, PluginFieldCollection const* fields, TensorRTPhase) noexcept override
    {
        int32_t numHeads = 0;
        float scale = 0.F;
        for (int32_t i = 0; fields && i < fields->nbFields; ++i)
        {
            PluginField const& field = fields->fields[i];
            bool const isNumHeads = std::strcmp(field.name, "num_heads") == 0;
            if (isNumHeads && field.type == PluginFieldType::kINT32 && field.length == 1)
            {
                std::memcpy(&numHeads, field.data, sizeof(numHeads));
            }
            if (std::strcmp(field.name, "scale") == 0 && field.type == PluginFieldType::kFLOAT32 && field.length == 1)
            {
                std::memcpy(&scale, field.data, sizeof(scale));
            }
        }
        if (numHeads < 1 || !(scale > 0.F))
        {
            fail(mReceived, "fields: needs num_heads (int32, at least 1) and scale (float32, above 0)");
            return nullptr;
        }
        return new (std::nothrow) Plugin(mReceived, numHeads, scale);
    }

    PluginFieldCollection const* getFieldNames() noexcept override
    {
        static PluginField const names[] = {PluginField("num_heads", nullptr, PluginFieldType::kINT32, 1),
            PluginField("scale", nullptr, PluginFieldType::kFLOAT32, 1)};
        static PluginFieldCollection const collection{2, names};
        return &collection;
    }

    char const* getPluginName() const noexcept override
    {
        return mReceived ? kNameReceived : kName;
    }
    char const* getPluginVersion() const noexcept override
    {
        return kVersion;
    }
    char const* getPluginNamespace() const noexcept override
    {
        return kNamespace;
    }

private:
    bool mReceived;
};

} // namespace
} // namespace adtp

// What TensorRT looks for in a plugin library.

extern "C" ADTP_EXPORT void setLoggerFinder(nvinfer1::ILoggerFinder* finder)
{
    adtp::loggerFinder = finder;
}

extern "C" ADTP_EXPORT nvinfer1::IPluginCreatorInterface* const* getCreators(int32_t& count)
{
    static adtp::Creator attention(false);
    static adtp::Creator received(true);
    static nvinfer1::IPluginCreatorInterface* const creators[] = {&attention, &received, &adtp::encoderCreator(),
        &adtp::groupedCreator(0), &adtp::groupedCreator(1), &adtp::groupedCreator(2)};
    count = static_cast<int32_t>(std::size(creators));
    return creators;
}

// Which kernels this library carries: the hash in their manifest.
extern "C" ADTP_EXPORT char const* adtpPluginsSource()
{
    return adtp::kSource;
}
