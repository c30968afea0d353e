// The products in lower precision as ONNX Runtime's custom operators.
#pragma once

#include "onnxruntime.h"

namespace adtp
{

// Add AdtpBf16Linear, AdtpInt8Linear, and both with a GELU behind them. They live as long as the library is there.
ort::Status* addLinearOperators(ort::Api const& api, ort::Domain* domain);

} // namespace adtp
