// What all operators need: how they say no, read what ONNX Runtime gives them, ask it for room for what they give, and what they
// answer its questions with.
#pragma once

#include "onnxruntime.h"

#include <initializer_list>
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

// who: such as "AdtpLinear".
inline ort::Status* refuse(ort::Api const& api, char const* who, char const* why)
{
    return api.call<ort::CreateStatus>(ort::kInvalidArgument, (std::string(who) + ": " + why).c_str());
}

inline ort::Status* outOfMemory(ort::Api const& api, char const* who)
{
    return api.call<ort::CreateStatus>(ort::kFail, (std::string(who) + ": out of memory").c_str());
}

constexpr size_t kMostRank = 4;

// An input's numbers and its sizes, which are unknown where there are too many of them.
struct Input
{
    void const* data{nullptr};
    size_t rank{0};
    int64_t shape[kMostRank]{};

    bool is(std::initializer_list<int64_t> wanted) const
    {
        size_t i = 0;
        bool same = rank == wanted.size();
        for (int64_t const size : wanted)
        {
            same = same && shape[i++] == size;
        }
        return same;
    }
};

inline ort::Status* read(ort::Api const& api, ort::KernelContext const* context, size_t index, Input& input)
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
    if (!status && input.rank <= kMostRank)
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

inline ort::Status* readAll(ort::Api const& api, ort::KernelContext const* context, Input* inputs, size_t count)
{
    ort::Status* status = nullptr;
    for (size_t i = 0; i < count && !status; ++i)
    {
        status = read(api, context, i, inputs[i]);
    }
    return status;
}

inline ort::Status* output(ort::Api const& api, ort::KernelContext* context, size_t index, int64_t const* shape, size_t rank,
    void** data)
{
    ort::Value* value = nullptr;
    ort::Status* const status = api.call<ort::GetOutput>(context, index, shape, rank, &value);
    return status ? status : api.call<ort::GetTensorMutableData>(value, data);
}

// Give ONNX Runtime a kernel, unless a status says why there is none.
template <typename Kernel>
ort::Status* keep(Kernel const& made, ort::Status* status, char const* who, void** kernel)
{
    *kernel = status ? nullptr : new (std::nothrow) Kernel(made);
    return status || *kernel ? status : outOfMemory(made.api, who);
}

// Operators live as long as the library is there.
template <typename Operators>
ort::Status* addAll(ort::Api const& api, ort::Domain* domain, Operators const& operators)
{
    ort::Status* status = nullptr;
    for (ort::Operator const& one : operators)
    {
        status = status ? status : api.call<ort::CustomOpDomainAdd>(domain, &one);
    }
    return status;
}

// What every operator answers with, as far as operators do not differ.
inline void setCommon(ort::Operator& made)
{
    made.version = ort::kVersion;
    made.getProvider = [](ort::Operator const*) -> char const* { return nullptr; }; // the CPU's
    made.getInputCharacteristic = [](ort::Operator const*, size_t) { return 0; };
    made.getOutputCharacteristic = [](ort::Operator const*, size_t) { return 0; };
    made.getInputMemoryType = [](ort::Operator const*, size_t) { return 0; };
    made.getVariadicInputMinimum = made.getVariadicOutputMinimum = [](ort::Operator const*) { return 1; };
    made.getVariadicInputHomogeneity = made.getVariadicOutputHomogeneity = [](ort::Operator const*) { return 1; };
    made.getStartVersion = made.getEndVersion = [](ort::Operator const*) { return 1; };
}

} // namespace
} // namespace adtp
