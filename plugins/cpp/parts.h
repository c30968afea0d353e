// Parts of a call that is larger than the largest bucket: whole texts, one part behind the other.
#pragma once

#include "arrays.h"

#include <functional>
#include <string>
#include <vector>

namespace adtp
{

struct Part
{
    int64_t text; // the first one
    int64_t token; // where it begins
    int64_t texts;
    int64_t tokens;
};

// Whether arrays have a row for each text or each token. The only others are the `cu_seqlens` of packed calls.
bool isDivisible(std::vector<Said> const& inputs, std::vector<Said> const& outputs, adtp_call const& call);

// Whether rows of a text and its tokens begin at multiples of 16 bytes.
bool begins(std::vector<Array> const& arrays, std::vector<Said> const& said, adtp_call const& call, int64_t text, int64_t token);

// Parts as large as may be, which begin where they can. Empty where there are none. starts: where texts begin, and where the last ends.
std::vector<Part> divide(std::vector<int64_t> const& starts, Part const& most, std::function<bool(int64_t)> const& isPlace);

// What a part has of each array. bounds: its own `cu_seqlens`.
std::vector<Array> slicesOf(
    std::vector<Array> const& arrays, std::vector<Said> const& said, adtp_call const& call, Part const& part, char* bounds);

// Read `cu_seqlens` from the device, once the stream has made them. Empty, or what went wrong.
std::string readBounds(Array const& bounds, adtp_call const& call, void* stream, std::vector<int64_t>& starts);

// `cu_seqlens` of parts on the device.
class Bounds
{
public:
    Bounds() = default;
    Bounds(Bounds const&) = delete;
    Bounds& operator=(Bounds const&) = delete;
    ~Bounds();

    std::string upload(std::vector<Part> const& parts, std::vector<int64_t> const& starts);

    // Those of a part; null where nothing was uploaded.
    char* of(size_t part) const;

private:
    uint64_t mMemory = 0;
    std::vector<uint64_t> mOffsets;
};

} // namespace adtp
