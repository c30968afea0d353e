// Adtp{Bf16,Int8}LinearAddNorm(x, product, residual, gamma, beta) and Adtp{Bf16,Int8}FeedForwardAddNorm(x, product, product, gamma,
// beta), where a product is what the linear operators take behind x; and a plain C function that tests call.
#include "chain.h"
#include "linear_operators.h"

namespace adtp
{
namespace
{

constexpr char const* kWho = "AdtpAddNorm";

struct Kernel
{
    ort::Api api;
    int64_t inFeatures;
    int64_t innerFeatures; // of two products
    float epsilon;
};

template <bool Int8, bool Two>
constexpr size_t kInputs = 1 + kOfProduct<Int8> * (Two ? 2 : 1) + (Two ? 2 : 3);

template <bool Int8, bool Two>
ort::Status* compute(Kernel const& kernel, ort::KernelContext* context)
{
    ort::Api const& api = kernel.api;
    constexpr size_t count = kInputs<Int8, Two>, product = kOfProduct<Int8>;
    Input in[count];
    ort::Status* status = readAll(api, context, in, count);
    if (status)
    {
        return status;
    }
    Chain chain{};
    Input const &x = in[0], &residual = Two ? x : in[count - 3], &gamma = in[count - 2], &beta = in[count - 1];
    if (x.rank != 2 || x.shape[1] != kernel.inFeatures)
    {
        return refuse(api, kWho, "x must be (T, in_features)");
    }
    bool fits = readProduct<Int8>(in + 1, kernel.inFeatures, chain.first);
    chain.first.x = static_cast<float const*>(x.data);
    chain.first.m = chain.second.m = x.shape[0];
    chain.first.gelu = Two;
    if (Two)
    {
        fits = fits && readProduct<Int8>(in + 1 + product, kernel.innerFeatures, chain.second) && chain.first.n == kernel.innerFeatures;
    }
    int64_t const n = Two ? chain.second.n : chain.first.n;
    if (!fits || !residual.is({x.shape[0], n}) || !gamma.is({n}) || !beta.is({n}))
    {
        return refuse(api, kWho, "factors, weights, residual, gamma and beta do not fit one another");
    }
    int64_t const shape[2] = {x.shape[0], n};
    void* y = nullptr;
    status = output(api, context, 0, &shape[0], 2, &y);
    if (status)
    {
        return status;
    }
    chain.norm = {static_cast<float const*>(residual.data), static_cast<float const*>(gamma.data),
        static_cast<float const*>(beta.data), static_cast<float*>(y), n, kernel.epsilon};
    Ran const ran = runChain(chain, bestLevel(), 0, onThreads(api, context, status));
    return ran == Ran::kShortOfMemory ? outOfMemory(api, kWho) : status;
}

template <bool Int8, bool Two>
ort::Operator makeOperator()
{
    ort::Operator made{};
    setLinear<Kernel>(made);
    made.getName = [](ort::Operator const*) {
        return Int8 ? (Two ? "AdtpInt8FeedForwardAddNorm" : "AdtpInt8LinearAddNorm")
                    : (Two ? "AdtpBf16FeedForwardAddNorm" : "AdtpBf16LinearAddNorm");
    };
    made.getInputType = [](ort::Operator const*, size_t i) {
        bool const isOfProduct = i > 0 && i <= kOfProduct<Int8> * (Two ? 2 : 1);
        return isOfProduct ? typeOfProduct<Int8>((i - 1) % kOfProduct<Int8>) : ort::kFloat;
    };
    made.getInputCount = [](ort::Operator const*) -> size_t { return kInputs<Int8, Two>; };
    made.createKernelV2 = [](ort::Operator const*, void const* table, ort::KernelInfo const* info, void** kernel) {
        ort::Api const api(table);
        Kernel wanted{api, 0, 0, 0.0F};
        ort::Status* status = api.call<ort::KernelInfoGetInt64>(info, "in_features", &wanted.inFeatures);
        status = status || !Two ? status : api.call<ort::KernelInfoGetInt64>(info, "inner_features", &wanted.innerFeatures);
        status = status ? status : api.call<ort::KernelInfoGetFloat>(info, "epsilon", &wanted.epsilon);
        char const* const first = wrongSize<Int8>(wanted.inFeatures);
        char const* const wrong = first || !Two ? first : wrongSize<Int8>(wanted.innerFeatures);
        status = status || !wrong ? status : refuse(api, kWho, wrong);
        return keep(wanted, status, kWho, kernel);
    };
    made.computeV2 = [](void* kernel, ort::KernelContext* context) {
        return compute<Int8, Two>(*static_cast<Kernel const*>(kernel), context);
    };
    return made;
}

} // namespace

ort::Status* addChainOperators(ort::Api const& api, ort::Domain* domain)
{
    static ort::Operator const operators[] = {makeOperator<false, false>(), makeOperator<false, true>(),
        makeOperator<true, false>(), makeOperator<true, true>()};
    return addAll(api, domain, operators);
}

} // namespace adtp

// One chain without ONNX Runtime, on one thread. level: as of linear.cpp; rows: as of `runChain`.
// Return 0; 1 where this processor does not run the level; 2 where memory is short.
ADTP_EXPORT int32_t adtp_chain(adtp::Chain const* call, char const* level, int64_t rows)
{
    adtp::LinearLevel const* const chosen = adtp::linearLevel(level);
    if (!chosen)
    {
        return 1;
    }
    return adtp::runChain(*call, *chosen, rows, adtp::onOneThread) == adtp::Ran::kDone ? 0 : 2;
}

// Set the number of threads that pieces are sized for when `rows` is 0. It holds for the whole process, and the last call wins; results do
// not depend on it, only speed.
ADTP_EXPORT void adtp_threads(int64_t count)
{
    adtp::setThreads(count);
}
