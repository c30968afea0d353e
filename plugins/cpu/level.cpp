#include "attention.h"

#include <cstring>

#if defined(ADTP_X86) && defined(_MSC_VER)
#include <immintrin.h>
#include <intrin.h>
#endif

namespace adtp
{
namespace
{

#ifdef ADTP_X86
#ifdef _MSC_VER
// Whether the processor has the feature in a bit of EBX of leaf 7, and the system keeps the registers in `state`.
bool has(int32_t bit, uint64_t state)
{
    int registers[4];
    __cpuid(registers, 1);
    int32_t const fmaAndSaved = 1 << 12 | 1 << 27;
    if ((registers[2] & fmaAndSaved) != fmaAndSaved || (_xgetbv(0) & state) != state)
    {
        return false;
    }
    __cpuidex(registers, 7, 0);
    return registers[1] >> bit & 1;
}

bool hasAvx2()
{
    return has(5, 0x6);
}

bool hasAvx512()
{
    return has(16, 0xE6);
}
#else
bool hasAvx2()
{
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}

bool hasAvx512()
{
    return __builtin_cpu_supports("avx512f");
}
#endif
#endif

} // namespace

Level const* level(char const* name)
{
    auto const wanted = [name](Level const& one) { return !name || std::strcmp(name, one.name) == 0; };
#ifdef ADTP_X86
    if (wanted(kAvx512) && hasAvx512())
    {
        return &kAvx512;
    }
    if (wanted(kAvx2) && hasAvx2())
    {
        return &kAvx2;
    }
#endif
#ifdef ADTP_NEON
    if (wanted(kNeon))
    {
        return &kNeon;
    }
#endif
    return wanted(kPortable) ? &kPortable : nullptr;
}

} // namespace adtp
