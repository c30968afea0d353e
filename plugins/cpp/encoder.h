// The operator AdtpEncoder without its door: its attributes, its runner and its calls.
#pragma once

#include "arrays.h"
#include "plan.h"
#include "runner.h"
#include "signature.h"

#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace adtp
{

struct FreeRunner
{
    void operator()(adtp_runner* runner) const
    {
        adtp_runner_destroy(runner);
    }
};

struct Encoder
{
    std::string plan;
    Plan read; // the plan
    std::vector<Said> inputs; // all but weights
    std::vector<Said> outputs;
    std::mutex mutex;
    std::unique_ptr<adtp_runner, FreeRunner> runner;

    // Read the attributes. Empty, or what is wrong with them.
    std::string parse(std::string const& text, std::string const& saidOfInputs, std::string const& saidOfOutputs);

    // Fill in the sizes of a call by its inputs, which are the plan's and then the weights. Empty, or what is wrong with them.
    std::string describe(std::vector<Array> const& given, adtp_call& call) const;

    // Make the runner if there is none, with the kernels that are built in. Empty, or why there can be none.
    std::string prepare();

    // Enqueue a call, in parts where it is larger than the largest bucket. Of packed calls, the host then reads `cu_seqlens`, and waits
    // for the parts. given: the plan's inputs. Empty, or what went wrong.
    std::string enqueue(adtp_call const& call, std::vector<Array> const& given, std::vector<Array> const& made, void* stream);

private:
    std::string enqueueParts(adtp_call const& call, std::vector<Array> const& given, std::vector<Array> const& made,
        std::vector<int64_t> const& starts, void* stream);
    std::string enqueueOne(adtp_call const& call, std::vector<Array> const& given, std::vector<Array> const& made, void* stream);
};

bool isCaptured(void* stream);

// Of this thread. Making a runner allocates memory and loads code, which no call should wait for, and which the driver forbids
// while any thread captures.
bool hasContext();

} // namespace adtp
