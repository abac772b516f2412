// SPDX-License-Identifier: Apache-2.0
//
// The passes of a step of Adafactor from sums of squares to the size of the step.

/// The averages of some rows, or columns, of a large matrix move: several threads each add up their parts.
template <class Vector>
class AdafactorAveragesBlock {
 public:
  using Arguments = AdafactorLaunch;
  using S = typename Vector::Scalar;
  static constexpr int rounds = 1, phases = 4;

  struct Shared {
    AdafactorNumbers numbers;
    S *sums, *averages;
    double* sum_of_averages;            ///< of rows
    std::int64_t count, parts, stride;  ///< lines; parts of each one's sum, and how far they are apart
    std::int64_t elements;              ///< of a line
    int lines;                          ///< of a block
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
    double sum = 0;
    if (line < shared.count)
      for (std::int64_t i = this_thread() / shared.lines; i < shared.parts; i += threads_of_block / shared.lines)
        sum += static_cast<double>(shared.sums[i * shared.stride + line]);
    return sum;
  }

  /// Leaves a row's average for their mean, and a column's factor in the place of its first part.
  GRADACCUM_ON_DEVICE static void move(Shared& shared) {
    const int line = this_thread();
    if (line >= shared.lines || line >= shared.count) return;
    auto sum =
        static_cast<S>(strided_sum(shared.sums_of_threads + line, threads_of_block / shared.lines, shared.lines));
    auto* const average = shared.averages + line;
    AdafactorVariance<Vector>(shared.numbers, shared.elements)(average, &sum);
    if (shared.sum_of_averages)
      shared.sums_of_threads[line] = static_cast<double>(*average);
    else
      AdafactorFactor<Vector>{Vector::all(1)}(average, shared.sums + line);
  }
};

/// Measures the updates of a tile of a large matrix; the leftmost tiles leave the factors of their rows.
template <class Vector, class G>
class AdafactorUpdateBlock {
 public:
  using Arguments = AdafactorLaunch;
  using S = typename Vector::Scalar;
  static constexpr int rounds = 1, phases = 6;

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
    if (shared.tile.left_out || !shared.tile.shape.is_large()) return;
    if constexpr (phase == 0) shared.sums[this_thread()] = sum_of_row_var(shared.tile);
    if constexpr (phase == 1 || phase == 4) fold(shared.sums);
    if constexpr (phase == 2) make_row_factors(shared);
    if constexpr (phase == 3) shared.sums[this_thread()] = update_squares(shared);
    if (phase == 5 && this_thread() == 0) shared.tile.memory.update_squares[shared.tile.block] = folded(shared.sums);
  }

 private:
  GRADACCUM_ON_DEVICE static double sum_of_row_var(const AdafactorTile& tile) {
    const auto blocks = tile.shape.blocks_of_rows();
    const auto* const sums = tile.memory.row_var_sums + tile.matrix * blocks;
    double sum = 0;
    for (std::int64_t i = this_thread(); i < blocks; i += threads_of_block) sum += sums[i];
    return sum;
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

/// The size of a tensor's step, of all sums of squares.
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
    double parameter_squares = 0, update_squares = 0;
    for (std::int64_t i = this_thread(); i < blocks; i += threads_of_block) {
      parameter_squares += memory.parameter_squares[i];
      update_squares += memory.update_squares[i];
    }
    shared.parameter_squares[this_thread()] = parameter_squares;
    shared.update_squares[this_thread()] = update_squares;
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
