# SPDX-License-Identifier: Apache-2.0
#
# gradaccum_extract_snippets(programs documents source...) writes every piece of code that the documentation shows to
# C++ files in the current build folder:
#   * in Markdown ```cpp blocks, and of ```diff blocks what they end up as;
#   * in headers the indented lines of documentation comments (///     code).
# A block with `int main` is a program of its own: `programs` lists their files. All other blocks of a source become
# functions of one file, listed in `documents`, behind tests/snippets/prelude.hpp, which declares what they take for
# granted. Compilers name the source and its lines, not these files.

# Lists cannot hold brackets, semicolons and backslashes at the end of a line; code can.
function(gradaccum_snippet_lines file result)
  file(READ "${file}" text)
  string(REPLACE "\\" "@BACKSLASH@" text "${text}")
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
  string(REPLACE "@BACKSLASH@" "\\" text "${text}")
  file(CONFIGURE OUTPUT "${file}" CONTENT "@text@" @ONLY)  # rewritten only where it changed
endfunction()

# One block is done, the lines just before `line_number`: `block`, `name`, `identifier`, `base`, `functions`, `programs`
# and `count` are the caller's.
macro(gradaccum_finish_block)
  if(NOT block STREQUAL "")
    string(REGEX MATCHALL "\n" lines_of_block "${block}")
    list(LENGTH lines_of_block first_line)
    math(EXPR first_line "${line_number} - ${first_line}")
    string(PREPEND block "#line ${first_line} \"${name}\"\n")
  endif()
  if(block MATCHES "int main\\(")
    gradaccum_write_snippets("${base}.program${count}.cpp" "${block}")
    list(APPEND programs "${base}.program${count}.cpp")
    math(EXPR count "${count} + 1")
  elseif(NOT block STREQUAL "")
    set(function "${identifier}_${first_line}")
    string(APPEND functions "\nvoid ${function}() {\n${block}}\n"
      "static const bool ${function}_known = add_snippet(\"${name}\", ${first_line}, ${function})@SEMICOLON@\n")
  endif()
  set(block "")
endmacro()

function(gradaccum_extract_snippets programs_result documents_result)
  set(programs "")
  set(documents "")
  foreach(source IN LISTS ARGN)
    set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${source}")
    cmake_path(RELATIVE_PATH source BASE_DIRECTORY "${PROJECT_SOURCE_DIR}" OUTPUT_VARIABLE name)
    string(MAKE_C_IDENTIFIER "${name}" identifier)
    set(base "${CMAKE_CURRENT_BINARY_DIR}/${identifier}")
    gradaccum_snippet_lines("${source}" lines)
    set(block "")
    set(functions "")
    set(language "")
    set(count 0)
    set(line_number 0)
    foreach(line IN LISTS lines)
      math(EXPR line_number "${line_number} + 1")
      if(source MATCHES "\\.hpp$")
        if(line MATCHES "^ *///     (.*)$")
          string(APPEND block "${CMAKE_MATCH_1}\n")
        elseif(line MATCHES "^ *///$" AND NOT block STREQUAL "")
          string(APPEND block "\n")
        else()
          gradaccum_finish_block()
        endif()
      elseif(line MATCHES "^```(.*)$")
        set(language "${CMAKE_MATCH_1}")
        gradaccum_finish_block()
      elseif(language STREQUAL "cpp")
        string(APPEND block "${line}\n")
      elseif(language STREQUAL "diff" AND line MATCHES "^[+ ](.*)$")
        string(APPEND block "${CMAKE_MATCH_1}\n")
      elseif(language STREQUAL "diff")
        string(APPEND block "\n")
      endif()
    endforeach()
    if(functions)
      gradaccum_write_snippets("${base}.snippets.cpp" "#include \"snippets/prelude.hpp\"\n${functions}")
      list(APPEND documents "${name}")
    endif()
  endforeach()
  set(${programs_result} ${programs} PARENT_SCOPE)
  set(${documents_result} ${documents} PARENT_SCOPE)
endfunction()
