# SPDX-License-Identifier: Apache-2.0
#
# Passes if PROGRAMS, compiled together, compile without their lines `… // error: <regex>`, and if with them each of
# those lines is reported with its message when its program is compiled separately, so that no other error hides it.

cmake_minimum_required(VERSION 3.25)
include("${CMAKE_CURRENT_LIST_DIR}/../support/programs_together.cmake")

cmake_path(GET ARGUMENTS PARENT_PATH directory)
function(compile code name)
  file(WRITE "${directory}/${name}" "${code}")
  execute_process(COMMAND "${COMPILER}" "@${ARGUMENTS}" -fsyntax-only "${directory}/${name}"
    RESULT_VARIABLE status OUTPUT_VARIABLE output ERROR_VARIABLE output)
  set(status ${status} PARENT_SCOPE)
  set(output "${output}" PARENT_SCOPE)
endfunction()

gradaccum_programs_together(text ${PROGRAMS})
string(REPLACE "int main(" "void program(" text "${text}")
string(REGEX REPLACE "[^\n]*// error: [^\n]*" "" good "${text}")
compile("${good}" good.cpp)
if(NOT status EQUAL 0)
  message(FATAL_ERROR "the programs must compile without their offending lines:\n${output}")
endif()

foreach(program IN LISTS PROGRAMS)
  gradaccum_programs_together(text "${program}")
  compile("${text}" bad.cpp)
  cmake_path(GET program FILENAME file)
  file(READ "${program}" lines)
  string(REPLACE ";" " " lines "${lines}")
  string(REPLACE "\n" ";" lines "${lines}")
  set(number 0)
  set(offending 0)
  foreach(line IN LISTS lines)
    math(EXPR number "${number} + 1")
    if(line MATCHES "// error: (.*)$")
      set(expected "${CMAKE_MATCH_1}")
      math(EXPR offending "${offending} + 1")
      if(NOT output MATCHES "/${file}:${number}:" OR NOT output MATCHES "${expected}")
        message(FATAL_ERROR "${file} must have an error on line ${number} that says '${expected}', got\n${output}")
      endif()
    endif()
  endforeach()
  if(offending EQUAL 0 OR status EQUAL 0)
    message(FATAL_ERROR "${file} has ${offending} lines that must not compile; it compiled with status ${status}")
  endif()
endforeach()
