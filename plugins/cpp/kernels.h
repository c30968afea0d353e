// The compiled kernels, as a table. `adtp-plugin build` writes its definition from plugins/kernels/.
#pragma once

#include <cstddef>
#include <cstdint>

namespace adtp
{

struct Binary
{
    int32_t architecture; // 86 for sm_86; 0 for PTX, from which the driver makes code for newer GPUs
    void const* data;
    size_t bytes;
    uint32_t sharedBytes; // of a program
};

// What is launched: attention; before it, where it is wanted, each row's log-sum-exp, then what each token received.
enum class Kind
{
    kATTENTION,
    kLSE,
    kRECEIVED,
};

struct Variant
{
    char const* name;
    Kind kind;
    char const* symbol; // of the function in the compiled code
    char const* dtype; // "fp16", "bf16" or "fp32"
    int32_t headSize;
    int32_t blockM; // tokens of a tile
    int32_t blockN; // tokens it takes at a time
    uint32_t threads; // of a program
    int32_t meanLengthUpTo; // largest T / B to take this variant for; 0 for any
    Binary const* binaries;
};

extern Variant const kVariants[];
extern int32_t const kNumVariants;
extern int32_t const kNumBinaries; // of each variant
extern int32_t const kOldestArchitecture; // that the PTX is for
extern char const* const kSource; // hash of what the kernels were compiled from

} // namespace adtp
