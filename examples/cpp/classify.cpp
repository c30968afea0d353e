// Answers texts with ONNX Runtime alone: no tokenizer library, no Python.
//
//   classify MODEL EXTENSIONS "a text" "another"
//
// MODEL is model.strings.onnx of: adtp-export MODEL_DIR --with-tokenizer
// EXTENSIONS is the library of onnxruntime-extensions, such as libortextensions.so, which has the tokenizer's operators.
// ADTP_LIBRARY, in the environment, may name the library of compiled attention operators: what `adtp-plugin path` prints.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <numeric>
#include <string>
#include <vector>

#include <onnxruntime_cxx_api.h>

// Turns one row of logits into probabilities.
static std::vector<double> softmax(float const* logits, int64_t count)
{
    double largest = logits[0];
    for (int64_t i = 1; i < count; ++i)
    {
        largest = std::fmax(largest, logits[i]);
    }
    std::vector<double> powers;
    for (int64_t i = 0; i < count; ++i)
    {
        powers.push_back(std::exp(logits[i] - largest));
    }
    double const sum = std::accumulate(powers.begin(), powers.end(), 0.0);
    for (double& power : powers)
    {
        power /= sum;
    }
    return powers;
}

int main(int argc, char** argv)
try
{
    if (argc < 4)
    {
        std::fprintf(stderr, "type: classify MODEL EXTENSIONS \"a text\" \"another\"\n");
        return 2;
    }
    Ort::Env env(ORT_LOGGING_LEVEL_ERROR, "classify");
    Ort::SessionOptions options;
    options.RegisterCustomOpsLibrary(argv[2]);
    if (char const* const attention = std::getenv("ADTP_LIBRARY"); attention && *attention)
    {
        options.RegisterCustomOpsLibrary(attention); // of adtp-plugin path
    }
    Ort::Session session(env, argv[1], options);

    std::vector<char const*> texts(argv + 3, argv + argc); // UTF-8
    int64_t const shape[] = {static_cast<int64_t>(texts.size())};
    Ort::AllocatorWithDefaultOptions allocator;
    Ort::Value input = Ort::Value::CreateTensor(allocator, shape, 1, ONNX_TENSOR_ELEMENT_DATA_TYPE_STRING);
    input.FillStringTensor(texts.data(), texts.size());

    char const* const inputs[] = {"text"};
    char const* const outputs[] = {"logits"};
    std::vector<Ort::Value> found = session.Run(Ort::RunOptions{nullptr}, inputs, &input, 1, outputs, 1);
    int64_t const labels = found[0].GetTensorTypeAndShapeInfo().GetShape()[1]; // of (texts, labels)
    float const* logits = found[0].GetTensorData<float>();
    for (size_t i = 0; i < texts.size(); ++i)
    {
        for (double probability : softmax(logits + i * labels, labels))
        {
            std::printf("%.9f ", probability);
        }
        std::printf("%s\n", texts[i]);
    }
    return 0;
}
catch (std::exception const& error)
{
    std::fprintf(stderr, "classify: %s\n", error.what());
    return 1;
}
