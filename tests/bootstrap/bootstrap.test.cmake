# SPDX-License-Identifier: Apache-2.0
#
# Tests the search for Pythons that have LibTorch, functions and arguments of bootstrap.sh, the preset that installs, and the
# ledger.

cmake_minimum_required(VERSION 3.25)

if(ASK_PYTHONS)
  include("${SOURCE}/cmake/GradaccumLibTorch.cmake")
  gradaccum_present_libtorch("" root)
  message(STATUS "found: '${root}'")
  return()
endif()

if(FETCH)
  include("${SOURCE}/cmake/GradaccumLibTorch.cmake")
  set(GRADACCUM_TORCH_VENV "${FETCH}")
  include("${SOURCE}/cmake/FetchLibTorch.cmake")
  gradaccum_fetch_libtorch(root)
  return()
endif()

function(expect what text pattern)
  if(NOT text MATCHES "${pattern}")
    message(FATAL_ERROR "${what} must print\n${pattern}\ngot\n${text}")
  endif()
endfunction()

# Three Pythons without torch: a named one, a virtual environment's, and the first on the path.
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

# pip's output is printed while it runs, and is in the log that the error names.
file(REMOVE_RECURSE "${WHERE}/fetched")
file(WRITE "${WHERE}/fetching/python" "#!/bin/sh\ncase $2 in\nvenv) mkdir -p \"$3/bin\" && cp \"$0\" \"$3/bin/python\" ;;\n"
  "pip) echo 'Downloading torch (190 MB)'; echo 'No space left on device' >&2; exit 1 ;;\nesac\n")
file(CHMOD "${WHERE}/fetching/python" PERMISSIONS OWNER_READ OWNER_WRITE OWNER_EXECUTE)
execute_process(
  COMMAND "${CMAKE_COMMAND}" -D "FETCH=${WHERE}/fetched" -D "SOURCE=${SOURCE}" -D "Python3_EXECUTABLE=${WHERE}/fetching/python"
    -P "${CMAKE_CURRENT_LIST_FILE}"
  OUTPUT_VARIABLE text ERROR_VARIABLE errors)
expect("A fetch of LibTorch" "${text}" "Downloading torch [(]190 MB[)]\n")
string(REGEX REPLACE "[ \n]+" " " errors "${errors}")
expect("A fetch that fails" "${errors}" "the disk is full, see ${WHERE}/fetched.log; free some room")

# A program of one's own begins with a template, in a new folder.
function(new_program)
  execute_process(COMMAND "${SOURCE}/bootstrap.sh" new ${ARGN} WORKING_DIRECTORY "${WHERE}" OUTPUT_VARIABLE text ERROR_VARIABLE text)
  return(PROPAGATE text)
endfunction()
file(REMOVE_RECURSE "${WHERE}/mine")
new_program(mine --template ppo)
if(text MATCHES "must be a clone of gradaccum's repository") # an archive of the source
  message(STATUS "no clone: bootstrap.sh new is not tested")
else()
  expect("A new program" "${text}" "mine has ppo[.]cpp and CMakeLists[.]txt.*cmake -S mine -B mine/build\n.*mine/build/ppo --help\n")
  file(READ "${WHERE}/mine/CMakeLists.txt" lines)
  expect("A new program's CMakeLists.txt" "${lines}" "GIT_REPOSITORY \"[^\"]+\" GIT_TAG \"[0-9a-f]+\".*add_executable[(]ppo ppo.cpp")
  execute_process(COMMAND "${CMAKE_COMMAND}" -E compare_files "${SOURCE}/examples/templates/ppo.cpp" "${WHERE}/mine/ppo.cpp"
    COMMAND_ERROR_IS_FATAL ANY)
  new_program(mine --template ppo)
  expect("A new program in a folder that exists" "${text}" "mine exists already; name a new folder")
endif()
new_program(other --template pop)
expect("A new program of an unknown template" "${text}" "invalid choice: 'pop' .choose from .*finetune_exported.*gan.*own_loop.*ppo.*trainer")
new_program(--template ppo)
expect("A new program without a folder" "${text}" "required: folder")

# Runs a script after the definitions of bootstrap.sh's functions, which it can replace.
set(source_functions [==[set -euo pipefail; source /dev/stdin <<< "$(sed -n '/^[a-z_]*() {.*}$/p; /^[a-z_]*() {$/,/^}/p; /^python_with_torch=/p' "$0")"; ]==])
function(run_functions script)
  execute_process(COMMAND "${CMAKE_COMMAND}" -E env --unset=OMP_NUM_THREADS ${ARGN} bash -c "${source_functions}${script}" "${SOURCE}/bootstrap.sh"
    WORKING_DIRECTORY "${WHERE}" RESULT_VARIABLE status OUTPUT_VARIABLE text ERROR_VARIABLE text)
  return(PROPAGATE text status)
endfunction()
function(expect_functions script pattern)
  run_functions("${script}" ${ARGN})
  expect("${script}" "${text}" "${pattern}")
  if(NOT status EQUAL 0)
    message(FATAL_ERROR "${script}\nmust end with 0, got ${status}\n${text}")
  endif()
  return(PROPAGATE text)
endfunction()

set(build [==[cmake() { printf 'cmake %s\n' "$*"; }; build dev --target demo]==])
expect_functions("${build}" "cmake --build --preset dev --parallel 7 --target demo\n" CMAKE_BUILD_PARALLEL_LEVEL=7)
cmake_host_system_information(RESULT cores QUERY NUMBER_OF_LOGICAL_CORES)
expect_functions("${build}" "--parallel [1-9]" --unset=CMAKE_BUILD_PARALLEL_LEVEL)
string(REGEX REPLACE ".*--parallel ([0-9]+).*" "\\1" jobs "${text}")
if(jobs GREATER cores)
  message(FATAL_ERROR "bootstrap.sh must start at most ${cores} compilers, one a core; got ${jobs}")
endif()

# A long command has its time printed while it runs, and its failure ends the script.
file(REMOVE "${WHERE}/said")
set(patience [==[sleep() { command sleep 0.01; }; step() { printf '%s\n' "$*" | tee -a said; }
wait_for_word() { until [[ -s said ]]; do command sleep 0.01; done; }
]==])
expect_functions("${patience}tell_time Waiting wait_for_word; echo after" "Waiting: [0-9]+ s so far\n.*after\n")
run_functions("fails() { false; echo went on; }; tell_time Failing fails; echo after")
if(status EQUAL 0 OR text MATCHES "went on|after")
  message(FATAL_ERROR "tell_time must end with the first failure of its command, got ${status}\n${text}")
endif()
expect_functions("fails() { return 3; }; if tell_time Failing fails; then echo yes; else echo $?; fi" "3\n")

# Each of three exports is counted, and a failed one ends the script.
file(WRITE "${WHERE}/exporter" "#!/bin/sh\necho exporting \$4\ntest \$4 != \"\$BAD\"\n")
file(CHMOD "${WHERE}/exporter" PERMISSIONS OWNER_READ OWNER_WRITE OWNER_EXECUTE)
expect_functions("python_with_torch=./exporter; export_demos folder data" "Exported [a-z]+: 1 of 3\n.*: 2 of 3\n.*: 3 of 3\n")
run_functions("python_with_torch=./exporter; export_demos folder data; echo after" BAD=lm)
if(status EQUAL 0 OR text MATCHES "after|3 of 3")
  message(FATAL_ERROR "an export that fails must end bootstrap.sh, got ${status}\n${text}")
endif()

# The Python that has the LibTorch of the build is used if it has the modules; another version does not replace it.
set(torch "${WHERE}/conda/lib/python3.11/site-packages/torch")
foreach(name IN ITEMS torch has)
  file(WRITE "${WHERE}/conda/lib/python3.11/site-packages/${name}/__init__.py" "")
endforeach()
find_program(python python3 NO_CACHE REQUIRED)
file(WRITE "${WHERE}/conda/bin/python3" "#!/bin/sh\nPYTHONPATH='${WHERE}/conda/lib/python3.11/site-packages' exec '${python}' \"\$@\"\n")
file(CHMOD "${WHERE}/conda/bin/python3" PERMISSIONS OWNER_READ OWNER_WRITE OWNER_EXECUTE)
function(built_with version)
  file(WRITE "${WHERE}/build/demo/CMakeCache.txt" "GRADACCUM_LIBTORCH_DIR:INTERNAL=${torch}\n"
    "GRADACCUM_LIBTORCH_VERSION:INTERNAL=${version}\nGRADACCUM_TORCH_VERSION:STRING=2.15.0\n")
endfunction()
set(choose [==[fetch_python_torch() { python_with_torch=fetched; }; choose_python "$WANTED"; echo "python: $python_with_torch"]==])
built_with(2.13.0)
expect_functions("${choose}" "python: ${WHERE}/conda/bin/python3\n" WANTED=has)
run_functions("${choose}" WANTED=lacks)
expect("A Python without a module" "${text}" "no Python has both the LibTorch 2.13.0 of ${torch} and these modules: torch lacks; install")
built_with(2.15.0)
expect_functions("${choose}" "python: fetched\n" WANTED=lacks)

# If all CPUs are busy, one thread is advised; if they are free, or OMP_NUM_THREADS is set, nothing is printed.
set(load [==[sleep() { touch slept; }; rm -f slept
head() { if [[ -e slept ]]; then echo "cpu $((100 + BUSY)) 0 0 1000 0 0 0 0 0 0"; else echo "cpu 100 0 0 $((1000 - FREE)) 0 0 0 0 0 0"; fi; }
advise_threads; echo end]==])
if(cores GREATER 1)
  expect_functions("${load}" "keep ${cores} of ${cores} CPUs busy.*OMP_NUM_THREADS=1 " BUSY=300 FREE=0)
endif()
expect_functions("${load}" "^end" BUSY=0 FREE=300)
expect_functions("${load}" "^end" BUSY=300 FREE=0 OMP_NUM_THREADS=2)

# The preset that installs needs no LibTorch.
file(REMOVE_RECURSE "${WHERE}/install" "${WHERE}/prefix")
execute_process(COMMAND "${CMAKE_COMMAND}" --preset install -B "${WHERE}/install" WORKING_DIRECTORY "${SOURCE}"
  COMMAND_ERROR_IS_FATAL ANY OUTPUT_VARIABLE text)
execute_process(COMMAND "${CMAKE_COMMAND}" --install "${WHERE}/install" --prefix "${WHERE}/prefix" COMMAND_ERROR_IS_FATAL ANY OUTPUT_QUIET)
if(text MATCHES "LibTorch" OR NOT EXISTS "${WHERE}/prefix/include/gradaccum/gradaccum.hpp")
  message(FATAL_ERROR "the preset install must install the headers and look for no LibTorch, got\n${text}")
endif()

# The arguments of `bootstrap.sh test`, and arguments that it refuses.
execute_process(COMMAND bash "${SOURCE}/bootstrap.sh" test --list COMMAND_ERROR_IS_FATAL ANY OUTPUT_VARIABLE text)
expect("bootstrap.sh test --list" "${text}" "\nwindow  [^\n]* gradients [^\n]*misuse")
function(refuse expected)
  execute_process(COMMAND bash "${SOURCE}/bootstrap.sh" ${ARGN} RESULT_VARIABLE status OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(status EQUAL 0)
    message(FATAL_ERROR "bootstrap.sh ${ARGN} must fail")
  endif()
  expect("bootstrap.sh ${ARGN}" "${output}" "${expected}")
endfunction()
refuse("there are no tests in a folder tests/windows" test windows)
refuse("there are no tests in a folder tests/support" test support)
refuse("usage: " test --all window)
refuse("usage: " test window gradients more)
refuse("usage: " test --everything)
refuse("usage: " test --preset)
refuse("usage: ")
refuse("there is no command 'foo'; [^\n]* help " foo)
refuse("there is no demo 'exprot'" demo exprot)
refuse("doctor takes no arguments, got 'foo'" doctor foo)
refuse("docs takes nothing but --check, got '--chek'" docs --chek)

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
