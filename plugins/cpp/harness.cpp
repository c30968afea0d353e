// Loads the plugin library as TensorRT would, without TensorRT, and walks through everything the runtime asks of it.
// With a GPU it also runs `enqueue` against a reference in double. Prints a line for each check; exits 0 if all hold.
//
//   adtp_plugin_harness LIBRARY

#include <NvInferRuntime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <dlfcn.h>
#include <memory>
#include <random>
#include <string>
#include <vector>

using namespace nvinfer1;

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

// On the GPU, through the driver alone.

using Status = int32_t;

struct Cuda
{
    Status (*init)(uint32_t);
    Status (*deviceCount)(int32_t*);
    Status (*retain)(void**, int32_t);
    Status (*setCurrent)(void*);
    Status (*allocate)(uint64_t*, size_t);
    Status (*release)(uint64_t);
    Status (*upload)(uint64_t, void const*, size_t);
    Status (*download)(void*, uint64_t, size_t);
    Status (*synchronize)();

    // False where there is no driver or no GPU.
    bool load()
    {
        void* const library = dlopen("libcuda.so.1", RTLD_NOW);
        auto const get = [library](auto& function, char const* name) {
            void* const address = library ? dlsym(library, name) : nullptr;
            std::memcpy(&function, &address, sizeof(address));
            return address != nullptr;
        };
        int32_t count = 0;
        void* context = nullptr;
        return get(init, "cuInit") && get(deviceCount, "cuDeviceGetCount") && get(retain, "cuDevicePrimaryCtxRetain")
            && get(setCurrent, "cuCtxSetCurrent") && get(allocate, "cuMemAlloc_v2") && get(release, "cuMemFree_v2")
            && get(upload, "cuMemcpyHtoD_v2") && get(download, "cuMemcpyDtoH_v2")
            && get(synchronize, "cuCtxSynchronize") && init(0) == 0 && deviceCount(&count) == 0 && count > 0
            && retain(&context, 0) == 0 && setCurrent(context) == 0;
    }
};

// Numbers as the kernel stores them. Subnormals of fp16 do not occur here and become zero.
uint32_t bitsOf(float value)
{
    uint32_t bits = 0;
    std::memcpy(&bits, &value, sizeof(bits));
    return bits;
}

float fromBits(uint32_t bits)
{
    float value = 0;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
}

uint32_t encode(float value, DataType type)
{
    uint32_t const bits = bitsOf(value);
    if (type == DataType::kFLOAT)
    {
        return bits;
    }
    int32_t const dropped = type == DataType::kBF16 ? 16 : 13;
    uint32_t const rounded = bits + (1U << (dropped - 1)) - 1 + ((bits >> dropped) & 1U); // to nearest, ties to even
    if (type == DataType::kBF16)
    {
        return rounded >> 16;
    }
    int32_t const exponent = static_cast<int32_t>((rounded >> 23) & 0xFFU) - 127 + 15;
    uint32_t const sign = (rounded >> 16) & 0x8000U;
    return exponent < 1 ? sign : sign | static_cast<uint32_t>(exponent) << 10 | ((rounded >> 13) & 0x3FFU);
}

float decode(uint32_t bits, DataType type)
{
    if (type == DataType::kFLOAT)
    {
        return fromBits(bits);
    }
    if (type == DataType::kBF16)
    {
        return fromBits(bits << 16);
    }
    uint32_t const sign = (bits & 0x8000U) << 16;
    uint32_t const exponent = (bits >> 10) & 0x1FU;
    if (exponent == 0x1F)
    {
        return fromBits(sign | 0x7F800000U | (bits & 0x3FFU) << 13);
    }
    float const subnormal = std::ldexp(static_cast<float>(bits & 0x3FFU), -24);
    return exponent == 0 ? (sign ? -subnormal : subnormal)
                         : fromBits(sign | (exponent - 15 + 127) << 23 | (bits & 0x3FFU) << 13);
}

struct Error
{
    double largest;
    double allowed;
};

struct Errors
{
    Error output;
    Error received; // relative; 0 where it was not wanted
};

// The larger of two; NaN where one of them is.
double larger(double one, double other)
{
    return std::isnan(one) || one >= other ? one : other;
}

// What a call was given and what it gave. received is empty where it was not wanted.
struct Values
{
    std::vector<float> q, k, v, out, received;
    std::vector<int32_t> bounds;
};

// Largest difference from attention in double, and how much there may be: the weights and the result are each rounded
// once to the type, half a unit in the last place each; the scores are summed in fp32. What was received is a sum of
// weights in fp32: a score of D terms is off by (D + 6) roundings, in the weight and in the sum that it is divided by.
Errors compare(Values const& values, int32_t numHeads, int32_t headSize, double scale, double unit)
{
    auto const& [q, k, v, out, received, bounds] = values;
    int32_t const hidden = numHeads * headSize;
    double largest = 0;
    double highestScore = 0;
    double highestValue = 0;
    int32_t longest = 0;
    std::vector<double> sums(q.size() / hidden);
    for (size_t b = 0; b + 1 < bounds.size(); ++b)
    {
        int32_t const begin = bounds[b];
        int32_t const end = bounds[b + 1];
        std::vector<double> weights(static_cast<size_t>(end - begin));
        longest = std::max(longest, end - begin);
        for (int32_t row = begin; row < end; ++row)
        {
            for (int32_t head = 0; head < numHeads; ++head)
            {
                double peak = -INFINITY;
                for (int32_t key = begin; key < end; ++key)
                {
                    double score = 0;
                    double magnitude = 0;
                    for (int32_t d = head * headSize; d < (head + 1) * headSize; ++d)
                    {
                        double const product = double{q[row * hidden + d]} * double{k[key * hidden + d]};
                        score += product;
                        magnitude += std::abs(product);
                    }
                    weights[key - begin] = score * scale;
                    peak = std::max(peak, score * scale);
                    highestScore = std::max(highestScore, magnitude * scale);
                }
                double total = 0;
                for (double& weight : weights)
                {
                    weight = std::exp(weight - peak);
                    total += weight;
                }
                for (int32_t key = begin; key < end; ++key)
                {
                    sums[key] += weights[key - begin] / total;
                }
                for (int32_t d = head * headSize; d < (head + 1) * headSize; ++d)
                {
                    double expected = 0;
                    for (int32_t key = begin; key < end; ++key)
                    {
                        expected += weights[key - begin] / total * double{v[key * hidden + d]};
                        highestValue = std::max(highestValue, std::abs(double{v[key * hidden + d]}));
                    }
                    double const difference = std::abs(expected - double{out[row * hidden + d]});
                    largest = larger(largest, difference);
                }
            }
        }
    }
    double largestReceived = 0;
    for (size_t i = 0; i < received.size(); ++i)
    {
        largestReceived = larger(largestReceived, std::abs(double{received[i]} - sums[i]) / sums[i]);
    }
    double const rounding = std::ldexp(1.0, -24);
    double const allowed
        = std::expm1(2 * (headSize + 6) * rounding * highestScore) + ((numHeads + 1) * longest + 4) * rounding;
    return {{largest, (unit + 8 * std::ldexp(1.0, -23) * (1 + highestScore)) * highestValue}, {largestReceived, allowed}};
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

// Memory on the device.
class Buffer
{
public:
    // Filled with `data`.
    Buffer(Cuda& cuda, void const* data, size_t bytes)
        : mCuda(cuda)
    {
        ok = cuda.allocate(&mAddress, std::max<size_t>(bytes, 1)) == 0 && (!bytes || cuda.upload(mAddress, data, bytes) == 0);
    }
    Buffer(Buffer const&) = delete;
    Buffer& operator=(Buffer const&) = delete;
    ~Buffer()
    {
        mCuda.release(mAddress);
    }
    void* get() const
    {
        return reinterpret_cast<void*>(mAddress);
    }
    bool read(void* data, size_t bytes) const
    {
        return mCuda.download(data, mAddress, bytes) == 0;
    }
    bool ok = false;

private:
    Cuda& mCuda;
    uint64_t mAddress = 0;
};

struct Type
{
    DataType type;
    char const* name;
    size_t bytes;
    double unit; // distance of 1 to the next number
};
Type const kTypes[] = {{DataType::kHALF, "fp16", 2, std::ldexp(1.0, -10)}, {DataType::kBF16, "bf16", 2, std::ldexp(1.0, -7)},
    {DataType::kFLOAT, "fp32", 4, std::ldexp(1.0, -23)}};

// Run a plugin on q, k and v, whose numbers are of the type already; fill in the results, which were NaN before.
bool runOnce(IPluginV3& plugin, Cuda& cuda, Type const& type, Values& values, int64_t hidden)
{
    size_t const count = values.q.size();
    auto const tokens = static_cast<int64_t>(count / hidden);
    auto const sequences = static_cast<int64_t>(values.bounds.size()) - 1;
    auto const raw = [&](std::vector<float> const& numbers) {
        std::vector<unsigned char> bytes(count * type.bytes, 0xFF);
        for (size_t i = 0; i < numbers.size(); ++i)
        {
            uint32_t const bits = encode(numbers[i], type.type);
            std::memcpy(&bytes[i * type.bytes], &bits, type.bytes);
        }
        return bytes;
    };
    auto& build = capability<IPluginV3OneBuild>(plugin, PluginCapabilityType::kBUILD);
    auto& runtime = capability<IPluginV3OneRuntime>(plugin, PluginCapabilityType::kRUNTIME);
    bool const received = build.getNbOutputs() == 2;
    std::vector<float> sums(received ? tokens : 0, NAN);
    Buffer const q(cuda, raw(values.q).data(), count * type.bytes);
    Buffer const k(cuda, raw(values.k).data(), count * type.bytes);
    Buffer const v(cuda, raw(values.v).data(), count * type.bytes);
    Buffer const out(cuda, raw({}).data(), count * type.bytes);
    Buffer const bounds(cuda, values.bounds.data(), values.bounds.size() * sizeof(int32_t));
    Buffer const summed(cuda, sums.data(), sums.size() * sizeof(float));
    void const* const in[] = {q.get(), k.get(), v.get(), bounds.get()};
    void* const results[] = {out.get(), summed.get()};
    auto const descriptions = inputs(tokens, hidden, sequences, type.type);
    std::vector<unsigned char> bytes(count * type.bytes);
    bool const ran = q.ok && k.ok && v.ok && out.ok && bounds.ok && summed.ok
        && runtime.onShapeChange(descriptions.data(), 4, descriptions.data(), build.getNbOutputs()) == 0
        && runtime.enqueue(descriptions.data(), descriptions.data(), in, results, nullptr, nullptr) == 0
        && cuda.synchronize() == 0 && out.read(bytes.data(), bytes.size())
        && (!received || summed.read(sums.data(), sums.size() * sizeof(float)));
    values.out.resize(count);
    for (size_t i = 0; i < count; ++i)
    {
        uint32_t bits = 0;
        std::memcpy(&bits, &bytes[i * type.bytes], type.bytes);
        values.out[i] = decode(bits, type.type);
    }
    values.received = sums;
    return ran;
}

void runOnGpu(IPluginCreatorV3One& creator, Finder& finder, Cuda& cuda)
{
    std::vector<std::vector<int32_t>> const cases = {{1}, {1, 1, 1}, {4, 17, 9, 32, 6}, {15, 16, 17}, {63, 64, 65},
        {127, 128, 129}, {2, 300, 1, 7}, {0, 5, 0}, {512}};
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
                Values values{};
                values.bounds = {0};
                for (int32_t const length : lengths)
                {
                    values.bounds.push_back(values.bounds.back() + length);
                }
                std::mt19937 random(42);
                std::normal_distribution<float> normal;
                for (auto* const numbers : {&values.q, &values.k, &values.v})
                {
                    numbers->resize(static_cast<size_t>(values.bounds.back() * numHeads * headSize));
                    for (float& number : *numbers)
                    {
                        number = decode(encode(normal(random), type.type), type.type);
                    }
                }
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
    if (argc != 2)
    {
        std::fprintf(stderr, "usage: %s LIBRARY\n", argv[0]);
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
    check(count == 2 && creators, "library: two creators");
    if (failures)
    {
        return 1;
    }
    checkComparison();
    Cuda cuda{};
    bool const hasGpu = cuda.load();
    for (int32_t i = 0; i < count; ++i)
    {
        check(std::strcmp(creators[i]->getInterfaceInfo().kind, "PLUGIN CREATOR_V3ONE") == 0, "library: creator of IPluginV3");
        auto& creator = *static_cast<IPluginCreatorV3One*>(creators[i]);
        walkInterface(creator, finder, i == 1);
        if (hasGpu)
        {
            runOnGpu(creator, finder, cuda);
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
