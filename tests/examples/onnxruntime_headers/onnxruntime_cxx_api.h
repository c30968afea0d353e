// A stand-in for ONNX Runtime's header of this name, which no package here has: the classes that the example uses, with
// the names and types of the original. Functions are called by their places in the table, which only grows at its end.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <utility>
#include <vector>

enum OrtLoggingLevel
{
    ORT_LOGGING_LEVEL_ERROR = 3,
};

enum ONNXTensorElementDataType
{
    ONNX_TENSOR_ELEMENT_DATA_TYPE_STRING = 8,
};

struct OrtApiBase
{
    void const* const* (*GetApi)(uint32_t);
    char const* (*GetVersionString)();
};

extern "C" OrtApiBase const* OrtGetApiBase();

namespace Ort
{

template <typename Result, typename... Arguments>
Result call(size_t place, Arguments... arguments)
{
    static void const* const* const table = OrtGetApiBase()->GetApi(17);
    return reinterpret_cast<Result (*)(Arguments...)>(table[place])(arguments...);
}

template <typename... Arguments>
void check(size_t place, Arguments... arguments)
{
    if (void* const status = call<void*>(place, arguments...))
    {
        std::runtime_error const error(call<char const*>(2, static_cast<void const*>(status)));
        call<void>(93, status);
        throw error;
    }
}

// Owns what the function at a place releases.
template <size_t Release>
struct Owner
{
    void* held = nullptr;

    Owner() = default;
    explicit Owner(std::nullptr_t) {}
    Owner(Owner&& other) : held(std::exchange(other.held, nullptr)) {}
    ~Owner()
    {
        if (held)
        {
            call<void>(Release, held);
        }
    }
};

struct Env : Owner<92>
{
    Env(OrtLoggingLevel level, char const* name)
    {
        check(3, level, name, &held);
    }
};

struct SessionOptions : Owner<100>
{
    SessionOptions()
    {
        check(10, &held);
    }
    SessionOptions& RegisterCustomOpsLibrary(char const* library)
    {
        void* handle = nullptr;
        check(29, held, library, &handle);
        return *this;
    }
};

struct RunOptions : Owner<97>
{
    using Owner::Owner;
};

struct AllocatorWithDefaultOptions
{
    void* held = nullptr; // ONNX Runtime's own
    AllocatorWithDefaultOptions()
    {
        check(78, &held);
    }
};

struct TensorTypeAndShapeInfo : Owner<99>
{
    std::vector<int64_t> GetShape() const
    {
        size_t rank = 0;
        check(61, static_cast<void const*>(held), &rank);
        std::vector<int64_t> shape(rank);
        check(62, static_cast<void const*>(held), shape.data(), rank);
        return shape;
    }
};

struct Value : Owner<96>
{
    static Value CreateTensor(AllocatorWithDefaultOptions& allocator, int64_t const* shape, size_t rank, ONNXTensorElementDataType type)
    {
        Value made;
        check(48, allocator.held, shape, rank, type, &made.held);
        return made;
    }
    void FillStringTensor(char const* const* texts, size_t count)
    {
        check(52, held, texts, count);
    }
    TensorTypeAndShapeInfo GetTensorTypeAndShapeInfo() const
    {
        TensorTypeAndShapeInfo info;
        check(65, static_cast<void const*>(held), &info.held);
        return info;
    }
    template <typename Element>
    Element const* GetTensorData() const
    {
        void* data = nullptr;
        check(51, held, &data);
        return static_cast<Element const*>(data);
    }
};

struct Session : Owner<95>
{
    Session(Env& env, char const* model, SessionOptions const& options)
    {
        check(7, static_cast<void const*>(env.held), model, static_cast<void const*>(options.held), &held);
    }
    std::vector<Value> Run(RunOptions const& options, char const* const* inputs, Value const* values, size_t count, char const* const* outputs,
        size_t wanted)
    {
        std::vector<void const*> given;
        for (size_t i = 0; i < count; ++i)
        {
            given.push_back(values[i].held);
        }
        std::vector<void*> found(wanted, nullptr);
        check(9, held, static_cast<void const*>(options.held), inputs, given.data(), count, outputs, wanted, found.data());
        std::vector<Value> answers(wanted);
        for (size_t i = 0; i < wanted; ++i)
        {
            answers[i].held = found[i];
        }
        return answers;
    }
};

} // namespace Ort
