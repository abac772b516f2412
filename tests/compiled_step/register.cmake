# SPDX-License-Identifier: Apache-2.0
#
# cmake -D FOLDER=... -D "NAMES=..." -D MODULE=... -P register.cmake: writes FOLDER/<name>.registration.cpp for each of the steps
# FOLDER/<name>. MODULE: GradaccumCompileStep.cmake.

include("${MODULE}")
foreach(name IN LISTS NAMES)
  file(READ "${FOLDER}/${name}/manifest.json" manifest)
  gradaccum_step_registration("${manifest}" ${name} text)
  file(CONFIGURE OUTPUT "${FOLDER}/${name}.registration.cpp" CONTENT "${text}" @ONLY)
endforeach()
