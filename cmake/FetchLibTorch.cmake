# SPDX-License-Identifier: Apache-2.0
#
# Fetches a pinned LibTorch by pip into a virtual environment of the build tree, if none is found. Only a project that
# is built from source does so; an installed gradaccum never fetches.

set(GRADACCUM_FETCH_TORCH ON CACHE STRING
  "Fetch LibTorch where none is found (ON), never (OFF), or unless one is named (FIRST)")
set(GRADACCUM_TORCH_VERSION ${GRADACCUM_LIBTORCH_NEWEST} CACHE STRING "The LibTorch to fetch where none is found")
set(GRADACCUM_TORCH_VENV "${CMAKE_BINARY_DIR}/_libtorch-${GRADACCUM_TORCH_VERSION}" CACHE PATH
  "The virtual environment that a fetched LibTorch goes to")

# Stops with a sentence that says why a fetch failed and what to do about it.
function(gradaccum_fetch_failed reason)
  message(FATAL_ERROR
    "gradaccum could not fetch LibTorch ${GRADACCUM_TORCH_VERSION}: ${reason}; or name a LibTorch that you have by "
    "-DCMAKE_PREFIX_PATH=<directory of LibTorch>.")
endfunction()

function(gradaccum_has_nvidia_driver result)
  find_program(GRADACCUM_NVIDIA_SMI nvidia-smi DOC "Shows whether this machine has an NVIDIA driver")
  mark_as_advanced(GRADACCUM_NVIDIA_SMI)
  set(${result} FALSE PARENT_SCOPE)
  if(GRADACCUM_NVIDIA_SMI OR EXISTS /proc/driver/nvidia/version OR EXISTS /usr/lib/wsl/lib/libcuda.so.1)
    set(${result} TRUE PARENT_SCOPE)
  endif()
endfunction()

# Finds the reason of a failure in pip's log.
function(gradaccum_pip_failure log python result)
  file(READ "${log}" text)
  set(see "see ${log}")
  if(text MATCHES "NewConnectionError|ConnectionError|NameResolutionError|ConnectTimeout|ReadTimeout|ProxyError|SSLError|Network is unreachable|Temporary failure in name resolution")
    set(reason "pip could not reach its package index, ${see}; check the network and configure again")
  elseif(text MATCHES "No space left on device")
    set(reason "the disk is full, ${see}; free some room and configure again")
  elseif(text MATCHES "DO NOT MATCH THE HASHES")
    set(reason "a package is not the pinned one, ${see}")
  elseif(text MATCHES "No matching distribution|not a supported wheel")
    execute_process(
      COMMAND "${python}" -c "import platform as p; print('Python', p.python_version(), 'on', p.system(), p.machine())"
      OUTPUT_VARIABLE platform OUTPUT_STRIP_TRAILING_WHITESPACE)
    set(reason "there is no wheel of it for ${platform}, ${see}; name another Python by -DPython3_EXECUTABLE=...")
  else()
    set(reason "pip failed, ${see}")
  endif()
  set(${result} "${reason}" PARENT_SCOPE)
endfunction()

# Sets `result` to the directory of the fetched LibTorch. Does nothing else if the environment is complete.
function(gradaccum_fetch_libtorch result)
  set(version "${GRADACCUM_TORCH_VERSION}")
  set(venv "${GRADACCUM_TORCH_VENV}")
  if(NOT GRADACCUM_FETCH_TORCH)
    message(FATAL_ERROR
      "gradaccum found no LibTorch ${GRADACCUM_LIBTORCH_OLDEST} to ${GRADACCUM_LIBTORCH_NEWEST}, and "
      "GRADACCUM_FETCH_TORCH is OFF: name one by -DCMAKE_PREFIX_PATH=<directory of LibTorch>.")
  endif()
  if(version VERSION_LESS GRADACCUM_LIBTORCH_OLDEST OR version VERSION_GREATER GRADACCUM_LIBTORCH_NEWEST)
    message(FATAL_ERROR
      "gradaccum cannot work with GRADACCUM_TORCH_VERSION=${version}: set it to a version from "
      "${GRADACCUM_LIBTORCH_OLDEST} to ${GRADACCUM_LIBTORCH_NEWEST}.")
  endif()

  # pip takes the wheel for the processor that is compiled for.
  set(into "")
  if(CMAKE_CROSSCOMPILING)
    set(into --target "${venv}/lib/python3.12/site-packages" --implementation cp --python-version 3.12)
    foreach(glibc IN ITEMS 2_28 2_27 2_26 2_25 2_17)
      list(APPEND into --platform "manylinux_${glibc}_${CMAKE_SYSTEM_PROCESSOR}")
    endforeach()
  endif()

  # With a driver, all dependencies of the wheel are installed; without one, three wheels are enough.
  set(driver FALSE)
  if(NOT CMAKE_CROSSCOMPILING)
    gradaccum_has_nvidia_driver(driver)
  endif()
  set(kind CPU)
  set(size "about 600 MB to download and 1.2 GB on disk")
  if(driver)
    set(kind CUDA)
    set(size "with its CUDA libraries several GB to download and on disk")
  endif()
  string(TOLOWER "libtorch-${version}-${kind}.txt" pinned)
  set(pinned "${CMAKE_CURRENT_FUNCTION_LIST_DIR}/${pinned}")
  if(EXISTS "${pinned}" AND CMAKE_SYSTEM_NAME STREQUAL "Linux")
    set(requirements --no-deps --require-hashes --requirement "${pinned}")
    file(SHA256 "${pinned}" hash)
    set(key "torch ${version}, ${kind} set, ${hash}")
  else()
    set(requirements "torch==${version}")
    set(key "torch ${version}, full set")
    set(size "with its CUDA libraries several GB to download and on disk")
  endif()

  # The stamp is written before pip runs, so that an incomplete environment is recognized and replaced, and gets its key
  # last. Build trees that share an environment wait for each other.
  set(stamp "${venv}/gradaccum-libtorch.stamp")
  get_filename_component(parent "${venv}" DIRECTORY)
  file(MAKE_DIRECTORY "${parent}")
  file(LOCK "${venv}.lock" GUARD FUNCTION)
  set(present "")
  if(EXISTS "${stamp}")
    file(READ "${stamp}" present)
  elseif(EXISTS "${venv}")
    file(GLOB content "${venv}/*")
    if(content)
      gradaccum_fetch_failed("GRADACCUM_TORCH_VENV=${venv} is a directory that gradaccum did not make; name a new one")
    endif()
  endif()

  if(NOT present STREQUAL key)
    find_program(GRADACCUM_PYTHON NAMES python3 python DOC "The Python that is asked for its torch")
    set(python "${GRADACCUM_PYTHON}")
    if(Python3_EXECUTABLE)
      set(python "${Python3_EXECUTABLE}")
    endif()
    if(NOT python)
      gradaccum_fetch_failed("there is no python3; install it with its venv module (Debian: python3 python3-venv)")
    endif()
    file(REMOVE_RECURSE "${venv}")
    file(WRITE "${stamp}" "incomplete")
    execute_process(COMMAND "${python}" -m venv "${venv}"
      RESULT_VARIABLE failed OUTPUT_FILE "${venv}.log" ERROR_FILE "${venv}.log")
    if(failed)
      gradaccum_fetch_failed(
        "${python} cannot make a virtual environment, see ${venv}.log; install its venv module (Debian: python3-venv)")
    endif()
    message(STATUS "gradaccum: fetching LibTorch ${version} by pip, ${size}: this takes a while")
    message(STATUS "gradaccum: it goes to ${venv}")
    set(python_of_venv "${venv}/bin/python")
    if(CMAKE_HOST_WIN32)
      set(python_of_venv "${venv}/Scripts/python.exe")
    endif()
    execute_process(
      COMMAND "${python_of_venv}" -m pip install --disable-pip-version-check --no-input --no-compile
              --only-binary :all: ${into} ${requirements}
      RESULT_VARIABLE failed OUTPUT_VARIABLE log ERROR_VARIABLE log ECHO_OUTPUT_VARIABLE ECHO_ERROR_VARIABLE)
    file(WRITE "${venv}.log" "${log}")
    if(failed)
      gradaccum_pip_failure("${venv}.log" "${python}" reason)
      gradaccum_fetch_failed("${reason}")
    endif()
    file(WRITE "${stamp}" "${key}")
  endif()

  gradaccum_libtorch_root("${venv}" root)
  if(NOT root)
    gradaccum_fetch_failed("${venv} has no LibTorch in it any more; remove that directory and configure again")
  endif()
  set(${result} "${root}" PARENT_SCOPE)
endfunction()
