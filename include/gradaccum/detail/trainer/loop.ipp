// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/trainer/loop.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/trainer/fit_scope.hpp>
#include <gradaccum/detail/trainer/mode_guard.hpp>
#include <gradaccum/detail/window/peers.hpp>
#include <gradaccum/state_parts.hpp>
#include <gradaccum/trainer_base.hpp>
#include <gradaccum/training_state.hpp>

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <exception>
#include <string_view>
#include <utility>

namespace gradaccum::detail {

GRADACCUM_INLINE Loop::Loop(TrainerBase& its_trainer, std::unique_ptr<AnyOptimizer> optimizer)
    : trainer(its_trainer), window(std::move(optimizer)) {}

template <class Work>
auto Loop::guarded(Work work, const bool& others_wait) {
  try {
    return work();
  } catch (std::exception& error) {
    give_up(error, others_wait);
    throw;
  } catch (...) {
    discard();
    throw;
  }
}

/// A misuse of the window names what to do in a loop by hand, so that an error of it says what to do here.
GRADACCUM_INLINE void Loop::give_up(std::exception& error, bool others_wait) {
  const auto peers = window.peers();
  if (peers && window.closing()->elsewhere()) peers->give_up(error.what());
  discard();
  auto* const misuse = dynamic_cast<c10::Error*>(&error);
  if (misuse && misuse->context().empty() && std::string_view(misuse->msg()).starts_with("GradAccumulator: "))
    misuse->add_context(
        "Trainer: it has such a window, and runs backward, counts, clears and steps by itself: the objective only "
        "computes the loss, a policy changes gradients in before_step(ga::Gradients&), and parameters in after_step");
  if (peers && others_wait) peers->give_up(error.what());
}

GRADACCUM_INLINE FitReport Loop::fit(AnyBatches& batches, const FitOptions& options) {
  TORCH_CHECK(!window.peers() || !window.peers()->take_each_backward() || options.tail == Tail::flush,
              "FitOptions: tail must be flush with Shard::gradients: others have the gradients of a window that is "
              "open, and it can neither be dropped nor saved");
  const FitScope scope(trainer.module(), trainer.device(), status, {.options = options, .batches = batches.number()});
  const DataScope holding(data, batches);
  const auto scopes = policies.scopes(&AnyPolicy::in_fit_scope);
  bool others_wait = false;
  const auto run_epochs = [&] {
    resume();
    others_wait = true;
    stop_at_limits();
    while (!status.done() || data.is_in_epoch()) run_epoch(batches);  // a fit that was done may have its epoch to end
  };
  guarded(run_epochs, others_wait);
  return scope.report();
}

GRADACCUM_INLINE bool Loop::step(const AnyBatch& batch) {
  return guarded([&] { return train_batch(batch); });
}

GRADACCUM_INLINE bool Loop::flush() {
  return guarded([&] { return close_if_begun(); });
}

GRADACCUM_INLINE void Loop::discard() {
  record.restart();
  window.discard();
}

/// Policies begin the epoch before they are loaded: so they may do both.
GRADACCUM_INLINE void Loop::resume() {
  const auto& from = status.options.resume;
  const auto* const peers = window.peers().get();
  const auto folder = of_rank_0(peers, [&] { return from.newest(); });
  if (folder.empty()) return;
  auto archive = from.open(folder, status.options.allow_changes, peers);
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
  if (!data.exhausted() && !status.done()) {
    for (const auto cursor = batches.begin(); !data.exhausted() && !status.done();) {
      const AnyBatch* const batch = cursor->next();
      if (!batch) {
        data.exhaust();
      } else if (!data.skips(*batch)) {
        data.see(*batch);
        train_batch(*batch);
        at_boundary();
        data.forget();
      }
    }
  }
  end_epoch();
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
  bool moved = false;
  std::int64_t from = 0;
  do {
    const auto to = divider->end_of_window(batch, from);
    divider->run(batch, from, to,
                 [this](auto& part, bool begins, bool may_close) { micro_batch(part, begins, may_close); });
    if (record.closing()) moved = close_window() || moved;
    from = to;
  } while (from < rows && !has_all_updates());
  return moved;
}

/// The gradients of a batch in parts are exchanged with other processes only when the window closes: until then a part
/// can be taken back.
GRADACCUM_INLINE void Loop::micro_batch(const AnyBatch& batch, bool begins, bool may_close) {
  if (record.so_far().micro_batches == 0) window.clear_others();
  record.begin_micro_batch(batch.samples(), begins, status);
  auto scopes = policies.scopes(&AnyPolicy::in_forward_scope);
  Loss loss = batch.loss();
  scopes.reset();
  if (!record.take(loss, status, counts.updates)) loss.items = 0;
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
  window.follow();
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
  return (record.so_far().micro_batches > 0 || window.follows_others()) && close_window();
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
  policies.processes_first(&AnyPolicy::on_epoch_end, status.epoch);
  exchange_with_others();  // no process has batches now: each hears what others have wanted since it last heard of it
  at_boundary();
}

/// Closes windows with other processes, as long as they have batches.
GRADACCUM_INLINE void Loop::train_with_others() {
  for (bool others_have_batches = true; others_have_batches && !interrupted();) {
    others_have_batches = exchange_with_others();
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

GRADACCUM_INLINE bool Loop::has_all_updates() const {
  return status.running && status.options.updates && status.updates >= *status.options.updates;
}

GRADACCUM_INLINE Evaluation Loop::evaluate(AnyBatches& batches, Evaluator evaluator, bool on_all) {
  TORCH_CHECK(
      !batches.has_state() || !data.goes_through(batches),
      "Trainer: evaluate must not go through the batches that fit is going through: make another object of them");
  const ModeGuard mode(trainer.module(), false);
  const at::NoGradGuard no_grad;
  const auto evaluate = [&](const AnyBatch& batch) {
    auto scopes = policies.scopes(&AnyPolicy::in_forward_scope);
    const Loss loss = batch.loss();
    scopes.reset();
    evaluator.add(loss, batch.samples());
  };
  const auto cursor = batches.begin();
  while (const AnyBatch* const batch = cursor->next()) {
    divider ? divider->for_each_part(*batch, evaluate) : evaluate(*batch);
    if (status.options.smoke) break;
  }
  if (on_all && window.peers()) evaluator.reduce([this](at::Tensor& part) { window.peers()->add_up(part); });
  return evaluator.result();
}

GRADACCUM_INLINE void Loop::state(Archive& archive) {
  archive("window", window.named(trainer.module()));
  archive("random", gradaccum::RandomState());
  archive.if_not_all_fit([this, counts = counts, record = record, status = status] {
    this->counts = counts, this->record = record, this->status = status;
  });
  counts.state(archive);
  archive("losses", record);
  archive_fit(archive, status, data);
  policies.state(archive);
}

}  // namespace gradaccum::detail
