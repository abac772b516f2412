// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/kernels/dynamic_map.hpp>
#include <gradaccum/detail/kernels/steps.hpp>

#include <c10/core/ScalarType.h>

#include <array>
#include <cstddef>
#include <cstdint>

#include <gradaccum/detail/kernels/on_device.hpp>

/// The arguments of device kernels. They are passed by value, so a launch neither copies to the device nor waits, and a
/// CUDA graph records them. CUDA compilers read this file, so it includes nothing from ATen.
namespace gradaccum::detail {

/// The limit for a kernel's arguments in bytes, with drivers of CUDA 12.1 and newer.
inline constexpr std::size_t most_argument_bytes = 32764;

inline constexpr int threads_of_block = 256;
/// The number of elements that a thread handles at a time, with as few instructions as their alignment allows.
inline constexpr int pack_size = 4;
/// The number of elements per block; the last block of a tensor may have fewer.
inline constexpr std::int64_t elements_of_block = 1 << 13;

/// The number of parts of `size` into which `count` is divided; the last may be smaller.
GRADACCUM_ON_DEVICE inline std::int64_t ceil_div(std::int64_t count, std::int64_t size) {
  return (count + size - 1) / size;
}
/// The number of blocks for `count` elements.
GRADACCUM_ON_DEVICE inline std::int64_t blocks_of_elements(std::int64_t count) {
  return ceil_div(count, elements_of_block);
}
/// The number of elements in the block that begins at element `first` of `count`.
GRADACCUM_ON_DEVICE inline std::int64_t elements_from(std::int64_t first, std::int64_t count) {
  return count - first < elements_of_block ? count - first : elements_of_block;
}

/// The tensors of one launch, whose thread blocks are numbered consecutively. `Of` has a kernel's data for a tensor,
/// and the number of its `blocks()`.
template <class Of, std::size_t most>
struct Tensors {
  using Entry = Of;
  static constexpr std::size_t capacity = most;

  std::int64_t size = 0, blocks = 0;
  std::array<std::int32_t, capacity> first_blocks;  ///< adjacent: a block that looks up its tensor finds them cached
  std::array<Entry, capacity> entries;

  bool full() const { return size == static_cast<std::int64_t>(capacity); }
  void add(const Entry& entry) {
    const auto place = static_cast<std::size_t>(size++);
    first_blocks[place] = static_cast<std::int32_t>(blocks);
    entries[place] = entry;
    blocks += entry.blocks();
  }
};

/// The factor of gradients, and the flag for skipping the step. Pointers refer to device memory or are null.
struct DeviceMultiplier {
  double numerator = 1, denominator = 1;
  const double *device_numerator = nullptr, *device_denominator = nullptr;
  const float* found_inf = nullptr;      ///< nonzero: the step is skipped
  const float* skipped_steps = nullptr;  ///< the number of skipped steps that the settings have counted
};

/// Elements [from, from + count) of a tensor to be stepped.
struct SteppedElements {
  void* parameter;  ///< this and the gradient start at `from`, states at element 0
  const void* gradient;
  std::array<void*, most_states> state;
  std::int64_t from, count;
  std::uint64_t rounding_key;

  GRADACCUM_ON_DEVICE std::int64_t blocks() const { return blocks_of_elements(count); }
};

struct StepLaunch {
  Plain settings;
  Plain numbers;  ///< made from the settings; the device recomputes them only if steps were skipped
  DeviceMultiplier by;
  DynamicTables maps[2];  ///< for 8-bit moments: for signed numbers, and for second moments
  Tensors<SteppedElements, 400> tensors;
};

/// The division of a tensor among Adafactor's thread blocks, which pass over it several times. The division and the
/// order of all sums depend only on the tensor's shape.
///
/// A vector is divided like a matrix of 256 columns whose last row may be short. Large matrices are divided into tiles,
/// one per thread block; each small matrix belongs to a single thread.
class AdafactorShape {
  static constexpr int log_pack = 2, least_log_threads_of_row = 3, most_log_threads_of_row = 6;
  static_assert(pack_size == 1 << log_pack);

 public:
  static constexpr int rounds_of_tile = 16, packs_of_tile = rounds_of_tile * threads_of_block;
  static constexpr int most_rows_of_tile = packs_of_tile >> least_log_threads_of_row;
  static constexpr std::int64_t most_columns_of_tile = pack_size << most_log_threads_of_row;
  static constexpr std::int64_t most_elements_of_small = 64;
  /// The number of rows, or columns, whose averages one block computes; several threads add up the parts of a column.
  static constexpr int averages_of_rows = threads_of_block, averages_of_columns = 32;

  AdafactorShape() = default;
  static AdafactorShape of_vector(std::int64_t numel) { return {Kind::vector, 1, numel, most_columns_of_tile}; }
  static AdafactorShape of_matrices(std::int64_t numel, std::int64_t rows, std::int64_t columns) {
    const auto kind = rows * columns <= most_elements_of_small ? Kind::small : Kind::large;
    return {kind, numel / (rows * columns), rows, columns};
  }

  GRADACCUM_ON_DEVICE bool is_vector() const { return kind_ == Kind::vector; }
  GRADACCUM_ON_DEVICE bool is_small() const { return kind_ == Kind::small; }
  GRADACCUM_ON_DEVICE bool is_large() const { return kind_ == Kind::large; }  ///< matrices that several threads share
  GRADACCUM_ON_DEVICE std::int64_t numel() const { return is_vector() ? lines_ : matrices_ * lines_ * columns_; }
  GRADACCUM_ON_DEVICE std::int64_t matrices() const { return matrices_; }
  GRADACCUM_ON_DEVICE std::int64_t rows() const {
    return is_vector() ? ceil_div(lines_, most_columns_of_tile) : lines_;
  }
  GRADACCUM_ON_DEVICE std::int64_t columns() const { return columns_; }

  /// Returns the number of threads in a row of a tile, each with a pack of columns. A power of 2 avoids divisions.
  GRADACCUM_ON_DEVICE int threads_of_row() const { return 1 << log_threads_of_row_; }
  GRADACCUM_ON_DEVICE std::int64_t rows_of_tile() const { return packs_of_tile >> log_threads_of_row_; }
  GRADACCUM_ON_DEVICE std::int64_t row_tiles() const { return ceil_div(rows() << log_threads_of_row_, packs_of_tile); }
  GRADACCUM_ON_DEVICE std::int64_t columns_of_tile() const { return pack_size << log_threads_of_row_; }
  GRADACCUM_ON_DEVICE std::int64_t column_tiles() const {
    return (columns_ + columns_of_tile() - 1) >> (log_threads_of_row_ + log_pack);
  }
  GRADACCUM_ON_DEVICE std::int64_t blocks() const {
    return is_small() ? ceil_div(matrices_, threads_of_block) : matrices_ * row_tiles() * column_tiles();
  }

  /// Returns the number of thread blocks that update the averages of a large matrix: first its rows', then its
  /// columns'.
  GRADACCUM_ON_DEVICE std::int64_t blocks_of_rows() const { return ceil_div(rows(), averages_of_rows); }
  GRADACCUM_ON_DEVICE std::int64_t blocks_of_lines() const {
    return blocks_of_rows() + ceil_div(columns_, averages_of_columns);
  }
  GRADACCUM_ON_DEVICE std::int64_t blocks_of_averages() const { return is_large() ? matrices_ * blocks_of_lines() : 0; }

  /// Returns the number of sums of squares, in the state's type: for each row one per tile that it crosses, and
  /// likewise for each column. The first of them later become factors.
  GRADACCUM_ON_DEVICE std::int64_t row_sums() const { return is_vector() ? 0 : matrices_ * lines_ * column_tiles(); }
  GRADACCUM_ON_DEVICE std::int64_t column_sums() const { return is_vector() ? 0 : matrices_ * columns_ * row_tiles(); }

 private:
  enum class Kind : std::int32_t { vector, small, large };

  AdafactorShape(Kind kind, std::int64_t matrices, std::int64_t lines, std::int64_t columns)
      : kind_(kind), matrices_(matrices), lines_(lines), columns_(columns) {
    while (log_threads_of_row_ < most_log_threads_of_row && columns_of_tile() < columns) ++log_threads_of_row_;
  }

  Kind kind_ = Kind::vector;
  std::int32_t log_threads_of_row_ = least_log_threads_of_row;
  std::int64_t matrices_ = 0;
  std::int64_t lines_ = 0;  ///< rows; elements of a vector
  std::int64_t columns_ = 0;
};

/// Intermediate results that a step's kernels pass to the next ones in device memory.
struct AdafactorMemory {
  GRADACCUM_ON_DEVICE AdafactorMemory(const AdafactorShape& shape, void* memory)
      : step(static_cast<double*>(memory)),
        parameter_squares(step + 2),
        update_squares(parameter_squares + shape.blocks()),
        averages(update_squares + shape.blocks()),
        row_sums(averages + shape.blocks_of_averages()) {}

  static std::int64_t bytes(const AdafactorShape& shape, std::int64_t size_of_state) {
    const auto sums = (shape.row_sums() + shape.column_sums()) * size_of_state;
    return 8 * (2 + 2 * shape.blocks() + shape.blocks_of_averages() + ceil_div(sums, 8));
  }

  double* step;                                ///< `kept` and `step_size`
  double *parameter_squares, *update_squares;  ///< per block
  double* averages;                            ///< per block of them: the sum of its rows' averages
  void* row_sums;                              ///< followed by the columns' sums
};

struct AdafactorEntry {
  void* parameter;
  const void* gradient;
  void* row_var;  ///< the variance of a vector
  void* col_var;
  void* exp_avg;  ///< set for all tensors of a launch or for none
  void* memory;   ///< see AdafactorMemory
  AdafactorShape shape;
  std::uint64_t rounding_key;

  GRADACCUM_ON_DEVICE std::int64_t blocks() const { return shape.blocks(); }
};

/// The tensors of a launch, and the thread blocks that update averages.
struct AdafactorTable : Tensors<AdafactorEntry, 320> {
  std::int64_t averages = 0;
  std::array<std::int32_t, capacity> first_averages;

  void add(const AdafactorEntry& tensor) {
    first_averages[static_cast<std::size_t>(size)] = static_cast<std::int32_t>(averages);
    averages += tensor.shape.blocks_of_averages();
    Tensors::add(tensor);
  }
};

struct AdafactorLaunch {
  AdafactorSettings settings;
  DeviceMultiplier by;
  AdafactorTable tensors;
};

/// A tensor whose squares are summed. Its division does not depend on the others.
struct SquaredTensor {
  const void* numbers;
  std::int64_t numel;

  GRADACCUM_ON_DEVICE std::int64_t blocks() const { return blocks_of_elements(numel); }
};

/// Tensors of one dtype whose squares are summed. Partial sums have the numbers of their blocks.
struct SquaresLaunch {
  SquaresLaunch(double* of_blocks, double* of_tensors) : partial_sums(of_blocks), norms(of_tensors) {}

  double *partial_sums, *norms;  ///< for each block and for each tensor
  Tensors<SquaredTensor, 1600> tensors;
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
  DeviceMultiplier by;  ///< deferred factor of the gradients
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

/// The device kernels. Each function launches one or more kernels on `stream`, on its device, and does not wait.
struct DeviceKernels {
  using Step = void(const StepLaunch&, const OperandTypes&, void* stream);
  std::array<Step*, std::tuple_size_v<Steps>> steps;
  void (*adafactor)(const AdafactorLaunch&, const OperandTypes&, void* stream);
  void (*l2_norms)(const SquaresLaunch&, at::ScalarType dtype, void* stream);
  void (*window_norm)(const WindowNormLaunch&, void* stream);
  void (*update_scale)(const ScaleLaunch&, void* stream);
};

/// Defined in kernels.cu, which is part of `gradaccum::compiled` if CMake found a CUDA compiler.
extern const DeviceKernels cuda_kernels;

}  // namespace gradaccum::detail

#undef GRADACCUM_ON_DEVICE
#undef GRADACCUM_UNROLL
