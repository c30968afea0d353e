#include "plan.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <locale>
#include <sstream>
#include <utility>

namespace adtp
{
namespace
{

constexpr char kFirstLine[] = "adtp-plan 1";
constexpr int64_t kMostBytes = int64_t{1} << 48;
constexpr int64_t kMostCount = std::numeric_limits<int32_t>::max();

struct Wrong
{
    std::string what;
};

[[noreturn]] void refuse(std::string const& got, std::string const& accepted)
{
    throw Wrong{"got " + got + "; accepted " + accepted};
}

std::string quoted(std::string const& text)
{
    return "'" + text.substr(0, 80) + "'";
}

int64_t integer(std::string const& text, int64_t least, int64_t most)
{
    int64_t value = 0;
    auto const [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error != std::errc() || end != text.data() + text.size() || value < least || value > most)
    {
        refuse(quoted(text), "are integers from " + std::to_string(least) + " to " + std::to_string(most));
    }
    return value;
}

// In any locale of the process, with a point.
float number(std::string const& text)
{
    std::istringstream stream(text);
    stream.imbue(std::locale::classic());
    double value = 0;
    stream >> value;
    auto const result = static_cast<float>(value);
    if (stream.fail() || !stream.eof() || !std::isfinite(result))
    {
        refuse(quoted(text), "are finite numbers of float32");
    }
    return result;
}

std::vector<std::string> split(std::string const& text, char at)
{
    std::vector<std::string> parts;
    std::istringstream stream(text);
    for (std::string part; std::getline(stream, part, at);)
    {
        if (!part.empty() || at != ' ')
        {
            parts.push_back(part);
        }
    }
    return parts;
}

Argument pointer(std::vector<std::string> const& parts, Source source, std::vector<uint64_t> const& bytes)
{
    bool const isNumbered = source != Source::kWORKSPACE;
    if (parts.size() != (isNumbered ? 3U : 2U))
    {
        refuse(quoted(parts[0]) + " in " + std::to_string(parts.size()) + " parts",
            isNumbered ? "is " + parts[0] + ":INDEX:OFFSET" : "is workspace:OFFSET");
    }
    Argument argument{'p', source, 0, 0};
    if (isNumbered)
    {
        if (bytes.empty())
        {
            refuse(parts[0], "is no argument of this name: the plan has none");
        }
        argument.index = static_cast<size_t>(integer(parts[1], 0, static_cast<int64_t>(bytes.size()) - 1));
    }
    if (bytes[argument.index] == 0)
    {
        refuse(parts[0] + " of 0 bytes", "are places in memory that there is");
    }
    argument.value = static_cast<uint64_t>(integer(parts.back(), 0, static_cast<int64_t>(bytes[argument.index]) - 1));
    return argument;
}

Argument scalar(std::vector<std::string> const& parts, char type)
{
    Argument argument{type, Source::kCONSTANT, 0, 0};
    if (parts.size() != 2)
    {
        refuse(quoted(parts[0]), "is " + parts[0] + ":VALUE");
    }
    if (type == 'f')
    {
        float const value = number(parts[1]);
        std::memcpy(&argument.value, &value, sizeof value);
        return argument;
    }
    static std::pair<char const*, Source> const names[]
        = {{"texts", Source::kTEXTS}, {"length", Source::kLENGTH}, {"tokens", Source::kTOKENS}};
    for (auto const& [name, source] : names)
    {
        if (parts[1] == name)
        {
            argument.source = source;
            return argument;
        }
    }
    int64_t const most = type == 'i' ? kMostCount : std::numeric_limits<int64_t>::max();
    argument.value = static_cast<uint64_t>(integer(parts[1], -most - 1, most));
    return argument;
}

Argument argumentOf(std::string const& text, Plan const& plan, Bucket const& bucket)
{
    std::vector<std::string> const parts = split(text, ':');
    std::string const& kind = parts[0];
    if (text == "null")
    {
        return {'p', Source::kCONSTANT, 0, 0};
    }
    if (kind == "workspace")
    {
        return pointer(parts, Source::kWORKSPACE, {bucket.workspaceBytes});
    }
    if (kind == "weight")
    {
        return pointer(parts, Source::kWEIGHT, plan.weights);
    }
    if (kind == "input")
    {
        return pointer(parts, Source::kINPUT, bucket.inputs);
    }
    if (kind == "output")
    {
        return pointer(parts, Source::kOUTPUT, bucket.outputs);
    }
    if (kind == "i32" || kind == "i64" || kind == "f32")
    {
        return scalar(parts, kind == "f32" ? 'f' : kind == "i64" ? 'l' : 'i');
    }
    refuse("argument " + quoted(text), "begin with workspace, weight, input, output, null, i32, i64 or f32");
}

// "PROGRAMS" or "PROGRAMS+FACTOR*texts"
void readPrograms(std::string const& text, int64_t texts, Launch& launch)
{
    size_t const plus = text.find('+');
    size_t const times = text.find("*texts");
    launch.programs = integer(text.substr(0, plus), 0, kMostCount);
    if (plus != std::string::npos)
    {
        if (times == std::string::npos || times + 6 != text.size() || times < plus)
        {
            refuse("programs " + quoted(text), "are PROGRAMS and PROGRAMS+FACTOR*texts");
        }
        launch.programsPerText = integer(text.substr(plus + 1, times - plus - 1), 1, kMostCount);
    }
    if (launch.programs + launch.programsPerText < 1 || launch.programs + launch.programsPerText * texts > kMostCount)
    {
        refuse("programs " + quoted(text), "are 1 to " + std::to_string(kMostCount) + " programs for every number of texts");
    }
}

void readBucket(std::vector<std::string> const& words, Plan& plan)
{
    if (words.size() != 6 || words[2] != "texts" || words[4] != "workspace")
    {
        refuse("a bucket in " + std::to_string(words.size()) + " words", "is: bucket TOKENS texts TEXTS workspace BYTES");
    }
    int64_t const least = plan.buckets.empty() ? 1 : plan.buckets.back().tokens + 1;
    Bucket bucket{};
    bucket.tokens = integer(words[1], least, kMostCount);
    bucket.texts = integer(words[3], plan.buckets.empty() ? 1 : plan.buckets.back().texts, kMostCount);
    bucket.workspaceBytes = static_cast<uint64_t>(integer(words[5], 0, kMostBytes));
    plan.buckets.push_back(std::move(bucket));
}

void readLine(std::vector<std::string> const& words, std::string const& note, Plan& plan)
{
    if (words[0] == "bucket")
    {
        readBucket(words, plan);
        return;
    }
    bool const isWeight = words[0] == "weight";
    if (!isWeight && words[0] != "input" && words[0] != "output" && words[0] != "launch")
    {
        refuse(quoted(words[0]), "are weight, bucket, input, output and launch");
    }
    if (isWeight != plan.buckets.empty())
    {
        refuse(words[0], "are weights before all buckets, and all else in one");
    }
    if (words[0] != "launch")
    {
        if (words.size() != 2 || (!isWeight && !plan.buckets.back().launches.empty()))
        {
            refuse(words[0] + " in " + std::to_string(words.size()) + " words",
                "is: " + words[0] + " BYTES" + (isWeight ? "" : ", before the bucket's launches"));
        }
        auto const bytes = static_cast<uint64_t>(integer(words[1], 1, kMostBytes));
        (isWeight ? plan.weights : words[0] == "input" ? plan.buckets.back().inputs : plan.buckets.back().outputs)
            .push_back(bytes);
        return;
    }
    if (words.size() < 3)
    {
        refuse("a launch in " + std::to_string(words.size()) + " words", "is: launch VARIANT PROGRAMS ARGUMENT ...");
    }
    Bucket& bucket = plan.buckets.back();
    Launch launch{words[1], note, 0, 0, {}};
    readPrograms(words[2], bucket.texts, launch);
    for (size_t i = 3; i < words.size(); ++i)
    {
        launch.arguments.push_back(argumentOf(words[i], plan, bucket));
    }
    bucket.launches.push_back(std::move(launch));
}

void checkBuckets(Plan const& plan)
{
    if (plan.buckets.empty())
    {
        refuse("no bucket", "is at least one");
    }
    for (Bucket const& bucket : plan.buckets)
    {
        std::string const name = "bucket " + std::to_string(bucket.tokens);
        if (bucket.launches.empty())
        {
            refuse(name + " without a launch", "is at least one");
        }
        Bucket const& first = plan.buckets.front();
        if (bucket.inputs.size() != first.inputs.size() || bucket.outputs.size() != first.outputs.size())
        {
            refuse(name + " with other numbers of inputs and outputs than the first", "are the same for all");
        }
    }
}

} // namespace

std::string parse(char const* text, Plan& plan)
{
    plan = {};
    std::istringstream lines(text);
    std::string line;
    int64_t at = 1;
    try
    {
        if (!std::getline(lines, line) || line != kFirstLine)
        {
            refuse(quoted(line), std::string("is '") + kFirstLine + "': the plan is of another version, or none");
        }
        while (std::getline(lines, line))
        {
            ++at;
            size_t const note = line.find('#');
            std::vector<std::string> const words = split(line.substr(0, note), ' ');
            if (!words.empty())
            {
                size_t const begin = note == std::string::npos ? note : line.find_first_not_of("# ", note);
                readLine(words, begin == std::string::npos ? "" : line.substr(begin), plan);
            }
        }
        checkBuckets(plan);
    }
    catch (Wrong const& wrong)
    {
        return "plan, line " + std::to_string(at) + ": " + wrong.what;
    }
    return {};
}

bool fits(Bucket const& bucket, int64_t tokens, int64_t texts)
{
    return tokens <= bucket.tokens && texts <= bucket.texts;
}

std::string nameOf(Launch const& launch)
{
    return launch.variant + (launch.note.empty() ? "" : " (" + launch.note + ")");
}

std::string match(Launch const& launch, char const* parameters)
{
    std::istringstream words(parameters);
    std::string const name = "the plan launches " + nameOf(launch) + " with ";
    size_t place = 0;
    for (std::string word; words >> word; ++place)
    {
        if (place >= launch.arguments.size())
        {
            return name + std::to_string(place) + " arguments; accepted are " + parameters;
        }
        Argument const& given = launch.arguments[place];
        if (given.type != word[0])
        {
            return name + given.type + " as argument " + std::to_string(place) + "; accepted are " + parameters;
        }
        uint64_t const multiple = std::max(std::strtoull(word.c_str() + 1, nullptr, 10), 1ULL);
        bool const isOfCall = given.source == Source::kTEXTS || given.source == Source::kLENGTH || given.source == Source::kTOKENS;
        if (multiple > 1 && (isOfCall || given.value % multiple))
        {
            return name + (isOfCall ? "a call's number" : std::to_string(given.value)) + " as argument " + std::to_string(place)
                + "; accepted are multiples of " + std::to_string(multiple);
        }
    }
    return place == launch.arguments.size()
        ? ""
        : name + std::to_string(launch.arguments.size()) + " arguments; accepted are " + parameters;
}

} // namespace adtp
