#include "sass_tokens.h"

#include "numbers.h"

#include <algorithm>
#include <cctype>
#include <cstdlib>

namespace emulator::sass
{

bool startsWith(std::string const& text, std::string const& beginning)
{
    return text.compare(0, beginning.size(), beginning) == 0;
}

bool isNumber(std::string const& text)
{
    return !text.empty() && std::all_of(text.begin(), text.end(), [](unsigned char c) { return std::isdigit(c); });
}

std::string trimmed(std::string const& text)
{
    size_t const first = text.find_first_not_of(" \t");
    return first == std::string::npos ? "" : text.substr(first, text.find_last_not_of(" \t") - first + 1);
}

std::vector<std::string> split(std::string const& text, char separator)
{
    std::vector<std::string> parts;
    for (size_t at = 0; at <= text.size();)
    {
        size_t const end = std::min(text.find(separator, at), text.size());
        parts.push_back(trimmed(text.substr(at, end - at)));
        at = end + 1;
    }
    return parts;
}

bool isHex(std::string const& token)
{
    return startsWith(token, "0x") || startsWith(token, "-0x");
}

// "0x10" or "-0x10"
int64_t hex(std::string const& token)
{
    bool const negative = token[0] == '-';
    auto const magnitude = static_cast<int64_t>(std::stoull(token.substr(negative), nullptr, 16));
    return negative ? -magnitude : magnitude;
}

// "1.5", "-2e-05", "+INF": what nvdisasm prints for 32-bit floats.
bool readFloat(std::string const& token, uint32_t& bits)
{
    if (token == "+INF" || token == "-INF")
    {
        bits = token[0] == '-' ? 0xFF800000 : 0x7F800000;
        return true;
    }
    size_t const sign = token[0] == '-';
    unsigned char const first = sign < token.size() ? token[sign] : 0;
    if (isHex(token) || !(std::isdigit(first) || first == '.'))
    {
        return false;
    }
    char* end = nullptr;
    bits = asBits(std::strtof(token.c_str(), &end));
    return *end == 0;
}

} // namespace emulator::sass
