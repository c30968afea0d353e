#include "attention.h"

#include <cstdint>
#include <cstring>

#ifdef ADTP_X86
#ifdef _MSC_VER
#include <immintrin.h>
#include <intrin.h>
#else
#include <cpuid.h>
#endif
#endif

namespace adtp
{
namespace
{

#ifdef ADTP_X86
// EAX, EBX, ECX and EDX of a leaf. __builtin_cpu_supports would be shorter, but the runtime that zig links never fills what it reads.
void cpuid(int32_t leaf, uint32_t (&registers)[4])
{
#ifdef _MSC_VER
    __cpuidex(reinterpret_cast<int*>(registers), leaf, 0);
#else
    __cpuid_count(leaf, 0, registers[0], registers[1], registers[2], registers[3]);
#endif
}

// The registers that the system keeps for a process.
uint64_t kept()
{
#ifdef _MSC_VER
    return _xgetbv(0);
#else
    uint32_t low = 0;
    uint32_t high = 0;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return uint64_t{high} << 32 | low;
#endif
}

// Whether the processor has FMA and the feature in a bit of EBX of leaf 7, and the system keeps the registers in `state`.
bool has(int32_t bit, uint64_t state)
{
    uint32_t registers[4];
    cpuid(1, registers);
    uint32_t const fmaAndSaved = 1u << 12 | 1u << 27;
    if ((registers[2] & fmaAndSaved) != fmaAndSaved || (kept() & state) != state)
    {
        return false;
    }
    cpuid(7, registers);
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
    return wanted(kPortable) ? &kPortable : nullptr;
}

} // namespace adtp
