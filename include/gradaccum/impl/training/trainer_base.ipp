// SPDX-License-Identifier: Apache-2.0
// Implements the functions of a Trainer that do not depend on its template arguments, by its loop.
#pragma once

#include <gradaccum/trainer_base.hpp>

#include <gradaccum/detail/memory/memory_ledger.hpp>
#include <gradaccum/detail/optimizers/param_states.hpp>
#include <gradaccum/detail/training/loop.hpp>
#include <gradaccum/detail/window/communicator.hpp>
#include <gradaccum/detail/window/window_gradients.hpp>
#include <gradaccum/training_state.hpp>

#include <algorithm>
#include <limits>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum {

GRADACCUM_INLINE TrainerBase::TrainerBase(std::unique_ptr<detail::AnyOptimizer> optimizer)
    : loop_(std::make_unique<detail::Loop>(*this, std::move(optimizer))) {}

GRADACCUM_INLINE TrainerBase::~TrainerBase() = default;

GRADACCUM_INLINE void TrainerBase::end() {
  if (loop_) loop_->policies_ = {};
  loop_.reset();
}

GRADACCUM_INLINE void TrainerBase::when_built(std::function<void()> run) {
  loop_->policies_.when_started(std::move(run));
}
GRADACCUM_INLINE void TrainerBase::built() { loop_->policies_.start(*this); }

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

GRADACCUM_INLINE void TrainerBase::stop(std::string why) { loop_->fit_.stop(std::move(why)); }
GRADACCUM_INLINE void TrainerBase::stop_on_all(std::string why) { loop_->fit_.stop(std::move(why), /*alike=*/true); }
GRADACCUM_INLINE void TrainerBase::interrupt(int signal) { loop_->fit_.interrupt(signal); }
GRADACCUM_INLINE void TrainerBase::request_save() { loop_->fit_.request_save(); }

GRADACCUM_INLINE std::vector<at::Tensor> TrainerBase::parameters() const { return loop_->parameters(); }
GRADACCUM_INLINE at::Device TrainerBase::device() const { return loop_->window_.optimizer().device(); }
GRADACCUM_INLINE std::string TrainerBase::optimizer_name() const { return loop_->window_.optimizer().name(); }
GRADACCUM_INLINE std::int64_t TrainerBase::updates() const { return loop_->counts_.updates; }
GRADACCUM_INLINE std::optional<std::int64_t> TrainerBase::planned_updates(std::int64_t at_epoch_begin) const {
  return loop_->planned_updates(at_epoch_begin);
}
GRADACCUM_INLINE std::int64_t TrainerBase::updates_at_epoch_begin() const { return loop_->updates_at_epoch_begin(); }
GRADACCUM_INLINE bool TrainerBase::closing() const { return loop_->record_.closing(); }
GRADACCUM_INLINE const Step& TrainerBase::window() const { return loop_->record_.so_far(); }
GRADACCUM_INLINE const FitProgress& TrainerBase::progress() const { return loop_->fit_; }
GRADACCUM_INLINE FitReport TrainerBase::report() const { return loop_->fit_.report(); }

GRADACCUM_INLINE void TrainerBase::validated(std::string name, Evaluation found, bool due) {
  loop_->validated(std::move(name), std::move(found), due);
}

GRADACCUM_INLINE void TrainerBase::will_validate(const std::string& name, const std::vector<std::string>& metrics) {
  for (auto& metric : metrics) will_validate(name, metric, std::nullopt);
}
GRADACCUM_INLINE void TrainerBase::will_validate(const std::string& name, const std::string& metric,
                                                 std::optional<Mode> mode) {
  auto& known = loop_->metrics_[name + '/' + metric];
  if (mode) known = mode;
}
GRADACCUM_INLINE const MetricModes& TrainerBase::metrics() const { return loop_->metrics_; }

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
  for (auto& [name, optimizer] : loop_->window_.optimizer().members)
    detail::for_each_state_tensor(optimizer, [&](auto& tensor) { see(&MemoryByKind::optimizer_state, tensor); });
  for (auto& parameter : all) see(&MemoryByKind::gradients, parameter.grad());
  const auto& sums = loop_->window_.closing()->sums();
  for (std::size_t place = 0; place < sums.size(); ++place) see(&MemoryByKind::gradients, sums[place]);
  if (loop_->state_copy_)
    for (auto& [file, memory] : *loop_->state_copy_) see(&MemoryByKind::state_copy, memory);
}

GRADACCUM_INLINE void TrainerBase::finish_background_save() {
  if (loop_->finish_background_save_) loop_->finish_background_save_();
}

GRADACCUM_INLINE void TrainerBase::set_accumulate_in(std::optional<at::ScalarType> dtype) {
  loop_->window_.set_accumulate_in(dtype);
}
GRADACCUM_INLINE void TrainerBase::set_in_backward(bool on) { loop_->window_.set_in_backward(on); }
GRADACCUM_INLINE bool TrainerBase::steps_in_backward() const { return loop_->window_.steps_in_backward(); }
GRADACCUM_INLINE void TrainerBase::set_batch_size(std::int64_t samples) { loop_->batch_size_ = samples; }
GRADACCUM_INLINE void TrainerBase::set_micro_batches_per_window(
    std::function<std::int64_t(std::int64_t epoch)> number) {
  loop_->steps_in_ = std::move(number);
}
GRADACCUM_INLINE void TrainerBase::leave_out(std::vector<std::string> buffers) {
  loop_->left_out_ = std::move(buffers);
}
GRADACCUM_INLINE double TrainerBase::learning_rate() {
  return loop_->window_.optimizer().learning_rate().value_or(std::numeric_limits<double>::quiet_NaN());
}
GRADACCUM_INLINE LearningRates TrainerBase::learning_rates(const std::string& optimizer) {
  auto& all = loop_->window_.optimizer();
  TORCH_CHECK(!all.param_groups().empty(),
              "Trainer: a policy that sets learning rates needs an optimizer with param_groups(), got ", all.name());
  if (optimizer.empty()) return LearningRates(all);
  const auto named = std::ranges::find(all.members, optimizer, &optim::NamedOptimizer::name);
  TORCH_CHECK(named != all.members.end(), "Trainer: a policy that sets the learning rates of ", optimizer,
              " needs a MultiOptimizer with an optimizer of this name, got ", all.name(), " of ",
              detail::names_of(all.members));
  return LearningRates(named->optimizer);
}
GRADACCUM_INLINE void TrainerBase::will_set_learning_rate(const std::string& optimizer) {
  loop_->rates_set_.push_back(optimizer.empty() ? optimizer : optimizer + ".");
}

GRADACCUM_INLINE std::shared_ptr<detail::Communicator> TrainerBase::exchange() const { return loop_->window_.peers(); }
GRADACCUM_INLINE std::shared_ptr<detail::Shards> TrainerBase::shards() const {
  return peers() ? peers()->shards() : nullptr;
}
GRADACCUM_INLINE bool TrainerBase::is_first() const { return !peers() || peers()->rank() == 0; }

GRADACCUM_INLINE void TrainerBase::state(Archive& archive) {
  archive.together([&] {
    archive("model", ModelState(module(), loop_->left_out_));
    archive_optimizer(archive);
    loop_->state(archive);
  });
}

GRADACCUM_INLINE void TrainerBase::add(std::unique_ptr<detail::AnyPolicy> policy) {
  loop_->policies_.add(std::move(policy));
}

GRADACCUM_INLINE detail::AnyPolicy* TrainerBase::find_policy(const std::type_info& type) const {
  return loop_->policies_.find(type);
}

}  // namespace gradaccum

#undef GRADACCUM_INLINE
