#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Starts a program several times on this machine, with the environment variables of torchrun, without Python.

set -uo pipefail

usage() {
  cat <<'END'
usage: ./launch.sh [--max-restarts N] PROCESSES PROGRAM [ARGUMENT...]

Starts PROGRAM that many times, to train together: ./launch.sh 2 build/demo/examples/fashion_mnist/fashion_mnist
When one of them fails, the others get 20 seconds to say what they missed, and are ended. With --max-restarts N all are
started again then, N times at most: for a program that saves its state and goes on from there. SIGINT and SIGTERM go to
all. The status is that of the first that failed.

Processor threads are shared out evenly, unless OMP_NUM_THREADS says how many each has. MASTER_PORT is a free one, unless
it is given.
END
}

fail() { printf 'launch.sh: %s\n' "$*" >&2; exit 2; }
is_number() { [[ $1 =~ ^(0|[1-9][0-9]{0,8})$ ]]; }  # a longer one overflows, and bash reads 010 as 8

most_processes=1024  # on one machine
restarts=0
case ${1-} in
  -h | --help) usage; exit 0 ;;
  --max-restarts) restarts=${2-}; shift 2 || fail "--max-restarts needs a number" ;;
esac
is_number "$restarts" || fail "--max-restarts must be a number, got '$restarts'"
processes=${1-}
(( $# >= 2 )) || { usage >&2; exit 2; }
is_number "$processes" && (( processes >= 1 && processes <= most_processes )) ||
  fail "PROCESSES must be a number from 1 to $most_processes, got '$processes'"
shift
command -v "$1" > /dev/null || fail "no program $1"

free_port() {
  local port
  while :; do
    port=$(( 20000 + RANDOM % 20000 ))
    if ! (exec 3<> "/dev/tcp/127.0.0.1/$port") 2> /dev/null; then echo "$port"; return; fi
  done
}

ids=()
signal=""
forward() {
  signal=$1
  kill -s "$1" "${ids[@]}" 2> /dev/null
}
trap 'forward INT' INT
trap 'forward TERM' TERM
trap 'kill "${ids[@]}" 2> /dev/null' EXIT  # when bash gives up because no process can be started
unset TORCHELASTIC_USE_AGENT_STORE  # of a torchrun around this one

# Waits for the end of a process, and sets `ended` and `status`. If signals end several at the same time, `wait -n`
# returns one of them and forgets the others, whose status `wait` still returns.
wait_for_one() {
  for ended in "${ids[@]}"; do
    if [[ ! -d /proc/$ended ]]; then
      wait "$ended"
      status=$?
      return
    fi
  done
  ended=""
  wait -n -p ended "${ids[@]}"
  status=$?
}

# run ATTEMPT PROGRAM [ARGUMENT...]: gives the status of the first that failed, or 0.
run() {
  local rank id ended status ending="" first=0 threads remaining attempt=$1
  shift
  threads=$(( $(getconf _NPROCESSORS_ONLN) / processes ))
  export WORLD_SIZE=$processes LOCAL_WORLD_SIZE=$processes MASTER_ADDR=127.0.0.1 TORCHELASTIC_RESTART_COUNT=$attempt
  export MASTER_PORT=${given_port:-$(free_port)} OMP_NUM_THREADS=${given_threads:-$(( threads > 0 ? threads : 1 ))}
  ids=()
  for (( rank = 0; rank < processes; ++rank )); do
    if [[ -n $signal ]]; then break; fi
    set -m  # else they would ignore SIGINT, and so would their own handlers
    RANK=$rank LOCAL_RANK=$rank "$@" &
    ids+=($!)
    set +m
  done
  if [[ -n $signal ]]; then forward "$signal"; fi  # the signal may have come before the last process was in the list
  if (( rank < processes )); then                  # otherwise the ranks that have started would wait for the others
    first=$(( 128 + $(kill -l "$signal") ))
    end_others > /dev/null 2>&1 &
    ending=$!
  fi
  while (( ${#ids[@]} > 0 )); do
    wait_for_one
    if [[ -z ${ended-} ]]; then  # a signal came, which has been passed on
      if (( status > 128 )); then continue; fi
      fail "bash 5.1 or newer is needed"
    fi
    remaining=()
    for id in "${ids[@]}"; do if (( id != ended )); then remaining+=("$id"); fi; done
    ids=("${remaining[@]}")
    if (( status == 0 || first != 0 )); then continue; fi
    first=$status
    if (( ${#ids[@]} > 0 )); then
      end_others > /dev/null 2>&1 &
      ending=$!
    fi
  done
  if [[ -n $ending ]]; then kill "$ending" 2> /dev/null; fi
  return "$first"
}

# In time to receive messages of the others.
end_others() {
  trap 'kill "$pause" 2> /dev/null; exit' TERM
  for signal in TERM KILL; do
    sleep 20 &
    pause=$!
    wait "$pause"
    kill -s "$signal" "${ids[@]}" 2> /dev/null
  done
}

given_port=${MASTER_PORT-}
given_threads=${OMP_NUM_THREADS-}
for (( attempt = 0; ; ++attempt )); do
  run "$attempt" "$@"
  status=$?
  if (( status == 0 || attempt == restarts )) || [[ -n $signal ]]; then exit $status; fi
  printf 'launch.sh: a process ended with status %d; starting all again\n' "$status" >&2
done
