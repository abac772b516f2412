// SPDX-License-Identifier: Apache-2.0
#pragma once
// module: optimizers

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/window/any_optimizer.hpp>

#include <torch/optim/optimizer.h>

#include <concepts>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace gradaccum {

class Archive;

/// Sets the learning rate of an optimizer in all its parameter groups.
///
///     ga::LearningRates rates(optimizer);
///     ga::lr::Cosine cosine{.peak = 3e-4, .warmup = 100, .total = 5000};
///     for (auto& batch : batches) {
///       rates.set(cosine(optimizer.updates()));
///       torch::mse_loss(model->forward(batch.data), batch.target).backward();
///       optimizer.step();
///       optimizer.zero_grad();
///     }
///
/// Groups keep the ratios of their rates to the first group's at construction, so construct this object before a rate
/// is set or loaded. A group added later counts as if it had existed then. If all rates were 0, all groups get the
/// same. The optimizer needs `param_groups()`, as LibTorch's and a GradAccumulator have, and must outlive this object.
/// Throws, before anything has changed, if options cannot get or set their rate, or if the first rate is 0 and another
/// is not.
///
/// @note Does not synchronize.
class LearningRates {
 public:
  template <class Optimizer>
  requires requires(Optimizer& optimizer) {
    { *optimizer.param_groups().begin() } -> std::convertible_to<optim::ParamGroupRef>;
  }
  explicit LearningRates(Optimizer& optimizer)
      : LearningRates(Groups([&optimizer] {
          auto&& groups = optimizer.param_groups();
          return std::vector<optim::ParamGroupRef>(groups.begin(), groups.end());
        })) {}

  /// Sets the first group's rate, which must be finite and >= 0, and the others in proportion.
  void set(double rate);

  /// Multiplies each group's rate by `factor`, but sets none below `least`, and changes none by `eps` or less.
  void reduce(double factor, double least, double eps);

  /// Returns the first group's rate.
  double current() const { return groups()[0].options().get_lr(); }

  /// Saves or loads the ratios of groups that were added later, whose loaded rates do not show them.
  void state(Archive& archive);

 private:
  using Groups = std::function<std::vector<optim::ParamGroupRef>()>;

  explicit LearningRates(Groups groups);
  std::vector<optim::ParamGroupRef> groups() const;
  static double rate_of(torch::optim::OptimizerOptions& options);
  void follow();

  Groups groups_;
  double first_ = 0;            // the first group's rate at construction
  std::vector<double> ratios_;  // each group's rate relative to it
};

}  // namespace gradaccum

/// Learning rates as pure functions of the update's index, which is 0 for the first update.
namespace gradaccum::lr {

/// A constant learning rate after a linear warm-up.
///
///     ga::lr::Constant constant{.peak = 3e-4, .warmup = 100};
///     ga::LearningRates rates(optimizer);
///     rates.set(constant(optimizer.updates()));
///
/// The warm-up goes from `start` at update 0 to `peak` at update `warmup`. Throws `std::invalid_argument` for members
/// out of range and for a negative update.
struct Constant {
  double peak = 0;                   ///< > 0
  std::int64_t warmup = 0;           ///< updates
  std::optional<double> start = {};  ///< the rate of update 0, in [0, peak]; by default peak / (warmup + 1)

  double operator()(std::int64_t update) const;
};

/// A linear warm-up, then half a cosine from `peak` at update `warmup` down to `end` at update `total`, then `end`.
///
///     ga::lr::Cosine cosine{.peak = 3e-4, .warmup = 100, .total = 5000, .end = 3e-5};
///     ga::LearningRates rates(optimizer);
///     rates.set(cosine(optimizer.updates()));
///
/// The warm-up and the errors are the same as for `Constant`.
struct Cosine {
  double peak = 0;                   ///< > 0
  std::int64_t warmup = 0;           ///< updates, at most `total`
  std::int64_t total = 0;            ///< updates, >= 1
  double end = 0;                    ///< the rate from update `total` on, in [0, peak]
  std::optional<double> start = {};  ///< the rate of update 0, in [0, peak]; by default peak / (warmup + 1)

  double operator()(std::int64_t update) const;
};

/// A linear warm-up, then a line from `peak` at update `warmup` down to `end` at update `total`, and `end` afterwards.
///
///     ga::lr::Linear linear{.peak = 3e-4, .warmup = 100, .total = 5000};
///     ga::LearningRates rates(optimizer);
///     rates.set(linear(optimizer.updates()));
///
/// The warm-up and the errors are the same as for `Constant`.
struct Linear {
  double peak = 0;                   ///< > 0
  std::int64_t warmup = 0;           ///< updates, at most `total`
  std::int64_t total = 0;            ///< updates, >= 1
  double end = 0;                    ///< the rate from update `total` on, in [0, peak]
  std::optional<double> start = {};  ///< the rate of update 0, in [0, peak]; by default peak / (warmup + 1)

  double operator()(std::int64_t update) const;
};

/// The shape of the decay in `WarmupStableDecay`: `linear`, `cosine`, or `one_minus_sqrt`, which falls fast at first.
enum class Decay { linear, cosine, one_minus_sqrt };

/// A linear warm-up, `peak` for most of the run, and a decay to `end` over the last `decay` updates of `total`.
///
///     ga::lr::WarmupStableDecay wsd{.peak = 3e-4, .warmup = 100, .total = 5000, .decay = 500};
///     ga::LearningRates rates(optimizer);
///     rates.set(wsd(optimizer.updates()));
///
/// The rate before the decay does not depend on `total`, so a run can be extended. The warm-up and the errors are the
/// same as for `Constant`.
struct WarmupStableDecay {
  double peak = 0;                   ///< > 0
  std::int64_t warmup = 0;           ///< updates
  std::int64_t total = 0;            ///< updates, >= 1
  std::int64_t decay = 0;            ///< updates, in [1, total - warmup]
  double end = 0;                    ///< the rate from update `total` on, in [0, peak]
  std::optional<double> start = {};  ///< the rate of update 0, in [0, peak]; by default peak / (warmup + 1)
  Decay shape = Decay::cosine;

  double operator()(std::int64_t update) const;
};

/// A rate for each optimizer of a `MultiOptimizer`, by its name, for `ga::Schedule`. Other optimizers keep theirs. A
/// rate that has a total must be given it.
///
///     ga::lr::ByName rates{{"Muon", ga::lr::Cosine{.peak = 0.02, .total = 5000}},
///                          {"AdamW", ga::lr::Linear{.peak = 1e-3, .total = 5000}}};
///     ga::Schedule schedule{rates};                      // a policy of a Trainer with a MultiOptimizer of these two
using ByName = std::map<std::string, std::function<double(std::int64_t update)>>;

}  // namespace gradaccum::lr

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/optimizers/learning_rates.ipp>
#endif
