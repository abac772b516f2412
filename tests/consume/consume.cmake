# SPDX-License-Identifier: Apache-2.0
#
# cmake -D SOURCE=... -D BUILD=... -D CACHE=... -D GENERATOR=... -D FLAGS=... [-D WITH=...] [-D NOT_LINKED=...]
#   -P consume.cmake -- program [arguments...]
# Configures the project in SOURCE, builds it in BUILD, with these flags for RelWithDebInfo, and runs a program of it.
# WITH: more variables. NOT_LINKED: what must not link, and say why.

cmake_minimum_required(VERSION 3.25)

set(command "")
foreach(index RANGE 1 ${CMAKE_ARGC})
  if(DEFINED command_begins)
    list(APPEND command "${CMAKE_ARGV${index}}")
  elseif(CMAKE_ARGV${index} STREQUAL "--")
    set(command_begins TRUE)
  endif()
endforeach()
list(POP_FRONT command program)
list(TRANSFORM WITH PREPEND "-D")

execute_process(
  COMMAND "${CMAKE_COMMAND}" -G "${GENERATOR}" -C "${CACHE}" -S "${SOURCE}" -B "${BUILD}"
    "-DCMAKE_CXX_FLAGS_RELWITHDEBINFO=${FLAGS}" ${WITH} COMMAND_ERROR_IS_FATAL ANY)
execute_process(COMMAND "${CMAKE_COMMAND}" --build "${BUILD}" --parallel 2 COMMAND_ERROR_IS_FATAL ANY)
execute_process(COMMAND "${BUILD}/${program}" ${command} COMMAND_ERROR_IS_FATAL ANY)

if(NOT_LINKED)
  execute_process(COMMAND "${CMAKE_COMMAND}" --build "${BUILD}" --target ${NOT_LINKED}
    RESULT_VARIABLE status OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(status EQUAL 0 OR NOT output MATCHES "either_all_files_define_GRADACCUM_COMPILED_or_none")
    message(FATAL_ERROR "a program of files with GRADACCUM_COMPILED and without must not link, and say why; got\n${output}")
  endif()
endif()
