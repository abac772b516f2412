// SPDX-License-Identifier: Apache-2.0
// Implements a window from its first micro-batch to its step: counts, sums, and checks for misuse.
#pragma once

#include <gradaccum/detail/window/open_window.hpp>

#include <gradaccum/detail/window/communicator.hpp>
#include <gradaccum/detail/window/misuse.hpp>

#include <c10/util/Exception.h>

#include <unordered_map>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum::detail {

GRADACCUM_INLINE void check_goes_with_peers(bool peers, bool in_backward) {
  TORCH_CHECK(!peers || !in_backward,
              "GradAccumulator: in_backward frees each gradient as it arrives, before it can be summed over the ranks; "
              "turn it off, or train in one process");
}

GRADACCUM_INLINE OpenWindow::OpenWindow(std::unique_ptr<AnyOptimizer> optimizer, std::int64_t steps,
                                        std::optional<at::ScalarType> accumulate_in)
    : optimizer_(std::move(optimizer)), now_{.counter = Window(steps)}, misuse_(std::make_unique<Misuse>(now_)) {
  open(optimizer_->parameters());
  set_accumulate_in(accumulate_in);
}

GRADACCUM_INLINE OpenWindow::~OpenWindow() { now_.gradients->close(); }

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
  now_.gradients->set_weights(now_.counter);
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
  now_.gradients->set_weights(now_.counter);
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

/// Counts a `loss.backward()` by the user, which is found by the gradients it changed.
GRADACCUM_INLINE const std::shared_ptr<WindowGradients>& OpenWindow::so_far() {
  misuse_->check_usable();
  misuse_->check_kept();
  if (!now_.in_hand && !now_.weighted() && misuse_->touched()) count_plain();
  if (now_.in_hand || now_.closing_with_others) finish_micro_batch(now_.full());
  return now_.gradients;
}

/// Restores the sums as copies, so that `copy` can be used again.
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
  now_.gradients->set_weights(now_.counter);
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
              "one of your own that derives from ga::TakesGradients, and all members of a MultiOptimizer; got ",
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
  if (peers_->shards()) misuse_->look();  // other ranks may have requested its gradients
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
  const bool seen = now_.weighted() && !apart && !now_.gradients->applied();  // backward has checked them
  if (!seen) misuse_->look();
  now_.gradients->set_weights(now_.counter);
  if (complete && peers_) {
    now_.gradients->set_sending();
    or_spoil([&] { peers_->reduce(now_.gradients); });
  }
  now_.gradients->set_complete(complete);
  if (now_.reduced()) misuse_->look();
}

}  // namespace gradaccum::detail

#undef GRADACCUM_INLINE
