# SPDX-License-Identifier: Apache-2.0
#
# Tests the choice of architectures for CUDA kernels: this machine's devices, usual ones, or named ones.
# cmake -D MODULE=cmake/GradaccumCudaKernels.cmake -D WHERE=folder -P architectures.cmake

cmake_minimum_required(VERSION 3.25)
include("${MODULE}")

function(expect expected)
  gradaccum_cuda_architectures(found)
  if(NOT found STREQUAL expected)
    message(SEND_ERROR "the architectures must be ${expected}, got ${found}")
  endif()
endfunction()

# Two equal cards and two others; or a driver that finds none.
file(WRITE "${WHERE}/cards/nvidia-smi" "#!/bin/sh\nprintf '9.0\\n9.0\\n8.0\\n12.0\\n'\n")
file(WRITE "${WHERE}/none/nvidia-smi" "#!/bin/sh\necho 'No devices were found'\nexit 6\n")
file(CHMOD "${WHERE}/cards/nvidia-smi" "${WHERE}/none/nvidia-smi" PERMISSIONS OWNER_READ OWNER_WRITE OWNER_EXECUTE)
set(GRADACCUM_NVIDIA_SMI "${WHERE}/cards/nvidia-smi")
expect("80;90;120")
set(GRADACCUM_NVIDIA_SMI "${WHERE}/none/nvidia-smi")
expect("75;80;90;100")
set(GRADACCUM_CUDA_ARCHITECTURES "86;89")
expect("86;89")
