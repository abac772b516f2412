// SPDX-License-Identifier: Apache-2.0
#pragma once
// module: training

#include <gradaccum/fit_options.hpp>
#include <gradaccum/learning_rates.hpp>
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
}  // namespace detail

/// The part of Trainer that does not depend on its template arguments. `attach` of a policy receives it.
class TrainerBase {
 public:
  TrainerBase& operator=(TrainerBase&&) = delete;  // policies may keep its address
  GRADACCUM_INLINE virtual ~TrainerBase();

  /// Closes an incomplete window, with the mean over its items so far. Returns true if it updated the parameters.
  bool flush();
  /// Discards the window.
  void discard();
  /// Ends `fit` after the current micro-batch and its tail. The report contains the reason.
  void stop(std::string why = {});
  /// Like stop(), for a decision that all ranks make at the same step.
  void stop_on_all(std::string why);
  /// Ends `fit` after a signal, without its tail, so that another process can resume from a state.
  void interrupt(int signal);
  /// Makes `SaveState` save at the next boundary of this `fit`; with several ranks at the first after the next window.
  /// `WhenBusy::skip` drops the request while a state is being written.
  void request_save();

  virtual torch::nn::Module& module() = 0;
  double learning_rate();  ///< the first parameter group's; NaN if the optimizer has no get_lr()
  /// Sets the rates of all parameter groups; of a MultiOptimizer, also of the optimizer with this name only.
  LearningRates learning_rates(const std::string& optimizer = "");
  at::Device device() const;                   ///< the device of the first parameter
  std::vector<at::Tensor> parameters() const;  ///< the optimizer's parameters
  std::string optimizer_name() const;          ///< the optimizer's class
  std::int64_t updates() const;                ///< number of updates over all calls of `fit` and `step`
  /// Predicts updates() at the end of this `fit` from its value at the start of the epoch. Returns nullopt unless `fit`
  /// has a limit in epochs or updates only, batches have a size(), and windows a known number of micro-batches.
  std::optional<std::int64_t> planned_updates(std::int64_t at_epoch_begin) const;
  /// Returns the value that updates() would have had at the start of this epoch if all windows since had the current
  /// number of micro-batches and ranks.
  std::int64_t updates_at_epoch_begin() const;
  bool closing() const;        ///< true if the current backward pass fills the window; false when flush() closes it
  const Step& window() const;  ///< the open window: its first epoch, and this rank's counts
  const FitProgress& progress() const;  ///< of the running `fit`, or of the last one
  FitReport report() const;             ///< what the running `fit` would return now, without the memory
  /// Passes an evaluation to `on_validation` of all policies. Call it from a policy that evaluates, as `Validate` does.
  /// `EarlyStopping` counts `due` evaluations only.
  void validated(std::string name, Evaluation found, bool due = true);
  /// Announces, in `attach`, metrics that validated() will receive under this name, as in `validation/loss`.
  void will_validate(const std::string& name, const std::vector<std::string>& metrics);
  /// Announces one metric, with its mode if that is known.
  void will_validate(const std::string& name, const std::string& metric, std::optional<Mode> mode);
  /// Returns the announced metrics. Complete once all policies are attached.
  const MetricModes& metrics() const;
  /// Returns the bytes of parameters, optimizer state and gradients. Copies nothing, and does not synchronize.
  MemoryByKind memory_by_kind();
  /// Calls `see` with each tensor that memory_by_kind() counts, and its kind. Tensors may be undefined.
  void for_each_held(c10::function_ref<void(std::int64_t MemoryByKind::*kind, const at::Tensor& tensor)> see);
  void set_accumulate_in(std::optional<at::ScalarType> dtype);
  void set_in_backward(bool on);
  bool steps_in_backward() const;
  void set_batch_size(std::int64_t samples);  ///< samples per window; 0: not counted
  /// Announces the number of micro-batches per window, by epoch, of a policy whose `ready` counts them.
  void set_micro_batches_per_window(std::function<std::int64_t(std::int64_t epoch)> number);
  void leave_out(std::vector<std::string> buffers);  ///< names of buffers that states do not have
  void will_set_learning_rate(
      const std::string& optimizer = "");  ///< announces, in `attach`, that a policy sets the rate for each update
  bool is_first() const;                   ///< true on rank 0, which writes files and shows progress
  /// Calls `run` once all policies are attached and started, immediately if they are. What `attach` does in it need not
  /// be undone if another policy throws.
  void when_built(std::function<void()> run);

  /// Saves or loads everything that a bitwise identical resume needs; see `ga::save`. Call it between micro-batches.
  void state(Archive& archive);
  /// Throws if the optimizer's state cannot be saved.
  virtual void check_optimizer_state() = 0;
  /// Waits until a thread has written its state.
  void finish_background_save();
  /// Returns the exchange with the other ranks, for `peers()` of a training of your own that has this Trainer; nullptr
  /// for a single process.
  auto peers() const { return exchange(); }

 protected:
  explicit TrainerBase(std::unique_ptr<detail::AnyOptimizer> optimizer);
  /// Attaches and starts all policies.
  void built();
  /// Destroys the policies. The derived class's destructor calls it, so that they see a complete Trainer until then.
  void end();

  FitReport fit_with(detail::AnyBatches& batches, const FitOptions& options);
  bool step_with(const detail::AnyBatch& batch);
  /// Evaluates. With `on_all`, the batches are this rank's share of the evaluation.
  Evaluation evaluate_with(detail::AnyBatches& batches, detail::Evaluator evaluator, bool on_all = false);
  std::optional<Evaluation> validate_with(detail::AnyBatches& batches, detail::Evaluator evaluator);
  void add(std::unique_ptr<detail::AnyPolicy> policy);
  detail::AnyPolicy* find_policy(const std::type_info& type) const;
  std::shared_ptr<detail::Shards> shards() const;  ///< the shards of the optimizer; null if it is not sharded

  virtual void archive_optimizer(Archive& archive) = 0;

 private:
  friend class detail::Loop;  // finds itself, for policies of the library

  std::shared_ptr<detail::Communicator> exchange() const;

  std::unique_ptr<detail::Loop> loop_;
};

}  // namespace gradaccum

#undef GRADACCUM_INLINE

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/training/trainer_base.ipp>
#endif
