# SPDX-License-Identifier: Apache-2.0
#
# cmake -D "PROGRAMS=path;..." -P equal.cmake: all programs must print the same, and something else with another seed.

set(first "")
foreach(program IN LISTS PROGRAMS)
  execute_process(COMMAND "${program}" COMMAND_ERROR_IS_FATAL ANY OUTPUT_VARIABLE text)
  if(first AND NOT text STREQUAL first)
    message(FATAL_ERROR "all programs must print ${first}but ${program} prints ${text}")
  endif()
  set(first "${text}")
endforeach()
list(GET PROGRAMS 0 program)
execute_process(COMMAND "${program}" "another seed" COMMAND_ERROR_IS_FATAL ANY OUTPUT_VARIABLE text)
if(text STREQUAL first)
  message(FATAL_ERROR "another seed must give another result, got ${text}")
endif()
