// Compiled with AVX-512 (F, BW, VNNI, BF16); runs only where that is.
#define ADTP_VNNI
#define ADTP_BF16
#include "linear_avx512.inl"

namespace adtp
{
extern LinearLevel const kLinearAvx512Bf16;
LinearLevel const kLinearAvx512Bf16{"avx512_bf16", Bf16::kRowBytes, kAnyTile, 1, 1, kCacheBytes, convert, multiply, addNorm};
} // namespace adtp
