#include "parts.h"

#include "driver.h"
#include "encoder.h"

#include <algorithm>
#include <cstring>

namespace adtp
{
namespace
{

constexpr int64_t kAlignment = 16;

// The bytes of a row. Rows are tokens or texts.
uint64_t rowOf(Array const& array, Said const& said, adtp_call const& call)
{
    return array.bytes / (said.axes.front() == "tokens" ? call.tokens : call.texts);
}

bool isBounds(Said const& said)
{
    return said.axes == std::vector<std::string>{"bounds"} && std::strcmp(said.type->name, "int32") == 0;
}

} // namespace

bool isDivisible(std::vector<Said> const& inputs, std::vector<Said> const& outputs, adtp_call const& call)
{
    auto const hasRows = [](Said const& said) { return !said.axes.empty() && (said.axes[0] == "texts" || said.axes[0] == "tokens"); };
    for (size_t i = 0; i < inputs.size(); ++i)
    {
        if (!hasRows(inputs[i]) && (call.length || i != 1 || !isBounds(inputs[i])))
        {
            return false;
        }
    }
    return std::all_of(outputs.begin(), outputs.end(), hasRows);
}

bool begins(std::vector<Array> const& arrays, std::vector<Said> const& said, adtp_call const& call, int64_t text, int64_t token)
{
    for (size_t i = 0; i < arrays.size(); ++i)
    {
        if (!isBounds(said[i]) && rowOf(arrays[i], said[i], call) * (said[i].axes.front() == "tokens" ? token : text) % kAlignment)
        {
            return false;
        }
    }
    return true;
}

std::vector<Part> divide(std::vector<int64_t> const& starts, Part const& most, std::function<bool(int64_t)> const& isPlace)
{
    std::vector<Part> parts;
    int64_t const texts = static_cast<int64_t>(starts.size()) - 1;
    for (int64_t begin = 0; begin < texts;)
    {
        int64_t end = begin;
        for (int64_t next = begin + 1; next <= std::min(texts, begin + most.texts) && starts[next] - starts[begin] <= most.tokens; ++next)
        {
            end = next == texts || isPlace(next) ? next : end;
        }
        if (end == begin)
        {
            return {};
        }
        parts.push_back({begin, starts[begin], end - begin, starts[end] - starts[begin]});
        begin = end;
    }
    return parts;
}

std::vector<Array> slicesOf(
    std::vector<Array> const& arrays, std::vector<Said> const& said, adtp_call const& call, Part const& part, char* bounds)
{
    std::vector<Array> found = arrays;
    for (size_t i = 0; i < found.size(); ++i)
    {
        if (isBounds(said[i]))
        {
            found[i].data = bounds;
            found[i].bytes = (part.texts + 1) * sizeof(int32_t);
            continue;
        }
        bool const areTokens = said[i].axes.front() == "tokens";
        uint64_t const row = rowOf(arrays[i], said[i], call);
        found[i].data += row * (areTokens ? part.token : part.text);
        found[i].bytes = row * (areTokens ? part.tokens : part.texts);
    }
    return found;
}

std::string readBounds(Array const& bounds, adtp_call const& call, void* stream, std::vector<int64_t>& starts)
{
    if (isCaptured(stream))
    {
        return "got " + std::to_string(call.tokens) + " tokens of " + std::to_string(call.texts)
            + " texts without padding in a stream that is being captured; accepted are calls that need not run in parts, because the host "
              "would read cu_seqlens";
    }
    std::vector<int32_t> read(starts.size());
    Status s = driver().cuStreamSynchronize(stream);
    s = s ? s : driver().cuMemcpyDtoH(read.data(), reinterpret_cast<uint64_t>(bounds.data), read.size() * sizeof(int32_t));
    if (s)
    {
        return failure("cuMemcpyDtoH", s) + " of cu_seqlens";
    }
    if (read.front() || !std::is_sorted(read.begin(), read.end()) || read.back() > call.tokens)
    {
        return "input 1 makes no cu_seqlens; accepted are numbers that begin with 0, never fall, and end with at most "
            + std::to_string(call.tokens);
    }
    std::copy(read.begin(), read.end(), starts.begin());
    return {};
}

Bounds::~Bounds()
{
    if (mMemory)
    {
        driver().cuMemFree(mMemory);
    }
}

std::string Bounds::upload(std::vector<Part> const& parts, std::vector<int64_t> const& starts)
{
    std::vector<int32_t> all;
    for (Part const& part : parts)
    {
        mOffsets.push_back(all.size() * sizeof(int32_t));
        for (int64_t i = part.text; i <= part.text + part.texts; ++i)
        {
            all.push_back(static_cast<int32_t>(starts[i] - part.token));
        }
        all.resize((all.size() + 3) / 4 * 4); // each begins at a multiple of 16 bytes
    }
    Status s = driver().cuMemAlloc(&mMemory, all.size() * sizeof(int32_t));
    s = s ? s : driver().cuMemcpyHtoD(mMemory, all.data(), all.size() * sizeof(int32_t));
    s = s ? s : driver().cuStreamSynchronize(nullptr); // the copy may be on its way yet, which other streams do not wait for
    return s ? failure("cuMemcpyHtoD", s) + " of cu_seqlens of parts" : std::string{};
}

char* Bounds::of(size_t part) const
{
    return mMemory ? reinterpret_cast<char*>(mMemory + mOffsets[part]) : nullptr;
}

} // namespace adtp
