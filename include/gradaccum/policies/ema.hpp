// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/archive.hpp>
#include <gradaccum/detail/types/types.hpp>
#include <gradaccum/policy.hpp>

#include <torch/nn/module.h>

namespace gradaccum {

/// An exponential moving average of a model's weights: a policy, and a part of one's own loop.
///
///     ga::Ema ema{.decay = 0.999};
///     for (auto& batch : batches) {
///       torch::mse_loss(model->forward(batch.data), batch.target).backward();
///       if (optimizer.step()) ema.update(model);
///       optimizer.zero_grad();
///     }
///     ema.swap(model);                                      // the averages are in the model
///     std::cout << torch::mse_loss(model->forward(x), y).item<double>() << '\n';
///     ema.swap(model);                                      // its own weights again, bit for bit
///
/// The first update copies the weights; each one after it is average = decay * average + (1 - decay) * weight, as in
/// Python's AveragedModel. A model is a module, or points to one. Its parameters stay the same tensors; frozen, shared
/// and complex ones are welcome. Integer buffers are copied, not averaged.
///
/// An update while the averages are in the model, a swap before the first update, and a model whose tensors have
/// changed their names, shapes, dtype or device are errors; then nothing has changed.
///
/// @note Does not synchronize. Memory: the model once more, with 4 bytes for each 16-bit number; and
/// once more while the averages are in it.
struct Ema {
  static constexpr std::string_view name = "ema";

  double decay = 0.999;  ///< in [0, 1]
  bool warmup = false;   ///< decay at most (1 + t) / (10 + t), t the updates so far: less of the first weights
  bool buffers = false;  ///< average buffers too; else the model's own stay in it
  struct Run;
  std::shared_ptr<Run> run = {};  ///< not an option: the averages, which copies share

  void update(model auto& of) { update_module(detail::module_of(of)); }  ///< after a step that moved the parameters
  void swap(model auto& in) { swap_module(detail::module_of(in)); }      ///< averages into the model, and out again

  std::int64_t updates() const;

  /// To a trainer; or to a model, in a loop that will load the averages.
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
  Run& made_run();
  void update_module(torch::nn::Module& module);
  void swap_module(torch::nn::Module& module);
  void attach_module(torch::nn::Module& module);
  double decay_now() const;
};

}  // namespace gradaccum

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/trainer/ema.ipp>
#endif
