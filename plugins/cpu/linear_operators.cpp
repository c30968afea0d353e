// AdtpBf16Linear(x, weight, bias) and AdtpInt8Linear(x, factors, weight, scale, sums, bias), each alone, with a GELU, and with results
// for queries, keys and values, and a plain C function that tests call.
#include "linear_operators.h"

namespace adtp
{
namespace
{

constexpr char const* kWho = "AdtpLinear";

struct Kernel
{
    ort::Api api;
    int64_t inFeatures;
};

enum class After
{
    kNothing,
    kGelu,
    kQkv
};

constexpr char const* kNames[2][3] = {
    {"AdtpBf16Linear", "AdtpBf16LinearGelu", "AdtpBf16LinearQkv"}, {"AdtpInt8Linear", "AdtpInt8LinearGelu", "AdtpInt8LinearQkv"}};

template <bool Int8, After Then>
ort::Status* compute(Kernel const& kernel, ort::KernelContext* context)
{
    ort::Api const& api = kernel.api;
    constexpr size_t count = 1 + kOfProduct<Int8>;
    Input in[count];
    ort::Status* status = readAll(api, context, in, count);
    if (status)
    {
        return status;
    }
    Linear call{};
    Input const& x = in[0];
    if (x.rank != 2 || x.shape[1] != kernel.inFeatures)
    {
        return refuse(api, kWho, "x must be (T, in_features)");
    }
    if (!readProduct<Int8>(in + 1, kernel.inFeatures, call))
    {
        return refuse(api, kWho, "factors, weight, scale, sums and bias do not fit one another");
    }
    call.x = static_cast<float const*>(x.data);
    call.m = x.shape[0];
    call.gelu = Then == After::kGelu;
    constexpr bool qkv = Then == After::kQkv;
    if (qkv && call.n % (3 * kColumns) != 0)
    {
        return refuse(api, kWho, "queries, keys and values must each have a multiple of 16 columns");
    }
    int64_t const shape[2] = {call.m, qkv ? call.n / 3 : call.n};
    float** const results[] = {&call.y, &call.second, &call.third};
    for (size_t i = 0; i < (qkv ? 3 : 1); ++i)
    {
        void* y = nullptr;
        status = output(api, context, i, &shape[0], 2, &y);
        if (status)
        {
            return status;
        }
        *results[i] = static_cast<float*>(y);
    }
    Ran const ran = runLinear(call, bestLevel(), onThreads(api, context, status));
    return ran == Ran::kShortOfMemory ? outOfMemory(api, kWho) : status;
}

template <bool Int8, After Then>
ort::Operator makeOperator()
{
    ort::Operator made{};
    setLinear<Kernel>(made);
    made.getName = [](ort::Operator const*) { return kNames[Int8][static_cast<size_t>(Then)]; };
    made.getOutputCount = [](ort::Operator const*) -> size_t { return Then == After::kQkv ? 3 : 1; };
    made.getInputType = [](ort::Operator const*, size_t i) {
        return i == 0 ? ort::kFloat : typeOfProduct<Int8>(i - 1);
    };
    made.getInputCount = [](ort::Operator const*) -> size_t { return 1 + kOfProduct<Int8>; };
    made.createKernelV2 = [](ort::Operator const*, void const* table, ort::KernelInfo const* info, void** kernel) {
        ort::Api const api(table);
        Kernel wanted{api, 0};
        ort::Status* status = api.call<ort::KernelInfoGetInt64>(info, "in_features", &wanted.inFeatures);
        char const* const wrong = wrongSize<Int8>(wanted.inFeatures);
        status = status || !wrong ? status : refuse(api, kWho, wrong);
        return keep(wanted, status, kWho, kernel);
    };
    made.computeV2 = [](void* kernel, ort::KernelContext* context) {
        return compute<Int8, Then>(*static_cast<Kernel const*>(kernel), context);
    };
    return made;
}

} // namespace

ort::Status* addLinearOperators(ort::Api const& api, ort::Domain* domain)
{
    static ort::Operator const operators[] = {makeOperator<false, After::kNothing>(), makeOperator<false, After::kGelu>(),
        makeOperator<false, After::kQkv>(), makeOperator<true, After::kNothing>(), makeOperator<true, After::kGelu>(),
        makeOperator<true, After::kQkv>()};
    return addAll(api, domain, operators);
}

} // namespace adtp

// One product without ONNX Runtime, on one thread. level: as of linear.cpp; null for the best.
// Return 0; 1 where this processor does not run the level; 2 where memory is short.
ADTP_EXPORT int32_t adtp_linear(adtp::Linear const* call, char const* level)
{
    adtp::LinearLevel const* const chosen = adtp::linearLevel(level);
    if (!chosen)
    {
        return 1;
    }
    return adtp::runLinear(*call, *chosen, adtp::onOneThread) == adtp::Ran::kDone ? 0 : 2;
}
