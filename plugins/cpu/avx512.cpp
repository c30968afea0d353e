// Compiled with AVX512F; runs only where that is.
#include "vectors_avx512.inl"

namespace adtp
{
constexpr int32_t kSums = 24; // vectors of a tile; they leave 8 of 32 registers to its factors
} // namespace adtp

#include "attention.inl"

namespace adtp
{
extern Level const kAvx512;
Level const kAvx512{"avx512", kVectors * kLanes, scratch, attend, nullptr};
} // namespace adtp
