// What the plugins of one library share.
#pragma once

#include <NvInferRuntime.h>

#include <string>

namespace adtp
{

// Report an error to the application's logger; returns the status that TensorRT takes for failure.
int32_t report(std::string const& message) noexcept;

// That of AdtpEncoder.
nvinfer1::IPluginCreatorInterface& encoderCreator();

// Those of grouped attention: 0, 1 with a window, 2 with what keys received.
nvinfer1::IPluginCreatorInterface& groupedCreator(int32_t form);

} // namespace adtp
