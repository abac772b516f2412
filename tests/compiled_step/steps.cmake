# SPDX-License-Identifier: Apache-2.0
#
# The tests of compiled steps. When they are built, save_steps records the steps, and the Python torch that contains
# LibTorch generates their C++. The steps are built into the tests, and one is a library that can be loaded.

# gradaccum_fetch_packages(target folder size argument...): a target that fetches packages by pip to a folder shared by
# build trees, and then touches ${PROJECT_BINARY_DIR}/<target>.stamp.
function(gradaccum_fetch_packages target folder size)
  set(stamp "${PROJECT_BINARY_DIR}/${target}.stamp")
  set(requirements "${ARGN}")
  list(FILTER requirements INCLUDE REGEX "[.]txt$")
  add_custom_command(OUTPUT "${stamp}"
    COMMAND "${CMAKE_COMMAND}" -D "PYTHON=${python}" -D "FOLDER=${folder}" -D "SIZE=${size}" -D "WHAT=${ARGN}"
      -P "${CMAKE_CURRENT_FUNCTION_LIST_DIR}/fetch_packages.cmake"
    COMMAND "${CMAKE_COMMAND}" -E touch "${stamp}"
    DEPENDS ${requirements}
    COMMENT "Fetching packages of Python, ${size}" VERBATIM)
  add_custom_target(${target} DEPENDS "${stamp}")
endfunction()

# The Python that contains LibTorch, and the folder of the packages that its torch needs to generate code.
string(REGEX REPLACE "/lib/python3[^/]*/site-packages/torch$" "/bin/python3" python "${GRADACCUM_LIBTORCH_DIR}")
set(problem "")
if(python STREQUAL GRADACCUM_LIBTORCH_DIR OR NOT EXISTS "${python}")
  set(problem "LibTorch is not a part of Python's torch in a virtual environment")
endif()
if(GRADACCUM_LIBTORCH_VERSION VERSION_LESS 2.11.0)
  set(problem "torch ${GRADACCUM_LIBTORCH_VERSION} cannot compile steps, which needs 2.11.0 or newer; the tests of recording expect its messages")
endif()
set(packages "${GRADACCUM_TORCH_VENV}/../_compile_step")
cmake_path(NORMAL_PATH packages)
set(tests compiled_step/compiled_step.test.cpp compiled_step/first_batch.test.cpp compiled_step/save_step.test.cpp)
if(problem)
  message(WARNING "The tests of compiled steps are left out: ${problem}")
  add_test(NAME compiled_step.compiled_step COMMAND "${CMAKE_COMMAND}" -E echo "skipped: ${problem}")
  set_tests_properties(compiled_step.compiled_step PROPERTIES SKIP_REGULAR_EXPRESSION "skipped: " LABELS "compiled_step;exports")
  list(REMOVE_ITEM tests compiled_step/compiled_step.test.cpp)
endif()
if(GRADACCUM_LIBTORCH_VERSION VERSION_GREATER_EQUAL 2.11.0)
  gradaccum_add_tests(gradaccum.tests.compiled_step compiled_step. ${tests})
endif()
if(problem)
  return()
endif()
gradaccum_fetch_packages(gradaccum.tests.packages "${packages}" "60 MB"
  --requirement "${CMAKE_CURRENT_SOURCE_DIR}/compiled_step/requirements.txt")

add_executable(save_steps compiled_step/save_steps.cpp)
target_link_libraries(save_steps PRIVATE gradaccum.tests.main)
target_precompile_headers(save_steps REUSE_FROM gradaccum.tests.main)

set(names perceptron convolutional transformer recurrent encoded words float16 bfloat16)
set(folder "${CMAKE_CURRENT_BINARY_DIR}/steps")
set(generated ${names})
list(TRANSFORM generated PREPEND "${folder}/")
set(registrations ${generated})
list(TRANSFORM generated APPEND .cpp)
list(TRANSFORM registrations APPEND .registration.cpp)
add_custom_command(OUTPUT ${generated} ${registrations}
  COMMAND "${CMAKE_COMMAND}" -E rm -rf "${folder}" # because save_step refuses the folder of an interrupted save
  COMMAND save_steps "${folder}"
  COMMAND "${CMAKE_COMMAND}" -E env "PYTHONPATH=${packages}" "CXX=${CMAKE_CXX_COMPILER}"
    "${python}" "${CMAKE_CURRENT_SOURCE_DIR}/compiled_step/generate.py" "${folder}" ${names}
  COMMAND "${CMAKE_COMMAND}" -D "FOLDER=${folder}" -D "NAMES=${names}"
    -D "MODULE=${PROJECT_SOURCE_DIR}/cmake/GradaccumCompileStep.cmake"
    -P "${CMAKE_CURRENT_SOURCE_DIR}/compiled_step/register.cmake"
  DEPENDS save_steps "${PROJECT_BINARY_DIR}/gradaccum.tests.packages.stamp" compiled_step/generate.py compiled_step/register.cmake "${PROJECT_SOURCE_DIR}/python/gradaccum/compile_step.py"
    "${PROJECT_SOURCE_DIR}/python/gradaccum/linear_cross_entropy.py" "${PROJECT_SOURCE_DIR}/cmake/GradaccumCompileStep.cmake"
  COMMENT "Generating the C++ of compiled steps"
  VERBATIM)
add_custom_target(gradaccum.tests.steps DEPENDS ${generated} ${registrations})

# The flags of gradaccum-compile-step without -O3, which makes the compiler take half as long again.
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

# Runs code that is compiled for a GPU on a device that computes nothing. `program`: benchmark_device_bloom.
function(gradaccum_add_test_on_null_device program)
  gradaccum_find_nvcc(nvcc version)
  execute_process(COMMAND "${python}" -c "import sysconfig; print(sysconfig.get_path('include'))"
    OUTPUT_VARIABLE python_headers OUTPUT_STRIP_TRAILING_WHITESPACE)
  set(missing "")
  if(NOT nvcc OR version VERSION_LESS 13)
    set(missing "there is no CUDA toolkit of version 13")
  elseif(NOT EXISTS "${GRADACCUM_LIBTORCH_DIR}/lib/libtorch_cuda.so")
    set(missing "LibTorch is without CUDA")
  elseif(NOT EXISTS "${python_headers}/Python.h")
    set(missing "there is no ${python_headers}/Python.h, which Triton includes (Debian: python3-dev)")
  endif()
  if(missing)
    message(STATUS "gradaccum: the test of code for a GPU is left out: ${missing}")
    add_test(NAME compiled_step.on_null_device COMMAND "${CMAKE_COMMAND}" -E echo "skipped: ${missing}")
    set_tests_properties(compiled_step.on_null_device PROPERTIES SKIP_REGULAR_EXPRESSION "skipped: " LABELS "compiled_step;exports;kernels")
    return()
  endif()
  execute_process(COMMAND "${python}" -c
    "from importlib.metadata import requires; print(next(r.split(';')[0] for r in requires('torch') if r.startswith('triton')))"
    OUTPUT_VARIABLE triton_of_torch OUTPUT_STRIP_TRAILING_WHITESPACE)
  set(triton "${GRADACCUM_TORCH_VENV}/../_triton-${GRADACCUM_LIBTORCH_VERSION}")
  cmake_path(NORMAL_PATH triton)
  gradaccum_fetch_packages(gradaccum.tests.triton "${triton}" "290 MB" "${triton_of_torch}")
  foreach(module IN ITEMS compiled_step benchmarks)
    gradaccum_tests_need(${module} gradaccum.tests.triton gradaccum.tests.packages ${program})
  endforeach()
  cmake_path(GET nvcc PARENT_PATH bin)
  add_test(NAME compiled_step.on_null_device
    COMMAND "${python}" "${PROJECT_SOURCE_DIR}/tests/compiled_step/on_null_device.py" "${CMAKE_CURRENT_BINARY_DIR}/null_device"
      "${CMAKE_COMMAND}" -E env "LD_PRELOAD=$<TARGET_FILE:gradaccum.tests.emulated_cuda>" $<TARGET_FILE:${program}>
      --words 1000 --width 256 --layers 2 --reviews 256 --lengths 1 --together 4 --record)
  set_tests_properties(compiled_step.on_null_device PROPERTIES LABELS "compiled_step;exports;kernels" COST 1 # not last
    ENVIRONMENT "PYTHONPATH=${packages}:${triton};CUDA_HOME=${bin}/..;CXX=${CMAKE_CXX_COMPILER}")
endfunction()
