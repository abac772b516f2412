#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# launch.test.sh LAUNCH FASHION_MNIST WRITE_IDX_FILES DIRECTORY
#
# Runs the FashionMNIST example with two ranks, started by launch.sh: they give the results of one process; and after
# one is killed, all start again from the last state and end with the same results.

set -euo pipefail
launch=$1 example=$2 writer=$3 directory=$4
rm -rf "$directory"
mkdir -p "$directory"
"$writer" "$directory/data"

fail() { printf '%s\n' "$*" >&2; exit 1; }
expect_same() { [[ $1 == "$2" && -n $1 ]] || fail "$3: expected"$'\n'"$2"$'\n'"got"$'\n'"$1"; }
# expect_status STATUS TEXT COMMAND...: requires this status and this text in the output.
expect_status() {
  local status=0 expected=$1 text=$2
  shift 2
  "$@" > "$directory/output" 2>&1 || status=$?
  (( status == expected )) && grep -q -e "$text" "$directory/output" || fail "$*: $status, $(cat "$directory/output")"
}
results() { grep -E 'Accuracy|Epoch|Done' <<< "$1"; }
options=(--data "$directory/data" --device cpu --dtype float64 --optimizer adamw)

# Refuses numbers that no machine can start, or that bash reads differently. The failure of a process ends the launcher.
for number in 99999999999999999999 1025 0 08 -1 1x ""; do
  expect_status 2 "PROCESSES must be a number from 1 to 1024, got '$number'" "$launch" "$number" \
    bash -c 'kill -s KILL $PPID'
done
expect_status 2 "max-restarts must be a number, got '99999999999999999999'" \
  "$launch" --max-restarts 99999999999999999999 1 true

# Detects all processes that signals end at the same time.
expect_status 137 Killed "$launch" 20 bash -c 'kill -s KILL $$'

# After a signal during the start no more processes are started, and the running ones end by it.
cat > "$directory/environment" <<'END'
set() {  # the launcher calls set before each start
  builtin set "$@"
  if [[ $1 == -m ]]; then echo "a start"; kill -s TERM $$; fi
}
END
BASH_ENV=$directory/environment expect_status 143 "a start" "$launch" 3 sleep 1000
(( $(grep -c "a start" "$directory/output") == 1 )) || fail "started after a signal: $(cat "$directory/output")"

# 27 batches: one of two ranks has one less, and the last window is shorter.
for loop in "" --trainer; do
  settings=("${options[@]}" --batch-size 12 --epochs 3 $loop)
  one=$("$example" "${settings[@]}" --accumulate 4 | grep -v Wrapping)
  two=$("$launch" 2 "$example" "${settings[@]}" --accumulate 2 | grep -v Wrapping)
  expect_same "$(results "$two")" "$(results "$one")" "two processes ${loop:-with a loop of their own}"
  four=$("$launch" 4 "$example" "${settings[@]}" --accumulate 1)
  expect_same "$(results "$four")" "$(results "$one")" "four processes ${loop:-with a loop of their own}"
  for number in 2 4; do
    for shard in optimizer gradients; do
      divided=$("$launch" "$number" "$example" "${settings[@]}" --accumulate $((4 / number)) --shard "$shard" |
        grep -v Wrapping)
      expect_same "$(results "$divided")" "$(results "$one")" \
        "$number processes with --shard $shard, ${loop:-with a loop of their own}"
    done
  done
  other=$("$example" "${settings[@]}" --accumulate 2 | grep -v Wrapping)
  [[ $(results "$other") != "$(results "$one")" ]] || fail "another number of batches an update gives the same"
done

# Kills one of two ranks that shard gradients and the optimizer's state.
settings=("${options[@]}" --batch-size 8 --epochs 20 --save-every 20 --shard gradients)
straight=$("$launch" 2 "$example" "${settings[@]}" --save "$directory/straight")
kill_one() {  # after a state has its final name
  local process
  until compgen -G "$directory/$1/step-*/manifest.json" | grep -qv '\.tmp-'; do sleep 0.05; done
  for process in /proc/[0-9]*; do
    if { tr '\0' ' ' < "$process/cmdline" | grep -q "^$example .*$directory/$1" &&
         tr '\0' '\n' < "$process/environ" | grep -qx 'RANK=1'; } 2> /dev/null; then
      kill -s "$2" "${process#/proc/}"
      return
    fi
  done
}
kill_one killed KILL & 
status=0
killed=$("$launch" --max-restarts 1 2 "$example" "${settings[@]}" --save "$directory/killed" --resume \
  2> "$directory/errors") || status=$?
wait
(( status == 0 )) || fail "a killed process: status $status"$'\n'"$(cat "$directory/errors")"
grep -q 'rank 1 has ended or hangs (rank 0 of 2 waited for ' "$directory/errors" ||
  fail "the killed rank was not named:"$'\n'"$(cat "$directory/errors")"
grep -q 'starting all again' "$directory/errors" || fail "not started again"
grep -q 'resumed from .*step-' "$directory/errors" || fail "not resumed:"$'\n'"$(cat "$directory/errors")"
expect_same "$(results "$killed" | tail -n 3)" "$(results "$straight" | tail -n 3)" "after a kill"
cmp "$(ls -d "$directory"/straight/step-* | tail -n 1)/model.safetensors" \
      "$(ls -d "$directory"/killed/step-* | tail -n 1)/model.safetensors" || fail "other weights after a kill"

# The launcher passes signals on, and waits for the processes to end.
for signal in INT TERM; do
  : > "$directory/output"  # removes the output of the previous signal
  "$launch" 2 bash -c 'trap "sleep 1; echo saved; exit 3" INT TERM; echo ready; while :; do sleep 0.05; done' \
    > "$directory/output" 2>&1 &
  id=$!
  until (( $(grep -c ready "$directory/output") == 2 )); do sleep 0.05; done
  if [[ $signal == TERM ]]; then kill -s TERM "$id"; else kill -s INT "$id" 2> /dev/null; kill -s TERM "$id"; fi
  status=0
  wait "$id" || status=$?
  (( status == 3 && $(grep -c saved "$directory/output") == 2 )) || fail "$signal: $status, $(cat "$directory/output")"
done

# SIGTERM to one rank ends both after the same window, with a state.
kill_one stopped TERM &
status=0
stopped=$("$launch" 2 "$example" "${settings[@]}" --save "$directory/stopped" 2> "$directory/errors") || status=$?
wait
(( status == 143 )) || fail "SIGTERM: status $status"$'\n'"$(cat "$directory/errors")"
grep -q 'Stopped by SIGTERM, and saved' <<< "$stopped" || fail "SIGTERM: $stopped"
stopped=$("$launch" 2 "$example" "${settings[@]}" --save "$directory/stopped" --resume 2> "$directory/errors")
expect_same "$(results "$stopped" | tail -n 3)" "$(results "$straight" | tail -n 3)" "after SIGTERM"
