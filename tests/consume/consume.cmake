# SPDX-License-Identifier: Apache-2.0
#
# cmake -D SOURCE=... -D BUILD=... -D CACHE=... -D GENERATOR=... -D PROGRAMS=... [-D WITH=...] [-D NOT_LINKED=...]
#   -P consume.cmake
# Configures the project in SOURCE, builds the PROGRAMS in BUILD, and runs them with --help. WITH: more variables.
# NOT_LINKED: a target that must fail to link, with an explanation.

cmake_minimum_required(VERSION 3.25)

list(TRANSFORM WITH PREPEND "-D")
execute_process(COMMAND "${CMAKE_COMMAND}" -G "${GENERATOR}" -C "${CACHE}" -S "${SOURCE}" -B "${BUILD}" ${WITH}
  COMMAND_ERROR_IS_FATAL ANY)
foreach(program IN LISTS PROGRAMS)
  execute_process(COMMAND "${CMAKE_COMMAND}" --build "${BUILD}" --target "${program}" --parallel 2 COMMAND_ERROR_IS_FATAL ANY)
  execute_process(COMMAND "${BUILD}/${program}" --help COMMAND_ERROR_IS_FATAL ANY)
endforeach()

if(NOT_LINKED)
  execute_process(COMMAND "${CMAKE_COMMAND}" --build "${BUILD}" --target ${NOT_LINKED}
    RESULT_VARIABLE status OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(status EQUAL 0 OR NOT output MATCHES "either_all_files_define_GRADACCUM_COMPILED_or_none")
    message(FATAL_ERROR "a program of files with GRADACCUM_COMPILED and without must not link, and say why; got\n${output}")
  endif()
endif()
