"""Run an exported student in ONNX Runtime's TensorRT provider, attention in the plugin.

    python onnxruntime_tensorrt.py OUT          # OUT: what adtp-export --trt wrote, with OUT/plugins

The provider looks for plugins in the domain `trt.plugins`, and would take the portable body of the node otherwise; so
the node's domain is changed in memory and its body left out. Plugin libraries are read once per process, and one that
does not load is only a warning: that is why the node's place is checked.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime

_ATTENTION = "AdtpRaggedAttention"
PLUGINS = tuple(_ATTENTION + form for form in ("", "Received", "Grouped", "GroupedWindow", "GroupedReceived"))
DOMAIN = "trt.plugins"


def for_tensorrt_provider(path):
    """Return the model's bytes with its attention in the provider's plugin domain."""
    model = onnx.load(path)
    for node in model.graph.node:
        if node.op_type in PLUGINS:
            node.domain = DOMAIN
    others = [function for function in model.functions if function.name not in PLUGINS]
    del model.functions[:]
    model.functions.extend(others)
    model.opset_import.append(onnx.helper.make_opsetid(DOMAIN, 1))
    return model.SerializeToString()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path, help="output directory of adtp-export --trt")
    options = parser.parse_args()
    library = options.out / "plugins" / "libadtp_plugins.so"
    if not library.exists():
        raise SystemExit(f"{library} is missing; type: adtp-plugin build, then adtp-export")
    if "TensorrtExecutionProvider" not in onnxruntime.get_available_providers():
        raise SystemExit("this ONNX Runtime has no TensorRT provider; type: pip install onnxruntime-gpu tensorrt")

    settings = onnxruntime.SessionOptions()
    settings.enable_profiling = True
    provider = ("TensorrtExecutionProvider", {"trt_extra_plugin_lib_paths": str(library.resolve())})
    session = onnxruntime.InferenceSession(
        for_tensorrt_provider(options.out / "model.onnx"), settings, providers=[provider, "CUDAExecutionProvider"]
    )
    values = {"input_ids": 5, "attention_mask": 1, "token_type_ids": 0}
    batch = {i.name: np.full((2, 9), values[i.name], np.int64) for i in session.get_inputs()}
    print(session.run(["logits"], batch)[0])

    events = json.loads(Path(session.end_profiling()).read_text())
    outside = {e["args"]["op_name"] for e in events if e.get("args", {}).get("provider") not in (None, provider[0])}
    if left := outside.intersection(PLUGINS):
        raise SystemExit(f"{', '.join(sorted(left))} did not run in TensorRT")
    print(f"ran in TensorRT; outside of it: {', '.join(sorted(outside)) or 'nothing'}")


if __name__ == "__main__":
    main()
