// For aarch64, all of whose processors have these instructions. Elsewhere it is empty.
#include "neon.h"

#ifdef ADTP_NEON
#include "linear_neon.inl"

namespace adtp
{
extern LinearLevel const kLinearNeon;
LinearLevel const kLinearNeon{"neon", Bf16::kRowBytes, kAnyTile, 1, 1, kCacheBytes, convert, multiply, addNorm};
} // namespace adtp
#endif
