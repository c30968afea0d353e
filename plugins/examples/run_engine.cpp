// Load an engine that has the attention plugin, and run it once.
//
//   g++ -std=c++17 run_engine.cpp -o run_engine -I$TENSORRT_ROOT/include -I$CUDA_HOME/include
//       -L$TENSORRT_ROOT/lib -lnvinfer -L$CUDA_HOME/lib64 -lcudart        (all on one line; TensorRT-RTX: -ltensorrt_rtx)
//   ./run_engine OUT/engines/trt-sm_89-fp32-plugin.engine OUT/plugins/libadtp_plugins.so

#include <NvInferRuntime.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

namespace
{

class Logger final : public nvinfer1::ILogger
{
    void log(Severity severity, char const* message) noexcept override
    {
        if (severity <= Severity::kWARNING)
        {
            std::cerr << message << "\n";
        }
    }
};

void require(bool holds, std::string const& what)
{
    if (!holds)
    {
        std::cerr << what << "\n";
        std::exit(1);
    }
}

void* onDevice(size_t bytes)
{
    void* address = nullptr;
    require(cudaMalloc(&address, bytes) == cudaSuccess, "cudaMalloc failed");
    return address;
}

} // namespace

int main(int argc, char** argv)
{
    require(argc == 3, "usage: run_engine ENGINE LIBRARY");
    Logger logger;

    // Before the engine is loaded: the library brings the plugin that the engine names.
    std::unique_ptr<nvinfer1::IRuntime> runtime(nvinfer1::createInferRuntime(logger));
    require(runtime->getPluginRegistry().loadLibrary(argv[2]) != nullptr, std::string(argv[2]) + " does not load");

    std::ifstream file(argv[1], std::ios::binary);
    std::vector<char> const bytes{std::istreambuf_iterator<char>(file), {}};
    std::unique_ptr<nvinfer1::ICudaEngine> engine(runtime->deserializeCudaEngine(bytes.data(), bytes.size()));
    require(engine != nullptr, std::string(argv[1]) + " does not load");
    std::unique_ptr<nvinfer1::IExecutionContext> context(engine->createExecutionContext());

    // Two sequences of nine tokens: every id 5, nothing masked, all of the first segment.
    nvinfer1::Dims2 const shape{2, 9};
    for (int32_t i = 0; i < engine->getNbIOTensors(); ++i)
    {
        std::string const name = engine->getIOTensorName(i);
        if (engine->getTensorIOMode(name.c_str()) == nvinfer1::TensorIOMode::kINPUT)
        {
            std::vector<int64_t> const values(18, name == "input_ids" ? 5 : name == "attention_mask" ? 1 : 0);
            void* const address = onDevice(values.size() * sizeof(int64_t));
            cudaMemcpy(address, values.data(), values.size() * sizeof(int64_t), cudaMemcpyHostToDevice);
            context->setInputShape(name.c_str(), shape);
            context->setTensorAddress(name.c_str(), address);
        }
    }
    nvinfer1::Dims const answer = context->getTensorShape("logits");
    std::vector<float> logits(static_cast<size_t>(answer.d[0] * answer.d[1]));
    void* const address = onDevice(logits.size() * sizeof(float));
    context->setTensorAddress("logits", address);

    cudaStream_t stream = nullptr;
    cudaStreamCreate(&stream);
    require(context->enqueueV3(stream), "the engine does not run");
    require(cudaStreamSynchronize(stream) == cudaSuccess, "the engine failed on the GPU");
    cudaMemcpy(logits.data(), address, logits.size() * sizeof(float), cudaMemcpyDeviceToHost);
    for (float const value : logits)
    {
        std::cout << value << "\n";
    }
    return 0;
}
