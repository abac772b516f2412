# SPDX-License-Identifier: Apache-2.0
#
# Installs gradaccum to WHERE/prefix, copies the examples to WHERE/copied_out, begins a program with a template there,
# and makes the archive WHERE/release.tar.gz of the files that git tracks, for the consumers to use.

file(REMOVE_RECURSE "${WHERE}/prefix" "${WHERE}/copied_out" "${WHERE}/release.tar.gz")
execute_process(COMMAND "${CMAKE_COMMAND}" --install "${BUILD}" --prefix "${WHERE}/prefix" COMMAND_ERROR_IS_FATAL ANY)
file(COPY "${SOURCE}/examples/" DESTINATION "${WHERE}/copied_out" PATTERN templates EXCLUDE)
execute_process(COMMAND "${CMAKE_COMMAND}" -E env "PYTHONPATH=${SOURCE}/python" python3 -m gradaccum.new
    "${WHERE}/copied_out/templates" --template ppo COMMAND_ERROR_IS_FATAL ANY)
execute_process(COMMAND git ls-files WORKING_DIRECTORY "${SOURCE}" OUTPUT_FILE "${WHERE}/tracked" RESULT_VARIABLE not_a_clone)
if(NOT not_a_clone)
  execute_process(COMMAND "${CMAKE_COMMAND}" -E tar czf "${WHERE}/release.tar.gz" "--files-from=${WHERE}/tracked"
    WORKING_DIRECTORY "${SOURCE}" COMMAND_ERROR_IS_FATAL ANY)
endif()
