// SPDX-License-Identifier: Apache-2.0
//
// The last pass of a step of Adafactor.

/// The last pass: parameters, and averages of updates.
template <class P, class G, bool rounded, bool momentum>
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
    if (tile.shape.is_vector()) return move_vector(tile);
    tile.shape.is_small() ? move_small(tile) : move_large(tile);
  }

 private:
  /// Of an element; of a vector's -1 and the variance.
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
    constexpr int ahead = momentum ? 1 : 2;  // so many are on their way from memory at a time
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

  /// Packs of elements wherever rows and matrices end.
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

  /// The numbers and arrays with which a tile moves.
  template <bool factored>
  class Mover {
   public:
    GRADACCUM_ON_DEVICE explicit Mover(const AdafactorTile& tile)
        : apply_(tile.of.numbers),
          parameters_(parameters_of<P, rounded>(tile.of)),
          gradient_(static_cast<const G*>(tile.of.gradient)),
          exp_avg_(momentum ? static_cast<S*>(tile.of.exp_avg) : nullptr) {}

    /// A pack of its elements: loaded when it is made, and written back at the end.
    class Packs {
     public:
      GRADACCUM_ON_DEVICE Packs(const Mover& mover, std::int64_t place, std::int64_t count)
          : apply_(mover.apply_),
            parameters_(mover.parameters_, place, count),
            gradients_(mover.gradient_, place, count),
            averages_(mover.exp_avg_, place, count) {}

      /// `factors_of(k)` are those of the k-th element.
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
