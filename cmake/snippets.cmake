# SPDX-License-Identifier: Apache-2.0
#
# gradaccum_extract_snippets(result source...) turns every piece of code that the documentation shows into a program,
# in the current build folder, and gives the list of them:
#   * in Markdown ```cpp blocks, and of ```diff blocks what they end up as;
#   * in headers the indented lines of documentation comments (///     code).
# A block with `int main` is a program of its own. All other blocks of a file become functions of one program, behind
# tests/snippets/prelude.hpp, which declares what they take for granted.

# Lists cannot hold brackets and semicolons; code can.
function(gradaccum_snippet_lines file result)
  file(READ "${file}" text)
  string(REPLACE "[" "@OPEN@" text "${text}")
  string(REPLACE "]" "@CLOSE@" text "${text}")
  string(REPLACE ";" "@SEMICOLON@" text "${text}")
  string(REPLACE "\n" ";" text "${text}")
  set(${result} "${text}" PARENT_SCOPE)
endfunction()

function(gradaccum_write_snippets file text)
  string(REPLACE "@OPEN@" "[" text "${text}")
  string(REPLACE "@CLOSE@" "]" text "${text}")
  string(REPLACE "@SEMICOLON@" ";" text "${text}")
  file(CONFIGURE OUTPUT "${file}" CONTENT "@text@" @ONLY)  # rewritten only where it changed
endfunction()

# One block is done: `block`, `functions`, `calls`, `programs` and `count` are the caller's.
macro(gradaccum_finish_block)
  if(block MATCHES "int main\\(")
    gradaccum_write_snippets("${base}.program${count}.cpp" "${block}")
    list(APPEND programs "${base}.program${count}.cpp")
    math(EXPR count "${count} + 1")
  elseif(NOT block STREQUAL "")
    string(APPEND functions "\nvoid snippet_${line_number}() {  // ends on line ${line_number}\n${block}}\n")
    string(APPEND calls "  run(${line_number}, snippet_${line_number})@SEMICOLON@\n")
  endif()
  set(block "")
endmacro()

function(gradaccum_extract_snippets result)
  set(programs)
  foreach(source IN LISTS ARGN)
    set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${source}")
    cmake_path(RELATIVE_PATH source BASE_DIRECTORY "${PROJECT_SOURCE_DIR}" OUTPUT_VARIABLE name)
    string(MAKE_C_IDENTIFIER "${name}" base)
    set(base "${CMAKE_CURRENT_BINARY_DIR}/${base}")
    gradaccum_snippet_lines("${source}" lines)
    set(block "")
    set(functions "")
    set(calls "")
    set(language "")
    set(count 0)
    set(line_number 0)
    foreach(line IN LISTS lines)
      math(EXPR line_number "${line_number} + 1")
      if(source MATCHES "\\.hpp$")
        if(line MATCHES "^ *///     (.*)$")
          string(APPEND block "${CMAKE_MATCH_1}\n")
        elseif(NOT line MATCHES "^ *///$" OR block STREQUAL "")
          gradaccum_finish_block()
        endif()
      elseif(line MATCHES "^```(.*)$")
        set(language "${CMAKE_MATCH_1}")
        gradaccum_finish_block()
      elseif(language STREQUAL "cpp")
        string(APPEND block "${line}\n")
      elseif(language STREQUAL "diff" AND line MATCHES "^[+ ](.*)$")
        string(APPEND block "${CMAKE_MATCH_1}\n")
      endif()
    endforeach()
    if(functions)
      gradaccum_write_snippets("${base}.snippets.cpp"
        "#include \"snippets/prelude.hpp\"\n${functions}\nint main() {\n${calls}}\n")
      list(APPEND programs "${base}.snippets.cpp")
    endif()
  endforeach()
  set(${result} ${programs} PARENT_SCOPE)
endfunction()
