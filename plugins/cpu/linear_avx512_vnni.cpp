// Compiled with AVX-512 (F, BW, VNNI); runs only where that is.
#define ADTP_VNNI
#include "linear_avx512.inl"

namespace adtp
{
extern LinearLevel const kLinearAvx512Vnni;
LinearLevel const kLinearAvx512Vnni{"avx512_vnni", Bf16::kRowBytes, kAnyTile, 1, 1, kCacheBytes, convert, multiply, addNorm};
} // namespace adtp
