// SPDX-License-Identifier: Apache-2.0
// Implements the Trainer's loop: epochs, batches, micro-batches and windows.
#pragma once

#include <gradaccum/detail/training/loop.hpp>

#include <gradaccum/detail/optimizers/param_states.hpp>
#include <gradaccum/detail/platform/stop_signals.hpp>
#include <gradaccum/detail/window/communicator.hpp>
#include <gradaccum/detail/window/window_gradients.hpp>
#include <gradaccum/memory_meter.hpp>
#include <gradaccum/trainer_base.hpp>
#include <gradaccum/training_state.hpp>

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <csignal>
#include <exception>
#include <limits>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum::detail {

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
    const auto peers = window_.peers();
    if (peers && (others_wait || window_.closing()->elsewhere())) peers->give_up(error.what());
  } catch (...) {  // has no text for other ranks
  }
  discard();
}

GRADACCUM_INLINE FitReport Loop::fit(AnyBatches& batches, const FitOptions& options) {
  TORCH_CHECK(!window_.peers() || !window_.peers()->take_each_backward() || options.tail == Tail::flush,
              "FitOptions: tail must be ga::Tail::flush with Shard::gradients: other ranks hold gradients of an open "
              "window, which can be neither dropped nor saved");
  check(options);
  note_given();
  TORCH_CHECK(!fit_.running, "Trainer: fit() was called inside fit(), as in a policy; call step() for one micro-batch");
  const auto device = trainer_.device();
  const ModeGuard mode(trainer_.module(), true);
  const at::AutoGradMode grad_mode(true);
  fit_ = FitState(options, batches.number(), window_.peers() ? window_.peers()->world_size() : 0);
  flops_ = {};  // the model may have changed
  data_.hold(batches);
  const auto ending = c10::make_scope_exit([this]() noexcept {
    data_.let_go();
    fit_.options = {};
    fit_.running = false;
  });
  std::optional<MemoryMeter> meter;
  if (options.measure_memory && MemoryMeter::possible()) meter.emplace();
  const auto scopes = policies_.scopes(&AnyPolicy::fit_scope);
  bool others_wait = false;
  try {
    resume();
    if (!fit_.resumed_from.empty())
      policies_.all(&AnyPolicy::before_boundary);  // repeats a validation that a signal cut short
    others_wait = true;
    stop_at_limits();
    while (!fit_.done() || data_.is_in_epoch()) run_epoch(batches);  // a state may be of the end of an epoch
  } catch (...) {
    give_up(others_wait);
    throw;
  }
  auto report = fit_.report();
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
  record_.restart();
  window_.discard();
}

/// Calls `on_epoch_begin` before loading, so that it cannot overwrite the loaded state of a policy.
GRADACCUM_INLINE void Loop::resume() {
  const auto& from = fit_.options.resume;
  const auto* const peers = window_.peers().get();
  const auto folder = of_rank_0(peers, [&] { return from.empty() ? std::nullopt : from.newest_(from.directory_); });
  if (folder.empty()) return;
  run_on_all(peers, [&] {
    TORCH_CHECK(from.open_, "FitOptions: rank 0 resumes from ", folder.string(),
                "; `resume` must be given on all ranks");
  });
  auto archive = from.open_(folder, fit_.options.allow_changes, peers);
  fit_.resumed_from = folder.string();
  if (const auto epoch = epoch_in_hand(archive)) begin_epoch(*epoch);
  load_state(archive, trainer_);
}

GRADACCUM_INLINE void Loop::begin_epoch(std::int64_t epoch) {
  fit_.epoch = epoch;
  data_.begin_epoch();
  policies_.all(&AnyPolicy::on_epoch_begin, epoch);
}

GRADACCUM_INLINE void Loop::run_epoch(AnyBatches& batches) {
  if (!data_.resumes()) begin_epoch(counts_.epochs++);
  if (!data_.exhausted() && !fit_.done() && batches.for_each([this](auto& batch) { return visit(batch); }))
    data_.exhaust();
  end_epoch();
}

/// Trains with a batch of an epoch, or skips it if the loaded state was saved after it. False ends the epoch's
/// iteration.
GRADACCUM_INLINE bool Loop::visit(const AnyBatch& batch) {
  if (data_.skips(batch)) return true;
  data_.see(batch);
  train_batch(batch);
  at_boundary();
  data_.forget();
  return !data_.exhausted() && !fit_.done();  // a policy may have loaded another position
}

GRADACCUM_INLINE bool Loop::train_batch(const AnyBatch& batch) {
  ++fit_.batch;
  if (divider_) return train_parts(batch);
  micro_batch(batch, /*begins=*/true, /*may_close=*/true);
  return record_.closing() && close_window();
}

/// Checks only `.updates` inside a batch. Other limits wait for its end, because a resumed run starts at the next
/// batch.
GRADACCUM_INLINE bool Loop::train_parts(const AnyBatch& batch) {
  const auto rows = batch.rows();
  const auto& most = fit_.options.updates;
  bool moved = false;
  std::int64_t from = 0;
  do {
    const auto to = divider_->end_of_window(batch, from);
    divider_->run(batch, from, to);
    if (record_.closing()) moved = close_window() || moved;
    from = to;
  } while (from < rows && !(fit_.running && most && fit_.updates >= *most));
  return moved;
}

/// Ranks exchange the gradients of a divided batch only when the window closes, because its parts may be undone until
/// then.
GRADACCUM_INLINE void Loop::micro_batch(const AnyBatch& batch, bool begins, bool may_close) {
  if (!is_window_begun()) window_.clear_others();
  record_.begin_micro_batch(batch.samples(), begins, fit_);
  const auto pass = [&] { return forward_and_backward(batch, may_close); };
  if (fit_.options.counts_flops())
    fit_.add_own_flops(flops_.of(batch, pass));
  else
    pass();
  if (record_.closing() && !divider_ && window_.peers()) {  // ranks exchange gradients until it is complete
    prepare_to_close();
    window_.complete_early();
  }
  auto so_far = window_.so_far()->handle();
  policies_.all(&AnyPolicy::after_backward, so_far);
  record_.end_micro_batch();
}

/// Returns false if the loss is of no items, and so has no gradients.
GRADACCUM_INLINE bool Loop::forward_and_backward(const AnyBatch& batch, bool may_close) {
  auto scopes = policies_.scopes(&AnyPolicy::forward_scope);
  Loss loss = batch.loss();
  scopes.reset();
  if (!record_.add_loss(loss, fit_, counts_.updates)) loss.items = 0;
  fit_.add_items(loss.items);
  policies_.all(&AnyPolicy::before_backward, loss);
  record_.set_closing(may_close && policies_.ready());
  const bool has_items = loss.items > 0;
  if (record_.closing() && window_.steps_in_backward()) prepare_to_close();
  explaining(
      "graph a second time",
      [&] { return plain_text("Trainer: in batch ", fit_.batch - 1, " of epoch ", fit_.epoch, " (both from 0)"); },
      [&] { window_.add(std::move(loss), /*fills=*/record_.closing() && !divider_); });
  return has_items;
}

/// Runs once per window, before any parameter is updated. Reads losses on a device now if ranks exchange them or the
/// backward pass steps; otherwise `check_finite` reads them together with its result for the gradients.
GRADACCUM_INLINE void Loop::prepare_to_close() {
  record_.prepare(window_.peers() || window_.steps_in_backward(), [this] {
    policies_.all(&AnyPolicy::before_close);
    auto& factor = window_.closing()->factor();
    policies_.all(&AnyPolicy::scale_gradients, factor);
    record_.overflow_is_awaited = finite_required(factor);
    if (record_.overflow_is_awaited) factor.require_finite();       // policies learn whether parameters moved
    if (window_.steps_in_backward() && trainer_.device().is_cpu())  // each part would synchronize another device
      window_.closing()->set_look_at_part([this](auto& part) { check_finite(part); });
  });
}

/// Checks unread losses and the gradients of a window, or of a part of one, with one synchronization.
GRADACCUM_INLINE void Loop::check_finite(WindowGradients& gradients) {
  auto mean = record_.unread_mean();
  bool found = false;
  if (checks(gradients)) {
    gradients.factor().require_finite();
    found = gradients.overflowed(&mean);
  }
  record_.check_losses(mean);
  if (!found || record_.overflow_is_awaited) return;
  std::string parameter;
  const auto parameters = gradients.parameters(), all = gradients.raw();
  const bool is_cut = window_.peers() && window_.peers()->shards();  // gradients are of slices of parameters
  for (std::size_t i = 0; i < all.size() && parameter.empty(); ++i)
    if (found_inf({all[i]}, norms({all[i]}, 2)).item<float>() != 0)
      for (auto& named : trainer_.module().named_parameters())
        if (named.value().is_same(parameters[i]) || (is_cut && named.value().is_alias_of(parameters[i])))
          parameter = " in that of " + named.key();
  record_.leave_out(parameter, fit_, counts_.updates);
}

GRADACCUM_INLINE bool Loop::close_window() {
  const auto end = record_.begin_closing();
  window_.refresh_parameters();
  auto gradients = window_.so_far()->handle();
  prepare_to_close();
  window_.complete_early();
  const double lr = trainer_.learning_rate();
  window_.or_spoil([&] {
    const bool asks_first = checks(*window_.closing()) && window_.peers() && window_.peers()->shards();
    if (asks_first)
      gradients.factor().require_finite();  // checked first: policies then change shards, and no rank has all of them
    policies_.all(&AnyPolicy::before_step, gradients);
    if (!asks_first && window_.closing()->must_be_finite()) record_.overflow_is_awaited = true;  // a policy required it
    check_finite(*window_.closing());
  });
  const auto result = window_.close();
  const bool moved = result;
  if (moved) window_.clear();
  counts_.updates += moved;
  fit_.at_rate_0 += moved && window_.optimizer().rates_are_0();
  if (result == StepResult::rejected) record_.count_rejected(*gradients.rejected(), fit_, counts_.updates);
  const Step step = record_.finish(gradients, result, counts_.updates, lr);
  fit_.count_window(moved, step.overflowed);
  policies_.all(&AnyPolicy::after_window, step);
  if (moved) policies_.all(&AnyPolicy::after_step, step);
  return moved;
}

/// Closes the window if this rank or another has added a micro-batch to it.
GRADACCUM_INLINE bool Loop::close_if_begun() {
  return (is_window_begun() || window_.closes_with_others()) && close_window();
}

GRADACCUM_INLINE void Loop::end_epoch() {
  const auto tail = fit_.options.smoke ? Tail::flush : fit_.options.tail;
  if (tail == Tail::flush && !interrupted()) {
    close_if_begun();
    at_boundary();
  }
  if (interrupted()) return;
  if (fit_.options.tail == Tail::drop) discard();
  train_with_others();
  if (interrupted()) return;
  check_trained();
  fit_.end_epoch();
  data_.end_epoch();
  policies_.all(&AnyPolicy::on_epoch_end, fit_.epoch);
  // No rank has batches left: exchanges the requests to stop or save that came since the last window.
  policies_.others_continue();
  at_boundary();
}

/// Throws after an epoch without updates if only limits other than `.epochs` are set, because that fit would never end.
/// Otherwise warns once per fit.
GRADACCUM_INLINE void Loop::check_trained() {
  const auto& options = fit_.options;
  if (fit_.trained || window_.has_weight() || fit_.done()) return;
  const auto why = why_nothing_moved();
  TORCH_CHECK(options.epochs || !options.has_limit(), "Trainer: fit must ",
              options.updates ? c10::str("make ", *options.updates, " updates") : "reach its limit", ", but epoch ",
              fit_.epoch, " (counted from 0) made ", options.updates ? "none" : "no update", ": ", why);
  const bool end_epoch_says = fit_.batch == 0 && fit_.batches.value_or(0) > 0,
             report_says = fit_.nan_batches + fit_.rejected > 0;
  if (end_epoch_says || report_says || !trainer_.is_first() || std::exchange(fit_.warned_of_nothing, true)) return;
  TORCH_WARN("Trainer: epoch ", fit_.epoch, " (counted from 0) made no update: ", why);
}

GRADACCUM_INLINE std::string Loop::why_nothing_moved() const {
  if (fit_.batch == 0) return "the batches are empty";
  if (fit_.nan_batches > 0) return "losses or gradients were NaN or infinite";
  if (fit_.rejected > 0) return "windows were rejected, the first for " + fit_.first_rejected;
  if (fit_.items() == 0) return "all losses are of 0 items";
  if (fit_.windows == 0) return "it is shorter than a window, and .tail = ga::Tail::drop drops it";
  const auto trained = trainer_.parameters(), own = trainer_.module().parameters();
  const bool of_model = std::ranges::any_of(trained, [&](auto& parameter) {
    return std::ranges::any_of(own, [&](auto& one) { return one.is_same(parameter) || one.is_alias_of(parameter); });
  });
  return of_model ? "no loss gives a gradient to the optimizer's parameters, which are frozen, detached or not used"
                  : "the optimizer has none of the model's parameters; was it made for a copy of the model?";
}

/// Closes windows together with other ranks while any of them has batches.
GRADACCUM_INLINE void Loop::train_with_others() {
  for (bool others_have_batches = true; others_have_batches && !interrupted();) {
    others_have_batches = policies_.others_continue();
    if (others_have_batches) close_if_begun();
    if (others_have_batches || interrupted()) at_boundary();
  }
}

/// Checks limits only between two windows.
GRADACCUM_INLINE void Loop::stop_at_limits() {
  if (!is_window_begun()) fit_.stop_at_limits();
}

/// Calls every `before_boundary` first: a validation there may stop the fit before another policy saves its state.
GRADACCUM_INLINE void Loop::at_boundary() {
  stop_at_limits();
  policies_.all(&AnyPolicy::before_boundary);
  policies_.all(&AnyPolicy::at_boundary);
}

GRADACCUM_INLINE std::optional<Evaluation> Loop::evaluate(AnyBatches& batches, Evaluator evaluator, bool on_all,
                                                          bool until_signal) {
  TORCH_CHECK(!batches.has_state() || !data_.goes_through(batches),
              "Trainer: evaluate must not iterate over the batches that fit is iterating over: construct another "
              "object of them");
  const ModeGuard mode(trainer_.module(), false);
  const at::AutoGradMode gradients(evaluator.with_gradients());
  const auto add = [&](const AnyBatch& batch) {
    auto scopes = policies_.scopes(&AnyPolicy::forward_scope);
    const auto how = [] { return "Trainer: pass ga::WithGradients() to evaluate or Validate, beside the metrics"; };
    const char* const says = evaluator.with_gradients() ? nullptr : "does not require grad";
    const auto loss = explaining(says, how, [&] { return batch.loss(); });
    scopes.reset();
    const at::NoGradGuard no_grad;  // else a metric that sums outputs would keep all graphs
    evaluator.add(loss, batch.samples());
  };
  const auto is_cut = [&] { return interrupted() || StopSignals::came() != 0; };
  batches.for_each([&](const AnyBatch& batch) {
    divider_ ? divider_->for_each_part(batch, add) : add(batch);
    return !fit_.options.smoke && !(until_signal && is_cut());
  });
  const auto all_reduce = [this](at::Tensor& part) { window_.peers()->all_reduce(part); };
  const bool reduces = on_all && window_.peers();
  if (until_signal) {
    auto cut = at::full({}, is_cut(), at::kDouble);
    if (reduces) all_reduce(cut);
    if (cut.item<double>() > 0) {
      const int own = StopSignals::came();
      if (!interrupted()) fit_.interrupt_now(own != 0 ? own : SIGTERM);
      return {};
    }
  }
  if (reduces) evaluator.reduce(all_reduce);
  return evaluator.result();
}

GRADACCUM_INLINE Loop& Loop::of(TrainerBase& trainer) { return *trainer.loop_; }

GRADACCUM_INLINE void Loop::set_peers(std::shared_ptr<Communicator> peers) {
  window_.set_peers(std::move(peers));
  fit_.together = true;
}

GRADACCUM_INLINE std::optional<std::int64_t> Loop::missing_samples() const {
  const auto missing = batch_size_ - record_.so_far().samples;
  return batch_size_ > 0 && missing > 0 ? std::optional(missing) : std::nullopt;
}

GRADACCUM_INLINE std::int64_t Loop::steps_in(std::int64_t epoch) const {
  const auto steps = steps_in_ ? steps_in_(epoch) : 1;
  TORCH_CHECK(steps >= 1, "Trainer: the number of micro-batches per window must be >= 1, got ", steps, " for epoch ",
              epoch);
  return steps;
}

GRADACCUM_INLINE Loop::WindowCopy Loop::copy_window() {
  WindowCopy copy{.record = record_, .fit = fit_};
  policies_.state_in_window(copy.policies);
  if (is_window_begun()) copy.sums = window_.copy();
  return copy;
}

GRADACCUM_INLINE void Loop::go_back(const WindowCopy& copy) {
  Archive seen(copy.policies.values());
  policies_.state_in_window(seen);
  record_ = copy.record, fit_ = copy.fit;
  window_.discard();
  if (copy.sums) window_.go_back(*copy.sums);
}

GRADACCUM_INLINE void Loop::note_given() {
  if (!given_.empty()) return;
  given_ = options_of(window_.optimizer().members);
  given_["frozen"] = frozen_parameters(trainer_.module());
  kept_ = given_;
}

/// Saves the options of the optimizer and the names of frozen parameters. Loading keeps the state's options and warns
/// if this program has others; with `allow_changes`, the program's replace them.
GRADACCUM_INLINE void Loop::archive_given(Archive& archive) {
  note_given();
  std::string changes;
  Archive::Values changed, of_state = given_;
  for (auto& [name, value] : given_) {
    std::visit(
        [&, &key = name](auto& here) {
          using T = std::remove_cvref_t<decltype(here)>;
          if constexpr (!std::is_same_v<T, at::Tensor>) {
            auto before = std::optional(std::get<T>(kept_.at(key)));
            archive("given_options." + key, before);
            if (before) of_state[key] = *before;
            const auto is_of_key = [&key](auto& prefix) { return key.starts_with(prefix) && key.ends_with(".lr"); };
            if (!before || *before == here || std::ranges::any_of(rates_set_, is_of_key)) return;
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
    kept_ = takes_them ? given_ : of_state;
    if (!takes_them && !changes.empty() && trainer_.is_first())
      TORCH_WARN("Trainer: the state's values are kept, although this program sets others: ", changes,
                 "; {.allow_changes = true} uses the program's, and a ga::Schedule sets the learning rate");
    if (!takes_them) return;
    const auto& optimizers = window_.optimizer().members;
    auto options = options_of(optimizers);
    for (auto& [name, option] : options)
      if (const auto given_anew = changed.find(name); given_anew != changed.end()) option = given_anew->second;
    set_options(optimizers, options);
  });
}

GRADACCUM_INLINE std::optional<std::int64_t> Loop::planned_updates(std::int64_t at_epoch_begin) const {
  const auto& options = fit_.options;
  if (!fit_.running || options.samples || options.time) return {};
  const auto most =
      options.updates ? counts_.updates - fit_.updates + *options.updates : std::numeric_limits<std::int64_t>::max();
  if (options.updates && !options.epochs) return most;
  const bool carries = options.tail == Tail::carry;
  if (policies_.count_with(&AnyPolicy::ready) != (steps_in_ ? 1 : 0) || (carries && window_.peers())) return {};
  auto updates = at_epoch_begin;
  auto open = carries ? record_.so_far().batches - fit_.batch : 0;  // carried over from the last epoch
  for (std::int64_t ahead = 0; ahead < options.epochs.value_or(1) - fit_.epochs && updates < most; ++ahead) {
    const auto batches = data_.most_batches(ahead, /*alone=*/!window_.peers());
    if (!batches) return {};
    const auto steps = steps_in(fit_.epoch + ahead);
    open = (open % steps + steps) % steps + *batches;
    updates += open / steps + (options.tail == Tail::flush && open % steps > 0);
    open = carries ? open % steps : 0;
  }
  return std::min(updates, most);
}

GRADACCUM_INLINE std::int64_t Loop::updates_at_epoch_begin() const {
  const auto steps = steps_in(fit_.epoch);
  const auto open = fit_.options.tail == Tail::carry ? record_.so_far().batches - fit_.batch : 0;
  return counts_.updates - ((open % steps + steps) % steps + fit_.batch) / steps;
}

GRADACCUM_INLINE void Loop::validated(std::string name, Evaluation found, bool due) {
  const Validation validation{.name = std::move(name),
                              .update = counts_.updates,
                              .epoch = fit_.epoch,
                              .samples = fit_.samples,
                              .seconds = fit_.running ? fit_.seconds() : 0,
                              .found = std::move(found),
                              .due = due};
  auto& all = fit_.validations;
  const auto is_earlier = [&](const Validation& one) { return one.name == validation.name; };
  std::erase_if(all, [&](auto& one) { return is_earlier(one) && one.update == validation.update && !one.due; });
  for (auto& one : all)
    if (is_earlier(one)) one.found.tensors.clear();  // may be large: only the newest keeps them
  all.push_back(validation);
  policies_.all(&AnyPolicy::on_validation, validation);
}

GRADACCUM_INLINE void Loop::state(Archive& archive) {
  archive("window", window_.named(trainer_.module()));
  archive("random", gradaccum::RandomState());
  archive_given(archive);
  archive.if_not_all_fit(
      [this, counts = counts_, record = record_, fit = fit_] { counts_ = counts, record_ = record, fit_ = fit; });
  archive("updates", counts_.updates);
  archive("epochs", counts_.epochs);
  TORCH_CHECK(counts_.updates >= 0 && counts_.epochs >= 0, "Trainer: updates and epochs of a state must be >= 0, got ",
              counts_.updates, " and ", counts_.epochs);
  archive("losses", record_);
  if (fit_.running && !(archive.loading() && !archive.has("fit"))) {  // only a fit resumes there
    archive("fit", fit_);
    archive("data", data_);
  } else {
    archive.leave_out("fit");
    archive.leave_out("data");
  }
  policies_.state(archive);
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

}  // namespace gradaccum::detail

#undef GRADACCUM_INLINE
