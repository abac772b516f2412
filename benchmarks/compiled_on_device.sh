#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# compiled_on_device.sh PROGRAMS OUT [LENGTHS [REVIEWS...]]: records the steps of FashionMNIST's network and of a BLOOM
# of 560m's shapes on a CUDA device, for batches of REVIEWS (32) of LENGTHS lengths (4), compiles them, and times them
# against eager training, its graphs, and, if transformers is installed, Python's torch.compile. PROGRAMS is the folder
# of the benchmarks; $PYTHON (python3) has torch of their version. The outputs and the steps are written to OUT. Takes
# about four minutes on 16 cores, three of them in the compiler; Python's part takes at most four more.

set -uo pipefail

if (( $# < 2 )); then sed -n '4,8 s/^# //p' "$0" >&2; exit 2; fi
programs=$1 out=$2 lengths=${3:-4} failed=0 recorded=()
reviews=("${@:4}")
if (( ! ${#reviews[@]} )); then reviews=(32); fi
benchmarks=$(dirname "$0") python=${PYTHON:-python3} steps=$out/steps
mkdir -p "$steps"

# run SECONDS NAME COMMAND...: runs a command for at most that time, and also writes output and time to OUT/NAME.txt.
run() {
  local start=$SECONDS status=0
  timeout "$1" "${@:3}" 2>&1 | tee "$out/$2.txt" || status=$?
  printf '%s: %d s, status %d\n' "$2" $((SECONDS - start)) "$status" | tee -a "$out/$2.txt"
  if (( status )); then failed=1; fi
}

run 60 recorded_update "$programs/benchmark_device_update" --record "$steps/update"
for together in "${reviews[@]}"; do
  run 90 "recorded_bloom_$together" "$programs/benchmark_device_bloom" --record "$steps/bloom_$together" \
    --together "$together" --lengths "$lengths"
done
for folder in "$steps/update" "${reviews[@]/#/$steps/bloom_}"; do
  if [[ -f $folder/manifest.json ]]; then recorded+=("$folder"); fi
done
if (( ! ${#recorded[@]} )); then exit 1; fi
run $((240 + 60 * lengths)) compiled env PYTHONPATH="$benchmarks/../python" "$python" -m gradaccum.compile_step --jobs "$(nproc)" "${recorded[@]}"
run 60 compiled_update "$programs/benchmark_device_update" --steps "$steps/update"
for together in "${reviews[@]}"; do
  run 120 "compiled_bloom_$together" "$programs/benchmark_device_bloom" --steps "$steps/bloom_$together" \
    --only "$together at once, bf16" --seconds 30 --together "$together" --lengths "$lengths"
done
ours=$failed
if "$python" -c "import transformers" 2> /dev/null; then  # torch.compile may take longer
  run 240 python_bloom "$python" "$benchmarks/python/device_bloom.py" --lengths "$lengths"
fi
exit "$ours"
