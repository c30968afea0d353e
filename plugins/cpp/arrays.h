// Arrays of a call, compared with what the operator's attributes and its plan say.
#pragma once

#include "plan.h"
#include "runner.h"
#include "signature.h"

#include <algorithm>
#include <string>
#include <vector>

namespace adtp
{

// An input or an output of a call.
struct Array
{
    char* data;
    ElementType const* type; // null for others
    uint64_t bytes;
    std::vector<int64_t> shape;
};

// The shape that the words of an attribute mean in a call.
inline std::vector<int64_t> shapeOf(Said const& said, adtp_call const& call)
{
    std::vector<int64_t> shape;
    for (std::string const& axis : said.axes)
    {
        shape.push_back(sizeOf(axis, call.texts, call.length, call.tokens));
    }
    return shape;
}

// "(3, 20)"
inline std::string inWords(std::vector<int64_t> const& shape)
{
    std::string words;
    for (int64_t const size : shape)
    {
        words += (words.empty() ? "" : ", ") + std::to_string(size);
    }
    return "(" + words + ")";
}

// Empty, or which input is of another type or shape than the first one and the attribute imply, or which weight of another size.
inline std::string check(
    std::vector<Array> const& inputs, std::vector<Said> const& said, std::vector<uint64_t> const& weights, adtp_call const& call)
{
    for (size_t i = 0; i < said.size(); ++i)
    {
        std::string const name = "input " + std::to_string(i);
        if (inputs[i].type != said[i].type)
        {
            return name + " is of type " + (inputs[i].type ? inputs[i].type->name : "another") + "; accepted is " + said[i].type->name;
        }
        if (std::vector<int64_t> const wanted = shapeOf(said[i], call); inputs[i].shape != wanted)
        {
            return name + " is of shape " + inWords(inputs[i].shape) + "; accepted is " + inWords(wanted) + ", as of "
                + std::to_string(call.texts) + " texts and " + std::to_string(call.tokens) + " tokens";
        }
    }
    for (size_t i = 0; i < weights.size(); ++i)
    {
        uint64_t const bytes = inputs[said.size() + i].bytes;
        if (bytes != weights[i])
        {
            return "weight " + std::to_string(i) + " has " + std::to_string(bytes) + " bytes; accepted are " + std::to_string(weights[i]);
        }
    }
    return {};
}

// Empty, or which array of a call has more room than its bucket. Calls that fit no bucket are left to the runner.
inline std::string checkRoom(
    char const* name, std::vector<Array> const& arrays, std::vector<uint64_t> Bucket::*rooms, Plan const& plan, adtp_call const& call)
{
    auto const bucket = std::find_if(
        plan.buckets.begin(), plan.buckets.end(), [&](Bucket const& one) { return fits(one, call.tokens, call.texts); });
    for (size_t i = 0; bucket != plan.buckets.end() && i < ((*bucket).*rooms).size(); ++i)
    {
        uint64_t const bytes = arrays[i].bytes;
        uint64_t const room = ((*bucket).*rooms)[i];
        if (bytes > room)
        {
            return std::string(name) + " " + std::to_string(i) + " has " + std::to_string(bytes) + " bytes; accepted are at most "
                + std::to_string(room);
        }
    }
    return {};
}

} // namespace adtp
