# SPDX-License-Identifier: Apache-2.0
#
# Builds compiled training steps into programs.

set(GRADACCUM_COMPILE_STEP_DIRECTORY "${CMAKE_CURRENT_LIST_DIR}" CACHE INTERNAL "Where gradaccum's CMake files are")

# Reads the value `name` from the manifest of a saved step.
function(gradaccum_value_of_step manifest name result)
  string(JSON value ERROR_VARIABLE problem GET "${manifest}" values "${name}")
  if(problem)
    message(FATAL_ERROR "gradaccum_compile_step: the manifest must have a value \"${name}\": compile the step again")
  endif()
  set(${result} "${value}" PARENT_SCOPE)
endfunction()

# gradaccum_compile_step(target folder [NAME name]): builds a step, which ga::save_step recorded and
# gradaccum-compile-step compiled, into a program, so that nothing is loaded at run time: ga::CompiledStep step(model, objective,
# ga::InProgram{"name"}). The default NAME is the folder's. Only the generated C++ and the manifest are read.
function(gradaccum_compile_step target folder)
  cmake_parse_arguments(PARSE_ARGV 2 arg "" "NAME" "")
  cmake_path(ABSOLUTE_PATH folder BASE_DIRECTORY "${CMAKE_CURRENT_SOURCE_DIR}" NORMALIZE)
  if(NOT arg_NAME)
    cmake_path(GET folder FILENAME arg_NAME)
  endif()
  if(NOT EXISTS "${folder}/manifest.json")
    message(FATAL_ERROR "gradaccum_compile_step: ${folder} has no manifest.json: ga::save_step writes one")
  endif()
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${folder}/manifest.json")
  file(READ "${folder}/manifest.json" manifest)
  gradaccum_value_of_step("${manifest}" graphs graphs)
  set(sources "")
  math(EXPR last "${graphs} - 1")
  foreach(number RANGE ${last})
    gradaccum_value_of_step("${manifest}" graph-${number}.code code)
    set(source "${folder}/graph-${number}.${code}.cpp")
    if(NOT code OR NOT EXISTS "${source}")
      message(FATAL_ERROR "gradaccum_compile_step: ${folder} has no compiled graph-${number}: run gradaccum-compile-step on it")
    endif()
    list(APPEND sources "${source}")
  endforeach()
  gradaccum_value_of_step("${manifest}" flags flags)
  separate_arguments(flags UNIX_COMMAND "${flags}")
  gradaccum_step_registration("${manifest}" "${arg_NAME}" text)
  set(registration "${CMAKE_CURRENT_BINARY_DIR}/${target}.${arg_NAME}.cpp")
  file(CONFIGURE OUTPUT "${registration}" CONTENT "${text}" @ONLY)
  gradaccum_add_step(${target} ${arg_NAME} "${flags}" "${registration}" ${sources})
endfunction()

# Generates the source that registers the step under its name in the program.
function(gradaccum_step_registration manifest name result)
  gradaccum_value_of_step("${manifest}" graphs graphs)
  set(declarations "")
  set(codes "")
  math(EXPR last "${graphs} - 1")
  foreach(number RANGE ${last})
    gradaccum_value_of_step("${manifest}" graph-${number}.code code)
    string(APPEND declarations "extern \"C\" void* const gradaccum_code_${code}[];\n")
    string(APPEND codes "{\"${code}\", gradaccum_code_${code}}, ")
  endforeach()
  set(${result} "#include <gradaccum/detail/compilation/step_description.hpp>\n\n${declarations}
[[maybe_unused]] static const bool added =
    gradaccum::detail::steps_in_program().insert_or_assign(\"${name}\", gradaccum::detail::StepInProgram{
R\"manifest(${manifest})manifest\", {${codes}}}).second;\n" PARENT_SCOPE)
endfunction()

# Builds the generated sources with their own flags, and the registration with the target's.
function(gradaccum_add_step target name flags registration)
  set(step "${target}.${name}")
  add_library(${step} OBJECT ${ARGN})
  target_link_libraries(${step} PRIVATE gradaccum::libtorch)
  if("${flags}" MATCHES "-DUSE_CUDA") # its kernels are launched by CUDA's driver
    find_package(CUDAToolkit REQUIRED)
    target_link_libraries(${step} PRIVATE CUDA::cudart CUDA::cuda_driver)
  endif()
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    target_link_options(${target} PRIVATE -fopenmp)
  else() # whose OpenMP runtime would be loaded in addition to LibTorch's
    list(REMOVE_ITEM flags -fopenmp -fno-tree-loop-vectorize)  # only g++ has the second
    target_include_directories(${step} BEFORE PRIVATE "${GRADACCUM_COMPILE_STEP_DIRECTORY}/without_openmp")
  endif()
  target_compile_options(${step} PRIVATE ${flags})
  set_target_properties(${step} PROPERTIES POSITION_INDEPENDENT_CODE ON)
  target_sources(${target} PRIVATE "${registration}")
  set_source_files_properties("${registration}" PROPERTIES SKIP_PRECOMPILE_HEADERS ON SKIP_UNITY_BUILD_INCLUSION ON)
  target_link_libraries(${target} PRIVATE ${step})
endfunction()
