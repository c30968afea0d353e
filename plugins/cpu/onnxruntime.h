// What the operators take of ONNX Runtime's C interface, so that they build without its headers, which its wheels
// do not have. The table of functions only grows at its end: a place once given stays (onnxruntime_c_api.h says so).
#pragma once

#include <cstddef>
#include <cstdint>

#ifdef _WIN32
#define ADTP_ORT_CALL __stdcall
#else
#define ADTP_ORT_CALL
#endif

namespace ort
{

constexpr uint32_t kVersion = 17; // of the interface: that of ONNX Runtime 1.17, the first with ParallelFor

struct Status; // null where all went well
struct SessionOptions;
struct Domain;
struct KernelInfo;
struct KernelContext;
struct Value;
struct ShapeInfo;

enum Error : int32_t
{
    kFail = 1,
    kInvalidArgument = 2,
};

enum Element : int32_t
{
    kFloat = 1,
    kInt8 = 3,
    kInt32 = 6,
    kFloat16 = 10,
    kBfloat16 = 16,
};

// A function's place in the table, and its type.
template <size_t Place, typename Result, typename... Arguments>
struct Function
{
    static constexpr size_t kPlace = Place;
    typedef Result(ADTP_ORT_CALL* Type)(Arguments...);
};

typedef Function<0, Status*, Error, char const*> CreateStatus;
typedef Function<26, Status*, char const*, Domain**> CreateCustomOpDomain;
typedef Function<27, Status*, Domain*, struct Operator const*> CustomOpDomainAdd;
typedef Function<28, Status*, SessionOptions*, Domain*> AddCustomOpDomain;
typedef Function<51, Status*, Value*, void**> GetTensorMutableData;
typedef Function<61, Status*, ShapeInfo const*, size_t*> GetDimensionsCount;
typedef Function<62, Status*, ShapeInfo const*, int64_t*, size_t> GetDimensions;
typedef Function<65, Status*, Value const*, ShapeInfo**> GetTensorTypeAndShape;
typedef Function<85, Status*, KernelInfo const*, char const*, float*> KernelInfoGetFloat;
typedef Function<86, Status*, KernelInfo const*, char const*, int64_t*> KernelInfoGetInt64;
typedef Function<90, Status*, KernelContext const*, size_t, Value const**> GetInput;
typedef Function<91, Status*, KernelContext*, size_t, int64_t const*, size_t, Value**> GetOutput;
typedef Function<93, void, Status*> ReleaseStatus;
typedef Function<99, void, ShapeInfo*> ReleaseShapeInfo;
typedef Function<274, Status*, KernelContext const*, void (*)(void*, size_t), size_t, size_t, void*> ParallelFor;

// The table of functions.
class Api
{
public:
    explicit Api(void const* table)
        : mTable(static_cast<void const* const*>(table))
    {
    }

    template <typename Wanted, typename... Arguments>
    auto call(Arguments... arguments) const
    {
        return reinterpret_cast<typename Wanted::Type>(const_cast<void*>(mTable[Wanted::kPlace]))(arguments...);
    }

private:
    void const* const* mTable;
};

struct ApiBase
{
    void const*(ADTP_ORT_CALL* getApi)(uint32_t version); // null where the library is older
    char const*(ADTP_ORT_CALL* getVersionString)();
};

// A custom operator, as of version 17.
struct Operator
{
    uint32_t version;
    void* createKernel; // superseded by createKernelV2
    char const*(ADTP_ORT_CALL* getName)(Operator const*);
    char const*(ADTP_ORT_CALL* getProvider)(Operator const*);
    Element(ADTP_ORT_CALL* getInputType)(Operator const*, size_t);
    size_t(ADTP_ORT_CALL* getInputCount)(Operator const*);
    Element(ADTP_ORT_CALL* getOutputType)(Operator const*, size_t);
    size_t(ADTP_ORT_CALL* getOutputCount)(Operator const*);
    void* compute; // superseded by computeV2
    void(ADTP_ORT_CALL* destroyKernel)(void*);
    int32_t(ADTP_ORT_CALL* getInputCharacteristic)(Operator const*, size_t); // 0: required
    int32_t(ADTP_ORT_CALL* getOutputCharacteristic)(Operator const*, size_t);
    int32_t(ADTP_ORT_CALL* getInputMemoryType)(Operator const*, size_t); // 0: the provider's
    int(ADTP_ORT_CALL* getVariadicInputMinimum)(Operator const*);
    int(ADTP_ORT_CALL* getVariadicInputHomogeneity)(Operator const*);
    int(ADTP_ORT_CALL* getVariadicOutputMinimum)(Operator const*);
    int(ADTP_ORT_CALL* getVariadicOutputHomogeneity)(Operator const*);
    Status*(ADTP_ORT_CALL* createKernelV2)(Operator const*, void const* api, KernelInfo const*, void** kernel);
    Status*(ADTP_ORT_CALL* computeV2)(void* kernel, KernelContext*);
    Status*(ADTP_ORT_CALL* inferShapes)(Operator const*, void*); // may be null
    int(ADTP_ORT_CALL* getStartVersion)(Operator const*);
    int(ADTP_ORT_CALL* getEndVersion)(Operator const*);
    void* later[4]; // which outputs may reuse inputs: none
};

} // namespace ort
