// SPDX-License-Identifier: Apache-2.0
//
// The kernels of CUDA devices. Compiled without contraction of products and sums, so that all is rounded as on a
// processor.

#include <gradaccum/detail/kernels/device/cuda_kernels.hpp>
#include <gradaccum/detail/kernels/operands.hpp>

#include <c10/util/BFloat16.h>
#include <c10/util/Exception.h>
#include <c10/util/Half.h>

#include <cuda_runtime_api.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <type_traits>
#include <utility>

namespace gradaccum::detail {
namespace {

__host__ __device__ inline int this_thread() {
#ifdef __CUDA_ARCH__
  return static_cast<int>(threadIdx.x);
#else
  return 0;  // where none of this is run
#endif
}

template <class Block, int... phases>
__device__ void run_round(Block& thread, int round, typename Block::Shared& shared,
                          std::integer_sequence<int, phases...>) {
  ((thread.template run<phases>(round, shared), __syncthreads()), ...);
}

template <class Block>
__global__ void __launch_bounds__(threads_of_block)
    block_of_threads(const __grid_constant__ typename Block::Arguments arguments) {
  __shared__ alignas(16) unsigned char memory[sizeof(typename Block::Shared)];  // which has no constructor to run
  auto& shared = *reinterpret_cast<typename Block::Shared*>(memory);
  Block thread;
  thread.begin(arguments, blockIdx.x, shared);
  __syncthreads();
  for (int round = 0; round < Block::rounds; ++round)
    run_round(thread, round, shared, std::make_integer_sequence<int, Block::phases>());
}

template <class Block>
void run_blocks(const typename Block::Arguments& arguments, std::int64_t blocks, void* stream) {
  static_assert(sizeof(arguments) <= 4096, "more than all devices take as a kernel's arguments");
  if (blocks == 0) return;
  void* all[] = {const_cast<typename Block::Arguments*>(&arguments)};
  const auto error =
      cudaLaunchKernel(reinterpret_cast<const void*>(block_of_threads<Block>), dim3(static_cast<unsigned>(blocks)),
                       dim3(threads_of_block), all, 0, static_cast<cudaStream_t>(stream));
  if (error == cudaSuccess) return;
  cudaGetLastError();  // which is said here, and not once more by whoever asks next
  const auto message = std::string("gradaccum: a CUDA kernel was not launched: ") + cudaGetErrorString(error);
  TORCH_CHECK_WITH(OutOfMemoryError, error != cudaErrorMemoryAllocation, message);
  TORCH_CHECK(error != cudaErrorNoKernelImageForDevice, message,
              "; configure with -DGRADACCUM_CUDA_ARCHITECTURES=... for this device");
  TORCH_CHECK(false, message);
}

#include <gradaccum/detail/kernels/device/kernels.inl>

bool is_capturing(void* stream) {
  auto status = cudaStreamCaptureStatusNone;
  if (cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &status) == cudaSuccess)
    return status != cudaStreamCaptureStatusNone;
  cudaGetLastError();  // of another stream that is, for which this one would have to wait
  return true;
}

std::string describe(int device) {
  cudaDeviceProp properties{};
  int driver = 0;
  cudaGetDeviceProperties(&properties, device);
  cudaDriverGetVersion(&driver);
  return std::string(properties.name) + ", driver of CUDA " + std::to_string(driver / 1000) + "." +
         std::to_string(driver % 1000 / 10);
}

}  // namespace

const DeviceKernels cuda_kernels{.describe = describe,
                                 .is_capturing = is_capturing,
                                 .sgd = run_sgd,
                                 .adam = run_adam,
                                 .adam8bit = run_adam8bit,
                                 .adafactor = run_adafactor,
                                 .l2_norms = run_l2_norms};

}  // namespace gradaccum::detail
