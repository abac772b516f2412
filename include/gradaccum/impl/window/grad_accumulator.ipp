// SPDX-License-Identifier: Apache-2.0
// A window from its first micro-batch to its step: counts, sums, clipping, the step, and misuse of them.
#pragma once

#include <gradaccum/detail/window/open_window.hpp>
#include <gradaccum/grad_accumulator.hpp>

#include <gradaccum/detail/window/communicator.hpp>
#include <gradaccum/detail/window/misuse.hpp>

#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <typeinfo>
#include <unordered_map>
#include <variant>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum::detail {

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
  const auto same = []<class X, class Y>(const X& x, const Y& y) {
    if constexpr (std::is_same_v<X, Y> && !std::is_same_v<X, at::Tensor>)
      return x == y;
    else
      return false;
  };
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [&](auto& one, auto& other) {
    return one.first == other.first && std::visit(same, one.second, other.second);
  });
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

GRADACCUM_INLINE at::Tensor loss_of(const torch::optim::Optimizer::LossClosure& closure) {
  const at::AutoGradMode grad_mode(true);
  return closure ? closure() : at::Tensor();
}

/// An accumulator as a `torch::optim::Optimizer`, for code that takes one by reference.
///
/// Its groups have the wrapped optimizer's parameters and copies of its options. `Optimizer::zero_grad`, which is not
/// virtual and does not know of windows, clears their gradients, so windows that it steps keep their sums apart.
class OptimizerFacade final : public torch::optim::Optimizer {
 public:
  /// `step` counts a micro-batch, and clears the gradients after a window. `check_saving` throws when the optimizer's
  /// own state is not the whole state.
  OptimizerFacade(torch::optim::Optimizer& wrapped, std::function<void()> step, std::function<void()> check_saving)
      : Optimizer(std::vector<torch::optim::OptimizerParamGroup>(), wrapped.defaults().clone()),
        wrapped_(wrapped),
        step_(std::move(step)),
        check_saving_(std::move(check_saving)) {
    synchronize();
  }

  torch::Tensor step(LossClosure closure = nullptr) override {
    const auto loss = loss_of(closure);
    synchronize();
    step_();
    return loss;
  }

  void save(torch::serialize::OutputArchive& archive) const override {
    check_saving_();
    const_cast<OptimizerFacade*>(this)->synchronize();  // includes what was set just now
    wrapped_.save(archive);
  }

  void load(torch::serialize::InputArchive& archive) override {
    wrapped_.load(archive);
    param_groups_.clear();
    known_.clear();
    synchronize();
  }

  /// Synchronises groups and options both ways: from here to the wrapped optimizer, and back.
  void synchronize() {
    auto& groups = wrapped_.param_groups();
    while (groups.size() < param_groups_.size()) wrapped_.add_param_group(param_groups_[groups.size()]);
    while (param_groups_.size() < groups.size()) param_groups_.push_back(groups[param_groups_.size()]);
    while (known_.size() < groups.size()) known_.push_back(groups[known_.size()]);
    for (std::size_t i = 0; i < groups.size(); ++i) {
      auto& ours = param_groups_[i];
      TORCH_CHECK(same_parameters(ours.params(), known_[i].params()), "GradAccumulator: the parameters of group ", i,
                  " were changed through a torch::optim::Optimizer&; change them in the wrapped optimizer's group");
      if (!same_options(ours.options(), known_[i].options())) set_options(groups[i], ours.options());
    }
    for (std::size_t i = 0; i < groups.size(); ++i) {
      param_groups_[i].params() = known_[i].params() = groups[i].params();
      set_options(param_groups_[i], groups[i].options());
      set_options(known_[i], groups[i].options());
    }
  }

 private:
  torch::optim::Optimizer& wrapped_;
  std::function<void()> step_, check_saving_;
  std::vector<torch::optim::OptimizerParamGroup> known_;  // as of the last call, to see which side has changed
};

GRADACCUM_INLINE bool is_accumulator(const torch::optim::Optimizer& optimizer) {
  return dynamic_cast<const OptimizerFacade*>(&optimizer) != nullptr;
}

GRADACCUM_INLINE void check_can_be_wrapped(const torch::optim::Optimizer& optimizer, const char* part,
                                           const char* instead) {
  TORCH_CHECK(type_name(optimizer.defaults()) != "LBFGSOptions",  // finds classes derived from it, too
              part,
              ": the optimizer must not be LBFGS, which calls its closure several times a step and so has no "
              "micro-batches; use SGD, Adam, AdamW, RMSprop, Adagrad or one of your own");
  TORCH_CHECK(!is_accumulator(optimizer), part, ": the optimizer must not be another accumulator behind a reference; ",
              instead);
}

GRADACCUM_INLINE bool AnyOptimizer::steps_by_elements() const {
  using namespace torch::optim;
  if (taker) return taker->steps_by_elements();
  if (!torch_optimizer) return false;
  const auto& type = typeid(*torch_optimizer);
  return type == typeid(SGD) || type == typeid(Adam) || type == typeid(AdamW) || type == typeid(RMSprop);
}

GRADACCUM_INLINE bool AnyOptimizer::rates_are_0() const {
  return torch_optimizer && std::ranges::all_of(torch_optimizer->param_groups(),
                                                [](auto& group) { return learning_rate(group.options()) == 0.0; });
}

GRADACCUM_INLINE StepResult step_optimizer(AnyOptimizer& optimizer, Gradients gradients) {
  if (!optimizer.takes_gradients) gradients.apply();
  if (gradients.raw().empty()) return StepResult::empty;
  auto* const taker = optimizer.taker;
  const bool left_to_device = taker && taker->judges_on_device(gradients);
  if (!left_to_device && gradients.overflowed()) return StepResult::skipped;
  taker ? taker->step(gradients) : optimizer.step(gradients);
  at::autocast::clear_cache();  // its casts are of the old parameters
  return left_to_device ? StepResult::left_to_device : StepResult::stepped;
}

/// The gradients that a backward pass has computed so far. Steps their parameters, and frees them. Backward runs a
/// thread for each device, which may have several streams: gradients that are stepped together wait on their own
/// stream.
class ArrivingGradients final : public GradReadyListener {
 public:
  ArrivingGradients(std::shared_ptr<WindowGradients> window, AnyOptimizer& optimizer)
      : GradReadyListener(window->all_parameters()),
        window_(std::move(window)),
        arrived_(parameters_.size()),
        optimizer_(optimizer) {}

  void grad_ready(std::size_t place) override {
    const std::lock_guard lock(mutex_);
    if (ended_ || window_->closed()) return;
    const auto& parameter = parameters_[place];
    TORCH_CHECK(!arrived_[place], "GradAccumulator: in_backward steps a parameter once, but the gradient of parameter ",
                place, " (shape ", parameter.sizes(),
                ") arrived twice in one pass: an operation runs its own backward inside; turn in_backward off");
    arrived_[place] = true;
    auto& waiting = waiting_[c10::impl::VirtualGuardImpl(parameter.device().type()).getStream(parameter.device())];
    waiting.places.push_back(place);
    waiting.elements += parameter.numel();
    if (waiting.elements >= enough) step(std::exchange(waiting, {}).places);
  }

  /// Steps the parameters that still wait, once backward is complete.
  void step_waiting() {
    const std::lock_guard lock(mutex_);
    std::vector<std::size_t> all;
    for (auto& [stream, waiting] : waiting_) all.insert(all.end(), waiting.places.begin(), waiting.places.end());
    waiting_.clear();
    if (!all.empty() && !window_->closed()) step(all);
  }

 private:
  struct Waiting {
    std::vector<std::size_t> places;
    std::int64_t elements = 0;
  };
  static constexpr std::int64_t enough = 1 << 16;  // elements: a parallel loop for each small tensor would cost more

  void step(const std::vector<std::size_t>& places) {
    at::NoGradGuard no_grad;
    for (auto place : places) window_->fold_into_sum(place);
    const auto part = window_->part(places);
    if (step_optimizer(optimizer_, part->handle())) window_->set_stepped();
    for (auto place : places) parameters_[place].mutable_grad().reset();
    part->close();
  }

  const std::shared_ptr<WindowGradients> window_;
  std::vector<bool> arrived_;
  AnyOptimizer& optimizer_;
  std::unordered_map<c10::Stream, Waiting> waiting_;
};

GRADACCUM_INLINE void step_in_backward(const std::shared_ptr<WindowGradients>& window, AnyOptimizer& optimizer,
                                       c10::function_ref<void()> backward) {
  const auto gradients = std::make_shared<ArrivingGradients>(window, optimizer);
  try {
    const GradReadyScope scope(gradients);
    backward();
    gradients->step_waiting();
  } catch (c10::Error& error) {
    if (window->stepped()) error.add_context(c10::str("GradAccumulator: ", stepped_in_part));
    throw;
  } catch (...) {  // keeps the exception's type
    if (window->stepped()) TORCH_WARN("GradAccumulator: ", stepped_in_part);
    throw;
  }
}

GRADACCUM_INLINE void check_goes_with_peers(bool peers, bool in_backward) {
  TORCH_CHECK(!peers || !in_backward,
              "GradAccumulator: in_backward frees each gradient as it arrives, before it can be summed over the ranks; "
              "turn it off, or train in one process");
}

}  // namespace gradaccum::detail

namespace gradaccum {

GRADACCUM_INLINE Accumulator::Accumulator(std::unique_ptr<detail::AnyOptimizer> optimizer,
                                          const GradAccumulatorOptions& options)
    : window_(std::make_unique<detail::OpenWindow>(std::move(optimizer), options.steps, options.accumulate_in)) {
  if (const auto* const wrapped = window_->optimizer().torch_optimizer)
    detail::check_can_be_wrapped(*wrapped, "GradAccumulator", "set_steps(n) changes its window");
  window_->set_in_backward(options.in_backward);
}

GRADACCUM_INLINE Accumulator::~Accumulator() {
  if (!window_ || updates_ > 0 || warned_of_nothing_ || std::uncaught_exceptions() > 0) return;
  const auto what = micro_steps() > 0
                        ? c10::str("its only window has ", micro_steps(), " of ", window_->steps(),
                                   " micro-batches: call flush() after the loop, and step() once a micro-batch")
                    : cleared_ && !stepped_
                        ? "its step() was never called: call it in place of the wrapped optimizer's, before zero_grad()"
                        : std::string();
  try {
    if (!what.empty()) TORCH_WARN("GradAccumulator: it never moved a parameter, and ", what);
  } catch (...) {  // a handler of warnings may throw, and a destructor must not
  }
}

GRADACCUM_INLINE Accumulator::Accumulator(Accumulator&& other)
    : cleared_(other.cleared_),
      stepped_(other.stepped_),
      warned_of_nothing_(other.warned_of_nothing_),
      updates_(other.updates_),
      clip_norm_(other.clip_norm_),
      clip_value_(other.clip_value_) {
  TORCH_CHECK(other.micro_steps() == 0 && !other.window_->in_hand(),
              "GradAccumulator: must be moved between windows, but a window is open; call flush() or discard() first");
  TORCH_CHECK(!other.facade_,
              "GradAccumulator: cannot be moved after it was used as a torch::optim::Optimizer&, such as by a "
              "scheduler; move it before");
  grad_norm_ = std::move(other.grad_norm_);
  window_ = std::move(other.window_);
}

GRADACCUM_INLINE std::unique_lock<std::recursive_mutex> Accumulator::turn(bool begins) {
  std::unique_lock lock(turn_, std::try_to_lock);
  if (lock.owns_lock() && !window_->in_hand()) in_hand_of_ = std::thread::id();
  TORCH_CHECK(
      lock.owns_lock() && (!begins || in_hand_of_ == std::thread::id() || in_hand_of_ == std::this_thread::get_id()),
      "GradAccumulator: a thread made a call while another was in a call, or between its backward and step(); forward "
      "passes may run concurrently, but each thread must hold one lock (a std::mutex of yours) from backward to "
      "zero_grad(); discard() drops a micro-batch of another thread");
  return lock;
}

GRADACCUM_INLINE void Accumulator::backward(Loss loss, std::optional<bool> retain_graph, bool create_graph) {
  backward(std::move(loss), BackwardOptions{.retain_graph = retain_graph, .create_graph = create_graph});
}

GRADACCUM_INLINE void Accumulator::backward(Loss loss, const BackwardOptions& options) {
  const auto lock = turn(/*begins=*/true);
  in_hand_of_ = std::this_thread::get_id();
  refresh_parameters();
  window_->backward(std::move(loss), options, ready());
}

GRADACCUM_INLINE StepResult Accumulator::step() {
  const auto lock = turn(/*begins=*/false);
  stepped_ = true;
  refresh_parameters();
  window_->complete_micro_batch();
  if (!window_->full()) return StepResult::accumulated;
  return close();
}

/// An empty window may be intended, as for a generator that rests, but hardly if none before it has moved anything.
GRADACCUM_INLINE StepResult Accumulator::close() {
  clip();
  const bool has_weight = window_->has_weight();
  const auto result = window_->close();
  updates_ += result;
  if (result == StepResult::empty && has_weight && updates_ == 0 && !std::exchange(warned_of_nothing_, true))
    TORCH_WARN(
        "GradAccumulator: a window closed without a gradient for any parameter of the optimizer, so nothing "
        "moved. Call backward() before step(); make the optimizer for the parameters that the loss depends on, "
        "not for those of a copy of the model; see that they are not frozen");
  return result;
}

GRADACCUM_INLINE at::Tensor Accumulator::step(const torch::optim::Optimizer::LossClosure& closure) {
  const auto loss = detail::loss_of(closure);
  step();
  return loss;
}

GRADACCUM_INLINE void Accumulator::zero_grad(bool set_to_none) {
  const auto lock = turn(/*begins=*/true);
  cleared_ = true;
  window_->zero_grad(set_to_none);
}

GRADACCUM_INLINE StepResult Accumulator::flush() {
  const auto lock = turn(/*begins=*/false);
  refresh_parameters();
  if (!window_->complete_early()) return StepResult::empty;
  const auto result = close();
  window_->clear();
  return result;
}

GRADACCUM_INLINE void Accumulator::discard() {
  const auto lock = turn(/*begins=*/false);
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
              "GradAccumulator: grad_norm() needs a closed window for which clip_grad_norm_(max) was called; a max of "
              "infinity only measures");
  return grad_norm_;
}

GRADACCUM_INLINE Gradients Accumulator::gradients() {
  const auto lock = turn(/*begins=*/false);
  refresh_parameters();
  return window_->so_far()->handle();
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

GRADACCUM_INLINE void Accumulator::synchronize() const {
  if (facade_) facade_->synchronize();
}

GRADACCUM_INLINE torch::optim::Optimizer& Accumulator::facade_of(torch::optim::Optimizer& wrapped) {
  const auto step_and_clear = [this] {
    const auto lock = turn(/*begins=*/false);
    window_->keep_sums_apart();
    step();
    zero_grad();
  };
  if (!facade_)
    facade_ = std::make_unique<detail::OptimizerFacade>(wrapped, step_and_clear, [this] { check_can_be_saved(); });
  if (micro_steps() > 0) window_->keep_sums_apart();
  facade_->synchronize();
  return *facade_;
}

GRADACCUM_INLINE void Accumulator::check_can_be_saved() const {
  TORCH_CHECK(micro_steps() == 0,
              "GradAccumulator: torch::save saves only the wrapped optimizer's state, but there are ", micro_steps(),
              " micro-batches in the open window; save after flush() or discard(), or save all of it by ga::save");
  TORCH_CHECK(!shards(),
              "GradAccumulator: torch::save would save only this rank's shard of the wrapped optimizer's state; save "
              "by ga::save on all ranks");
}

GRADACCUM_INLINE void Accumulator::check_can_clip() const {
  TORCH_CHECK(!window_->steps_in_backward(),
              "GradAccumulator: clipping needs all gradients at once, but in_backward steps with each as it arrives; "
              "use only one of the two");
}

GRADACCUM_INLINE void Accumulator::refresh_parameters() {
  synchronize();
  window_->refresh_parameters();
}

GRADACCUM_INLINE void Accumulator::clip() {
  window_->or_spoil([this] {
    const auto gradients = window_->closing()->handle();
    grad_norm_ = clip_norm_ ? gradaccum::clip_grad_norm_(gradients, *clip_norm_) : at::Tensor();
    if (clip_value_) gradaccum::clip_grad_value_(gradients, *clip_value_);
  });
  clip_norm_.reset();
  clip_value_.reset();
}

}  // namespace gradaccum

namespace gradaccum::detail {

GRADACCUM_INLINE OpenWindow::OpenWindow(std::unique_ptr<AnyOptimizer> optimizer, std::int64_t steps,
                                        std::optional<at::ScalarType> accumulate_in)
    : optimizer_(std::move(optimizer)), now_{.counter = Window(steps)}, misuse_(std::make_unique<Misuse>(now_)) {
  open(optimizer_->parameters());
  set_accumulate_in(accumulate_in);
}

GRADACCUM_INLINE OpenWindow::~OpenWindow() {
  if (now_.gradients) now_.gradients->close();
}

/// Throws if a parameter is listed twice: LibTorch's optimizers step it twice, as LibTorch's `parameters()` lists tied
/// weights once for each of their names.
GRADACCUM_INLINE void check_listed_once(const std::vector<at::Tensor>& parameters) {
  std::unordered_map<const void*, std::size_t> places;
  for (std::size_t place = 0; place < parameters.size(); ++place) {
    if (!parameters[place].defined()) continue;
    const auto [first, is_new] = places.emplace(parameters[place].unsafeGetTensorImpl(), place);
    TORCH_CHECK(is_new, "GradAccumulator: the optimizer must list each parameter once, but lists number ",
                first->second, " of shape ", parameters[place].sizes(), " again as number ", place,
                ", so each step would move it twice. Python's parameters() lists a tied weight once, LibTorch's once "
                "for each name: register the weight in one module and let the other keep it as a plain member, or "
                "remove the second from the optimizer's list");
  }
}

GRADACCUM_INLINE void OpenWindow::open(const std::vector<at::Tensor>& parameters) {
  if (!same_parameters(parameters, listed_)) check_listed_once(parameters);
  auto next = std::make_shared<WindowGradients>(parameters);  // may throw: then nothing has changed
  misuse_->before_open(next->all_parameters());
  if (peers_) peers_->end_window();
  const bool after_another = now_.gradients != nullptr;
  if (after_another) {
    now_.gradients->close();
    next->follow(*now_.gradients);
  }
  listed_ = parameters;
  now_.counter.restart();
  now_.gradients = std::move(next);
  now_.form = WindowForm::none;
  now_.in_hand = now_.scaled = now_.closing_with_others = false;
  now_.gradients->set_weights(0, 0);
  now_.gradients->set_complete(false);
  misuse_->opened(after_another);
}

GRADACCUM_INLINE void OpenWindow::refresh_parameters() {
  const auto parameters = optimizer_->parameters();
  if (same_parameters(parameters, listed_)) return;
  check_listed_once(parameters);
  misuse_->check_kept();
  const auto before = now_.gradients->all_parameters();
  now_.gradients->sums().set_parameters(parameters);
  misuse_->refresh_parameters(before, now_.gradients->all_parameters());
  listed_ = parameters;
}

GRADACCUM_INLINE void OpenWindow::backward(Loss loss, const BackwardOptions& options, bool fills) {
  misuse_->at_backward(loss, options);
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
  misuse_->look();
}

GRADACCUM_INLINE void OpenWindow::run_backward(const Loss& loss, const BackwardOptions& options, bool fills) {
  const auto run = [&] { loss.backward(options); };
  const bool sends = peers_ && (fills || peers_->take_each_backward());
  if (!sends && !(fills && steps_in_backward())) return run();
  now_.gradients->set_weights(now_.counter.first_weight(), now_.counter.total_weight());
  if (peers_ && fills) now_.gradients->set_sending();
  if (sends) return peers_->backward(now_.gradients, run);
  step_in_backward(now_.gradients, *optimizer_, run);
}

GRADACCUM_INLINE void OpenWindow::complete_micro_batch() {
  misuse_->at_step();
  if (now_.closing_with_others) return finish_micro_batch(/*complete=*/true);
  if (!now_.in_hand) count_plain();
  misuse_->after_count();
  finish_micro_batch(now_.full());
  end_micro_batch();
}

GRADACCUM_INLINE void OpenWindow::add(Loss loss, bool fills) {
  refresh_parameters();
  backward(std::move(loss), {}, fills);
  complete_micro_batch();
}

GRADACCUM_INLINE bool OpenWindow::complete_early() {
  misuse_->check_usable();
  if (now_.count() == 0 && !now_.closing_with_others) return false;
  misuse_->at_flush();
  finish_micro_batch(/*complete=*/true);
  end_micro_batch();
  return true;
}

GRADACCUM_INLINE StepResult OpenWindow::close() {
  StepResult result = StepResult::empty;
  TORCH_CHECK(!listed_.empty(),
              "GradAccumulator: the optimizer must have parameters to step, but its groups are empty");
  or_spoil([&] {
    const auto& left = now_.gradients->stepped() ? now_.gradients->rest() : now_.gradients;
    if (has_weight()) result = peers_ ? peers_->step(*optimizer_, left) : step_optimizer(*optimizer_, left->handle());
  });
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
    misuse_->look();
  misuse_->cleared();
}

GRADACCUM_INLINE void OpenWindow::zero_grad(bool set_to_none) {
  micro_steps() == 0 ? clear(set_to_none) : misuse_->at_zero_grad();
}

GRADACCUM_INLINE void OpenWindow::clear_others() {
  const auto parameters = optimizer_->parameters();
  if (std::any_of(parameters.begin(), parameters.end(), [](auto& p) { return p.grad().defined(); })) clear();
}

GRADACCUM_INLINE void OpenWindow::keep_sums_apart() {
  if (std::exchange(sums_apart_, true) || now_.count() == 0 || now_.gradients->applied()) return;
  misuse_->check_kept();
  now_.gradients->sums().move_apart();
  misuse_->look();
}

/// Counts a `loss.backward()` of the user's own, which shows in the gradients.
GRADACCUM_INLINE const std::shared_ptr<WindowGradients>& OpenWindow::so_far() {
  misuse_->check_usable();
  misuse_->check_kept();
  if (!now_.in_hand && !now_.weighted() && misuse_->touched()) count_plain();
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
  if (!archive.loading()) misuse_->at_save();
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
  if (archive.ranks().are_others())
    for (const auto taken : archive.of_ranks<std::int64_t>("micro_batches"))
      TORCH_CHECK(taken == 0, "Archive: the state was saved by ", archive.ranks().saved,
                  " rank(s) in the middle of a window, after ", taken,
                  " micro-batch(es); another number of ranks can resume only between windows: load a state that was "
                  "saved there, or resume with as many ranks");
  Window next = now_.counter;
  next.resume(count, first, total);
  const auto form = count == 0 ? WindowForm::none : weighted ? WindowForm::weighted : WindowForm::plain;
  auto loaded = now_.gradients->sums().load(std::move(sums), name_of, archive.changes_allowed());
  archive.when_all_fit([=, this] { resume({next, form, scaled, loaded}); });
}

GRADACCUM_INLINE void OpenWindow::resume(const Copy& window) {
  open(listed_);
  misuse_->cleared();
  now_.gradients->sums().set(window.sums);
  if (sums_apart_) now_.gradients->sums().move_apart();
  now_.counter = window.window;
  now_.form = window.form, now_.scaled = window.scaled;
  now_.gradients->set_weights(now_.counter.first_weight(), now_.counter.total_weight());
  misuse_->look();
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
  now_.gradients->accumulate_in = dtype;
}

GRADACCUM_INLINE void OpenWindow::set_in_backward(bool on) {
  TORCH_CHECK(!on || optimizer_->takes_gradients,
              "GradAccumulator: in_backward needs an optimizer that takes gradients: ga::optim::SGD, Adam, AdamW, or "
              "one of your own that derives from ga::TakesGradients; got ",
              optimizer_->name());
  TORCH_CHECK(now_.count() == 0, "GradAccumulator: in_backward must be set between windows, but a window is open");
  check_goes_with_peers(peers_ != nullptr, on);
  now_.steps_in_backward = on;
}

GRADACCUM_INLINE void OpenWindow::set_peers(std::shared_ptr<Communicator> peers) {
  if (peers) peers->join(*optimizer_);
  TORCH_CHECK(now_.count() == 0, "GradAccumulator: must join other processes between windows, but a window is open");
  check_goes_with_peers(peers != nullptr, steps_in_backward());
  peers_ = std::move(peers);
  now_.has_peers = peers_ != nullptr;
}

GRADACCUM_INLINE bool OpenWindow::others_continue() {
  refresh_parameters();
  if (!has_weight()) clear_others();
  misuse_->check_usable();
  if (!peers_) return false;
  now_.closing_with_others = peers_->others_continue(now_.gradients);
  if (peers_->shards()) misuse_->look();  // others may have asked for its gradients
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
  misuse_->at_plain_backward();
  now_.counter.add(1.0);
  now_.form = WindowForm::plain, now_.in_hand = true;
}

GRADACCUM_INLINE void OpenWindow::end_micro_batch() {
  now_.in_hand = false;
  misuse_->end_micro_batch();
}

GRADACCUM_INLINE void OpenWindow::finish_micro_batch(bool complete) {
  if (now_.reduced()) return;
  const bool apart = now_.gradients->accumulate_in || sums_apart_;
  if (apart) or_spoil([&] { now_.gradients->fold_into_sums(); });
  if (sums_apart_ && !complete && !now_.gradients->applied()) now_.gradients->sums().move_apart();
  const bool seen = now_.weighted() && !apart && !now_.gradients->applied();  // by backward, and checked since
  if (!seen) misuse_->look();
  now_.gradients->set_weights(now_.counter.first_weight(), now_.counter.total_weight());
  if (complete && peers_) {
    now_.gradients->set_sending();
    or_spoil([&] { peers_->reduce(now_.gradients); });
  }
  now_.gradients->set_complete(complete);
  if (now_.reduced()) misuse_->look();
}

}  // namespace gradaccum::detail

#undef GRADACCUM_INLINE
