// SPDX-License-Identifier: Apache-2.0

// Runs the library's kernels for devices, from the same source, on the host: one block after another, and the threads
// of a block in turn between its barriers.

#include "address_range.hpp"
#include "counts.hpp"
#include "emulated_cuda.hpp"
#include "graphs.hpp"
#include "streams.hpp"

#include <gradaccum/detail/kernels/device/launch.hpp>

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>
#include <vector>

#include <gradaccum/detail/kernels/on_device.hpp>

namespace gradaccum::detail {
namespace {

thread_local int thread_in_turn = 0;
int this_thread() { return thread_in_turn; }

template <class Block>
void run_blocks(const typename Block::Arguments& arguments, std::int64_t blocks, void* stream);

#include <gradaccum/detail/kernels/device/kernels.inl>

/// Converts a device's address to the host's; addresses of host memory, which tests may pass, stay.
template <class T>
void to_host(T*& pointer) {
  const auto& range = emulated_cuda::AddressRange::get();
  if (range.contains(pointer)) pointer = reinterpret_cast<T*>(range.host(pointer));
}

void to_host(DeviceMultiplier& by) {
  to_host(by.device_numerator);
  to_host(by.device_denominator);
  to_host(by.found_inf);
  to_host(by.skipped_steps);
}

void to_host(SteppedElements& tensor) {
  to_host(tensor.parameter);
  to_host(tensor.gradient);
  for (auto& array : tensor.state) to_host(array);
}

void to_host(SquaredTensor& tensor) { to_host(tensor.numbers); }

void to_host(AdafactorEntry& tensor) {
  to_host(tensor.gradient);
  for (auto* const array : {&tensor.parameter, &tensor.row_var, &tensor.col_var, &tensor.exp_avg, &tensor.memory})
    to_host(*array);
}

template <class Tensor, std::size_t capacity>
void to_host(Tensors<Tensor, capacity>& tensors) {
  for (std::int64_t i = 0; i < tensors.size; ++i) to_host(tensors.entries[static_cast<std::size_t>(i)]);
}

void to_host(AdafactorLaunch& launch) {
  to_host(launch.by);
  to_host(launch.tensors);
}

void to_host(StepLaunch& launch) {
  to_host(launch.by);
  to_host(launch.tensors);
}

void to_host(SquaresLaunch& launch) {
  to_host(launch.tensors);
  to_host(launch.partial_sums);
  to_host(launch.norms);
}

void to_host(WindowNormLaunch& launch) {
  to_host(launch.norms);
  to_host(launch.by);
  to_host(launch.result);
}

void to_host(ScaleLaunch& launch) {
  to_host(launch.found_inf);
  to_host(launch.from);
  to_host(launch.to);
}

/// Runs threads `[from, to)` of a block one after another, in alternating direction, because a device guarantees no
/// order.
template <class Block, class Run>
void in_turn(std::vector<Block>& threads, int from, int to, bool backwards, const Run& run) {
  for (int i = from; i < to; ++i) {
    thread_in_turn = backwards ? from + to - 1 - i : i;
    run(threads[static_cast<std::size_t>(thread_in_turn)]);
  }
}

/// Runs threads that wait for one another between phases.
template <class Block>
constexpr int threads_together() {
  if constexpr (requires { Block::warps_are_independent; }) return 32;
  return threads_of_block;
}

template <class Block, int... phases>
void run_block(const typename Block::Arguments& arguments, std::int64_t block, std::integer_sequence<int, phases...>) {
  static std::atomic<bool> backwards = false;
  const bool turned = backwards.exchange(!backwards);
  std::vector<Block> threads(threads_of_block);
  alignas(16) unsigned char memory[sizeof(typename Block::Shared)];
  std::memset(memory, 0xFF, sizeof(memory));  // uninitialized on a device
  auto& shared = *reinterpret_cast<typename Block::Shared*>(memory);
  in_turn(threads, 0, threads_of_block, turned, [&](Block& thread) { thread.begin(arguments, block, shared); });
  constexpr int together = threads_together<Block>();
  for (int first = 0; first < threads_of_block; first += together)
    for (int round = 0; round < Block::rounds; ++round)
      (in_turn(threads, first, first + together, turned,
               [&](Block& t) { t.template run_phase<phases>(round, shared); }),
       ...);
}

/// Runs from the last block to the first, because a device guarantees no order.
template <class Block>
void run_blocks(const typename Block::Arguments& of_device, std::int64_t blocks, void* /*stream*/) {
  if (blocks == 0) return;
  auto arguments = of_device;
  to_host(arguments);
  auto* const graph = emulated_cuda::Graph::capturing(emulated_cuda::current_device());
  const auto all = [arguments, blocks] {
    for (auto block = blocks - 1; block >= 0; --block)
      run_block<Block>(arguments, block, std::make_integer_sequence<int, Block::phases>());
  };
  emulated_cuda::count_launch();
  graph ? graph->record(all) : all();
}

}  // namespace
}  // namespace gradaccum::detail

const gradaccum::detail::DeviceKernels* emulated_cuda_kernels() { return &gradaccum::detail::all_kernels; }
