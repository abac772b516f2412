# SPDX-License-Identifier: Apache-2.0
#
# Adds kernels for CUDA devices to gradaccum::compiled. AUTO adds them if this machine has such a device, LibTorch has
# CUDA, and there is a CUDA compiler, 12.8 or newer, of the same major version. ON stops with an error if one of these
# is missing. nvcc is called by custom commands, so that the project does not need CMake's language CUDA.

set(GRADACCUM_CUDA AUTO CACHE STRING "Whether gradaccum::compiled has kernels for CUDA devices: AUTO, ON or OFF")
set_property(CACHE GRADACCUM_CUDA PROPERTY STRINGS AUTO ON OFF)
set(GRADACCUM_CUDA_ARCHITECTURES native CACHE STRING
  "The architectures that kernels for CUDA devices are compiled for (native: this machine's; where it has none, 75;80;90;100); newer ones get the last's, compiled when they load it")
set(GRADACCUM_OLDEST_NVCC 12.8)

# Sets `result` to the architectures of this machine's devices in CMake's form, such as 90; empty without a device.
function(gradaccum_native_architectures result)
  find_program(GRADACCUM_NVIDIA_SMI nvidia-smi DOC "Shows whether this machine has an NVIDIA driver")
  mark_as_advanced(GRADACCUM_NVIDIA_SMI)
  set(found "")
  if(GRADACCUM_NVIDIA_SMI)
    execute_process(COMMAND "${GRADACCUM_NVIDIA_SMI}" --query-gpu=compute_cap --format=csv,noheader
      OUTPUT_VARIABLE text ERROR_QUIET)
    string(REGEX MATCHALL "[0-9]+[.][0-9]" found "${text}")
    list(TRANSFORM found REPLACE "[.]" "")
    list(REMOVE_DUPLICATES found)
    list(SORT found COMPARE NATURAL)
  endif()
  set(${result} "${found}" PARENT_SCOPE)
endfunction()

# gradaccum_cuda_architectures(result): GRADACCUM_CUDA_ARCHITECTURES, with `native` replaced by numbers.
function(gradaccum_cuda_architectures result)
  set(architectures "${GRADACCUM_CUDA_ARCHITECTURES}")
  if(architectures STREQUAL "native")
    gradaccum_native_architectures(architectures)
    if(NOT architectures)
      set(architectures 75 80 90 100)
    endif()
  endif()
  set(${result} "${architectures}" PARENT_SCOPE)
endfunction()

# gradaccum_find_nvcc(nvcc version): the compiler and its version; `nvcc` is empty if it is missing or too old.
function(gradaccum_find_nvcc nvcc version)
  find_program(GRADACCUM_NVCC nvcc
    HINTS "${CUDAToolkit_ROOT}/bin" "$ENV{CUDAToolkit_ROOT}/bin" "$ENV{CUDA_HOME}/bin" "$ENV{CUDA_PATH}/bin"
    PATHS /usr/local/cuda/bin DOC "The CUDA compiler for gradaccum's kernels")
  mark_as_advanced(GRADACCUM_NVCC)
  set(${nvcc} "" PARENT_SCOPE)
  set(${version} "" PARENT_SCOPE)
  if(NOT GRADACCUM_NVCC)
    return()
  endif()
  execute_process(COMMAND "${GRADACCUM_NVCC}" --version OUTPUT_VARIABLE text ERROR_QUIET)
  if(text MATCHES "release ([0-9]+[.][0-9]+)")
    set(${version} "${CMAKE_MATCH_1}" PARENT_SCOPE)
    if(CMAKE_MATCH_1 VERSION_GREATER_EQUAL GRADACCUM_OLDEST_NVCC)
      file(REAL_PATH "${GRADACCUM_NVCC}" path) # its libraries are found relative to it
      if(NOT path MATCHES "/nvcc$") # a link to ccache
        set(path "${GRADACCUM_NVCC}")
      endif()
      set(${nvcc} "${path}" PARENT_SCOPE)
    endif()
  endif()
endfunction()

# gradaccum_nvcc_options(include result): the kernels' compiler flags. Without fused multiply-add, results are rounded
# as on the CPU.
function(gradaccum_nvcc_options include result)
  set(options -std=c++20 -O2 --expt-relaxed-constexpr --fmad=false "-I${include}")
  gradaccum_cuda_architectures(architectures)
  foreach(architecture IN LISTS architectures)
    list(APPEND options -gencode "arch=compute_${architecture},code=sm_${architecture}")
  endforeach()
  list(GET architectures -1 last)
  list(APPEND options -gencode "arch=compute_${last},code=compute_${last}")
  if(CMAKE_CXX_COMPILER_ID MATCHES "^(GNU|Clang)$")
    list(APPEND options -ccbin "${CMAKE_CXX_COMPILER}")
  endif()
  set(${result} ${options} PARENT_SCOPE)
endfunction()

# gradaccum_find_cudart(nvcc result): the toolkit's static runtime. Being static, it may differ from LibTorch's in its
# minor version; both use the device's primary context.
function(gradaccum_find_cudart nvcc result)
  cmake_path(GET nvcc PARENT_PATH bin)
  find_library(cudart libcudart_static.a NO_CACHE NO_DEFAULT_PATH
    PATHS "${bin}/../lib64" "${bin}/../targets/x86_64-linux/lib" "${bin}/../targets/sbsa-linux/lib" "${bin}/../lib")
  if(NOT cudart)
    set(cudart "")
  endif()
  set(${result} "${cudart}" PARENT_SCOPE)
endfunction()

# Sets `result` to nvcc's error for the headers that the kernels include, such as an unsupported host compiler, or to
# "". A success is remembered.
function(gradaccum_try_nvcc nvcc options result)
  set(${result} "" PARENT_SCOPE)
  get_target_property(libtorch gradaccum::libtorch INTERFACE_INCLUDE_DIRECTORIES)
  list(TRANSFORM libtorch PREPEND "-I")
  set(tried "${nvcc};${version};${CMAKE_CXX_COMPILER_VERSION};${options};${libtorch}")
  if(tried STREQUAL GRADACCUM_NVCC_TRIED)
    return()
  endif()
  set(source "${CMAKE_CURRENT_BINARY_DIR}/gradaccum_compiled/includes.cu")
  file(WRITE "${source}" "#include <gradaccum/detail/kernels/device/launch.hpp>
#include <gradaccum/detail/kernels/steps.hpp>
#include <c10/util/BFloat16.h>
#include <c10/util/Exception.h>
#include <c10/util/Half.h>
#include <cuda_runtime_api.h>
#include <cmath>
__global__ void empty() {}
")
  execute_process(COMMAND "${nvcc}" ${options} ${libtorch} -w -c "${source}" -o "${source}.o"
    RESULT_VARIABLE status OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(status EQUAL 0)
    set(GRADACCUM_NVCC_TRIED "${tried}" CACHE INTERNAL "With what nvcc has compiled the kernels' includes")
  else()
    string(STRIP "nvcc ${version} does not compile what they include: ${output}" said)
    set(${result} "${said}" PARENT_SCOPE)
  endif()
endfunction()

# gradaccum_missing_for_cuda_kernels(include result): the reason why kernels cannot be compiled, or "".
function(gradaccum_missing_for_cuda_kernels include result)
  gradaccum_find_nvcc(nvcc version)
  set(problem "")
  get_target_property(definitions gradaccum::libtorch INTERFACE_COMPILE_DEFINITIONS)
  string(FIND "${definitions}" GRADACCUM_LINKS_CUDA links_cuda)
  if(nvcc)
    gradaccum_find_cudart("${nvcc}" cudart)
  endif()
  if(CMAKE_CROSSCOMPILING)
    set(problem "this is compiled for another kind of machine")
  elseif(NOT GRADACCUM_CUDA_ARCHITECTURES)
    set(problem "GRADACCUM_CUDA_ARCHITECTURES names none")
  elseif(NOT nvcc AND version)
    set(problem "nvcc ${version} is older than ${GRADACCUM_OLDEST_NVCC}")
  elseif(NOT nvcc)
    set(problem "no nvcc was found; name the CUDA toolkit by -DCUDAToolkit_ROOT=...")
  elseif(GRADACCUM_LIBTORCH_CUDA AND GRADACCUM_LIBTORCH_CUDA_MAJOR
         AND NOT version MATCHES "^${GRADACCUM_LIBTORCH_CUDA_MAJOR}[.]")
    set(problem "nvcc ${version} is of another version than LibTorch's CUDA ${GRADACCUM_LIBTORCH_CUDA_MAJOR}")
  elseif(GRADACCUM_LIBTORCH_VERSION VERSION_LESS 2.11 AND GRADACCUM_LIBTORCH_VERSION
         AND links_cuda EQUAL -1)
    set(problem "with LibTorch ${GRADACCUM_LIBTORCH_VERSION} they need all of the CUDA toolkit's headers")
  elseif(NOT cudart)
    set(problem "there is no libcudart_static.a beside ${nvcc}")
  else()
    gradaccum_nvcc_options("${include}" options)
    gradaccum_try_nvcc("${nvcc}" "${options}" problem)
  endif()
  set(${result} "${problem}" PARENT_SCOPE)
endfunction()

# gradaccum_add_cuda_kernels(target include): adds the kernels to a library if GRADACCUM_CUDA asks for them.
function(gradaccum_add_cuda_kernels target include)
  if(NOT GRADACCUM_CUDA OR (GRADACCUM_CUDA STREQUAL "AUTO" AND NOT GRADACCUM_LIBTORCH_CUDA))
    return()
  endif()
  gradaccum_native_architectures(native)
  if(GRADACCUM_CUDA STREQUAL "AUTO" AND GRADACCUM_CUDA_ARCHITECTURES STREQUAL "native" AND NOT native)
    message(STATUS "gradaccum: this machine has no CUDA device, so no kernels are compiled for any: -DGRADACCUM_CUDA=ON asks for them.")
    return()
  endif()
  gradaccum_missing_for_cuda_kernels("${include}" problem)
  if(problem AND GRADACCUM_CUDA STREQUAL "AUTO")
    message(STATUS "gradaccum: on CUDA devices SGD, Adam and AdamW step by ATen's operations, and other optimizers of ga::optim not at all, because there are no kernels for them: ${problem}.")
    return()
  elseif(problem)
    message(FATAL_ERROR "gradaccum: GRADACCUM_CUDA is ON, and ${problem}.")
  endif()
  gradaccum_find_nvcc(nvcc version)
  gradaccum_nvcc_options("${include}" options)
  gradaccum_find_cudart("${nvcc}" cudart)

  set(source "${include}/gradaccum/detail/kernels/device/kernels.cu")
  set(object "${CMAKE_CURRENT_BINARY_DIR}/gradaccum_compiled/cuda_kernels.o")
  set(libtorch "$<TARGET_PROPERTY:gradaccum::libtorch,INTERFACE_INCLUDE_DIRECTORIES>")
  add_custom_command(OUTPUT "${object}" DEPENDS "${source}" "${nvcc}" DEPFILE "${object}.d"
    COMMAND "${nvcc}" ${options} "$<$<BOOL:${libtorch}>:-isystem;$<JOIN:${libtorch},;-isystem;>>" -w -Xcompiler -fPIC
      -MD -MF "${object}.d" -MT "${object}" -c "${source}" -o "${object}"
    COMMENT "Compiling gradaccum's kernels for CUDA devices" COMMAND_EXPAND_LISTS VERBATIM)
  set_source_files_properties("${object}" PROPERTIES EXTERNAL_OBJECT TRUE GENERATED TRUE)
  target_sources(${target} PRIVATE "${object}")
  target_compile_definitions(${target} PRIVATE GRADACCUM_CUDA_KERNELS)
  target_link_libraries(${target} PUBLIC "${cudart}" pthread ${CMAKE_DL_LIBS} rt)
  gradaccum_cuda_architectures(architectures)
  list(JOIN architectures ", " architectures)
  message(STATUS "gradaccum: kernels for CUDA devices of architecture ${architectures} by nvcc ${version} (GRADACCUM_CUDA_ARCHITECTURES)")
endfunction()
