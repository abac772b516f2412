# SPDX-License-Identifier: Apache-2.0
#
# The modules of the library, from the bottom up, and the modules that each may use. A module is a folder of detail/ and
# impl/ with the public headers and folders that belong to it; docs/architecture.md says what each is for.
# cmake -D INCLUDE=include -P layering.cmake

cmake_minimum_required(VERSION 3.25)

set(modules "")

# module(NAME [PUBLIC header|folder/...] [USES module...]): USES may list only modules that precede it in this file.
function(module name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "PUBLIC;USES")
  foreach(public IN LISTS arg_PUBLIC)
    if(NOT public MATCHES "^impl/" AND NOT EXISTS "${INCLUDE}/gradaccum/${public}.hpp" AND NOT EXISTS "${INCLUDE}/gradaccum/${public}")
      message(SEND_ERROR "the module ${name} has no header ${public}.hpp")
    endif()
  endforeach()
  foreach(used IN LISTS arg_USES)
    if(NOT used IN_LIST modules)
      message(SEND_ERROR "the module ${name} uses ${used}, which is not a lower layer")
    endif()
  endforeach()
  set(modules "${modules};${name}" PARENT_SCOPE)
  set(public_of_${name} "${arg_PUBLIC}" PARENT_SCOPE)
  set(used_by_${name} "${arg_USES}" PARENT_SCOPE)
endfunction()

module(build PUBLIC version impl/begin)
module(platform)
module(types)
module(kernels PUBLIC mkl_on_amd
                  USES platform)
module(memory PUBLIC memory_meter
                  USES platform types)
module(state PUBLIC archive
                  USES types kernels)
module(window PUBLIC embedding grad_accumulator gradients linear_cross_entropy
                  USES types kernels state)
module(scaling PUBLIC amp_scaler autocast
                  USES platform types kernels state window)
module(optimizers PUBLIC learning_rates optim/
                  USES types kernels memory state window scaling)
module(checkpoint PUBLIC checkpoint checkpointed_sequential saved_tensor_hooks
                  USES types memory scaling)
module(data PUBLIC data/
                  USES platform types kernels memory state)
module(fitting
                  USES platform types memory state scaling checkpoint data)
module(io PUBLIC io/
                  USES platform types kernels state)
module(watching PUBLIC flop_counter metrics_file profiler progress_line run_page summary_writer
                  USES platform types kernels memory state io)
module(parallel PUBLIC process_group replicas
                  USES platform types state window data)
module(verification PUBLIC verify_accumulation
                  USES types window data)
module(compilation PUBLIC compiled_step exported_model graphed_step objective_step
                  USES platform types kernels memory window scaling checkpoint data io watching)
module(metrics PUBLIC metrics
                  USES state window watching)
module(saving PUBLIC background_saver training_state
                  USES platform types kernels state window optimizers io parallel metrics)
module(training PUBLIC fit_options policy trainer_base
                  USES platform types memory state window optimizers data watching metrics saving)
module(policies PUBLIC policies policies/ trainer
                  USES platform types kernels memory state window scaling optimizers checkpoint fitting io watching parallel metrics saving training)
module(everything PUBLIC compiled gradaccum)
set(used_by_everything ${modules})

function(module_of file result)
  cmake_path(REMOVE_EXTENSION file LAST_ONLY OUTPUT_VARIABLE stem)
  foreach(module IN LISTS modules)
    if(file MATCHES "^(detail|impl)/${module}/" OR stem IN_LIST public_of_${module})
      set(${result} ${module} PARENT_SCOPE)
      return()
    endif()
    foreach(folder IN LISTS public_of_${module})
      if(folder MATCHES "/$" AND file MATCHES "^${folder}")
        set(${result} ${module} PARENT_SCOPE)
        return()
      endif()
    endforeach()
  endforeach()
  message(FATAL_ERROR "${file} is in no module: give it one in tests/support/layering.cmake")
endfunction()

file(GLOB_RECURSE files RELATIVE "${INCLUDE}/gradaccum"
  "${INCLUDE}/gradaccum/*.hpp" "${INCLUDE}/gradaccum/*.ipp" "${INCLUDE}/gradaccum/*.inl")
if(NOT files)
  message(FATAL_ERROR "no headers in ${INCLUDE}/gradaccum")
endif()
foreach(file IN LISTS files)
  module_of("${file}" module)
  file(STRINGS "${INCLUDE}/gradaccum/${file}" includes REGEX "^#include <gradaccum/")
  foreach(line IN LISTS includes)
    string(REGEX REPLACE "^#include <gradaccum/([^>]+)>.*" "\\1" included "${line}")
    if(NOT EXISTS "${INCLUDE}/gradaccum/${included}")
      message(SEND_ERROR "${file} includes ${included}, which is not there")
    endif()
    module_of("${included}" other)
    if(NOT other STREQUAL module AND NOT other STREQUAL "build" AND NOT other IN_LIST used_by_${module})
      message(SEND_ERROR "${file} (module ${module}) includes ${included} (module ${other}), and may not use that module")
    endif()
    string(APPEND included_by_${module} " ${included} ")
  endforeach()
endforeach()

# A public header says its module in the line under #pragma once.
foreach(file IN LISTS files)
  if(file MATCHES "[.]hpp$" AND NOT file MATCHES "^(detail|impl)/")
    module_of("${file}" module)
    file(READ "${INCLUDE}/gradaccum/${file}" text)
    if(NOT text MATCHES "\n#pragma once\n// module: ${module}\n")
      message(SEND_ERROR "${file} must have the line \"// module: ${module}\" under #pragma once")
    endif()
  endif()
endforeach()

# gradaccum.hpp must include every public header except the one that changes a program by its inclusion, and
# compiled.hpp all definitions.
foreach(file IN LISTS files)
  if(NOT file MATCHES "^detail/.*[.]hpp$|[.]inl$|^(gradaccum|compiled|mkl_on_amd)[.]hpp$|^impl/begin[.]ipp$"
      AND NOT included_by_everything MATCHES " ${file} ")
    message(SEND_ERROR "neither gradaccum.hpp nor compiled.hpp includes ${file}")
  endif()
endforeach()

# Only the module platform includes headers of an operating system.
foreach(file IN LISTS files)
  if(NOT file MATCHES "^impl/platform/")
    file(STRINGS "${INCLUDE}/gradaccum/${file}" includes
      REGEX "^# *include <(sys/|net|arpa/|linux/|(dlfcn|fcntl|io|malloc|poll|pthread|sched|signal|spawn|termios|unistd|windows)[.]h)")
    if(includes)
      message(SEND_ERROR "${file} has ${includes}: only impl/platform/ includes headers of an operating system")
    endif()
  endif()
endforeach()

# Definitions are in impl/, in a file for one or more headers, which include it last; no other file includes it.
set(defined_by "")
foreach(file IN LISTS files)
  if(file MATCHES "[.]hpp$")
    file(READ "${INCLUDE}/gradaccum/${file}" text)
    string(REPLACE "#include <gradaccum/impl/begin.ipp>\n" "" text "${text}") # for virtual functions
    string(REGEX MATCHALL "#include <gradaccum/impl/[^>]+>" definitions "${text}")
    if(definitions AND NOT file STREQUAL "compiled.hpp")
      list(APPEND has_definitions "${file}")
      list(JOIN definitions "\n" includes)
      if(NOT text MATCHES "#ifndef GRADACCUM_COMPILED\n${includes}\n#endif\n$")
        message(SEND_ERROR "${file} must end with its includes of impl/ where GRADACCUM_COMPILED is not defined")
      endif()
      list(TRANSFORM definitions REPLACE "#include <gradaccum/([^>]+)>" "\\1")
      list(APPEND defined_by ${definitions})
    endif()
  endif()
endforeach()
foreach(file IN LISTS files)
  if(file MATCHES "[.]ipp$" AND NOT file STREQUAL "impl/begin.ipp")
    if(NOT file IN_LIST defined_by)
      message(SEND_ERROR "no header includes ${file} at its end")
    endif()
    file(READ "${INCLUDE}/gradaccum/${file}" text)
    if(NOT text MATCHES "\n#include <gradaccum/impl/begin.ipp>\n" OR NOT text MATCHES "\n#undef GRADACCUM_INLINE\n$")
      message(SEND_ERROR "${file} must include impl/begin.ipp last and end with #undef GRADACCUM_INLINE")
    endif()
  endif()
endforeach()
# Each includes detail/build/inline.hpp, which detects programs that mix header-only and compiled files.
foreach(file IN LISTS has_definitions)
  set(comes_by FALSE)
  file(STRINGS "${INCLUDE}/gradaccum/${file}" includes REGEX "^#include <gradaccum/.*[.]hpp>")
  foreach(line IN LISTS includes)
    string(REGEX REPLACE "^#include <gradaccum/([^>]+)>.*" "\\1" other "${line}")
    if(other IN_LIST has_definitions OR other STREQUAL "detail/build/inline.hpp")
      set(comes_by TRUE)
    endif()
  endforeach()
  if(NOT comes_by)
    message(SEND_ERROR "${file} must include detail/build/inline.hpp, or a header that does")
  endif()
endforeach()

# A class or an alias in detail has a unique name, because programs include some files together, and a linker merges two
# classes of one name.
set(known "")
foreach(file IN LISTS files)
  if(NOT file MATCHES "^(detail|impl)/.*pp$") # simd/ repeats names for each processor, in different namespaces
    continue()
  endif()
  file(STRINGS "${INCLUDE}/gradaccum/${file}" lines REGEX "^(class|struct|enum class|using) [A-Za-z0-9_]+( [^;]*| .*[{=].*)?$")
  foreach(line IN LISTS lines)
    string(REGEX REPLACE "^(class|struct|enum class|using) ([A-Za-z0-9_]+).*" "\\2" name "${line}")
    if(name IN_LIST known)
      message(SEND_ERROR "${file} defines ${name} of detail, and so does another file: give one of them another name")
    endif()
    list(APPEND known "${name}")
  endforeach()
endforeach()
list(LENGTH known number)
if(number LESS 200)
  message(SEND_ERROR "detail defines ${number} names: does the test find them?")
endif()
