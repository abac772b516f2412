# SPDX-License-Identifier: Apache-2.0
#
# cmake -D NVCC=... -D OPTIONS=... -D ARCHITECTURES=... -D SOURCE=... -D WHERE=... -P check.cmake
# Compiles the kernels, reads ptxas's report of each, and prints its registers.

cmake_minimum_required(VERSION 3.25)

# Returns ptxas's report of each kernel: `name|architecture|stack and spills|registers`.
function(compile source result)
  execute_process(COMMAND "${NVCC}" ${OPTIONS} -Werror all-warnings -Xptxas -v -Xcompiler -fPIC,-Wall,-Wextra,-Wno-unused-function
      -c "${source}" -o "${WHERE}/kernels.o"
    RESULT_VARIABLE status OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(NOT status EQUAL 0)
    message(FATAL_ERROR "the kernels do not compile:\n${output}")
  endif()
  string(REPLACE ";" "," output "${output}")
  string(REGEX MATCHALL
    "entry function '[^']*' for 'sm_[0-9]+'[^\n]*\n[^\n]*\n[^\n]* stack frame, [^\n]*\n[^\n]*Used [0-9]+ registers" entries "${output}")
  set(found "")
  foreach(entry IN LISTS entries)
    string(REGEX REPLACE ".*entry function '([^']*)' for 'sm_([0-9]+)'.*\n *([^\n]*stack frame, [^\n]*)\n.*Used ([0-9]+) registers.*"
      "\\1|\\2|\\3|\\4" line "${entry}")
    list(APPEND found "${line}")
  endforeach()
  set(${result} "${found}" PARENT_SCOPE)
endfunction()

compile("${SOURCE}" kernels)
list(LENGTH kernels number)
list(LENGTH ARCHITECTURES architectures)
math(EXPR least "28 * ${architectures}")
if(number LESS least)
  message(FATAL_ERROR "ptxas named ${number} kernels; there must be ${least}")
endif()
set(most 128) # with more, fewer than two blocks fit on a multiprocessor
find_program(cxxfilt c++filt)
foreach(kernel IN LISTS kernels)
  string(REPLACE "|" ";" kernel "${kernel}")
  list(GET kernel 0 name)
  list(GET kernel 1 architecture)
  list(GET kernel 2 spills)
  list(GET kernel 3 registers)
  if(cxxfilt)
    execute_process(COMMAND "${cxxfilt}" "${name}" OUTPUT_VARIABLE name OUTPUT_STRIP_TRAILING_WHITESPACE)
    string(REGEX REPLACE "^void [^<]*<|>[(].*|gradaccum::detail::|[(]anonymous namespace[)]::|c10::" "" name "${name}")
  endif()
  message(STATUS "sm_${architecture}, ${registers} registers: ${name}")
  if(NOT spills STREQUAL "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" OR registers GREATER most)
    message(SEND_ERROR "${name} must keep all in at most ${most} registers: ${spills}, ${registers} registers")
  endif()
endforeach()

# Control: an array outside of registers is detected.
file(WRITE "${WHERE}/array.cu" "__global__ void array(int* numbers, int n) {
  int last[64] = {};
  for (int i = 0; i < n; ++i) last[numbers[i] & 63] = i;
  for (int i = 0; i < 64; ++i) numbers[i] = last[i];
}
")
compile("${WHERE}/array.cu" array)
if(NOT array MATCHES "[|][1-9][0-9]* bytes stack frame")
  message(SEND_ERROR "an array with a variable index must need a stack, and this must see it")
endif()
