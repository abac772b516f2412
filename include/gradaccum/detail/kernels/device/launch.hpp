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

/// The arguments of device kernels. As they are passed by value, a launch copies nothing to the device and waits for
/// nothing, and a CUDA graph records them. CUDA compilers read this file, so it includes nothing from ATen.
namespace gradaccum::detail {

inline constexpr int threads_of_block = 256;
/// The number of elements per block; the last block of a tensor may have fewer.
inline constexpr std::int64_t elements_of_block = 1 << 13;

/// The number of blocks for `count` elements.
GRADACCUM_ON_DEVICE inline std::int64_t blocks_of_elements(std::int64_t count) {
  return (count + elements_of_block - 1) / elements_of_block;
}
/// The number of elements in the block that begins at element `first` of `count`.
GRADACCUM_ON_DEVICE inline std::int64_t elements_from(std::int64_t first, std::int64_t count) {
  return count - first < elements_of_block ? count - first : elements_of_block;
}

/// The tensors of one launch.
struct TensorTable {
  /// Elements [from, from + count) of a tensor.
  struct Entry {
    /// Dense arrays in the order of the kernel's operand. Parameter and gradient start at `from`, states at element 0.
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

/// The factor of gradients, and the flag for skipping the step. Pointers refer to device memory or are null.
struct DeviceMultiplier {
  double numerator = 1, denominator = 1;
  const double *device_numerator = nullptr, *device_denominator = nullptr;
  const float* found_inf = nullptr;  ///< nonzero: the step is skipped
  const float* left_out = nullptr;   ///< the number of skipped steps that the settings have counted
};

/// Adam's settings together with the tables of the 8-bit codes, which are passed with each launch.
struct Adam8bitSettings {
  AdamSettings adam;
  DynamicTables maps[2];  ///< for signed numbers and for second moments
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
  Numbers numbers;  ///< made from `settings`; the device recomputes them only if steps were skipped
  DeviceMultiplier by;
  TensorTable tensors;
};

struct AdafactorLaunch {
  AdafactorSettings settings;
  DeviceMultiplier by;
  AdafactorTable tensors;
};

/// Tensors of one dtype whose squares are summed. Partial sums have the numbers of their blocks. The division of a
/// tensor does not depend on the others.
struct SquaresLaunch {
  struct Entry {
    const void* numbers;
    std::int64_t numel;
  };
  static constexpr std::size_t capacity = 1600;

  SquaresLaunch(double* of_blocks, double* of_tensors) : partial_sums(of_blocks), norms(of_tensors) {}

  double *partial_sums, *norms;  ///< for each block and for each tensor
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

/// The norm of a window and derived values, in device memory.
struct WindowNorm {
  double norm, clip_coefficient;
  float found_inf, unused;  ///< found_inf: 1 if a gradient is not finite
};

/// Computes a window's norm from the norms of its tensors.
struct WindowNormLaunch {
  const double* norms;
  std::int64_t count;
  DeviceMultiplier by;  ///< factor that gradients are still to be multiplied by
  double max_norm;      ///< the norm to which gradients are clipped
  WindowNorm* result;
};

/// A loss scale in device memory.
struct ScaleState {
  double wide;  ///< equal to `value`
  float value;
  std::int32_t growth_tracker;
};

/// One update of a loss scale, as in `torch.amp.GradScaler`.
struct ScaleLaunch {
  const float* found_inf;
  const ScaleState* from;
  ScaleState* to;
  double growth_factor, backoff_factor;
  std::int64_t growth_interval;
  float smallest;
};

/// The dtypes of all tensors in a launch.
struct OperandTypes {
  at::ScalarType parameter, gradient;
  bool rounded;  ///< stochastically

  auto operator<=>(const OperandTypes&) const = default;
};

/// The device kernels. Each function launches one or more kernels on `stream`, on its device, and does not wait.
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
