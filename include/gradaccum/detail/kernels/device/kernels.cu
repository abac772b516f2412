// SPDX-License-Identifier: Apache-2.0
// Defines the kernels for CUDA devices. Compiled without contraction to fused multiply-adds, to round as on the CPU.

#include <gradaccum/detail/kernels/device/launch.hpp>

#include <c10/util/BFloat16.h>
#include <c10/util/Exception.h>
#include <c10/util/Half.h>

#include <cuda_runtime_api.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <type_traits>
#include <utility>

#include <gradaccum/detail/kernels/on_device.hpp>

namespace gradaccum::detail {
namespace {

__host__ __device__ inline int this_thread() {
#ifdef __CUDA_ARCH__
  return static_cast<int>(threadIdx.x);
#else
  return 0;  // never executed on the host
#endif
}

/// Synchronises a block or warp between phases.
template <class Block>
__device__ void wait_for_others() {
  if constexpr (requires { Block::warps_are_independent; })
    __syncwarp();
  else
    __syncthreads();
}

template <class Block, int... phases>
__device__ void run_round(Block& thread, int round, typename Block::Shared& shared,
                          std::integer_sequence<int, phases...>) {
  ((thread.template run_phase<phases>(round, shared), wait_for_others<Block>()), ...);
}

/// The number of blocks that must fit into a multiprocessor together, which limits the registers of each; 0: the
/// compiler chooses both, and fewer registers than with 1.
template <class Block>
constexpr int blocks_together() {
  int blocks = 1;
  if constexpr (requires { Block::blocks_together; }) blocks = Block::blocks_together;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
  if (blocks > 1024 / threads_of_block) blocks = 1024 / threads_of_block;
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
  constexpr int most = requires { Block::warps_are_independent; } ? 2 : 3;  // or AdamW8bit keeps a number in memory
  if (blocks > most) blocks = most;
#endif
  return blocks;
}

template <class Block>
__global__ void __launch_bounds__(threads_of_block, blocks_together<Block>())
    block_of_threads(const __grid_constant__ typename Block::Arguments arguments) {
  __shared__ alignas(16) unsigned char memory[sizeof(typename Block::Shared)];  // avoids a constructor call
  auto& shared = *reinterpret_cast<typename Block::Shared*>(memory);
  Block thread;
  thread.begin(arguments, blockIdx.x, shared);
  __syncthreads();
  for (int round = 0; round < Block::rounds; ++round)
    run_round(thread, round, shared, std::make_integer_sequence<int, Block::phases>());
}

template <class Block>
void run_blocks(const typename Block::Arguments& arguments, std::int64_t blocks, void* stream) {
  static_assert(sizeof(arguments) <= most_argument_bytes);
  if (blocks == 0) return;
  void* all[] = {const_cast<typename Block::Arguments*>(&arguments)};
  const auto error =
      cudaLaunchKernel(reinterpret_cast<const void*>(block_of_threads<Block>), dim3(static_cast<unsigned>(blocks)),
                       dim3(threads_of_block), all, 0, static_cast<cudaStream_t>(stream));
  if (error == cudaSuccess) return;
  cudaGetLastError();  // clears the error, which is reported here, so that the next caller does not see it
  const auto message = std::string("gradaccum: a CUDA kernel was not launched: ") + cudaGetErrorString(error);
  TORCH_CHECK_WITH(OutOfMemoryError, error != cudaErrorMemoryAllocation, message);
  TORCH_CHECK(false, message,
              "; it needs a driver of CUDA 12.1 or newer and an architecture of GRADACCUM_CUDA_ARCHITECTURES; configured "
              "with -DGRADACCUM_CUDA=OFF, all is by ATen's operations");
}

#include <gradaccum/detail/kernels/device/kernels.inl>

}  // namespace

const DeviceKernels cuda_kernels = all_kernels;

}  // namespace gradaccum::detail
