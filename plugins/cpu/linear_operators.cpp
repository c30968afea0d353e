// AdtpBf16Linear(x, weight, bias) and AdtpInt8Linear(x, weight, scale, sums, bias), each with and without a GELU, and a plain C
// function that tests call.
#include "linear_operators.h"
#include "linear_pieces.h"
#include "tensors.h"

#include <new>

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

// Run a member for all pieces, on several threads where there are several.
template <void (LinearPieces::*Member)(int64_t) const>
ort::Status* inPieces(ort::Api const& api, ort::KernelContext const* context, LinearPieces const& pieces, int64_t count)
{
    auto const one = [](void* work, size_t piece) {
        (static_cast<LinearPieces const*>(work)->*Member)(static_cast<int64_t>(piece));
    };
    auto* const work = const_cast<void*>(static_cast<void const*>(&pieces));
    if (count > 1)
    {
        return api.call<ort::ParallelFor>(
            context, static_cast<void (*)(void*, size_t)>(one), static_cast<size_t>(count), size_t{0}, work);
    }
    if (count == 1)
    {
        one(work, 0);
    }
    return nullptr;
}

template <bool Int8, bool Gelu>
ort::Status* compute(Kernel const& kernel, ort::KernelContext* context)
{
    ort::Api const& api = kernel.api;
    constexpr size_t count = Int8 ? 5 : 3;
    Input in[count];
    for (size_t i = 0; i < count; ++i)
    {
        if (ort::Status* const status = read(api, context, i, in[i]))
        {
            return status;
        }
    }
    Input const &x = in[0], &weight = in[1], &bias = in[count - 1];
    Linear call{};
    call.x = static_cast<float const*>(x.data);
    call.weight = weight.data;
    call.scale = Int8 ? static_cast<float const*>(in[2].data) : nullptr;
    call.sums = Int8 ? static_cast<int32_t const*>(in[3 % count].data) : nullptr;
    call.bias = static_cast<float const*>(bias.data);
    call.k = kernel.inFeatures;
    call.gelu = Gelu;
    if (x.rank != 2 || x.shape[1] != call.k)
    {
        return refuse(api, kWho, "x must be (T, in_features)");
    }
    call.m = x.shape[0];
    call.n = bias.shape[0];
    int64_t const blocks = (call.n + kColumns - 1) / kColumns, values = Int8 ? 4 : 2;
    if (!bias.is({call.n}) || !weight.is({blocks, (call.k + values - 1) / values, kColumns, values})
        || (Int8 && !(in[2].is({call.n}) && in[3 % count].is({call.n}))))
    {
        return refuse(api, kWho, "weight, scale, sums and bias do not fit one another");
    }
    int64_t const shape[2] = {call.m, call.n};
    void* y = nullptr;
    ort::Status* status = output(api, context, 0, &shape[0], 2, &y);
    if (status)
    {
        return status;
    }
    call.y = static_cast<float*>(y);
    static LinearLevel const& best = *linearLevel(nullptr); // once: in a virtual machine, CPUID takes as long as a small product
    LinearPieces const pieces(call, best);
    if (!pieces.ready())
    {
        return refuse(api, kWho, "out of memory");
    }
    status = inPieces<&LinearPieces::convert>(api, context, pieces, pieces.conversions());
    return status ? status : inPieces<&LinearPieces::multiply>(api, context, pieces, pieces.products());
}

template <bool Int8, bool Gelu>
ort::Operator makeOperator()
{
    ort::Operator made{};
    setCommon(made);
    made.getName = [](ort::Operator const*) {
        return Int8 ? (Gelu ? "AdtpInt8LinearGelu" : "AdtpInt8Linear") : (Gelu ? "AdtpBf16LinearGelu" : "AdtpBf16Linear");
    };
    made.getInputType = [](ort::Operator const*, size_t i) {
        return i == 1 ? (Int8 ? ort::kInt8 : ort::kBfloat16) : Int8 && i == 3 ? ort::kInt32 : ort::kFloat;
    };
    made.getInputCount = [](ort::Operator const*) -> size_t { return Int8 ? 5 : 3; };
    made.getOutputType = [](ort::Operator const*, size_t) { return ort::kFloat; };
    made.getOutputCount = [](ort::Operator const*) -> size_t { return 1; };
    made.createKernelV2 = [](ort::Operator const*, void const* table, ort::KernelInfo const* info, void** kernel) {
        ort::Api const api(table);
        int64_t inFeatures = 0;
        ort::Status* status = api.call<ort::KernelInfoGetInt64>(info, "in_features", &inFeatures);
        if (!status && inFeatures < 1)
        {
            status = refuse(api, kWho, "in_features must be at least 1");
        }
        *kernel = status ? nullptr : new (std::nothrow) Kernel{api, inFeatures};
        return status || *kernel ? status : refuse(api, kWho, "out of memory");
    };
    made.destroyKernel = [](void* kernel) { delete static_cast<Kernel*>(kernel); };
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
    ort::Status* status = nullptr;
    for (ort::Operator const& one : operators)
    {
        status = status ? status : api.call<ort::CustomOpDomainAdd>(domain, &one);
    }
    return status;
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
    adtp::LinearPieces const pieces(*call, *chosen);
    if (!pieces.ready())
    {
        return 2;
    }
    for (int64_t piece = 0; piece < pieces.conversions(); ++piece)
    {
        pieces.convert(piece);
    }
    for (int64_t piece = 0; piece < pieces.products(); ++piece)
    {
        pieces.multiply(piece);
    }
    return 0;
}
