// Answers texts with ONNX Runtime alone: dotnet run -- MODEL "a text" "another"
//
// MODEL is model.strings.onnx of: adtp-export MODEL_DIR --with-tokenizer
// ADTP_LIBRARY, in the environment, may name the library of compiled attention operators: what adtp-plugin path prints.
using System;
using System.Collections.Generic;
using System.Globalization;
using System.Linq;
using Microsoft.ML.OnnxRuntime;

if (args.Length < 2)
{
    Console.Error.WriteLine("type: dotnet run -- MODEL \"a text\" \"another\"");
    return 2;
}
string[] texts = args[1..];

using var options = new SessionOptions();
options.RegisterOrtExtensions(); // the tokenizer's operators
if (Environment.GetEnvironmentVariable("ADTP_LIBRARY") is { Length: > 0 } attention)
{
    options.RegisterCustomOpLibrary(attention); // of adtp-plugin path
}
using var session = new InferenceSession(args[0], options);

using var input = OrtValue.CreateTensorWithEmptyStrings(OrtAllocator.DefaultInstance, new long[] { texts.Length });
for (int i = 0; i < texts.Length; ++i)
{
    input.StringTensorSetElementAt(texts[i].AsSpan(), i);
}

using var runOptions = new RunOptions();
var inputs = new Dictionary<string, OrtValue> { ["text"] = input };
using var found = session.Run(runOptions, inputs, new[] { "logits" });
float[] logits = found[0].GetTensorDataAsSpan<float>().ToArray();
int labels = (int)found[0].GetTensorTypeAndShape().Shape[1]; // of (texts, labels)

for (int i = 0; i < texts.Length; ++i)
{
    IEnumerable<string> probabilities = Softmax(logits[(i * labels)..((i + 1) * labels)])
        .Select(p => p.ToString("F9", CultureInfo.InvariantCulture));
    Console.WriteLine($"{string.Join(" ", probabilities)} {texts[i]}");
}
return 0;

static double[] Softmax(float[] logits)
{
    double largest = logits.Max();
    double[] powers = logits.Select(logit => Math.Exp(logit - largest)).ToArray();
    double sum = powers.Sum();
    return powers.Select(power => power / sum).ToArray();
}
