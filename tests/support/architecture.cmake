# SPDX-License-Identifier: Apache-2.0
#
# Checks that docs/architecture.md names all modules, existing files, and functions that are in them.
# cmake -D SOURCE=. -P architecture.cmake
cmake_minimum_required(VERSION 3.25)

file(READ "${SOURCE}/docs/architecture.md" page)
string(REGEX MATCHALL "`[A-Za-z0-9_./]+([.](hpp|cmake)|/)`" files "${page}")
list(LENGTH files number)
if(number LESS 40)
  message(SEND_ERROR "docs/architecture.md names ${number} files: does the test find them?")
endif()
foreach(file IN LISTS files)
  string(REPLACE "`" "" file "${file}")
  if(NOT EXISTS "${SOURCE}/include/gradaccum/${file}" AND NOT EXISTS "${SOURCE}/${file}"
      AND NOT EXISTS "${SOURCE}/tests/support/${file}")
    message(SEND_ERROR "docs/architecture.md names ${file}, which is not there")
  endif()
endforeach()

# Rows of paths through the code: `function` | `file`.
string(REGEX MATCHALL "\n[|] [0-9]+ [|] `[A-Za-z_:]+` [|] `[A-Za-z0-9_./]+` [|]" steps "${page}")
list(LENGTH steps number)
if(number LESS 16)
  message(SEND_ERROR "docs/architecture.md has ${number} steps of paths: does the test find them?")
endif()
foreach(step IN LISTS steps)
  string(REGEX REPLACE "^.*[0-9]+ [|] `([A-Za-z_:]+)` [|] `([A-Za-z0-9_./]+)` [|]$" "\\1;\\2" step "${step}")
  list(GET step 0 function)
  list(GET step 1 file)
  file(READ "${SOURCE}/include/gradaccum/${file}" text)
  if(NOT text MATCHES "[ *&]${function}[(]")
    message(SEND_ERROR "docs/architecture.md: ${file} has no function ${function}")
  endif()
endforeach()

file(GLOB modules RELATIVE "${SOURCE}/include/gradaccum/detail" "${SOURCE}/include/gradaccum/detail/*")
foreach(module IN LISTS modules)
  if(NOT IS_DIRECTORY "${SOURCE}/include/gradaccum/detail/${module}")
    message(SEND_ERROR "detail/${module} lies outside of all modules")
  elseif(NOT page MATCHES "\n[|] `${module}` [|]")
    message(SEND_ERROR "docs/architecture.md says nothing of the module ${module}")
  endif()
endforeach()
