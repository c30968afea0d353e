// Compiled with AVX2, FMA and AVX-VNNI; runs only where that is.
#define ADTP_VNNI
#include "linear_avx2.inl"

namespace adtp
{
extern LinearLevel const kLinearAvx2Vnni;
LinearLevel const kLinearAvx2Vnni{"avx2_vnni", Bf16::kRowBytes, kAnyTile, 1, 1, kCacheBytes, convert, multiply, addNorm};
} // namespace adtp
