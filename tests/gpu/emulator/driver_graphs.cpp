// Graphs of the emulated libcuda.so.1, built node by node or by capture.
#include "driver.h"

#include <algorithm>
#include <utility>

using namespace emulator;

namespace
{

// CUDA_KERNEL_NODE_PARAMS_v2 of cuda.h.
struct KernelNode
{
    Kernel* function;
    unsigned gridX, gridY, gridZ, blockX, blockY, blockZ, sharedBytes;
    void** parameters;
    void** extra;
    Kernel* kernel; // in place of the function
    void* context;
};

// Why a call is not made at all.
Status refused(char const* function)
{
    Status const status = context();
    return status ? status : refusal(function);
}

Status workOf(KernelNode const& node, Work& work)
{
    bool const hasOneDimension = node.gridY == 1 && node.gridZ == 1 && node.blockY == 1 && node.blockZ == 1 && !node.extra;
    if (!hasOneDimension || !node.parameters)
    {
        return kNotSupported;
    }
    if (node.context && node.context != driver().primary)
    {
        return kInvalidContext;
    }
    Kernel* const kernel = node.function ? node.function : node.kernel;
    return kernelWork(work, kernel, node.gridX, node.blockX, node.sharedBytes, node.parameters, false);
}

// Add a node to a graph, after others of the same.
Status add(Node** handle, Graph* graph, Node* const* after, size_t count, Work work)
{
    auto node = std::make_unique<Node>();
    node->work = std::move(work);
    for (size_t i = 0; i < count; ++i)
    {
        auto const found = std::find_if(
            graph->nodes.begin(), graph->nodes.end(), [&](std::unique_ptr<Node> const& one) { return one.get() == after[i]; });
        if (found == graph->nodes.end())
        {
            return kInvalidValue;
        }
        node->after.push_back(static_cast<size_t>(found - graph->nodes.begin()));
    }
    *handle = node.get();
    graph->nodes.push_back(std::move(node));
    return kSuccess;
}

// A graph's work in an order that its edges allow: of what could come next, what was added last.
std::vector<Work> ordered(std::vector<Node> const& nodes)
{
    std::vector<bool> isDone(nodes.size());
    std::vector<Work> order;
    while (order.size() < nodes.size())
    {
        size_t next = nodes.size() - 1;
        auto const isReady = [&](size_t i) {
            return !isDone[i] && std::all_of(nodes[i].after.begin(), nodes[i].after.end(), [&](size_t before) { return isDone[before]; });
        };
        while (!isReady(next))
        {
            --next;
        }
        isDone[next] = true;
        order.push_back(nodes[next].work);
    }
    return order;
}

bool nodesLive(Exec const& exec, Node* node)
{
    return exec.places.count(node)
        && std::any_of(driver().graphs.begin(), driver().graphs.end(), [&](auto const& graph) {
               auto const& nodes = graph.second->nodes;
               return std::any_of(nodes.begin(), nodes.end(), [&](auto const& one) { return one.get() == node; });
           });
}

} // namespace

ADTP_API cuGraphCreate(Graph** handle, unsigned flags)
{
    if (Status const status = refused("cuGraphCreate"))
    {
        return status;
    }
    std::lock_guard<std::mutex> const lock(driver().mutex);
    auto graph = std::make_unique<Graph>();
    *handle = graph.get();
    driver().graphs[graph.get()] = std::move(graph);
    return flags ? kInvalidValue : kSuccess;
}

ADTP_API cuGraphDestroy(Graph* handle)
{
    std::lock_guard<std::mutex> const lock(driver().mutex);
    return driver().graphs.erase(handle) ? kSuccess : kInvalidHandle;
}

ADTP_API cuGraphAddKernelNode_v2(
    Node** handle, Graph* graph, Node* const* after, size_t count, KernelNode const* parameters)
{
    if (Status const status = refused("cuGraphAddKernelNode"))
    {
        return status;
    }
    std::lock_guard<std::mutex> const lock(driver().mutex);
    if (!driver().graphs.count(graph))
    {
        return kInvalidHandle;
    }
    Work work;
    Status const status = workOf(*parameters, work);
    return status ? status : add(handle, graph, after, count, std::move(work));
}

ADTP_API cuGraphAddMemcpyNode(
    Node** handle, Graph* graph, Node* const* after, size_t count, void const* parameters, void* where)
{
    if (Status const status = refused("cuGraphAddMemcpyNode"))
    {
        return status;
    }
    std::lock_guard<std::mutex> const lock(driver().mutex);
    if (!driver().graphs.count(graph))
    {
        return kInvalidHandle;
    }
    if (where != driver().primary)
    {
        return kInvalidContext;
    }
    Work work;
    Status const status = copyNodeWork(work, parameters);
    return status ? status : add(handle, graph, after, count, std::move(work));
}

ADTP_API cuGraphInstantiateWithFlags(Exec** handle, Graph* graph, unsigned long long flags)
{
    if (Status const status = context())
    {
        return status;
    }
    std::lock_guard<std::mutex> const lock(driver().mutex);
    if (!driver().graphs.count(graph))
    {
        return kInvalidHandle;
    }
    if (flags)
    {
        return kNotSupported;
    }
    if (!takeMemory(kGraphBytes))
    {
        return kOutOfMemory;
    }
    auto exec = std::make_unique<Exec>();
    for (auto const& node : graph->nodes)
    {
        exec->places[node.get()] = exec->nodes.size();
        exec->nodes.push_back(*node);
    }
    *handle = exec.get();
    driver().execs[exec.get()] = std::move(exec);
    return kSuccess;
}

ADTP_API cuGraphExecDestroy(Exec* handle)
{
    std::lock_guard<std::mutex> const lock(driver().mutex);
    if (!driver().execs.erase(handle))
    {
        return kInvalidHandle;
    }
    driver().bytesAllocated -= kGraphBytes;
    return kSuccess;
}

// Of launches to come; what was launched keeps its own. The node is named as in the graph, which must still be there.
ADTP_API cuGraphExecKernelNodeSetParams_v2(Exec* exec, Node* node, KernelNode const* parameters)
{
    if (Status const status = context())
    {
        return status;
    }
    std::lock_guard<std::mutex> const lock(driver().mutex);
    if (!driver().execs.count(exec))
    {
        return kInvalidHandle;
    }
    if (!nodesLive(*exec, node) || exec->nodes[exec->places.at(node)].work.what != Work::What::kKernel)
    {
        return kInvalidValue;
    }
    Work work;
    if (Status const status = workOf(*parameters, work))
    {
        return status;
    }
    exec->nodes[exec->places.at(node)].work = std::move(work);
    logCall("parameters", "");
    return kSuccess;
}

ADTP_API cuGraphUpload(Exec* exec, void* stream)
{
    if (Status const status = refused("cuGraphUpload"))
    {
        return status;
    }
    std::lock_guard<std::mutex> const lock(driver().mutex);
    logCall("upload", "");
    return driver().execs.count(exec) && streamOf(stream) ? kSuccess : kInvalidHandle;
}

ADTP_API cuGraphLaunch(Exec* exec, void* handle)
{
    if (Status const status = context())
    {
        return status;
    }
    std::lock_guard<std::mutex> const lock(driver().mutex);
    Stream* const stream = streamOf(handle);
    if (!stream || !driver().execs.count(exec))
    {
        return kInvalidHandle;
    }
    if (isCapturing(*stream))
    {
        stream->capturing = kInvalid;
        return kCaptureUnsupported;
    }
    uint64_t const number = ++driver().graphsLaunched;
    logCall("graph", ", \"stream\": " + std::to_string(stream->number) + ", \"graph\": " + std::to_string(number)
            + ", \"nodes\": " + std::to_string(exec->nodes.size()));
    std::vector<Work> all = ordered(exec->nodes);
    Work before, after;
    before.what = Work::What::kWait;
    after.what = Work::What::kRecord;
    before.event = after.event = exec->launched;
    before.record = exec->launched->recorded;
    after.record = ++exec->launched->recorded;
    all.insert(all.begin(), before);
    all.push_back(after);
    for (Work& work : all)
    {
        work.graph = number;
        if (Status const status = enqueue(stream, std::move(work)))
        {
            return status;
        }
    }
    return kSuccess;
}

ADTP_API cuStreamBeginCapture_v2(void* handle, int mode)
{
    if (Status const status = context())
    {
        return status;
    }
    std::lock_guard<std::mutex> const lock(driver().mutex);
    Stream* const stream = streamOf(handle);
    if (!stream)
    {
        return kInvalidHandle;
    }
    if (stream == &driver().legacy || isCapturing(*stream))
    {
        return stream == &driver().legacy ? kCaptureUnsupported : kInvalidValue;
    }
    stream->capturing = kActive;
    stream->mode = mode;
    stream->thread = std::this_thread::get_id();
    stream->captured = std::make_unique<Graph>();
    return kSuccess;
}

ADTP_API cuStreamEndCapture(void* handle, Graph** graph)
{
    std::lock_guard<std::mutex> const lock(driver().mutex);
    Stream* const stream = streamOf(handle);
    if (!stream || !isCapturing(*stream))
    {
        return stream ? kInvalidValue : kInvalidHandle;
    }
    if (stream->mode != 2 && stream->thread != std::this_thread::get_id())
    {
        return kCaptureWrongThread;
    }
    auto captured = std::move(stream->captured);
    bool const isWhole = std::exchange(stream->capturing, kNone) == kActive;
    *graph = isWhole ? captured.get() : nullptr;
    if (!isWhole)
    {
        return kCaptureInvalidated;
    }
    driver().graphs[captured.get()] = std::move(captured);
    return kSuccess;
}

ADTP_API cuStreamIsCapturing(void* handle, int* capturing)
{
    if (Status const status = context())
    {
        return status;
    }
    std::lock_guard<std::mutex> const lock(driver().mutex);
    Stream* const stream = streamOf(handle);
    if (!stream)
    {
        return kInvalidHandle;
    }
    *capturing = stream->capturing;
    bool const isMixed = stream == &driver().legacy
        && std::any_of(driver().streams.begin(), driver().streams.end(),
            [](auto const& other) { return other.second->isBlocking && isCapturing(*other.second); });
    return isMixed ? kCaptureImplicit : kSuccess;
}
