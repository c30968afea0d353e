// A plan: what is launched for each size of a call. plugins/plan.py writes it, and says what its lines are.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace adtp
{

// Where an argument's value comes from: places in memory, a constant, or what a call says of itself.
enum class Source
{
    kWORKSPACE,
    kWEIGHT,
    kINPUT,
    kOUTPUT,
    kCONSTANT,
    kTEXTS,
    kLENGTH,
    kTOKENS,
};

struct Argument
{
    char type; // 'p' pointer, 'i' int32, 'l' int64, 'f' float
    Source source;
    size_t index; // of a weight, an input or an output
    uint64_t value; // bytes from its begin, or a constant's bits
};

struct Launch
{
    std::string variant;
    std::string note; // for messages
    int64_t programs;
    int64_t programsPerText; // on top
    std::vector<Argument> arguments;
};

struct Bucket
{
    int64_t tokens; // at most, in at most so many texts
    int64_t texts;
    uint64_t workspaceBytes;
    std::vector<uint64_t> inputs; // bytes of each, at most
    std::vector<uint64_t> outputs;
    std::vector<Launch> launches;
};

struct Plan
{
    std::vector<uint64_t> weights; // bytes of each
    std::vector<Bucket> buckets; // smaller ones first
};

// Empty, or what is wrong in which line and what is accepted.
std::string parse(char const* text, Plan& plan);

// Whether a launch gives a kernel what it takes, by the words of runner.h. Empty, or which argument is wrong.
std::string match(Launch const& launch, char const* parameters);

// Whether a call of so many tokens and texts may be run in a bucket.
bool fits(Bucket const& bucket, int64_t tokens, int64_t texts);

// "fp16-d64-64x32 (layer 0, attention)"
std::string nameOf(Launch const& launch);

} // namespace adtp
