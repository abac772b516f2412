// SPDX-License-Identifier: Apache-2.0
#pragma once
// module: saving

#include <gradaccum/archive.hpp>
#include <gradaccum/detail/optimizers/param_states.hpp>
#include <gradaccum/detail/saving/optimizer_state.hpp>
#include <gradaccum/detail/state/pieces.hpp>
#include <gradaccum/detail/types/types.hpp>
#include <gradaccum/gradients.hpp>
#include <gradaccum/io/state_folder.hpp>
#include <gradaccum/optim/multi_optimizer.hpp>

#include <c10/util/Exception.h>
#include <c10/util/FunctionRef.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <concepts>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace gradaccum {

/// Parts of a training state for a custom training loop: LibTorch's objects, which have no `state(Archive&)`.
///
///     struct Training {
///       decltype(model)& net;
///       decltype(optimizer)& sgd_of_4;
///       std::int64_t updates() const { return sgd_of_4.updates(); }
///       void state(ga::Archive& archive) {
///         archive("model", ga::ModelState(net));
///         archive("optimizer", ga::OptimizerState(sgd_of_4, net));
///         archive("random", ga::RandomState());
///       }
///     } training{model, optimizer};
///     ga::save("runs/by_hand", training);
///     ga::load("runs/by_hand", training);
///
/// `ModelState` has a model's parameters and buffers by name. Loading keeps the tensor objects, but CPU tensors and
/// their views may get different memory. Different names or shapes throw an error that lists them, unless changes are
/// allowed: then everything that fits is loaded. Loading also restores `requires_grad` of the parameters, unless
/// changes are allowed. `leave_out` names buffers that are not saved, for example buffers that grow with the data.
class ModelState {
 public:
  template <model Model>
  explicit ModelState(Model& model, std::vector<std::string> leave_out = {})
      : module_(detail::module_of(model)), leave_out_(std::move(leave_out)) {}
  void state(Archive& archive) { detail::archive_module(archive, module_, leave_out_); }

 private:
  torch::nn::Module& module_;
  std::vector<std::string> leave_out_;
};

/// An optimizer's state by the model's parameter names, the options of its parameter groups, and an accumulator's
/// window, even if incomplete. Supports LibTorch's optimizers except LBFGS, this library's, several as a
/// `MultiOptimizer`, and any class with `state(Archive&)`.
template <class Optimizer>
class OptimizerState {
 public:
  template <model Model>
  OptimizerState(Optimizer& optimizer, Model& model) : optimizer_(optimizer), module_(detail::module_of(model)) {}

  void state(Archive& archive) {
    check();
    if constexpr (has_state) {
      TORCH_CHECK(!shards_, "OptimizerState: an optimizer with a state(ga::Archive&) of its own, such as ",
                  detail::type_name(optimizer_), ", must not be sharded: use {.shard = ga::Shard::none}");
      optimizer_.state(archive);
    } else if constexpr (accumulating<Optimizer>) {
      archive("window", optimizer_.named_window(module_));
      gradaccum::OptimizerState(optimizer_.optimizer(), module_, optimizer_.shards()).state(archive);
    } else if constexpr (is_multi) {
      for (auto& [name, optimizer] : optimizer_.members())
        archive(name, gradaccum::OptimizerState(optimizer, module_, shards_));
    } else if constexpr (is_torch) {
      detail::archive_optimizer(archive, optimizer_, module_.named_parameters(), shards_.get());
    }
  }

  /// Throws if the optimizer's state cannot be saved, or if a parameter is not the model's.
  void check() {
    if constexpr (is_torch && !has_state)
      detail::check_has_named_state(optimizer_, module_.named_parameters());
    else if constexpr (is_multi)
      for (auto& member : optimizer_.members())
        detail::check_has_named_state(member.optimizer, module_.named_parameters());
    else if constexpr (!has_state && !accumulating<Optimizer>)
      TORCH_CHECK(false, "OptimizerState: an optimizer of your own, such as ", detail::type_name(optimizer_),
                  ", needs a member void state(ga::Archive&)");
  }

 private:
  template <class Other>
  friend class OptimizerState;
  template <class Model, class Other, class Objective, class... Policies>
  friend class Trainer;

  /// The state of a sharded optimizer: this rank's shard, which `Replicas` provides.
  OptimizerState(Optimizer& optimizer, torch::nn::Module& module, std::shared_ptr<detail::Shards> shards)
      : optimizer_(optimizer), module_(module), shards_(std::move(shards)) {}

  static constexpr bool is_torch = std::derived_from<Optimizer, torch::optim::Optimizer>;
  static constexpr bool is_multi = std::same_as<Optimizer, optim::MultiOptimizer>;
  static constexpr bool has_state = requires(Optimizer & optimizer, Archive& archive) { optimizer.state(archive); };

  Optimizer& optimizer_;
  torch::nn::Module& module_;
  std::shared_ptr<detail::Shards> shards_;
};

/// The states of the default random number generators of the CPU and all devices in use. Loading throws for other
/// devices.
///
/// @note Synchronizes with the devices in use.
class RandomState {
 public:
  void state(Archive& archive) { detail::archive_generators(archive); }
};

/// The argument of `ga::save`: a Trainer, or an object of your own.
template <class T>
concept saveable = requires(T& training, Archive& archive) {
  training.state(archive);
  { training.updates() } -> std::convertible_to<std::int64_t>;
};

/// The states to keep.
struct SaveOptions {
  std::int64_t keep_last = 0;  ///< remove all but this many of the newest states; 0: remove none
};

/// The state to load, and permitted differences.
struct LoadOptions {
  bool allow_changes = false;  ///< load all values that fit, even if the model, data or settings differ
  bool best = false;           ///< load the state with the best validation, not the newest: see `SaveState::keep_best`
  bool if_any = false;         ///< load nothing, and return an empty path, if there is no state
};

namespace detail {

class Communicator;

/// A type-erased reference to a training.
struct AnyTraining {
  std::function<std::int64_t()> updates;
  std::function<void(Archive&)> state;
  std::function<void()> finish_background_save = [] {};  ///< waits until a thread has written its state
  std::shared_ptr<const Communicator> peers = nullptr;   ///< the ranks of the training, if there are several

  template <saveable Training>
  requires(!std::same_as<Training, AnyTraining>)
      AnyTraining(Training& training)  // NOLINT(google-explicit-constructor): a training is one
      : updates([&] { return training.updates(); }), state([&](Archive& archive) { training.state(archive); }) {
    if constexpr (requires { std::as_const(training).peers(); }) peers = std::as_const(training).peers();
    if constexpr (requires { training.finish_background_save(); })
      finish_background_save = [&] { training.finish_background_save(); };
  }
};

/// Writes a state. All ranks construct one together; each writes its part independently, and rank 0 finishes.
class StateWriter {
 public:
  StateWriter(const std::filesystem::path& directory, const AnyTraining& training);

  /// Moves out the values that this rank writes. Their tensors are the training's own.
  Archive take_values() { return std::move(archive_); }

  /// Writes this rank's tensors to the folder by `write`, which returns the files; on ranks other than 0 also a list of
  /// them, for rank 0. Sends no messages, so that any thread may call it.
  void write(c10::function_ref<StateFiles(const std::filesystem::path& folder)> write);

  /// On rank 0, gives the state its name once all ranks have written, and returns its path. Throws if a rank has not
  /// written when `keeps_waiting` returns false. Does nothing on other ranks.
  std::filesystem::path finish(c10::function_ref<bool()> keeps_waiting);

 private:
  bool is_first() const { return state_ != nullptr; }

  int rank_ = 0, world_size_ = 1;
  Archive archive_;
  std::unique_ptr<UnfinishedState> state_;  // on rank 0 only
  std::filesystem::path folder_;
  Manifest manifest_;
};

std::filesystem::path save(const std::filesystem::path& directory, const AnyTraining& training, SaveOptions options);
std::filesystem::path load(const std::filesystem::path& directory, const AnyTraining& training, LoadOptions options);

/// Returns `path` if it is a state, otherwise the newest state in it.
std::optional<std::filesystem::path> newest_state(const std::filesystem::path& path);

/// The validation result in a state's manifest; empty if there was none.
struct MeasuredState {
  std::optional<std::string> metric = {}, better = {};  ///< better: `min` or `max`
  std::optional<double> number = {};
  void state(Archive& archive);
};

/// The `count` best states in a directory, best first. In a tie the older state ranks higher.
std::vector<std::filesystem::path> best_states(const std::filesystem::path& directory, std::int64_t count);

/// Runs `find` on rank 0 and broadcasts the path, empty if there is none; rethrows its error on every rank.
std::filesystem::path of_rank_0(const Communicator* peers,
                                const std::function<std::optional<std::filesystem::path>()>& find);

/// Returns rank 0's path on all ranks.
std::filesystem::path path_of_first(const Communicator* peers, const std::filesystem::path& own);

/// Reads and checks a state; an error on one rank is rethrown on every rank.
Archive open_state(const std::filesystem::path& folder, bool allow_changes, const Communicator* peers);

/// Loads all values of a state; an error on one rank is rethrown on every rank.
void load_state(Archive& archive, const AnyTraining& training);

/// Throws if the directory has states with more updates.
void check_is_newest(const std::filesystem::path& directory, std::int64_t updates);

/// Throws for duplicate names of parts, and for names that no file can have. Checking early saves hours of training.
void check_can_be_saved(const AnyTraining& training);

}  // namespace detail

/// Saves everything that a bitwise identical resume needs to a new folder in `directory`, `step-000040` at update 40.
///
///     ga::Trainer trainer(model, sgd, [](auto& net, auto& batch) {
///       return torch::mse_loss(net->forward(batch.data), batch.target);
///     });
///     trainer.fit(batches);
///     ga::save("runs/1", trainer);
///     std::cout << ga::load("runs/1", trainer);             // "runs/1/step-000040", say
///
/// A state is a folder of safetensors files, one per part (`model.safetensors`), and a JSON manifest with numbers,
/// strings and checksums. It is written under a temporary name, synced and renamed: if the process is killed, no
/// incomplete state has its name, and the next `save` removes the remains. If the name is taken, it is `step-000040.1`.
/// Only one process may write at a time. Throws if the directory has states with more updates, since they belong to
/// another run; and `std::runtime_error`, naming the file, if writing fails. Earlier states are unchanged then.
///
/// A training is a Trainer, or a class of your own that saves the parts above. With several ranks it also needs
/// `peers()`, from its `Replicas`: all ranks call `save`, each writes its own tensors, and rank 0 the rest.
///
/// @note Waits for the disk. Copies one tensor at a time from a device, and no tensors on the CPU.
template <saveable Training>
std::filesystem::path save(const std::filesystem::path& directory, Training& training, SaveOptions options = {}) {
  return detail::save(directory, detail::AnyTraining(training), options);
}

/// Loads the newest or best state in `directory`, or `directory` itself if it is a state. Returns its folder.
///
/// Checks every byte against the manifest first. Throws for a damaged state, with the names of the file and of the
/// newest intact state, and for a state of a different model, optimizer, data or settings, with both values. Nothing
/// has changed then, provided that `state` follows the rules of `Archive`.
///
/// @note Takes memory for all loaded tensors, and frees the memory of the previous ones: see `ModelState`.
template <saveable Training>
std::filesystem::path load(const std::filesystem::path& directory, Training& training, LoadOptions options = {}) {
  return detail::load(directory, detail::AnyTraining(training), options);
}

}  // namespace gradaccum

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/saving/training_state.ipp>
#endif
