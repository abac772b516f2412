# SPDX-License-Identifier: Apache-2.0
#
# Shared by the tests of a program EXAMPLE: runs it and checks its output.

# Sets status, output and errors.
function(run)
  execute_process(COMMAND "${EXAMPLE}" ${ARGN} RESULT_VARIABLE status OUTPUT_VARIABLE output ERROR_VARIABLE errors)
  return(PROPAGATE status output errors)
endfunction()

function(expect_match text regex)
  if(NOT text MATCHES "${regex}")
    message(FATAL_ERROR "expected a match of\n${regex}\nin\n${text}")
  endif()
endfunction()

# Expects one line on stderr with this part, and nothing on stdout.
function(expect_error expected_status part)
  run(${ARGN})
  string(FIND "${errors}" "${part}" position)
  if(NOT status EQUAL expected_status OR position EQUAL -1 OR NOT output STREQUAL "" OR NOT errors MATCHES "^[^\n]+\n$")
    message(FATAL_ERROR "${ARGN}: expected status ${expected_status} and one line with '${part}', "
                        "got ${status} and\n${errors}${output}")
  endif()
endfunction()
