// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/training_state.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/io/listed_files.hpp>
#include <gradaccum/detail/io/manifest.hpp>
#include <gradaccum/detail/io/state_directory.hpp>
#include <gradaccum/detail/state/pieces.hpp>
#include <gradaccum/detail/window/peers.hpp>
#include <gradaccum/io/state_folder.hpp>
#include <gradaccum/mode.hpp>

#include <c10/util/Exception.h>

#include <algorithm>
#include <exception>
#include <sstream>
#include <stdexcept>
#include <string>
#include <variant>

namespace gradaccum::detail {

GRADACCUM_INLINE std::optional<std::filesystem::path> newest_state(const std::filesystem::path& path) {
  if (std::filesystem::exists(path / manifest_name)) return path;
  const auto states = StateDirectory(path).finished();
  return states.empty() ? std::nullopt : std::optional(states.back().path);
}

/// Returns `; the newest intact state is …`, chosen among the other states in the directory.
GRADACCUM_INLINE std::string newest_intact_beside(const std::filesystem::path& damaged) {
  const auto states = StateDirectory(damaged.parent_path()).finished();
  for (auto state = states.rbegin(); state != states.rend(); ++state) {
    if (state->path == damaged) continue;
    try {
      check_files(state->path, read_manifest(state->path));
      return "; the newest intact state is " + state->path.string() + ": load that one by its own path";
    } catch (const std::exception&) {  // try the next older one
    }
  }
  return "; there is no intact state beside it";
}

GRADACCUM_INLINE void MeasuredState::state(Archive& archive) {
  archive("metric", metric);
  archive("better", better);
  archive("number", number);
}

/// A state and its measurement.
struct FoundState {
  std::filesystem::path path;
  MeasuredState measured;

  bool is_better_than(const FoundState& other) const {
    const auto mode = measured.better == "max" ? Mode::max : Mode::min;
    return is_better(mode, *measured.number, *other.measured.number);
  }
};

/// Returns nullopt if the state was not measured or its manifest is damaged.
GRADACCUM_INLINE std::optional<FoundState> found_state(const std::filesystem::path& path) {
  try {
    const auto manifest = read_manifest(path);
    Archive::Values values;
    for (auto& value : manifest.values)
      if (value.first.starts_with("save_state."))
        std::visit([&](auto& held) { values[value.first] = held; }, value.second);
    FoundState found{path, {}};
    Archive(std::move(values))("save_state", found.measured);
    return found.measured.number ? std::optional(std::move(found)) : std::nullopt;
  } catch (const std::exception&) {
    return {};
  }
}

GRADACCUM_INLINE std::vector<std::filesystem::path> best_states(const std::filesystem::path& directory,
                                                                std::int64_t count) {
  std::vector<FoundState> found;
  for (auto& state : count > 0 ? StateDirectory(directory).finished() : std::vector<StateDirectory::State>())
    if (auto one = found_state(state.path)) found.push_back(std::move(*one));
  // compare by the newest state's metric: older states may have been measured by another
  if (!found.empty())
    std::erase_if(found, [metric = found.back().measured.metric](auto& one) { return one.measured.metric != metric; });
  std::stable_sort(found.begin(), found.end(), [](auto& a, auto& b) { return a.is_better_than(b); });
  std::vector<std::filesystem::path> best;
  for (auto& one : found)
    if (static_cast<std::int64_t>(best.size()) < count) best.push_back(std::move(one.path));
  return best;
}

GRADACCUM_INLINE std::optional<std::filesystem::path> best_state(const std::filesystem::path& directory) {
  const auto best = best_states(directory, 1);
  return best.empty() ? std::nullopt : std::optional(best.front());
}

/// Broadcasts rank 0's path.
GRADACCUM_INLINE std::filesystem::path path_of_first(const Peers* peers, const std::filesystem::path& own) {
  return peers ? std::filesystem::path(said_by_first(*peers, own.string())) : own;
}

GRADACCUM_INLINE std::filesystem::path of_rank_0(const Peers* peers,
                                                 const std::function<std::optional<std::filesystem::path>()>& find) {
  const auto found = on_all(peers, [&] {
    const bool asked = !peers || peers->rank() == 0;
    return asked ? find().value_or(std::filesystem::path()).string() : std::string();
  });
  return path_of_first(peers, found);
}

GRADACCUM_INLINE Archive open_state(const std::filesystem::path& folder, bool allow_changes, const Peers* peers) {
  return on_all(peers, [&] {
    try {
      const bool needs_a_part = peers && peers->shards();
      auto values = needs_a_part ? map_state(folder) : io::read_state(folder);
      auto pieces = take_shared_pieces(values);
      if (peers) peers->pick(values);
      values.merge(pieces);
      Archive archive(std::move(values));
      archive.allow_changes(allow_changes);
      return archive;
    } catch (const std::exception& error) {
      throw std::runtime_error(std::string(error.what()) + newest_intact_beside(folder));
    }
  });
}

GRADACCUM_INLINE void load_state(Archive& archive, const AnyTraining& training) {
  archive.together([&] {
    run_on_all(training.peers.get(), [&] {
      training.state(archive);
      if (!archive.changes_allowed()) archive.check_all_used();
    });
  });
}

GRADACCUM_INLINE void check_is_newest(const std::filesystem::path& directory, std::int64_t updates) {
  const auto states = StateDirectory(directory).finished();
  TORCH_CHECK(states.empty() || states.back().step <= updates, "save: ", directory.string(), " has ",
              states.empty() ? "" : states.back().path.filename().string(), ", and this training is at update ",
              updates,
              ": the state is of another run; go on from it ({.resume = directory}), remove it, or save to "
              "another directory");
}

GRADACCUM_INLINE void check_has_no_pieces(const Archive& archive) {
  for (auto& [name, value] : archive.values())
    TORCH_CHECK(!PieceName::of(name), "save: ", name,
                " is a part of what several processes have divided; give the training their peers(), and save on all");
}

GRADACCUM_INLINE Archive references_to(const AnyTraining& training) {
  auto archive = Archive::of_references();
  training.state(archive);
  return archive;
}

GRADACCUM_INLINE void check_can_be_saved(const AnyTraining& training) { check_can_be_written(references_to(training)); }

GRADACCUM_INLINE std::string text_of_files(const StateFiles& files) {
  std::string text;
  for (auto& [name, file] : files) text += c10::str(name, " ", file.bytes, " ", file.crc32, "\n");
  return text;
}

GRADACCUM_INLINE void add_files(StateFiles& files, const std::string& text) {
  std::istringstream lines(text);
  Manifest::File file;
  for (std::string name; lines >> name >> file.bytes >> file.crc32;) files[name] = file;
}

/// Writes each rank's tensors into the folder that rank 0 broadcasts. The folder is empty if rank 0 could not make one;
/// rank 0 reports that error later.
GRADACCUM_INLINE StateFiles write_by_all(const Peers& peers, const Archive& archive,
                                         const std::filesystem::path& folder) {
  const auto where = said_by_first(peers, folder.string());
  if (where.empty()) return {};
  const auto own = on_all(&peers, [&] { return write_tensors(archive, where); });
  StateFiles all;
  for (auto& text : peers.texts_of_all(text_of_files(own))) add_files(all, text);
  return all;
}

/// Adds a state on rank 0, including the files that the other ranks write into it.
GRADACCUM_INLINE std::filesystem::path add_state(StateDirectory& states, const AnyTraining& training,
                                                 const Archive& archive) {
  const auto* const peers = training.peers.get();
  bool told = false;
  try {
    return states.add(training.updates(), [&](const auto& unfinished) {
      told = true;
      write_manifest_of(archive, peers ? write_by_all(*peers, archive, unfinished) : write_tensors(archive, unfinished),
                        unfinished);
    });
  } catch (...) {
    if (peers && !told) said_by_first(*peers, "");
    throw;
  }
}

GRADACCUM_INLINE std::filesystem::path save(const std::filesystem::path& directory, const AnyTraining& training,
                                            SaveOptions options) {
  TORCH_CHECK(options.keep_last >= 0, "save: keep_last must be >= 0, got ", options.keep_last);
  const auto* const peers = training.peers.get();
  auto archive = on_all(peers, [&] {
    if (!peers || peers->rank() == 0) check_is_newest(directory, training.updates());
    return references_to(training);
  });
  if (peers)
    peers->gather(archive);
  else
    check_has_no_pieces(archive);
  const auto saved = on_all(peers, [&] {
    if (peers && peers->rank() > 0) return write_by_all(*peers, archive, ""), std::filesystem::path();
    StateDirectory states(directory);
    auto folder = add_state(states, training, archive);
    if (options.keep_last > 0) states.keep_last(options.keep_last);
    return folder;
  });
  return path_of_first(peers, saved);
}

GRADACCUM_INLINE std::filesystem::path load(const std::filesystem::path& directory, const AnyTraining& training,
                                            LoadOptions options) {
  const auto* const peers = training.peers.get();
  const auto folder = of_rank_0(peers, [&] { return options.best ? best_state(directory) : newest_state(directory); });
  TORCH_CHECK(!folder.empty() || !options.best, "load: ", directory.string(),
              " must have a state that was validated, for {.best = true}: one of a ga::Validate and a "
              "ga::SaveState{.keep_best = 1}");
  TORCH_CHECK(!folder.empty(), "load: ", directory.string(),
              " must be a state or have one, a folder step-000000 of any number");
  auto archive = open_state(folder, options.allow_changes, peers);
  load_state(archive, training);
  return folder;
}

}  // namespace gradaccum::detail
