#!/bin/sh
# Build an engine with the attention plugin with trtexec (classic TensorRT, 10.7 or newer) and time it.
#
#   sh trtexec.sh OUT            # OUT: what adtp-export --trt wrote, with OUT/plugins
#
# TensorRT-RTX's tool takes the same options: TRTEXEC=tensorrt_rtx sh trtexec.sh OUT
set -eu
out=${1:?usage: sh trtexec.sh OUT}
library=$out/plugins/libadtp_plugins.so
if [ ! -e "$library" ]; then
    echo "$library is missing; type: adtp-plugin build, then adtp-export" >&2
    exit 2
fi

shapes() { # the same shape for every input; a student without token types (NO_TOKEN_TYPES=1) has two
    echo "input_ids:$1,attention_mask:$1$([ -n "${NO_TOKEN_TYPES:-}" ] || echo ",token_type_ids:$1")"
}

exec "${TRTEXEC:-trtexec}" --onnx="$out/model.onnx" --stronglyTyped --noTF32 --dynamicPlugins="$library" \
    --minShapes="$(shapes 1x1)" --optShapes="$(shapes 8x64)" --maxShapes="$(shapes 32x128)" --shapes="$(shapes 32x64)" \
    --saveEngine="${2:-plugin.engine}"
