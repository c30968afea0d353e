#include "ptx_text.h"

namespace emulator
{

bool startsWith(std::string const& text, std::string const& prefix)
{
    return text.compare(0, prefix.size(), prefix) == 0;
}

std::string trimmed(std::string const& text)
{
    size_t const first = text.find_first_not_of(" \t\r");
    size_t const last = text.find_last_not_of(" \t\r");
    return first == std::string::npos ? "" : text.substr(first, last - first + 1);
}

uint32_t number(std::string const& text)
{
    return static_cast<uint32_t>(std::stoul(text));
}

std::vector<std::string> pieces(std::string const& text)
{
    std::vector<std::string> found;
    std::string piece;
    bool isAddress = false;
    auto const end = [&] {
        if (!piece.empty())
        {
            found.push_back(piece);
        }
        piece.clear();
    };
    for (char const c : text)
    {
        if (c == '[' || c == ']')
        {
            end();
            isAddress = c == '[';
        }
        else if (c == ' ' || c == '\t' || ((c == ',' || c == '{' || c == '}') && !isAddress))
        {
            if (!isAddress)
            {
                end();
            }
        }
        else
        {
            piece += c;
        }
    }
    end();
    return found;
}

} // namespace emulator
