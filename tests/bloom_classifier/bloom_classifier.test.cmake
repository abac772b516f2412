# SPDX-License-Identifier: Apache-2.0
#
# cmake -DEXAMPLE=<bloom_classifier> -DLAUNCH=<launch.sh> -DDIRECTORY=<scratch> -P bloom_classifier.test.cmake
#
# Runs the BLOOM example on files that it makes, and checks its output and files.

cmake_minimum_required(VERSION 3.25)

include("${CMAKE_CURRENT_LIST_DIR}/../support/example.cmake")

# Sets output.
function(succeed)
  run(${ARGN})
  if(NOT status EQUAL 0)
    message(FATAL_ERROR "${ARGN}: status ${status}\n${output}\n${errors}")
  endif()
  return(PROPAGATE output errors)
endfunction()

file(REMOVE_RECURSE "${DIRECTORY}")
set(files "${DIRECTORY}/demo")
set(percent "[0-9]+[.][0-9][0-9]%")
set(heading "Tokenizer input max length: 1024\nTokenizer vocabulary size: [0-9]+\n")
set(loss "Loss: [0-9]+[.][0-9][0-9][0-9][0-9]\n")

# The demo: three trainings and a table.
succeed(--demo --demo-reviews 60 --demo-files "${files}" --log-every 20 --threads 1)
set(epoch "Epoch: 0001/0001 | Train acc.: ${percent} | Val acc.: ${percent}\nTime elapsed [0-9]+[.][0-9][0-9] min\n")
string(REPLACE "|" "[|]" epoch "${epoch}")
set(batches "")
foreach(batch 0000 0020 0040)
  string(APPEND batches "Epoch: 0001/0001 [|] Batch ${batch}/0042 [|] ${loss}")
endforeach()
set(training "${heading}${batches}${epoch}Test accuracy ${percent}\n")
expect_match("${output}" "\n==> 1 micro-batch of one review an update\n${training}")
expect_match("${output}" "\n==> 8 micro-batches of one review an update\n${training}")
expect_match("${output}" "\n==> 16 micro-batches of one review an update\n${training}")
expect_match("${output}" "accumulate +time +test accuracy +updates +peak memory\n +1 .* 42 .*\n +8 .* 6 .*\n +16 .* 3 ")

# Pre-trains on the demo's texts. The saved folder can be fine-tuned.
set(learned "${DIRECTORY}/pretrained")
succeed(--model "${files}" --train "${files}/reviews.csv" --task causal-lm --save "${learned}" --threads 1)
set(number "([0-9]+[.][0-9][0-9])")
set(lines "^${heading}Perplexity before: ${number}\n.*Update 6 . Val perplexity: ${number}\nTest perplexity ${number}\n")
if(NOT output MATCHES "${lines}" OR NOT CMAKE_MATCH_3 LESS CMAKE_MATCH_1)
  message(FATAL_ERROR "the perplexity must fall:\n${output}")
endif()
succeed(--model "${learned}" --train "${files}/reviews.csv" --updates 1 --threads 1)
foreach(option --in-backward --memory-budget=1MB --compile=x)
  expect_error(2 "--task causal-lm: leave out" --model "${files}" --train "${files}/reviews.csv" --task causal-lm ${option})
endforeach()

# Uses the demo's files: trains, saves and predicts.
set(train --model "${files}" --train "${files}/reviews.csv" --threads 1 --lr 0.001 --micro-batch 2 --accumulate 4)
succeed(${train} --epochs 2 --save "${DIRECTORY}/saved" --save-every 4 --optimizer adamw)
expect_match("${output}" "Epoch: 0002/0002 .*Test accuracy ${percent}\n.*Samples/second: .*Tokens/second: [0-9]+\nPadding: ")
string(REGEX MATCHALL "[a-zA-Z]+ acc[a-z.]+:? ${percent}" accuracies "${output}")
foreach(name config.json model.safetensors tokenizer.json states)
  if(NOT EXISTS "${DIRECTORY}/saved/${name}")
    message(FATAL_ERROR "there must be a ${name} in the folder that was saved")
  endif()
endforeach()
string(REGEX MATCH "Test accuracy [^\n]+" accuracy "${output}")
# Trains with several ranks, with accordingly fewer micro-batches each.
function(expect_the_same_by number accumulate shard)
  execute_process(COMMAND "${LAUNCH}" ${number} "${EXAMPLE}" ${train} --epochs 2 --accumulate ${accumulate}
                          --save "${DIRECTORY}/by_${number}" --optimizer adamw --shard ${shard}
                  OUTPUT_VARIABLE output COMMAND_ERROR_IS_FATAL ANY)
  string(REGEX MATCHALL "[a-zA-Z]+ acc[a-z.]+:? ${percent}" of_several "${output}")
  if(NOT of_several STREQUAL accuracies OR NOT of_several)
    message(FATAL_ERROR "${number} processes with --shard ${shard} must give '${accuracies}', got '${of_several}'")
  endif()
endfunction()
expect_the_same_by(2 2 optimizer)
expect_the_same_by(4 1 gradients)

set(predict predict --model "${DIRECTORY}/saved" --threads 1)
succeed(${predict} "A wonderful film." "An awful, boring film.")
expect_match("${output}" "^[01] [(][0-9]+[.][0-9]%[)]  A wonderful film[.]\n[01] [(][0-9.]+%[)]  An awful, boring film[.]\n$")
set(predicted "${output}")
file(WRITE "${DIRECTORY}/texts.txt" "A wonderful film.\n\nAn awful, boring film.\n")
succeed(${predict} --file "${DIRECTORY}/texts.txt")
expect_match("${output}" "${accuracy}|^[01] ")
if(NOT output STREQUAL predicted)
  message(FATAL_ERROR "a text must be predicted alike from a file, got\n${output}and before\n${predicted}")
endif()
expect_match("${errors}" "^Texts/second: [0-9.]+\n$")
succeed(${predict} --file "${DIRECTORY}/texts.txt" --batch-tokens 0)
if(NOT output STREQUAL predicted)
  message(FATAL_ERROR "a text must be predicted alike alone, got\n${output}and before\n${predicted}")
endif()
file(WRITE "${DIRECTORY}/texts.csv" "id,text\n1,A wonderful film.\n2,\"An awful, boring film.\"\n")
succeed(${predict} --file "${DIRECTORY}/texts.csv")
if(NOT output STREQUAL predicted)
  message(FATAL_ERROR "a text must be predicted alike from a CSV file, got\n${output}and before\n${predicted}")
endif()
succeed(predict --help)
if(NOT output MATCHES "--model")
  message(FATAL_ERROR "predict --help must show --model, got\n${output}")
endif()

# Names of labels are printed and kept.
file(READ "${DIRECTORY}/saved/config.json" config)
string(REPLACE "LABEL_0" "no" config "${config}")
string(REPLACE "LABEL_1" "yes" config "${config}")
file(COPY "${DIRECTORY}/saved/model.safetensors" "${DIRECTORY}/saved/tokenizer.json" DESTINATION "${DIRECTORY}/named")
file(WRITE "${DIRECTORY}/named/config.json" "${config}")
string(REGEX REPLACE "(^|\n)0 " "\\1no " predicted "${predicted}")
string(REGEX REPLACE "(^|\n)1 " "\\1yes " predicted "${predicted}")
succeed(predict --model "${DIRECTORY}/named" --threads 1 --file "${DIRECTORY}/texts.txt")
if(NOT output STREQUAL predicted)
  message(FATAL_ERROR "labels must have their names, got\n${output}and not\n${predicted}")
endif()
succeed(--model "${DIRECTORY}/named" --train "${files}/reviews.csv" --threads 1 --save "${DIRECTORY}/renamed")
file(READ "${DIRECTORY}/renamed/config.json" renamed)
if(NOT renamed STREQUAL config)
  message(FATAL_ERROR "a config.json must be saved as it was read, got\n${renamed}")
endif()

# Trains half of it, and then the rest: the model must be the same to the byte.
succeed(${train} --epochs 1 --save "${DIRECTORY}/halves" --save-every 4 --optimizer adamw)
succeed(${train} --epochs 2 --save "${DIRECTORY}/halves" --save-every 4 --optimizer adamw --resume)
foreach(folder saved halves)
  file(SHA256 "${DIRECTORY}/${folder}/model.safetensors" ${folder})
endforeach()
if(NOT saved STREQUAL halves)
  message(FATAL_ERROR "what was trained in two goes must be what was trained in one")
endif()

# Other ways to train, with one window each.
foreach(how "--optimizer;adafactor" "--optimizer;adamw8bit" "--precision;bf16-mixed" "--checkpoint;1" "--memory-budget;8MB")
  succeed(${train} ${how})
  expect_match("${output}" "Test accuracy ${percent}\n")
endforeach()

# With lengths padded to a multiple, prints the shapes and the padding of an epoch.
succeed(${train} --pad-to-multiple-of 16)
expect_match("${output}" "\nIn an epoch: [0-9]+ batches in [1-9][0-9]* shapes, [0-9]+[.][0-9] % padding\n.*Test accuracy ${percent}\n")

# Makes a model of another size, in shards; trains it for some updates, and as a demo, which reuses it.
succeed(make --layers 3 --size tiny --words 400 --seed 4 --shard-size 200KB --reviews 60 --output "${DIRECTORY}/made")
expect_match("${output}" "^Made [^\n]*made: 175808 parameters, in [0-9.]+ s\n$")
foreach(name config.json tokenizer.json model-00001-of-00004.safetensors model.safetensors.index.json reviews.csv)
  if(NOT EXISTS "${DIRECTORY}/made/${name}")
    message(FATAL_ERROR "there must be a ${name} in the folder that was made")
  endif()
endforeach()
succeed(--model "${DIRECTORY}/made" --train "${DIRECTORY}/made/reviews.csv" --threads 1 --updates 2 --evaluate 3)
expect_match("${output}" "Peak tensor memory: cpu [0-9.]+ MB\nPeak resident memory: [0-9]+ MB\nEpochs: 1, updates: 2, skipped: 0\n")
expect_match("${output}" "Peak tensor memory, weights included: [0-9.]+ MB\n")
foreach(how "^Made " "is there already")
  succeed(--demo --size tiny --demo-reviews 60 --demo-files "${DIRECTORY}/sized" --updates 1 --threads 1)
  expect_match("${output}" "${how}.*\nTraining with adamw8bit in [^\n]*, 8 reviews an update\n.*updates: 1, ")
  expect_match("${output}" " tokens a review, [0-9.]+ tokens/second in training: an epoch of 35000 reviews takes [0-9.e-]+ hours\n")
  expect_match("${output}" "At most [0-9]+ bytes of tensors, weights included; resident [0-9]+ bytes, ")
endforeach()
succeed(--model "${DIRECTORY}/made" --train "${DIRECTORY}/made/reviews.csv" --threads 1 --minutes 0.000001 --evaluate 3)
expect_match("${output}" "updates: 1, skipped: 0\n")

# Validates during training, until patience ends.
succeed(--model "${DIRECTORY}/made" --train "${DIRECTORY}/made/reviews.csv" --threads 1 --validate-every 1 --patience 1
  --lr 1e-12 --accumulate 2 --epochs 3)
expect_match("${output}" "Epoch: 0001/0003 \\| Batch 0002/[0-9]+ \\| Val acc\\.: [0-9.]+% \\| Val loss: [0-9.]+\n")
expect_match("${output}" "Epochs: [0-9]+, updates: [2-9], skipped: 0\nStopped early: loss was best, [0-9.]+, at update [0-9]+, 1 validation ago\n")

# Writes TensorBoard files, a report and a profile.
set(ENV{KINETO_LOG_LEVEL} 99) # silences LibTorch's profiler
succeed(--model "${DIRECTORY}/made" --train "${DIRECTORY}/made/reviews.csv" --threads 1 --updates 7 --evaluate 3
  --tensorboard "${DIRECTORY}/board" --report "${DIRECTORY}/run.html" --profile "${DIRECTORY}/profile")
expect_match("${output}" "forward")
file(GLOB events "${DIRECTORY}/board/events.out.tfevents.*")
foreach(file "${events}" "${DIRECTORY}/run.html" "${DIRECTORY}/profile/trace.json" "${DIRECTORY}/profile/profile.txt")
  if(NOT EXISTS "${file}")
    message(FATAL_ERROR "there must be a file '${file}'")
  endif()
endforeach()

# Errors of users.
expect_error(1 "made: must not exist yet, or be an empty folder" make --output "${DIRECTORY}/made")
expect_error(1 "hidden_size must be divisible by n_head" make --output "${DIRECTORY}/none" --heads 7)
expect_error(2 "--output is required" make)
expect_error(2 "--size" make --output "${DIRECTORY}/none" --size 561m)
expect_error(2 "--size requires --demo" --size tiny)
expect_error(2 "--model must be given, or make or --demo")
expect_error(2 "--train must be given, or predict" --model "${files}")
expect_error(2 "--precision" --model "${files}" --precision 8)
expect_error(2 "--validation requires --test" --model "${files}" --train x --validation y)
expect_error(1 "nowhere/config.json: must exist" predict --model nowhere text)
expect_error(1 "none.csv" --model "${files}" --train none.csv)
file(WRITE "${DIRECTORY}/bad.csv" "text,label\n\"open,1\n")
expect_error(1 "bad.csv" --model "${files}" --train "${DIRECTORY}/bad.csv")
