// Loads the plugin library as TensorRT would, without TensorRT, and walks through everything the runtime asks of it.
// With a GPU it also runs `enqueue` against a reference in double. Prints a line for each check; exits 0 if all hold.
//
//   adtp_plugin_harness LIBRARY [LONGEST]
//
// LONGEST leaves out cases with a longer sequence, for a stand-in of a GPU that is slow.

#include "compare.h"
#include "device.h"

#include <NvInferRuntime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <memory>
#include <string>
#include <vector>

using namespace nvinfer1;
using namespace adtp;

namespace
{

int failures = 0;

void check(bool holds, std::string const& what)
{
    std::printf("%s  %s\n", holds ? "ok  " : "FAIL", what.c_str());
    failures += holds ? 0 : 1;
}

class Logger final : public ILogger
{
public:
    void log(Severity, char const* message) noexcept override
    {
        last = message;
    }
    std::string last;
};

class Finder final : public ILoggerFinder
{
public:
    ILogger* findLogger() override
    {
        return &logger;
    }
    Logger logger;
};

class NoExpressions final : public IExprBuilder
{
};

PluginTensorDesc tensor(std::vector<int64_t> const& shape, DataType type, TensorFormat format = TensorFormat::kLINEAR)
{
    PluginTensorDesc result{};
    result.dims.nbDims = static_cast<int32_t>(shape.size());
    std::copy(shape.begin(), shape.end(), result.dims.d);
    result.type = type;
    result.format = format;
    return result;
}

std::vector<PluginTensorDesc> inputs(int64_t tokens, int64_t hidden, int64_t sequences, DataType type)
{
    PluginTensorDesc const states = tensor({tokens, hidden}, type);
    return {states, states, states, tensor({sequences + 1}, DataType::kINT32)};
}

std::unique_ptr<IPluginV3> create(IPluginCreatorV3One& creator, int32_t numHeads, float scale)
{
    PluginField const fields[] = {{"num_heads", &numHeads, PluginFieldType::kINT32, 1},
        {"scale", &scale, PluginFieldType::kFLOAT32, 1}, {"plugin_version", "1", PluginFieldType::kCHAR, 1}};
    PluginFieldCollection const collection{3, fields};
    return std::unique_ptr<IPluginV3>(creator.createPlugin("attention", &collection, TensorRTPhase::kBUILD));
}

template <typename Capability>
Capability& capability(IPluginV3& plugin, PluginCapabilityType type)
{
    return *static_cast<Capability*>(plugin.getCapabilityInterface(type));
}

void walkInterface(IPluginCreatorV3One& creator, Finder& finder, bool received)
{
    std::string const name = received ? "AdtpRaggedAttentionReceived" : "AdtpRaggedAttention";
    std::printf("      %s\n", name.c_str());
    int32_t const outputs = received ? 2 : 1;
    check(creator.getPluginName() == name, "creator: name");
    check(std::strcmp(creator.getPluginVersion(), "1") == 0, "creator: version");
    check(std::strcmp(creator.getPluginNamespace(), "") == 0, "creator: namespace");
    check(creator.getFieldNames()->nbFields == 2, "creator: two fields");

    PluginFieldCollection const empty{0, nullptr};
    check(!creator.createPlugin("attention", &empty, TensorRTPhase::kBUILD), "creator: refuses missing fields");
    check(finder.logger.last.find(name + ": fields: needs num_heads") == 0,
        "creator: says which, to the logger it was given");
    check(!create(creator, 0, 0.125F), "creator: refuses num_heads = 0");

    auto const plugin = create(creator, 12, 0.125F);
    auto& core = capability<IPluginV3OneCore>(*plugin, PluginCapabilityType::kCORE);
    auto& build = capability<IPluginV3OneBuild>(*plugin, PluginCapabilityType::kBUILD);
    auto& runtime = capability<IPluginV3OneRuntime>(*plugin, PluginCapabilityType::kRUNTIME);
    check(std::strcmp(core.getPluginName(), creator.getPluginName()) == 0, "core: name");
    check(std::strcmp(core.getPluginVersion(), creator.getPluginVersion()) == 0, "core: version");

    // Serialized fields make the same plugin again; so does a clone.
    auto const same = [](PluginFieldCollection const* fields) {
        return fields->nbFields == 2 && std::strcmp(fields->fields[0].name, "num_heads") == 0
            && *static_cast<int32_t const*>(fields->fields[0].data) == 12
            && std::strcmp(fields->fields[1].name, "scale") == 0
            && *static_cast<float const*>(fields->fields[1].data) == 0.125F;
    };
    check(same(runtime.getFieldsToSerialize()), "runtime: serializes num_heads and scale");
    std::unique_ptr<IPluginV3> const again(
        creator.createPlugin("attention", runtime.getFieldsToSerialize(), TensorRTPhase::kRUNTIME));
    check(again && same(capability<IPluginV3OneRuntime>(*again, PluginCapabilityType::kRUNTIME).getFieldsToSerialize()),
        "creator: makes it again from what was serialized");
    std::unique_ptr<IPluginV3> const clone(plugin->clone());
    check(same(capability<IPluginV3OneRuntime>(*clone, PluginCapabilityType::kRUNTIME).getFieldsToSerialize()), "clone");
    std::unique_ptr<IPluginV3> const attached(runtime.attachToContext(nullptr));
    check(attached && attached.get() != plugin.get(), "runtime: a plugin of its own for each context");

    check(core.getPluginName() == name && capability<IPluginV3OneCore>(*clone, PluginCapabilityType::kCORE).getPluginName() == name,
        "clone: name");

    check(build.getNbOutputs() == outputs, "build: number of outputs");
    DataType const types[] = {DataType::kHALF, DataType::kHALF, DataType::kHALF, DataType::kINT32};
    DataType outputTypes[2]{};
    check(build.getOutputDataTypes(outputTypes, outputs, types, 4) == 0 && outputTypes[0] == DataType::kHALF
            && (!received || outputTypes[1] == DataType::kFLOAT),
        "build: output types");
    check(build.getOutputDataTypes(outputTypes, outputs, types, 3) != 0, "build: refuses three inputs");
    check(build.getOutputDataTypes(outputTypes, 3 - outputs, types, 4) != 0, "build: refuses another number of outputs");
    DimsExprs shapes[4]{};
    for (auto& shape : shapes)
    {
        shape.nbDims = 2;
        shape.d[0] = reinterpret_cast<IDimensionExpr const*>(&shapes[0]);
        shape.d[1] = reinterpret_cast<IDimensionExpr const*>(&shapes[1]);
    }
    DimsExprs outputShapes[2]{};
    NoExpressions expressions;
    check(build.getOutputShapes(shapes, 4, nullptr, 0, outputShapes, outputs, expressions) == 0
            && outputShapes[0].nbDims == 2 && outputShapes[0].d[0] == shapes[0].d[0]
            && outputShapes[0].d[1] == shapes[0].d[1],
        "build: output shape is that of q");
    check(!received || (outputShapes[1].nbDims == 1 && outputShapes[1].d[0] == shapes[0].d[0]),
        "build: received has the length of q");
    DynamicPluginTensorDesc const unknown[6]{};
    check(build.getWorkspaceSize(unknown, 4, unknown + 4, outputs) == 0, "build: no workspace");

    auto const supports = [&](DataType states, DataType bounds, TensorFormat format, DataType sums = DataType::kFLOAT) {
        DynamicPluginTensorDesc all[6]{};
        for (auto& one : all)
        {
            one.desc = tensor({-1, 768}, states, format);
        }
        all[3].desc = tensor({-1}, bounds, format);
        all[5].desc = tensor({-1}, sums, format);
        bool supported = true;
        for (int32_t i = 0; i < 4 + outputs; ++i)
        {
            supported = supported && build.supportsFormatCombination(i, all, 4, outputs);
        }
        return supported;
    };
    TensorFormat const linear = TensorFormat::kLINEAR;
    check(supports(DataType::kHALF, DataType::kINT32, linear), "formats: fp16");
    check(supports(DataType::kBF16, DataType::kINT32, linear), "formats: bf16");
    check(supports(DataType::kFLOAT, DataType::kINT32, linear), "formats: fp32");
    check(!supports(DataType::kINT8, DataType::kINT32, linear), "formats: refuses int8");
    check(!supports(DataType::kHALF, DataType::kINT64, linear), "formats: refuses int64 cu_seqlens");
    check(!supports(DataType::kHALF, DataType::kINT32, TensorFormat::kCHW32), "formats: refuses CHW32");
    check(supports(DataType::kHALF, DataType::kINT32, linear, DataType::kHALF) == !received,
        "formats: what was received is fp32");

    auto const shapeChange = [&](std::vector<PluginTensorDesc> const& in) {
        return runtime.onShapeChange(in.data(), static_cast<int32_t>(in.size()), in.data(), outputs) == 0;
    };
    check(shapeChange(inputs(100, 768, 3, DataType::kHALF)), "shapes: 12 heads of 64");
    check(!shapeChange(inputs(100, 576, 3, DataType::kHALF)), "shapes: refuses 12 heads of 48");
    check(finder.logger.last.find("head size 48; accepted") != std::string::npos, "shapes: says what is accepted");
    check(!shapeChange(inputs(100, 770, 3, DataType::kHALF)), "shapes: refuses H that num_heads does not divide");
    auto mixed = inputs(100, 768, 3, DataType::kHALF);
    mixed[1].dims.d[0] = 99;
    check(!shapeChange(mixed), "shapes: refuses q and k of different lengths");
    mixed = inputs(100, 768, 3, DataType::kHALF);
    mixed[3].type = DataType::kINT64;
    check(!shapeChange(mixed), "shapes: refuses int64 cu_seqlens");
}

// What the comparison itself says of a right result, and of one with a number that was not written.
void checkComparison()
{
    std::vector<float> const ones(2 * 32, 1.0F);
    Values values{ones, ones, ones, ones, {1.0F, 1.0F}, {0, 2}};
    auto const compared = [&] { return compare(values, 1, 32, 1, std::ldexp(1.0, -23)); };
    check(compared().output.largest <= compared().output.allowed
            && compared().received.largest <= compared().received.allowed,
        "comparison: takes what is right");
    values.received.front() = 1.001F;
    check(compared().received.largest > compared().received.allowed, "comparison: notices a thousandth too much received");
    values.out.front() = NAN; // all others, which come later, are right
    values.received.front() = NAN;
    check(std::isnan(compared().output.largest) && std::isnan(compared().received.largest),
        "comparison: NaN stays the largest error");
    check(std::isnan(larger(larger(0, NAN), 0.5)), "comparison: NaN stays the worst case");
}

DataType dataType(Type const& type)
{
    return type.format == Format::kHALF ? DataType::kHALF : type.format == Format::kBF16 ? DataType::kBF16 : DataType::kFLOAT;
}

// Run a plugin on q, k and v, whose numbers are of the type already; fill in the results, which were NaN before.
bool runOnce(IPluginV3& plugin, Cuda& cuda, Type const& type, Values& values, int64_t hidden)
{
    size_t const count = values.q.size();
    auto const tokens = static_cast<int64_t>(count / hidden);
    auto const sequences = static_cast<int64_t>(values.bounds.size()) - 1;
    auto& build = capability<IPluginV3OneBuild>(plugin, PluginCapabilityType::kBUILD);
    auto& runtime = capability<IPluginV3OneRuntime>(plugin, PluginCapabilityType::kRUNTIME);
    bool const received = build.getNbOutputs() == 2;
    std::vector<float> sums(received ? tokens : 0, NAN);
    Buffer const q(cuda, toBytes(values.q, count, type).data(), count * type.bytes);
    Buffer const k(cuda, toBytes(values.k, count, type).data(), count * type.bytes);
    Buffer const v(cuda, toBytes(values.v, count, type).data(), count * type.bytes);
    Buffer const out(cuda, toBytes({}, count, type).data(), count * type.bytes);
    Buffer const bounds(cuda, values.bounds.data(), values.bounds.size() * sizeof(int32_t));
    Buffer const summed(cuda, sums.data(), sums.size() * sizeof(float));
    void const* const in[] = {q.get(), k.get(), v.get(), bounds.get()};
    void* const results[] = {out.get(), summed.get()};
    auto const descriptions = inputs(tokens, hidden, sequences, dataType(type));
    std::vector<unsigned char> bytes(count * type.bytes);
    bool const ran = q.ok && k.ok && v.ok && out.ok && bounds.ok && summed.ok
        && runtime.onShapeChange(descriptions.data(), 4, descriptions.data(), build.getNbOutputs()) == 0
        && runtime.enqueue(descriptions.data(), descriptions.data(), in, results, nullptr, nullptr) == 0
        && cuda.synchronize() == 0 && out.read(bytes.data(), bytes.size())
        && (!received || summed.read(sums.data(), sums.size() * sizeof(float)));
    values.out = fromBytes(bytes, type);
    values.received = sums;
    return ran;
}

void runOnGpu(IPluginCreatorV3One& creator, Finder& finder, Cuda& cuda, int32_t longest)
{
    std::vector<std::vector<int32_t>> cases = {{1}, {1, 1, 1}, {4, 17, 9, 32, 6}, {15, 16, 17}, {63, 64, 65},
        {127, 128, 129}, {2, 300, 1, 7}, {0, 5, 0}, {512}};
    cases.erase(std::remove_if(cases.begin(), cases.end(),
                    [=](auto const& lengths) { return *std::max_element(lengths.begin(), lengths.end()) > longest; }),
        cases.end());
    for (Type const& type : kTypes)
    {
        for (int32_t const headSize : {32, 64, 128})
        {
            int32_t const numHeads = 5; // the kernel of what was received takes four at a time
            auto const scale = static_cast<float>(1 / std::sqrt(double{1} * headSize));
            auto const plugin = create(creator, numHeads, scale);
            double worst = 0;
            double worstReceived = 0;
            bool ran = true;
            bool repeats = true;
            for (auto const& lengths : cases)
            {
                Values values = randomValues(lengths, numHeads * headSize, type);
                ran = runOnce(*plugin, cuda, type, values, int64_t{numHeads} * headSize) && ran;
                Errors const errors = compare(values, numHeads, headSize, double{scale}, type.unit);
                worst = larger(worst, errors.output.largest / errors.output.allowed);
                worstReceived = larger(worstReceived, errors.received.largest / errors.received.allowed);
                Values again = values;
                ran = runOnce(*plugin, cuda, type, again, int64_t{numHeads} * headSize) && ran;
                repeats = repeats && again.out == values.out && again.received == values.received;
            }
            std::string const what = std::string("enqueue: ") + type.name + ", " + std::to_string(numHeads)
                + " heads of " + std::to_string(headSize);
            check(ran && worst <= 1 && worstReceived <= 1,
                what + ", error " + std::to_string(worst) + ", of received " + std::to_string(worstReceived)
                    + " of what rounding allows" + (ran ? "" : "; failed: " + finder.logger.last));
            check(repeats, what + ", to the bit the same again");
        }
    }
}

// Builders may time a layer on lengths that nobody has filled. Whether the kernel then reads or writes elsewhere is seen
// with `compute-sanitizer adtp_plugin_harness LIBRARY`; here, that it ends.
void runOnWrongLengths(IPluginCreatorV3One& creator, Cuda& cuda)
{
    constexpr int32_t most = 2147483647;
    constexpr int32_t tokens = 64;
    constexpr int32_t hidden = 192;
    std::vector<int32_t> const cases[] = {{-5, 3, 99}, {most, most, most}, {-most, -most, -most}, {90, 10, 50}, {0, most, 7}};
    bool ran = true;
    for (Type const& type : kTypes)
    {
        for (int32_t const numHeads : {6, 3})
        {
            auto const plugin = create(creator, numHeads, 0.125F);
            for (auto const& bounds : cases)
            {
                std::vector<float> const zeros(size_t{tokens} * hidden);
                Values values{zeros, zeros, zeros, {}, {}, bounds};
                ran = runOnce(*plugin, cuda, type, values, hidden) && ran;
            }
        }
    }
    check(ran, "enqueue: ends on wrong lengths");
}

// What is said where there is no GPU.
void runWithout(IPluginCreatorV3One& creator, Finder& finder)
{
    auto const descriptions = inputs(16, 768, 1, DataType::kHALF);
    auto const plugin = create(creator, 12, 0.125F);
    void const* const in[4]{};
    void* const out[2]{};
    int32_t const status = capability<IPluginV3OneRuntime>(*plugin, PluginCapabilityType::kRUNTIME)
                               .enqueue(descriptions.data(), descriptions.data(), in, out, nullptr, nullptr);
    check(status != 0 && !finder.logger.last.empty(), "enqueue: without a GPU fails and says: " + finder.logger.last);
    std::printf("skip  enqueue against the reference: no GPU here\n");
}

} // namespace

int main(int argc, char** argv)
{
    int32_t const longest = argc == 3 ? std::atoi(argv[2]) : INT32_MAX;
    if (argc < 2 || argc > 3 || longest < 1)
    {
        std::fprintf(stderr, "usage: %s LIBRARY [LONGEST]\n", argv[0]);
        return 2;
    }
    void* const library = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
    if (!library)
    {
        std::fprintf(stderr, "cannot load %s: %s\n", argv[1], dlerror());
        return 2;
    }
    IPluginCreatorInterface* const* (*getCreators)(int32_t&) = nullptr;
    void (*setLoggerFinder)(ILoggerFinder*) = nullptr;
    void* address = dlsym(library, "getCreators");
    std::memcpy(&getCreators, &address, sizeof(address));
    address = dlsym(library, "setLoggerFinder");
    std::memcpy(&setLoggerFinder, &address, sizeof(address));
    check(getCreators && setLoggerFinder, "library: getCreators and setLoggerFinder");
    if (failures)
    {
        return 1;
    }

    Finder finder;
    setLoggerFinder(&finder);
    int32_t count = 0;
    IPluginCreatorInterface* const* const creators = getCreators(count);
    check(count == 6 && creators, "library: six creators");
    if (failures)
    {
        return 1;
    }
    checkComparison();
    Cuda cuda{};
    bool const hasGpu = cuda.load();
    auto& encoder = *static_cast<IPluginCreatorV3One*>(creators[2]);
    check(std::strcmp(encoder.getPluginName(), "AdtpEncoder") == 0, "library: the third is of AdtpEncoder");
    for (int32_t i = 3; i < count; ++i) // of grouped attention
    {
        PluginFieldCollection const empty{0, nullptr};
        auto& grouped = *static_cast<IPluginCreatorV3One*>(creators[i]);
        check(!grouped.createPlugin("attention", &empty, TensorRTPhase::kBUILD), "grouped: refuses missing fields");
    }
    for (int32_t i = 0; i < 2; ++i)
    {
        check(std::strcmp(creators[i]->getInterfaceInfo().kind, "PLUGIN CREATOR_V3ONE") == 0, "library: creator of IPluginV3");
        auto& creator = *static_cast<IPluginCreatorV3One*>(creators[i]);
        walkInterface(creator, finder, i == 1);
        if (hasGpu)
        {
            runOnGpu(creator, finder, cuda, longest);
            runOnWrongLengths(creator, cuda);
        }
        else
        {
            runWithout(creator, finder);
        }
    }
    setLoggerFinder(nullptr);
    return failures ? 1 : 0;
}
