// What the files of the emulated driver share. Statuses and attributes have their numbers of cuda.h (CUresult,
// CUdevice_attribute, CUfunction_attribute).
#pragma once

#include "program.h"

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
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
    kLaunchOutOfResources = 701,
    kLaunchFailed = 719,
    kNotSupported = 801,
    kCaptureUnsupported = 900,
};

// An image that cuLibraryLoadData took, with the kernels asked of it.
struct Library
{
    std::string image; // PTX up to its zero, or a whole ELF file
    bool isPtx;
    std::map<std::string, std::unique_ptr<Kernel>> kernels;
};

// The one device and its one context.
struct Driver
{
    std::mutex mutex;
    bool isInitialized = false;
    bool isSpoilt = false; // a kernel has faulted: as on a GPU, nothing works in the context any more
    std::string lastFault;
    GlobalMemory memory;
    std::map<void*, std::unique_ptr<Library>> libraries;
    std::map<Kernel*, Library*> kernels; // those that were handed out
    std::set<Kernel*> inContext; // those that were loaded into the context: libraries are lazy
};

Driver& driver();

// kSuccess where this thread has a context that still works.
Status context();

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

// Appends a line for a launch to $ADTP_EMULATOR_LOG, a file of JSON lines.
void logLaunch(
    Kernel const& kernel, Launch const& launch, Counters const& counters, GlobalMemory const& memory, std::string const& failure);

} // namespace emulator
