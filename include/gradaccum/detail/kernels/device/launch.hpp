// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/kernels/device/adafactor_launch.hpp>
#include <gradaccum/detail/kernels/dynamic_tables.hpp>
#include <gradaccum/detail/kernels/numbers.hpp>

#include <c10/core/ScalarType.h>

#include <array>
#include <cstddef>
#include <cstdint>

#include <gradaccum/detail/kernels/on_device.hpp>

/// What is passed to a device's kernels, as their arguments: so a launch copies nothing to the device and waits for
/// nothing, and a CUDA graph keeps it. Known to a CUDA compiler, so it includes nothing of ATen.
namespace gradaccum::detail {

inline constexpr int threads_of_block = 256;
/// A block has so many elements of a tensor, or what is left of it.
inline constexpr std::int64_t elements_of_block = 1 << 13;

/// Of a tensor, or a part of it.
GRADACCUM_ON_DEVICE inline std::int64_t blocks_of_elements(std::int64_t count) {
  return (count + elements_of_block - 1) / elements_of_block;
}
/// Of the block that begins at the `first` of so many.
GRADACCUM_ON_DEVICE inline std::int64_t elements_from(std::int64_t first, std::int64_t count) {
  return count - first < elements_of_block ? count - first : elements_of_block;
}

/// Tensors that one launch goes over.
struct TensorTable {
  /// Elements [from, from + count) of a tensor.
  struct Entry {
    /// Parameter and gradient from there on; state of the whole. In the order of the kernel's operand, and dense.
    std::array<void*, 6> arrays;
    std::int64_t from, count;
    std::uint64_t rounding_key;
  };
  static constexpr std::size_t capacity = 400;

  std::int64_t size = 0, blocks = 0;
  FirstBlocks<capacity> first_blocks;
  std::array<Entry, capacity> entries;

  bool full() const { return size == static_cast<std::int64_t>(capacity); }
  void add(const std::array<void*, 6>& arrays, std::int64_t from, std::int64_t count, std::uint64_t rounding_key) {
    const auto place = static_cast<std::size_t>(size++);
    first_blocks[place] = static_cast<std::int32_t>(blocks);
    entries[place] = {arrays, from, count, rounding_key};
    blocks += blocks_of_elements(count);
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

GRADACCUM_ON_DEVICE inline AdamNumbers numbers_of(const Adam8bitSettings& by, double multiplier) {
  return numbers_of(by.adam, multiplier);
}

template <class Settings>
struct StepLaunch {
  using Numbers = decltype(numbers_of(Settings(), 1.0));

  StepLaunch(const Settings& settings_of_step, const DeviceMultiplier& multiplier)
      : settings(settings_of_step), numbers(numbers_of(settings_of_step, 1.0)), by(multiplier) {}

  Settings settings;
  Numbers numbers;  ///< of these settings, which a device makes anew only where steps were left out
  DeviceMultiplier by;
  TensorTable tensors;
};

struct AdafactorLaunch {
  AdafactorSettings settings;
  DeviceMultiplier by;
  AdafactorTable tensors;
};

/// Tensors of one dtype whose squares are summed. Partial sums are numbered as blocks are; how a tensor is cut does not
/// depend on the others.
struct SquaresLaunch {
  struct Entry {
    const void* numbers;
    std::int64_t numel;
  };
  static constexpr std::size_t capacity = 1600;

  SquaresLaunch(double* of_blocks, double* of_tensors) : partial_sums(of_blocks), norms(of_tensors) {}

  double *partial_sums, *norms;  ///< of each block, and of each tensor
  std::int64_t size = 0, blocks = 0;
  FirstBlocks<capacity> first_blocks;
  std::array<Entry, capacity> entries;

  bool full() const { return size == static_cast<std::int64_t>(capacity); }
  void add(const void* numbers, std::int64_t numel) {
    const auto place = static_cast<std::size_t>(size++);
    first_blocks[place] = static_cast<std::int32_t>(blocks);
    entries[place] = {numbers, numel};
    blocks += blocks_of_elements(numel);
  }
};

/// The norm of a window, and what follows from it, in a device's memory.
struct WindowNorm {
  double norm, clip_coefficient;
  float found_inf, unused;  ///< found_inf: 1 where a gradient is not finite
};

/// From the norms of tensors to that of the window.
struct WindowNormLaunch {
  const double* norms;
  std::int64_t count;
  DeviceMultiplier by;  ///< what gradients are yet to be multiplied by
  double max_norm;      ///< to which they are clipped
  WindowNorm* result;
};

/// A loss scale in a device's memory.
struct ScaleState {
  double wide;  ///< the same number as `value`
  float value;
  std::int32_t growth_tracker;
};

/// From one update of a loss scale to the next, as `torch.amp.GradScaler` has it.
struct ScaleLaunch {
  const float* found_inf;
  const ScaleState* from;
  ScaleState* to;
  double growth_factor, backoff_factor;
  std::int64_t growth_interval;
  float smallest;
};

/// The types of all tensors of a launch.
struct OperandTypes {
  at::ScalarType parameter, gradient;
  bool rounded;  ///< stochastically

  auto operator<=>(const OperandTypes&) const = default;
};

/// Kernels of devices. Each call launches one, or some, on `stream`, in whose device it is, and does not wait.
struct DeviceKernels {
  void (*sgd)(const StepLaunch<SgdSettings>&, const OperandTypes&, void* stream);
  void (*adam)(const StepLaunch<AdamSettings>&, const OperandTypes&, void* stream);
  void (*adam8bit)(const StepLaunch<Adam8bitSettings>&, const OperandTypes&, void* stream);
  void (*adafactor)(const AdafactorLaunch&, const OperandTypes&, void* stream);
  void (*l2_norms)(const SquaresLaunch&, at::ScalarType dtype, void* stream);
  void (*window_norm)(const WindowNormLaunch&, void* stream);
  void (*update_scale)(const ScaleLaunch&, void* stream);
};

}  // namespace gradaccum::detail

#undef GRADACCUM_ON_DEVICE
#undef GRADACCUM_UNROLL
