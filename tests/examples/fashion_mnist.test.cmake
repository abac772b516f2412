# SPDX-License-Identifier: Apache-2.0
#
# cmake -DEXAMPLE=<fashion_mnist> -DWRITER=<write_idx_files> -DDIRECTORY=<scratch> -P fashion_mnist.test.cmake
#
# Runs the FashionMNIST example on a tiny data set and checks its output.

cmake_minimum_required(VERSION 3.25)

include("${CMAKE_CURRENT_LIST_DIR}/../support/example.cmake")

# Sets output.
function(train)
  run(--data "${DIRECTORY}" --device cpu --batch-size 32 --epochs 2 ${ARGN})
  if(NOT status EQUAL 0 OR NOT errors STREQUAL "")
    message(FATAL_ERROR "${ARGN}: status ${status}\n${output}\n${errors}")
  endif()
  return(PROPAGATE output)
endfunction()

# Sets the output up to `Done`, without the accumulator's announcements, which the Trainer does not make.
function(train_results variable)
  train(${ARGN})
  string(REGEX REPLACE "Wrapping [^\n]*\n|Done\n.*" "" output "${output}")
  set(${variable} "${output}" PARENT_SCOPE)
endfunction()

file(REMOVE_RECURSE "${DIRECTORY}")
execute_process(COMMAND "${WRITER}" "${DIRECTORY}" COMMAND_ERROR_IS_FATAL ANY)

set(rule "-------------------------------")
set(results "Test Results:\n Accuracy: [0-9]+\\.[0-9]%, Avg loss: [0-9]+\\.[0-9][0-9][0-9][0-9][0-9][0-9]\n\n")
set(summary "[0-9.]+ seconds, [0-9.]+ samples/second, peak memory [0-9]+\\.[0-9] MB beyond the data set\n")
set(report "Time: [0-9]+\\.[0-9][0-9]\nSamples/second: [0-9]+\\.[0-9][0-9]\nCPU memory occupied: [0-9]+ MB\\.\n")
string(APPEND report "(Peak tensor memory: cpu [0-9]+\\.[0-9][0-9] MB\n)?Peak resident memory: [0-9]+ MB\nEpochs: [0-9]+, updates: [0-9]+, skipped: 0\n")

# Compares the whole output: nothing about accumulation without accumulation, and no progress lines in a file.
train()
expect_match("${output}" "^Epoch 1\n${rule}\n${results}Epoch 2\n${rule}\n${results}Done\n${summary}$")
train(--accumulate 4)
expect_match("${output}" "^Wrapping 'SGD' optimizer with gradient accumulation of 4 steps\nEpoch 1\n${rule}\n${results}Epoch 2")
train(--accumulate 0:2,1:1 --optimizer adamw)
set(two "Wrapping 'AdamW' optimizer with gradient accumulation of 2 steps\n")
set(one "Wrapping 'AdamW' optimizer with gradient accumulation of 1 step\n")
expect_match("${output}" "^${two}Epoch 1\n${rule}\n${results}${one}Epoch 2\n${rule}\n${results}Done\n${summary}$")
train(--trainer)
expect_match("${output}" "^Epoch 1\n${rule}\n${results}Epoch 2\n${rule}\n${results}Done\n${report}Last validation, [^\n]*\n$")

# The model learns with either optimizer and in mixed precision, also if windows and batches do not divide the epoch.
# float16 needs the scaler, and its first scales may overflow.
foreach(settings "sgd;0.5;off" "adamw;0.003;off" "adamw;0.003;bf16" "adamw;0.003;fp16")
  list(GET settings 0 optimizer)
  list(GET settings 1 rate)
  list(GET settings 2 amp)
  train(--optimizer ${optimizer} --lr ${rate} --amp ${amp} --epochs 10 --batch-size 12 --accumulate 4)
  expect_match("${output}" "Accuracy: (100\\.0|9[0-9]\\.[0-9])%, Avg loss: [0-9.]+\n\nDone\n${summary}$")
endforeach()

# Mixed precision must give other numbers, or --amp would do nothing. The same seed gives the same results, another one
# gives others.
train_results(first --lr 0.1 --accumulate 2 --seed 1)
train_results(again --lr 0.1 --accumulate 2 --seed 1)
train_results(other --lr 0.1 --accumulate 2 --seed 2)
train_results(bfloat16 --lr 0.1 --accumulate 2 --seed 1 --amp bf16)
if(NOT first STREQUAL again OR first STREQUAL other OR first STREQUAL bfloat16)
  message(FATAL_ERROR "seed 1:\n${first}\nseed 1 again:\n${again}\nseed 2:\n${other}\n--amp bf16:\n${bfloat16}")
endif()

# The Trainer prints the same as the loop by hand, also with policies that observe it.
set(board --tensorboard "${DIRECTORY}/board" --report "${DIRECTORY}/run.html")
foreach(arguments "--lr;0.1" "--lr;0.1;--accumulate;0:4,1:2" "--lr;0.003;--optimizer;adamw;--amp;bf16")
  train_results(by_hand ${arguments})
  train_results(with_trainer ${arguments} --trainer)
  train_results(watched ${arguments} ${board})
  if(NOT by_hand STREQUAL with_trainer OR NOT by_hand STREQUAL watched)
    message(FATAL_ERROR "${arguments}: by hand\n${by_hand}\nwith the Trainer\n${with_trainer}\nwatched\n${watched}")
  endif()
endforeach()
file(GLOB events "${DIRECTORY}/board/events.out.tfevents.*")
if(events STREQUAL "" OR NOT EXISTS "${DIRECTORY}/run.html")
  message(FATAL_ERROR "there must be event files and a page, got '${events}'")
endif()
# LibTorch's profiler and its allocator print to stderr.
run(--data "${DIRECTORY}" --device cpu --batch-size 32 --epochs 2 --lr 0.1 --profile "${DIRECTORY}/profile")
if(NOT EXISTS "${DIRECTORY}/profile/trace.json" OR NOT output MATCHES "forward")
  message(FATAL_ERROR "there must be a trace, and its report:\n${output}")
endif()

# Compares micro-batches of 4 x 16 and of 1 x 64.
run(--data "${DIRECTORY}" --device cpu --epochs 2 --compare-micro-batches)
expect_match("${output}" "^Batch 4 x 16 steps\n${report}\nBatch 1 x 64 steps\n${report}\n$")

# The comparison has one row per run, parameters that agree up to rounding, and a page with the curves of all runs.
set(row " +[0-9.]+% +[0-9]+\\.[0-9]+ +[0-9]+\\.[0-9]+ +[0-9.]+ +[0-9]+\\.[0-9]+ +")
set(small "([0-9.]+e-(0[6-9]|1[0-9])|0\\.0e\\+00)\n")
train(--compare --lr 0.1 --report "${DIRECTORY}/runs.html")
expect_match("${output}" "^Run 32 x 1\n\nEpoch 1\n.*Run 8 x 4\n\nEpoch 1\n.*\nRun +Accuracy +Avg loss +Seconds +Samples/second +Peak memory \\(MB\\) +Difference\n32 x 1${row}${small}8 x 4${row}${small}")
expect_match("${output}" "\nThe curves of all runs: ${DIRECTORY}/runs.html\n")
file(READ "${DIRECTORY}/runs.html" page)
foreach(name "32 x 1" "8 x 4" "train/loss" "test/loss" "test/accuracy")
  if(NOT page MATCHES "\"${name}\"") # of its JSON
    message(FATAL_ERROR "the page of all runs must have '${name}'")
  endif()
endforeach()
# AdamW amplifies rounding, so only float64 shows that nothing else differs; bfloat16 is left out. Checkpoints change no
# bit, and a budget splits batches like accumulation.
train(--compare --optimizer adamw --lr 0.003 --dtype float64 --depth 6 --checkpoint 640KiB --memory-budget 24MiB)
set(small "([0-9.]+e-1[0-9]|0\\.0e\\+00)\n")
expect_match("${output}" "\n8 x 4${row}${small}32 x 1 checkpointed${row}0\\.0e\\+00\n32 x 1 in budget${row}${small}\n")

# A budget that is too small is the library's error, with either loop.
foreach(loop --trainer --lr=0.1)
  run(--data "${DIRECTORY}" --device cpu --checkpoint 1KiB ${loop})
  expect_match("${errors}" "^fashion_mnist: CheckpointedSequential: memory_budget must be at least [0-9]+ bytes [^\n]*, got 1024\n$")
  if(NOT status EQUAL 1)
    message(FATAL_ERROR "--checkpoint 1KiB ${loop}: status ${status}\n${output}")
  endif()
endforeach()

# Saves and resumes: two epochs in one run and in two runs give the same output.
set(states "${DIRECTORY}/states")
set(settings --lr 0.003 --optimizer adamw --amp bf16 --batch-size 12 --accumulate 4)
function(newest_model directory variable)
  file(GLOB folders "${directory}/step-*")
  list(GET folders -1 newest)
  file(SHA256 "${newest}/model.safetensors" hash)
  set(${variable} "${hash}" PARENT_SCOPE)
endfunction()
# Sets the output without its end, and the errors, which say where it resumed.
function(go_on)
  run(--data "${DIRECTORY}" --device cpu ${settings} --resume ${ARGN})
  string(REGEX REPLACE "Done\n${report}.*$" "" without "${output}")
  if(NOT status EQUAL 0 OR without STREQUAL output)
    message(FATAL_ERROR "${ARGN}: status ${status}\n${output}\n${errors}")
  endif()
  set(output "${without}")
  return(PROPAGATE output errors)
endfunction()
go_on(--save "${states}/straight" --epochs 2)
set(straight "${output}")
go_on(--save "${states}/twice" --epochs 1)
set(twice "${output}")
expect_match("${errors}" "^no state in ${states}/twice yet: from the beginning\n$")
go_on(--save "${states}/twice" --epochs 2)
string(APPEND twice "${output}")
expect_match("${errors}" "^resumed from ${states}/twice/step-000007, in epoch 2\n$")
newest_model("${states}/straight" straight_model)
newest_model("${states}/twice" twice_model)
if(NOT straight STREQUAL twice OR NOT straight_model STREQUAL twice_model)
  message(FATAL_ERROR "${straight_model}, straight:\n${straight}\n${twice_model}, in two runs:\n${twice}")
endif()
go_on(--save "${states}/twice" --epochs 2)
newest_model("${states}/twice" again)
if(NOT output STREQUAL "" OR NOT again STREQUAL twice_model)
  message(FATAL_ERROR "a training that has come to its end must stay as it is, got\n${output}")
endif()

# The next training is not mistaken for the same one.
run(--data "${DIRECTORY}" --device cpu ${settings} --save "${states}/twice")
if(NOT status EQUAL 1 OR NOT errors MATCHES "^fashion_mnist: save: ${states}/twice has step-000014[^\n]*\n$")
  message(FATAL_ERROR "the states are of another training: status ${status}\n${errors}")
endif()
run(--data "${DIRECTORY}" --device cpu ${settings} --save "${states}/twice" --resume --accumulate 2)
if(NOT status EQUAL 1 OR NOT errors MATCHES "^fashion_mnist: [^\n]*schedule[^\n]*\n$")
  message(FATAL_ERROR "--accumulate is another: status ${status}\n${errors}")
endif()

# Stopped by SIGTERM in the middle and resumed, it ends with the model and results of an uninterrupted one.
go_on(--save "${states}/long" --epochs 20)
string(REGEX MATCH "${results}$" end "${output}")
list(JOIN settings " " arguments)
execute_process(
  COMMAND sh -c "'${EXAMPLE}' --data '${DIRECTORY}' --device cpu ${arguments} --save '${states}/stopped' \
      --epochs 20 > '${DIRECTORY}/out' &
    until grep -q 'Epoch 2' '${DIRECTORY}/out' || ! kill -0 $!; do sleep 0.01; done; kill -TERM $!; wait $!"
  RESULT_VARIABLE status)
file(READ "${DIRECTORY}/out" output)
expect_match("${output}" "\nStopped by SIGTERM, and saved in ${states}/stopped: --resume continues\n$")
if(NOT status EQUAL 143)
  message(FATAL_ERROR "SIGTERM must end it with status 143, got ${status}")
endif()
go_on(--save "${states}/stopped" --epochs 20)
expect_match("${errors}" "^resumed from ${states}/stopped/step-[0-9]+(\\.1)?, in epoch [0-9]+\n$")
expect_match("${output}" "${end}$")
newest_model("${states}/long" long)
newest_model("${states}/stopped" stopped)
if(NOT long STREQUAL stopped)
  message(FATAL_ERROR "stopped and gone on, the model must be the same")
endif()

run(--help)
foreach(option depth checkpoint batch-size accumulate epochs lr optimizer device dtype amp seed data trainer save save-every resume compare compare-micro-batches memory-budget)
  expect_match("${output}" "--${option} ")
endforeach()
if(NOT status EQUAL 0 OR NOT errors STREQUAL "")
  message(FATAL_ERROR "--help: status ${status}\n${errors}")
endif()

# Invalid options.
expect_error(2 "Value 0 not in range 1 to" --batch-size 0)
expect_error(2 "Value 1e3 not in range" --epochs 1e3)
expect_error(2 "Value -1 not in range 0 to" --seed -1)
expect_error(2 "--lr" --lr)
expect_error(2 "lbfgs" --optimizer lbfgs)
expect_error(1 "tpu" --device tpu)
expect_error(2 "--unknown" --unknown)
foreach(mode --compare --compare-micro-batches)
  expect_error(2 "excludes" ${mode} --accumulate 2)
  expect_error(2 "excludes" ${mode} --amp bf16)
  expect_error(2 "excludes" ${mode} --save x)
endforeach()
expect_error(2 "excludes" --compare-micro-batches --batch-size 2)
expect_error(2 "excludes" --compare-micro-batches --memory-budget 1MiB)
expect_error(2 "excludes" --compile x --record-step y)
expect_error(2 "leave out --checkpoint" --compile x --checkpoint 1MiB)
expect_error(2 "excludes" --compare-micro-batches --compare)
expect_error(2 "--resume requires --save" --resume)
expect_error(2 "--save-every requires --save" --save-every 3)
execute_process(COMMAND "${EXAMPLE}" --save "" RESULT_VARIABLE status ERROR_VARIABLE errors)
if(NOT status EQUAL 2 OR NOT errors STREQUAL "fashion_mnist: --save: must not be empty\n")
  message(FATAL_ERROR "an empty --save must be refused, got status ${status} and\n${errors}")
endif()
expect_error(2 "int8" --amp int8)
expect_error(2 "--dtype float32, got float64" --amp bf16 --dtype float64)
expect_error(2 "--batch-size must be a multiple of 4, got 6" --compare --batch-size 6)
foreach(bytes 0 x 12XB 99999999999999999999)
  expect_error(2 "--checkpoint" --checkpoint ${bytes})
  expect_error(2 "--memory-budget" --memory-budget ${bytes})
endforeach()
expect_error(2 "(0:8,4:2), got '1:2'" --accumulate 1:2)

# Data that are missing, do not match or have another type than their name.
expect_error(1 "must hold train-images-idx3-ubyte.gz" --data "${DIRECTORY}/missing")
expect_error(1 "Invalid learning rate: nan" --data "${DIRECTORY}" --lr nan)
file(WRITE "${DIRECTORY}/train-labels-idx1-ubyte.gz" "no label file")
expect_error(1 "train-labels-idx1-ubyte.gz: magic number must be 0x00000801" --data "${DIRECTORY}")
file(REMOVE_RECURSE "${DIRECTORY}")
