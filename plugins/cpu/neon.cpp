// For aarch64, all of whose processors have these instructions. Elsewhere it is empty.
#include "attention.h"

#ifdef ADTP_NEON
#include "vectors_neon.inl"

namespace adtp
{
constexpr int32_t kSums = 24; // vectors of a tile; they leave 8 of 32 registers to its factors
} // namespace adtp

#include "attention.inl"

namespace adtp
{
Level const kNeon{"neon", kVectors * kLanes, scratch, attend, nullptr};
} // namespace adtp
#endif
