# SPDX-License-Identifier: Apache-2.0
#
# docs/architecture.md names files that exist, and all rooms.
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

file(GLOB rooms RELATIVE "${SOURCE}/include/gradaccum/detail" "${SOURCE}/include/gradaccum/detail/*")
foreach(room IN LISTS rooms)
  if(NOT IS_DIRECTORY "${SOURCE}/include/gradaccum/detail/${room}")
    message(SEND_ERROR "detail/${room} lies outside of all rooms")
  elseif(NOT page MATCHES "\n[|] `${room}` [|]")
    message(SEND_ERROR "docs/architecture.md says nothing of the room ${room}")
  endif()
endforeach()
