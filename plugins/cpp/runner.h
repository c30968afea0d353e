// Runs a plan of launches as one CUDA graph for each size of a call: a C interface that ctypes takes.
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef _WIN32
#define ADTP_RUNNER_API __declspec(dllexport)
#else
#define ADTP_RUNNER_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C"
{
#endif

// Compiled code of a kernel for one GPU.
typedef struct
{
    int32_t architecture; // 86 for sm_86; 0 for PTX, which newer GPUs than the oldest take
    void const* data; // an ELF file, or PTX with a terminating zero
    size_t bytes;
    uint32_t shared_bytes; // of a program
} adtp_binary;

// A kernel that a plan may launch, under the name of its variant.
typedef struct
{
    char const* variant;
    char const* symbol; // of the function in the compiled code
    char const* arguments; // a word for each: p pointer, i int32, l int64, f float, and what it is a multiple of, such as p16; without
                           // Triton's scratch memory
    uint32_t threads; // of a program
    int32_t oldest_architecture; // that the PTX is for
    int32_t num_binaries;
    adtp_binary const* binaries;
} adtp_kernel;

// What a call brings. Addresses are multiples of 16.
typedef struct
{
    int64_t texts; // B, at least 1
    int64_t length; // S, of padded inputs; 0 where there is none
    int64_t tokens; // rows that may be used, padding included; they choose the bucket
    void const* const* weights;
    void const* const* inputs;
    void* const* outputs;
} adtp_call;

typedef struct adtp_runner adtp_runner;

// Empty, or why no runner can be made for a device: there is no driver, or one too old, or no such device, or one that is older than
// `oldest_architecture`. Of this thread, until its next call.
ADTP_RUNNER_API char const* adtp_runner_obstacle(int32_t device, int32_t oldest_architecture);

// Make a runner for a device's memory in the current context: weights, inputs and outputs of each call lie there. Null where that
// fails. The runner keeps nothing of what it is given.
ADTP_RUNNER_API adtp_runner* adtp_runner_create(char const* plan, adtp_kernel const* kernels, int32_t num_kernels);

// The same for host memory: weights are copied to the device, in its primary context, for good.
ADTP_RUNNER_API adtp_runner* adtp_runner_create_for_host(
    char const* plan, adtp_kernel const* kernels, int32_t num_kernels, void const* const* weights, int32_t device);

// Wait for all calls on the device, and free what the runner has. No other thread may be in a function of this runner.
ADTP_RUNNER_API void adtp_runner_destroy(adtp_runner* runner);

// Enqueue a call on a stream (a CUstream) of the runner's context, and return. 0; 1 for a wrong call; 2 where the driver fails or
// memory is out. One replay; nothing is waited for on the host, and nothing is read back. Threads take turns; calls on several
// streams follow each other. In a stream that is being captured the kernels are launched one by one, and they use the runner's one
// workspace: the caller has to see to it that no replay of the capture is under way at the same time as another one, or as any
// other call of this runner. A runner for captures alone is the simplest way.
ADTP_RUNNER_API int32_t adtp_runner_enqueue(adtp_runner* runner, adtp_call const* call, void* stream);

// Run a call on host memory, of a runner made for it: `weights` of the call are not looked at. Copies `input_bytes` and
// `output_bytes` of each, and returns when the outputs are there. Behind `input_bytes` lies what earlier calls left. 0, 1 or 2.
ADTP_RUNNER_API int32_t adtp_runner_run(
    adtp_runner* runner, adtp_call const* call, uint64_t const* input_bytes, uint64_t const* output_bytes);

// The largest call: of the buckets that the device's memory holds.
ADTP_RUNNER_API void adtp_runner_limits(adtp_runner const* runner, int64_t* tokens, int64_t* texts);

// Empty, or which buckets of the plan the device's memory does not hold.
ADTP_RUNNER_API char const* adtp_runner_warning(adtp_runner const* runner);

// Why the last call of this thread failed.
ADTP_RUNNER_API char const* adtp_runner_error(void);

#ifdef __cplusplus
}
#endif
