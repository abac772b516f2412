# SPDX-License-Identifier: Apache-2.0
#
# cmake -DEXAMPLE=<fashion_mnist> -DWRITER=<write_idx_files> -DDIRECTORY=<scratch> -P fashion_mnist.test.cmake
#
# Runs the FashionMNIST example on a tiny data set and checks what it prints.

cmake_minimum_required(VERSION 3.25)

# Sets status, output and errors.
function(run)
  execute_process(COMMAND "${EXAMPLE}" ${ARGN} RESULT_VARIABLE status OUTPUT_VARIABLE output ERROR_VARIABLE errors)
  return(PROPAGATE status output errors)
endfunction()

# Sets output.
function(train)
  run(--data "${DIRECTORY}" --device cpu --threads 1 --batch-size 32 --epochs 2 ${ARGN})
  if(NOT status EQUAL 0 OR NOT errors STREQUAL "")
    message(FATAL_ERROR "${ARGN}: status ${status}\n${output}\n${errors}")
  endif()
  return(PROPAGATE output)
endfunction()

function(expect_match text regex)
  if(NOT text MATCHES "${regex}")
    message(FATAL_ERROR "expected a match of\n${regex}\nin\n${text}")
  endif()
endfunction()

# One line on stderr with these parts, nothing on stdout.
function(expect_error expected_status part)
  run(${ARGN})
  string(FIND "${errors}" "${part}" position)
  if(NOT status EQUAL expected_status OR position EQUAL -1 OR NOT output STREQUAL "" OR NOT errors MATCHES "^[^\n]+\n$")
    message(FATAL_ERROR "${ARGN}: expected status ${expected_status} and one line with '${part}', "
                        "got ${status} and\n${errors}${output}")
  endif()
endfunction()

file(REMOVE_RECURSE "${DIRECTORY}")
execute_process(COMMAND "${WRITER}" "${DIRECTORY}" COMMAND_ERROR_IS_FATAL ANY)

set(rule "-------------------------------")
set(results "Test Results:\n Accuracy: [0-9]+\\.[0-9]%, Avg loss: [0-9]+\\.[0-9][0-9][0-9][0-9][0-9][0-9]\n\n")
set(summary "[0-9.]+ seconds, [0-9]+ samples/second, peak memory [0-9]+\\.[0-9] MB beyond the data set\n")

# What it prints, to the letter: nothing about accumulation where there is none, and no progress lines in a file.
train()
expect_match("${output}" "^Epoch 1\n${rule}\n${results}Epoch 2\n${rule}\n${results}Done\n${summary}$")
train(--accumulate 4)
expect_match("${output}" "^Wrapping 'SGD' optimizer with gradient accumulation of 4 steps\nEpoch 1\n${rule}\n${results}Epoch 2")
train(--accumulate 0:2,1:1 --optimizer adamw)
set(two "Wrapping 'AdamW' optimizer with gradient accumulation of 2 steps\n")
set(one "Wrapping 'AdamW' optimizer with gradient accumulation of 1 step\n")
expect_match("${output}" "^${two}Epoch 1\n${rule}\n${results}${one}Epoch 2\n${rule}\n${results}Done\n${summary}$")

# It learns, with every optimizer, also where windows and batches do not divide the epoch.
foreach(settings "sgd;0.5" "momentum;0.05" "adam;0.003" "adamw;0.003")
  list(GET settings 0 optimizer)
  list(GET settings 1 rate)
  train(--optimizer ${optimizer} --lr ${rate} --epochs 10 --batch-size 12 --accumulate 4)
  expect_match("${output}" "Accuracy: (100\\.0|9[0-9]\\.[0-9])%, Avg loss: [0-9.]+\n\nDone")
endforeach()

# So it does in mixed precision, where float16 needs the scaler and its first scales may overflow.
foreach(amp bf16 fp16)
  train(--amp ${amp} --optimizer adamw --lr 0.003 --epochs 10 --batch-size 12 --accumulate 4)
  expect_match("${output}" "^Wrapping 'AdamW' .*Accuracy: (100\\.0|9[0-9]\\.[0-9])%, Avg loss: [0-9.]+\n\nDone\n${summary}$")
endforeach()

# But not with the same numbers, or --amp would do nothing.
train(--amp off --lr 0.1)
string(REGEX MATCH "Avg loss: [0-9.]+" float32 "${output}")
train(--amp bf16 --lr 0.1)
if(output MATCHES "${float32}")
  message(FATAL_ERROR "--amp bf16 and --amp off both give ${float32}")
endif()

# The same seed gives the same results, another one others. Only the summary has times in it.
function(train_seed seed variable)
  train(--lr 0.1 --accumulate 2 --seed ${seed})
  string(REGEX REPLACE "${summary}" "" output "${output}")
  set(${variable} "${output}" PARENT_SCOPE)
endfunction()
train_seed(1 first)
train_seed(1 again)
train_seed(2 other)
if(NOT first STREQUAL again OR first STREQUAL other)
  message(FATAL_ERROR "seed 1:\n${first}\nseed 1 again:\n${again}\nseed 2:\n${other}")
endif()

# The Trainer prints what the loop by hand prints, but for the accumulator's announcement.
foreach(arguments "--lr;0.1" "--lr;0.1;--accumulate;0:4,1:2" "--lr;0.003;--optimizer;adamw;--amp;bf16")
  train(${arguments})
  string(REGEX REPLACE "Wrapping [^\n]*\n|${summary}" "" by_hand "${output}")
  train(${arguments} --trainer)
  string(REGEX REPLACE "${summary}" "" with_trainer "${output}")
  if(NOT by_hand STREQUAL with_trainer)
    message(FATAL_ERROR "${arguments}: by hand\n${by_hand}\nwith the Trainer\n${with_trainer}")
  endif()
endforeach()

# Micro-batches of 4 x 16 and of 1 x 64: what each took.
function(compare_micro_batches)
  run(--data "${DIRECTORY}" --device cpu --threads 1 --epochs 2 --compare-micro-batches ${ARGN})
  set(report "Time: [0-9]+\\.[0-9][0-9]\nSamples/second: [0-9]+\\.[0-9][0-9]\nCPU memory occupied: [0-9]+ MB\\.\n")
  string(APPEND report "Peak tensor memory: cpu [0-9]+\\.[0-9][0-9] MB\nEpochs: 2, updates: 10, skipped: 0\n\n")
  expect_match("${output}" "^Batch 4 x 16 steps\n${report}Batch 1 x 64 steps\n${report}$")
  if(NOT status EQUAL 0 OR NOT errors STREQUAL "")
    message(FATAL_ERROR "--compare-micro-batches: status ${status}\n${errors}")
  endif()
endfunction()
compare_micro_batches()

# The comparison: a row a run, parameters that agree up to rounding.
train(--compare --lr 0.1)
set(number " +[0-9]+\\.[0-9]+")
set(row " +[0-9.]+%${number}${number} +[0-9]+${number}\n")
expect_match("${output}" "^Run 32 x 1\n\nEpoch 1\n.*Done\n\nRun 8 x 4\n\nWrapping 'SGD' [^\n]* 4 steps\nEpoch 1\n.*Done\n\nRun 32 x 1 bf16\n\nEpoch 1\n.*Done\n\nRun  ")
expect_match("${output}" "\nRun +Accuracy +Avg loss +Seconds +Samples/second +Peak memory \\(MB\\)\n32 x 1${row}8 x 4${row}32 x 1 bf16${row}\n")
expect_match("${output}" "of 32 x 1 and 8 x 4 differ by at most ([0-9.]+e-(0[6-9]|1[0-9])|0\\.0e\\+00), and by ([0-9.]+e-(0[6-9]|1[0-9])|0\\.0e\\+00) of their norm")

# Adam amplifies rounding, so that it takes float64 to see that it is nothing else; bfloat16 has no place there.
train(--compare --optimizer adam --lr 0.003 --dtype float64)
expect_match("${output}" "\n8 x 4${row}\n.*differ by at most ([0-9.]+e-1[0-9]|0\\.0e\\+00), and")
if(output MATCHES "bf16|bfloat16")
  message(FATAL_ERROR "expected nothing about bfloat16 in\n${output}")
endif()

# The plain network, the one with checkpoints, and both side by side. With segments as with a budget, with either loop.
set(row " +[0-9]+\\.[0-9]+ +[0-9]+\\.[0-9]+ +[0-9]+\\.[0-9]+ +[0-9]+\n")
set(memory "[0-9]+ % (less|more) memory \\(activations alone: [0-9]+ % less\\)")
set(time "[0-9]+ % (less|more) time for forward and backward\\.\n")
set(both "\nRun +Avg loss +Peak memory \\(MB\\) +Activations \\(MB\\) +Samples/second\nplain${row}checkpointed${row}")
string(APPEND both "\n${memory}, ${time}The parameters of both are the same, to the bit\\.\n\n")
set(runs "Run plain\n\n.*Epoch 2\n.*Done\n\nRun checkpointed\n\n.*Epoch 2\n.*Done\n\n")
foreach(arguments "320KiB" "320KiB;--trainer" "2MiB;--amp;bf16;--accumulate;2;--optimizer;adamw")
  list(POP_FRONT arguments budget)
  train(--checkpoint 2 --depth 6 ${arguments})
  expect_match("${output}" "^${runs}.*${both}schedule: \\[0-6\\] 7-13\n$")
  train(--checkpoint ${budget} --depth 6 ${arguments})
  expect_match("${output}" "^${runs}.*${both}budget (0\\.31|2\\.00) MiB: peak [01]\\.[0-9]+ MiB [^\n]*\nschedule: [^\n]*\\[[^\n]*\n$")
endforeach()

# A budget that nothing keeps: what the library says, after the plain run.
run(--data "${DIRECTORY}" --device cpu --threads 1 --epochs 1 --checkpoint 1KiB)
expect_match("${errors}" "^fashion_mnist: CheckpointedSequential: memory_budget must be at least [0-9]+ bytes [^\n]*, got 1024\n$")
if(NOT status EQUAL 1)
  message(FATAL_ERROR "--checkpoint 1KiB: status ${status}\n${output}")
endif()

run(--help)
foreach(option depth checkpoint batch-size accumulate epochs lr optimizer device dtype amp threads seed data trainer compare compare-micro-batches)
  expect_match("${output}" "--${option} ")
endforeach()
if(NOT status EQUAL 0 OR NOT errors STREQUAL "")
  message(FATAL_ERROR "--help: status ${status}\n${errors}")
endif()

# Mistakes in the options.
expect_error(2 "must be a whole number in [1, 1048576], got '0'" --batch-size 0)
expect_error(2 "got '1e3'" --epochs 1e3)
expect_error(2 "got '-1'" --seed -1)
expect_error(2 "--lr: must be finite and > 0, got 'nan'" --lr nan)
expect_error(2 "--lr" --lr)
expect_error(2 "lbfgs" --optimizer lbfgs)
expect_error(2 "must be cpu, cuda or cuda:N, got 'tpu'" --device tpu)
expect_error(2 "CUDA devices, got 'cuda:99'" --device cuda:99)
expect_error(2 "--unknown" --unknown)
expect_error(2 "excludes" --compare --accumulate 2)
expect_error(2 "excludes" --compare --amp bf16)
expect_error(2 "excludes" --compare-micro-batches --batch-size 2)
expect_error(2 "excludes" --compare-micro-batches --compare)
expect_error(2 "int8" --amp int8)
expect_error(2 "--amp bf16: --dtype must be float32, got float64" --amp bf16 --dtype float64)
expect_error(2 "--batch-size must be a multiple of 4, got 6" --compare --batch-size 6)
expect_error(2 "must be a whole number in [1, 1000], got '0'" --depth 0)
expect_error(2 "excludes" --checkpoint 2 --compare)
expect_error(2 "excludes" --checkpoint 2 --compare-micro-batches)
expect_error(2 "at most 6, the number of modules at a --depth of 2, got 7" --checkpoint 7)
expect_error(2 "at most 4, the number of modules at a --depth of 1, got 6" --checkpoint 6 --depth 1)
foreach(choice 0 -1 x 1.5 0B 12MB 12mib MiB 1e3B 99999999999999999999)
  expect_error(2 "in B, KiB, MiB or GiB (12MiB), at least 1, got '${choice}'" --checkpoint ${choice})
endforeach()
foreach(schedule 0 -1 x 1.5 4,3 1:2 0:2,0:3 0:2, 0: :2 0:0 0:2:3 99999999999999999999)
  expect_error(2 "(0:8,4:2), got '${schedule}'" --accumulate ${schedule})
endforeach()

# Data that are not there, do not fit or are not what they are named.
expect_error(1 "must hold train-images-idx3-ubyte.gz" --data "${DIRECTORY}/missing")
expect_error(1 "must divide the 320 training images, got 3" --data "${DIRECTORY}" --compare --batch-size 12)
file(WRITE "${DIRECTORY}/train-labels-idx1-ubyte.gz" "no label file")
expect_error(1 "train-labels-idx1-ubyte.gz: magic number must be 0x00000801" --data "${DIRECTORY}")
file(REMOVE_RECURSE "${DIRECTORY}")
