# SPDX-License-Identifier: Apache-2.0
#
# The doctor measures each item and prints how to fix losses; here the number of threads is wrong on purpose.
# cmake -D EXAMPLE=<program> [-D EMULATED_CUDA=<library>] -P doctor.test.cmake
cmake_minimum_required(VERSION 3.25)
include("${CMAKE_CURRENT_LIST_DIR}/../support/example.cmake")

# Runs the doctor with this number of threads, which MKL may limit to the number of cores.
function(examine threads)
  set(ENV{OMP_NUM_THREADS} ${threads})
  set(ENV{MKL_DYNAMIC} FALSE)
  run()
  message(STATUS "${output}${errors}")
  if(NOT status EQUAL 0)
    message(FATAL_ERROR "the doctor ended with ${status}")
  endif()
  return(PROPAGATE output)
endfunction()

set(number "[0-9]+([.][0-9]+)?")
set(verdict "(ok|to mend|${number} times slower) +")

cmake_host_system_information(RESULT cpus QUERY NUMBER_OF_LOGICAL_CORES)
math(EXPR too_many "${cpus} + 1")
set(ENV{LD_PRELOAD} "${EMULATED_CUDA}")
examine(${too_many})
set(ENV{LD_PRELOAD} "")
expect_match("${output}" "^[^\n]+: [0-9]+ CPUs?, ${number} GiB of memory; LibTorch [0-9.]+[^ ]* with ${too_many} threads\n\n")
foreach(finding
    "freed memory: ${number} ms to fill 72 MiB of new tensors, ${number} ms of kept ones"
    "huge pages: [^\n]+"
    "float32 products: (${number} GFLOP/s a thread by MKL, ${number} by oneDNN|not by MKL[^\n]*)"
    "bfloat16 products: ${number} GFLOP/s a thread, ${number} in float32"
    "denormal numbers: ${number} ns to multiply one, ${number} ns any other"
    "attention, 64 tokens: training in bfloat16 ${number} ms by flash, ${number} ms without"
    "other programs: keep ${number} of [0-9]+ CPUs? busy"
    "OpenMP: [^\n]+")
  expect_match("${output}" "\n${verdict}${finding}\n")
endforeach()
if(EMULATED_CUDA OR output MATCHES "CUDA kernels: ")
  expect_match("${output}" "\n${verdict}CUDA products of new shapes: ${number} ms for the first of a shape, ${number} ms for others\n")
  expect_match("${output}" "\n${verdict}CUDA attention over new lengths: ${number} ms for the first of a length, ${number} ms for others\n")
endif()
if(EMULATED_CUDA)
  expect_match("${output}" "\nto mend +CUDA kernels: none in this program[^\n]*\n +link with gradaccum::compiled")
endif()

# One thread too many must be reported, and the number that the doctor recommends must be accepted.
expect_match("${output}" "\n(to mend|${number} times slower) +threads: ${too_many} on [0-9]+ CPUs?[^\n]*\n +at::set_num_threads[(][0-9]+[)];")
string(REGEX REPLACE ".*\n +at::set_num_threads[(]([0-9]+)[)];.*" "\\1" right "${output}")
examine(${right})
expect_match("${output}" "\nok +threads: ${right} on ${right} CPU")
if(EMULATED_CUDA AND output MATCHES "CUDA")
  message(FATAL_ERROR "the doctor sees a CUDA device where there is none\n${output}")
endif()

# While other programs keep all CPUs busy, one thread is recommended.
if(cpus GREATER 1)
  set(script "${CMAKE_CURRENT_BINARY_DIR}/doctor_on_busy_cpus")
  file(WRITE "${script}" "#!/bin/sh\nfor i in $(seq ${cpus}); do timeout 100 yes > /dev/null & loops=\"$loops $!\"; done\n"
    "'${EXAMPLE}'\nstatus=$?\nkill $loops\nexit $status\n")
  file(CHMOD "${script}" PERMISSIONS OWNER_READ OWNER_WRITE OWNER_EXECUTE)
  set(EXAMPLE "${script}")
  examine(${cpus})
  expect_match("${output}" "\nto mend +other programs: keep ${number} of ${cpus} CPUs busy\n +OMP_NUM_THREADS=1 ")
  examine(1)
  expect_match("${output}" "\nok +other programs: keep ")
endif()

# A finding with a fix is followed by it, and one without by another finding.
string(REGEX MATCHALL "\n(to mend|${number} times slower) " losses "${output}")
string(REGEX MATCHALL "\n(to mend|${number} times slower) [^\n]+\n                    [^ \n]" mended "${output}")
list(LENGTH losses number_of_losses)
list(LENGTH mended number_mended)
if(NOT number_of_losses EQUAL number_mended OR output MATCHES "\nok [^\n]+\n  ")
  message(FATAL_ERROR "a loss without a cure, or a cure without a loss, in\n${output}")
endif()
