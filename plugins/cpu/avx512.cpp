// Compiled with AVX512F; runs only where that is.
#include "avx512.inl"

#include "attention.inl"

namespace adtp
{
extern Level const kAvx512;
Level const kAvx512{"avx512", kVectors * kLanes, kLanes, scratch, attend};
} // namespace adtp
