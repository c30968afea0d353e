// Events of the emulated libcuda.so.1.
#include "driver.h"

using namespace emulator;

namespace
{

std::shared_ptr<Event> eventOf(Event* handle)
{
    auto const found = driver().events.find(handle);
    return found == driver().events.end() ? nullptr : found->second;
}

} // namespace

ADTP_API cuEventCreate(Event** handle, unsigned flags)
{
    if (Status const status = context())
    {
        return status;
    }
    std::lock_guard<std::mutex> const lock(driver().mutex);
    auto const event = std::make_shared<Event>();
    *handle = event.get();
    driver().events[event.get()] = event;
    return flags > 7 ? kInvalidValue : kSuccess;
}

ADTP_API cuEventDestroy_v2(Event* handle)
{
    std::lock_guard<std::mutex> const lock(driver().mutex);
    return driver().events.erase(handle) ? kSuccess : kInvalidHandle;
}

ADTP_API cuEventRecord(Event* handle, void* streamHandle)
{
    if (Status const status = refusal("cuEventRecord"))
    {
        return status;
    }
    std::lock_guard<std::mutex> const lock(driver().mutex);
    Stream* stream = nullptr;
    Status const status = find(streamHandle, stream);
    Work work;
    work.what = Work::What::kRecord;
    work.event = eventOf(handle);
    if (status || !work.event)
    {
        return status ? status : kInvalidHandle;
    }
    if (!isCapturing(*stream))
    {
        work.event->isCaptured = false;
        work.record = ++work.event->recorded;
    }
    return enqueue(stream, std::move(work));
}

ADTP_API cuStreamWaitEvent(void* streamHandle, Event* handle, unsigned flags)
{
    std::lock_guard<std::mutex> const lock(driver().mutex);
    Stream* stream = nullptr;
    Status const status = find(streamHandle, stream);
    Work work;
    work.what = Work::What::kWait;
    work.event = eventOf(handle);
    if (status || !work.event || flags)
    {
        return status ? status : work.event ? kInvalidValue : kInvalidHandle;
    }
    if (work.event->isCaptured && !isCapturing(*stream))
    {
        return kNotSupported; // the stream would join the capture
    }
    work.record = work.event->recorded;
    return enqueue(stream, std::move(work));
}

namespace
{

Status findRecorded(Event* handle, std::shared_ptr<Event>& event)
{
    if (Status const status = context())
    {
        return status;
    }
    event = eventOf(handle);
    return !event ? kInvalidHandle : event->isCaptured ? kCaptureUnsupported : allowedByCaptures();
}

} // namespace

ADTP_API cuEventSynchronize(Event* handle)
{
    std::lock_guard<std::mutex> const lock(driver().mutex);
    std::shared_ptr<Event> event;
    if (Status const status = findRecorded(handle, event))
    {
        return status;
    }
    logCall("wait", ", \"call\": \"cuEventSynchronize\"");
    return finish(*event, event->recorded);
}

ADTP_API cuEventQuery(Event* handle)
{
    std::lock_guard<std::mutex> const lock(driver().mutex);
    std::shared_ptr<Event> event;
    if (Status const status = findRecorded(handle, event))
    {
        return status;
    }
    bool const isReady = event->happened == event->recorded;
    stepAll();
    return driver().isSpoilt ? kLaunchFailed : isReady ? kSuccess : kNotReady;
}
