# SPDX-License-Identifier: Apache-2.0
#
# Installs gradaccum to WHERE/prefix and copies the examples to WHERE/copied_out, for the consumers to use.

file(REMOVE_RECURSE "${WHERE}/prefix" "${WHERE}/copied_out")
execute_process(COMMAND "${CMAKE_COMMAND}" --install "${BUILD}" --prefix "${WHERE}/prefix" COMMAND_ERROR_IS_FATAL ANY)
file(COPY "${SOURCE}/examples/" DESTINATION "${WHERE}/copied_out")
