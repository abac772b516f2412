# SPDX-License-Identifier: Apache-2.0
#
# gradaccum_extract_snippets(programs documents source...) writes the code samples of the documentation to C++ files in
# the current build folder:
#   * in Markdown ```cpp blocks, and ```diff blocks as they are after the change;
#   * in headers the indented lines of documentation comments (///     code).
# A block with `int main` is a separate program, listed in `programs`. All other blocks of a source become functions of
# one file, after an include of tests/snippets/prelude.hpp, which declares the names that they use; `documents` lists
# these sources. Compilers report the lines of the source, not of these files.

# CMake's lists cannot hold brackets, semicolons, or backslashes at the end of a line, so code is encoded.
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

# Ends the block before `line_number`. Uses the caller's `block`, `name`, `identifier`, `base`, `functions`, `programs`
# and `count`.
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
