#include "attention.h"

#ifdef ADTP_X86
#include "processor.h"
#endif

#include <cstring>

namespace adtp
{

Level const* level(char const* name)
{
    auto const wanted = [name](Level const& one) { return !name || std::strcmp(name, one.name) == 0; };
#ifdef ADTP_AMX
    if (name && wanted(kAmx) && hasAmxDq())
    {
        return &kAmx;
    }
#endif
#ifdef ADTP_X86
    if (name && wanted(kAvx512Bf16) && hasAvx512DqBf16())
    {
        return &kAvx512Bf16;
    }
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

Level const& levelInBf16()
{
#ifdef ADTP_AMX
    if (hasAmxDq())
    {
        return kAmx;
    }
#endif
#ifdef ADTP_X86
    if (!Features::isIntel() && hasAvx512DqBf16()) // Intel's vdpbf16ps does half as many multiply-adds as fp32's own instruction
    {
        return kAvx512Bf16;
    }
#endif
    return *level(nullptr);
}

} // namespace adtp
