// SPDX-License-Identifier: Apache-2.0
//
// Norms of tensors, summed in an order that depends only on their sizes; and the end of a window: its norm, clipping
// and the next loss scale.

/// Adds up one number per thread, pairwise until one is left.
template <bool root>
class SumBlock {
 public:
  using Arguments = SquaresLaunch;
  static constexpr int rounds = 1, halvings = 8, phases = halvings + 1;
  static_assert(threads_of_block == 1 << halvings);

  struct Shared {
    double sums[threads_of_block];
    double* result;
  };

  template <int phase>
  GRADACCUM_ON_DEVICE void run_phase(int /*round*/, Shared& shared) {
    constexpr int half = threads_of_block >> (phase + 1);
    if (this_thread() < half) shared.sums[this_thread()] += shared.sums[this_thread() + half];
    if (phase == halvings && this_thread() == 0) *shared.result = root ? std::sqrt(shared.sums[0]) : shared.sums[0];
  }

 protected:
  GRADACCUM_ON_DEVICE static void begin_with(double sum, double* result, Shared& shared) {
    shared.sums[this_thread()] = sum;
    if (this_thread() == 0) shared.result = result;
  }
};

/// The sum of squares of a part of a tensor, in float64.
template <class T>
class SquaresBlock : public SumBlock</*root=*/false> {
 public:
  GRADACCUM_ON_DEVICE void begin(const Arguments& launch, std::int64_t block, Shared& shared) {
    const auto place = place_of_block(launch.tensors.first_blocks, launch.tensors.size, block);
    const auto& tensor = launch.tensors.entries[place];
    const auto first = (block - launch.tensors.first_blocks[place]) * elements_of_block,
               count = elements_from(first, tensor.numel);
    Doubles sums[pack_size] = {};
    for (std::int64_t i = pack_size * this_thread(); i < count; i += pack_size * threads_of_block) {
      auto pack = load_pack(static_cast<const T*>(tensor.numbers), first + i, count - i);
      GRADACCUM_UNROLL
      for (int k = 0; k < pack_size; ++k) {
        const auto number = Doubles::load(pack.numbers + k);
        sums[k] = multiply_add(number, number, sums[k]);
      }
    }
    begin_with(((sums[0] + sums[1]) + (sums[2] + sums[3])).sum(), launch.partial_sums + block, shared);
  }
};

/// A tensor's norm from the sums of its parts.
class NormBlock : public SumBlock</*root=*/true> {
 public:
  GRADACCUM_ON_DEVICE void begin(const Arguments& launch, std::int64_t tensor, Shared& shared) {
    const auto place = static_cast<std::size_t>(tensor);
    const auto parts = launch.tensors.entries[place].blocks();
    const auto* const sums = launch.partial_sums + launch.tensors.first_blocks[place];
    begin_with(sum_of(sums, this_thread(), parts, threads_of_block), launch.norms + tensor, shared);
  }
};

inline void run_l2_norms(const SquaresLaunch& launch, at::ScalarType dtype, void* stream) {
  const auto run = dtype == at::kDouble  ? run_blocks<SquaresBlock<double>>
                   : dtype == at::kFloat ? run_blocks<SquaresBlock<float>>
                   : dtype == at::kHalf  ? run_blocks<SquaresBlock<at::Half>>
                                         : run_blocks<SquaresBlock<at::BFloat16>>;
  run(launch, launch.tensors.blocks, stream);
  run_blocks<NormBlock>(launch, launch.tensors.size, stream);
}

class WindowNormBlock : public SumBlock</*root=*/true> {
 public:
  using Arguments = WindowNormLaunch;

  GRADACCUM_ON_DEVICE void begin(const Arguments& launch, std::int64_t /*block*/, Shared& shared) {
    launch_ = &launch;
    double sum = 0;
    for (std::int64_t i = this_thread(); i < launch.count; i += threads_of_block)
      sum += launch.norms[i] * launch.norms[i];
    begin_with(sum, &launch.result->norm, shared);
  }

  template <int phase>
  GRADACCUM_ON_DEVICE void run_phase(int round, Shared& shared) {
    SumBlock::template run_phase<phase>(round, shared);
    if (phase == halvings && this_thread() == 0) end(*launch_->result);
  }

 private:
  /// Derives all results from the norm. NaN stays NaN, also in the coefficient.
  GRADACCUM_ON_DEVICE void end(WindowNorm& of) const {
    of.found_inf = std::isfinite(of.norm) ? 0 : 1;
    of.norm *= std::abs(product_of(launch_->by));
    const double coefficient = 1 / (of.norm + 1e-6) * launch_->max_norm;
    of.clip_coefficient = coefficient > 1 ? 1 : coefficient;
  }

  const WindowNormLaunch* launch_;
};

class ScaleBlock {
 public:
  using Arguments = ScaleLaunch;
  struct Shared {};
  static constexpr int rounds = 0, phases = 0;

  GRADACCUM_ON_DEVICE void begin(const Arguments& launch, std::int64_t /*block*/, Shared& /*shared*/) {
    if (this_thread() != 0) return;
    auto value = launch.from->value;
    std::int64_t clean = 0;  // consecutive updates without overflow
    if (*launch.found_inf != 0) {
      value = static_cast<float>(value * launch.backoff_factor);
    } else if (clean = launch.from->growth_tracker + std::int64_t{1}; clean >= launch.growth_interval) {
      const auto grown = static_cast<float>(value * launch.growth_factor);
      if (std::isfinite(grown)) value = grown;
      clean = 0;
    }
    if (value < launch.smallest) value = launch.smallest;
    *launch.to = {value, value, static_cast<std::int32_t>(clean)};
  }
};

template <class Block>
void run_one(const typename Block::Arguments& launch, void* stream) {
  run_blocks<Block>(launch, 1, stream);
}
