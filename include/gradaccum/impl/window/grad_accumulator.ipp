// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/window/open_window.hpp>
#include <gradaccum/detail/window/optimizer_facade.hpp>
#include <gradaccum/grad_accumulator.hpp>

#include <gradaccum/detail/window/communicator.hpp>

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <cstddef>
#include <limits>
#include <type_traits>
#include <utility>
#include <variant>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum {

GRADACCUM_INLINE Accumulator::Accumulator(std::unique_ptr<detail::AnyOptimizer> optimizer,
                                          const GradAccumulatorOptions& options)
    : window_(std::make_unique<detail::OpenWindow>(std::move(optimizer), options.steps, options.accumulate_in)) {
  window_->set_in_backward(options.in_backward);
}

GRADACCUM_INLINE Accumulator::~Accumulator() = default;

GRADACCUM_INLINE std::unique_ptr<detail::OpenWindow> Accumulator::given_away() {
  TORCH_CHECK(micro_steps() == 0 && !window_->in_hand(),
              "GradAccumulator: can be moved between windows, got it inside of one; call flush() or discard() first");
  TORCH_CHECK(!facade_,
              "GradAccumulator: cannot be moved any more: somebody has a reference to it as a torch::optim::Optimizer, "
              "a scheduler say");
  return std::move(window_);
}

GRADACCUM_INLINE Accumulator::Accumulator(Accumulator&& other)
    : window_(other.given_away()),
      updates_(other.updates_),
      clip_norm_(other.clip_norm_),
      clip_value_(other.clip_value_),
      grad_norm_(std::move(other.grad_norm_)) {}

GRADACCUM_INLINE void Accumulator::backward(Loss loss, std::optional<bool> retain_graph, bool create_graph) {
  backward(std::move(loss), BackwardOptions{.retain_graph = retain_graph, .create_graph = create_graph});
}

GRADACCUM_INLINE void Accumulator::backward(Loss loss, const BackwardOptions& options) {
  refresh_parameters();
  window_->backward(std::move(loss), options, ready());
}

GRADACCUM_INLINE StepResult Accumulator::step() {
  refresh_parameters();
  window_->complete_micro_batch();
  if (!window_->full()) return StepResult::accumulated;
  clip();
  return counted(window_->close());
}

GRADACCUM_INLINE at::Tensor Accumulator::step(const torch::optim::Optimizer::LossClosure& closure) {
  at::Tensor loss;
  if (closure) {
    const at::AutoGradMode grad_mode(true);
    loss = closure();
  }
  step();
  return loss;
}

GRADACCUM_INLINE void Accumulator::zero_grad(bool set_to_none) {
  if (micro_steps() == 0)
    window_->clear(set_to_none);
  else
    window_->check_not_to_be_cleared();
}

GRADACCUM_INLINE StepResult Accumulator::flush() {
  refresh_parameters();
  if (!window_->complete_early()) return StepResult::empty;
  clip();
  const auto result = counted(window_->close());
  window_->clear();
  return result;
}

GRADACCUM_INLINE void Accumulator::discard() {
  window_->discard();
  clip_norm_.reset();
  clip_value_.reset();
}

GRADACCUM_INLINE void Accumulator::clip_grad_norm_(double max_norm) {
  TORCH_CHECK(max_norm > 0, "GradAccumulator: max_norm must be > 0, got ", max_norm);
  check_can_clip();
  clip_norm_ = max_norm;
}

GRADACCUM_INLINE void Accumulator::clip_grad_value_(double clip_value) {
  TORCH_CHECK(clip_value >= 0, "GradAccumulator: clip_value must be >= 0, got ", clip_value);
  check_can_clip();
  clip_value_ = clip_value;
}

GRADACCUM_INLINE const at::Tensor& Accumulator::grad_norm() const {
  TORCH_CHECK(grad_norm_.defined(),
              "GradAccumulator: grad_norm() needs a closed window for which "
              "clip_grad_norm_(max) was called; infinity only measures");
  return grad_norm_;
}

GRADACCUM_INLINE Gradients Accumulator::gradients() {
  refresh_parameters();
  return Gradients(window_->so_far());
}

GRADACCUM_INLINE Accumulator::NamedWindow Accumulator::named_window(const torch::nn::Module& module) {
  refresh_parameters();
  return {*this, module};
}

GRADACCUM_INLINE void Accumulator::NamedWindow::state(Archive& archive) {
  auto updates = of.updates_;
  auto clip_norm = of.clip_norm_, clip_value = of.clip_value_;
  archive.setting("steps", of.window_->steps());
  archive("updates", updates);
  archive("clip_norm", clip_norm);
  archive("clip_value", clip_value);
  of.window_->named(module).state(archive);
  if (!archive.loading()) return;
  archive.when_all_fit([=, of = &of] {
    of->updates_ = updates;
    of->clip_norm_ = clip_norm;
    of->clip_value_ = clip_value;
  });
}

GRADACCUM_INLINE bool Accumulator::ready() const { return window_->ready(); }
GRADACCUM_INLINE std::int64_t Accumulator::micro_steps() const { return window_->micro_steps(); }
GRADACCUM_INLINE std::int64_t Accumulator::updates() const { return updates_; }
GRADACCUM_INLINE void Accumulator::set_steps(std::int64_t steps) { window_->set_steps(steps); }
GRADACCUM_INLINE void Accumulator::set_peers(std::shared_ptr<detail::Communicator> peers) {
  window_->set_peers(std::move(peers));
}

GRADACCUM_INLINE std::shared_ptr<detail::Shards> Accumulator::shards() const {
  return window_->peers() ? window_->peers()->shards() : nullptr;
}

GRADACCUM_INLINE bool Accumulator::others_continue() {
  refresh_parameters();
  return window_->others_continue();
}

GRADACCUM_INLINE std::string Accumulator::description() const {
  return "Wrapping '" + window_->optimizer().name() + "' optimizer with gradient accumulation of " +
         std::to_string(window_->steps()) + (window_->steps() == 1 ? " step" : " steps");
}

GRADACCUM_INLINE void Accumulator::synchronise() const {
  if (facade_) facade_->synchronise();
}

GRADACCUM_INLINE torch::optim::Optimizer& Accumulator::facade_of(torch::optim::Optimizer& wrapped) {
  const auto step_and_clear = [this] {
    window_->keep_sums_apart();
    step();
    zero_grad();
  };
  if (!facade_)
    facade_ = std::make_unique<detail::OptimizerFacade>(wrapped, step_and_clear, [this] { check_can_be_saved(); });
  if (micro_steps() > 0) window_->keep_sums_apart();
  facade_->synchronise();
  return *facade_;
}

GRADACCUM_INLINE void Accumulator::check_can_be_saved() const {
  TORCH_CHECK(micro_steps() == 0,
              "GradAccumulator: torch::save keeps the wrapped optimizer's state alone, and there are ", micro_steps(),
              " micro-batches in the window; save after flush() or discard(), or all of it by ga::save");
  TORCH_CHECK(!shards(),
              "GradAccumulator: torch::save would keep this process's part of the wrapped optimizer's state "
              "alone; save by ga::save on all ranks");
}

GRADACCUM_INLINE void Accumulator::check_can_clip() const {
  TORCH_CHECK(!window_->steps_in_backward(),
              "GradAccumulator: clipping needs all gradients at once, and in_backward steps with each as it arrives; "
              "leave one of the two out");
}

GRADACCUM_INLINE void Accumulator::refresh_parameters() {
  synchronise();
  window_->refresh_parameters();
}

GRADACCUM_INLINE void Accumulator::clip() {
  window_->or_spoil([this] {
    const Gradients gradients(window_->closing());
    grad_norm_ = clip_norm_ ? gradaccum::clip_grad_norm_(gradients, *clip_norm_) : at::Tensor();
    if (clip_value_) gradaccum::clip_grad_value_(gradients, *clip_value_);
  });
  clip_norm_.reset();
  clip_value_.reset();
}

GRADACCUM_INLINE StepResult Accumulator::counted(StepResult result) {
  updates_ += result;
  return result;
}

GRADACCUM_INLINE void detail::check_can_be_accumulated(const torch::optim::Optimizer& optimizer) {
  check_can_be_wrapped(optimizer, "GradAccumulator", "set_steps(n) changes its window");
}

}  // namespace gradaccum

namespace gradaccum::detail {

GRADACCUM_INLINE OpenWindow::OpenWindow(std::unique_ptr<AnyOptimizer> optimizer, std::int64_t steps,
                                        std::optional<at::ScalarType> accumulate_in)
    : optimizer_(std::move(optimizer)), now_{.counter = Window(steps)} {
  set_accumulate_in(accumulate_in);
  open(optimizer_->parameters());
}

GRADACCUM_INLINE OpenWindow::OpenWindow(std::unique_ptr<AnyOptimizer> optimizer)
    : OpenWindow(std::move(optimizer), std::numeric_limits<std::int64_t>::max(), {}) {}

GRADACCUM_INLINE OpenWindow::~OpenWindow() {
  if (now_.gradients) now_.gradients->close();
}

GRADACCUM_INLINE void OpenWindow::open(const std::vector<at::Tensor>& parameters) {
  auto next = std::make_shared<WindowGradients>(parameters);  // may throw: then nothing has changed
  misuse_.before_open(next->all_parameters());
  if (peers_) peers_->end_window();
  const bool after_another = now_.gradients != nullptr;
  if (after_another) {
    now_.gradients->close();
    next->take_norm_memory(*now_.gradients);
  }
  listed_ = parameters;
  now_.counter.restart();
  now_ = {.counter = now_.counter,
          .gradients = std::move(next),
          .has_peers = peers_ != nullptr,
          .steps_in_backward = step_in_backward_ != nullptr};
  now_.gradients->set_weights(0, 0);
  now_.gradients->set_complete(false);
  misuse_.opened(after_another);
}

GRADACCUM_INLINE void OpenWindow::refresh_parameters() {
  const auto parameters = optimizer_->parameters();
  if (same_parameters(parameters, listed_)) return;
  misuse_.check_kept();
  const auto before = now_.gradients->all_parameters();
  now_.gradients->sums().set_parameters(parameters);
  misuse_.refresh_parameters(before, now_.gradients->all_parameters());
  listed_ = parameters;
}

GRADACCUM_INLINE void OpenWindow::backward(Loss loss, const BackwardOptions& options, bool fills) {
  misuse_.at_backward(loss, options);
  loss.output.reset();  // backward does not need it: a language model's logits are large
  loss.target.reset();
  now_.counter.add(loss.items);
  now_.form = WindowForm::weighted, now_.in_hand = true;
  if (loss.items == 0) return;
  now_.scaled = now_.scaled || finite_required(loss.seed);
  if (loss.items != now_.counter.first_weight()) {
    loss.seed.multiply(loss.items);
    loss.seed.divide(now_.counter.first_weight());
  }
  or_spoil([&] { run_backward(loss, options, fills); });
  misuse_.look();
}

GRADACCUM_INLINE void OpenWindow::run_backward(const Loss& loss, const BackwardOptions& options, bool fills) {
  const auto run = [&] { loss.backward(options); };
  const bool sends = peers_ && (fills || peers_->take_each_backward());
  if (!sends && !(fills && steps_in_backward())) return run();
  now_.gradients->set_weights(now_.counter.first_weight(), now_.counter.total_weight());
  if (peers_ && fills) now_.gradients->set_sending();
  if (sends) return peers_->backward(now_.gradients, accumulate_in_, run);
  step_in_backward(now_.gradients, accumulate_in_, step_in_backward_, run);
}

GRADACCUM_INLINE void OpenWindow::complete_micro_batch() {
  misuse_.at_step();
  if (now_.closing_with_others) return finish_micro_batch(/*complete=*/true);
  if (!now_.in_hand) count_plain();
  misuse_.after_count();
  finish_micro_batch(now_.full());
  end_micro_batch();
}

GRADACCUM_INLINE void OpenWindow::add(Loss loss, bool fills) {
  refresh_parameters();
  backward(std::move(loss), {}, fills);
  complete_micro_batch();
}

GRADACCUM_INLINE bool OpenWindow::complete_early() {
  misuse_.check_usable();
  if (now_.count() == 0 && !now_.closing_with_others) return false;
  misuse_.at_flush();
  finish_micro_batch(/*complete=*/true);
  end_micro_batch();
  return true;
}

GRADACCUM_INLINE StepResult OpenWindow::close() {
  StepResult result = StepResult::empty;
  try {
    const auto& left = now_.gradients->stepped() ? now_.gradients->rest() : now_.gradients;
    if (has_weight()) result = peers_ ? peers_->step(*optimizer_, left) : step_optimizer(*optimizer_, Gradients(left));
  } catch (...) {
    now_.gradients->spoil();
    throw;
  }
  if (now_.gradients->stepped()) result = StepResult::stepped;  // in backward
  open(optimizer_->parameters());
  if (!result) clear();
  return result;
}

GRADACCUM_INLINE void OpenWindow::discard() {
  open(optimizer_->parameters());
  clear();
}

GRADACCUM_INLINE void OpenWindow::clear(bool set_to_none) {
  optimizer_->zero_grad(set_to_none);
  if (now_.in_hand || now_.gradients->spoiled() || now_.gradients->applied())
    open(optimizer_->parameters());
  else
    misuse_.look();
  misuse_.cleared();
}

GRADACCUM_INLINE void OpenWindow::clear_others() {
  const auto parameters = optimizer_->parameters();
  if (std::any_of(parameters.begin(), parameters.end(), [](auto& p) { return p.grad().defined(); })) clear();
}

GRADACCUM_INLINE void OpenWindow::keep_sums_apart() {
  if (std::exchange(sums_apart_, true) || now_.count() == 0 || now_.gradients->applied()) return;
  misuse_.check_kept();
  now_.gradients->sums().move_apart();
  misuse_.look();
}

/// Counts a `loss.backward()` of the user's own, which shows in the gradients.
GRADACCUM_INLINE const std::shared_ptr<WindowGradients>& OpenWindow::so_far() {
  misuse_.check_usable();
  misuse_.check_kept();
  if (!now_.in_hand && !now_.weighted() && misuse_.touched()) count_plain();
  if (now_.in_hand || now_.closing_with_others) finish_micro_batch(now_.full());
  return now_.gradients;
}

/// Restores copies of the sums, so that `copy` can be used again.
GRADACCUM_INLINE void OpenWindow::go_back(const Copy& copy) {
  open(listed_);
  now_.gradients->sums().set(copy.sums);
  resume({copy.window, copy.form, copy.scaled, now_.gradients->sums().copies()});
}

GRADACCUM_INLINE void OpenWindow::state(Archive& archive, const NameOf& name_of) {
  refresh_parameters();
  if (!archive.loading()) misuse_.at_save();
  auto count = now_.count();
  auto first = now_.counter.first_weight(), total = now_.counter.total_weight();
  archive("micro_batches", count);
  archive("first_weight", first);
  archive("total_weight", total);
  bool weighted = now_.weighted(), scaled = now_.scaled;
  archive("weighted", weighted);
  archive("scaled", scaled);
  auto sums = count > 0 ? now_.gradients->sums().named(name_of) : WindowSums::Named();
  archive.tensors(sums);
  if (!archive.loading()) return;
  Window next = now_.counter;
  next.resume(count, first, total);
  const auto form = count == 0 ? WindowForm::none : weighted ? WindowForm::weighted : WindowForm::plain;
  auto loaded = now_.gradients->sums().take(std::move(sums), name_of, archive.changes_allowed());
  archive.when_all_fit([=, this] { resume({next, form, scaled, loaded}); });
}

GRADACCUM_INLINE void OpenWindow::resume(const Copy& window) {
  open(listed_);
  misuse_.cleared();
  now_.gradients->sums().set(window.sums);
  if (sums_apart_) now_.gradients->sums().move_apart();
  now_.counter = window.window;
  now_.form = window.form, now_.scaled = window.scaled;
  now_.gradients->set_weights(now_.counter.first_weight(), now_.counter.total_weight());
  misuse_.look();
}

GRADACCUM_INLINE std::int64_t OpenWindow::bytes() const {
  std::size_t all = 0;
  for (const auto place : now_.gradients->sums().places()) {
    const auto& sum = now_.gradients->sums()[place];
    all += sum.is_sparse() ? sum._indices().nbytes() + sum._values().nbytes() : sum.nbytes();
  }
  return static_cast<std::int64_t>(all);
}

GRADACCUM_INLINE void OpenWindow::set_accumulate_in(std::optional<at::ScalarType> dtype) {
  TORCH_CHECK(!dtype || at::isFloatingType(*dtype), "GradAccumulator: accumulate_in must be a floating dtype, got ",
              *dtype);
  accumulate_in_ = dtype;
}

GRADACCUM_INLINE void OpenWindow::set_in_backward(bool on) {
  TORCH_CHECK(!on || optimizer_->takes_gradients(),
              "GradAccumulator: in_backward needs an optimizer that takes gradients: ga::optim::SGD, Adam, AdamW, or "
              "one of your own that derives from ga::TakesGradients; got ",
              optimizer_->name());
  TORCH_CHECK(now_.count() == 0, "GradAccumulator: in_backward must be set between windows, got it inside of one");
  check_goes_with_peers(peers_ != nullptr, on);
  now_.steps_in_backward = on;
  step_in_backward_ = nullptr;
  if (on) step_in_backward_ = [this](Gradients some) { return step_optimizer(*optimizer_, std::move(some)); };
}

GRADACCUM_INLINE void OpenWindow::set_peers(std::shared_ptr<Communicator> peers) {
  if (peers) peers->join(*optimizer_);
  TORCH_CHECK(now_.count() == 0, "GradAccumulator: must join other processes between windows, got it inside of one");
  check_goes_with_peers(peers != nullptr, steps_in_backward());
  peers_ = std::move(peers);
  now_.has_peers = peers_ != nullptr;
}

GRADACCUM_INLINE bool OpenWindow::others_continue() {
  refresh_parameters();
  if (!has_weight()) clear_others();
  misuse_.check_usable();
  if (!peers_) return false;
  now_.closing_with_others = peers_->others_continue(now_.gradients, accumulate_in_);
  if (peers_->shards()) misuse_.look();  // others may have asked for its gradients
  return now_.closing_with_others;
}

GRADACCUM_INLINE void OpenWindow::or_spoil(c10::function_ref<void()> work) {
  try {
    work();
  } catch (...) {
    now_.gradients->spoil();
    throw;
  }
}

GRADACCUM_INLINE void OpenWindow::count_plain() {
  misuse_.at_plain_backward();
  now_.counter.add(1.0);
  now_.form = WindowForm::plain, now_.in_hand = true;
}

GRADACCUM_INLINE void OpenWindow::end_micro_batch() {
  now_.in_hand = false;
  misuse_.end_micro_batch();
}

GRADACCUM_INLINE void OpenWindow::finish_micro_batch(bool complete) {
  if (now_.reduced()) return;
  const bool apart = accumulate_in_ || sums_apart_;
  if (apart) or_spoil([&] { now_.gradients->fold_into_sums(accumulate_in_); });
  if (sums_apart_ && !complete && !now_.gradients->applied()) now_.gradients->sums().move_apart();
  const bool seen = now_.weighted() && !apart && !now_.gradients->applied();  // by backward, and checked since
  if (!seen) misuse_.look();
  now_.gradients->set_weights(now_.counter.first_weight(), now_.counter.total_weight());
  if (complete && peers_) {
    now_.gradients->set_sending();
    or_spoil([&] { peers_->reduce(now_.gradients, accumulate_in_); });
  }
  now_.gradients->set_complete(complete);
  if (now_.reduced()) misuse_.look();
}

GRADACCUM_INLINE OptimizerFacade::OptimizerFacade(torch::optim::Optimizer& wrapped, std::function<void()> step,
                                                  std::function<void()> check_saving)
    : Optimizer(std::vector<torch::optim::OptimizerParamGroup>(), wrapped.defaults().clone()),
      wrapped_(wrapped),
      step_(std::move(step)),
      check_saving_(std::move(check_saving)) {
  synchronise();
}

GRADACCUM_INLINE torch::Tensor OptimizerFacade::step(LossClosure closure) {
  torch::Tensor loss;
  if (closure) {
    at::AutoGradMode grad_mode(true);
    loss = closure();
  }
  synchronise();
  step_();
  return loss;
}

/// Returns nothing for user-made options without a learning rate, for which LibTorch's base class throws.
GRADACCUM_INLINE std::optional<double> learning_rate(const torch::optim::OptimizerOptions& options) try {
  return options.get_lr();
} catch (const c10::Error&) {
  return std::nullopt;
}

/// Compares options of LibTorch's class `Options`. Returns nothing if they are of another.
template <class Options>
std::optional<bool> compared(const torch::optim::OptimizerOptions& a, const torch::optim::OptimizerOptions& b) {
  const auto* const first = dynamic_cast<const Options*>(&a);
  const auto* const second = dynamic_cast<const Options*>(&b);
  return first && second ? std::optional(*first == *second) : std::nullopt;
}

GRADACCUM_INLINE Archive::Values values_of(const torch::optim::OptimizerOptions& options) {
  Archive archive;
  const auto copy = options.clone();
  if (auto* itself = dynamic_cast<ArchivesItself*>(copy.get())) itself->state(archive);
  return archive.values();
}

GRADACCUM_INLINE bool same_values(const Archive::Values& a, const Archive::Values& b) {
  const auto same = [](auto& one, auto& other) {
    const auto is_value_of_other = [&](auto& value) {
      using Value = std::remove_cvref_t<decltype(value)>;
      if constexpr (std::is_same_v<Value, at::Tensor>)
        return false;
      else
        return value == std::get<Value>(other.second);
    };
    return one.first == other.first && one.second.index() == other.second.index() &&
           std::visit(is_value_of_other, one.second);
  };
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), same);
}

/// Compares two options: user-made ones by the learning rate, and by their values if they archive themselves.
GRADACCUM_INLINE bool same_options(const torch::optim::OptimizerOptions& a, const torch::optim::OptimizerOptions& b) {
  using namespace torch::optim;
  std::optional<bool> same;
  for (const auto compare : {compared<AdamOptions>, compared<AdamWOptions>, compared<SGDOptions>,
                             compared<RMSpropOptions>, compared<AdagradOptions>})
    if (!same) same = compare(a, b);
  return same ? *same : learning_rate(a) == learning_rate(b) && same_values(values_of(a), values_of(b));
}

/// Sets options. Keeps their object if only the learning rate has changed, since others may refer to it.
GRADACCUM_INLINE void set_options(torch::optim::OptimizerParamGroup& group, const torch::optim::OptimizerOptions& to) {
  if (const auto rate = learning_rate(to)) group.options().set_lr(*rate);
  if (!same_options(group.options(), to)) group.set_options(to.clone());
}

GRADACCUM_INLINE void OptimizerFacade::save(torch::serialize::OutputArchive& archive) const {
  check_saving_();
  const_cast<OptimizerFacade*>(this)->synchronise();  // includes what was set just now
  wrapped_.save(archive);
}

GRADACCUM_INLINE void OptimizerFacade::load(torch::serialize::InputArchive& archive) {
  wrapped_.load(archive);
  param_groups_.clear();
  known_.clear();
  synchronise();
}

GRADACCUM_INLINE void OptimizerFacade::synchronise() {
  take_groups();
  tell_options();
  auto& groups = wrapped_.param_groups();
  for (std::size_t i = 0; i < groups.size(); ++i) {
    param_groups_[i].params() = known_[i].params() = groups[i].params();
    set_options(param_groups_[i], groups[i].options());
    set_options(known_[i], groups[i].options());
  }
}

/// Copies groups that were added on either side to the other.
GRADACCUM_INLINE void OptimizerFacade::take_groups() {
  auto& groups = wrapped_.param_groups();
  while (groups.size() < param_groups_.size()) wrapped_.add_param_group(param_groups_[groups.size()]);
  while (param_groups_.size() < groups.size()) param_groups_.push_back(groups[param_groups_.size()]);
  while (known_.size() < groups.size()) known_.push_back(groups[known_.size()]);
}

GRADACCUM_INLINE void OptimizerFacade::tell_options() {
  auto& groups = wrapped_.param_groups();
  for (std::size_t i = 0; i < known_.size(); ++i) {
    auto& ours = param_groups_[i];
    TORCH_CHECK(same_parameters(ours.params(), known_[i].params()), "GradAccumulator: the parameters of group ", i,
                " were changed through a torch::optim::Optimizer&; change them in the wrapped optimizer's group");
    if (!same_options(ours.options(), known_[i].options())) set_options(groups[i], ours.options());
  }
}

GRADACCUM_INLINE void check_can_be_wrapped(const torch::optim::Optimizer& optimizer, const char* part,
                                           const char* instead) {
  TORCH_CHECK(type_name(optimizer.defaults()) != "LBFGSOptions",  // finds classes derived from it, too
              part,
              ": must not be LBFGS, which calls its closure several times a step and so has no micro-batches; use SGD, "
              "Adam, AdamW, RMSprop, Adagrad or one of your own");
  TORCH_CHECK(!dynamic_cast<const OptimizerFacade*>(&optimizer), part,
              ": wraps an optimizer, not another accumulator behind a reference; ", instead);
}

}  // namespace gradaccum::detail

#undef GRADACCUM_INLINE
