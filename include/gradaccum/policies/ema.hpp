// SPDX-License-Identifier: Apache-2.0
#pragma once
// module: policies

#include <gradaccum/archive.hpp>
#include <gradaccum/detail/types/types.hpp>
#include <gradaccum/policy.hpp>

#include <torch/nn/module.h>

namespace gradaccum {

namespace detail {
struct Averages;
}

/// Keeps an exponential moving average of a model's weights: a policy that also works in a loop of your own.
///
///     ga::Ema::Running ema({.decay = 0.999});
///     for (auto& batch : batches) {
///       torch::mse_loss(model->forward(batch.data), batch.target).backward();
///       if (optimizer.step()) ema.update(model);
///       optimizer.zero_grad();
///     }
///     ema.swap(model);                                      // the averages are in the model
///     std::cout << torch::mse_loss(model->forward(x), y).item<double>() << '\n';
///     ema.swap(model);                                      // its own weights again, bit for bit
///
/// The first update copies the weights; each later one computes average = decay * average + (1 - decay) * weight, as
/// PyTorch's AveragedModel does. A model is a module or a pointer to one. Its
/// parameters remain the same tensors, and may be frozen, shared or complex. Integer buffers are copied rather than
/// averaged.
///
/// Throws if `update` is called while the averages are in the model, if `swap` is called before the first update, and
/// if names, shapes, dtypes or devices of the model's tensors have changed. Nothing has changed then.
///
/// @note Does not synchronize. Takes memory for a copy of the model, with 4 bytes per 16-bit number, and for another
/// one while the averages are in the model.
struct Ema {
  static constexpr std::string_view name = "ema";

  double decay = 0.999;  ///< in [0, 1]
  bool warmup = false;   ///< limit decay to (1 + t) / (10 + t) after t updates, so that the first weights count less
  bool buffers = false;  ///< average buffers, too; if false, swap() leaves the model's buffers in place

  class Running;
};

/// An Ema in a Trainer, or in a loop of your own. It cannot be copied. A moved-from one must not be used.
class Ema::Running : public Ema {
 public:
  using Options = Ema;
  explicit Running(const Ema& given);
  Running(Running&&) noexcept = default;

  void update(model auto& of) { update_module(detail::module_of(of)); }  ///< call it after each optimizer update
  void swap(model auto& in) { swap_module(detail::module_of(in)); }      ///< exchanges the model's weights and averages

  std::int64_t updates() const;  ///< the number of updates so far

  /// Attaches to a trainer, or to a model, which a loop of your own needs before it loads averages.
  template <class T>
  void attach(T& to) {
    if constexpr (model<T>)
      attach_module(detail::module_of(to));
    else
      attach_module(to.module());
  }
  void after_step(const Step&);
  void state(Archive& archive);

 private:
  void update_module(torch::nn::Module& module);
  void swap_module(torch::nn::Module& module);
  void attach_module(torch::nn::Module& module);
  double decay_now() const;

  std::shared_ptr<detail::Averages> averages_;
};

}  // namespace gradaccum

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/policies/ema.ipp>
#endif
