# SPDX-License-Identifier: Apache-2.0
#
# cmake -D PYTHON=... -D FOLDER=... -D SIZE=... -D "WHAT=argument of pip;..." -P fetch_packages.cmake
# Fetches packages without their dependencies to FOLDER, by the pip of PYTHON, unless it has them. FOLDER/complete.stamp
# is written last, and lists the content of the folder.

set(key "")
foreach(argument IN LISTS WHAT)
  if(EXISTS "${argument}") # a requirements file
    file(SHA256 "${argument}" argument)
  endif()
  string(APPEND key "${argument} ")
endforeach()
file(LOCK "${FOLDER}.lock") # because build trees share it
set(present "")
if(EXISTS "${FOLDER}/complete.stamp")
  file(READ "${FOLDER}/complete.stamp" present)
endif()
if(present STREQUAL key)
  return()
endif()
list(JOIN WHAT " " what)
message(STATUS "gradaccum: fetching ${what}, ${SIZE}, to ${FOLDER}")
file(REMOVE_RECURSE "${FOLDER}")
execute_process(
  COMMAND "${PYTHON}" -m pip install --quiet --disable-pip-version-check --no-input --no-compile --no-deps --retries 1
          --target "${FOLDER}" ${WHAT}
  RESULT_VARIABLE failed TIMEOUT 600)
if(failed)
  message(FATAL_ERROR "pip could not fetch ${what}; `./bootstrap.sh test` does without it")
endif()
file(WRITE "${FOLDER}/complete.stamp" "${key}")
