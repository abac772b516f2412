// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/trainer_base.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/memory/storage_count.hpp>
#include <gradaccum/detail/trainer/loop.hpp>
#include <gradaccum/detail/window/peers.hpp>
#include <gradaccum/detail/window/window_gradients.hpp>
#include <gradaccum/state_parts.hpp>

#include <torch/nn/module.h>

#include <cstddef>
#include <utility>

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
  for_each_optimizer_tensor([&](const at::Tensor& tensor) { see(&MemoryByKind::optimizer_state, tensor); });
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

GRADACCUM_INLINE void TrainerBase::set_peers(std::shared_ptr<detail::Peers> peers) {
  loop_->status.together = true;
  loop_->window.set_peers(std::move(peers));
}
GRADACCUM_INLINE std::shared_ptr<detail::Peers> TrainerBase::peers() const { return loop_->window.peers(); }
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
  loop_->policies.add(std::move(policy));
}
GRADACCUM_INLINE detail::AnyPolicy& TrainerBase::policy_at(std::size_t place) const { return loop_->policies[place]; }

}  // namespace gradaccum
