// SPDX-License-Identifier: Apache-2.0
//
// The thread blocks of an Adafactor step. The step passes over a table of tensors several times: it sums squares,
// updates the averages, measures the updates, and then knows the step size. Vectors and small matrices do all but the
// last pass in the first. A pass may read what earlier ones left in memory; within a pass, no block waits for another.

/// The settings, with the step count corrected for skipped steps, which only the device may know.
GRADACCUM_ON_DEVICE inline AdafactorSettings settings_of(const AdafactorLaunch& launch) {
  if (!launch.by.skipped_steps) return launch.settings;
  return at_step(launch.settings, at_least(1, launch.settings.step - static_cast<double>(*launch.by.skipped_steps)));
}

/// Adds up 256 numbers, one per thread, in two phases: fold() leaves 16 numbers, and folded() adds those.
inline constexpr int numbers_of_fold = 16;
GRADACCUM_ON_DEVICE inline void fold(double* numbers) {
  if (this_thread() < numbers_of_fold)
    numbers[this_thread()] = sum_of(numbers, this_thread(), threads_of_block, numbers_of_fold);
}
GRADACCUM_ON_DEVICE inline double folded(const double* numbers) { return sum_of(numbers, 0, numbers_of_fold, 1); }

/// The part of a tensor that a thread block handles: a tile of a vector or large matrix, or several small matrices,
/// whose elements are divided among the threads like a vector's.
template <class S>
struct AdafactorTile : AdafactorEntry {
  AdafactorNumbers numbers;
  AdafactorMemory results;
  S *row_factors, *column_factors;               ///< initially sums of squares
  std::int64_t block;                            ///< index within the tensor
  std::int64_t matrix, first_row, first_column;  ///< rows and columns are counted over all matrices
  std::int64_t row_tile, column_tile;
  std::int64_t first, end, width;  ///< the first element, the tensor's end, and the distance of rows
  int rows, columns;               ///< of the tile within the matrix
  int threads_of_row;
  bool scales_parameter, skipped_steps;
};

/// Sets what the tile's tensor and block determine.
template <class S>
GRADACCUM_ON_DEVICE void place_tile(AdafactorTile<S>& tile) {
  const auto& shape = tile.shape;
  tile.results = AdafactorMemory(shape, tile.memory);
  tile.row_factors = static_cast<S*>(tile.results.row_sums);
  tile.column_factors = tile.row_factors + shape.row_sums();
  const auto block = static_cast<std::uint32_t>(tile.block);  // 32-bit divisions are faster on devices
  const auto row_tiles = static_cast<std::uint32_t>(shape.row_tiles());
  const auto column_tiles = static_cast<std::uint32_t>(shape.column_tiles());
  tile.matrix = block / column_tiles / row_tiles * (shape.is_small() ? std::int64_t{threads_of_block} : 1);
  tile.row_tile = block / column_tiles % row_tiles;
  tile.column_tile = block % column_tiles;
  const auto row = tile.row_tile * shape.rows_of_tile(), column = tile.column_tile * shape.columns_of_tile();
  tile.first_row = tile.matrix * shape.rows() + row;
  tile.first_column = tile.matrix * shape.columns() + column;
  tile.first = tile.first_row * shape.columns() + column;
  tile.end = shape.numel();
  tile.width = shape.columns();
  tile.rows = static_cast<int>(std::min(shape.rows() - row, shape.rows_of_tile()));
  tile.columns = static_cast<int>(std::min(shape.columns() - column, shape.columns_of_tile()));
  tile.threads_of_row = shape.threads_of_row();
  if (!shape.is_small()) return;
  const auto elements = std::min(tile.end - tile.first, threads_of_block * shape.rows() * shape.columns());
  tile.end = tile.first + elements;
  tile.width = tile.columns = pack_size * threads_of_block;
  tile.rows = static_cast<int>(ceil_div(elements, tile.width));
  tile.threads_of_row = threads_of_block;
}

/// The beginning of the passes over tiles.
struct AdafactorTileBlock {
  using Arguments = AdafactorLaunch;
  static constexpr int rounds = 1;

  /// Fills the tile for the whole block: its numbers in a thread of another warp, at the same time.
  template <class Shared>
  GRADACCUM_ON_DEVICE static void begin(const Arguments& launch, std::int64_t block, Shared& shared) {
    auto& tile = shared.tile;
    if (this_thread() == 32) {
      tile.numbers = numbers_of(settings_of(launch), product_of(launch.by));
      tile.scales_parameter = launch.settings.scale_parameter;
      tile.skipped_steps = leaves_out(launch.by);
    }
    if (this_thread() != 0) return;
    const auto place = place_of_block(launch.tensors.first_blocks, launch.tensors.size, block);
    static_cast<AdafactorEntry&>(tile) = launch.tensors.entries[place];
    tile.block = block - launch.tensors.first_blocks[place];
    place_tile(tile);
  }
};

/// A thread's packs in a tile, one below another in rounds. `of_vector`: of a vector or small matrices.
template <bool of_vector>
class AdafactorPacks {
 public:
  template <class S>
  GRADACCUM_ON_DEVICE explicit AdafactorPacks(const AdafactorTile<S>& tile)
      : row_(this_thread() / tile.threads_of_row),
        stride_(threads_of_block / tile.threads_of_row),
        column_(this_thread() % tile.threads_of_row * pack_size),
        of_row_(std::min(int{pack_size}, tile.columns - column_)),
        rounds_(of_row_ > 0 && row_ < tile.rows ? (tile.rows - row_ + stride_ - 1) / stride_ : 0),
        first_(tile.first + row_ * tile.width + column_),
        step_(stride_ * tile.width),
        end_(tile.end) {}

  GRADACCUM_ON_DEVICE int rounds() const { return rounds_; }
  GRADACCUM_ON_DEVICE int row(int round) const { return row_ + round * stride_; }  ///< within the tile
  GRADACCUM_ON_DEVICE int column() const { return column_; }                       ///< within the tile
  GRADACCUM_ON_DEVICE std::int64_t place(int round) const { return first_ + round * step_; }
  /// The number of elements in the pack, none after the last round. A vector may end before its last row does.
  GRADACCUM_ON_DEVICE int count(int round) const {
    if (round >= rounds_) return 0;
    if constexpr (!of_vector) return of_row_;
    const auto left = end_ - place(round);
    return left < of_row_ ? static_cast<int>(left) : of_row_;
  }

 private:
  int row_, stride_, column_, of_row_, rounds_;
  std::int64_t first_, step_, end_;
};

/// Calls `body(round, pack)` for all of a thread's packs of an array. Loads several packs ahead, as there are too few
/// threads to keep the memory busy with one each.
template <bool of_vector, class T, class Body>
GRADACCUM_ON_DEVICE void for_each_pack_of(const AdafactorPacks<of_vector>& packs, const T* array, const Body& body) {
  constexpr int ahead = 4;
  for (int first = 0; first < packs.rounds(); first += ahead) {
    AlignedPack<T> loaded[ahead];
    GRADACCUM_UNROLL
    for (int i = 0; i < ahead; ++i) loaded[i] = load_pack(array, packs.place(first + i), packs.count(first + i));
    GRADACCUM_UNROLL
    for (int i = 0; i < ahead; ++i)
      if (first + i < packs.rounds()) body(first + i, loaded[i]);
  }
}

/// The first pass: sums of squares, and for vectors and small matrices everything else up to the parameters.
template <class P, class G>
class AdafactorSumsBlock : public AdafactorTileBlock {
 public:
  using Vector = VectorOf<P>;
  using S = typename Vector::Scalar;
  using Tile = AdafactorTile<S>;
  static constexpr int phases = 3, blocks_together = sizeof(S) == 4 ? 4 : 1;

  struct Shared {
    Tile tile;
    S row_sums[AdafactorShape::rounds_of_tile][threads_of_block], column_sums[pack_size][threads_of_block];
    double parameter_squares[threads_of_block], update_squares[threads_of_block];
  };

  template <int phase>
  GRADACCUM_ON_DEVICE void run_phase(int /*round*/, Shared& shared) const {
    if (shared.tile.skipped_steps) return;
    if constexpr (phase == 0) sum(shared);
    if constexpr (phase == 1) join(shared);
    if (phase == 2 && this_thread() == 0) write(shared);
  }

 private:
  GRADACCUM_ON_DEVICE static void sum(Shared& shared) {
    const auto& tile = shared.tile;
    const bool large = tile.shape.is_large();
    shared.parameter_squares[this_thread()] = !tile.scales_parameter ? 0
                                              : large                ? squares_of_parameter<false>(tile)
                                                                     : squares_of_parameter<true>(tile);
    if (large) return sum_tile(shared);
    shared.update_squares[this_thread()] = tile.shape.is_vector() ? move_variance(tile) : move_small_matrix(tile);
  }

  /// Computes in float64, as on a processor.
  template <bool of_vector>
  GRADACCUM_ON_DEVICE static double squares_of_parameter(const Tile& tile) {
    auto sum = Doubles::all(0);
    for_each_pack_of(AdafactorPacks<of_vector>(tile), static_cast<const P*>(tile.parameter),
                     [&](int, const AlignedPack<P>& pack) {
                       GRADACCUM_UNROLL
                       for (int k = 0; k < pack_size; ++k) {
                         const auto number = Doubles::load(pack.numbers + k);
                         sum = multiply_add(number, number, sum);
                       }
                     });
    return sum.sum();
  }

  /// Sums the squares of the thread's part of each row, and of its columns.
  GRADACCUM_ON_DEVICE static void sum_tile(Shared& shared) {
    const AdafactorPacks<false> packs(shared.tile);
    const auto* const gradient = static_cast<const G*>(shared.tile.gradient);
    const AdafactorSquares<Vector> squares{Vector::all(shared.tile.numbers.multiplier)};
    S column_sums[pack_size] = {};
    for_each_pack_of(packs, gradient, [&](int round, const AlignedPack<G>& pack) {
      squares.sum = Vector::all(0);
      GRADACCUM_UNROLL
      for (int k = 0; k < pack_size; ++k) squares(pack.numbers + k, column_sums + k);
      squares.sum.store(&shared.row_sums[round][this_thread()]);
    });
    GRADACCUM_UNROLL
    for (int k = 0; k < pack_size; ++k) shared.column_sums[k][this_thread()] = column_sums[k];
  }

  /// Updates the variance and returns the sum of the squares of the update.
  GRADACCUM_ON_DEVICE static double move_variance(const Tile& tile) {
    const AdafactorPacks<true> packs(tile);
    const auto* const gradient = static_cast<const G*>(tile.gradient);
    auto* const variance = static_cast<S*>(tile.row_var);
    const AdafactorVariance<Vector> average(tile.numbers);
    const AdafactorUpdate<Vector, false> update(tile.numbers);
    auto sum = Vector::all(0);
    for (int round = 0; round < packs.rounds(); ++round) {
      const auto place = packs.place(round);
      const int count = packs.count(round);
      const auto gradients = load_pack(gradient, place, count);
      Pack<S*> variances(variance, place, count);
      GRADACCUM_UNROLL
      for (int k = 0; k < pack_size; ++k) {
        average(variances.element(k), gradients.numbers + k);
        const auto step = update(gradients.numbers + k, variances.element(k));
        if (k < count) sum = multiply_add(step, step, sum);
      }
    }
    return static_cast<double>(sum.sum());
  }

  /// Sums the squares of a row or column of a small matrix.
  GRADACCUM_ON_DEVICE static S squares_of_line(const G* gradient, std::int64_t count, std::int64_t stride,
                                               const Vector& multiplier) {
    const AdafactorSquares<Vector> squares{multiplier};
    S column_sum = 0;
    for (std::int64_t i = 0; i < count; ++i) squares(gradient + i * stride, &column_sum);
    return squares.sum.sum();
  }

  /// Updates the averages and computes the factors. Returns the sum of the squares of the update.
  GRADACCUM_ON_DEVICE static double move_small_matrix(const Tile& tile) {
    const auto matrix = tile.matrix + this_thread();
    if (matrix >= tile.shape.matrices()) return 0;
    const auto rows = tile.shape.rows(), columns = tile.shape.columns();
    const auto* const gradient = static_cast<const G*>(tile.gradient) + matrix * rows * columns;
    auto* const row_var = static_cast<S*>(tile.row_var) + matrix * rows;
    auto* const col_var = static_cast<S*>(tile.col_var) + matrix * columns;
    auto* const row_factors = tile.row_factors + matrix * rows;
    auto* const column_factors = tile.column_factors + matrix * columns;
    const AdafactorVariance<Vector> of_rows(tile.numbers, columns), of_columns(tile.numbers, rows);
    double mean = 0;
    for (std::int64_t i = 0; i < rows; ++i) {
      auto sum = squares_of_line(gradient + i * columns, columns, 1, of_rows.multiplier);
      of_rows(row_var + i, &sum);
      mean += static_cast<double>(row_var[i]);
    }
    for (std::int64_t i = 0; i < columns; ++i) {
      auto sum = squares_of_line(gradient + i, rows, columns, of_rows.multiplier);
      of_columns(col_var + i, &sum);
      AdafactorFactor<Vector>{Vector::all(1)}(col_var + i, column_factors + i);
    }
    mean = at_least(tile.numbers.least_mean, mean / static_cast<double>(rows));
    const AdafactorFactor<Vector> factor{Vector::all(-std::sqrt(mean))};
    AdafactorUpdate<Vector, true> update(tile.numbers);
    auto squares = Vector::all(0);
    for (std::int64_t i = 0; i < rows; ++i) {
      factor(row_var + i, row_factors + i);
      update.row = Vector::load(row_factors + i);
      for (std::int64_t k = 0; k < columns; ++k) {
        const auto step = update(gradient + i * columns + k, column_factors + k);
        squares = multiply_add(step, step, squares);
      }
    }
    return static_cast<double>(squares.sum());
  }

  GRADACCUM_ON_DEVICE static void join(Shared& shared) {
    fold(shared.parameter_squares);
    if (!shared.tile.shape.is_large()) return fold(shared.update_squares);
    join_rows(shared);
    join_columns(shared);
  }
  GRADACCUM_ON_DEVICE static void join_rows(const Shared& shared) {
    const auto& tile = shared.tile;
    const int packs = (tile.columns + pack_size - 1) / pack_size;
    auto* const sums = tile.row_factors + tile.column_tile * tile.shape.matrices() * tile.shape.rows() + tile.first_row;
    for (int row = this_thread(); row < tile.rows; row += threads_of_block)
      sums[row] = sum_of_row(&shared.row_sums[0][0] + row * tile.threads_of_row, packs, row % packs);
  }
  /// Starts at a different number than the neighbouring threads, to avoid bank conflicts.
  GRADACCUM_ON_DEVICE static S sum_of_row(const S* numbers, int count, int first) {
    S sum = 0;
    for (int i = first; i < count; ++i) sum += numbers[i];
    for (int i = 0; i < first; ++i) sum += numbers[i];
    return sum;
  }
  GRADACCUM_ON_DEVICE static void join_columns(const Shared& shared) {
    const auto& tile = shared.tile;
    const int column = this_thread();
    if (column >= tile.columns) return;
    S sum = 0;
    for (int i = column / pack_size; i < threads_of_block; i += tile.threads_of_row)
      sum += shared.column_sums[column % pack_size][i];
    const auto first = tile.row_tile * tile.shape.matrices() * tile.shape.columns() + tile.first_column;
    tile.column_factors[first + column] = sum;
  }

  GRADACCUM_ON_DEVICE static void write(const Shared& shared) {
    const auto& tile = shared.tile;
    tile.results.parameter_squares[tile.block] = folded(shared.parameter_squares);
    if (!tile.shape.is_large()) tile.results.update_squares[tile.block] = folded(shared.update_squares);
  }
};

/// Updates the averages of some rows or columns of a large matrix; several threads add up the parts of each.
template <class Vector>
class AdafactorAveragesBlock {
 public:
  using Arguments = AdafactorLaunch;
  using S = typename Vector::Scalar;
  static constexpr int rounds = 1, phases = 4;

  struct Shared {
    AdafactorNumbers numbers;
    S *sums, *averages;
    double* sum_of_averages;            ///< for rows
    std::int64_t count, parts, stride;  ///< number of lines; parts of a line's sum, and their distance
    std::int64_t elements;              ///< per line
    int lines;                          ///< per block
    double sums_of_threads[threads_of_block];
  };

  GRADACCUM_ON_DEVICE void begin(const Arguments& launch, std::int64_t block, Shared& shared) const {
    if (this_thread() != 0) return;
    const auto place = place_of_block(launch.tensors.first_averages, launch.tensors.size, block);
    const auto& tensor = launch.tensors.entries[place];
    const auto& shape = tensor.shape;
    const AdafactorMemory memory(shape, tensor.memory);
    shared.numbers = numbers_of(settings_of(launch), product_of(launch.by));
    const auto blocks_of_matrix = static_cast<std::uint32_t>(shape.blocks_of_lines());
    const auto of_tensor = static_cast<std::uint32_t>(block - launch.tensors.first_averages[place]);
    const std::int64_t matrix = of_tensor / blocks_of_matrix, of_matrix = of_tensor % blocks_of_matrix;
    const bool of_rows = of_matrix < shape.blocks_of_rows();
    const auto lines = of_rows ? shape.rows() : shape.columns();
    shared.elements = of_rows ? shape.columns() : shape.rows();
    shared.parts = of_rows ? shape.column_tiles() : shape.row_tiles();
    shared.lines = of_rows ? AdafactorShape::averages_of_rows : AdafactorShape::averages_of_columns;
    shared.stride = shape.matrices() * lines;
    const auto first = (of_rows ? of_matrix : of_matrix - shape.blocks_of_rows()) * shared.lines;
    shared.count = leaves_out(launch.by) ? 0 : lines - first;
    shared.sums = static_cast<S*>(memory.row_sums) + (of_rows ? 0 : shape.row_sums()) + matrix * lines + first;
    shared.averages = static_cast<S*>(of_rows ? tensor.row_var : tensor.col_var) + matrix * lines + first;
    shared.sum_of_averages = of_rows ? memory.averages + of_tensor : nullptr;
  }

  template <int phase>
  GRADACCUM_ON_DEVICE void run_phase(int /*round*/, Shared& shared) const {
    if (shared.count == 0) return;
    if constexpr (phase == 0) shared.sums_of_threads[this_thread()] = sum_of_parts(shared);
    if constexpr (phase == 1) move(shared);
    if (!shared.sum_of_averages) return;
    if constexpr (phase == 2) fold(shared.sums_of_threads);
    if (phase == 3 && this_thread() == 0) *shared.sum_of_averages = folded(shared.sums_of_threads);
  }

 private:
  GRADACCUM_ON_DEVICE static double sum_of_parts(const Shared& shared) {
    const int line = this_thread() % shared.lines;
    if (line >= shared.count) return 0;
    return sum_of(shared.sums + line, this_thread() / shared.lines * shared.stride, shared.parts * shared.stride,
                  threads_of_block / shared.lines * shared.stride);
  }

  /// Stores a row's average for the mean of all rows, and a column's factor in place of its first part.
  GRADACCUM_ON_DEVICE static void move(Shared& shared) {
    const int line = this_thread();
    if (line >= shared.lines || line >= shared.count) return;
    auto sum = static_cast<S>(sum_of(shared.sums_of_threads, line, threads_of_block, shared.lines));
    auto* const average = shared.averages + line;
    AdafactorVariance<Vector>(shared.numbers, shared.elements)(average, &sum);
    if (shared.sum_of_averages)
      shared.sums_of_threads[line] = static_cast<double>(*average);
    else
      AdafactorFactor<Vector>{Vector::all(1)}(average, shared.sums + line);
  }
};

/// The column factors of a thread's packs in a tile of a large matrix.
template <class S>
GRADACCUM_ON_DEVICE AlignedPack<S> column_factors_of(const AdafactorTile<S>& tile, const AdafactorPacks<false>& packs) {
  const S* const factors = tile.column_factors + tile.first_column;
  return load_pack(factors, packs.column(), tile.columns - packs.column());
}

/// Measures the updates of a large matrix's tile. The leftmost tiles also store the factors of their rows.
template <class Vector, class G>
class AdafactorUpdateBlock : public AdafactorTileBlock {
 public:
  using S = typename Vector::Scalar;
  static constexpr int phases = 6, blocks_together = sizeof(G) == 4 ? 5 : sizeof(G) == 2 ? 4 : 1;

  struct Shared {
    AdafactorTile<S> tile;
    double sums[threads_of_block];
    S row_factors[AdafactorShape::most_rows_of_tile];
  };

  template <int phase>
  GRADACCUM_ON_DEVICE void run_phase(int /*round*/, Shared& shared) const {
    const auto& tile = shared.tile;
    if (tile.skipped_steps || !tile.shape.is_large()) return;
    if constexpr (phase == 0)
      shared.sums[this_thread()] = sum_of(tile.results.averages + tile.matrix * tile.shape.blocks_of_lines(),
                                          this_thread(), tile.shape.blocks_of_rows(), threads_of_block);
    if constexpr (phase == 1 || phase == 4) fold(shared.sums);
    if constexpr (phase == 2) make_row_factors(shared);
    if constexpr (phase == 3) shared.sums[this_thread()] = update_squares(shared);
    if (phase == 5 && this_thread() == 0) tile.results.update_squares[tile.block] = folded(shared.sums);
  }

 private:
  GRADACCUM_ON_DEVICE static void make_row_factors(Shared& shared) {
    const auto& tile = shared.tile;
    const auto rows = static_cast<double>(tile.shape.rows());
    const auto mean = at_least(tile.numbers.least_mean, folded(shared.sums) / rows);
    const AdafactorFactor<Vector> factor{Vector::all(-std::sqrt(mean))};
    const auto* const row_var = static_cast<const S*>(tile.row_var) + tile.first_row;
    for (int row = this_thread(); row < tile.rows; row += threads_of_block) {
      factor(row_var + row, shared.row_factors + row);
      if (tile.column_tile == 0) tile.row_factors[tile.first_row + row] = shared.row_factors[row];
    }
  }

  GRADACCUM_ON_DEVICE static double update_squares(const Shared& shared) {
    const auto& tile = shared.tile;
    const AdafactorPacks<false> packs(tile);
    AdafactorUpdate<Vector, true> update(tile.numbers);
    const auto columns = column_factors_of(tile, packs);
    auto sum = Vector::all(0);
    for_each_pack_of(packs, static_cast<const G*>(tile.gradient), [&](int round, const AlignedPack<G>& gradients) {
      const int count = packs.count(round);
      update.row = Vector::load(shared.row_factors + packs.row(round));
      GRADACCUM_UNROLL
      for (int k = 0; k < pack_size; ++k) {
        const auto step = update(gradients.numbers + k, columns.numbers + k);
        if (k < count) sum = multiply_add(step, step, sum);
      }
    });
    return static_cast<double>(sum.sum());
  }
};

/// Computes a tensor's step size from all sums of squares.
class AdafactorStepSizeBlock {
 public:
  using Arguments = AdafactorLaunch;
  static constexpr int rounds = 1, phases = 2;

  struct Shared {
    double parameter_squares[threads_of_block], update_squares[threads_of_block];
  };

  GRADACCUM_ON_DEVICE void begin(const Arguments& launch, std::int64_t tensor, Shared& shared) {
    launch_ = &launch;
    tensor_ = &launch.tensors.entries[static_cast<std::size_t>(tensor)];
    if (leaves_out(launch.by)) return;
    const AdafactorMemory memory(tensor_->shape, tensor_->memory);
    const auto blocks = tensor_->shape.blocks();
    shared.parameter_squares[this_thread()] = sum_of(memory.parameter_squares, this_thread(), blocks, threads_of_block);
    shared.update_squares[this_thread()] = sum_of(memory.update_squares, this_thread(), blocks, threads_of_block);
  }

  template <int phase>
  GRADACCUM_ON_DEVICE void run_phase(int /*round*/, Shared& shared) const {
    if (leaves_out(launch_->by)) return;
    if constexpr (phase == 0) {
      fold(shared.parameter_squares);
      fold(shared.update_squares);
    } else if (this_thread() == 0) {
      AdafactorNumbers numbers{};
      set_step_size(numbers, settings_of(*launch_), static_cast<double>(tensor_->shape.numel()),
                    folded(shared.parameter_squares), folded(shared.update_squares));
      auto* const step = AdafactorMemory(tensor_->shape, tensor_->memory).step;
      step[0] = numbers.kept;
      step[1] = numbers.step_size;
    }
  }

 private:
  const AdafactorLaunch* launch_;
  const AdafactorEntry* tensor_;
};

/// The last pass: updates parameters and momentum.
template <class P, class G, bool rounded, bool momentum>
class AdafactorMoveBlock : public AdafactorTileBlock {
 public:
  using Vector = VectorOf<P>;
  using S = typename Vector::Scalar;
  using Tile = AdafactorTile<S>;
  static constexpr int phases = 1, blocks_together = sizeof(S) == 4 ? 3 : 1;

  struct Shared {
    Tile tile;
  };

  template <int phase>
  GRADACCUM_ON_DEVICE void run_phase(int /*round*/, Shared& shared) const {
    const auto& tile = shared.tile;
    if (tile.skipped_steps) return;
    if (tile.shape.is_vector()) return move_vector(tile);
    tile.shape.is_small() ? move_small(tile) : move_large(tile);
  }

 private:
  /// The factors of an element; for a vector -1 and the variance.
  struct Factors {
    S row, column;
  };

  GRADACCUM_ON_DEVICE static void move_vector(const Tile& tile) {
    const AdafactorPacks<true> packs(tile);
    const auto* const variance = static_cast<const S*>(tile.row_var);
    move<false>(tile, packs, [&](int round) {
      return [variances = load_pack(variance, packs.place(round), packs.count(round))](int k) {
        return Factors{-1, variances.numbers[k]};
      };
    });
  }

  GRADACCUM_ON_DEVICE static void move_large(const Tile& tile) {
    const AdafactorPacks<false> packs(tile);
    const S* const row_factors = tile.row_factors + tile.first_row;
    const auto columns = column_factors_of(tile, packs);
    move<true>(tile, packs, [&](int round) {
      const auto row = round < packs.rounds() ? row_factors[packs.row(round)] : S(0);
      return [&columns, row](int k) { return Factors{row, columns.numbers[k]}; };
    });
  }

  /// Handles packs of elements that may span rows and matrices.
  GRADACCUM_ON_DEVICE static void move_small(const Tile& tile) {
    const AdafactorPacks<true> packs(tile);
    const auto rows = static_cast<std::uint32_t>(tile.shape.rows());
    const auto columns = static_cast<std::uint32_t>(tile.shape.columns());
    const S* const row_factors = tile.row_factors + tile.first_row;
    const S* const column_factors = tile.column_factors + tile.first_column;
    move<true>(tile, packs, [&](int round) {
      const auto first = packs.place(round) - tile.first;
      return [&, first, count = packs.count(round)](int k) {
        const auto element = static_cast<std::uint32_t>(k < count ? first + k : 0), row = element / columns;
        return Factors{row_factors[row], column_factors[row / rows * columns + element % columns]};
      };
    });
  }

  /// Packs of all arrays, loaded on construction and written back on destruction.
  struct Packs {
    ParameterPack<P, rounded> parameters;
    Pack<const G*> gradients;
    Pack<S*> averages;
  };

  /// `factors_of(round)(k)` returns the factors of the k-th element of the round's pack.
  template <bool factored, bool of_vector, class FactorsOf>
  GRADACCUM_ON_DEVICE static void move(const Tile& tile, const AdafactorPacks<of_vector>& packs,
                                       const FactorsOf& factors_of) {
    const auto parameters = parameters_of<P, rounded>(tile);
    const auto* const gradient = static_cast<const G*>(tile.gradient);
    auto* const exp_avg = momentum ? static_cast<S*>(tile.exp_avg) : nullptr;
    auto numbers = tile.numbers;
    numbers.kept = tile.results.step[0];
    numbers.step_size = tile.results.step[1];
    const AdafactorApply<Vector, factored> of_tile(numbers);
    const auto packs_of = [&](int round) {
      const auto place = packs.place(round);
      const int count = packs.count(round);
      return Packs{{parameters, place, count}, {gradient, place, count}, {exp_avg, place, count}};
    };
    const auto move_packs = [&](Packs& of, int round) {
      auto apply = of_tile;
      const auto factors_of_pack = factors_of(round);
      GRADACCUM_UNROLL
      for (int k = 0; k < pack_size; ++k) {
        const auto factors = factors_of_pack(k);
        apply.update.row = Vector::load(&factors.row);
        apply(of.parameters.element(k), of.gradients.element(k), &factors.column,
              momentum ? of.averages.element(k) : nullptr);
      }
    };
    constexpr int ahead = momentum || of_vector ? 1 : 2;  // packs that are loaded at a time
    for (int round = 0; round < packs.rounds(); round += ahead) {
      auto first = packs_of(round);
      if constexpr (ahead == 1) {
        move_packs(first, round);
      } else {
        auto second = packs_of(round + 1);
        move_packs(first, round);
        move_packs(second, round + 1);
      }
    }
  }
};

/// Runs all passes; those for large matrices only if there are any.
template <class P, class G, bool rounded>
struct AdafactorPasses {
  static void run(const AdafactorLaunch& launch, void* stream) {
    const auto& tensors = launch.tensors;
    run_blocks<AdafactorSumsBlock<P, G>>(launch, tensors.blocks, stream);
    if (tensors.averages > 0) {
      run_blocks<AdafactorAveragesBlock<VectorOf<P>>>(launch, tensors.averages, stream);
      run_blocks<AdafactorUpdateBlock<VectorOf<P>, G>>(launch, tensors.blocks, stream);
    }
    run_blocks<AdafactorStepSizeBlock>(launch, tensors.size, stream);
    const bool momentum = tensors.size > 0 && tensors.entries[0].exp_avg;
    const auto move = momentum ? run_blocks<AdafactorMoveBlock<P, G, rounded, true>>
                               : run_blocks<AdafactorMoveBlock<P, G, rounded, false>>;
    move(launch, tensors.blocks, stream);
  }
};

inline void run_adafactor(const AdafactorLaunch& launch, const OperandTypes& types, void* stream) {
  using Function = void(const AdafactorLaunch&, void*);
  of_types<Function, AdafactorPasses>(types)(launch, stream);
}
