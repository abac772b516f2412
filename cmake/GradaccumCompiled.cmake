# SPDX-License-Identifier: Apache-2.0
#
# gradaccum::compiled, in place of gradaccum::gradaccum: the definitions of all headers compiled once, so that a program
# which includes the headers compiles in little more than LibTorch's own time.
#
# It is built in the build tree of the program that links with it, also with an installed gradaccum, because it needs
# that program's LibTorch, compiler and flags. It is not built if no target links with it.

include("${CMAKE_CURRENT_LIST_DIR}/GradaccumCudaKernels.cmake")

# gradaccum_add_compiled(include): `include` is the folder that contains gradaccum/.
function(gradaccum_add_compiled include)
  if(TARGET gradaccum_compiled)
    return()
  endif()
  file(GLOB_RECURSE definitions RELATIVE "${include}" CONFIGURE_DEPENDS "${include}/gradaccum/impl/*/*.ipp")
  if(NOT CMAKE_SYSTEM_NAME STREQUAL "Linux") # several processes are for Linux only
    list(FILTER definitions EXCLUDE REGEX "/(connections|data_parallel|heartbeat|process_group|rendezvous|replicas|sockets)[.]ipp$")
  endif()
  # Each file has several modules, because LibTorch's headers take as long to compile as three modules' definitions.
  set(parts
    "/impl/(kernels|optimizers)/"
    "/impl/(checkpoint|data|fitting|io|memory|state)/"
    "/impl/compilation/"
    "/impl/(training|policies|saving|verification|watching)/"
    ".") # the remaining modules
  set(sources "")
  set(number 0)
  foreach(part IN LISTS parts)
    math(EXPR number "${number} + 1")
    set(text "// The definitions of some modules of gradaccum.\n#include <gradaccum/detail/build/inline.hpp>\n")
    foreach(file IN LISTS definitions)
      if(file MATCHES "${part}")
        string(APPEND text "#include <${file}>\n")
        list(REMOVE_ITEM definitions "${file}")
      endif()
    endforeach()
    if(number EQUAL 1) # as compiled.hpp does
      set(mark "extern const char either_all_files_define_GRADACCUM_COMPILED_or_none = 0")
      string(APPEND text "namespace gradaccum::detail {\n${mark};\n}\n")
    endif()
    set(source "${CMAKE_CURRENT_BINARY_DIR}/gradaccum_compiled/${number}.cpp")
    file(CONFIGURE OUTPUT "${source}" CONTENT "${text}" @ONLY) # rewritten only where it changed
    list(APPEND sources "${source}")
  endforeach()

  add_library(gradaccum_compiled STATIC EXCLUDE_FROM_ALL ${sources})
  add_library(gradaccum::compiled ALIAS gradaccum_compiled)
  target_compile_definitions(gradaccum_compiled PUBLIC GRADACCUM_COMPILED)
  gradaccum_add_cuda_kernels(gradaccum_compiled "${include}") # first, so that its runtime precedes LibTorch's
  target_link_libraries(gradaccum_compiled PUBLIC gradaccum::gradaccum)
  set_target_properties(gradaccum_compiled PROPERTIES POSITION_INDEPENDENT_CODE ON)
  if(NOT PROJECT_NAME STREQUAL "gradaccum" OR NOT PROJECT_IS_TOP_LEVEL)
    target_compile_options(gradaccum_compiled PRIVATE -w) # programs get no warnings about this library
  endif()
endfunction()
