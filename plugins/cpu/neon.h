// Which code for ARM's processors is compiled.
#pragma once

#if defined(__aarch64__) || defined(_M_ARM64)
#define ADTP_NEON // every processor of 64 bits has it
#endif

// Dot products of bytes, from ARMv8.2 on. Older compilers have them only where a whole build is for processors with them.
#ifdef ADTP_NEON
#if defined(__ARM_FEATURE_DOTPROD) || (defined(__clang__) ? __clang_major__ >= 16 : defined(__GNUC__) && __GNUC__ >= 8)
#define ADTP_DOTPROD
#endif
#endif
