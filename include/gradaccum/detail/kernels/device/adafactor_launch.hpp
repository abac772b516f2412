// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/kernels/numbers.hpp>

#include <array>
#include <cstddef>
#include <cstdint>

#include <gradaccum/detail/kernels/on_device.hpp>

/// The arguments of Adafactor's device kernels, which pass over a tensor several times.
namespace gradaccum::detail {

/// The division of a tensor among thread blocks. It, and the order of all sums, depend only on the tensor's shape.
///
/// A vector is divided like a matrix of 256 columns whose last row may be short. Large matrices are divided into tiles,
/// one per thread block; each small matrix belongs to a single thread.
class AdafactorShape {
 public:
  static constexpr std::int64_t threads = 256, pack = 4, rounds_of_tile = 16;
  static constexpr std::int64_t most_columns_of_tile = 256, most_rows_of_tile = 512;
  static constexpr std::int64_t most_elements_of_small = 64;
  /// The number of rows, or columns, whose averages one block computes; several threads add up the parts of a column.
  static constexpr std::int64_t averages_of_rows = threads, averages_of_columns = 32;

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
  GRADACCUM_ON_DEVICE std::int64_t rows() const { return is_vector() ? parts(lines_, most_columns_of_tile) : lines_; }
  GRADACCUM_ON_DEVICE std::int64_t columns() const { return columns_; }

  /// The number of threads in a row of a tile, each with a pack of columns. A power of 2 avoids divisions.
  GRADACCUM_ON_DEVICE int threads_of_row() const { return 1 << log_threads_of_row_; }
  GRADACCUM_ON_DEVICE std::int64_t rows_of_tile() const { return rounds_of_tile * threads >> log_threads_of_row_; }
  GRADACCUM_ON_DEVICE std::int64_t row_tiles() const {
    return (rows() * threads_of_row() + rounds_of_tile * threads - 1) / (rounds_of_tile * threads);
  }
  GRADACCUM_ON_DEVICE std::int64_t columns_of_tile() const { return pack * threads_of_row(); }
  GRADACCUM_ON_DEVICE std::int64_t column_tiles() const {
    return (columns_ + columns_of_tile() - 1) >> (log_threads_of_row_ + log_pack);
  }
  GRADACCUM_ON_DEVICE std::int64_t blocks() const {
    return is_small() ? parts(matrices_, threads) : matrices_ * row_tiles() * column_tiles();
  }

  /// Thread blocks that update the averages of large matrices: for each matrix first its rows', then its columns'.
  GRADACCUM_ON_DEVICE std::int64_t blocks_of_rows() const { return parts(rows(), averages_of_rows); }
  GRADACCUM_ON_DEVICE std::int64_t blocks_of_columns() const { return parts(columns_, averages_of_columns); }
  GRADACCUM_ON_DEVICE std::int64_t blocks_of_averages() const {
    return is_large() ? matrices_ * (blocks_of_rows() + blocks_of_columns()) : 0;
  }

  /// The number of sums of squares, in the state's type: for each row one per tile beside it, for each column one per
  /// tile below it. The first of them later become factors.
  GRADACCUM_ON_DEVICE std::int64_t row_sums() const { return is_vector() ? 0 : matrices_ * lines_ * column_tiles(); }
  GRADACCUM_ON_DEVICE std::int64_t column_sums() const { return is_vector() ? 0 : matrices_ * columns_ * row_tiles(); }

 private:
  enum class Kind : std::int32_t { vector, small, large };
  static constexpr int log_pack = 2, least_log_threads_of_row = 3, most_log_threads_of_row = 6;
  static_assert(pack == 1 << log_pack && most_columns_of_tile == pack << most_log_threads_of_row &&
                most_rows_of_tile == rounds_of_tile * threads >> least_log_threads_of_row);

  AdafactorShape(Kind kind, std::int64_t matrices, std::int64_t lines, std::int64_t columns)
      : kind_(kind), matrices_(matrices), lines_(lines), columns_(columns) {
    while (log_threads_of_row_ < most_log_threads_of_row && columns_of_tile() < columns) ++log_threads_of_row_;
  }
  GRADACCUM_ON_DEVICE static std::int64_t parts(std::int64_t all, std::int64_t of_part) {
    return (all + of_part - 1) / of_part;
  }

  Kind kind_ = Kind::vector;
  std::int32_t log_threads_of_row_ = least_log_threads_of_row;
  std::int64_t matrices_ = 0;
  std::int64_t lines_ = 0;  ///< rows; elements of a vector
  std::int64_t columns_ = 0;
};

/// Intermediate results that the kernels of a step pass on in device memory.
struct AdafactorMemory {
  GRADACCUM_ON_DEVICE AdafactorMemory(const AdafactorShape& shape, void* memory)
      : step(static_cast<double*>(memory)),
        parameter_squares(step + 2),
        update_squares(parameter_squares + shape.blocks()),
        row_var_sums(update_squares + shape.blocks()),
        row_sums(row_var_sums + sums_of_row_var(shape)) {}

  static std::int64_t bytes(const AdafactorShape& shape, std::int64_t size_of_state) {
    const auto sums = (shape.row_sums() + shape.column_sums()) * size_of_state;
    return 8 * (2 + 2 * shape.blocks() + sums_of_row_var(shape)) + (sums + 7) / 8 * 8;
  }

  double* step;                                ///< `kept` and `step_size`
  double *parameter_squares, *update_squares;  ///< per block
  double* row_var_sums;                        ///< per block of rows' averages
  void* row_sums;                              ///< followed by the columns' sums

 private:
  GRADACCUM_ON_DEVICE static std::int64_t sums_of_row_var(const AdafactorShape& shape) {
    return shape.is_large() ? shape.matrices() * shape.blocks_of_rows() : 0;
  }
};

/// The limit for a kernel's arguments in bytes, with drivers of CUDA 12.1 and newer.
inline constexpr std::size_t most_argument_bytes = 32764;

/// The first thread block of each tensor in a launch, whose blocks are numbered consecutively. The numbers are adjacent
/// so that a block finds them in the device's cache when it looks up its tensor.
template <std::size_t capacity>
using FirstBlocks = std::array<std::int32_t, capacity>;

/// The tensors of one launch.
struct AdafactorTable {
  struct Entry {
    void* parameter;
    const void* gradient;
    void* row_var;  ///< the variance of a vector
    void* col_var;
    void* exp_avg;  ///< set for all tensors of a launch or for none
    void* memory;   ///< see AdafactorMemory
    AdafactorShape shape;
    std::uint64_t rounding_key;
  };
  static constexpr std::size_t capacity = 320;

  std::int64_t size = 0, blocks = 0, averages = 0;
  FirstBlocks<capacity> first_blocks, first_averages;
  std::array<Entry, capacity> entries;

  bool full() const { return size == static_cast<std::int64_t>(capacity); }
  void add(const Entry& entry) {
    const auto place = static_cast<std::size_t>(size++);
    first_blocks[place] = static_cast<std::int32_t>(blocks);
    first_averages[place] = static_cast<std::int32_t>(averages);
    entries[place] = entry;
    blocks += entry.shape.blocks();
    averages += entry.shape.blocks_of_averages();
  }
};

}  // namespace gradaccum::detail

#undef GRADACCUM_ON_DEVICE
#undef GRADACCUM_UNROLL
