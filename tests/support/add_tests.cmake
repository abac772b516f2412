# SPDX-License-Identifier: Apache-2.0
#
# gradaccum_add_tests(program prefix [HEADER_ONLY] source...): builds a program of tests and adds a CTest test
# <prefix><file> for each file. Cases with the tag [cuda] form separate tests, which run on the emulated device, or, if
# LibTorch has CUDA, on a real one, and are skipped without one. HEADER_ONLY: links gradaccum::gradaccum, as most users
# do, instead of gradaccum::compiled.
#
# LibTorch's templates take most of a compilation, so several files are compiled together, each in a separate namespace
# after the includes of all.
#
# A test has the label of its module, which is the folder of its file, and further labels that CONTRIBUTING.md lists.

set(GRADACCUM_TEST_FILES_TOGETHER 12 CACHE STRING
  "How many files of tests are compiled together; 1 makes changing one of them again and again fast")

# Modules that ./bootstrap.sh test runs on the CPU, with `codebase`, `bootstrap`, one of `consume` and one of `kills`.
set(gradaccum_core_modules checkpoint data fitting io memory optim parallel policies pytorch_values scaling snippets state
  trainer training_kills training_state verification watching window)

# gradaccum_tests_need(module [NOT_CORE] target...): makes the targets tests.<module>, tests.all and, for a module of
# the core, tests.core build these targets. NOT_CORE: not tests.core.
function(gradaccum_tests_need module)
  cmake_parse_arguments(PARSE_ARGV 1 arg "NOT_CORE" "" "")
  set(groups ${module} all)
  if(module IN_LIST gradaccum_core_modules AND NOT arg_NOT_CORE)
    list(APPEND groups core)
  endif()
  foreach(group IN LISTS groups)
    if(NOT TARGET tests.${group})
      add_custom_target(tests.${group})
    endif()
    add_dependencies(tests.${group} ${arg_UNPARSED_ARGUMENTS})
  endforeach()
endfunction()

# Sets `result` to the names and tags of a file's tests, `TEST_CASE("…", "[…]"` each, also if they span several lines.
function(gradaccum_test_cases source result)
  file(READ "${source}" text)
  string(REPLACE "\\\"" "'" text "${text}")
  string(REGEX REPLACE "[; \n]+" " " text "${text}")
  string(REPLACE "[" "<" text "${text}") # an open [ would join the items of a list
  string(REPLACE "]" ">" text "${text}")
  string(REGEX MATCHALL "TEST_CASE[A-Z_]*\\( ?(\"[^\"]*\"[ ,]*)+" cases "${text}")
  set(${result} "${cases}" PARENT_SCOPE)
endfunction()

function(gradaccum_add_tests program prefix)
  cmake_parse_arguments(PARSE_ARGV 2 arg "HEADER_ONLY" "" "")
  set(sources ${arg_UNPARSED_ARGUMENTS})
  add_executable(${program} ${sources})
  target_link_libraries(${program} PRIVATE gradaccum.tests.entry)
  if(arg_HEADER_ONLY)
    target_link_libraries(${program} PRIVATE gradaccum::gradaccum Catch2::Catch2)
    target_include_directories(${program} PRIVATE "${PROJECT_SOURCE_DIR}/tests")
  else()
    target_link_libraries(${program} PRIVATE gradaccum.tests.main)
    target_precompile_headers(${program} REUSE_FROM gradaccum.tests.main)
  endif()
  gradaccum_compile_together(${program} ${sources})
  string(REGEX REPLACE "\\..*" "" module "${prefix}")
  gradaccum_tests_need(${module} ${program})
  foreach(source IN LISTS sources)
    cmake_path(GET source STEM LAST_ONLY file) # name.test; the option -# turns it into a tag
    string(REGEX REPLACE "\\.test$" "" name "${prefix}${file}")
    gradaccum_test_cases("${source}" others)
    set(cuda ${others})
    list(FILTER cuda INCLUDE REGEX "<cuda>")
    list(FILTER others EXCLUDE REGEX "<cuda>")
    if(others)
      gradaccum_add_test_of_file(${name} ${program} "[#${file}]~[cuda]~[.]")
    endif()
    if(cuda)
      string(REGEX MATCH "kernels" of_kernels "${file}")
      gradaccum_add_test_of_file(${name}.cuda ${program} "[#${file}][cuda]" cuda ${of_kernels})
      if(TARGET gradaccum.tests.emulated_cuda)
        set_tests_properties(${name}.cuda PROPERTIES FAIL_REGULAR_EXPRESSION "No tests ran|skipped: |SKIPPED:"
          ENVIRONMENT "GRADACCUM_EMULATED_CUDA=$<TARGET_FILE:gradaccum.tests.emulated_cuda>")
        gradaccum_tests_need(${module} NOT_CORE gradaccum.tests.emulated_cuda)
        if(program MATCHES "[.](checkpoint|device|memory|optim|scaling|state|trainer|verification|window)$" AND NOT of_kernels) # again, with the library's kernels
          gradaccum_add_test_of_file(${name}.kernels ${program} "[#${file}][cuda]" cuda kernels)
          set_tests_properties(${name}.kernels PROPERTIES
            FAIL_REGULAR_EXPRESSION "No tests ran|skipped: |SKIPPED:"
            ENVIRONMENT "GRADACCUM_EMULATED_KERNELS=1;GRADACCUM_EMULATED_CUDA=$<TARGET_FILE:gradaccum.tests.emulated_cuda>")
        endif()
      else()
        set_tests_properties(${name}.cuda PROPERTIES SKIP_REGULAR_EXPRESSION "skipped: |SKIPPED:" SKIP_RETURN_CODE 4)
      endif()
    endif()
  endforeach()
endfunction()

# gradaccum_add_test_of_file(name program tests [label...]): fails if no test matches, which Catch2 2 takes for success.
function(gradaccum_add_test_of_file name program tests)
  add_test(NAME ${name} COMMAND ${program} "-#" "${tests}")
  string(REGEX REPLACE "\\..*" "" module "${name}")
  set(labels ${module} ${ARGN})
  if(module IN_LIST gradaccum_core_modules AND NOT "cuda" IN_LIST labels)
    list(APPEND labels core)
  elseif(module MATCHES "^(compiled_step|exported_model)$")
    list(APPEND labels exports)
  endif()
  set_tests_properties(${name} PROPERTIES FAIL_REGULAR_EXPRESSION "No test cases matched|No tests ran" LABELS "${labels}")
endfunction()

function(gradaccum_compile_together program)
  list(LENGTH ARGN files)
  if(GRADACCUM_TEST_FILES_TOGETHER LESS_EQUAL 1 OR files LESS_EQUAL 1)
    return()
  endif()
  set(includes "")
  foreach(source IN LISTS ARGN)
    file(STRINGS "${source}" lines REGEX "^#include")
    list(APPEND includes ${lines})
    set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${source}")
  endforeach()
  list(REMOVE_DUPLICATES includes)
  list(JOIN includes "\n" includes)
  set_target_properties(${program} PROPERTIES
    UNITY_BUILD ON
    UNITY_BUILD_BATCH_SIZE ${GRADACCUM_TEST_FILES_TOGETHER}
    UNITY_BUILD_UNIQUE_ID GRADACCUM_TEST_FILE
    UNITY_BUILD_CODE_BEFORE_INCLUDE "${includes}\nnamespace GRADACCUM_TEST_FILE {"
    UNITY_BUILD_CODE_AFTER_INCLUDE "}")
endfunction()
