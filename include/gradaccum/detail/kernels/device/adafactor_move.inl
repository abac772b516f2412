// SPDX-License-Identifier: Apache-2.0
//
// The last pass of a step of Adafactor.

/// The last pass: parameters, and averages of updates.
template <class P, class G, bool rounded>
class AdafactorMoveBlock {
 public:
  using Arguments = AdafactorLaunch;
  using Vector = VectorOf<P>;
  using S = typename Vector::Scalar;
  static constexpr int rounds = 1, phases = 1;

  struct Shared {
    AdafactorTile tile;
  };

  GRADACCUM_ON_DEVICE void begin(const Arguments& launch, std::int64_t block, Shared& shared) const {
    begin_tile<S>(launch, block, shared.tile);
    auto& tile = shared.tile;
    if (this_thread() != 0 || tile.left_out) return;
    tile.of.numbers.kept = tile.memory.step[0];
    tile.of.numbers.step_size = tile.memory.step[1];
  }

  template <int phase>
  GRADACCUM_ON_DEVICE void run(int /*round*/, Shared& shared) const {
    const auto& tile = shared.tile;
    if (tile.left_out) return;
    tile.of.exp_avg ? move<true>(tile) : move<false>(tile);
  }

 private:
  template <bool momentum>
  GRADACCUM_ON_DEVICE static void move(const AdafactorTile& tile) {
    if (tile.shape.is_vector()) return move_vector<momentum>(tile);
    tile.shape.is_small() ? move_small<momentum>(tile) : move_large<momentum>(tile);
  }

  template <bool momentum>
  GRADACCUM_ON_DEVICE static void move_vector(const AdafactorTile& tile) {
    const AdafactorPacks packs(tile);
    const auto* const variance = static_cast<const S*>(tile.of.variance);
    const Mover<momentum, false> mover(tile);
    const S rows[pack_size] = {-1, -1, -1, -1};
    for (int round = 0; round < packs.rounds(); ++round) {
      const auto place = packs.place(round), count = packs.count(round);
      mover(place, count, rows, load_pack(variance, place, count).numbers);
    }
  }

  template <bool momentum>
  GRADACCUM_ON_DEVICE static void move_large(const AdafactorTile& tile) {
    const AdafactorPacks packs(tile);
    const auto* const row_factors = static_cast<const S*>(tile.of.row_factors) + tile.matrix * tile.of.rows + tile.row;
    const auto columns = load_pack(static_cast<const S*>(tile.of.column_factors) + tile.matrix * tile.of.columns,
                                   packs.column(), tile.of.columns - packs.column());
    const Mover<momentum, true> mover(tile);
    for (int round = 0; round < packs.rounds(); ++round) {
      const auto row = row_factors[packs.row(round)];
      const S rows[pack_size] = {row, row, row, row};
      mover(packs.place(round), packs.count(round), rows, columns.numbers);
    }
  }

  /// Packs of elements wherever rows and matrices end.
  template <bool momentum>
  GRADACCUM_ON_DEVICE static void move_small(const AdafactorTile& tile) {
    const AdafactorRange range(tile);
    const auto rows = static_cast<std::uint32_t>(tile.of.rows), columns = static_cast<std::uint32_t>(tile.of.columns);
    const auto* const row_factors = static_cast<const S*>(tile.of.row_factors) + tile.matrix * rows;
    const auto* const column_factors = static_cast<const S*>(tile.of.column_factors) + tile.matrix * columns;
    const Mover<momentum, true> mover(tile);
    for (int i = pack_size * this_thread(); i < range.count; i += pack_size * threads_of_block) {
      S of_rows[pack_size], of_columns[pack_size];
      GRADACCUM_UNROLL
      for (int k = 0; k < pack_size; ++k) {
        const auto element = static_cast<std::uint32_t>(i + k < range.count ? i + k : i), row = element / columns;
        of_rows[k] = row_factors[row];
        of_columns[k] = column_factors[row / rows * columns + element % columns];
      }
      mover(range.first + i, range.count - i, of_rows, of_columns);
    }
  }

  /// Moves a pack of elements, given the factors of their rows and columns; of a vector -1 and their variances.
  template <bool momentum, bool factored>
  class Mover {
   public:
    GRADACCUM_ON_DEVICE explicit Mover(const AdafactorTile& tile)
        : apply_(tile.of.numbers),
          parameter_(static_cast<P*>(tile.of.parameter)),
          gradient_(static_cast<const G*>(tile.of.gradient)),
          exp_avg_(momentum ? static_cast<S*>(tile.of.exp_avg) : nullptr),
          rounding_key_(tile.of.rounding_key) {}

    GRADACCUM_ON_DEVICE void operator()(std::int64_t place, std::int64_t count, const S* rows, const S* of) const {
      Pack<std::conditional_t<rounded, RoundedArray, P*>> parameters(array(), place, count);
      Pack<const G*> gradients(gradient_, place, count);
      Pack<S*> averages(exp_avg_, place, count);
      auto apply = apply_;
      GRADACCUM_UNROLL
      for (int k = 0; k < pack_size; ++k) {
        apply.update.scale.row = Vector::load(rows + k);
        apply(parameters.element(k), gradients.element(k), of + k, momentum ? averages.element(k) : nullptr);
      }
    }

   private:
    GRADACCUM_ON_DEVICE auto array() const {
      if constexpr (rounded)
        return RoundedArray{parameter_, 0, rounding_key_};
      else
        return parameter_;
    }

    AdafactorApply<Vector, factored> apply_;
    P* parameter_;
    const G* gradient_;
    S* exp_avg_;
    std::uint64_t rounding_key_;
  };
};
