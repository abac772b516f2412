# SPDX-License-Identifier: Apache-2.0
#
# The tests of compiled steps. When they are built, save_steps records the steps, and Python's torch, the one that LibTorch is a
# part of, generates their C++. They are built into the tests, and one is a library that can be loaded.

# Fetches packages without what they depend on to a folder, unless it has those of that key; or leaves in `problem` why not.
function(gradaccum_fetch_packages python folder key size problem) # ARGN: for pip
  file(LOCK "${folder}.lock" GUARD FUNCTION)
  if(EXISTS "${folder}/${key}.stamp")
    return()
  endif()
  list(JOIN ARGN " " what)
  message(STATUS "gradaccum: fetching ${what}, ${size}, to ${folder}")
  file(REMOVE_RECURSE "${folder}")
  execute_process(
    COMMAND "${python}" -m pip install --quiet --disable-pip-version-check --no-input --no-compile --no-deps --retries 1
            --target "${folder}" ${ARGN}
    RESULT_VARIABLE failed TIMEOUT 600)
  if(failed)
    set(${problem} "pip could not fetch ${what}" PARENT_SCOPE)
  else()
    file(TOUCH "${folder}/${key}.stamp")
  endif()
endfunction()

# Leaves the Python beside LibTorch in `result`, and in `packages` what its torch needs to generate code; or why not.
function(gradaccum_python_of_libtorch result packages problem)
  set(folder "${GRADACCUM_TORCH_VENV}/../_compile_step")
  cmake_path(NORMAL_PATH folder)
  string(REGEX REPLACE "/lib/python3[^/]*/site-packages/torch$" "/bin/python3" python "${GRADACCUM_LIBTORCH_DIR}")
  set(${result} "${python}" PARENT_SCOPE)
  set(${packages} "${folder}" PARENT_SCOPE)
  set(${problem} "" PARENT_SCOPE)
  if(python STREQUAL GRADACCUM_LIBTORCH_DIR OR NOT EXISTS "${python}")
    set(${problem} "LibTorch is not a part of Python's torch in a virtual environment" PARENT_SCOPE)
    return()
  endif()
  set(requirements "${PROJECT_SOURCE_DIR}/tests/compiled_step/requirements.txt")
  file(SHA256 "${requirements}" hash)
  set(missing "")
  gradaccum_fetch_packages("${python}" "${folder}" "${hash}" "60 MB" missing --requirement "${requirements}")
  set(${problem} "${missing}" PARENT_SCOPE)
endfunction()

gradaccum_python_of_libtorch(python packages problem)
set(tests compiled_step/compiled_step.test.cpp compiled_step/first_batch.test.cpp compiled_step/save_step.test.cpp)
if(problem)
  message(WARNING "The tests of compiled steps are left out: ${problem}")
  add_test(NAME compiled_step.compiled_step COMMAND "${CMAKE_COMMAND}" -E echo "skipped: ${problem}")
  set_tests_properties(compiled_step.compiled_step PROPERTIES SKIP_REGULAR_EXPRESSION "skipped: ")
  list(REMOVE_ITEM tests compiled_step/compiled_step.test.cpp)
endif()
gradaccum_add_tests(gradaccum.tests.compiled_step compiled_step. ${tests})
if(problem)
  return()
endif()

add_executable(save_steps compiled_step/save_steps.cpp)
target_link_libraries(save_steps PRIVATE gradaccum.tests.main)
target_precompile_headers(save_steps REUSE_FROM gradaccum.tests.main)

set(names perceptron convolutional transformer recurrent encoded float16 bfloat16)
set(folder "${CMAKE_CURRENT_BINARY_DIR}/steps")
set(generated ${names})
list(TRANSFORM generated PREPEND "${folder}/")
set(registrations ${generated})
list(TRANSFORM generated APPEND .cpp)
list(TRANSFORM registrations APPEND .registration.cpp)
add_custom_command(OUTPUT ${generated} ${registrations}
  COMMAND "${CMAKE_COMMAND}" -E rm -rf "${folder}" # or a save that was interrupted would be refused for ever
  COMMAND save_steps "${folder}"
  COMMAND "${CMAKE_COMMAND}" -E env "PYTHONPATH=${packages}" "CXX=${CMAKE_CXX_COMPILER}"
    "${python}" "${CMAKE_CURRENT_SOURCE_DIR}/compiled_step/generate.py" "${folder}" ${names}
  COMMAND "${CMAKE_COMMAND}" -D "FOLDER=${folder}" -D "NAMES=${names}"
    -D "MODULE=${PROJECT_SOURCE_DIR}/cmake/GradaccumCompileStep.cmake"
    -P "${CMAKE_CURRENT_SOURCE_DIR}/compiled_step/register.cmake"
  DEPENDS save_steps compiled_step/generate.py compiled_step/register.cmake "${PROJECT_SOURCE_DIR}/tools/compile_step.py"
    "${PROJECT_SOURCE_DIR}/cmake/GradaccumCompileStep.cmake"
  COMMENT "Generating the C++ of compiled steps"
  VERBATIM)
add_custom_target(gradaccum.tests.steps DEPENDS ${generated} ${registrations})

# The flags of tools/compile_step.py without -O3, with which the compiler takes half as long again.
set(flags -std=c++20 -DNDEBUG -g0 -w -fno-trapping-math -fno-math-errno -ffp-contract=off -fno-tree-loop-vectorize
  -fopenmp -fvisibility=hidden -DTORCH_INDUCTOR_CPP_WRAPPER -DSTANDALONE_TORCH_HEADER -DC10_USING_CUSTOM_GENERATED_MACROS
  -DCPU_CAPABILITY_DEFAULT)
if(sanitized) # it is torch.compile's code, not the library's
  list(APPEND flags -fno-sanitize=all)
endif()
foreach(name IN LISTS names)
  gradaccum_add_step(gradaccum.tests.compiled_step ${name} "${flags}" "${folder}/${name}.registration.cpp"
    "${folder}/${name}.cpp")
  add_dependencies(gradaccum.tests.compiled_step.${name} gradaccum.tests.steps)
endforeach()
add_dependencies(gradaccum.tests.compiled_step gradaccum.tests.steps)
add_library(gradaccum.tests.step_library MODULE $<TARGET_OBJECTS:gradaccum.tests.compiled_step.perceptron>)
target_link_libraries(gradaccum.tests.step_library PRIVATE gradaccum::libtorch)
target_link_options(gradaccum.tests.step_library PRIVATE "$<$<CXX_COMPILER_ID:GNU>:-fopenmp>")
target_compile_definitions(gradaccum.tests.compiled_step
  PRIVATE "STEP_LIBRARY=\"$<TARGET_FILE:gradaccum.tests.step_library>\"")
add_dependencies(gradaccum.tests.compiled_step gradaccum.tests.step_library)

# What is compiled for a GPU is run on a device that computes nothing. `program`: benchmark_device_bloom.
function(gradaccum_add_test_on_null_device program)
  gradaccum_find_nvcc(nvcc version)
  execute_process(COMMAND "${python}" -c "import sysconfig; print(sysconfig.get_path('include'))"
    OUTPUT_VARIABLE python_headers OUTPUT_STRIP_TRAILING_WHITESPACE)
  set(triton "${GRADACCUM_TORCH_VENV}/../_triton-${GRADACCUM_LIBTORCH_VERSION}")
  cmake_path(NORMAL_PATH triton)
  set(missing "")
  if(NOT nvcc OR version VERSION_LESS 13)
    set(missing "there is no CUDA toolkit of version 13")
  elseif(NOT EXISTS "${GRADACCUM_LIBTORCH_DIR}/lib/libtorch_cuda.so")
    set(missing "LibTorch is without CUDA")
  elseif(NOT EXISTS "${python_headers}/Python.h")
    set(missing "there is no ${python_headers}/Python.h, which Triton includes (Debian: python3-dev)")
  else()
    execute_process(COMMAND "${python}" -c
      "from importlib.metadata import requires; print(next(r.split(';')[0] for r in requires('torch') if r.startswith('triton')))"
      OUTPUT_VARIABLE triton_of_torch OUTPUT_STRIP_TRAILING_WHITESPACE)
    gradaccum_fetch_packages("${python}" "${triton}" "${triton_of_torch}" "290 MB" missing "${triton_of_torch}")
  endif()
  if(missing)
    message(STATUS "gradaccum: the test of code for a GPU is left out: ${missing}")
    add_test(NAME compiled_step.on_null_device COMMAND "${CMAKE_COMMAND}" -E echo "skipped: ${missing}")
    set_tests_properties(compiled_step.on_null_device PROPERTIES SKIP_REGULAR_EXPRESSION "skipped: ")
    return()
  endif()
  cmake_path(GET nvcc PARENT_PATH bin)
  add_test(NAME compiled_step.on_null_device
    COMMAND "${python}" "${PROJECT_SOURCE_DIR}/tests/compiled_step/on_null_device.py" "${CMAKE_CURRENT_BINARY_DIR}/null_device"
      "${CMAKE_COMMAND}" -E env "LD_PRELOAD=$<TARGET_FILE:gradaccum.tests.emulated_cuda>" $<TARGET_FILE:${program}>
      --words 1000 --width 256 --layers 2 --reviews 256 --lengths 1 --together 4 --record)
  set_tests_properties(compiled_step.on_null_device PROPERTIES COST 1 # not last
    ENVIRONMENT "PYTHONPATH=${packages}:${triton};CUDA_HOME=${bin}/..;CXX=${CMAKE_CXX_COMPILER}")
endfunction()
