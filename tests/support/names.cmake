# SPDX-License-Identifier: Apache-2.0
#
# No two files of detail/ define a class, an enumeration or an alias of one name: programs include some of them together,
# and each by itself compiles.
# cmake -D INCLUDE=include -P names.cmake

cmake_minimum_required(VERSION 3.25)

cmake_path(ABSOLUTE_PATH INCLUDE)
file(GLOB_RECURSE files RELATIVE "${INCLUDE}/gradaccum" "${INCLUDE}/gradaccum/detail/*.hpp"
  "${INCLUDE}/gradaccum/detail/*.ipp" "${INCLUDE}/gradaccum/io/*.ipp")
set(number 0)
foreach(file IN LISTS files)
  file(STRINGS "${INCLUDE}/gradaccum/${file}" lines REGEX "^(class|struct|enum class|using) [A-Za-z0-9_]+( final)?( :.*)?( {| =)")
  foreach(line IN LISTS lines)
    string(REGEX REPLACE "^(class|struct|enum class|using) ([A-Za-z0-9_]+).*" "\\2" name "${line}")
    if(DEFINED "defined_in_${name}" AND NOT "${defined_in_${name}}" STREQUAL "${file}")
      message(SEND_ERROR "detail::${name} is defined in ${defined_in_${name}} and in ${file}: give one of them another name")
    endif()
    set("defined_in_${name}" "${file}")
    math(EXPR number "${number} + 1")
  endforeach()
endforeach()
if(number LESS 200)
  message(SEND_ERROR "detail/ defines ${number} names: does the test find them?")
endif()
