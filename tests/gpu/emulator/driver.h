// What the files of the emulated driver share. Statuses and attributes have their numbers of cuda.h (CUresult,
// CUdevice_attribute, CUfunction_attribute).
#pragma once

#include "program.h"

#include <atomic>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#define ADTP_API extern "C" __attribute__((visibility("default"))) int

namespace emulator
{

enum Status : int
{
    kSuccess = 0,
    kInvalidValue = 1,
    kOutOfMemory = 2,
    kNotInitialized = 3,
    kInvalidDevice = 101,
    kInvalidImage = 200,
    kInvalidContext = 201,
    kNoBinaryForGpu = 209,
    kInvalidPtx = 218,
    kUnsupportedPtxVersion = 222,
    kInvalidHandle = 400,
    kNotFound = 500,
    kNotReady = 600,
    kLaunchOutOfResources = 701,
    kContextDestroyed = 709,
    kLaunchFailed = 719,
    kNotSupported = 801,
    kCaptureUnsupported = 900,
    kCaptureInvalidated = 901,
    kCaptureWrongThread = 908,
    kCaptureIsolation = 905,
    kCaptureImplicit = 906,
};

// An image that cuLibraryLoadData took, with the kernels asked of it.
struct Library
{
    std::string image; // PTX up to its zero, or a whole ELF file
    bool isPtx;
    std::map<std::string, std::unique_ptr<Kernel>> kernels;
};

struct Event
{
    uint64_t recorded = 0; // times that a host asked for it
    uint64_t happened = 0; // the last of these that a stream has come to
    bool isCaptured = false;
};

// One thing that a stream does, or a node of a graph.
struct Work
{
    enum class What
    {
        kKernel,
        kCopy,
        kRecord,
        kWait,
    };
    What what = What::kKernel;
    Kernel* kernel = nullptr;
    Launch launch{};
    uint64_t to = 0, from = 0, bytes = 0; // of a copy
    bool isToDevice = false;
    std::vector<uint8_t> staged; // what is copied, where the host need not keep it
    bool isLate = false; // the legacy stream may do it later
    std::shared_ptr<Event> event;
    uint64_t record = 0; // which of the event's
    uint64_t graph = 0; // the launch of a graph that this belongs to; 0: none
};

struct Node
{
    Work work;
    std::vector<size_t> after; // places of nodes in the same graph
};

struct Graph
{
    std::vector<std::unique_ptr<Node>> nodes;
};

struct Exec
{
    std::vector<Node> nodes;
    std::map<Node*, size_t> places; // of the nodes that it was made of
    std::shared_ptr<Event> launched = std::make_shared<Event>(); // launches of one graph follow each other
};

enum Capturing : int
{
    kNone = 0,
    kActive = 1,
    kInvalid = 2,
};

struct Stream
{
    uint64_t number = 0; // in logs
    bool isBlocking = true; // waits for the legacy stream, and that for it
    std::deque<Work> work; // nothing is done before somebody waits
    Status failure = kSuccess; // of work that was forgiven; told once
    Capturing capturing = kNone;
    int mode = 0; // of the capture: 0 global, 1 of its thread, 2 relaxed
    std::thread::id thread; // that began it
    std::unique_ptr<Graph> captured;
};

// The one device and its primary context.
struct Driver
{
    std::mutex mutex;
    std::atomic<bool> isInitialized{false};
    std::atomic<bool> isSpoilt{false}; // a kernel has faulted: as on a GPU, nothing works in the context any more
    std::atomic<void*> primary{nullptr}; // the context; another one after all have released it
    int retained = 0;
    std::string lastFault;
    GlobalMemory memory;
    uint64_t bytesAllocated = 0; // on the device
    std::map<uint64_t, uint64_t> pinned; // bytes of host memory that the driver gave, by address
    std::set<uint64_t> registered; // addresses of mapped host memory that the host gave
    std::map<void*, std::unique_ptr<Library>> libraries;
    std::map<Kernel*, Library*> kernels; // those that were handed out
    std::set<Kernel*> inContext; // those that were loaded into the context: libraries are lazy
    Stream legacy; // stream 0: does at once what it is asked, but for late uploads
    std::map<Stream*, std::unique_ptr<Stream>> streams;
    std::map<Event*, std::shared_ptr<Event>> events;
    std::map<Graph*, std::unique_ptr<Graph>> graphs;
    std::map<Exec*, std::unique_ptr<Exec>> execs;
    uint64_t streamsMade = 0, graphsLaunched = 0;
};

Driver& driver();

// kSuccess where this thread has a context that still works.
Status context();

// The functions below expect that the caller holds the mutex.

// Give a stream its work, or add it to what the stream captures. The legacy stream does it at once, after all that blocking streams
// have to do; others when somebody waits.
Status enqueue(Stream* stream, Work work);

// Do the work of all streams in turns, one thing of each, until this one has none left, or until an event has happened. So streams
// that do not wait for each other get into each other's way. The status of what failed.
Status finish(Stream& stream);
Status finish(Event const& event, uint64_t record);
Status finishLegacy(); // late uploads
Status finishAll();

// One thing of each stream that has one to do.
void stepAll();

// The legacy stream for a null pointer; null for what is no stream. And the stream of a call, where it may be made.
Stream* streamOf(void* handle);
Status find(void* handle, Stream*& stream);

// kSuccess where a call may be made that a capture forbids: of any stream in global mode, of this thread in its mode. Otherwise
// the capture is lost.
Status allowedByCaptures();
bool isCapturing(Stream const& stream);

// Work of a launch, checked; its parameters are copied.
Status kernelWork(Work& work, Kernel* kernel, uint32_t programs, uint32_t threads, uint32_t sharedBytes, void** parameters,
    bool inCapture);

// $ADTP_EMULATOR_MEMORY: bytes of the device; no limit unless told. False where so many more do not fit.
bool takeMemory(uint64_t bytes);
constexpr uint64_t kGraphBytes = 64 * 1024; // that a graph takes once it is instantiated

// Work of a copy in a graph, from CUDA_MEMCPY3D. And a copy itself; throws Fault.
Status copyNodeWork(Work& work, void const* parameters);
void copy(Work const& work);

// $ADTP_EMULATOR_REFUSE, such as "cuEventRecord=1": what a function answers in place of doing anything; else kSuccess.
Status refusal(std::string const& function);

// $ADTP_EMULATOR_SM, such as 86 or 120; 86 unless told.
int capability();

// CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
int sharedBytesOptIn(); // of a block, with the attribute
constexpr int kSharedBytesAlways = 48 * 1024;
constexpr int kMostThreads = 1024; // of a block
constexpr uint32_t kRegisters = 64 * 1024; // of a block

// Version of the oldest driver that knows the GPU, as documented for the plugin: R525 (CUDA 12.0), for sm_100 on R570 (12.8).
int driverVersion(); // 1000 major + 10 minor
int newestPtx(); // 10 major + minor

// Appends a line to $ADTP_EMULATOR_CALLS, a file of JSON lines: what the device did, in this order, and where the host waited.
// "did" is "kernel", "copy", "graph" (its launch, before its nodes), "parameters" (of a node were set), "wait", "allocate" or
// "upload" (of a graph).
void logCall(std::string const& did, std::string const& fields);

// Appends a line for a launch to $ADTP_EMULATOR_LOG, a file of JSON lines.
void logLaunch(
    Kernel const& kernel, Launch const& launch, Counters const& counters, GlobalMemory const& memory, std::string const& failure);

} // namespace emulator
