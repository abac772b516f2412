// SPDX-License-Identifier: Apache-2.0
// The Trainer's loop: epochs, batches, micro-batches, windows, and the place in the data.
#pragma once

#include <gradaccum/detail/trainer/loop.hpp>
#include <gradaccum/trainer_base.hpp>

#include <gradaccum/gradients.hpp>

#include <gradaccum/detail/memory/memory_ledger.hpp>
#include <gradaccum/detail/optimizers/param_states.hpp>
#include <gradaccum/detail/window/communicator.hpp>
#include <gradaccum/detail/window/window_gradients.hpp>
#include <gradaccum/training_state.hpp>

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <cmath>
#include <csignal>
#include <exception>
#include <string_view>
#include <variant>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum {

GRADACCUM_INLINE TrainerBase::TrainerBase(std::unique_ptr<detail::AnyOptimizer> optimizer)
    : loop_(std::make_unique<detail::Loop>(*this, std::move(optimizer))) {}

GRADACCUM_INLINE TrainerBase::~TrainerBase() = default;

GRADACCUM_INLINE void TrainerBase::end() {
  loop_->policies = {};
  loop_.reset();
}

GRADACCUM_INLINE void TrainerBase::when_built(std::function<void()> run) {
  if (loop_->is_built) return run();
  loop_->when_built.push_back(std::move(run));
}

GRADACCUM_INLINE void TrainerBase::built() {
  for (const bool of_processes : {true, false})
    for (auto& policy : loop_->policies.list)
      if (policy->attach && (policy->others_continue != nullptr) == of_processes) policy->attach(*policy, *this);
  loop_->is_built = true;
  for (auto& run : std::exchange(loop_->when_built, {})) run();
}

GRADACCUM_INLINE FitReport TrainerBase::fit_with(detail::AnyBatches& batches, const FitOptions& options) {
  return loop_->fit(batches, options);
}
GRADACCUM_INLINE Evaluation TrainerBase::evaluate_with(detail::AnyBatches& batches, detail::Evaluator evaluator,
                                                       bool on_all) {
  return loop_->evaluate(batches, std::move(evaluator), on_all);
}
GRADACCUM_INLINE bool TrainerBase::step_with(const detail::AnyBatch& batch) { return loop_->step(batch); }
GRADACCUM_INLINE bool TrainerBase::flush() { return loop_->flush(); }
GRADACCUM_INLINE void TrainerBase::discard() { loop_->discard(); }

GRADACCUM_INLINE void TrainerBase::stop(std::string why) { loop_->status.stop(std::move(why)); }
GRADACCUM_INLINE void TrainerBase::stop_on_all(std::string why) { loop_->status.stop_all(std::move(why)); }
GRADACCUM_INLINE void TrainerBase::interrupt(int signal) { loop_->status.interrupt(signal); }

GRADACCUM_INLINE std::vector<at::Tensor> TrainerBase::parameters() const {
  return loop_->window.optimizer().parameters();
}
GRADACCUM_INLINE at::Device TrainerBase::device() const { return loop_->window.optimizer().device(); }
GRADACCUM_INLINE std::string TrainerBase::optimizer_name() const { return loop_->window.optimizer().name(); }
GRADACCUM_INLINE std::int64_t TrainerBase::updates() const { return loop_->counts.updates; }
GRADACCUM_INLINE bool TrainerBase::closing() const { return loop_->record.closing(); }
GRADACCUM_INLINE const Step& TrainerBase::window() const { return loop_->record.so_far(); }
GRADACCUM_INLINE const FitStatus& TrainerBase::status() const { return loop_->status; }

GRADACCUM_INLINE void TrainerBase::validated(std::string name, Evaluation found) {
  const auto& status = loop_->status;
  const Validation validation{.name = std::move(name),
                              .update = updates(),
                              .epoch = status.epoch,
                              .samples = status.samples,
                              .seconds = status.running ? status.seconds() : 0,
                              .found = std::move(found)};
  loop_->status.validations.push_back(validation);
  loop_->policies.all(&detail::AnyPolicy::on_validation, validation);
}

GRADACCUM_INLINE void TrainerBase::will_validate(std::string name, const std::vector<std::string>& metrics) {
  for (auto& metric : metrics) loop_->metrics.push_back(name + '/' + metric);
}
GRADACCUM_INLINE const std::vector<std::string>& TrainerBase::metrics() const { return loop_->metrics; }

GRADACCUM_INLINE MemoryByKind TrainerBase::memory_by_kind() {
  detail::StorageCount count;
  MemoryByKind bytes;
  for_each_held([&](std::int64_t MemoryByKind::*kind, const at::Tensor& tensor) { bytes.*kind += count.add(tensor); });
  return bytes;
}

GRADACCUM_INLINE void TrainerBase::for_each_held(
    c10::function_ref<void(std::int64_t MemoryByKind::*kind, const at::Tensor& tensor)> see) {
  auto all = module().parameters();
  for (auto& parameter : parameters()) all.push_back(parameter);
  for (auto& parameter : all) see(&MemoryByKind::parameters, parameter);
  for (auto& buffer : module().buffers()) see(&MemoryByKind::parameters, buffer);
  if (const auto* const optimizer = loop_->window.optimizer().torch_optimizer)
    detail::for_each_state_tensor(*optimizer, [&](auto& tensor) { see(&MemoryByKind::optimizer_state, tensor); });
  for (auto& parameter : all) see(&MemoryByKind::gradients, parameter.grad());
  const auto& sums = loop_->window.closing()->sums();
  for (std::size_t place = 0; place < sums.size(); ++place) see(&MemoryByKind::gradients, sums[place]);
}

GRADACCUM_INLINE void TrainerBase::set_accumulate_in(std::optional<at::ScalarType> dtype) {
  loop_->window.set_accumulate_in(dtype);
}
GRADACCUM_INLINE void TrainerBase::set_in_backward(bool on) { loop_->window.set_in_backward(on); }
GRADACCUM_INLINE bool TrainerBase::steps_in_backward() const { return loop_->window.steps_in_backward(); }

GRADACCUM_INLINE void TrainerBase::set_batch_size(std::int64_t samples) { loop_->batch_size = samples; }

GRADACCUM_INLINE void TrainerBase::set_peers(std::shared_ptr<detail::Communicator> peers) {
  loop_->status.together = true;
  loop_->window.set_peers(std::move(peers));
}
GRADACCUM_INLINE std::shared_ptr<detail::Communicator> TrainerBase::peers() const { return loop_->window.peers(); }
GRADACCUM_INLINE std::shared_ptr<detail::Shards> TrainerBase::shards() const {
  return peers() ? peers()->shards() : nullptr;
}
GRADACCUM_INLINE bool TrainerBase::is_first() const { return !peers() || peers()->rank() == 0; }
GRADACCUM_INLINE bool TrainerBase::others_continue() { return loop_->window.others_continue(); }

GRADACCUM_INLINE void TrainerBase::state(Archive& archive) {
  archive.together([&] {
    archive("model", ModelState(module()));
    archive_optimizer(archive);
    loop_->state(archive);
  });
}

GRADACCUM_INLINE void TrainerBase::add(std::unique_ptr<detail::AnyPolicy> policy) {
  loop_->policies.list.push_back(std::move(policy));
}

GRADACCUM_INLINE detail::AnyPolicy* TrainerBase::find_policy(const std::type_info& type) const {
  for (auto& policy : loop_->policies.list)
    if (const auto& one = *policy; typeid(one) == type) return policy.get();
  return nullptr;
}

}  // namespace gradaccum

namespace gradaccum::detail {

GRADACCUM_INLINE bool DataPosition::skips(const AnyBatch& batch) {
  if (to_skip_ == 0) return false;
  ++taken_;
  if (--to_skip_ > 0) return true;
  TORCH_CHECK(expected_.empty() || expected_ == batch.fingerprint(), "Trainer: the data has changed: batch ",
              taken_ - 1,
              " (counted from 0) of the epoch is not the one that the state was saved after; give it the "
              "same data in the same order, or go on all the same by {.allow_changes = true}");
  set_generators(after_skipping_);
  return true;
}

GRADACCUM_INLINE std::optional<std::int64_t> epoch_in_hand(const Archive& archive) {
  const auto value = [&]<class T>(const char* name, T otherwise) {
    const auto found = archive.values().find(name);
    const auto* const held = found == archive.values().end() ? nullptr : std::get_if<T>(&found->second);
    return held ? *held : otherwise;
  };
  if (value("data.taken", std::int64_t{0}) == 0 && !value("data.exhausted", false)) return {};
  return value("fit.epoch", std::int64_t{0});
}

/// As a part of a state: tensors under the names of the generators.
struct ArchivedGenerators {
  Archive::Tensors& states;
  void state(Archive& archive) { archive.tensors(states); }
};

GRADACCUM_INLINE void DataPosition::state(Archive& archive) {
  const bool by_batches = batches_have_state();
  auto taken = taken_;
  auto exhausted = exhausted_;
  auto fingerprint = batch_ ? batch_->fingerprint() : std::string();
  auto epoch_begin = epoch_begin_;
  archive("taken", taken);
  archive("exhausted", exhausted);
  if (by_batches) {
    batches_->state(archive);
  } else {
    archive("last_batch", fingerprint);
    archive("epoch_begin", ArchivedGenerators{epoch_begin});
  }
  if (!archive.loading()) return;
  TORCH_CHECK(taken >= 0, "Trainer: a state must have taken >= 0 batches, got ", taken);
  for (auto& [name, state] : epoch_begin) state = state.clone();  // outlives what it was loaded from
  const bool again = !by_batches && taken > 0 && !exhausted;
  if (again) check_generators(epoch_begin, archive.changes_allowed());
  if (archive.changes_allowed()) fingerprint.clear();
  archive.when_all_fit([=, this] {
    resumes_ = taken > 0 || exhausted;
    exhausted_ = exhausted;
    taken_ = again ? 0 : taken;
    to_skip_ = again ? taken : 0;
    expected_ = fingerprint;
    epoch_begin_ = epoch_begin;
    if (!again) return;
    after_skipping_ = states_of_generators();
    set_generators(epoch_begin);
  });
}

GRADACCUM_INLINE bool WindowRecord::add_loss(const Loss& loss, FitStatus& status, std::int64_t update) {
  loss.check();
  if (loss.items == 0) return true;  // a mean over nothing is often NaN
  const auto on_nan = status.options.on_nan;
  const Place place{status.batch - 1, status.epoch, update + 1};
  if (on_nan == OnNan::skip || (on_nan == OnNan::stop && loss.mean.device().is_cpu())) {
    const auto number = loss.mean.item<double>();
    if (!std::isfinite(number)) {
      if (on_nan == OnNan::stop) stop(number, place);
      if (status.nan_batches++ == 0) status.first_nan = place.text();
      return false;
    }
    mean_.add(number, loss.items);
  } else {
    if (on_nan == OnNan::stop) to_check_.emplace_back(loss.mean.detach(), place);
    mean_.add(loss.mean, loss.items);
  }
  step_.items += loss.items;
  return true;
}

/// Losses on a device are looked at before they are saved.
GRADACCUM_INLINE void WindowRecord::state(Archive& archive) {
  TORCH_CHECK(
      !in_hand_ && !being_closed_,
      "Trainer: must be saved and loaded between micro-batches, got a call from "
      "within a micro-batch, of which some policies do not know yet; use SaveState, or a policy with at_boundary");
  if (archive.loading()) restart();
  check_losses();
  to_check_.clear();
  archive("epoch", step_.epoch);
  archive("micro_batches", step_.micro_batches);
  auto batches = step_.batches == step_.micro_batches ? std::nullopt : std::optional(step_.batches);
  archive("batches", batches);
  step_.batches = batches.value_or(step_.micro_batches);
  archive("samples", step_.samples);
  archive("items", step_.items);
  archive("loss", mean_);
}

GRADACCUM_INLINE WindowTotals WindowRecord::totals(const FitStatus& status) const {
  WindowTotals own;
  own.samples = static_cast<double>(step_.samples);
  own.micro_batches = static_cast<double>(step_.micro_batches);
  if (mean_.weight() > 0) own.loss = mean_.value().item<double>() * mean_.weight();
  own.stop = status.wants_stop ? 1 : 0;
  own.signal = status.wants_signal != 0 ? 1 : 0;
  return own;
}

GRADACCUM_INLINE void WindowRecord::take_totals(const WindowTotals& own, const WindowTotals& all, FitStatus& status) {
  if (all.stop > 0) status.stopped = true;
  if (all.signal > 0) status.signal = status.wants_signal != 0 ? status.wants_signal : SIGTERM;
  if (all.active == 0) {  // an epoch is over on all ranks, and no window closes
    status.trained = status.trained || all.weight > 0;
    return;
  }
  if (own.micro_batches == 0) step_.epoch = status.epoch;
  step_.samples = static_cast<std::int64_t>(all.samples);
  step_.micro_batches = static_cast<std::int64_t>(all.micro_batches);
  status.samples += static_cast<std::int64_t>(all.samples - own.samples);
  mean_ = {};
  if (all.weight > 0) mean_.add(all.loss / all.weight, all.weight);
}

GRADACCUM_INLINE Step WindowRecord::finish(const Gradients& gradients, bool moved, std::int64_t updates, double lr) {
  auto step = step_;
  step.update = updates;
  step.moved = moved;
  step.overflowed = gradients.judged() && Gradients(gradients).overflowed();
  step.items = gradients.items();
  step.loss = mean_.value();
  step.grad_norm = gradients.norm_before_clipping();
  step.lr = lr;
  restart();
  return step;
}

/// A misuse of the window names what to do in a loop by hand, so that an error of it says what to do here.
GRADACCUM_INLINE void Loop::give_up(bool others_wait) {
  try {
    throw;
  } catch (std::exception& error) {
    auto* const misuse = dynamic_cast<c10::Error*>(&error);
    if (misuse && misuse->context().empty() && std::string_view(misuse->msg()).starts_with("GradAccumulator: "))
      misuse->add_context(
          "Trainer: it has such a window, and runs backward, counts, clears and steps by itself: the objective only "
          "computes the loss, a policy changes gradients in before_step(ga::Gradients&), and parameters in after_step");
    const auto peers = window.peers();
    if (peers && (others_wait || window.closing()->elsewhere())) peers->give_up(error.what());
  } catch (...) {  // has nothing to tell other processes
  }
  discard();
}

GRADACCUM_INLINE FitReport Loop::fit(AnyBatches& batches, const FitOptions& options) {
  TORCH_CHECK(!window.peers() || !window.peers()->take_each_backward() || options.tail == Tail::flush,
              "FitOptions: tail must be flush with Shard::gradients: others have the gradients of a window that is "
              "open, and it can neither be dropped nor saved");
  check(options);
  TORCH_CHECK(!status.running, "Trainer: fit() inside of fit(), in a policy say; there is step() for one micro-batch");
  const auto device = trainer.device();
  const ModeGuard mode(trainer.module(), true);
  const at::AutoGradMode grad_mode(true);
  status = {.options = options, .batches = batches.number(), .running = true, .together = status.together};
  data.hold(batches);
  const auto ending = c10::make_scope_exit([this]() noexcept {
    data.let_go();
    status.options = {};
    status.running = false;
  });
  std::optional<MemoryMeter> meter;
  if (options.measure_memory && MemoryMeter::possible()) meter.emplace();
  const auto scopes = policies.scopes(&AnyPolicy::fit_scope);
  bool others_wait = false;
  try {
    resume();
    others_wait = true;
    stop_at_limits();
    while (!status.done() || data.is_in_epoch()) run_epoch(batches);  // a fit that was done may have its epoch to end
  } catch (...) {
    give_up(others_wait);
    throw;
  }
  auto report = report_of(status);
  if (const auto bytes = occupied_memory(device)) report.occupied_bytes[device.str()] = *bytes;
  report.peak_resident_bytes = peak_resident_memory().value_or(0);
  for (const auto of : {c10::Device(c10::kCPU), device})
    if (const auto peak = meter ? meter->peak_bytes(of) : 0; peak > 0) report.peak_bytes[of.str()] = peak;
  return report;
}

GRADACCUM_INLINE bool Loop::step(const AnyBatch& batch) {
  try {
    return train_batch(batch);
  } catch (...) {
    give_up(/*others_wait=*/false);
    throw;
  }
}

GRADACCUM_INLINE bool Loop::flush() {
  try {
    return close_if_begun();
  } catch (...) {
    give_up(/*others_wait=*/false);
    throw;
  }
}

GRADACCUM_INLINE void Loop::discard() {
  record.restart();
  window.discard();
}

/// Policies begin the epoch before they are loaded: so they may do both.
GRADACCUM_INLINE void Loop::resume() {
  const auto& from = status.options.resume;
  const auto* const peers = window.peers().get();
  const auto folder = of_rank_0(peers, [&] { return from.empty() ? std::nullopt : from.newest_(from.directory_); });
  if (folder.empty()) return;
  run_on_all(peers, [&] {
    TORCH_CHECK(from.open_, "FitOptions: rank 0 resumes from ", folder.string(),
                "; `resume` must be given on all ranks");
  });
  auto archive = from.open_(folder, status.options.allow_changes, peers);
  status.resumed_from = folder.string();
  if (const auto epoch = epoch_in_hand(archive)) begin_epoch(*epoch);
  load_state(archive, trainer);
}

GRADACCUM_INLINE void Loop::begin_epoch(std::int64_t epoch) {
  status.epoch = epoch;
  data.begin_epoch();
  policies.all(&AnyPolicy::on_epoch_begin, epoch);
}

GRADACCUM_INLINE void Loop::run_epoch(AnyBatches& batches) {
  if (!data.resumes()) begin_epoch(counts.epochs++);
  if (!data.exhausted() && !status.done() && batches.for_each(*this)) data.exhaust();
  end_epoch();
}

/// Trains with a batch of an epoch. Skips those that a loaded state has seen.
GRADACCUM_INLINE bool Loop::visit(const AnyBatch& batch) {
  if (data.skips(batch)) return true;
  data.see(batch);
  train_batch(batch);
  at_boundary();
  data.forget();
  return !data.exhausted() && !status.done();  // a policy may have loaded another place
}

GRADACCUM_INLINE bool Loop::train_batch(const AnyBatch& batch) {
  ++status.batch;
  if (divider) return train_parts(batch);
  micro_batch(batch, /*begins=*/true, /*may_close=*/true);
  return record.closing() && close_window();
}

/// What else ends a `fit` waits for the end of the batch: a training that goes on from a state begins with the next.
GRADACCUM_INLINE bool Loop::train_parts(const AnyBatch& batch) {
  const auto rows = batch.rows();
  const auto& most = status.options.updates;
  bool moved = false;
  std::int64_t from = 0;
  do {
    const auto to = divider->end_of_window(batch, from);
    divider->run(batch, from, to);
    if (record.closing()) moved = close_window() || moved;
    from = to;
  } while (from < rows && !(status.running && most && status.updates >= *most));
  return moved;
}

/// The gradients of a batch in parts are exchanged with other processes only when the window closes: until then a part
/// can be taken back.
GRADACCUM_INLINE void Loop::micro_batch(const AnyBatch& batch, bool begins, bool may_close) {
  if (record.so_far().micro_batches == 0) window.clear_others();
  record.begin_micro_batch(batch.samples(), begins, status);
  auto scopes = policies.scopes(&AnyPolicy::forward_scope);
  Loss loss = batch.loss();
  scopes.reset();
  if (!record.add_loss(loss, status, counts.updates)) loss.items = 0;
  policies.all(&AnyPolicy::before_backward, loss);
  record.set_closing(may_close && policies.ready());
  const bool closes_whole = record.closing() && !divider;
  if (record.closing() && window.steps_in_backward()) prepare_to_close();
  window.add(std::move(loss), closes_whole);
  if (closes_whole && window.peers()) {  // they send gradients until the window is complete
    prepare_to_close();
    window.complete_early();
  }
  Gradients so_far(window.so_far());
  policies.all(&AnyPolicy::after_backward, so_far);
  record.end_micro_batch();
}

/// Runs once a window, before anything of it moves.
GRADACCUM_INLINE void Loop::prepare_to_close() {
  record.prepare([this] {
    policies.all(&AnyPolicy::before_close);
    auto& factor = window.closing()->factor();
    policies.all(&AnyPolicy::scale_gradients, factor);
    if (finite_required(factor)) factor.require_finite();  // policies are told whether the parameters moved
  });
}

GRADACCUM_INLINE bool Loop::close_window() {
  const auto end = record.begin_closing();
  window.refresh_parameters();
  Gradients gradients(window.so_far());
  prepare_to_close();
  window.complete_early();
  const double lr = trainer.learning_rate();
  window.or_spoil([&] {
    policies.all(&AnyPolicy::reduce_gradients, gradients);
    policies.all(&AnyPolicy::before_step, gradients);
  });
  const bool moved = window.close();
  if (moved) window.clear();
  counts.updates += moved;
  const Step step = record.finish(gradients, moved, counts.updates, lr);
  status.count_window(moved, step.overflowed);
  policies.all(&AnyPolicy::after_window, step);
  if (moved) policies.all(&AnyPolicy::after_step, step);
  return moved;
}

/// A window has begun with a micro-batch of this process, or of another.
GRADACCUM_INLINE bool Loop::close_if_begun() {
  return (record.so_far().micro_batches > 0 || window.closes_with_others()) && close_window();
}

GRADACCUM_INLINE void Loop::end_epoch() {
  const auto tail = status.options.smoke ? Tail::flush : status.options.tail;
  if (tail == Tail::flush && !interrupted()) {
    close_if_begun();
    at_boundary();
  }
  if (interrupted()) return;
  if (status.options.tail == Tail::drop) discard();
  train_with_others();
  if (interrupted()) return;
  status.end_epoch(window.has_weight());
  data.end_epoch();
  policies.on_epoch_end(status.epoch);
  // No process has batches now: each hears what others have wanted since the last exchange.
  policies.others_continue();
  at_boundary();
}

/// Closes windows with other processes, as long as they have batches.
GRADACCUM_INLINE void Loop::train_with_others() {
  for (bool others_have_batches = true; others_have_batches && !interrupted();) {
    others_have_batches = policies.others_continue();
    if (others_have_batches) close_if_begun();
    if (others_have_batches || interrupted()) at_boundary();
  }
}

/// Looks at limits only between two windows.
GRADACCUM_INLINE void Loop::stop_at_limits() {
  if (record.so_far().micro_batches == 0) status.stop_at_limits();
}

/// Policies hear of what was found, and may end the training, before one of them saves it.
GRADACCUM_INLINE void Loop::at_boundary() {
  stop_at_limits();
  policies.all(&AnyPolicy::before_boundary);
  policies.all(&AnyPolicy::at_boundary);
}

GRADACCUM_INLINE Evaluation Loop::evaluate(AnyBatches& batches, Evaluator evaluator, bool on_all) {
  TORCH_CHECK(
      !batches.has_state() || !data.goes_through(batches),
      "Trainer: evaluate must not go through the batches that fit is going through: make another object of them");
  const ModeGuard mode(trainer.module(), false);
  const at::NoGradGuard no_grad;
  struct Pass final : BatchVisitor {
    Loop& loop;
    Evaluator& evaluator;

    Pass(Loop& of, Evaluator& by) : loop(of), evaluator(by) {}
    bool visit(const AnyBatch& batch) override {
      loop.divider ? loop.divider->for_each_part(batch, [this](auto& part) { add(part); }) : add(batch);
      return !loop.status.options.smoke;
    }
    void add(const AnyBatch& batch) {
      auto scopes = loop.policies.scopes(&AnyPolicy::forward_scope);
      const Loss loss = batch.loss();
      scopes.reset();
      evaluator.add(loss, batch.samples());
    }
  } pass(*this, evaluator);
  batches.for_each(pass);
  if (on_all && window.peers()) evaluator.reduce([this](at::Tensor& part) { window.peers()->all_reduce(part); });
  return evaluator.result();
}

GRADACCUM_INLINE void Loop::state(Archive& archive) {
  archive("window", window.named(trainer.module()));
  archive("random", gradaccum::RandomState());
  archive.if_not_all_fit([this, counts = counts, record = record, status = status] {
    this->counts = counts, this->record = record, this->status = status;
  });
  archive("updates", counts.updates);
  archive("epochs", counts.epochs);
  TORCH_CHECK(counts.updates >= 0 && counts.epochs >= 0, "Trainer: updates and epochs of a state must be >= 0, got ",
              counts.updates, " and ", counts.epochs);
  archive("losses", record);
  if (status.running && !(archive.loading() && !archive.has("fit"))) {  // only another fit goes on from there
    archive("fit", status);
    archive("data", data);
  } else {
    archive.leave_out("fit");
    archive.leave_out("data");
  }
  policies.state(archive);
}

GRADACCUM_INLINE void restore_mode(torch::nn::Module& module, bool training) noexcept {
  try {
    if (module.is_training() != training) module.train(training);
  } catch (...) {  // by a train() of the user's own; a destructor has nobody to tell
  }
}

GRADACCUM_INLINE ModeGuard::~ModeGuard() {
  restore_mode(model_, was_training_);
  for (std::size_t i = 0; i < parts_.size(); ++i)  // those outside come first, and take those inside with them
    restore_mode(*parts_[i], modes_[i]);
}

}  // namespace gradaccum::detail

#undef GRADACCUM_INLINE
