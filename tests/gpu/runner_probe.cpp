// Runs the plan of runner_plans.py in every way that the runner has, and compares with adtp::launch, one launch after the other.
//
//   runner_probe FOLDER
//
// FOLDER has plan.txt, kernels.txt with its binaries, and calls.txt: a name, tokens and texts of each call, beside NAME.qkv and
// NAME.cu. Prints a line for each way: its name, then "ok" or what is wrong.

#include "launch.h"
#include "probe.h"
#include "runner.h"

#include <cstring>
#include <deque>
#include <map>
#include <sstream>
#include <thread>

using namespace probe;

namespace
{

constexpr int kHeads = 2, kHeadSize = 32, kThreads = 8, kRounds = 4;
constexpr float kScale = 0.176776695F;
constexpr size_t kRow = 2 * kHeads * kHeadSize; // bytes of a row of states, in fp16

struct Call
{
    std::string name;
    int64_t tokens = 0, texts = 0;
    std::vector<char> qkv, bounds; // on the host
    uint64_t deviceQkv = 0, deviceBounds = 0;
    std::vector<char> states, received; // what is right
};

struct Table
{
    std::vector<adtp_kernel> kernels;
    std::deque<adtp_binary> binaries;
    std::deque<std::vector<char>> codes;
    std::deque<std::string> texts;
};

char const* kept(Table& table, std::string const& text)
{
    return table.texts.emplace_back(text).c_str();
}

// kernels.txt: the architecture, then two lines for each kernel: VARIANT SYMBOL THREADS SHARED_BYTES, and its arguments
void read(std::string const& folder, Table& table)
{
    std::ifstream file(folder + "kernels.txt");
    std::string variant, symbol, arguments;
    int32_t architecture = 0;
    uint32_t threads = 0, shared = 0;
    file >> architecture;
    while (file >> variant >> symbol >> threads >> shared && std::getline(file >> std::ws, arguments))
    {
        std::vector<char> const& code = table.codes.emplace_back(contentOf(folder + variant));
        adtp_binary const& binary = table.binaries.emplace_back(adtp_binary{architecture, code.data(), code.size(), shared});
        table.kernels.push_back({kept(table, variant), kept(table, symbol), kept(table, arguments), threads, 80, 1, &binary});
    }
}

// Attention, attention on that, and attention with what was received on that.
std::string launchOneByOne(Call& call)
{
    auto const tokens = static_cast<int32_t>(call.tokens), texts = static_cast<int32_t>(call.texts);
    auto const state = [&](int i) { return pointer(call.deviceQkv + static_cast<size_t>(i) * kRow); };
    std::vector<char> const nothing(kRow * static_cast<size_t>(call.tokens), '\xFF');
    uint64_t const first = uploaded(nothing), second = uploaded(nothing), third = uploaded(nothing);
    uint64_t const sums = uploaded(std::vector<char>(4 * static_cast<size_t>(call.tokens), '\xFF'));
    adtp::Call one{state(0), state(1), state(2), pointer(call.deviceBounds), pointer(first), 3 * kHeads * kHeadSize, tokens, texts, kHeads,
        kHeadSize, "fp16", kScale, nullptr};
    std::string error = adtp::launch(one, nullptr);
    one.rowStride = kHeads * kHeadSize;
    for (auto const& [from, to] : {std::pair(first, second), std::pair(second, third)})
    {
        one.q = one.k = one.v = pointer(from);
        one.out = pointer(to);
        one.received = to == third ? static_cast<float*>(pointer(sums)) : nullptr;
        error += adtp::launch(one, nullptr);
    }
    call.states = downloaded(third, nothing.size());
    call.received = downloaded(sums, 4 * static_cast<size_t>(call.tokens));
    for (uint64_t const address : {first, second, third, sums})
    {
        symbol<int(uint64_t)>("cuMemFree_v2")(address);
    }
    return error;
}

std::string difference(Call const& call, std::vector<char> const& states, std::vector<char> const& received)
{
    return states != call.states ? call.name + ": other states" : received != call.received ? call.name + ": other sums" : "";
}

// Memory of a call on the device, and the call.
struct OnDevice
{
    Call const* call;
    uint64_t states, received;
    void const* inputs[2];
    void* outputs[2];
    adtp_call given;

    explicit OnDevice(Call const& one)
        : call(&one)
        , states(uploaded(std::vector<char>(one.states.size(), '\xFF')))
        , received(uploaded(std::vector<char>(one.received.size(), '\xFF')))
        , inputs{pointer(one.deviceQkv), pointer(one.deviceBounds)}
        , outputs{pointer(states), pointer(received)}
        , given{one.texts, 0, one.tokens, nullptr, inputs, outputs}
    {
    }
    OnDevice(OnDevice const&) = delete;
    OnDevice& operator=(OnDevice const&) = delete;
    ~OnDevice()
    {
        symbol<int(uint64_t)>("cuMemFree_v2")(states);
        symbol<int(uint64_t)>("cuMemFree_v2")(received);
    }
    std::string compared() const
    {
        return difference(*call, downloaded(states, call->states.size()), downloaded(received, call->received.size()));
    }
};

struct Stream
{
    void* handle = nullptr;

    Stream()
    {
        checked(symbol<int(void**, unsigned)>("cuStreamCreate")(&handle, 1), "cuStreamCreate");
    }
    ~Stream()
    {
        symbol<int(void*)>("cuStreamDestroy_v2")(handle);
    }
    std::string wait() const
    {
        int const status = symbol<int(void*)>("cuStreamSynchronize")(handle);
        return status ? "cuStreamSynchronize: " + std::to_string(status) : "";
    }
};

std::string enqueued(adtp_runner* runner, OnDevice const& one, void* stream)
{
    return adtp_runner_enqueue(runner, &one.given, stream) ? adtp_runner_error() : "";
}

// Each call by itself, several on two streams before anybody waits, and from the first to the last again.
std::string replayed(adtp_runner* runner, std::deque<Call> const& calls)
{
    std::string error;
    Stream const left, right;
    std::deque<OnDevice> all;
    for (int round = 0; round < 2; ++round)
    {
        for (Call const& call : calls)
        {
            OnDevice const& one = all.emplace_back(call);
            error += enqueued(runner, one, all.size() % 2 ? left.handle : right.handle);
            if (round == 0)
            {
                error += (all.size() % 2 ? left : right).wait();
                error += one.compared();
            }
        }
    }
    error += right.wait();
    error += left.wait();
    for (OnDevice const& one : all)
    {
        error += one.compared();
    }
    return error;
}

std::string captured(adtp_runner* runner, std::deque<Call> const& calls)
{
    std::string error;
    Stream const stream;
    for (Call const& call : calls)
    {
        OnDevice const one(call);
        void *graph = nullptr, *exec = nullptr;
        checked(symbol<int(void*, int)>("cuStreamBeginCapture_v2")(stream.handle, 0), "cuStreamBeginCapture");
        error += enqueued(runner, one, stream.handle);
        if (int const status = symbol<int(void*, void**)>("cuStreamEndCapture")(stream.handle, &graph))
        {
            return error + " cuStreamEndCapture: " + std::to_string(status);
        }
        checked(symbol<int(void**, void*, unsigned long long)>("cuGraphInstantiateWithFlags")(&exec, graph, 0), "cuGraphInstantiate");
        checked(symbol<int(void*, void*)>("cuGraphLaunch")(exec, stream.handle), "cuGraphLaunch");
        error += stream.wait();
        error += one.compared();
        symbol<int(void*)>("cuGraphExecDestroy")(exec);
        symbol<int(void*)>("cuGraphDestroy")(graph);
    }
    return error;
}

std::string ranOnHost(adtp_runner* runner, Call const& call)
{
    std::vector<char> states(call.states.size()), received(call.received.size());
    void const* const inputs[] = {call.qkv.data(), call.bounds.data()};
    void* const outputs[] = {states.data(), received.data()};
    uint64_t const inputBytes[] = {call.qkv.size(), call.bounds.size()}, outputBytes[] = {states.size(), received.size()};
    adtp_call const given{call.texts, 0, call.tokens, nullptr, inputs, outputs};
    return adtp_runner_run(runner, &given, inputBytes, outputBytes) ? adtp_runner_error() : difference(call, states, received);
}

// The same from eight threads, each with its own order of the calls.
template <typename Work>
std::string byThreads(std::deque<Call> const& calls, Work const& work)
{
    std::vector<std::string> errors(kThreads);
    std::vector<std::thread> threads;
    for (size_t i = 0; i < kThreads; ++i)
    {
        threads.emplace_back([&, i] {
            for (size_t round = 0; round < kRounds; ++round)
            {
                errors[i] += work(calls[(i + round * (1 + i % 2)) % calls.size()]);
            }
        });
    }
    std::string all;
    for (size_t i = 0; i < kThreads; ++i)
    {
        threads[i].join();
        all += errors[i];
    }
    return all;
}

void say(char const* way, std::string const& error)
{
    std::printf("%s %s\n", way, error.empty() ? "ok" : error.c_str());
    std::fflush(stdout);
}

} // namespace

int main(int count, char** arguments)
{
    if (count != 2)
    {
        return 2;
    }
    std::string const folder = std::string(arguments[1]) + "/";
    std::vector<char> plan = contentOf(folder + "plan.txt");
    plan.push_back('\0');
    Table table;
    read(folder, table);
    auto const kernels = static_cast<int32_t>(table.kernels.size());
    begin();
    std::deque<Call> calls;
    std::ifstream file(folder + "calls.txt");
    for (Call call; file >> call.name >> call.tokens >> call.texts;)
    {
        call.qkv = contentOf(folder + call.name + ".qkv");
        call.bounds = contentOf(folder + call.name + ".cu");
        call.deviceQkv = uploaded(call.qkv);
        call.deviceBounds = uploaded(call.bounds);
        if (std::string const error = launchOneByOne(call); !error.empty())
        {
            say("launch", error);
            return 1;
        }
        calls.push_back(call);
    }

    adtp_runner* runner = adtp_runner_create(plan.data(), table.kernels.data(), kernels);
    say("create", runner ? adtp_runner_warning(runner) : adtp_runner_error());
    if (runner)
    {
        say("replays", replayed(runner, calls));
        say("captures", captured(runner, calls));
        say("threads", byThreads(calls, [=](Call const& call) {
            begin();
            Stream const stream;
            OnDevice const one(call), other(call);
            std::string error = enqueued(runner, one, stream.handle);
            error += enqueued(runner, other, stream.handle);
            error += stream.wait();
            error += one.compared();
            error += other.compared();
            return error;
        }));
        adtp_runner_destroy(runner);
    }
    adtp_runner* const onHost = adtp_runner_create_for_host(plan.data(), table.kernels.data(), kernels, nullptr, 0);
    say("create-for-host", onHost ? adtp_runner_warning(onHost) : adtp_runner_error());
    if (onHost)
    {
        say("host", byThreads(calls, [=](Call const& call) { return ranOnHost(onHost, call); }));
        adtp_runner_destroy(onHost);
    }
    return 0;
}
