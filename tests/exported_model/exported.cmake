# SPDX-License-Identifier: Apache-2.0
#
# The tests of exported models. When they are built, the Python torch that contains LibTorch exports small models of
# transformers and trains them; their C++ is built into the tests. Needs compiled_step/steps.cmake before.

if(problem) # already printed there
  return()
endif()
set(names bert vit llama_bf16 own half)
set(architectures bert vit) # in float64
if(GRADACCUM_WEEKLY_TESTS) # each takes Python at least ten seconds
  list(APPEND names llama gpt2 bloom)
  list(APPEND architectures llama gpt2 bloom)
endif()
set(graphs_of_vit 0 1 2)
set(graphs_of_own 0 1 2)
set(folder "${CMAKE_CURRENT_BINARY_DIR}/exported")
set(outputs "")
foreach(name IN LISTS names)
  if(NOT DEFINED graphs_of_${name})
    set(graphs_of_${name} 0)
  endif()
  set(sources_of_${name} ${graphs_of_${name}})
  list(TRANSFORM sources_of_${name} PREPEND "${folder}/${name}.")
  list(TRANSFORM sources_of_${name} APPEND .cpp)
  list(APPEND outputs ${sources_of_${name}} "${folder}/${name}.registration.cpp")
endforeach()
add_custom_command(OUTPUT ${outputs}
  COMMAND "${CMAKE_COMMAND}" -E env "PYTHONPATH=${packages}" "CXX=${CMAKE_CXX_COMPILER}"
    "${python}" "${CMAKE_CURRENT_SOURCE_DIR}/exported_model/export_models.py" "${folder}" ${names}
  COMMAND "${CMAKE_COMMAND}" -D "FOLDER=${folder}" -D "NAMES=${names}"
    -D "MODULE=${PROJECT_SOURCE_DIR}/cmake/GradaccumCompileStep.cmake"
    -P "${CMAKE_CURRENT_SOURCE_DIR}/compiled_step/register.cmake"
  DEPENDS "${PROJECT_BINARY_DIR}/gradaccum.tests.packages.stamp" exported_model/export_models.py compiled_step/wheel.py compiled_step/register.cmake
    "${PROJECT_SOURCE_DIR}/python/gradaccum/compile_step.py" "${PROJECT_SOURCE_DIR}/python/gradaccum/export_model.py"
    "${PROJECT_SOURCE_DIR}/python/gradaccum/export.py" "${PROJECT_SOURCE_DIR}/python/gradaccum/python_state.py"
    "${PROJECT_SOURCE_DIR}/cmake/GradaccumCompileStep.cmake"
  COMMENT "Exporting models from Python"
  VERBATIM)
add_custom_target(gradaccum.tests.exports DEPENDS ${outputs})

gradaccum_add_tests(gradaccum.tests.exported_model exported_model. exported_model/exported_model.test.cpp)
list(JOIN architectures "\",\"" architectures)
target_compile_definitions(gradaccum.tests.exported_model PRIVATE "ARCHITECTURES=\"${architectures}\"" "EXPORTED=\"${folder}\"")
foreach(name IN LISTS names)
  gradaccum_add_step(gradaccum.tests.exported_model ${name} "${flags}" "${folder}/${name}.registration.cpp"
    ${sources_of_${name}})
  add_dependencies(gradaccum.tests.exported_model.${name} gradaccum.tests.exports)
endforeach()
add_dependencies(gradaccum.tests.exported_model gradaccum.tests.exports)
add_library(gradaccum.tests.exported_library MODULE $<TARGET_OBJECTS:gradaccum.tests.exported_model.bert>)
target_link_libraries(gradaccum.tests.exported_library PRIVATE gradaccum::libtorch)
target_link_options(gradaccum.tests.exported_library PRIVATE "$<$<CXX_COMPILER_ID:GNU>:-fopenmp>")
target_compile_definitions(gradaccum.tests.exported_model
  PRIVATE "EXPORTED_LIBRARY=\"$<TARGET_FILE:gradaccum.tests.exported_library>\"")
add_dependencies(gradaccum.tests.exported_model gradaccum.tests.exported_library)

# Python reads the weights that the tests saved.
set_tests_properties(exported_model.exported_model PROPERTIES FIXTURES_SETUP weights_of_exported_models)
add_test(NAME exported_model.read_by_python COMMAND "${CMAKE_COMMAND}" -E env "PYTHONPATH=${packages}"
  "CXX=${CMAKE_CXX_COMPILER}" "${python}" "${CMAKE_CURRENT_SOURCE_DIR}/exported_model/read_weights.py" "${folder}")
set_tests_properties(exported_model.read_by_python PROPERTIES FIXTURES_REQUIRED weights_of_exported_models)
if(NOT sanitized OR GRADACCUM_WEEKLY_TESTS) # runs only Python code
  add_test(NAME exported_model.export_modules COMMAND "${CMAKE_COMMAND}" -E env "PYTHONPATH=${packages}"
    "CXX=${CMAKE_CXX_COMPILER}" "${python}" "${CMAKE_CURRENT_SOURCE_DIR}/exported_model/export_modules.py")
  set_tests_properties(exported_model.export_modules PROPERTIES LABELS "exported_model;exports")
endif()
if(TARGET exported_model AND NOT sanitized)
  target_link_libraries(exported_model PRIVATE gradaccum::compiled) # header-only it takes a minute
  target_compile_options(exported_model PRIVATE "$<$<CONFIG:RelWithDebInfo>:-O0;-g0>") # the compiler takes most of its time here
  gradaccum_tests_need(exported_model exported_model gradaccum.tests.exported_library)
  add_test(NAME exported_model.example COMMAND "${CMAKE_COMMAND}" -E env "PYTHONPATH=${packages}" "${python}"
    "${CMAKE_CURRENT_SOURCE_DIR}/exported_model/example.py" $<TARGET_FILE:exported_model> "${folder}"
    $<TARGET_FILE:gradaccum.tests.exported_library>)
  set_tests_properties(exported_model.example PROPERTIES LABELS "exported_model;exports")
endif()
set_tests_properties(exported_model.read_by_python PROPERTIES LABELS "exported_model;exports")
