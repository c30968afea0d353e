// Compiled with AVX2 and FMA; runs only where that is.
#include "linear_avx2.inl"

namespace adtp
{
extern LinearLevel const kLinearAvx2;
LinearLevel const kLinearAvx2{"avx2", Bf16::kRowBytes, kAnyTile, 1, 1, kCacheBytes, convert, multiply, addNorm};
} // namespace adtp
