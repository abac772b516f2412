// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/kernels/numbers.hpp>
#include <gradaccum/detail/kernels/on_device.hpp>

#include <array>
#include <cstddef>
#include <cstdint>

/// What is passed to Adafactor's kernels of devices, which go over a tensor several times.
namespace gradaccum::detail {

/// How a tensor is cut among blocks of threads. It depends on its own shape alone, and so does the order of all sums.
///
/// A vector is cut like a matrix of 256 columns whose last row may be short. Matrices are cut into tiles, a block of
/// threads each; of small ones each is a single thread's.
class AdafactorShape {
 public:
  static constexpr std::int64_t threads = 256, pack = 4, rounds_of_tile = 16, most_columns_of_tile = 256;
  static constexpr std::int64_t most_rows_of_tile = 512;
  static constexpr std::int64_t most_elements_of_small = 64;
  /// Averages of so many rows, or columns, are a block's; of the columns several threads add up each's parts.
  static constexpr std::int64_t averages_of_rows = threads, averages_of_columns = 32;

  AdafactorShape() = default;
  static AdafactorShape of_vector(std::int64_t numel) {
    constexpr auto columns = most_columns_of_tile;
    return {Kind::vector, numel, (numel + columns - 1) / columns, columns};
  }
  static AdafactorShape of_matrices(std::int64_t numel, std::int64_t rows, std::int64_t columns) {
    return {rows * columns <= most_elements_of_small ? Kind::small : Kind::large, numel, rows, columns};
  }

  GRADACCUM_ON_DEVICE bool is_vector() const { return kind_ == Kind::vector; }
  GRADACCUM_ON_DEVICE bool is_small() const { return kind_ == Kind::small; }
  GRADACCUM_ON_DEVICE bool is_large() const { return kind_ == Kind::large; }  ///< matrices, of more than one thread
  GRADACCUM_ON_DEVICE std::int64_t numel() const { return numel_; }
  GRADACCUM_ON_DEVICE std::int64_t rows() const { return rows_; }
  GRADACCUM_ON_DEVICE std::int64_t columns() const { return columns_; }
  GRADACCUM_ON_DEVICE std::int64_t matrices() const { return is_vector() ? 1 : numel_ / (rows_ * columns_); }

  /// Threads that are side by side in a row of a tile, each with a pack of its columns: a power of 2.
  GRADACCUM_ON_DEVICE std::int64_t threads_of_row() const {
    std::int64_t count = threads * rounds_of_tile / most_rows_of_tile;
    while (count * pack < columns_ && count * pack < most_columns_of_tile) count *= 2;
    return count;
  }
  GRADACCUM_ON_DEVICE std::int64_t rows_of_tile() const { return rounds_of_tile * threads / threads_of_row(); }
  GRADACCUM_ON_DEVICE std::int64_t columns_of_tile() const { return pack * threads_of_row(); }
  GRADACCUM_ON_DEVICE std::int64_t row_tiles() const { return parts(rows_, rows_of_tile()); }
  GRADACCUM_ON_DEVICE std::int64_t column_tiles() const { return parts(columns_, columns_of_tile()); }
  GRADACCUM_ON_DEVICE std::int64_t blocks() const {
    return is_small() ? parts(matrices(), threads) : matrices() * row_tiles() * column_tiles();
  }

  /// Blocks of threads that move the averages of large matrices: of each first its rows', then its columns'.
  GRADACCUM_ON_DEVICE std::int64_t blocks_of_rows() const { return parts(rows_, averages_of_rows); }
  GRADACCUM_ON_DEVICE std::int64_t blocks_of_columns() const { return parts(columns_, averages_of_columns); }
  GRADACCUM_ON_DEVICE std::int64_t blocks_of_averages() const {
    return is_large() ? matrices() * (blocks_of_rows() + blocks_of_columns()) : 0;
  }

  /// Numbers of the state's type: sums of squares at first, for each row one of each tile beside it, for each column
  /// one of each tile below it. The first of them become factors.
  GRADACCUM_ON_DEVICE std::int64_t row_sums() const { return is_vector() ? 0 : matrices() * rows_ * column_tiles(); }
  GRADACCUM_ON_DEVICE std::int64_t column_sums() const { return is_vector() ? 0 : matrices() * columns_ * row_tiles(); }

 private:
  enum class Kind : std::int64_t { vector, small, large };

  AdafactorShape(Kind kind, std::int64_t numel, std::int64_t rows, std::int64_t columns)
      : kind_(kind), numel_(numel), rows_(rows), columns_(columns) {}
  GRADACCUM_ON_DEVICE static std::int64_t parts(std::int64_t all, std::int64_t of_part) {
    return (all + of_part - 1) / of_part;
  }

  Kind kind_;
  std::int64_t numel_, rows_, columns_;
};

/// What the kernels of a step leave for one another, in a device's memory.
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
  double *parameter_squares, *update_squares;  ///< of each block
  double* row_var_sums;                        ///< of each block of rows' averages
  void* row_sums;                              ///< and those of columns behind them

 private:
  GRADACCUM_ON_DEVICE static std::int64_t sums_of_row_var(const AdafactorShape& shape) {
    return shape.is_large() ? shape.matrices() * shape.blocks_of_rows() : 0;
  }
};

/// Tensors that one launch goes over. Thread blocks are numbered through all of them.
struct AdafactorTable {
  struct Entry {
    void* parameter;
    const void* gradient;
    void* row_var;  ///< of a vector its variance
    void *col_var, *exp_avg;
    void* memory;  ///< see AdafactorMemory
    AdafactorShape shape;
    std::uint64_t rounding_key;
    std::int64_t first_block, first_average;
  };
  /// As many as fit in the 4 KB that a kernel's arguments may have, with all that comes before.
  static constexpr std::size_t capacity = 37;

  std::int64_t size = 0, blocks = 0, averages = 0;
  std::array<Entry, capacity> entries;

  bool full() const { return size == static_cast<std::int64_t>(capacity); }
  void add(Entry entry) {
    entry.first_block = blocks;
    entry.first_average = averages;
    entries[static_cast<std::size_t>(size++)] = entry;
    blocks += entry.shape.blocks();
    averages += entry.shape.blocks_of_averages();
  }
};

}  // namespace gradaccum::detail
