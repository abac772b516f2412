// SPDX-License-Identifier: Apache-2.0
//
// The thread blocks of an Adafactor step. The step passes over a table of tensors several times: it sums squares,
// updates the averages, measures the updates, and then knows the step size. Vectors and small matrices do all but the
// last pass in the first. A pass may read what earlier ones left in memory; within a pass, no block waits for another.

static_assert(AdafactorShape::threads == threads_of_block && AdafactorShape::pack == pack_size);

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

inline constexpr int thread_of_numbers = 32;

/// The part of a tensor that a thread block handles: a tile of a vector or large matrix, or several small matrices.
struct AdafactorTile {
  AdafactorOperand of;
  AdafactorMemory memory;
  AdafactorShape shape;
  std::int64_t block;                ///< index within the tensor
  std::int64_t matrix, row, column;  ///< the first ones
  std::int64_t row_tile, column_tile;
  int rows;            ///< rows of the tile within the matrix
  int threads_of_row;  ///< threads per row of the tile
  bool skipped_steps;
};

/// Sets all but the numbers.
GRADACCUM_ON_DEVICE inline void set_operand(AdafactorOperand& o, const AdafactorTable::Entry& tensor,
                                            const AdafactorMemory& memory, std::size_t size_of_state) {
  const auto& shape = tensor.shape;
  o.parameter = tensor.parameter;
  o.gradient = tensor.gradient;
  (shape.is_vector() ? o.variance : o.row_var) = tensor.row_var;
  o.col_var = tensor.col_var;
  o.exp_avg = tensor.exp_avg;
  o.row_factors = memory.row_sums;
  o.column_factors =
      static_cast<unsigned char*>(memory.row_sums) + static_cast<std::size_t>(shape.row_sums()) * size_of_state;
  o.matrices = shape.matrices();
  o.rows = shape.rows();
  o.columns = shape.columns();
  o.rounding_key = tensor.rounding_key;
}

/// Computes the position of a tensor's `block`-th tile. 32-bit divisions are faster on devices.
GRADACCUM_ON_DEVICE inline void place_tile(AdafactorTile& tile, std::uint32_t block) {
  const auto& shape = tile.shape;
  const auto row_tiles = static_cast<std::uint32_t>(shape.row_tiles());
  const auto column_tiles = static_cast<std::uint32_t>(shape.column_tiles());
  tile.matrix = block / column_tiles / row_tiles;
  tile.row_tile = block / column_tiles % row_tiles;
  tile.column_tile = block % column_tiles;
  tile.row = tile.row_tile * shape.rows_of_tile();
  tile.column = tile.column_tile * shape.columns_of_tile();
  const auto rows = shape.rows() - tile.row;
  tile.rows = static_cast<int>(rows < shape.rows_of_tile() ? rows : shape.rows_of_tile());
  tile.threads_of_row = shape.threads_of_row();
}

/// Fills the tile for the whole block: its numbers in a thread of another warp, at the same time.
template <class S>
GRADACCUM_ON_DEVICE void begin_tile(const AdafactorLaunch& launch, std::int64_t block, AdafactorTile& tile) {
  if (this_thread() == thread_of_numbers) {
    tile.of.numbers = numbers_of(settings_of(launch), product_of(launch.by));
    tile.skipped_steps = leaves_out(launch.by);
  }
  if (this_thread() != 0) return;
  const auto place = place_of_block(launch.tensors.first_blocks, launch.tensors.size, block);
  const auto& tensor = launch.tensors.entries[place];
  const AdafactorMemory memory(tensor.shape, tensor.memory);
  set_operand(tile.of, tensor, memory, sizeof(S));
  tile.memory = memory;
  tile.shape = tensor.shape;
  tile.block = block - launch.tensors.first_blocks[place];
  tile.row_tile = tile.column_tile = tile.row = tile.column = 0;
  tile.matrix = tile.block * threads_of_block;
  if (tensor.shape.is_small()) return;
  place_tile(tile, static_cast<std::uint32_t>(tile.block));
}

inline constexpr int rounds_of_tile = AdafactorShape::rounds_of_tile;

/// A thread's packs in a tile, one below another in rounds.
template <bool of_vector>
class AdafactorPacks {
 public:
  GRADACCUM_ON_DEVICE explicit AdafactorPacks(const AdafactorTile& tile)
      : row_(this_thread() / tile.threads_of_row), stride_(threads_of_block / tile.threads_of_row) {
    const auto columns = tile.of.columns;
    column_ = tile.column + this_thread() % tile.threads_of_row * pack_size;
    first_ = (tile.matrix * tile.of.rows + tile.row + row_) * columns + column_;
    step_ = stride_ * columns;
    of_row_ = columns - column_ < pack_size ? static_cast<int>(columns - column_) : pack_size;
    numel_ = tile.shape.numel();
    rounds_ = of_row_ > 0 && row_ < tile.rows ? (tile.rows - row_ + stride_ - 1) / stride_ : 0;
  }

  GRADACCUM_ON_DEVICE int rounds() const { return rounds_; }
  GRADACCUM_ON_DEVICE int row(int round) const { return row_ + round * stride_; }  ///< within the tile
  GRADACCUM_ON_DEVICE std::int64_t column() const { return column_; }              ///< within the matrix
  GRADACCUM_ON_DEVICE std::int64_t place(int round) const { return first_ + round * step_; }
  /// The number of elements in the pack. A vector may end before its last row does.
  GRADACCUM_ON_DEVICE int count(int round) const {
    if constexpr (!of_vector) return of_row_;
    const auto left = numel_ - place(round);
    return left < of_row_ ? static_cast<int>(left) : of_row_;
  }

 private:
  int row_, stride_, rounds_, of_row_;
  std::int64_t column_, first_, step_, numel_;
};

/// Calls `body(round, pack)` for all of a thread's packs of an array. Loads several packs ahead, as there are too few
/// threads to keep the memory busy with one each.
template <bool of_vector, class T, class Body>
GRADACCUM_ON_DEVICE void for_each_pack_of(const AdafactorPacks<of_vector>& packs, const T* array, const Body& body) {
  constexpr int ahead = 4;
  for (int first = 0; first < packs.rounds(); first += ahead) {
    AlignedPack<T> loaded[ahead];
    GRADACCUM_UNROLL
    for (int i = 0; i < ahead; ++i)
      loaded[i] = load_pack(array, packs.place(first + i), first + i < packs.rounds() ? packs.count(first + i) : 0);
    GRADACCUM_UNROLL
    for (int i = 0; i < ahead; ++i)
      if (first + i < packs.rounds()) body(first + i, loaded[i]);
  }
}

/// All elements of consecutive small matrices.
struct AdafactorRange {
  GRADACCUM_ON_DEVICE explicit AdafactorRange(const AdafactorTile& tile)
      : first(tile.matrix * tile.of.rows * tile.of.columns) {
    const auto left = tile.of.matrices - tile.matrix;
    const int matrices = left < threads_of_block ? static_cast<int>(left) : threads_of_block;
    count = matrices * static_cast<int>(tile.of.rows * tile.of.columns);
  }
  std::int64_t first;
  int count;
};

/// The first pass: sums of squares, and for vectors and small matrices everything else up to the parameters.
template <class P, class G>
class AdafactorSumsBlock {
 public:
  using Arguments = AdafactorLaunch;
  using Vector = VectorOf<P>;
  using S = typename Vector::Scalar;
  static constexpr int rounds = 1, phases = 3, blocks_together = sizeof(S) == 4 ? 4 : 1;

  struct Shared {
    AdafactorTile tile;
    S row_sums[rounds_of_tile][threads_of_block], column_sums[pack_size][threads_of_block];
    double parameter_squares[threads_of_block], update_squares[threads_of_block];
  };

  GRADACCUM_ON_DEVICE void begin(const Arguments& launch, std::int64_t block, Shared& shared) {
    begin_tile<S>(launch, block, shared.tile);
    scales_parameter_ = launch.settings.scale_parameter;
  }

  template <int phase>
  GRADACCUM_ON_DEVICE void run(int /*round*/, Shared& shared) const {
    if (shared.tile.skipped_steps) return;
    if constexpr (phase == 0) sum(shared);
    if constexpr (phase == 1) join(shared);
    if constexpr (phase == 2) write(shared);
  }

 private:
  GRADACCUM_ON_DEVICE void sum(Shared& shared) const {
    const auto& tile = shared.tile;
    shared.parameter_squares[this_thread()] = scales_parameter_ ? squares_of_parameter(tile) : 0;
    if (tile.shape.is_large()) return sum_tile(shared);
    shared.update_squares[this_thread()] = tile.shape.is_vector() ? move_variance(tile) : move_small_matrix(tile);
  }

  /// Computes in float64, as on a processor.
  GRADACCUM_ON_DEVICE static Doubles squares_of(const AlignedPack<P>& pack, Doubles sum) {
    GRADACCUM_UNROLL
    for (int k = 0; k < pack_size; ++k) {
      const auto number = Doubles::load(pack.numbers + k);
      sum = multiply_add(number, number, sum);
    }
    return sum;
  }
  GRADACCUM_ON_DEVICE static double squares_of_parameter(const AdafactorTile& tile) {
    if (tile.shape.is_vector()) return squares_of_packs(tile, AdafactorPacks<true>(tile));
    if (tile.shape.is_large()) return squares_of_packs(tile, AdafactorPacks<false>(tile));
    const auto* const parameters = static_cast<const P*>(tile.of.parameter);
    const AdafactorRange range(tile);
    auto sum = Doubles::all(0);
    for (int i = pack_size * this_thread(); i < range.count; i += pack_size * threads_of_block)
      sum = squares_of(load_pack(parameters, range.first + i, range.count - i), sum);
    return sum.sum();
  }
  template <bool of_vector>
  GRADACCUM_ON_DEVICE static double squares_of_packs(const AdafactorTile& tile,
                                                     const AdafactorPacks<of_vector>& packs) {
    auto sum = Doubles::all(0);
    for_each_pack_of(packs, static_cast<const P*>(tile.of.parameter),
                     [&](int, const AlignedPack<P>& pack) { sum = squares_of(pack, sum); });
    return sum.sum();
  }

  /// Sums the squares of the thread's part of each row, and of its columns.
  GRADACCUM_ON_DEVICE static void sum_tile(Shared& shared) {
    const AdafactorPacks<false> packs(shared.tile);
    const auto* const gradient = static_cast<const G*>(shared.tile.of.gradient);
    const AdafactorSquares<Vector> squares{Vector::all(shared.tile.of.numbers.multiplier)};
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
  GRADACCUM_ON_DEVICE static double move_variance(const AdafactorTile& tile) {
    const AdafactorPacks<true> packs(tile);
    const auto* const gradient = static_cast<const G*>(tile.of.gradient);
    auto* const variance = static_cast<S*>(tile.of.variance);
    const AdafactorVariance<Vector> average(tile.of.numbers);
    const AdafactorUpdate<Vector, false> update(tile.of.numbers);
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
  GRADACCUM_ON_DEVICE static double move_small_matrix(const AdafactorTile& tile) {
    const auto& o = tile.of;
    const auto matrix = tile.matrix + this_thread();
    if (matrix >= o.matrices) return 0;
    const auto rows = o.rows, columns = o.columns;
    const auto* const gradient = static_cast<const G*>(o.gradient) + matrix * rows * columns;
    auto* const row_var = static_cast<S*>(o.row_var) + matrix * rows;
    auto* const col_var = static_cast<S*>(o.col_var) + matrix * columns;
    auto* const row_factors = static_cast<S*>(o.row_factors) + matrix * rows;
    auto* const column_factors = static_cast<S*>(o.column_factors) + matrix * columns;
    const AdafactorVariance<Vector> of_rows(o.numbers, columns), of_columns(o.numbers, rows);
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
    mean = at_least(o.numbers.least_mean, mean / static_cast<double>(rows));
    const AdafactorFactor<Vector> factor{Vector::all(-std::sqrt(mean))};
    AdafactorUpdate<Vector, true> update(o.numbers);
    auto squares = Vector::all(0);
    for (std::int64_t i = 0; i < rows; ++i) {
      factor(row_var + i, row_factors + i);
      update.scale.row = Vector::load(row_factors + i);
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
    const auto columns = tile.of.columns - tile.column;
    const int packs = columns < pack_size * tile.threads_of_row
                          ? static_cast<int>((columns + pack_size - 1) / pack_size)
                          : tile.threads_of_row;
    auto* const sums = static_cast<S*>(tile.of.row_factors) +
                       (tile.column_tile * tile.of.matrices + tile.matrix) * tile.of.rows + tile.row;
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
    if (column >= pack_size * tile.threads_of_row || column >= tile.of.columns - tile.column) return;
    S sum = 0;
    for (int i = column / pack_size; i < threads_of_block; i += tile.threads_of_row)
      sum += shared.column_sums[column % pack_size][i];
    const auto first = (tile.row_tile * tile.of.matrices + tile.matrix) * tile.of.columns + tile.column;
    static_cast<S*>(tile.of.column_factors)[first + column] = sum;
  }

  GRADACCUM_ON_DEVICE static void write(const Shared& shared) {
    if (this_thread() != 0) return;
    const auto& tile = shared.tile;
    tile.memory.parameter_squares[tile.block] = folded(shared.parameter_squares);
    if (!tile.shape.is_large()) tile.memory.update_squares[tile.block] = folded(shared.update_squares);
  }

  bool scales_parameter_;
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
    const auto blocks_of_matrix = static_cast<std::uint32_t>(shape.blocks_of_rows() + shape.blocks_of_columns());
    const auto of_tensor = static_cast<std::uint32_t>(block - launch.tensors.first_averages[place]);
    const std::int64_t matrix = of_tensor / blocks_of_matrix, of_matrix = of_tensor % blocks_of_matrix;
    auto* const row_sums = static_cast<S*>(memory.row_sums);
    if (of_matrix < shape.blocks_of_rows()) {
      set_lines(shared, shape.rows(), shape.columns(), shape.column_tiles(), AdafactorShape::averages_of_rows);
      set_place(shared, row_sums, tensor.row_var, shape, matrix, of_matrix);
      shared.sum_of_averages = memory.row_var_sums + matrix * shape.blocks_of_rows() + of_matrix;
    } else {
      set_lines(shared, shape.columns(), shape.rows(), shape.row_tiles(), AdafactorShape::averages_of_columns);
      set_place(shared, row_sums + shape.row_sums(), tensor.col_var, shape, matrix, of_matrix - shape.blocks_of_rows());
      shared.sum_of_averages = nullptr;
    }
    if (leaves_out(launch.by)) shared.count = 0;
  }

  template <int phase>
  GRADACCUM_ON_DEVICE void run(int /*round*/, Shared& shared) const {
    if (shared.count == 0) return;
    if constexpr (phase == 0) shared.sums_of_threads[this_thread()] = sum_of_parts(shared);
    if constexpr (phase == 1) move(shared);
    if (!shared.sum_of_averages) return;
    if constexpr (phase == 2) fold(shared.sums_of_threads);
    if (phase == 3 && this_thread() == 0) *shared.sum_of_averages = folded(shared.sums_of_threads);
  }

 private:
  GRADACCUM_ON_DEVICE static void set_lines(Shared& shared, std::int64_t lines, std::int64_t elements,
                                            std::int64_t parts, std::int64_t lines_of_block) {
    shared.count = lines;
    shared.elements = elements;
    shared.parts = parts;
    shared.lines = static_cast<int>(lines_of_block);
  }
  GRADACCUM_ON_DEVICE static void set_place(Shared& shared, S* sums, void* averages, const AdafactorShape& shape,
                                            std::int64_t matrix, std::int64_t block) {
    const auto first = matrix * shared.count + block * shared.lines;
    shared.stride = shape.matrices() * shared.count;
    shared.sums = sums + first;
    shared.averages = static_cast<S*>(averages) + first;
    shared.count -= block * shared.lines;
  }

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

/// Measures the updates of a large matrix's tile. The leftmost tiles also store the factors of their rows.
template <class Vector, class G>
class AdafactorUpdateBlock {
 public:
  using Arguments = AdafactorLaunch;
  using S = typename Vector::Scalar;
  static constexpr int rounds = 1, phases = 6, blocks_together = sizeof(G) == 4 ? 5 : sizeof(G) == 2 ? 4 : 1;

  struct Shared {
    AdafactorTile tile;
    double sums[threads_of_block];
    S row_factors[AdafactorShape::most_rows_of_tile];
  };

  GRADACCUM_ON_DEVICE void begin(const Arguments& launch, std::int64_t block, Shared& shared) const {
    begin_tile<S>(launch, block, shared.tile);
  }

  template <int phase>
  GRADACCUM_ON_DEVICE void run(int /*round*/, Shared& shared) const {
    if (shared.tile.skipped_steps || !shared.tile.shape.is_large()) return;
    if constexpr (phase == 0) shared.sums[this_thread()] = sum_of_row_var(shared.tile);
    if constexpr (phase == 1 || phase == 4) fold(shared.sums);
    if constexpr (phase == 2) make_row_factors(shared);
    if constexpr (phase == 3) shared.sums[this_thread()] = update_squares(shared);
    if (phase == 5 && this_thread() == 0) shared.tile.memory.update_squares[shared.tile.block] = folded(shared.sums);
  }

 private:
  GRADACCUM_ON_DEVICE static double sum_of_row_var(const AdafactorTile& tile) {
    const auto blocks = tile.shape.blocks_of_rows();
    return sum_of(tile.memory.row_var_sums + tile.matrix * blocks, this_thread(), blocks, threads_of_block);
  }

  GRADACCUM_ON_DEVICE static void make_row_factors(Shared& shared) {
    const auto& tile = shared.tile;
    const auto mean = at_least(tile.of.numbers.least_mean, folded(shared.sums) / static_cast<double>(tile.of.rows));
    const AdafactorFactor<Vector> factor{Vector::all(-std::sqrt(mean))};
    const auto first = tile.matrix * tile.of.rows + tile.row;
    for (int row = this_thread(); row < tile.rows; row += threads_of_block) {
      factor(static_cast<const S*>(tile.of.row_var) + first + row, shared.row_factors + row);
      if (tile.column_tile == 0) static_cast<S*>(tile.of.row_factors)[first + row] = shared.row_factors[row];
    }
  }

  GRADACCUM_ON_DEVICE static double update_squares(const Shared& shared) {
    const auto& tile = shared.tile;
    const AdafactorPacks<false> packs(tile);
    const auto* const gradient = static_cast<const G*>(tile.of.gradient);
    AdafactorUpdate<Vector, true> update(tile.of.numbers);
    const auto columns = load_pack(static_cast<const S*>(tile.of.column_factors) + tile.matrix * tile.of.columns,
                                   packs.column(), tile.of.columns - packs.column());
    auto sum = Vector::all(0);
    for_each_pack_of(packs, gradient, [&](int round, const AlignedPack<G>& gradients) {
      const int count = packs.count(round);
      update.scale.row = Vector::load(shared.row_factors + packs.row(round));
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
  GRADACCUM_ON_DEVICE void run(int /*round*/, Shared& shared) const {
    if (leaves_out(launch_->by)) return;
    if constexpr (phase == 0) {
      fold(shared.parameter_squares);
      fold(shared.update_squares);
    } else if (this_thread() == 0) {
      write(shared);
    }
  }

 private:
  GRADACCUM_ON_DEVICE void write(const Shared& shared) const {
    AdafactorNumbers numbers{};
    set_step_size(
        numbers, settings_of(*launch_),
        {static_cast<double>(tensor_->shape.numel()), folded(shared.parameter_squares), folded(shared.update_squares)});
    auto* const step = AdafactorMemory(tensor_->shape, tensor_->memory).step;
    step[0] = numbers.kept;
    step[1] = numbers.step_size;
  }

  const AdafactorLaunch* launch_;
  const AdafactorTable::Entry* tensor_;
};

/// The last pass: updates parameters and momentum.
template <class P, class G, bool rounded, bool momentum>
class AdafactorMoveBlock {
 public:
  using Arguments = AdafactorLaunch;
  using Vector = VectorOf<P>;
  using S = typename Vector::Scalar;
  static constexpr int rounds = 1, phases = 1, blocks_together = sizeof(S) == 4 ? 3 : 1;

  struct Shared {
    AdafactorTile tile;
  };

  GRADACCUM_ON_DEVICE void begin(const Arguments& launch, std::int64_t block, Shared& shared) const {
    begin_tile<S>(launch, block, shared.tile);
    auto& tile = shared.tile;
    if (this_thread() != thread_of_numbers || tile.skipped_steps) return;
    const auto place = place_of_block(launch.tensors.first_blocks, launch.tensors.size, block);
    const auto* const step = static_cast<const double*>(launch.tensors.entries[place].memory);  // see AdafactorMemory
    tile.of.numbers.kept = step[0];
    tile.of.numbers.step_size = step[1];
  }

  template <int phase>
  GRADACCUM_ON_DEVICE void run(int /*round*/, Shared& shared) const {
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

  GRADACCUM_ON_DEVICE static void move_vector(const AdafactorTile& tile) {
    const AdafactorPacks<true> packs(tile);
    const auto* const variance = static_cast<const S*>(tile.of.variance);
    const Mover<false> mover(tile);
    for (int round = 0; round < packs.rounds(); ++round) {
      const auto place = packs.place(round);
      const int count = packs.count(round);
      const auto variances = load_pack(variance, place, count);
      typename Mover<false>::Packs(mover, place, count).move([&](int k) { return Factors{-1, variances.numbers[k]}; });
    }
  }

  GRADACCUM_ON_DEVICE static void move_large(const AdafactorTile& tile) {
    const AdafactorPacks<false> packs(tile);
    const auto* const row_factors = static_cast<const S*>(tile.of.row_factors) + tile.matrix * tile.of.rows + tile.row;
    const auto columns = load_pack(static_cast<const S*>(tile.of.column_factors) + tile.matrix * tile.of.columns,
                                   packs.column(), tile.of.columns - packs.column());
    const Mover<true> mover(tile);
    const auto packs_of = [&](int round) {
      return typename Mover<true>::Packs(mover, packs.place(round), round < packs.rounds() ? packs.count(round) : 0);
    };
    const auto factors_of = [&](int round) {
      const auto row = round < packs.rounds() ? row_factors[packs.row(round)] : S(0);
      return [&columns, row](int k) { return Factors{row, columns.numbers[k]}; };
    };
    constexpr int ahead = momentum ? 1 : 2;  // packs that are loaded at a time
    for (int round = 0; round < packs.rounds(); round += ahead) {
      auto first = packs_of(round);
      if constexpr (ahead == 1) {
        first.move(factors_of(round));
      } else {
        auto second = packs_of(round + 1);
        first.move(factors_of(round));
        second.move(factors_of(round + 1));
      }
    }
  }

  /// Handles packs of elements that may span rows and matrices.
  GRADACCUM_ON_DEVICE static void move_small(const AdafactorTile& tile) {
    const AdafactorRange range(tile);
    const auto rows = static_cast<std::uint32_t>(tile.of.rows), columns = static_cast<std::uint32_t>(tile.of.columns);
    const auto* const row_factors = static_cast<const S*>(tile.of.row_factors) + tile.matrix * rows;
    const auto* const column_factors = static_cast<const S*>(tile.of.column_factors) + tile.matrix * columns;
    const Mover<true> mover(tile);
    for (int i = pack_size * this_thread(); i < range.count; i += pack_size * threads_of_block) {
      typename Mover<true>::Packs(mover, range.first + i, range.count - i).move([&](int k) {
        const auto element = static_cast<std::uint32_t>(i + k < range.count ? i + k : i), row = element / columns;
        return Factors{row_factors[row], column_factors[row / rows * columns + element % columns]};
      });
    }
  }

  /// The numbers and arrays for the update of a tile.
  template <bool factored>
  class Mover {
   public:
    GRADACCUM_ON_DEVICE explicit Mover(const AdafactorTile& tile)
        : apply_(tile.of.numbers),
          parameters_(parameters_of<P, rounded>(tile.of)),
          gradient_(static_cast<const G*>(tile.of.gradient)),
          exp_avg_(momentum ? static_cast<S*>(tile.of.exp_avg) : nullptr) {}

    /// A pack of elements, loaded on construction and written back on destruction.
    class Packs {
     public:
      GRADACCUM_ON_DEVICE Packs(const Mover& mover, std::int64_t place, std::int64_t count)
          : apply_(mover.apply_),
            parameters_(mover.parameters_, place, count),
            gradients_(mover.gradient_, place, count),
            averages_(mover.exp_avg_, place, count) {}

      /// `factors_of(k)` returns the factors of the k-th element.
      template <class FactorsOf>
      GRADACCUM_ON_DEVICE void move(const FactorsOf& factors_of) {
        auto apply = apply_;
        GRADACCUM_UNROLL
        for (int k = 0; k < pack_size; ++k) {
          const auto factors = factors_of(k);
          apply.update.scale.row = Vector::load(&factors.row);
          apply(parameters_.element(k), gradients_.element(k), &factors.column,
                momentum ? averages_.element(k) : nullptr);
        }
      }

     private:
      const AdafactorApply<Vector, factored>& apply_;
      ParameterPack<P, rounded> parameters_;
      Pack<const G*> gradients_;
      Pack<S*> averages_;
    };

   private:
    AdafactorApply<Vector, factored> apply_;
    std::conditional_t<rounded, RoundedArray, P*> parameters_;
    const G* gradient_;
    S* exp_avg_;
  };
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
  of_types<Function, AdafactorPasses>(types.parameter, types.gradient, types.rounded)(launch, stream);
}
