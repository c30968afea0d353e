// Compiled with AVX-512 (F, BW); runs only where that is.
#include "linear_avx512.inl"

namespace adtp
{
extern LinearLevel const kLinearAvx512;
LinearLevel const kLinearAvx512{"avx512", Bf16::kRowBytes, kAnyTile, 1, 1, kCacheBytes, convert, multiply, addNorm};
} // namespace adtp
