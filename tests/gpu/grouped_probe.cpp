// The C++ launch of grouped attention behind a C interface that ctypes takes.
#include "grouped.h"

static std::string said;

extern "C" __attribute__((visibility("default"))) char const* probe_said()
{
    return said.c_str();
}

extern "C" __attribute__((visibility("default"))) void probe_prepare(char const* dtype, int32_t headSize, bool received)
{
    said = adtp::prepareGrouped(dtype, headSize, received);
}

extern "C" __attribute__((visibility("default"))) void probe_launch(adtp::GroupedCall const* call, void* stream)
{
    said = adtp::launch(*call, stream);
}
