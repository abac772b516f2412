# SPDX-License-Identifier: Apache-2.0
#
# Passes if PROGRAM compiles without its lines `… // error: <regex>`, and if with them each of those lines is reported,
# with that message.

cmake_path(GET PROGRAM STEM stem)
cmake_path(GET ARGUMENTS PARENT_PATH directory)
function(compile code name)
  file(WRITE "${directory}/${name}" "${code}")
  execute_process(COMMAND "${COMPILER}" "@${ARGUMENTS}" -fsyntax-only "${directory}/${name}"
    RESULT_VARIABLE status OUTPUT_VARIABLE output ERROR_VARIABLE output)
  set(status ${status} PARENT_SCOPE)
  set(output "${output}" PARENT_SCOPE)
endfunction()

file(READ "${PROGRAM}" text)
string(REGEX REPLACE "[^\n]*// error: [^\n]*" "" good "${text}")
compile("${good}" ${stem}.good.cpp)
if(NOT status EQUAL 0)
  message(FATAL_ERROR "${PROGRAM} must compile without its offending lines:\n${output}")
endif()

compile("${text}" ${stem}.bad.cpp)
set(offending 0)
set(number 0)
string(REPLACE ";" " " lines "${text}")
string(REPLACE "\n" ";" lines "${lines}")
foreach(line IN LISTS lines)
  math(EXPR number "${number} + 1")
  if(line MATCHES "// error: (.*)$")
    set(expected "${CMAKE_MATCH_1}")
    math(EXPR offending "${offending} + 1")
    if(NOT output MATCHES "${stem}\\.bad\\.cpp:${number}:" OR NOT output MATCHES "${expected}")
      message(FATAL_ERROR "expected an error on line ${number} that says '${expected}', got\n${output}")
    endif()
  endif()
endforeach()
if(offending EQUAL 0 OR status EQUAL 0)
  message(FATAL_ERROR "${PROGRAM} has ${offending} lines that must not compile; it compiled with status ${status}")
endif()
