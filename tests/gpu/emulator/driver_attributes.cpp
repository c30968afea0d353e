// What the driver says of a kernel: cuFuncGetAttribute and cuFuncGetParamInfo of cuda.h.
#include "driver.h"

namespace emulator
{
namespace
{

enum Attribute // CUfunction_attribute
{
    kMaxThreads = 0,
    kSharedBytes = 1,
    kLocalBytes = 3,
    kRegisterCount = 4,
};

Status attributeOf(Kernel const& kernel, int attribute, int& value)
{
    switch (attribute)
    {
    case kMaxThreads: value = static_cast<int>(kernel.threads ? kernel.threads : kMostThreads); return kSuccess;
    case kSharedBytes: value = static_cast<int>(kernel.staticShared); return kSuccess;
    case kLocalBytes: value = 0; return kSuccess; // a kernel with a stack is not loaded
    case kRegisterCount: value = static_cast<int>(kernel.registers); return kSuccess;
    default: return kNotSupported;
    }
}

} // namespace
} // namespace emulator

using namespace emulator;

ADTP_API cuFuncGetAttribute(int* value, int attribute, Kernel* kernel)
{
    std::lock_guard<std::mutex> const lock(driver().mutex);
    return driver().kernels.count(kernel) ? attributeOf(*kernel, attribute, *value) : kInvalidHandle;
}

// From CUDA 12.4 on.
ADTP_API cuFuncGetParamInfo(Kernel* kernel, size_t index, size_t* offset, size_t* bytes)
{
    std::lock_guard<std::mutex> const lock(driver().mutex);
    if (!driver().kernels.count(kernel))
    {
        return kInvalidHandle;
    }
    if (index >= kernel->parameters.size())
    {
        return kInvalidValue;
    }
    *offset = kernel->parameters[index].offset;
    *bytes = kernel->parameters[index].bytes;
    return kSuccess;
}
