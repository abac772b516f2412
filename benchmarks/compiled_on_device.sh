#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# compiled_on_device.sh PROGRAMS OUT [LENGTHS]: records the steps of FashionMNIST's network and of a BLOOM of 560m's
# shapes on a CUDA device, of LENGTHS lengths (4), compiles them, and times them against eager training and its graphs.
# PROGRAMS is the folder of the benchmarks; $PYTHON (python3) has torch of their version. OUT gets what each prints, and
# the steps. Some four minutes on 16 cores, one more with 12 lengths; and Python's own, by torch.compile, where
# transformers is there, in at most five more.

set -euo pipefail

if (( $# < 2 )); then sed -n '4,8 s/^# //p' "$0" >&2; exit 2; fi
programs=$1 out=$2 lengths=${3:-4}
tools=$(dirname "$0")/../tools steps=$out/steps
mkdir -p "$steps"

# run NAME COMMAND...: prints what it does and how long it took, into OUT/NAME.txt, too.
run() {
  local start=$SECONDS status=0
  "${@:2}" 2>&1 | tee "$out/$1.txt" || status=$?
  printf '%s: %d s, status %d\n' "$1" $((SECONDS - start)) "$status" | tee -a "$out/$1.txt"
  return "$status"
}

run recorded_update "$programs/benchmark_device_update" --record "$steps/update"
run recorded_bloom "$programs/benchmark_device_bloom" --record "$steps/bloom" --lengths "$lengths"
run compiled "${PYTHON:-python3}" "$tools/compile_step.py" --jobs "$(nproc)" "$steps"/{update,bloom}
run compiled_update "$programs/benchmark_device_update" --steps "$steps/update"
run compiled_bloom "$programs/benchmark_device_bloom" --steps "$steps/bloom" --only "32 at once" --seconds 45
if "${PYTHON:-python3}" -c "import transformers" 2> /dev/null; then
  run python_bloom timeout 300 "${PYTHON:-python3}" "$(dirname "$0")/python/device_bloom.py" || true  # a compiler may be slow
fi
