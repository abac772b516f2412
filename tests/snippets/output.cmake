# SPDX-License-Identifier: Apache-2.0
#
# PROGRAM must print the first ```text block of README.
file(READ "${README}" text)
string(REGEX MATCH "```text\n([^`]*)```" block "${text}")
set(expected "${CMAKE_MATCH_1}")
execute_process(COMMAND "${PROGRAM}" OUTPUT_VARIABLE printed COMMAND_ERROR_IS_FATAL ANY)
if(expected STREQUAL "" OR NOT printed STREQUAL expected)
  message(FATAL_ERROR "README shows\n${expected}but its program prints\n${printed}")
endif()
