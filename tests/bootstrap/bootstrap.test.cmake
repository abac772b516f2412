# SPDX-License-Identifier: Apache-2.0
#
# Tests the search for Pythons that have LibTorch, the number of parallel compilers, the arguments of `bootstrap.sh test`, and
# the ledger.

cmake_minimum_required(VERSION 3.25)

if(ASK_PYTHONS)
  include("${SOURCE}/cmake/GradaccumLibTorch.cmake")
  gradaccum_present_libtorch(root)
  message(STATUS "found: '${root}'")
  return()
endif()

function(expect what text pattern)
  if(NOT text MATCHES "${pattern}")
    message(FATAL_ERROR "${what} must print\n${pattern}\ngot\n${text}")
  endif()
endfunction()

# Three Pythons without torch: the one that is named, that of a virtual environment, and the first on the path.
foreach(place IN ITEMS named environment/bin path)
  file(WRITE "${WHERE}/${place}/python" "#!/bin/sh\nexit 1\n")
  file(CHMOD "${WHERE}/${place}/python" PERMISSIONS OWNER_READ OWNER_WRITE OWNER_EXECUTE)
endforeach()
execute_process(
  COMMAND "${CMAKE_COMMAND}" -E env --unset=CONDA_PREFIX "VIRTUAL_ENV=${WHERE}/environment"
    "${CMAKE_COMMAND}" -D ASK_PYTHONS=ON -D "SOURCE=${SOURCE}" -D "Python3_EXECUTABLE=${WHERE}/named/python"
    -D "GRADACCUM_PYTHON=${WHERE}/path/python" -P "${CMAKE_CURRENT_LIST_FILE}"
  COMMAND_ERROR_IS_FATAL ANY OUTPUT_VARIABLE text)
expect("A search for LibTorch" "${text}" "no LibTorch that fits is in this system, or in ${WHERE}/named/python, or in ${WHERE}/environment/bin/python, or in ${WHERE}/path/python; name yours by -DCMAKE_PREFIX_PATH=[^\n]*\n-- found: ''")

# bootstrap.sh's own functions, with a cmake that says what it was asked.
set(build [==[cmake() { printf 'cmake %s\n' "$*"; }; source /dev/stdin <<< "$(sed -n '/^step()/p; /^build_jobs()/,/^}/p; /^build()/,/^}/p' "$0")"; build dev --target demo]==])
execute_process(COMMAND "${CMAKE_COMMAND}" -E env CMAKE_BUILD_PARALLEL_LEVEL=7 bash -c "${build}" "${SOURCE}/bootstrap.sh"
  COMMAND_ERROR_IS_FATAL ANY OUTPUT_VARIABLE text)
expect("bootstrap.sh with CMAKE_BUILD_PARALLEL_LEVEL=7" "${text}" "cmake --build --preset dev --parallel 7 --target demo\n")
cmake_host_system_information(RESULT cores QUERY NUMBER_OF_LOGICAL_CORES)
execute_process(COMMAND "${CMAKE_COMMAND}" -E env --unset=CMAKE_BUILD_PARALLEL_LEVEL bash -c "${build}" "${SOURCE}/bootstrap.sh"
  COMMAND_ERROR_IS_FATAL ANY OUTPUT_VARIABLE text)
expect("bootstrap.sh" "${text}" "--parallel [1-9]")
string(REGEX REPLACE ".*--parallel ([0-9]+).*" "\\1" jobs "${text}")
if(jobs GREATER cores)
  message(FATAL_ERROR "bootstrap.sh must start at most ${cores} compilers, one a core; got ${jobs}")
endif()

# The arguments of `bootstrap.sh test`, and arguments that it refuses.
execute_process(COMMAND bash "${SOURCE}/bootstrap.sh" test --list COMMAND_ERROR_IS_FATAL ANY OUTPUT_VARIABLE text)
expect("bootstrap.sh test --list" "${text}" "\nwindow  [^\n]* gradients [^\n]*misuse")
function(refuse expected)
  execute_process(COMMAND bash "${SOURCE}/bootstrap.sh" test ${ARGN} RESULT_VARIABLE status OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(status EQUAL 0)
    message(FATAL_ERROR "bootstrap.sh test ${ARGN} must fail")
  endif()
  expect("bootstrap.sh test ${ARGN}" "${output}" "${expected}")
endfunction()
refuse("there are no tests in a folder tests/windows" windows)
refuse("there are no tests in a folder tests/support" support)
refuse("usage: " --all window)
refuse("usage: " window gradients more)
refuse("usage: " --everything)
refuse("usage: " --preset)

# The ledger has a stage's name, time and status.
set(ledger python3 "${SOURCE}/tests/support/ledger.py" "${WHERE}/ledger")
execute_process(COMMAND ${ledger} begin COMMAND_ERROR_IS_FATAL ANY)
execute_process(COMMAND ${ledger} stage "a nap" "${CMAKE_COMMAND}" -E sleep 1 COMMAND_ERROR_IS_FATAL ANY)
execute_process(COMMAND ${ledger} stage "a failure" "${CMAKE_COMMAND}" -E false RESULT_VARIABLE status)
if(NOT status EQUAL 1)
  message(FATAL_ERROR "a stage must end with the status of its command, 1, got ${status}")
endif()
execute_process(COMMAND ${ledger} print COMMAND_ERROR_IS_FATAL ANY OUTPUT_VARIABLE text)
expect("ledger.py print" "${text}" "\na nap +[1-9][0-9]* s +0 s\na failure +[0-9]+ s +0 s\nall +[1-9]")
