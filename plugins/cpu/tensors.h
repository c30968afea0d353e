// How operators read what ONNX Runtime gives them, and ask it for room for what they give.
#pragma once

#include "onnxruntime.h"

#include <string>

namespace adtp
{
namespace
{

inline ort::Status* refuse(ort::Api const& api, std::string const& why)
{
    return api.call<ort::CreateStatus>(ort::kInvalidArgument, ("AdtpRaggedAttention: " + why).c_str());
}

// An input's numbers and its sizes, of which operators have two at most.
struct Input
{
    void const* data{nullptr};
    size_t rank{0};
    int64_t shape[2]{};
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

inline ort::Status* output(ort::Api const& api, ort::KernelContext* context, size_t index, int64_t const* shape, size_t rank,
    void** data)
{
    ort::Value* value = nullptr;
    ort::Status* const status = api.call<ort::GetOutput>(context, index, shape, rank, &value);
    return status ? status : api.call<ort::GetTensorMutableData>(value, data);
}

} // namespace
} // namespace adtp
