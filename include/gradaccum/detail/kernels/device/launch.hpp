// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/kernels/device/adafactor_launch.hpp>
#include <gradaccum/detail/kernels/dynamic_tables.hpp>
#include <gradaccum/detail/kernels/numbers.hpp>

#include <c10/core/ScalarType.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

/// What is passed to a device's kernels, as their arguments: so a launch copies nothing to the device and waits for
/// nothing, and a CUDA graph keeps it. Known to a CUDA compiler, so it names nothing of ATen.
namespace gradaccum::detail {

/// Tensors that one launch goes over. Thread blocks are numbered through all of them.
struct TensorTable {
  struct Entry {
    std::array<void*, 6> arrays;  ///< parameter, gradient, state: in the order of the kernel's operand; dense
    std::int64_t numel;
    std::uint64_t rounding_key;
    std::int64_t first_block;
  };
  /// As many as fit in the 4 KB that a kernel's arguments may have, with all that comes before.
  static constexpr std::size_t capacity = 38;

  /// A thread block has so many elements of a tensor, or what is left of it.
  static constexpr std::int64_t elements_of_block = 1 << 13;

  std::int64_t size = 0, blocks = 0;
  std::array<Entry, capacity> entries;

  bool full() const { return size == static_cast<std::int64_t>(capacity); }
  void add(const std::array<void*, 6>& arrays, std::int64_t numel, std::uint64_t rounding_key = 0) {
    entries[static_cast<std::size_t>(size++)] = {arrays, numel, rounding_key, blocks};
    blocks += (numel + elements_of_block - 1) / elements_of_block;
  }
};

/// What gradients are multiplied by, and whether nothing is to move. The pointers are to a device's memory, or null.
struct DeviceMultiplier {
  double numerator = 1, denominator = 1;
  const double *device_numerator = nullptr, *device_denominator = nullptr;
  const float* found_inf = nullptr;  ///< not 0: the step is left out
  const float* left_out = nullptr;   ///< how many steps have been, that the settings count
};

/// With moments of 8 bits: what their codes stand for comes with the launch.
struct Adam8bitSettings {
  AdamSettings adam;
  DynamicTables maps[2];  ///< of signed numbers, and of second moments
};

template <class Settings>
struct StepLaunch {
  Settings settings;
  DeviceMultiplier by;
  TensorTable tensors;
};

struct AdafactorLaunch {
  AdafactorSettings settings;
  DeviceMultiplier by;
  AdafactorTable tensors;
};

/// Tensors of one dtype whose squares are summed. Blocks and partial sums are numbered through all of them; how a
/// tensor is cut does not depend on the others.
struct SquaresLaunch {
  struct Entry {
    const void* numbers;
    std::int64_t numel;
    std::int64_t first_block;
  };
  static constexpr std::size_t capacity = 160;
  static constexpr std::int64_t elements_of_block = TensorTable::elements_of_block;

  SquaresLaunch(double* of_blocks, double* of_tensors) : partial_sums(of_blocks), norms(of_tensors) {}

  double *partial_sums, *norms;  ///< of each block, and of each tensor
  std::int64_t size = 0, blocks = 0;
  std::array<Entry, capacity> entries;

  bool full() const { return size == static_cast<std::int64_t>(capacity); }
  void add(const void* numbers, std::int64_t numel) {
    entries[static_cast<std::size_t>(size++)] = {numbers, numel, blocks};
    blocks += (numel + elements_of_block - 1) / elements_of_block;
  }
};

/// The types of all tensors of a launch.
struct OperandTypes {
  at::ScalarType parameter, gradient;
  bool rounded;  ///< stochastically

  auto operator<=>(const OperandTypes&) const = default;
};

/// Kernels of devices. Each call launches one, or some, on `stream`, in whose device it is, and does not wait.
struct DeviceKernels {
  const char* name;
  std::string (*describe)(int device);  ///< the device and its driver
  void (*sgd)(const StepLaunch<SgdSettings>&, const OperandTypes&, void* stream);
  void (*adam)(const StepLaunch<AdamSettings>&, const OperandTypes&, void* stream);
  void (*adam8bit)(const StepLaunch<Adam8bitSettings>&, const OperandTypes&, void* stream);
  void (*adafactor)(const AdafactorLaunch&, const OperandTypes&, void* stream);
  void (*l2_norms)(const SquaresLaunch&, at::ScalarType dtype, void* stream);
};

}  // namespace gradaccum::detail
