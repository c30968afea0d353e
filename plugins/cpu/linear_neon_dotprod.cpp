// Compiled with dot products of bytes; runs only where they are. Elsewhere than on aarch64 it is empty.
#include "neon.h"

#ifdef ADTP_DOTPROD
// Here and not as a flag, because zig takes -march for the name of a processor.
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("dotprod"))), apply_to = function)
#else
#pragma GCC target("arch=armv8.2-a+dotprod")
#endif

#define ADTP_SDOT
#include "linear_neon.inl"

#ifdef __clang__
#pragma clang attribute pop
#endif

namespace adtp
{
extern LinearLevel const kLinearNeonDotprod;
LinearLevel const kLinearNeonDotprod{"neon_dotprod", Bf16::kRowBytes, kAnyTile, 1, 1, kCacheBytes, convert, multiply, addNorm};
} // namespace adtp
#endif
