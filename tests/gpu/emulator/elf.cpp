// Sources: the ELF-64 specification for the file; for what CUDA adds, the names and values that `cuobjdump -elf` prints
// beside the bytes (EIATTR_..., EIFMT_...). tests/gpu/test_sass_files.py compares with the manifest of the kernels.
#include "elf.h"

#include <algorithm>
#include <cstring>

namespace emulator
{
namespace
{

constexpr uint16_t kMachineCuda = 190;
constexpr uint8_t kNewerAbi = 0x41; // EI_OSABI from sm_100 on: e_flags has the architecture one byte higher
constexpr uint32_t kNoBits = 8; // SHT_NOBITS
constexpr uint32_t kReservedFrom90 = 1024; // bytes of a block that belong to the system (CUDA Programming Guide, 9.0)

enum Attribute : uint8_t // EIATTR_
{
    kPARAM_CBANK = 0x0A, // symbol, then offset and size of the parameters in constant bank 0
    kREQNTID = 0x10, // x, y, z
    kFRAME_SIZE = 0x11, // symbol, bytes of the stack
    kMIN_STACK_SIZE = 0x12,
    kKPARAM_INFO = 0x17, // index, ordinal, offset, and the size in the upper 14 bits
    kREGCOUNT = 0x2F, // symbol, registers of a thread
};
constexpr uint8_t kWithSize = 4; // EIFMT_SVAL: 16 bits of length, then as many bytes. Others have 16 bits of value.

// Reads from a file whose every offset may be wrong.
class Image
{
public:
    Image(uint8_t const* data, size_t bytes)
        : mData(data)
        , mBytes(bytes)
    {
    }

    template <typename T>
    T at(uint64_t offset) const
    {
        T value;
        std::memcpy(&value, range(offset, sizeof value), sizeof value);
        return value;
    }

    uint8_t const* range(uint64_t offset, uint64_t bytes) const
    {
        if (offset > mBytes || bytes > mBytes - offset)
        {
            fault("cubin: the file ends before byte " + std::to_string(offset + bytes));
        }
        return mData + offset;
    }

    std::string text(uint64_t offset) const
    {
        auto const* begin = reinterpret_cast<char const*>(range(offset, 1));
        return std::string(begin, strnlen(begin, mBytes - offset));
    }

private:
    uint8_t const* mData;
    size_t mBytes;
};

struct Section
{
    std::string name;
    uint32_t type;
    uint64_t offset;
    uint64_t bytes;
    uint32_t info;
};

std::vector<Section> sections(Image const& file)
{
    auto const table = file.at<uint64_t>(40);
    auto const entryBytes = file.at<uint16_t>(58);
    auto const count = file.at<uint16_t>(60);
    auto const namesIndex = file.at<uint16_t>(62);
    auto const entry = [&](unsigned index) { return table + uint64_t{entryBytes} * index; };
    auto const names = file.at<uint64_t>(entry(namesIndex) + 24);
    std::vector<Section> found;
    for (unsigned index = 0; index < count; ++index)
    {
        uint64_t const at = entry(index);
        std::string const name = file.text(names + file.at<uint32_t>(at));
        found.push_back({name, file.at<uint32_t>(at + 4), file.at<uint64_t>(at + 24), file.at<uint64_t>(at + 32),
            file.at<uint32_t>(at + 44)});
    }
    return found;
}

// One record of .nv.info or .nv.info.KERNEL.
void readAttribute(Image const& file, uint8_t attribute, uint64_t at, Cubin& cubin)
{
    switch (attribute)
    {
    case kPARAM_CBANK:
        cubin.parameterBase = file.at<uint16_t>(at + 4);
        cubin.parameterBytes = file.at<uint16_t>(at + 6);
        return;
    case kREQNTID:
        cubin.threads = file.at<uint32_t>(at);
        if (file.at<uint32_t>(at + 4) != 1 || file.at<uint32_t>(at + 8) != 1)
        {
            fault("cubin: blocks of threads along y or z are not known");
        }
        return;
    case kKPARAM_INFO:
    {
        size_t const ordinal = file.at<uint16_t>(at + 4);
        cubin.parameters.resize(std::max(cubin.parameters.size(), ordinal + 1));
        cubin.parameters[ordinal] = {file.at<uint16_t>(at + 6), file.at<uint32_t>(at + 8) >> 18};
        return;
    }
    case kREGCOUNT: cubin.registers = std::max(cubin.registers, file.at<uint32_t>(at + 4)); return;
    case kFRAME_SIZE:
    case kMIN_STACK_SIZE:
        if (file.at<uint32_t>(at + 4))
        {
            fault("cubin: the kernel has a stack, which is not known");
        }
        return;
    default: return; // hints for tools and debuggers
    }
}

void readAttributes(Image const& file, Section const& section, Cubin& cubin)
{
    for (uint64_t at = section.offset; at + 4 <= section.offset + section.bytes;)
    {
        auto const format = file.at<uint8_t>(at);
        auto const attribute = file.at<uint8_t>(at + 1);
        uint64_t const length = format == kWithSize ? file.at<uint16_t>(at + 2) : 0;
        if (format == kWithSize)
        {
            readAttribute(file, attribute, at + 4, cubin);
        }
        at += 4 + length;
    }
}

// Faults where it is no cubin.
int readArchitecture(Image const& file)
{
    if (std::memcmp(file.range(0, 5), "\177ELF\2", 5) != 0 || file.at<uint16_t>(18) != kMachineCuda)
    {
        fault("cubin: no 64-bit ELF file for CUDA");
    }
    return architectureOf(file.at<uint8_t>(7), file.at<uint32_t>(48));
}

} // namespace

int architectureOf(uint8_t abi, uint32_t flags)
{
    return static_cast<int>((abi == kNewerAbi ? flags >> 8 : flags) & 0xFF);
}

Cubin readCubin(uint8_t const* image, size_t bytes, std::string const& kernel)
{
    Cubin cubin;
    Image const file(image, bytes);
    cubin.architecture = readArchitecture(file);
    bool found = false;
    for (Section const& section : sections(file))
    {
        if (section.name == ".text." + kernel)
        {
            found = true;
            cubin.codeBytes = static_cast<uint32_t>(section.bytes);
            cubin.registers = std::max(cubin.registers, section.info >> 24);
        }
        else if (section.name == ".nv.shared." + kernel)
        {
            cubin.staticShared = static_cast<uint32_t>(section.bytes);
        }
        else if (section.name == ".rel.text." + kernel || section.name == ".rela.text." + kernel)
        {
            if (section.bytes && section.type != kNoBits)
            {
                fault("cubin: code that has to be relocated is not known");
            }
        }
        else if (section.name == ".nv.info" || section.name == ".nv.info." + kernel)
        {
            readAttributes(file, section, cubin);
        }
    }
    if (!found)
    {
        fault("cubin: no kernel " + kernel);
    }
    for (Parameter const& parameter : cubin.parameters)
    {
        if (parameter.offset + parameter.bytes > cubin.parameterBytes)
        {
            fault("cubin: a parameter lies outside of the parameters");
        }
    }
    if (cubin.architecture >= 90)
    {
        // ptxas counts the system's part, which lies at the beginning, as the kernel's own.
        cubin.reservedShared = kReservedFrom90;
        cubin.staticShared -= std::min(cubin.staticShared, kReservedFrom90);
    }
    return cubin;
}

} // namespace emulator
