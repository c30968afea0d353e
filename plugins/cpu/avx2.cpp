// Compiled with AVX2 and FMA; runs only where both are there.
#include "vectors_avx2.inl"

namespace adtp
{
constexpr int32_t kSums = 12; // vectors of a tile; they leave 4 of 16 registers to its factors
} // namespace adtp

#include "attention.inl"

namespace adtp
{
extern Level const kAvx2;
Level const kAvx2{"avx2", kVectors * kLanes, scratch, attend, nullptr};
} // namespace adtp
