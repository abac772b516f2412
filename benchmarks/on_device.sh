#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# on_device.sh PROGRAMS OUT [ARGUMENT...]: runs the benchmarks for a CUDA device in the folder PROGRAMS, in less than five
# minutes. Writes their outputs to OUT/NAME.txt, and nvidia-smi's description of the card to OUT/card.txt. ARGUMENTs,
# such as --json FILE, are passed to each benchmark.

set -uo pipefail

if (( $# < 2 )); then sed -n '4,6 s/^# //p' "$0" >&2; exit 2; fi
programs=$1 out=$2 failed=0
shift 2
common=("$@")
mkdir -p "$out"
nvidia-smi > "$out/card.txt" 2>&1 || echo "on_device.sh: nvidia-smi finds no card" >&2

# run SECONDS NAME ARGUMENT...
run() {
  printf '==> benchmark_%s, at most %d s\n' "$2" "$1"
  timeout "$1" "$programs/benchmark_$2" "${@:3}" "${common[@]}" 2>&1 | tee "$out/$2.txt"
  local status=${PIPESTATUS[0]}
  if (( status == 0 )); then return; fi
  printf 'on_device.sh: benchmark_%s ended with status %d\n' "$2" "$status" | tee -a "$out/$2.txt" >&2
  failed=1
}

run 75 device_step
run 25 device_update
run 140 device_bloom --seconds 90
run 20 ppo --on-device
run 25 linear_cross_entropy --on-device
exit "$failed"
