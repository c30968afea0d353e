// Pieces of a line of PTX.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace emulator
{

bool startsWith(std::string const& text, std::string const& prefix);
std::string trimmed(std::string const& text);
uint32_t number(std::string const& text); // throws std::logic_error where it is none

// Splits at spaces, commas and braces; a bracketed address is one piece, without its spaces.
std::vector<std::string> pieces(std::string const& text);

} // namespace emulator
