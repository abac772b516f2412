// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/fit_options.hpp>
#include <gradaccum/memory_meter.hpp>
#include <gradaccum/metrics.hpp>
#include <gradaccum/policy.hpp>

#include <c10/core/Device.h>

#include <typeinfo>

#include <gradaccum/impl/begin.ipp>

namespace torch::nn {
class Module;
}

namespace gradaccum {

namespace detail {
class AnyBatch;
class AnyBatches;
class AnyOptimizer;
class AnyPolicy;
class Loop;
class Communicator;
class Shards;
struct AnyTraining;
}  // namespace detail

/// A Trainer of whatever model, optimizer, objective and policies: all of it that does not name their types. What a
/// policy is attached to, `void attach(ga::TrainerBase& trainer)`, if it does not ask for more.
class TrainerBase {
 public:
  TrainerBase& operator=(TrainerBase&&) = delete;  // policies may hold on to it
  GRADACCUM_INLINE virtual ~TrainerBase();

  /// Steps with the window as it is, and its true mean. True if the parameters moved.
  bool flush();
  /// Forgets the window.
  void discard();
  /// Ends `fit` after the micro-batch in hand, and its tail. The report says why.
  void stop(std::string why = {});
  /// Like stop(), when every process reaches the same decision at the same step.
  void stop_on_all(std::string why);
  /// Ends `fit` without its tail, after a signal, so that another program can resume from a state.
  void interrupt(int signal);

  virtual torch::nn::Module& module() = 0;
  virtual double learning_rate() = 0;          ///< of the first parameter group; NaN if the optimizer does not tell
  at::Device device() const;                   ///< of the first parameter
  std::vector<at::Tensor> parameters() const;  ///< of the optimizer
  std::string optimizer_name() const;          ///< of its class
  std::int64_t updates() const;                ///< how often the parameters have moved
  /// Returns what updates() will be at the end of the running `fit`, when it was `at_epoch_begin` at the begin of this
  /// epoch. None if that cannot be told: it takes a number of epochs or updates, ranges that tell their size, and
  /// windows of a number of micro-batches.
  std::optional<std::int64_t> planned_updates(std::int64_t at_epoch_begin) const;
  /// Returns what updates() would have been at the begin of this epoch if all its windows so far had been as they are
  /// now: of as many micro-batches, on as many ranks.
  std::int64_t updates_at_epoch_begin() const;
  bool closing() const;        ///< this backward fills the window; of a flushed one, none does
  const Step& window() const;  ///< epoch, micro_batches, samples, items so far
  const FitStatus& status() const;
  /// Tells all policies what was found: what `Validate` does, and who evaluates in a policy of their own.
  /// `EarlyStopping` counts what was `due`.
  void validated(std::string name, Evaluation found, bool due = true);
  /// For `attach`: there will be numbers of these names, `validation/loss`.
  void will_validate(const std::string& name, const std::vector<std::string>& metrics);
  /// Announces one number, and which is better, if that is known.
  void will_validate(const std::string& name, const std::string& metric, std::optional<Mode> mode);
  /// Returns all that will_validate() was told. Complete once all policies are attached.
  const MetricModes& metrics() const;
  /// Counts the bytes of parameters, optimizer state and gradients now. Copies nothing, and does not wait.
  MemoryByKind memory_by_kind();
  /// Gives `see` the tensors that these are, each with its kind; one that is undefined, too.
  void for_each_held(c10::function_ref<void(std::int64_t MemoryByKind::*kind, const at::Tensor& tensor)> see);
  void set_accumulate_in(std::optional<at::ScalarType> dtype);
  void set_in_backward(bool on);
  bool steps_in_backward() const;
  void set_batch_size(std::int64_t samples);  ///< of a window; 0: nobody counts them
  void will_set_learning_rate();              ///< for `attach`: for each update, whatever the optimizer was given
  bool is_first() const;                      ///< of all processes, the one that writes and shows
  bool others_continue();
  /// For `attach`: runs this when all policies are attached, so that it need not be taken back where one is refused;
  /// at once if they are.
  void when_built(std::function<void()> run);

  /// Saves or loads all that a training needs to go on to the bit; see `ga::save`. Between micro-batches.
  void state(Archive& archive);
  /// Throws where the optimizer has no state that can be saved.
  virtual void check_optimizer_state() = 0;

 protected:
  explicit TrainerBase(std::unique_ptr<detail::AnyOptimizer> optimizer);
  /// Attaches all policies.
  void built();
  /// For the destructor of the class that is derived from it: policies see a whole Trainer until they are gone.
  void end();

  FitReport fit_with(detail::AnyBatches& batches, const FitOptions& options);
  bool step_with(const detail::AnyBatch& batch);
  /// `on_all`: the batches are this process's share of those of all.
  Evaluation evaluate_with(detail::AnyBatches& batches, detail::Evaluator evaluator, bool on_all = false);
  std::optional<Evaluation> validate_with(detail::AnyBatches& batches, detail::Evaluator evaluator);
  void add(std::unique_ptr<detail::AnyPolicy> policy);
  detail::AnyPolicy* find_policy(const std::type_info& type) const;
  std::shared_ptr<detail::Shards> shards() const;  ///< the parts of the optimizer that processes divide, or none

  virtual void archive_optimizer(Archive& archive) = 0;

 private:
  friend class Replicas;
  friend struct Accumulate;
  friend struct DataParallel;
  friend struct FitMemory;
  friend struct Profile;
  friend struct SaveState;
  friend struct TensorBoard;
  friend struct detail::AnyTraining;

  void set_peers(std::shared_ptr<detail::Communicator> peers);
  std::shared_ptr<detail::Communicator> peers() const;  ///< other processes, or none
  detail::Loop& loop() { return *loop_; }
  void finish_background_save();  ///< waits for a state that a thread writes

  std::unique_ptr<detail::Loop> loop_;
};

}  // namespace gradaccum

#undef GRADACCUM_INLINE

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/trainer/trainer.ipp>
#endif
