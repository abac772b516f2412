// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/data/samples_of.hpp>
#include <gradaccum/detail/trainer/arguments.hpp>
#include <gradaccum/detail/trainer/counts.hpp>
#include <gradaccum/detail/trainer/data_position.hpp>
#include <gradaccum/detail/trainer/evaluate.hpp>
#include <gradaccum/detail/trainer/fit.hpp>
#include <gradaccum/detail/trainer/policy_list.hpp>
#include <gradaccum/detail/trainer/window_record.hpp>
#include <gradaccum/detail/window/optimizer_window.hpp>
#include <gradaccum/metrics.hpp>
#include <gradaccum/policies.hpp>
#include <gradaccum/state_parts.hpp>

#include <c10/util/Exception.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>

namespace gradaccum {

/// The training loop that people write, from a model, an optimizer, an objective, and policies that each say one thing.
///
///     auto objective = [](auto& net, auto& batch) {
///       return torch::mse_loss(net->forward(batch.data), batch.target);
///     };
///     ga::Trainer trainer(model, sgd, objective, ga::Accumulate{.steps = 8}, ga::ClipNorm{.max = 1.0},
///                         [](const ga::Step& step) { if (step.update % 100 == 0) std::cout << step.loss << '\n'; });
///     std::cout << trainer.fit(batches, {.epochs = 3});
///
/// `model`: a ModuleHolder, a pointer to a module, or a plain module, which is held by reference; the objective gets it
/// as it was given. `optimizer`: any but LBFGS, by reference or behind a pointer. `objective(model, batch)`: a Tensor
/// of one element, `ga::Loss{mean, items}`, or `ga::Loss{mean, items}.with(output, target)` for metrics. Batches: any
/// range, of any type. A policy has some of the hooks of policy.hpp, or is a callable that takes `const ga::Step&`,
/// called when the parameters have moved. The order of policies matters within one hook only.
///
/// An exception, of whatever is called here, discards the window; all can be used again, and modes are as before.
///
/// @note Waits for the device once a window, to see that losses are finite (`OnNan` says how not to), and as its
/// policies say.
template <class Model, class Optimizer, class Objective, class... Policies>
class Trainer {
  static_assert(detail::are_trainer_arguments<Model, Optimizer>());

 public:
  template <class GivenModel, class GivenOptimizer>
  Trainer(GivenModel&& model, GivenOptimizer&& optimizer, Objective objective, Policies... policies)
      : model_(std::forward<GivenModel>(model)),
        window_(detail::checked_optimizer(optimizer)),
        optimizer_owner_(detail::kept_owner(std::forward<GivenOptimizer>(optimizer))),
        objective_(std::move(objective)),
        policies_(std::move(policies)...) {
    policies_.template processes_first<hooks::attach>(*this);
  }
  Trainer(const Trainer&) = delete;  // policies may hold on to it

  /// Trains until it has gone through the batches so often, or made so many updates; in training mode, unless the model
  /// is in it already, with all that its owner has frozen. Epochs count on from the last `fit`.
  FitReport fit(auto&& batches, const FitOptions& options = {}) { return detail::Fit(*this, batches).run(options); }

  /// The model's mean loss and other metrics: in evaluation mode, without gradients, the batches gone through once.
  template <metric... Metrics>
  Evaluation evaluate(auto&& batches, Metrics... metrics) {
    const auto loss_of = [&](auto& batch) { return forward(batch); };
    return detail::evaluate(module(), batches, loss_of, status_.options.smoke, std::move(metrics)...);
  }

  /// One micro-batch. True if it closed the window, and the parameters moved.
  bool step(auto&& batch) {
    return or_discard([&] {
      if (window().micro_batches == 0) window_.clear_others();
      record_.begin_micro_batch(detail::samples_of(batch), status_);
      Loss loss = forward(batch);
      if (!record_.take(loss, status_, updates())) loss.items = 0;
      call<hooks::before_backward>(loss);
      record_.set_closing(policies_.ready());
      if (closing() && window_.steps_in_backward()) prepare();
      window_.add(std::move(loss), closing());
      if (closing() && peers()) prepare(), window_.complete_early();  // until then they are at the gradients
      Gradients so_far(window_.so_far());
      call<hooks::after_backward>(so_far);
      record_.end_micro_batch();
      return closing() && close();
    });
  }
  /// Steps with the window as it is, and its true mean. True if the parameters moved.
  bool flush() {
    return (window().micro_batches > 0 || window_.follows_others()) && or_discard([this] { return close(); });
  }
  /// Forgets the window.
  void discard() { record_.restart(), window_.discard(); }
  /// Ends `fit` after the micro-batch in hand, and its tail.
  void stop() { status_.stop(); }
  /// The same without its tail, so that another program can go on from a state: for a signal.
  void interrupt(int signal) { status_.interrupt(signal); }

  Model& model() { return model_; }
  torch::nn::Module& module() { return detail::module_of(model_); }
  Optimizer& optimizer() { return window_.optimizer(); }
  at::Device device() { return detail::device_of(optimizer()); }
  std::int64_t updates() const { return counts_.updates; }  ///< how often the parameters have moved
  bool closing() const { return record_.closing(); }  ///< this backward fills the window; of a flushed one, none does
  const Step& window() const { return record_.so_far(); }  ///< epoch, micro_batches, samples, items so far
  const FitStatus& status() const { return status_; }
  void set_accumulate_in(std::optional<at::ScalarType> dtype) { window_.set_accumulate_in(dtype); }
  void set_in_backward(bool on) { window_.set_in_backward(on); }
  void set_peers(auto peers) { status_.together = true, window_.set_peers(std::move(peers)); }  ///< for DataParallel
  std::shared_ptr<detail::Peers> peers() const { return window_.peers(); }  ///< other processes; or none
  bool is_first() const { return !peers() || peers()->rank() == 0; }        ///< of these the one that writes and shows
  bool others_continue() { return window_.others_continue(); }
  auto together() { return detail::Together{record_, status_}; }
  template <class Hook>
  static constexpr bool has = detail::PolicyList<Policies...>::template has<Hook>;  ///< one of its policies has it
  template <class Policy>
  Policy& policy() {
    return policies_.template get<Policy>();
  }

  /// Saves or loads all that a training needs to go on to the bit; see `ga::save`. Between micro-batches.
  void state(Archive& archive) {
    archive.together([&] {
      archive("model", ModelState(module()));
      archive("optimizer", OptimizerState(optimizer(), module()));
      archive("window", window_.named(module()));
      archive("random", RandomState());
      archive.if_not_all_fit([this, counts = counts_, record = record_, status = status_] {
        counts_ = counts, record_ = record, status_ = status;
      });
      counts_.state(archive);
      archive("losses", record_);
      detail::archive_fit(archive, status_, data_);
      policies_.state(archive);
    });
  }

 private:
  template <class Trainer, class Batches>
  friend class detail::Fit;

  template <class Hook>
  void call(auto&&... arguments) {
    policies_.template all<Hook>(arguments...);
  }

  auto or_discard(const auto& work) -> decltype(work()) {
    try {
      return work();
    } catch (...) {
      discard();
      throw;
    }
  }
  Loss forward(auto& batch) {
    return policies_.template in_scopes<hooks::forward_scope>(
        [&] { return detail::loss_of(objective_, model_, batch); });
  }
  void prepare() {
    record_.prepare([this] { call<hooks::scale_gradients>(window_.closing()->factor()); });
  }
  bool close() {
    const auto end = record_.begin_closing();
    window_.follow();
    Gradients gradients(window_.so_far());
    prepare();
    window_.complete_early();
    const double lr = detail::learning_rate_of(optimizer());
    const bool moved = window_.close([this](Gradients& closing) {
      call<hooks::reduce_gradients>(closing);
      call<hooks::before_step>(closing);
    });
    if (moved) window_.clear();
    counts_.updates += moved;
    const Step step = record_.finish(gradients, moved, updates(), lr);
    status_.count_window(moved, step.overflowed);
    call<hooks::after_window>(step);
    if (moved) call<hooks::after_step>(step);
    return moved;
  }

  Model model_;
  detail::OptimizerWindow<Optimizer> window_;
  std::shared_ptr<void> optimizer_owner_;
  Objective objective_;
  detail::PolicyList<Policies...> policies_;
  detail::WindowRecord record_;
  detail::DataPosition data_;
  detail::Counts counts_;
  FitStatus status_;
};

template <class Model, class Optimizer, class Objective, class... Policies>
Trainer(Model&&, Optimizer&&, Objective, Policies...)
    -> Trainer<detail::kept_model_t<Model>, detail::optimizer_t<Optimizer>, Objective, Policies...>;

}  // namespace gradaccum
