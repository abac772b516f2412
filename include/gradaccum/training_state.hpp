// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/archive.hpp>
#include <gradaccum/io/safetensors.hpp>
#include <gradaccum/io/state_folder.hpp>
#include <gradaccum/state_parts.hpp>

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

/// What `ga::save` takes: a Trainer, or what a loop of one's own has to save.
template <class T>
concept saveable = requires(T& training, Archive& archive) {
  training.state(archive);
  { training.updates() } -> std::convertible_to<std::int64_t>;
};

/// Which states are kept.
struct SaveOptions {
  std::int64_t keep_last = 0;  ///< remove all but the newest states, so many; 0: none
};

/// Which state is taken, and what may differ.
struct LoadOptions {
  bool allow_changes = false;  ///< load what fits, though the model, the data or settings are others
  bool best = false;  ///< not the newest state, but the one with the best validation: see `SaveState::keep_best`
};

namespace detail {

class Peers;

/// A training of whatever class. By reference.
struct AnyTraining {
  std::function<std::int64_t()> updates;
  std::function<void(Archive&)> state;
  std::shared_ptr<const Peers> peers = nullptr;  ///< other processes: of a Trainer with DataParallel, say

  template <saveable Training>
  requires(!std::same_as<Training, AnyTraining>)
      AnyTraining(Training& training)  // NOLINT(google-explicit-constructor): a training is one
      : updates([&] { return training.updates(); }), state([&](Archive& archive) { training.state(archive); }) {
    if constexpr (requires { std::as_const(training).peers(); }) peers = std::as_const(training).peers();
  }
};

std::filesystem::path save(const std::filesystem::path& directory, const AnyTraining& training, SaveOptions options);
std::filesystem::path load(const std::filesystem::path& directory, const AnyTraining& training, LoadOptions options);

/// The state that `path` is, or the newest in it.
std::optional<std::filesystem::path> newest_state(const std::filesystem::path& path);

/// What a validation has found of a state's parameters, in its manifest; nothing where there was none.
struct MeasuredState {
  std::optional<std::string> metric = {}, better = {};  ///< the latter: min or max
  std::optional<double> number = {};
  void state(Archive& archive);
};

/// The best of the directory's states, so many at most, the best first. Of two that are equal the older is better.
std::vector<std::filesystem::path> best_states(const std::filesystem::path& directory, std::int64_t count);

/// What rank 0 finds or makes, on all ranks; an error there is one on all. Empty where there is none.
std::filesystem::path of_rank_0(const Peers* peers, const std::function<std::optional<std::filesystem::path>()>& find);

/// What a state has, checked; an error on one rank is one on all.
Archive open_state(const std::filesystem::path& folder, bool allow_changes, const Peers* peers);

/// All of it; an error on one rank is one on all.
void load_state(Archive& archive, const AnyTraining& training);

/// Throws if the directory has states of more updates.
void check_is_newest(const std::filesystem::path& directory, std::int64_t updates);

/// Two parts of one name, and names that no file can have, are found before hours have gone by.
void check_can_be_saved(const AnyTraining& training);

}  // namespace detail

/// Saves all that a training needs to go on to the bit, as a new folder in `directory`: `step-000040`, of 40 updates.
///
///     ga::Trainer trainer(model, sgd, [](auto& net, auto& batch) {
///       return torch::mse_loss(net->forward(batch.data), batch.target);
///     });
///     trainer.fit(batches);
///     ga::save("runs/1", trainer);
///     std::cout << ga::load("runs/1", trainer);             // "runs/1/step-000040", say
///
/// A folder is of safetensors files, a part each (`model.safetensors`, `optimizer.safetensors`), and a manifest of
/// numbers, texts and checksums in JSON. It is written beside, synced and renamed: killed at any moment, there is
/// nothing half-written under its name, and what is left over is swept by the next `save`. Where the name is taken, it
/// is `step-000040.1`. One writer at a time. A directory that has states of more updates is of another run, and an
/// error.
///
/// A training has `updates()` and `state(Archive&)`: a Trainer, or a class of one's own, of the parts of
/// state_parts.hpp. One of several processes also has `peers()`, that of its `Replicas`: then all ranks call `save`,
/// and rank 0 writes for all.
///
/// Throws `std::runtime_error` with the name of what could not be written; earlier states are as they were.
///
/// @note Waits for the disk. Copies one tensor at a time from a device; on the CPU takes no memory.
template <saveable Training>
std::filesystem::path save(const std::filesystem::path& directory, Training& training, SaveOptions options = {}) {
  return detail::save(directory, detail::AnyTraining(training), options);
}

/// Loads the newest state in `directory`, or the best, or the state that it is itself. Gives its folder.
///
/// Every byte is checked against the manifest first. A damaged state is an error that names the file, and the newest
/// intact state. A state of another model, optimizer, data or settings is an error that names both sides; nothing has
/// changed then, as long as `state` keeps to what `Archive` asks.
///
/// @note Takes the memory of all that it reads, and gives back what was there before: parameters on the CPU may have
/// other memory then, with all their views, as after `torch::load`.
template <saveable Training>
std::filesystem::path load(const std::filesystem::path& directory, Training& training, LoadOptions options = {}) {
  return detail::load(directory, detail::AnyTraining(training), options);
}

}  // namespace gradaccum

#ifndef GRADACCUM_COMPILED
#include <gradaccum/training_state.ipp>
#endif
