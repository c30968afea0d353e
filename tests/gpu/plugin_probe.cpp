// AdtpEncoder's creator and plugin as TensorRT would call them, behind a C interface that ctypes takes; with ADTP_GROUPED, those of
// grouped attention.
#include "plugin.h"

#include <cstring>
#include <memory>
#include <string>
#include <vector>

using namespace nvinfer1;

static std::string said;

int32_t adtp::report(std::string const& message) noexcept
{
    said = message;
    return -1;
}

extern "C" __attribute__((visibility("default"))) char const* probe_said()
{
    return said.c_str();
}

static IPluginV3* createdTwice(IPluginCreatorInterface& found, PluginFieldCollection const& collection)
{
    auto& creator = static_cast<IPluginCreatorV3One&>(found);
    std::unique_ptr<IPluginV3> const made(creator.createPlugin("layer", &collection, TensorRTPhase::kBUILD));
    if (!made)
    {
        return nullptr;
    }
    auto& runtime = *static_cast<IPluginV3OneRuntime*>(made->getCapabilityInterface(PluginCapabilityType::kRUNTIME));
    std::unique_ptr<IPluginV3> const again(creator.createPlugin("layer", runtime.getFieldsToSerialize(), TensorRTPhase::kRUNTIME));
    return static_cast<IPluginV3OneRuntime*>(again->getCapabilityInterface(PluginCapabilityType::kRUNTIME))->attachToContext(nullptr);
}

// Null where the fields are refused. It is made again from what it serializes, and cloned, as TensorRT does.
#ifdef ADTP_GROUPED
extern "C" __attribute__((visibility("default"))) IPluginV3* probe_create(int32_t form, int32_t const* integers, float scale)
{
    PluginField const fields[] = {{"num_heads", &integers[0], PluginFieldType::kINT32, 1},
        {"kv_heads", &integers[1], PluginFieldType::kINT32, 1}, {"window_back", &integers[2], PluginFieldType::kINT32, 1},
        {"window_ahead", &integers[3], PluginFieldType::kINT32, 1}, {"scale", &scale, PluginFieldType::kFLOAT32, 1}};
    return createdTwice(adtp::groupedCreator(form), {5, fields});
}
#else
extern "C" __attribute__((visibility("default"))) IPluginV3* probe_create(char const* plan, char const* inputs, char const* outputs)
{
    PluginField const fields[] = {{"plan", plan, PluginFieldType::kCHAR, static_cast<int32_t>(std::strlen(plan))},
        {"inputs", inputs, PluginFieldType::kCHAR, static_cast<int32_t>(std::strlen(inputs))},
        {"outputs", outputs, PluginFieldType::kCHAR, static_cast<int32_t>(std::strlen(outputs))}};
    return createdTwice(adtp::encoderCreator(), {3, fields});
}
#endif

extern "C" __attribute__((visibility("default"))) void probe_destroy(IPluginV3* plugin)
{
    delete plugin;
}

// dims: 8 of each input. 0, or what was refused: 1 the formats, 2 the shapes, 3 the call.
extern "C" __attribute__((visibility("default"))) int32_t probe_run(IPluginV3* plugin, int32_t count, int64_t const* dims,
    int32_t const* ranks, int32_t const* types, void const* const* in, void* const* out, void* stream)
{
    auto& build = *static_cast<IPluginV3OneBuild*>(plugin->getCapabilityInterface(PluginCapabilityType::kBUILD));
    auto& runtime = *static_cast<IPluginV3OneRuntime*>(plugin->getCapabilityInterface(PluginCapabilityType::kRUNTIME));
    std::vector<PluginTensorDesc> given(count);
    std::vector<DynamicPluginTensorDesc> all(count + build.getNbOutputs());
    for (int32_t i = 0; i < count; ++i)
    {
        given[i].dims.nbDims = ranks[i];
        std::memcpy(given[i].dims.d, dims + 8 * i, sizeof(given[i].dims.d));
        given[i].type = static_cast<DataType>(types[i]);
        all[i].desc = given[i];
    }
#ifdef ADTP_GROUPED
    all[count].desc = given[0]; // the first output is as the first input is
#endif
    for (int32_t i = 0; i < static_cast<int32_t>(all.size()); ++i)
    {
        if (!build.supportsFormatCombination(i, all.data(), count, build.getNbOutputs()))
        {
            return 1;
        }
    }
    if (runtime.onShapeChange(given.data(), count, &all.back().desc, build.getNbOutputs()))
    {
        return 2;
    }
    return runtime.enqueue(given.data(), nullptr, in, out, nullptr, static_cast<cudaStream_t>(stream)) ? 3 : 0;
}
