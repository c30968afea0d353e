// AdtpBf16Linear(x, weight, bias) and AdtpInt8Linear(x, factors, weight, scale, sums, bias), each with and without a GELU, and a
// plain C function that tests call.
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

template <bool Int8, bool Gelu>
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
    call.gelu = Gelu;
    int64_t const shape[2] = {call.m, call.n};
    void* y = nullptr;
    status = output(api, context, 0, &shape[0], 2, &y);
    if (status)
    {
        return status;
    }
    call.y = static_cast<float*>(y);
    Ran const ran = runLinear(call, bestLevel(), onThreads(api, context, status));
    return ran == Ran::kShortOfMemory ? refuse(api, kWho, "out of memory") : status;
}

template <bool Int8, bool Gelu>
ort::Operator makeOperator()
{
    ort::Operator made{};
    setLinear<Kernel>(made);
    made.getName = [](ort::Operator const*) {
        return Int8 ? (Gelu ? "AdtpInt8LinearGelu" : "AdtpInt8Linear") : (Gelu ? "AdtpBf16LinearGelu" : "AdtpBf16Linear");
    };
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
        return compute<Int8, Gelu>(*static_cast<Kernel const*>(kernel), context);
    };
    return made;
}

} // namespace

ort::Status* addLinearOperators(ort::Api const& api, ort::Domain* domain)
{
    static ort::Operator const operators[] = {makeOperator<false, false>(), makeOperator<false, true>(),
        makeOperator<true, false>(), makeOperator<true, true>()};
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
