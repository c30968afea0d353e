// The attention operators as ONNX Runtime's custom operators, and a plain C function that tests call.
#include "linear_operators.h"
#include "onnxruntime.h"
#include "ragged.h"

#include <algorithm>
#include <atomic>
#include <new>
#include <string>

#ifdef _WIN32
#define ADTP_EXPORT extern "C" __declspec(dllexport)
#else
#define ADTP_EXPORT extern "C" __attribute__((visibility("default")))
#endif

namespace adtp
{
namespace
{

constexpr size_t kInputs = 4; // q, k, v, cu_seqlens
constexpr size_t kCuSeqlens = 3;

struct Kernel
{
    ort::Api api;
    int64_t numHeads;
    float scale;

    ort::Status* compute(ort::KernelContext* context, bool received) const;
};

ort::Status* refuse(ort::Api const& api, std::string const& why)
{
    return api.call<ort::CreateStatus>(ort::kInvalidArgument, ("AdtpRaggedAttention: " + why).c_str());
}

struct Input
{
    void const* data{nullptr};
    size_t rank{0};
    int64_t shape[2]{};
};

ort::Status* read(ort::Api const& api, ort::KernelContext const* context, size_t index, Input& input)
{
    ort::Value const* value = nullptr;
    ort::ShapeInfo* info = nullptr;
    ort::Status* status = api.call<ort::GetInput>(context, index, &value);
    if (!status)
    {
        status = api.call<ort::GetTensorTypeAndShape>(value, &info);
    }
    if (status)
    {
        return status;
    }
    status = api.call<ort::GetDimensionsCount>(static_cast<ort::ShapeInfo const*>(info), &input.rank);
    if (!status && input.rank <= 2)
    {
        status = api.call<ort::GetDimensions>(static_cast<ort::ShapeInfo const*>(info), &input.shape[0], input.rank);
    }
    api.call<ort::ReleaseShapeInfo>(info);
    void* data = nullptr;
    if (!status)
    {
        status = api.call<ort::GetTensorMutableData>(const_cast<ort::Value*>(value), &data);
    }
    input.data = data;
    return status;
}

bool rises(int32_t const* bounds, int64_t count, int64_t tokens)
{
    return bounds[0] == 0 && bounds[count - 1] == tokens && std::is_sorted(bounds, bounds + count);
}

ort::Status* output(ort::Api const& api, ort::KernelContext* context, size_t index, int64_t const* shape, size_t rank,
    float** data)
{
    ort::Value* value = nullptr;
    ort::Status* const status = api.call<ort::GetOutput>(context, index, shape, rank, &value);
    return status ? status : api.call<ort::GetTensorMutableData>(value, reinterpret_cast<void**>(data));
}

// What threads share.
struct Work
{
    Ragged const& ragged;
    std::atomic<bool> failed{false};

    static void run(void* work, size_t piece)
    {
        auto& self = *static_cast<Work*>(work);
        if (!self.ragged.run(static_cast<int64_t>(piece)))
        {
            self.failed = true;
        }
    }
};

ort::Status* Kernel::compute(ort::KernelContext* context, bool received) const
{
    Input in[kInputs];
    for (size_t i = 0; i < kInputs; ++i)
    {
        if (ort::Status* const status = read(api, context, i, in[i]))
        {
            return status;
        }
    }
    int64_t const tokens = in[0].shape[0];
    int64_t const hidden = in[0].shape[1];
    for (size_t i = 0; i < kCuSeqlens; ++i)
    {
        if (in[i].rank != 2 || in[i].shape[0] != tokens || in[i].shape[1] != hidden)
        {
            return refuse(api, "q, k and v must share one shape (T, H)");
        }
    }
    if (hidden % numHeads)
    {
        return refuse(api, "num_heads must divide H");
    }
    auto const bounds = static_cast<int32_t const*>(in[kCuSeqlens].data);
    if (in[kCuSeqlens].rank != 1 || in[kCuSeqlens].shape[0] < 1 || !rises(bounds, in[kCuSeqlens].shape[0], tokens))
    {
        return refuse(api, "cu_seqlens must be (B+1,) and rise from 0 to T");
    }
    Call call{static_cast<float const*>(in[0].data), static_cast<float const*>(in[1].data),
        static_cast<float const*>(in[2].data), nullptr, nullptr, bounds, in[kCuSeqlens].shape[0] - 1, numHeads,
        hidden / numHeads, scale};
    ort::Status* status = output(api, context, 0, in[0].shape, 2, &call.out);
    if (!status && received)
    {
        status = output(api, context, 1, &tokens, 1, &call.received);
    }
    if (status)
    {
        return status;
    }
    Ragged const ragged(call, *level(nullptr));
    Work work{ragged};
    work.failed = !ragged.ready();
    if (ragged.pieces() == 1)
    {
        Work::run(&work, 0);
    }
    else if (ragged.pieces() > 1)
    {
        status = api.call<ort::ParallelFor>(static_cast<ort::KernelContext const*>(context), &Work::run,
            static_cast<size_t>(ragged.pieces()), size_t{0}, static_cast<void*>(&work));
    }
    if (!status && work.failed)
    {
        return refuse(api, "out of memory");
    }
    if (!status)
    {
        ragged.finish();
    }
    return status;
}

template <bool Received>
ort::Operator makeOperator()
{
    ort::Operator made{};
    made.version = ort::kVersion;
    made.getName = [](ort::Operator const*) { return Received ? "AdtpRaggedAttentionReceived" : "AdtpRaggedAttention"; };
    made.getProvider = [](ort::Operator const*) -> char const* { return nullptr; }; // the CPU's
    made.getInputType = [](ort::Operator const*, size_t i) { return i == kCuSeqlens ? ort::kInt32 : ort::kFloat; };
    made.getInputCount = [](ort::Operator const*) { return kInputs; };
    made.getOutputType = [](ort::Operator const*, size_t) { return ort::kFloat; };
    made.getOutputCount = [](ort::Operator const*) -> size_t { return Received ? 2 : 1; };
    made.getInputCharacteristic = [](ort::Operator const*, size_t) { return 0; };
    made.getOutputCharacteristic = [](ort::Operator const*, size_t) { return 0; };
    made.getInputMemoryType = [](ort::Operator const*, size_t) { return 0; };
    made.getVariadicInputMinimum = made.getVariadicOutputMinimum = [](ort::Operator const*) { return 1; };
    made.getVariadicInputHomogeneity = made.getVariadicOutputHomogeneity = [](ort::Operator const*) { return 1; };
    made.getStartVersion = made.getEndVersion = [](ort::Operator const*) { return 1; };
    made.createKernelV2 = [](ort::Operator const*, void const* table, ort::KernelInfo const* info, void** kernel) {
        ort::Api const api(table);
        int64_t numHeads = 0;
        float scale = 0;
        ort::Status* status = api.call<ort::KernelInfoGetInt64>(info, "num_heads", &numHeads);
        if (!status)
        {
            status = api.call<ort::KernelInfoGetFloat>(info, "scale", &scale);
        }
        if (!status && numHeads < 1)
        {
            status = refuse(api, "num_heads must be at least 1");
        }
        *kernel = status ? nullptr : new (std::nothrow) Kernel{api, numHeads, scale};
        return status || *kernel ? status : refuse(api, "out of memory");
    };
    made.destroyKernel = [](void* kernel) { delete static_cast<Kernel*>(kernel); };
    made.computeV2 = [](void* kernel, ort::KernelContext* context) {
        return static_cast<Kernel const*>(kernel)->compute(context, Received);
    };
    return made;
}

// All operators, for all sessions and as long as the library is there. Null where ONNX Runtime refuses.
ort::Domain* makeDomain(ort::Api const& api)
{
    static ort::Operator const operators[] = {makeOperator<false>(), makeOperator<true>()};
    ort::Domain* domain = nullptr;
    ort::Status* status = api.call<ort::CreateCustomOpDomain>("adtp", &domain);
    for (ort::Operator const& one : operators)
    {
        if (!status)
        {
            status = api.call<ort::CustomOpDomainAdd>(domain, &one);
        }
    }
    status = status ? status : addLinearOperators(api, domain);
    return status ? nullptr : domain;
}

} // namespace
} // namespace adtp

// What `SessionOptions.register_custom_ops_library` calls.
ADTP_EXPORT ort::Status* ADTP_ORT_CALL RegisterCustomOps(ort::SessionOptions* options, ort::ApiBase const* base)
{
    void const* const table = base->getApi(ort::kVersion);
    if (!table)
    {
        // Its oldest interface can say so.
        return adtp::refuse(ort::Api(base->getApi(1)), "needs ONNX Runtime 1.17 or newer");
    }
    ort::Api const api(table);
    static ort::Domain* const domain = adtp::makeDomain(api);
    return domain ? api.call<ort::AddCustomOpDomain>(options, domain) : adtp::refuse(api, "no domain of operators");
}

// The same without ONNX Runtime, on one thread. level: "avx512", "avx2" or "portable"; null for the best.
// Return 0; 1 where this processor does not run the level; 2 where memory is short.
ADTP_EXPORT int32_t adtp_attend(adtp::Call const* call, char const* level)
{
    adtp::Level const* const chosen = adtp::level(level);
    if (!chosen)
    {
        return 1;
    }
    adtp::Ragged const ragged(*call, *chosen);
    bool done = ragged.ready();
    for (int64_t piece = ragged.pieces() - 1; done && piece >= 0; --piece)
    {
        done = ragged.run(piece);
    }
    if (done)
    {
        ragged.finish();
    }
    return done ? 0 : 2;
}

// What the library was compiled from, as adtp-plugin hashes it.
ADTP_EXPORT char const* adtp_sources()
{
    return ADTP_SOURCES;
}
