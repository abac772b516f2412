// SPDX-License-Identifier: Apache-2.0
//
// The end of a window, beside the step: its norm, which is clipped, and the next loss scale. Each is one block of
// threads.

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
  GRADACCUM_ON_DEVICE void run(int round, Shared& shared) {
    SumBlock::template run<phase>(round, shared);
    if (phase == halvings && this_thread() == 0) end(*launch_->result);
  }

 private:
  /// NaN stays NaN, also in the coefficient.
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
    std::int64_t clean = 0;  // updates in a row
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

inline void run_window_norm(const WindowNormLaunch& launch, void* stream) {
  run_blocks<WindowNormBlock>(launch, 1, stream);
}
inline void run_update_scale(const ScaleLaunch& launch, void* stream) { run_blocks<ScaleBlock>(launch, 1, stream); }
