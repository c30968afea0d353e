// What the operator's attributes say of its inputs and outputs, as texts: "int64 texts length; int32 bounds".
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <iterator>
#include <sstream>
#include <string>
#include <vector>

namespace adtp
{

// A type of elements in ONNX Runtime's numbers.
struct ElementType
{
    char const* name;
    int32_t number;
    size_t bytes;
};

inline constexpr ElementType kTypes[] = {{"float32", 1, 4}, {"uint8", 2, 1}, {"int8", 3, 1}, {"uint16", 4, 2}, {"int16", 5, 2},
    {"int32", 6, 4}, {"int64", 7, 8}, {"bool", 9, 1}, {"float16", 10, 2}, {"float64", 11, 8}, {"uint32", 12, 4}, {"uint64", 13, 8},
    {"bfloat16", 16, 2}, {"float8e4m3fn", 17, 1}, {"float8e4m3fnuz", 18, 1}, {"float8e5m2", 19, 1}, {"float8e5m2fnuz", 20, 1}};

template <typename Is>
ElementType const* typeOf(Is const& is)
{
    auto const* const found = std::find_if(std::begin(kTypes), std::end(kTypes), is);
    return found == std::end(kTypes) ? nullptr : found;
}

// An input or an output: its type, and its axes in words. These are numbers; texts, B; length, S of padded inputs; tokens, B * S or
// T; and bounds, B + 1.
struct Said
{
    ElementType const* type;
    std::vector<std::string> axes;
};

inline bool isAxis(std::string const& word)
{
    bool const isNumber = word.find_first_not_of("0123456789") == std::string::npos && word.size() < 10;
    return isNumber || word == "texts" || word == "length" || word == "tokens" || word == "bounds";
}

// The size of an axis, in a call of so many texts, of this length, and of so many tokens.
inline int64_t sizeOf(std::string const& axis, int64_t texts, int64_t length, int64_t tokens)
{
    return axis == "texts" ? texts
        : axis == "length" ? length
        : axis == "tokens" ? tokens
        : axis == "bounds" ? texts + 1
                           : std::strtoll(axis.c_str(), nullptr, 10);
}

constexpr size_t kMostAxes = 8; // of an array in TensorRT

// Read an attribute, which has one for each of the plan's inputs or outputs. Empty, or what is wrong.
inline std::string read(char const* name, std::string const& text, size_t count, std::vector<Said>& said)
{
    std::string const begin = std::string(name) + ": got ";
    std::istringstream arrays(text);
    for (std::string array; std::getline(arrays, array, ';');)
    {
        std::istringstream words(array);
        std::string word;
        words >> word;
        said.push_back({typeOf([&](ElementType const& type) { return word == type.name; }), {}});
        if (!said.back().type)
        {
            std::string names;
            for (ElementType const& type : kTypes)
            {
                names += (names.empty() ? "" : ", ") + std::string(type.name);
            }
            return begin + "'" + word + "'; accepted are " + names;
        }
        while (words >> word)
        {
            if (!isAxis(word))
            {
                return begin + "'" + word + "'; accepted are numbers, texts, length, tokens and bounds";
            }
            said.back().axes.push_back(word);
            if (said.back().axes.size() > kMostAxes)
            {
                return begin + "more than " + std::to_string(kMostAxes) + " axes";
            }
        }
    }
    return said.size() == count ? std::string{}
                                : begin + std::to_string(said.size()) + "; accepted is one for each of the plan's "
            + std::to_string(count);
}

} // namespace adtp
