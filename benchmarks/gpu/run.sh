#!/usr/bin/env bash
# Check and time on this machine's NVIDIA GPU whatever of this project runs there, in under 8 minutes:
#
#     benchmarks/gpu/run.sh [MODEL_DIR] [--records DIR]
#     benchmarks/gpu/run.sh --dry-run      # on an emulated GPU, on any machine: tries out all steps that need no engine
#     benchmarks/gpu/run.sh probes         # what launches, waits and products cost
#     benchmarks/gpu/run.sh table          # a student beside its peers, in pieces of ten minutes; --help has the options
#
# MODEL_DIR is a student's checkpoint (default: demo/student); records go to benchmarks/records. The package need not be
# installed. Python is $PYTHON, else .venv/bin/python where there is one, else python3. benchmarks/gpu/suite.py has the steps.
set -euo pipefail
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd)
python=python3
[[ -x $root/.venv/bin/python ]] && python=$root/.venv/bin/python
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
exec "${PYTHON:-$python}" -m benchmarks.gpu.suite "$@"
