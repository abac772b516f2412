// SPDX-License-Identifier: Apache-2.0
// Implements the Trainer's loop: epochs, batches, micro-batches, windows, the position in the data, and the signals
// that stop a fit.
#pragma once

#include <gradaccum/detail/trainer/loop.hpp>
#include <gradaccum/trainer_base.hpp>

#include <gradaccum/detail/memory/memory_ledger.hpp>
#include <gradaccum/detail/optimizers/param_states.hpp>
#include <gradaccum/detail/window/communicator.hpp>
#include <gradaccum/detail/window/window_gradients.hpp>
#include <gradaccum/training_state.hpp>

#include <ATen/core/grad_mode.h>

#include <signal.h>
#include <algorithm>
#include <array>
#include <atomic>
#include <exception>
#include <limits>
#include <mutex>

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
  return loop_->evaluate(batches, std::move(evaluator), on_all).value();
}
GRADACCUM_INLINE std::optional<Evaluation> TrainerBase::validate_with(detail::AnyBatches& batches,
                                                                      detail::Evaluator evaluator) {
  return loop_->evaluate(batches, std::move(evaluator), /*on_all=*/true, /*until_signal=*/true);
}
GRADACCUM_INLINE bool TrainerBase::step_with(const detail::AnyBatch& batch) { return loop_->step(batch); }
GRADACCUM_INLINE bool TrainerBase::flush() { return loop_->flush(); }
GRADACCUM_INLINE void TrainerBase::discard() { loop_->discard(); }

GRADACCUM_INLINE void TrainerBase::stop(std::string why) { loop_->status.stop(std::move(why)); }
GRADACCUM_INLINE void TrainerBase::stop_on_all(std::string why) { loop_->status.stop(std::move(why), /*alike=*/true); }
GRADACCUM_INLINE void TrainerBase::interrupt(int signal) { loop_->status.interrupt(signal); }

GRADACCUM_INLINE std::vector<at::Tensor> TrainerBase::parameters() const {
  return loop_->window.optimizer().parameters();
}
GRADACCUM_INLINE at::Device TrainerBase::device() const { return loop_->window.optimizer().device(); }
GRADACCUM_INLINE std::string TrainerBase::optimizer_name() const { return loop_->window.optimizer().name(); }
GRADACCUM_INLINE std::int64_t TrainerBase::updates() const { return loop_->counts.updates; }
GRADACCUM_INLINE std::optional<std::int64_t> TrainerBase::planned_updates(std::int64_t at_epoch_begin) const {
  return loop_->planned_updates(at_epoch_begin);
}
GRADACCUM_INLINE std::int64_t TrainerBase::updates_at_epoch_begin() const {
  const auto& status = loop_->status;
  const auto steps = loop_->steps_in ? loop_->steps_in(status.epoch) : 1;
  const auto open = status.options.tail == Tail::carry ? loop_->record.so_far().batches - status.batch : 0;
  return updates() - ((open % steps + steps) % steps + status.batch) / steps;
}
GRADACCUM_INLINE bool TrainerBase::closing() const { return loop_->record.closing(); }
GRADACCUM_INLINE const Step& TrainerBase::window() const { return loop_->record.so_far(); }
GRADACCUM_INLINE const FitStatus& TrainerBase::status() const { return loop_->status; }

GRADACCUM_INLINE void TrainerBase::validated(std::string name, Evaluation found, bool due) {
  const auto& status = loop_->status;
  const Validation validation{.name = std::move(name),
                              .update = updates(),
                              .epoch = status.epoch,
                              .samples = status.samples,
                              .seconds = status.running ? status.seconds() : 0,
                              .found = std::move(found),
                              .due = due};
  auto& all = loop_->status.validations;
  const auto is_earlier = [&](const Validation& one) { return one.name == validation.name; };
  std::erase_if(all, [&](auto& one) { return is_earlier(one) && one.update == validation.update && !one.due; });
  for (auto& one : all)
    if (is_earlier(one)) one.found.tensors.clear();  // may be large: only the newest keeps them
  all.push_back(validation);
  loop_->policies.all(&detail::AnyPolicy::on_validation, validation);
}

GRADACCUM_INLINE void TrainerBase::will_validate(const std::string& name, const std::vector<std::string>& metrics) {
  for (auto& metric : metrics) will_validate(name, metric, std::nullopt);
}
GRADACCUM_INLINE void TrainerBase::will_validate(const std::string& name, const std::string& metric,
                                                 std::optional<Mode> mode) {
  auto& known = loop_->metrics[name + '/' + metric];
  if (mode) known = mode;
}
GRADACCUM_INLINE const MetricModes& TrainerBase::metrics() const { return loop_->metrics; }

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
  if (loop_->state_copy)
    for (auto& [file, memory] : *loop_->state_copy) see(&MemoryByKind::state_copy, memory);
}

GRADACCUM_INLINE void TrainerBase::finish_background_save() {
  if (loop_->finish_background_save) loop_->finish_background_save();
}

GRADACCUM_INLINE void TrainerBase::set_accumulate_in(std::optional<at::ScalarType> dtype) {
  loop_->window.set_accumulate_in(dtype);
}
GRADACCUM_INLINE void TrainerBase::set_in_backward(bool on) { loop_->window.set_in_backward(on); }
GRADACCUM_INLINE bool TrainerBase::steps_in_backward() const { return loop_->window.steps_in_backward(); }
GRADACCUM_INLINE void TrainerBase::set_batch_size(std::int64_t samples) { loop_->batch_size = samples; }
GRADACCUM_INLINE void TrainerBase::will_set_learning_rate() { loop_->rate_is_set = true; }

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
    archive("model", ModelState(module(), loop_->left_out));
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
              " (counted from 0) of the epoch is not the one that the state was saved after; use the same data in the "
              "same order, or continue anyway with {.allow_changes = true}");
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
    archive("epoch_begin", OwnTensors{epoch_begin});
  }
  if (!archive.loading()) return;
  if (archive.ranks().are_others()) {
    taken = std::ranges::max(archive.of_ranks<std::int64_t>("taken"));
    const auto ends = archive.of_ranks<bool>("exhausted");
    exhausted = std::ranges::find(ends, false) == ends.end();
    TORCH_CHECK(by_batches || taken == 0 || exhausted, "Trainer: the state was saved in the middle of an epoch, by ",
                archive.ranks().saved,
                " rank(s), and batches without a state(ga::Archive&) do not tell another number of ranks which of them "
                "are left; resume with as many until the epoch ends, or use TensorBatches or LengthBuckets");
  }
  TORCH_CHECK(taken >= 0, "Trainer: a state must have taken >= 0 batches, got ", taken);
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
  read_mean_.reset();
  if (loss.items == 0) return true;  // a mean over nothing is often NaN
  const auto on_nan = status.options.on_nan;
  const Place place{status.batch - 1, status.epoch, update + 1};
  if (on_nan == OnNan::skip || (on_nan == OnNan::stop && loss.mean.device().is_cpu())) {
    const auto number = loss.mean.item<double>();
    if (!detail::is_finite(number)) {
      if (on_nan == OnNan::stop) stop(number, place);
      if (status.nan_batches++ == 0) status.first_nan = place.text();
      ++left_out_;
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

GRADACCUM_INLINE void WindowRecord::check_losses(const at::Tensor& mean) {
  if (mean.defined() && !detail::is_finite(*(read_mean_ = mean.item<double>())))
    for (auto& [loss, place] : to_check_)
      if (const auto number = loss.item<double>(); !detail::is_finite(number)) stop(number, place);
  to_check_.clear();
}

/// Names all batches of a window, because its gradients are checked only once, as a sum.
GRADACCUM_INLINE void WindowRecord::leave_out(const std::string& parameter, FitStatus& status, std::int64_t update) {
  auto place = Place{status.batch - 1, status.epoch, update + 1}.text();
  if (step_.batches > 1) place = plain_text("one of the ", step_.batches, " batches up to ", place);
  if (status.together) place += ", of this process or of another";
  TORCH_CHECK(status.options.on_nan == OnNan::skip, "Trainer: the gradients must be finite, got NaN or infinity",
              parameter, ", for ", place,
              ", whose loss is finite; look for functions without a derivative at 0, such as sqrt and norm, or skip "
              "such windows: {.on_nan = ga::OnNan::skip}");
  if (status.nan_batches == 0) status.first_nan = place;
  status.nan_batches += std::max<std::int64_t>(step_.batches - std::exchange(left_out_, step_.batches), 0);
}

/// Reads losses on a device first, so that a non-finite one throws and is not saved.
GRADACCUM_INLINE void WindowRecord::state(Archive& archive) {
  TORCH_CHECK(!in_hand_ && !being_closed_,
              "Trainer: must be saved and loaded between micro-batches, got a call inside one, which some policies "
              "have not seen yet; use SaveState, or a policy with at_boundary");
  if (archive.loading()) restart();
  check_losses(unread_mean());
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
  if (mean_.weight() > 0) own.loss = (read_mean_ ? *read_mean_ : mean_.value().item<double>()) * mean_.weight();
  own.stop = status.wants_stop ? 1 : 0;
  own.signal = status.wants_signal != 0 ? 1 : 0;
  own.save = status.wants_save ? 1 : 0;
  return own;
}

GRADACCUM_INLINE void WindowRecord::take_totals(const WindowTotals& own, const WindowTotals& all, FitStatus& status) {
  if (all.stop > 0) status.stopped = true;
  if (all.signal > 0) status.signal = status.wants_signal != 0 ? status.wants_signal : SIGTERM;
  if (all.save > 0) status.saves = true;
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
  step.overflowed = overflow_is_awaited && gradients.judged() && Gradients(gradients).overflowed();
  step.items = gradients.items();
  step.loss = mean_.value();
  step.grad_norm = gradients.norm_before_clipping();
  step.lr = lr;
  restart();
  return step;
}

/// Adds the Trainer's equivalent to errors of the window, whose advice is for hand-written loops.
GRADACCUM_INLINE void Loop::give_up(bool others_wait) {
  try {
    throw;
  } catch (std::exception& error) {
    auto* const misuse = dynamic_cast<c10::Error*>(&error);
    if (misuse && misuse->context().empty() && std::string_view(misuse->msg()).starts_with("GradAccumulator: "))
      misuse->add_context(
          "Trainer: this is its window, and it calls backward, step and zero_grad itself: the objective only computes "
          "the loss, a policy changes gradients in before_step(ga::Gradients&), and parameters in after_step");
    const auto peers = window.peers();
    if (peers && (others_wait || window.closing()->elsewhere())) peers->give_up(error.what());
  } catch (...) {  // has no text for other ranks
  }
  discard();
}

GRADACCUM_INLINE FitReport Loop::fit(AnyBatches& batches, const FitOptions& options) {
  TORCH_CHECK(!window.peers() || !window.peers()->take_each_backward() || options.tail == Tail::flush,
              "FitOptions: tail must be ga::Tail::flush with Shard::gradients: other ranks hold gradients of an open "
              "window, which can be neither dropped nor saved");
  check(options);
  note_given();
  TORCH_CHECK(!status.running,
              "Trainer: fit() was called inside fit(), as in a policy; call step() for one micro-batch");
  const auto device = trainer.device();
  const ModeGuard mode(trainer.module(), true);
  const at::AutoGradMode grad_mode(true);
  status = {.options = options, .batches = batches.number(), .running = true, .together = status.together};
  items_ = 0, warned_of_nothing_ = false;
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
    if (!status.resumed_from.empty())
      policies.all(&AnyPolicy::before_boundary);  // repeats a validation that a signal cut short
    others_wait = true;
    stop_at_limits();
    while (!status.done() || data.is_in_epoch()) run_epoch(batches);  // a state may be of the end of an epoch
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

GRADACCUM_INLINE bool Loop::or_give_up(c10::function_ref<bool()> work) {
  try {
    return work();
  } catch (...) {
    give_up(/*others_wait=*/false);
    throw;
  }
}

GRADACCUM_INLINE bool Loop::step(const AnyBatch& batch) {
  note_given();
  return or_give_up([&] { return train_batch(batch); });
}
GRADACCUM_INLINE bool Loop::flush() {
  return or_give_up([&] { return close_if_begun(); });
}

GRADACCUM_INLINE void Loop::discard() {
  record.restart();
  window.discard();
}

/// Calls `on_epoch_begin` before loading, so that it cannot overwrite the loaded state of a policy.
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
  if (!data.exhausted() && !status.done() && batches.for_each([this](auto& batch) { return visit(batch); }))
    data.exhaust();
  end_epoch();
}

/// Trains with a batch of an epoch, or skips it if the loaded state was saved after it. False ends the epoch's
/// iteration.
GRADACCUM_INLINE bool Loop::visit(const AnyBatch& batch) {
  if (data.skips(batch)) return true;
  data.see(batch);
  train_batch(batch);
  at_boundary();
  data.forget();
  return !data.exhausted() && !status.done();  // a policy may have loaded another position
}

GRADACCUM_INLINE bool Loop::train_batch(const AnyBatch& batch) {
  ++status.batch;
  if (divider) return train_parts(batch);
  micro_batch(batch, /*begins=*/true, /*may_close=*/true);
  return record.closing() && close_window();
}

/// Checks only `.updates` inside a batch. Other limits wait for its end, because a resumed run starts at the next
/// batch.
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

/// Ranks exchange the gradients of a divided batch only when the window closes, because its parts may be undone until
/// then.
GRADACCUM_INLINE void Loop::micro_batch(const AnyBatch& batch, bool begins, bool may_close) {
  if (record.so_far().micro_batches == 0) window.clear_others();
  record.begin_micro_batch(batch.samples(), begins, status);
  auto scopes = policies.scopes(&AnyPolicy::forward_scope);
  Loss loss = batch.loss();
  scopes.reset();
  if (!record.add_loss(loss, status, counts.updates)) loss.items = 0;
  items_ += loss.items;
  policies.all(&AnyPolicy::before_backward, loss);
  record.set_closing(may_close && policies.ready());
  const bool closes_whole = record.closing() && !divider;
  if (record.closing() && window.steps_in_backward()) prepare_to_close();
  explaining(
      "graph a second time",
      [&] { return plain_text("Trainer: in batch ", status.batch - 1, " of epoch ", status.epoch, " (both from 0)"); },
      [&] { window.add(std::move(loss), closes_whole); });
  if (closes_whole && window.peers()) {  // ranks exchange gradients until it is complete
    prepare_to_close();
    window.complete_early();
  }
  auto so_far = window.so_far()->handle();
  policies.all(&AnyPolicy::after_backward, so_far);
  record.end_micro_batch();
}

/// Runs once per window, before any parameter is updated. Reads losses on a device now if ranks exchange them or the
/// backward pass steps; otherwise `check_finite` reads them together with its result for the gradients.
GRADACCUM_INLINE void Loop::prepare_to_close() {
  record.prepare(window.peers() || window.steps_in_backward(), [this] {
    policies.all(&AnyPolicy::before_close);
    auto& factor = window.closing()->factor();
    policies.all(&AnyPolicy::scale_gradients, factor);
    record.overflow_is_awaited = finite_required(factor);
    if (record.overflow_is_awaited) factor.require_finite();      // policies learn whether parameters moved
    if (window.steps_in_backward() && trainer.device().is_cpu())  // each part would synchronize another device
      window.closing()->set_look_at_part([this](auto& part) { check_finite(part); });
  });
}

/// Checks unread losses and the gradients of a window, or of a part of one, with one synchronization.
GRADACCUM_INLINE void Loop::check_finite(WindowGradients& gradients) {
  auto mean = record.unread_mean();
  bool found = false;
  if (checks(gradients)) {
    gradients.factor().require_finite();
    found = gradients.overflowed(&mean);
  }
  record.check_losses(mean);
  if (!found || record.overflow_is_awaited) return;
  std::string parameter;
  const auto parameters = gradients.parameters(), all = gradients.raw();
  const bool is_cut = window.peers() && window.peers()->shards();  // gradients are of slices of parameters
  for (std::size_t i = 0; i < all.size() && parameter.empty(); ++i)
    if (found_inf({all[i]}, norms({all[i]}, 2)).item<float>() != 0)
      for (auto& named : trainer.module().named_parameters())
        if (named.value().is_same(parameters[i]) || (is_cut && named.value().is_alias_of(parameters[i])))
          parameter = " in that of " + named.key();
  record.leave_out(parameter, status, counts.updates);
}

GRADACCUM_INLINE bool Loop::close_window() {
  const auto end = record.begin_closing();
  window.refresh_parameters();
  auto gradients = window.so_far()->handle();
  prepare_to_close();
  window.complete_early();
  const double lr = trainer.learning_rate();
  window.or_spoil([&] {
    const bool asks_first = checks(*window.closing()) && window.peers() && window.peers()->shards();
    if (asks_first)
      gradients.factor().require_finite();  // checked first: policies then change shards, and no rank has all of them
    policies.all(&AnyPolicy::before_step, gradients);
    if (!asks_first && window.closing()->must_be_finite()) record.overflow_is_awaited = true;  // a policy required it
    check_finite(*window.closing());
  });
  const bool moved = window.close();
  if (moved) window.clear();
  counts.updates += moved;
  status.at_rate_0 += moved && window.optimizer().rates_are_0();
  const Step step = record.finish(gradients, moved, counts.updates, lr);
  status.count_window(moved, step.overflowed);
  policies.all(&AnyPolicy::after_window, step);
  if (moved) policies.all(&AnyPolicy::after_step, step);
  return moved;
}

/// Closes the window if this rank or another has added a micro-batch to it.
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
  check_trained();
  status.end_epoch();
  data.end_epoch();
  policies.on_epoch_end(status.epoch);
  // No rank has batches left: exchanges the requests to stop or save that came since the last window.
  policies.others_continue();
  at_boundary();
}

/// Throws after an epoch without updates if only limits other than `.epochs` are set, because that fit would never end.
/// Otherwise warns once per fit.
GRADACCUM_INLINE void Loop::check_trained() {
  const auto& options = status.options;
  if (status.trained || window.has_weight() || status.done()) return;
  const auto why = why_nothing_moved();
  TORCH_CHECK(options.epochs || !options.has_limit(), "Trainer: fit must ",
              options.updates ? c10::str("make ", *options.updates, " updates") : "reach its limit", ", but epoch ",
              status.epoch, " (counted from 0) made ", options.updates ? "none" : "no update", ": ", why);
  const bool end_epoch_says = status.batch == 0 && status.batches.value_or(0) > 0, report_says = status.nan_batches > 0;
  if (end_epoch_says || report_says || !trainer.is_first() || std::exchange(warned_of_nothing_, true)) return;
  TORCH_WARN("Trainer: epoch ", status.epoch, " (counted from 0) made no update: ", why);
}

GRADACCUM_INLINE std::string Loop::why_nothing_moved() const {
  if (status.batch == 0) return "the batches are empty";
  if (status.nan_batches > 0) return "losses or gradients were NaN or infinite";
  if (items_ == 0) return "all losses are of 0 items";
  if (status.windows == 0) return "it is shorter than a window, and .tail = ga::Tail::drop drops it";
  const auto trained = trainer.parameters(), own = trainer.module().parameters();
  const bool of_model = std::ranges::any_of(trained, [&](auto& parameter) {
    return std::ranges::any_of(own, [&](auto& one) { return one.is_same(parameter) || one.is_alias_of(parameter); });
  });
  return of_model ? "no loss gives a gradient to the optimizer's parameters, which are frozen, detached or not used"
                  : "the optimizer has none of the model's parameters; was it made for a copy of the model?";
}

/// Closes windows together with other ranks while any of them has batches.
GRADACCUM_INLINE void Loop::train_with_others() {
  for (bool others_have_batches = true; others_have_batches && !interrupted();) {
    others_have_batches = policies.others_continue();
    if (others_have_batches) close_if_begun();
    if (others_have_batches || interrupted()) at_boundary();
  }
}

/// Checks limits only between two windows.
GRADACCUM_INLINE void Loop::stop_at_limits() {
  if (record.so_far().micro_batches == 0) status.stop_at_limits();
}

/// Calls every `before_boundary` first: a validation there may stop the fit before another policy saves its state.
GRADACCUM_INLINE void Loop::at_boundary() {
  stop_at_limits();
  policies.all(&AnyPolicy::before_boundary);
  policies.all(&AnyPolicy::at_boundary);
}

GRADACCUM_INLINE std::optional<Evaluation> Loop::evaluate(AnyBatches& batches, Evaluator evaluator, bool on_all,
                                                          bool until_signal) {
  TORCH_CHECK(!batches.has_state() || !data.goes_through(batches),
              "Trainer: evaluate must not iterate over the batches that fit is iterating over: construct another "
              "object of them");
  const ModeGuard mode(trainer.module(), false);
  const at::AutoGradMode gradients(evaluator.with_gradients());
  const auto add = [&](const AnyBatch& batch) {
    auto scopes = policies.scopes(&AnyPolicy::forward_scope);
    const auto how = [] { return "Trainer: pass ga::WithGradients() to evaluate or Validate, beside the metrics"; };
    const char* const says = evaluator.with_gradients() ? nullptr : "does not require grad";
    const auto loss = explaining(says, how, [&] { return batch.loss(); });
    scopes.reset();
    const at::NoGradGuard no_grad;  // else a metric that sums outputs would keep all graphs
    evaluator.add(loss, batch.samples());
  };
  const auto is_cut = [&] { return interrupted() || StopSignals::came() != 0; };
  batches.for_each([&](const AnyBatch& batch) {
    divider ? divider->for_each_part(batch, add) : add(batch);
    return !status.options.smoke && !(until_signal && is_cut());
  });
  const auto all_reduce = [this](at::Tensor& part) { window.peers()->all_reduce(part); };
  const bool reduces = on_all && window.peers();
  if (until_signal) {
    auto cut = at::full({}, is_cut(), at::kDouble);
    if (reduces) all_reduce(cut);
    if (cut.item<double>() > 0) {
      const int own = StopSignals::came();
      if (!interrupted()) status.signal = own != 0 ? own : SIGTERM;
      return {};
    }
  }
  if (reduces) evaluator.reduce(all_reduce);
  return evaluator.result();
}

GRADACCUM_INLINE void Loop::note_given() {
  if (!given.empty()) return;
  if (auto* const optimizer = window.optimizer().torch_optimizer) given = options_of(*optimizer);
  given["frozen"] = frozen_parameters(trainer.module());
  kept = given;
}

/// Saves the options of the optimizer and the names of frozen parameters. Loading keeps the state's options and warns
/// if this program has others; with `allow_changes`, the program's replace them.
GRADACCUM_INLINE void Loop::archive_given(Archive& archive) {
  note_given();
  std::string changes;
  Archive::Values changed, of_state = given;
  for (auto& [name, value] : given) {
    std::visit(
        [&, &key = name](auto& here) {
          using T = std::remove_cvref_t<decltype(here)>;
          if constexpr (!std::is_same_v<T, at::Tensor>) {
            auto before = std::optional(std::get<T>(kept.at(key)));
            archive("given_options." + key, before);
            if (before) of_state[key] = *before;
            if (!before || *before == here || (rate_is_set && key.ends_with(".lr"))) return;
            changed[key] = here;
            changes += changes.empty() ? "" : ", ";
            changes += key == "frozen" ? "the frozen parameters" : c10::str(key, " (", here, ", was ", *before, ")");
          }
        },
        value);
  }
  if (!archive.loading()) return;
  archive.leave_out("given_options");  // options of groups that the program adds later
  archive.when_all_fit([this, changed, changes, of_state, takes_them = archive.changes_allowed()] {
    kept = takes_them ? given : of_state;
    if (!takes_them && !changes.empty() && trainer.is_first())
      TORCH_WARN("Trainer: the state's values are kept, although this program sets others: ", changes,
                 "; {.allow_changes = true} uses the program's, and a ga::Schedule sets the learning rate");
    auto* const optimizer = window.optimizer().torch_optimizer;
    if (!takes_them || !optimizer) return;
    auto options = options_of(*optimizer);
    for (auto& [name, option] : options)
      if (const auto given_anew = changed.find(name); given_anew != changed.end()) option = given_anew->second;
    set_options(*optimizer, std::move(options));
  });
}

GRADACCUM_INLINE std::optional<std::int64_t> Loop::planned_updates(std::int64_t at_epoch_begin) const {
  const auto& options = status.options;
  if (!status.running || options.samples || options.time) return {};
  const auto most =
      options.updates ? counts.updates - status.updates + *options.updates : std::numeric_limits<std::int64_t>::max();
  if (options.updates && !options.epochs) return most;
  const bool carries = options.tail == Tail::carry;
  const auto decide = std::ranges::count_if(policies.list, [](auto& policy) { return policy->ready != nullptr; });
  if (decide != (steps_in ? 1 : 0) || (carries && window.peers())) return {};
  auto updates = at_epoch_begin;
  auto open = carries ? record.so_far().batches - status.batch : 0;  // carried over from the last epoch
  for (std::int64_t ahead = 0; ahead < options.epochs.value_or(1) - status.epochs && updates < most; ++ahead) {
    const auto batches = data.most_batches(ahead, /*alone=*/!window.peers());
    if (!batches) return {};
    const auto steps = steps_in ? steps_in(status.epoch + ahead) : 1;
    open = (open % steps + steps) % steps + *batches;
    updates += open / steps + (options.tail == Tail::flush && open % steps > 0);
    open = carries ? open % steps : 0;
  }
  return std::min(updates, most);
}

GRADACCUM_INLINE void Loop::state(Archive& archive) {
  archive("window", window.named(trainer.module()));
  archive("random", gradaccum::RandomState());
  archive_given(archive);
  archive.if_not_all_fit([this, counts = counts, record = record, status = status] {
    this->counts = counts, this->record = record, this->status = status;
  });
  archive("updates", counts.updates);
  archive("epochs", counts.epochs);
  TORCH_CHECK(counts.updates >= 0 && counts.epochs >= 0, "Trainer: updates and epochs of a state must be >= 0, got ",
              counts.updates, " and ", counts.epochs);
  archive("losses", record);
  if (status.running && !(archive.loading() && !archive.has("fit"))) {  // only a fit resumes there
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
  } catch (...) {  // thrown by an overridden train(); a destructor cannot report it
  }
}

GRADACCUM_INLINE ModeGuard::~ModeGuard() {
  restore_mode(model_, was_training_);
  for (std::size_t i = 0; i < parts_.size(); ++i)  // outer modules first: train() sets inner ones, too
    restore_mode(*parts_[i], modes_[i]);
}

/// State shared by all StopSignals of the program.
struct SignalState {
  struct Signal {
    struct sigaction before = {};
    int users = 0;
    std::atomic<int> place{0};  // order of arrival, from 1; 0: not received
  };
  std::array<Signal, NSIG> signals = {};
  std::atomic<int> came{0};
  std::mutex mutex;
  int users = 0;

  static_assert(std::atomic<int>::is_always_lock_free);
};

GRADACCUM_INLINE constinit SignalState signal_state;

// Does only async-signal-safe work.
GRADACCUM_INLINE void note_signal(int signal, siginfo_t* information, void* context) {
  auto& [before, users, place] = signal_state.signals[static_cast<std::size_t>(signal)];
  const int now = ++signal_state.came;
  int none = 0;
  place.compare_exchange_strong(none, now);
  if (now > 1 && signal == SIGINT) {
    ::signal(signal, SIG_DFL);
    ::raise(signal);
  }
  if (before.sa_handler == SIG_DFL) return;
  if ((before.sa_flags & SA_SIGINFO) != 0)
    before.sa_sigaction(signal, information, context);
  else
    before.sa_handler(signal);
}

GRADACCUM_INLINE StopSignals::StopSignals(std::vector<int> signals) : signals_(std::move(signals)) {
  const std::lock_guard lock(signal_state.mutex);
  if (signal_state.users++ == 0) signal_state.came = 0;
  for (const int signal : signals_) {
    auto& [before, users, place] = signal_state.signals.at(static_cast<std::size_t>(signal));
    if (users++ > 0) continue;
    place = 0;
    ::sigaction(signal, nullptr, &before);
    if (before.sa_handler == SIG_IGN) continue;
    struct sigaction ours {};
    ours.sa_sigaction = note_signal;
    ours.sa_flags = SA_RESTART | SA_SIGINFO;
    ::sigaction(signal, &ours, nullptr);
  }
}

GRADACCUM_INLINE StopSignals::~StopSignals() {
  const std::lock_guard lock(signal_state.mutex);
  --signal_state.users;
  for (const int signal : signals_) {
    auto& [before, users, place] = signal_state.signals[static_cast<std::size_t>(signal)];
    if (--users > 0) continue;
    ::sigaction(signal, &before, nullptr);
    if (place > 0 && !asked_ && before.sa_handler == SIG_DFL) ::raise(signal);  // a user's handler was called already
  }
}

/// Returns the first signal received for which `counts` is true, or 0.
GRADACCUM_INLINE int first_signal(c10::function_ref<bool(int signal)> counts) {
  int first = 0, place_of_first = 0;
  for (int signal = 1; signal < NSIG; ++signal) {
    const int at = signal_state.signals[static_cast<std::size_t>(signal)].place;
    if (at > 0 && counts(signal) && (first == 0 || at < place_of_first)) first = signal, place_of_first = at;
  }
  return first;
}

GRADACCUM_INLINE int StopSignals::came() {
  const std::lock_guard lock(signal_state.mutex);
  return first_signal([](int signal) { return signal_state.signals[static_cast<std::size_t>(signal)].users > 0; });
}

GRADACCUM_INLINE int StopSignals::received() {
  const int first = first_signal([this](int signal) { return std::ranges::find(signals_, signal) != signals_.end(); });
  asked_ = asked_ || first != 0;
  return first;
}

}  // namespace gradaccum::detail

#undef GRADACCUM_INLINE
