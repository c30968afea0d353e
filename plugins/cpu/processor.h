// What an x86-64 processor has, and the system keeps the registers of.
#pragma once

#include <cstdint>

#ifdef _MSC_VER
#include <immintrin.h>
#include <intrin.h>
#else
#include <cpuid.h>
#endif
#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace adtp
{

// Bits of CPUID's leaf 7 and, in its second part, of EAX; 0 without FMA, or where the system does not keep the registers in `state`.
// __builtin_cpu_supports would be shorter, but the runtime that zig links never fills what it reads.
struct Features
{
    uint32_t ebx = 0;
    uint32_t ecx = 0;
    uint32_t edx = 0;
    uint32_t eax1 = 0;

    explicit Features(uint64_t state)
    {
        uint32_t registers[4];
        ask(1, 0, registers);
        uint32_t const fmaAndSaved = 1u << 12 | 1u << 27;
        if ((registers[2] & fmaAndSaved) != fmaAndSaved || (kept() & state) != state)
        {
            return;
        }
        ask(7, 0, registers);
        ebx = registers[1];
        ecx = registers[2];
        edx = registers[3];
        if (registers[0] >= 1) // the parts that there are
        {
            ask(7, 1, registers);
            eax1 = registers[0];
        }
    }

    // "GenuineIntel"
    static bool isIntel()
    {
        uint32_t registers[4];
        ask(0, 0, registers);
        return registers[1] == 0x756E6547 && registers[3] == 0x49656E69 && registers[2] == 0x6C65746E;
    }

private:
    // EAX, EBX, ECX and EDX of a leaf.
    static void ask(uint32_t leaf, uint32_t part, uint32_t (&registers)[4])
    {
#ifdef _MSC_VER
        __cpuidex(reinterpret_cast<int*>(registers), static_cast<int>(leaf), static_cast<int>(part));
#else
        __cpuid_count(leaf, part, registers[0], registers[1], registers[2], registers[3]);
#endif
    }

    // The registers that the system keeps for a process.
    static uint64_t kept()
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
};

constexpr uint64_t kOfAvx2 = 0x6;
constexpr uint64_t kOfAvx512 = 0xE6;
constexpr uint64_t kOfAmx = 0x600E6;

inline bool hasAvx2()
{
    return Features(kOfAvx2).ebx >> 5 & 1;
}

inline bool hasAvx2Vnni()
{
    return hasAvx2() && Features(kOfAvx2).eax1 >> 4 & 1;
}

// Bits of EBX: the foundation, and from MSVC also DQ, CD, BW and VL, which its /arch:AVX512 lets it take everywhere.
#ifdef _MSC_VER
constexpr uint32_t kAvx512Bits = 1u << 16 | 1u << 17 | 1u << 28 | 1u << 30 | 1u << 31;
#else
constexpr uint32_t kAvx512Bits = 1u << 16;
#endif

inline bool hasAvx512()
{
    return (Features(kOfAvx512).ebx & kAvx512Bits) == kAvx512Bits;
}

// Linear layers in lower precision take its bytes and words, too.
inline bool hasAvx512Bw()
{
    return hasAvx512() && Features(kOfAvx512).ebx >> 30 & 1;
}

inline bool hasAvx512Vnni()
{
    return hasAvx512Bw() && Features(kOfAvx512).ecx >> 11 & 1;
}

inline bool hasAvx512Bf16()
{
    return hasAvx512Vnni() && Features(kOfAvx512).eax1 >> 5 & 1;
}

// Attention in bf16 takes vreduceps, too.
inline bool hasAvx512DqBf16()
{
    return hasAvx512Bf16() && Features(kOfAvx512).ebx >> 17 & 1;
}

#ifdef __linux__
// Tiles, with products in bf16 and INT8. Linux keeps them for a process that has asked, once, for all its threads.
inline bool hasAmx()
{
    constexpr uint32_t tilesAndBoth = 1u << 24 | 1u << 25 | 1u << 22;
    constexpr long requestPermission = 0x1023, tileData = 18; // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return hasAvx512Bf16() && (Features(kOfAmx).edx & tilesAndBoth) == tilesAndBoth
        && syscall(SYS_arch_prctl, requestPermission, tileData) == 0;
}

// Attention in tiles takes vreduceps, too.
inline bool hasAmxDq()
{
    return (Features(kOfAvx512).ebx >> 17 & 1) && hasAmx();
}
#endif

} // namespace adtp
