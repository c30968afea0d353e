// What the operator's attributes say of its inputs and outputs, as texts.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
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

constexpr ElementType kTypes[] = {{"float32", 1, 4}, {"uint8", 2, 1}, {"int8", 3, 1}, {"uint16", 4, 2}, {"int16", 5, 2},
    {"int32", 6, 4}, {"int64", 7, 8}, {"bool", 9, 1}, {"float16", 10, 2}, {"float64", 11, 8}, {"uint32", 12, 4}, {"uint64", 13, 8},
    {"bfloat16", 16, 2}, {"float8e4m3fn", 17, 1}, {"float8e4m3fnuz", 18, 1}, {"float8e5m2", 19, 1}, {"float8e5m2fnuz", 20, 1}};

template <typename Is>
ElementType const* typeOf(Is const& is)
{
    auto const* const found = std::find_if(std::begin(kTypes), std::end(kTypes), is);
    return found == std::end(kTypes) ? nullptr : found;
}

// "int64 int32", one for each input; empty, or what is wrong.
inline std::string readTypes(std::string const& text, size_t count, std::vector<ElementType const*>& types)
{
    std::istringstream words(text);
    for (std::string word; words >> word;)
    {
        types.push_back(typeOf([&](ElementType const& type) { return word == type.name; }));
        if (!types.back())
        {
            std::string names;
            for (ElementType const& type : kTypes)
            {
                names += (names.empty() ? "" : ", ") + std::string(type.name);
            }
            return "types: got '" + word + "'; accepted are " + names;
        }
    }
    return types.size() == count ? std::string{}
                                 : "types: got " + std::to_string(types.size()) + "; accepted is one for each of the plan's "
            + std::to_string(count) + " inputs";
}

// "texts 2; tokens 384"; empty, or what is wrong.
inline std::string readShapes(std::string const& text, std::vector<std::vector<std::string>>& shapes)
{
    std::istringstream outputs(text);
    for (std::string output; std::getline(outputs, output, ';');)
    {
        std::vector<std::string>& shape = shapes.emplace_back();
        std::istringstream words(output);
        for (std::string word; words >> word;)
        {
            bool const isNumber = word.find_first_not_of("0123456789") == std::string::npos && word.size() < 10;
            if (!isNumber && word != "texts" && word != "length" && word != "tokens")
            {
                return "shapes: got '" + word + "'; accepted are numbers, texts, length and tokens";
            }
            shape.push_back(word);
        }
    }
    return {};
}

} // namespace adtp
