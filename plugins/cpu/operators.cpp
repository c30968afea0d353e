// The attention operators as ONNX Runtime's custom operators, and a plain C function that tests call.
#include "linear_operators.h"
#include "onnxruntime.h"
#include "ragged.h"
#include "shapes.h"
#include "tensors.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <iterator>
#include <new>

namespace adtp
{
namespace
{

constexpr char const* kWho = "AdtpRaggedAttention";

enum class Received // second output
{
    kNo,
    kYes,
    kFromOthers,
};

// The operators: a name, and what is behind it.
struct Form
{
    char const* name;
    By by;
    Received received;
};
constexpr Form kForms[] = {
    {"AdtpRaggedAttention", By::kNothing, Received::kNo},
    {"AdtpRaggedAttentionReceived", By::kNothing, Received::kYes},
    {"AdtpRaggedAttentionFromOthersReceived", By::kNothing, Received::kFromOthers},
    {"AdtpRaggedAttentionRelative", By::kDistance, Received::kNo},
    {"AdtpRaggedAttentionRelativeReceived", By::kDistance, Received::kYes},
    {"AdtpRaggedAttentionWindow", By::kWindow, Received::kNo},
    {"AdtpRaggedAttentionWindowReceived", By::kWindow, Received::kYes},
    {"AdtpRaggedAttentionDisentangled", By::kDisentangled, Received::kNo},
    {"AdtpRaggedAttentionDisentangledReceived", By::kDisentangled, Received::kYes},
    {"AdtpRaggedAttentionGrouped", By::kReach, Received::kNo},
    {"AdtpRaggedAttentionGroupedWindow", By::kReach, Received::kNo},
    {"AdtpRaggedAttentionGroupedReceived", By::kReach, Received::kYes},
};
struct Element
{
    Type type;
    ort::Element element;
};
constexpr Element kElements[]
    = {{Type::kFloat, ort::kFloat}, {Type::kHalf, ort::kFloat16}, {Type::kBfloat, ort::kBfloat16}};

// An operator for one type of q, k, v, table and output.
struct Attention : ort::Operator
{
    Form form;
    Element type;
};

Attention const& attention(ort::Operator const* it)
{
    return *static_cast<Attention const*>(it);
}

struct Kernel
{
    ort::Api api;
    Form form;
    Type type;
    int64_t numHeads;
    int64_t keyHeads;
    int64_t back;
    int64_t ahead;
    int64_t inBf16; // whether products may be computed in it
    float scale;

    ort::Status* compute(ort::KernelContext* context) const;
};

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

// Its outputs are not there yet.
Call callOf(Kernel const& kernel, Input const (&in)[kMostInputs])
{
    bool const sides = kernel.form.by == By::kReach;
    bool const apart = kernel.form.by == By::kDisentangled;
    bool const biased = kernel.form.by == By::kDistance;
    Call call{};
    call.q = in[0].data;
    call.k = in[1].data;
    call.v = in[2].data;
    call.bounds = static_cast<int32_t const*>(in[kCuSeqlens].data);
    call.keyBounds = static_cast<int32_t const*>(in[sides ? kKeyBounds : kCuSeqlens].data);
    call.positions = static_cast<int32_t const*>(in[sides ? kOwnPositions : kPositions].data);
    call.keyPositions = static_cast<int32_t const*>(in[sides ? kKeyPositions : kPositions].data);
    call.table = biased ? in[kTable].data : nullptr;
    call.distanceKeys = apart ? in[kDistanceKeys].data : nullptr;
    call.distanceQueries = apart ? in[kDistanceQueries].data : nullptr;
    call.buckets = apart ? static_cast<int32_t const*>(in[kBuckets].data) : nullptr;
    call.tokens = in[0].shape[0];
    call.keys = in[1].shape[0];
    call.sequences = in[kCuSeqlens].shape[0] - 1;
    call.numHeads = kernel.numHeads;
    call.keyHeads = kernel.keyHeads;
    call.headSize = in[0].shape[1] / kernel.numHeads;
    call.tableRows = biased ? in[kTable].shape[0] : 0;
    call.columns = apart ? in[kDistanceKeys].shape[1] : 0;
    call.numBuckets = apart ? in[kBuckets].shape[0] : 0;
    call.back = kernel.back;
    call.ahead = kernel.ahead;
    call.scale = kernel.scale;
    call.type = kernel.type;
    call.fromOthers = kernel.form.received == Received::kFromOthers;
    call.isMean = kernel.form.received != Received::kNo && sides && kernel.ahead == 0;
    call.grouped = sides;
    return call;
}

// Each is looked for once, because CPUID takes some 20 us in a virtual machine, and only where it is needed: tiles have to be asked for.
Level const& levelFor(bool inBf16)
{
    if (inBf16)
    {
        static Level const& rounded = levelInBf16();
        return rounded;
    }
    static Level const& exact = *level(nullptr);
    return exact;
}

ort::Status* attend(ort::Api const& api, ort::KernelContext const* context, Call const& call, bool inBf16)
{
    Ragged const ragged(call, levelFor(inBf16));
    Work work{ragged};
    work.failed = !ragged.ready();
    if (ragged.pieces() == 1)
    {
        Work::run(&work, 0);
    }
    else if (ragged.pieces() > 1)
    {
        ort::Status* const status = api.call<ort::ParallelFor>(
            context, &Work::run, static_cast<size_t>(ragged.pieces()), size_t{0}, static_cast<void*>(&work));
        if (status)
        {
            return status;
        }
    }
    if (work.failed)
    {
        return outOfMemory(api, kWho);
    }
    ragged.finish();
    return nullptr;
}

size_t countInputs(By by)
{
    switch (by)
    {
    case By::kNothing: return kPositions;
    case By::kWindow: return kTable;
    case By::kDistance: return kTable + 1;
    case By::kReach: return kKeyPositions + 1;
    default: return kBuckets + 1;
    }
}

bool isInt32(By by, size_t input)
{
    bool const sides = by == By::kReach && input > kPositions;
    return input == kCuSeqlens || input == kPositions || sides || (by == By::kDisentangled && input == kBuckets);
}

ort::Status* Kernel::compute(ort::KernelContext* context) const
{
    Input in[kMostInputs];
    ort::Status* status = readAll(api, context, in, countInputs(form.by));
    if (status)
    {
        return status;
    }
    if (char const* const wrong = wrongShape(form.by, numHeads, keyHeads, in))
    {
        return refuse(api, kWho, wrong);
    }
    Call call = callOf(*this, in);
    if (char const* const wrong = refusal(call))
    {
        return refuse(api, kWho, wrong);
    }
    status = output(api, context, 0, in[0].shape, 2, &call.out);
    void* received = nullptr;
    if (!status && form.received != Received::kNo)
    {
        status = output(api, context, 1, &call.keys, 1, &received);
    }
    call.received = static_cast<float*>(received);
    return status ? status : attend(api, context, call, inBf16 != 0);
}

ort::Status* readReach(ort::Api const& api, ort::KernelInfo const* info, Kernel& made)
{
    ort::Status* status = api.call<ort::KernelInfoGetInt64>(info, "kv_heads", &made.keyHeads);
    status = status ? status : api.call<ort::KernelInfoGetInt64>(info, "window_back", &made.back);
    return status ? status : api.call<ort::KernelInfoGetInt64>(info, "window_ahead", &made.ahead);
}

// Files of earlier versions do not have it, nor have those in fp32.
void readPrecision(ort::Api const& api, ort::KernelInfo const* info, Kernel& made)
{
    ort::Status* const missing = api.call<ort::KernelInfoGetInt64>(info, "bf16_products", &made.inBf16);
    if (missing)
    {
        made.inBf16 = 0;
        api.call<ort::ReleaseStatus>(missing);
    }
}

ort::Status* makeKernel(ort::Operator const* it, void const* table, ort::KernelInfo const* info, void** kernel)
{
    By const by = attention(it).form.by;
    ort::Api const api(table);
    Kernel made{api, attention(it).form, attention(it).type.type, 0, 0, -1, -1, 0, 0};
    ort::Status* status = api.call<ort::KernelInfoGetInt64>(info, "num_heads", &made.numHeads);
    made.keyHeads = made.numHeads;
    readPrecision(api, info, made);
    if (!status)
    {
        status = api.call<ort::KernelInfoGetFloat>(info, "scale", &made.scale);
    }
    if (!status && by == By::kWindow)
    {
        status = api.call<ort::KernelInfoGetInt64>(info, "window", &made.back);
        made.ahead = made.back;
    }
    if (!status && by == By::kReach)
    {
        status = readReach(api, info, made);
    }
    if (!status && made.numHeads < 1)
    {
        status = refuse(api, kWho, "num_heads must be at least 1");
    }
    if (!status && by == By::kWindow && made.back < 1)
    {
        status = refuse(api, kWho, "window must be at least 1");
    }
    if (!status && (made.keyHeads < 1 || made.numHeads % made.keyHeads || std::min(made.back, made.ahead) < -1))
    {
        status = refuse(api, kWho, "kv_heads must divide num_heads, and windows be at least -1");
    }
    return keep(made, status, kWho, kernel);
}

Attention makeOperator(Form const& form, Element type)
{
    Attention made{};
    made.form = form;
    made.type = type;
    setCommon(made);
    made.getName = [](ort::Operator const* it) { return attention(it).form.name; };
    made.getInputType = [](ort::Operator const* it, size_t i) {
        return isInt32(attention(it).form.by, i) ? ort::kInt32 : attention(it).type.element;
    };
    made.getInputCount = [](ort::Operator const* it) { return countInputs(attention(it).form.by); };
    made.getOutputType = [](ort::Operator const* it, size_t i) {
        return i == 0 ? attention(it).type.element : ort::kFloat;
    };
    made.getOutputCount = [](ort::Operator const* it) -> size_t {
        return attention(it).form.received == Received::kNo ? 1 : 2;
    };
    made.createKernelV2 = makeKernel;
    made.destroyKernel = [](void* kernel) { delete static_cast<Kernel*>(kernel); };
    made.computeV2 = [](void* kernel, ort::KernelContext* context) {
        return static_cast<Kernel const*>(kernel)->compute(context);
    };
    return made;
}

// All operators, for all sessions and as long as the library is there. Null where ONNX Runtime refuses.
ort::Domain* makeDomain(ort::Api const& api)
{
    constexpr size_t types = std::size(kElements);
    static auto const operators = [] {
        std::array<Attention, std::size(kForms) * types> made{};
        for (size_t i = 0; i < made.size(); ++i)
        {
            made[i] = makeOperator(kForms[i / types], kElements[i % types]);
        }
        return made;
    }();
    ort::Domain* domain = nullptr;
    ort::Status* status = api.call<ort::CreateCustomOpDomain>("adtp", &domain);
    status = status ? status : addAll(api, domain, operators);
    status = status ? status : addLinearOperators(api, domain);
    status = status ? status : addChainOperators(api, domain);
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
        return adtp::refuse(ort::Api(base->getApi(1)), adtp::kWho, "needs ONNX Runtime 1.17 or newer");
    }
    ort::Api const api(table);
    static ort::Domain* const domain = adtp::makeDomain(api);
    return domain ? api.call<ort::AddCustomOpDomain>(options, domain)
                  : adtp::refuse(api, adtp::kWho, "no domain of operators");
}

// The same without ONNX Runtime, on one thread. level: the name of one, null for the best in fp32.
// Return 0; 1 where this processor does not run the level; 2 where memory is short; 3 where ONNX Runtime would get an error.
ADTP_EXPORT int32_t adtp_attend(adtp::Call const* call, char const* level)
{
    adtp::Level const* const chosen = adtp::level(level);
    if (!chosen)
    {
        return 1;
    }
    if (adtp::refusal(*call))
    {
        return 3;
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
