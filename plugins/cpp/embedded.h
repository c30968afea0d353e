// Kernels that are built into libadtp_cuda, for doors through which nobody brings any. `adtp-plugin build --cuda` writes the table.
#pragma once

#include "runner.h"

namespace adtp
{

extern adtp_kernel const kKernels[];
extern int32_t const kNumKernels;

} // namespace adtp
