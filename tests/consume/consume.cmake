# SPDX-License-Identifier: Apache-2.0
#
# cmake -D SOURCE=... -D BUILD=... -D CACHE=... -D GENERATOR=... -D FLAGS=... -P consume.cmake -- program [arguments...]
# Configures the project in SOURCE, builds it in BUILD, with these flags for RelWithDebInfo, and runs a program of it.

set(command "")
foreach(index RANGE 1 ${CMAKE_ARGC})
  if(DEFINED command_begins)
    list(APPEND command "${CMAKE_ARGV${index}}")
  elseif(CMAKE_ARGV${index} STREQUAL "--")
    set(command_begins TRUE)
  endif()
endforeach()
list(POP_FRONT command program)

execute_process(
  COMMAND "${CMAKE_COMMAND}" -G "${GENERATOR}" -C "${CACHE}" -S "${SOURCE}" -B "${BUILD}"
    "-DCMAKE_CXX_FLAGS_RELWITHDEBINFO=${FLAGS}" COMMAND_ERROR_IS_FATAL ANY)
execute_process(COMMAND "${CMAKE_COMMAND}" --build "${BUILD}" COMMAND_ERROR_IS_FATAL ANY)
execute_process(COMMAND "${BUILD}/${program}" ${command} COMMAND_ERROR_IS_FATAL ANY)
