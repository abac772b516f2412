// SPDX-License-Identifier: Apache-2.0
//
// The first pass of a step of Adafactor.

/// The first pass: sums of squares; and what else there is to do of vectors and small matrices before they move.
template <class P, class G>
class AdafactorSumsBlock {
 public:
  using Arguments = AdafactorLaunch;
  using Vector = VectorOf<P>;
  using S = typename Vector::Scalar;
  static constexpr int rounds = 1, phases = 3;

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
    if (shared.tile.left_out) return;
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

  /// In float64, as on a processor.
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

  /// Of each row's part that is the thread's, and of its columns.
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

  /// Returns the sum of the squares of the update.
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

  /// A row of a small matrix, or a column of it.
  GRADACCUM_ON_DEVICE static S squares_of_line(const G* gradient, std::int64_t count, std::int64_t stride,
                                               const Vector& multiplier) {
    const AdafactorSquares<Vector> squares{multiplier};
    S column_sum = 0;
    for (std::int64_t i = 0; i < count; ++i) squares(gradient + i * stride, &column_sum);
    return squares.sum.sum();
  }

  /// Moves one average after another, and makes its factor.
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
  /// From another one on than the threads beside it, which would wait for the same bank of memory.
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
