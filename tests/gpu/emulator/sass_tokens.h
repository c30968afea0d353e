// Pieces of nvdisasm's text.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace emulator::sass
{

bool startsWith(std::string const& text, std::string const& beginning);
bool isNumber(std::string const& text); // decimal digits only
std::string trimmed(std::string const& text);
std::vector<std::string> split(std::string const& text, char separator); // trimmed parts

bool isHex(std::string const& token);
int64_t hex(std::string const& token); // "0x10" or "-0x10"
bool readFloat(std::string const& token, uint32_t& bits); // "1.5", "-2e-05", "+INF"; false for anything else

} // namespace emulator::sass
