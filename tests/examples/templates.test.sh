#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# templates.test.sh PROGRAMS TEXT FOLDER PPO_PAGE: trains each template. ppo and own_loop are killed, and resume.
set -euo pipefail
programs=$1 text=$2 folder=$3 ppo_page=$4
fail() { echo "templates.test.sh: $*" >&2; exit 1; }
export OMP_NUM_THREADS=1
rm -rf "$folder"
mkdir -p "$folder/data"
cd "$folder"

# Files as FashionMNIST's. The gray of an image depends on its class.
python3 - <<'END'
import random, struct
random.seed(0)
for name, rows in (("train", 60000), ("t10k", 10000)):
    labels = bytes(random.randrange(10) for _ in range(rows))
    with open(f"data/{name}-labels-idx1-ubyte", "wb") as file:
        file.write(struct.pack(">II", 2049, rows) + labels)
    with open(f"data/{name}-images-idx3-ubyte", "wb") as file:
        file.write(struct.pack(">IIII", 2051, rows, 28, 28))
        for label in labels:
            file.write(bytes((25 * label + random.randrange(10),)) * 784)
END

# kill_and_resume STATES COMMAND...: kills the command when there is a state, and runs it again.
kill_and_resume() {
  local states=$1
  shift
  "$@" > killed.txt &
  until compgen -G "$states/step-*" > /dev/null; do
    kill -0 $! 2> /dev/null || fail "$1 ended without a state: $(cat killed.txt)"
    sleep 0.05
  done
  kill -9 $!
  wait $! 2> /dev/null || true
  "$@"
}

"$programs/ppo" whole_ppo 40960 1 > whole.txt
kill_and_resume killed_ppo/states "$programs/ppo" killed_ppo 40960 1 > resumed.txt
last_return() { sed -n 's/^40960 steps, [0-9]* episodes: mean return \([^,]*\),.*/\1/p' "$1"; }
[[ $(last_return whole.txt) && $(last_return whole.txt) == "$(last_return resumed.txt)" ]] ||
  fail "ppo must resume with the same returns, got $(cat whole.txt resumed.txt)"

"$ppo_page" page 2048 > page.txt
for part in "Before learning" "After 2048 steps" "train/return" "train/entropy" "train/lr" '"finished"'; do
  grep -q "$part" page/page.html || fail "the page must have $part, got $(cat page.txt)"
done

"$programs/own_loop" data 1 > whole.txt
kill_and_resume states_of_own_loop "$programs/own_loop" data 1 states_of_own_loop > resumed.txt
[[ $(tail -n 1 whole.txt) == "epoch 1: accuracy "0.9* || $(tail -n 1 whole.txt) == "epoch 1: accuracy 1" ]] ||
  fail "own_loop must learn, got $(cat whole.txt)"
[[ $(tail -n 1 whole.txt) == "$(tail -n 1 resumed.txt)" ]] ||
  fail "own_loop must resume with the same accuracy, got $(cat whole.txt resumed.txt)"

"$programs/gan" data 1 > gan.txt
[[ $(cat gan.txt) == "epoch 1: loss of the generator "* && $(stat -c %s generated.pgm) == 50191 ]] ||
  fail "gan must write images, got $(cat gan.txt)"

"$programs/trainer" "$text" 2 states_of_trainer > trainer.txt
[[ $(cat trainer.txt) == *"Last validation, at update "* ]] || fail "trainer must validate, got $(cat trainer.txt)"
compgen -G "states_of_trainer/step-*" > /dev/null || fail "trainer must save its state"

for program in own_loop gan trainer finetune_exported ppo; do
  "$programs/$program" --help > usage.txt || fail "$program --help must succeed"
  [[ $(cat usage.txt) == "usage: $program "* ]] || fail "$program must name its arguments, got $(cat usage.txt)"
  if "$programs/$program" no_such_file no_such_file 2> error.txt; then fail "$program must fail without its data"; fi
  [[ $(cat error.txt) == "$program: "* ]] || fail "$program must say what went wrong, got $(cat error.txt)"
done
