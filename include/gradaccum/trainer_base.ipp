// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/trainer_base.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/memory/storage_count.hpp>
#include <gradaccum/detail/trainer/fit.hpp>
#include <gradaccum/detail/trainer/mode_guard.hpp>
#include <gradaccum/detail/trainer/parts.hpp>
#include <gradaccum/detail/window/peers.hpp>
#include <gradaccum/detail/window/window_gradients.hpp>
#include <gradaccum/state_parts.hpp>

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <torch/nn/module.h>

#include <cstddef>
#include <string_view>
#include <utility>

namespace gradaccum {

GRADACCUM_INLINE TrainerBase::TrainerBase(std::unique_ptr<detail::AnyOptimizer> optimizer)
    : parts_(std::make_unique<detail::TrainerParts>(std::move(optimizer))) {}

GRADACCUM_INLINE TrainerBase::~TrainerBase() = default;

GRADACCUM_INLINE void TrainerBase::end() {
  parts_->policies = {};
  parts_.reset();
}

GRADACCUM_INLINE void TrainerBase::when_built(std::function<void()> run) {
  if (parts_->is_built) return run();
  parts_->when_built.push_back(std::move(run));
}

GRADACCUM_INLINE void TrainerBase::built() {
  parts_->is_built = true;
  for (auto& run : std::exchange(parts_->when_built, {})) run();
}

GRADACCUM_INLINE FitReport TrainerBase::fit_with(detail::AnyBatches& batches, const FitOptions& options) {
  return detail::Fit(*this, batches).run(options);
}

GRADACCUM_INLINE Evaluation TrainerBase::evaluate_with(detail::AnyBatches& batches, detail::Evaluator evaluator,
                                                       bool on_all) {
  TORCH_CHECK(
      !batches.has_state() || !parts_->data.goes_through(batches),
      "Trainer: evaluate must not go through the batches that fit is going through: make another object of them");
  const detail::ModeGuard mode(module(), false);
  const at::NoGradGuard no_grad;
  const auto evaluate = [&](const detail::AnyBatch& batch) { evaluator.add(forward(batch), batch.samples()); };
  batches.for_each([&](const detail::AnyBatch& batch) {
    parts_->divider ? parts_->divider->for_each_part(batch, evaluate) : evaluate(batch);
    return !status().options.smoke;
  });
  if (on_all && peers()) evaluator.reduce([&](at::Tensor& part) { peers()->add_up(part); });
  return evaluator.result();
}

GRADACCUM_INLINE bool TrainerBase::step_with(const detail::AnyBatch& batch) {
  bool moved = false;
  or_discard([&] {
    ++parts_->status.batch;
    if (parts_->divider) return static_cast<void>(moved = parts_->divider->train(batch));
    micro_batch(batch, /*begins=*/true, /*may_close=*/true);
    moved = closing() && close();
  });
  return moved;
}

/// Of a batch in parts other processes have to wait until the window closes: until then it can be taken back.
GRADACCUM_INLINE void TrainerBase::micro_batch(const detail::AnyBatch& batch, bool begins, bool may_close) {
  auto& window = parts_->window;
  auto& policies = parts_->policies;
  auto& record = parts_->record;
  auto& status = parts_->status;
  const bool divided = parts_->divider != nullptr;
  if (record.so_far().micro_batches == 0) window.clear_others();
  record.begin_micro_batch(batch.samples(), begins, status);
  Loss loss = forward(batch);
  if (!record.take(loss, status, updates())) loss.items = 0;
  policies.all(&detail::AnyPolicy::before_backward, loss);
  record.set_closing(may_close && policies.ready());
  if (closing() && window.steps_in_backward()) prepare();
  window.add(std::move(loss), closing() && !divided);
  if (closing() && window.peers() && !divided)
    prepare(), window.complete_early();  // they are at the gradients till then
  Gradients so_far(window.so_far());
  policies.all(&detail::AnyPolicy::after_backward, so_far);
  record.end_micro_batch();
}

GRADACCUM_INLINE bool TrainerBase::flush() {
  bool moved = false;
  if (parts_->record.so_far().micro_batches > 0 || parts_->window.follows_others())
    or_discard([&] { moved = close(); });
  return moved;
}

GRADACCUM_INLINE void TrainerBase::discard() {
  parts_->record.restart();
  parts_->window.discard();
}

GRADACCUM_INLINE void TrainerBase::stop(std::string why) { parts_->status.stop(std::move(why)); }
GRADACCUM_INLINE void TrainerBase::stop_on_all(std::string why) { parts_->status.stop_all(std::move(why)); }
GRADACCUM_INLINE void TrainerBase::interrupt(int signal) { parts_->status.interrupt(signal); }

GRADACCUM_INLINE std::vector<at::Tensor> TrainerBase::parameters() const {
  return parts_->window.optimizer().parameters();
}
GRADACCUM_INLINE std::int64_t TrainerBase::updates() const { return parts_->counts.updates; }
GRADACCUM_INLINE bool TrainerBase::closing() const { return parts_->record.closing(); }
GRADACCUM_INLINE const Step& TrainerBase::window() const { return parts_->record.so_far(); }
GRADACCUM_INLINE const FitStatus& TrainerBase::status() const { return parts_->status; }

GRADACCUM_INLINE void TrainerBase::validated(std::string name, Evaluation found) {
  const auto& status = parts_->status;
  const Validation validation{.name = std::move(name),
                              .update = updates(),
                              .epoch = status.epoch,
                              .samples = status.samples,
                              .seconds = status.running ? status.seconds() : 0,
                              .found = std::move(found)};
  parts_->status.validations.push_back(validation);
  parts_->policies.all(&detail::AnyPolicy::on_validation, validation);
}

GRADACCUM_INLINE void TrainerBase::will_validate(std::string name, const std::vector<std::string>& metrics) {
  for (auto& metric : metrics) parts_->metrics.push_back(name + '/' + metric);
}
GRADACCUM_INLINE const std::vector<std::string>& TrainerBase::metrics() const { return parts_->metrics; }

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
  for_each_optimizer_tensor([&](const at::Tensor& tensor) { see(&MemoryByKind::optimizer_state, tensor); });
  for (auto& parameter : all) see(&MemoryByKind::gradients, parameter.grad());
  const auto& sums = parts_->window.closing()->sums();
  for (std::size_t place = 0; place < sums.size(); ++place) see(&MemoryByKind::gradients, sums[place]);
}

GRADACCUM_INLINE void TrainerBase::set_accumulate_in(std::optional<at::ScalarType> dtype) {
  parts_->window.set_accumulate_in(dtype);
}
GRADACCUM_INLINE void TrainerBase::set_in_backward(bool on) { parts_->window.set_in_backward(on); }
GRADACCUM_INLINE bool TrainerBase::steps_in_backward() const { return parts_->window.steps_in_backward(); }

GRADACCUM_INLINE void TrainerBase::set_batch_size(std::int64_t samples) { parts_->batch_size = samples; }
GRADACCUM_INLINE void TrainerBase::set_divider(std::unique_ptr<detail::BatchDivider> divider) {
  parts_->divider = std::move(divider);
}

GRADACCUM_INLINE void TrainerBase::set_peers(std::shared_ptr<detail::Peers> peers) {
  parts_->status.together = true;
  parts_->window.set_peers(std::move(peers));
}
GRADACCUM_INLINE std::shared_ptr<detail::Peers> TrainerBase::peers() const { return parts_->window.peers(); }
GRADACCUM_INLINE std::shared_ptr<detail::Shards> TrainerBase::shards() const {
  return peers() ? peers()->shards() : nullptr;
}
GRADACCUM_INLINE bool TrainerBase::is_first() const { return !peers() || peers()->rank() == 0; }
GRADACCUM_INLINE bool TrainerBase::others_continue() { return parts_->window.others_continue(); }
GRADACCUM_INLINE detail::Together TrainerBase::together() { return {parts_->record, parts_->status}; }

GRADACCUM_INLINE void TrainerBase::state(Archive& archive) {
  archive.together([&] {
    auto& parts = *parts_;
    archive("model", ModelState(module()));
    archive_optimizer(archive);
    archive("window", parts.window.named(module()));
    archive("random", RandomState());
    archive.if_not_all_fit([&parts, counts = parts.counts, record = parts.record, status = parts.status] {
      parts.counts = counts, parts.record = record, parts.status = status;
    });
    parts.counts.state(archive);
    archive("losses", parts.record);
    detail::archive_fit(archive, parts.status, parts.data);
    parts.policies.state(archive);
  });
}

GRADACCUM_INLINE void TrainerBase::add(std::unique_ptr<detail::AnyPolicy> policy) {
  parts_->policies.add(std::move(policy));
}
GRADACCUM_INLINE detail::AnyPolicy& TrainerBase::policy_at(std::size_t place) const { return parts_->policies[place]; }

/// Others who have gradients of this window hear why it is given up.
GRADACCUM_INLINE void TrainerBase::or_tell(c10::function_ref<void()> work) const {
  try {
    work();
  } catch (const std::exception& error) {
    if (peers() && parts_->window.closing()->elsewhere()) peers()->give_up(error.what());
    throw;
  }
}

/// What a window says of a misuse is said to who wrote a loop by hand.
GRADACCUM_INLINE void TrainerBase::or_discard(c10::function_ref<void()> work) {
  try {
    or_tell(work);
  } catch (c10::Error& error) {
    discard();
    if (error.context().empty() && std::string_view(error.msg()).starts_with("GradAccumulator: "))
      error.add_context(
          "Trainer: it has such a window, and runs backward, counts, clears and steps by itself: the objective only "
          "computes the loss, a policy changes gradients in before_step(ga::Gradients&), and parameters in after_step");
    throw;
  } catch (...) {
    discard();
    throw;
  }
}

GRADACCUM_INLINE Loss TrainerBase::forward(const detail::AnyBatch& batch) {
  std::optional<Loss> loss;
  parts_->policies.in_scopes(&detail::AnyPolicy::in_forward_scope, [&] { loss = batch.loss(); });
  return std::move(*loss);
}

GRADACCUM_INLINE void TrainerBase::prepare() {
  parts_->record.prepare([this] {
    auto& factor = parts_->window.closing()->factor();
    parts_->policies.all(&detail::AnyPolicy::scale_gradients, factor);
    if (finite_required(factor)) factor.require_finite();  // policies are told whether the parameters moved
  });
}

GRADACCUM_INLINE bool TrainerBase::close() {
  auto& window = parts_->window;
  auto& policies = parts_->policies;
  auto& record = parts_->record;
  const auto end = record.begin_closing();
  window.follow();
  Gradients gradients(window.so_far());
  prepare();
  window.complete_early();
  const double lr = learning_rate();
  window.or_spoil([&] {
    policies.all(&detail::AnyPolicy::reduce_gradients, gradients);
    policies.all(&detail::AnyPolicy::before_step, gradients);
  });
  const bool moved = window.close();
  if (moved) window.clear();
  parts_->counts.updates += moved;
  const Step step = record.finish(gradients, moved, updates(), lr);
  parts_->status.count_window(moved, step.overflowed);
  policies.all(&detail::AnyPolicy::after_window, step);
  if (moved) policies.all(&detail::AnyPolicy::after_step, step);
  return moved;
}

}  // namespace gradaccum
