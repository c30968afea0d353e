// What a 64-bit processor of ARM has beyond what all of them have.
#pragma once

#ifdef __linux__
#include <sys/auxv.h>
#endif

namespace adtp
{

// Dot products of bytes. On systems that are not asked, no.
inline bool hasDotprod()
{
#if defined(__APPLE__) || defined(__ARM_FEATURE_DOTPROD) // each that runs macOS, and each that a whole build is for
    return true;
#elif defined(__linux__)
    constexpr unsigned long dotprod = 1UL << 20; // HWCAP_ASIMDDP, which old headers lack
    return (getauxval(AT_HWCAP) & dotprod) != 0;
#else
    return false;
#endif
}

} // namespace adtp
