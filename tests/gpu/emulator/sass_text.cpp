#include "sass_text.h"

#include "machine.h"
#include "sass_tokens.h"

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <unistd.h>

namespace emulator::sass
{
namespace
{

namespace fs = std::filesystem;
constexpr unsigned kInstructionBytes = 16; // from sm_70 on

// FNV-1a, 64 bits.
std::string hashOf(uint8_t const* data, size_t bytes)
{
    uint64_t hash = 0xCBF29CE484222325;
    for (size_t i = 0; i < bytes; ++i)
    {
        hash = (hash ^ data[i]) * 0x100000001B3;
    }
    char text[17];
    std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(hash));
    return text;
}

std::string contentOf(fs::path const& path)
{
    std::ifstream file(path, std::ios::binary);
    std::ostringstream content;
    content << file.rdbuf();
    return content.str();
}

// A file of this process's own, gone when it is no longer needed.
class Scratch
{
public:
    Scratch(uint8_t const* data, size_t bytes)
    {
        mPath = (fs::temp_directory_path() / "cubin-XXXXXX").string();
        int const file = mkstemp(mPath.data());
        bool const isWritten = file >= 0 && ::write(file, data, bytes) == static_cast<ssize_t>(bytes);
        if (file >= 0)
        {
            ::close(file);
        }
        if (!isWritten)
        {
            fault("cubin: cannot write " + mPath);
        }
    }
    Scratch(Scratch const&) = delete;
    Scratch& operator=(Scratch const&) = delete;
    ~Scratch() { ::unlink(mPath.c_str()); }

    std::string const& path() const { return mPath; }

private:
    std::string mPath;
};

std::string runNvdisasm(uint8_t const* image, size_t bytes)
{
    char const* const program = std::getenv("ADTP_EMULATOR_NVDISASM");
    if (!program)
    {
        fault("cubin: ADTP_EMULATOR_NVDISASM does not say where nvdisasm is");
    }
    Scratch const file(image, bytes);
    // -c: code only. -ndf: without the analysis of indirect branches, of which there are none.
    FILE* const pipe = popen(("'" + std::string(program) + "' -c -ndf " + file.path() + " 2>/dev/null").c_str(), "r");
    if (!pipe)
    {
        fault("cubin: cannot run nvdisasm");
    }
    std::string printed;
    char part[65536];
    for (size_t count; (count = std::fread(part, 1, sizeof part, pipe)) > 0;)
    {
        printed.append(part, count);
    }
    if (pclose(pipe) != 0)
    {
        fault("cubin: nvdisasm refuses it");
    }
    return printed;
}

std::string textOf(uint8_t const* image, size_t bytes)
{
    char const* const folder = std::getenv("ADTP_EMULATOR_CACHE");
    if (!folder || !*folder)
    {
        return runNvdisasm(image, bytes);
    }
    fs::path const kept = fs::path(folder) / (hashOf(image, bytes) + ".sass");
    if (fs::exists(kept))
    {
        return contentOf(kept);
    }
    std::string const printed = runNvdisasm(image, bytes);
    fs::create_directories(folder);
    fs::path const part = kept.string() + "." + std::to_string(getpid());
    std::ofstream(part, std::ios::binary) << printed;
    fs::rename(part, kept); // another process may be about to do the same: each reads a whole file
    return printed;
}

} // namespace

SassText disassemble(uint8_t const* image, size_t bytes, std::string const& kernel)
{
    SassText code;
    std::istringstream printed(textOf(image, bytes));
    bool isInside = false;
    for (std::string line; std::getline(printed, line);)
    {
        if (startsWith(line, "//----"))
        {
            isInside = false;
            continue;
        }
        isInside = isInside || line == ".text." + kernel + ":";
        if (!isInside || line.empty())
        {
            continue;
        }
        if (line.back() == ':' && line[0] != ' ' && line[0] != '\t')
        {
            code.labels[line.substr(0, line.size() - 1)] = static_cast<uint32_t>(code.lines.size());
            continue;
        }
        size_t const address = line.find("/*"), comment = line.find("*/"), end = line.rfind(';');
        if (address == std::string::npos || comment == std::string::npos || end == std::string::npos)
        {
            continue; // a directive
        }
        if (std::stoul(line.substr(address + 2), nullptr, 16) != code.lines.size() * kInstructionBytes)
        {
            fault("cubin: an instruction is missing before: " + line);
        }
        code.lines.push_back(trimmed(line.substr(comment + 2, end - comment - 2)));
    }
    if (code.lines.empty())
    {
        fault("cubin: nvdisasm prints no code of " + kernel);
    }
    code.labels[kernel] = 0;
    return code;
}

} // namespace emulator::sass
