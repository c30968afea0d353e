// Streams of the emulated libcuda.so.1: work is done in order and late, when somebody waits for it.
#include "driver.h"

#include <algorithm>
#include <utility>

using namespace emulator;

namespace
{

// A stream's first thing to do; not yet where it is an event that has not happened.
bool step(Stream& stream)
{
    if (driver().isSpoilt) // nothing is done any more
    {
        stream.work.clear();
        return true;
    }
    if (stream.work.empty()
        || (stream.work.front().what == Work::What::kWait && stream.work.front().event->happened < stream.work.front().record))
    {
        return false;
    }
    Work const work = std::move(stream.work.front());
    stream.work.pop_front();
    std::string const where = ", \"stream\": " + std::to_string(stream.number) + ", \"graph\": " + std::to_string(work.graph);
    std::string failure;
    Counters counters;
    GlobalMemory& memory = driver().memory;
    try
    {
        switch (work.what)
        {
        case Work::What::kKernel:
            readOptions();
            memory.bytesRead = memory.bytesWritten = 0;
            logCall("kernel", where + ", \"symbol\": \"" + work.kernel->name + "\", \"programs\": " + std::to_string(work.launch.programs));
            work.kernel->run(work.launch, memory, counters);
            break;
        case Work::What::kCopy:
            logCall("copy", where + ", \"bytes\": " + std::to_string(work.bytes) + ", \"to\": \"" + (work.isToDevice ? "device" : "host") + "\"");
            copy(work);
            break;
        case Work::What::kRecord: work.event->happened = std::max(work.event->happened, work.record); break;
        case Work::What::kWait: break;
        }
    }
    catch (std::exception const& what)
    {
        failure = driver().lastFault = what.what();
        stream.failure = kLaunchFailed;
        driver().isSpoilt = !options().forgive;
    }
    if (work.what == Work::What::kKernel)
    {
        logLaunch(*work.kernel, work.launch, counters, memory, failure);
    }
    return true;
}

// What failed, told once.
Status told(Stream& stream)
{
    return driver().isSpoilt ? kLaunchFailed : std::exchange(stream.failure, kSuccess);
}

Status addToCapture(Stream& stream, Work work)
{
    if (stream.capturing == kInvalid)
    {
        return kCaptureInvalidated;
    }
    bool const isOutside = work.what == Work::What::kWait && !work.event->isCaptured;
    if (isOutside)
    {
        stream.capturing = kInvalid;
        return kCaptureIsolation;
    }
    if (work.what == Work::What::kWait)
    {
        return kSuccess; // of this stream, as no other joins a capture here
    }
    if (work.what == Work::What::kRecord)
    {
        work.event->isCaptured = true;
        return kSuccess;
    }
    auto node = std::make_unique<Node>();
    node->work = std::move(work);
    auto& nodes = stream.captured->nodes;
    if (!nodes.empty())
    {
        node->after.push_back(nodes.size() - 1);
    }
    nodes.push_back(std::move(node));
    return kSuccess;
}

} // namespace

namespace emulator
{

void stepAll()
{
    for (auto const& [handle, stream] : driver().streams)
    {
        step(*stream);
    }
}

Stream* streamOf(void* handle)
{
    if (!handle)
    {
        return &driver().legacy;
    }
    auto const found = driver().streams.find(static_cast<Stream*>(handle));
    return found == driver().streams.end() ? nullptr : found->second.get();
}

Status find(void* handle, Stream*& stream)
{
    if (Status const status = context())
    {
        return status;
    }
    stream = streamOf(handle);
    return stream ? kSuccess : kInvalidHandle;
}

bool isCapturing(Stream const& stream)
{
    return stream.capturing != kNone;
}

Status allowedByCaptures()
{
    Status status = kSuccess;
    for (auto const& [handle, stream] : driver().streams)
    {
        bool const forbids = stream->mode == 0 || (stream->mode == 1 && stream->thread == std::this_thread::get_id());
        if (isCapturing(*stream) && forbids)
        {
            stream->capturing = kInvalid;
            status = kCaptureUnsupported;
        }
    }
    return status;
}

Status finish(Stream& stream)
{
    while (!stream.work.empty())
    {
        stepAll();
    }
    return told(stream);
}

Status finish(Event const& event, uint64_t record)
{
    while (event.happened < record && !driver().isSpoilt)
    {
        stepAll();
    }
    return driver().isSpoilt ? kLaunchFailed : kSuccess;
}

Status finishLegacy()
{
    Stream& legacy = driver().legacy;
    while (!legacy.work.empty())
    {
        if (!step(legacy)) // it may wait for another stream
        {
            stepAll();
        }
    }
    return told(legacy);
}

Status finishAll()
{
    Status status = finishLegacy();
    for (auto const& [handle, stream] : driver().streams)
    {
        Status const found = finish(*stream);
        status = status ? status : found;
    }
    return status;
}

Status enqueue(Stream* stream, Work work)
{
    if (isCapturing(*stream))
    {
        return addToCapture(*stream, std::move(work));
    }
    if (stream != &driver().legacy)
    {
        if (Status const status = stream->isBlocking ? finishLegacy() : kSuccess)
        {
            return status;
        }
        stream->work.push_back(std::move(work));
        return kSuccess;
    }
    for (auto const& [handle, other] : driver().streams)
    {
        if (other->isBlocking && isCapturing(*other) && other->mode != 2)
        {
            other->capturing = kInvalid;
            return kCaptureImplicit;
        }
    }
    for (auto const& [handle, other] : driver().streams)
    {
        Status const status = other->isBlocking ? finish(*other) : kSuccess;
        if (status)
        {
            return status;
        }
    }
    bool const isLate = work.isLate;
    stream->work.push_back(std::move(work));
    return isLate ? kSuccess : finishLegacy();
}

} // namespace emulator

ADTP_API cuStreamCreate(void** handle, unsigned flags)
{
    constexpr unsigned kNonBlocking = 1;
    if (Status const status = context())
    {
        return status;
    }
    std::lock_guard<std::mutex> const lock(driver().mutex);
    if (flags > kNonBlocking)
    {
        return kInvalidValue;
    }
    auto stream = std::make_unique<Stream>();
    stream->number = ++driver().streamsMade;
    stream->isBlocking = flags != kNonBlocking;
    *handle = stream.get();
    driver().streams[stream.get()] = std::move(stream);
    return kSuccess;
}

ADTP_API cuStreamDestroy_v2(void* handle)
{
    std::lock_guard<std::mutex> const lock(driver().mutex);
    Stream* const stream = handle ? streamOf(handle) : nullptr;
    if (!stream)
    {
        return kInvalidHandle;
    }
    finish(*stream);
    driver().streams.erase(stream);
    return kSuccess;
}

namespace
{

// The stream of a call that a capture of this stream forbids.
Status findFree(void* handle, Stream*& stream)
{
    Status const status = find(handle, stream);
    if (!status && isCapturing(*stream))
    {
        stream->capturing = kInvalid;
        return kCaptureUnsupported;
    }
    return status;
}

} // namespace

ADTP_API cuStreamSynchronize(void* handle)
{
    std::lock_guard<std::mutex> const lock(driver().mutex);
    Stream* stream = nullptr;
    if (Status const status = findFree(handle, stream))
    {
        return status;
    }
    logCall("wait", ", \"call\": \"cuStreamSynchronize\"");
    return stream == &driver().legacy ? finishAll() : finish(*stream);
}

// Asking is what makes things go on.
ADTP_API cuStreamQuery(void* handle)
{
    std::lock_guard<std::mutex> const lock(driver().mutex);
    Stream* stream = nullptr;
    if (Status const status = findFree(handle, stream))
    {
        return status;
    }
    bool const isReady = stream->work.empty();
    stepAll();
    return isReady ? told(*stream) : kNotReady;
}

ADTP_API cuCtxSynchronize()
{
    if (Status const status = context())
    {
        return status;
    }
    std::lock_guard<std::mutex> const lock(driver().mutex);
    if (Status const status = allowedByCaptures())
    {
        return status;
    }
    logCall("wait", ", \"call\": \"cuCtxSynchronize\"");
    return finishAll();
}
