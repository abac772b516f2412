// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/archive.hpp>
#include <gradaccum/detail/io/state_directory.hpp>
#include <gradaccum/detail/window/peers.hpp>
#include <gradaccum/fit_options.hpp>
#include <gradaccum/io/state_folder.hpp>
#include <gradaccum/state_parts.hpp>

#include <c10/util/Exception.h>

#include <concepts>
#include <cstdint>
#include <exception>
#include <filesystem>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

namespace gradaccum {

/// What `ga::save` takes: a Trainer, or what a loop of one's own has to save.
template <class T>
concept saveable = requires(T& training, Archive& archive) {
  training.state(archive);
  { training.updates() } -> std::convertible_to<std::int64_t>;
};

struct SaveOptions {
  std::int64_t keep_last = 0;  ///< remove all but the newest states, so many; 0: none
};

struct LoadOptions {
  bool allow_changes = false;  ///< load what fits, though the model, the data or settings are others
};

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
std::filesystem::path save(const std::filesystem::path& directory, Training& training, SaveOptions options = {});

/// Loads the newest state in `directory`, or the state that it is itself. Gives its folder.
///
/// Every byte is checked against the manifest first. A damaged state is an error that names the file, and the newest
/// intact state. A state of another model, optimizer, data or settings is an error that names both sides; nothing has
/// changed then, as long as `state` keeps to what `Archive` asks.
///
/// @note Takes the memory of all that it reads, and gives back what was there before: parameters on the CPU may have
/// other memory then, with all their views, as after `torch::load`.
template <saveable Training>
std::filesystem::path load(const std::filesystem::path& directory, Training& training, LoadOptions options = {});

namespace detail {

/// The state that `path` is, or the newest in it.
inline std::optional<std::filesystem::path> newest_state(const std::filesystem::path& path) {
  if (std::filesystem::exists(path / manifest_name)) return path;
  const auto states = StateDirectory(path).finished();
  return states.empty() ? std::nullopt : std::optional(states.back().path);
}

/// Where a fit is to go on from, if there is a state.
inline std::optional<std::filesystem::path> state_to_resume(const FitOptions& options) {
  return options.resume.empty() ? std::nullopt : newest_state(options.resume);
}

/// `; the newest intact one is …`, of the others in the same directory.
inline std::string newest_intact_beside(const std::filesystem::path& damaged) {
  const auto states = StateDirectory(damaged.parent_path()).finished();
  for (auto state = states.rbegin(); state != states.rend(); ++state) {
    if (state->path == damaged) continue;
    try {
      check_files(state->path, read_manifest(state->path));
      return "; the newest intact state is " + state->path.string() + ": load that one by its own path";
    } catch (const std::exception&) {  // the next older one, then
    }
  }
  return "; there is no intact state beside it";
}

/// The other processes of a training that has some: a Trainer with DataParallel, or one that says so by `peers()`.
template <class Training>
std::shared_ptr<const Peers> peers_of(const Training& training) {
  if constexpr (requires { training.peers(); })
    return training.peers();
  else
    return nullptr;
}

/// What rank 0 finds or makes, on all ranks; an error there is one on all. Empty where there is none.
template <class Find>
std::filesystem::path of_rank_0(const Peers* peers, const Find& find) {
  const auto found = on_all(peers, [&] {
    const bool asked = !peers || peers->rank() == 0;
    return asked ? find().value_or(std::filesystem::path()).string() : std::string();
  });
  return peers ? peers->say(found) : found;
}

/// What a state has, checked.
inline Archive open_state(const std::filesystem::path& folder, bool allow_changes, const Peers* peers) {
  try {
    auto values = io::read_state(folder);
    if (peers) peers->pick(values);
    Archive archive(std::move(values));
    archive.allow_changes(allow_changes);
    return archive;
  } catch (const std::exception& error) {
    throw std::runtime_error(std::string(error.what()) + newest_intact_beside(folder));
  }
}

template <class Training>
void load_state(Archive& archive, Training& training) {
  archive.together([&] {
    training.state(archive);
    if (!archive.changes_allowed()) archive.check_all_used();
  });
}

inline void check_is_newest(const std::filesystem::path& directory, std::int64_t updates) {
  const auto states = StateDirectory(directory).finished();
  TORCH_CHECK(states.empty() || states.back().step <= updates, "save: ", directory.string(), " has ",
              states.empty() ? "" : states.back().path.filename().string(), ", and this training is at update ",
              updates,
              ": the state is of another run; go on from it ({.resume = directory}), remove it, or save to "
              "another directory");
}

/// Two parts of one name, and names that no file can have, are found before hours have gone by.
template <class Training>
void check_can_be_saved(Training& training) {
  auto archive = Archive::of_references();
  training.state(archive);
  static_cast<void>(FilesOfState(archive.values()));
}

}  // namespace detail

template <saveable Training>
std::filesystem::path save(const std::filesystem::path& directory, Training& training, SaveOptions options) {
  TORCH_CHECK(options.keep_last >= 0, "save: keep_last must be >= 0, got ", options.keep_last);
  const auto peers = detail::peers_of(training);
  auto archive = detail::on_all(peers.get(), [&] {
    if (!peers || peers->rank() == 0) detail::check_is_newest(directory, training.updates());
    auto own = Archive::of_references();
    training.state(own);
    return own;
  });
  if (peers) peers->gather(archive);
  return detail::of_rank_0(peers.get(), [&] {
    detail::StateDirectory states(directory);
    auto folder = states.add(training.updates(), [&](auto& unfinished) { io::write_state(archive, unfinished); });
    if (options.keep_last > 0) states.keep_last(options.keep_last);
    return std::optional(folder);
  });
}

template <saveable Training>
std::filesystem::path load(const std::filesystem::path& directory, Training& training, LoadOptions options) {
  const auto peers = detail::peers_of(training);
  const auto folder = detail::of_rank_0(peers.get(), [&] { return detail::newest_state(directory); });
  TORCH_CHECK(!folder.empty(), "load: ", directory.string(),
              " must be a state or have one, a folder step-000000 of any number");
  auto archive =
      detail::on_all(peers.get(), [&] { return detail::open_state(folder, options.allow_changes, peers.get()); });
  return detail::on_all(peers.get(), [&] {
    detail::load_state(archive, training);
    return folder;
  });
}

}  // namespace gradaccum
