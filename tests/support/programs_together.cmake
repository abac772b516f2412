# SPDX-License-Identifier: Apache-2.0
#
# gradaccum_programs_together(text source...): sets `text` to one file of all sources, each in a namespace named after
# its path, a_b for a/b.cpp. Their includes come first, once, because they take most of a compilation.
function(gradaccum_programs_together result)
  set(includes "")
  set(body "")
  foreach(source IN LISTS ARGN)
    cmake_path(REMOVE_EXTENSION source OUTPUT_VARIABLE name)
    string(MAKE_C_IDENTIFIER "${name}" name)
    file(READ "${source}" text)
    string(REGEX MATCHALL "#include [^\n]*" lines "${text}")
    list(APPEND includes ${lines})
    string(REGEX REPLACE "#include [^\n]*" "" text "${text}")
    string(APPEND body "namespace ${name} {\n#line 1 \"${source}\"\n${text}}\n")
  endforeach()
  list(REMOVE_DUPLICATES includes)
  list(JOIN includes "\n" includes)
  set(${result} "${includes}\n${body}" PARENT_SCOPE)
endfunction()
