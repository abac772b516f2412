# SPDX-License-Identifier: Apache-2.0
#
# Steps that were recorded by save_steps.cpp and compiled by tools/compile_step.py, a folder for each LibTorch:
# `./bootstrap.sh oracle` writes them anew. They are built into the tests, and one is a library that can be loaded.

add_executable(save_steps EXCLUDE_FROM_ALL compiled_step/save_steps.cpp)
target_link_libraries(save_steps PRIVATE gradaccum::gradaccum)

set(steps "${CMAKE_CURRENT_SOURCE_DIR}/compiled_step/steps/${GRADACCUM_LIBTORCH_VERSION}")
if(EXISTS "${steps}")
  foreach(name perceptron convolutional transformer float16 bfloat16)
    if(EXISTS "${steps}/${name}") # save_steps is built before there is one
      gradaccum_compile_step(gradaccum.tests.compiled_step "${steps}/${name}")
    endif()
  endforeach()
  add_library(gradaccum.tests.step_library MODULE $<TARGET_OBJECTS:gradaccum.tests.compiled_step.perceptron>)
  target_link_libraries(gradaccum.tests.step_library PRIVATE gradaccum::libtorch)
  target_link_options(gradaccum.tests.step_library PRIVATE "$<$<CXX_COMPILER_ID:GNU>:-fopenmp>")
  target_compile_definitions(gradaccum.tests.compiled_step
    PRIVATE "STEP_LIBRARY=\"$<TARGET_FILE:gradaccum.tests.step_library>\"")
  add_dependencies(gradaccum.tests.compiled_step gradaccum.tests.step_library)
else() # a LibTorch of another version
  target_compile_definitions(gradaccum.tests.compiled_step PRIVATE "STEP_LIBRARY=\"\"")
endif()
