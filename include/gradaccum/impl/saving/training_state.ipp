// SPDX-License-Identifier: Apache-2.0
// Saves and resumes a training, and chooses among the states in a directory.
#pragma once

#include <gradaccum/training_state.hpp>

#include <gradaccum/detail/window/communicator.hpp>
#include <gradaccum/metrics.hpp>

#include <c10/util/StringUtil.h>

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <fstream>
#include <limits>
#include <numeric>
#include <ostream>
#include <stdexcept>
#include <thread>
#include <tuple>
#include <variant>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum::detail {

GRADACCUM_INLINE std::optional<std::filesystem::path> newest_state(const std::filesystem::path& path) {
  if (path.empty()) return std::nullopt;
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
      return "; the newest intact state is " + state->path.string() + ": load it by its own path";
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

/// Returns a result without a number if the state was not measured or its manifest is damaged.
GRADACCUM_INLINE MeasuredState measured_state(const std::filesystem::path& path) {
  try {
    const auto manifest = read_manifest(path);
    Archive::Values values;
    for (auto& value : manifest.values) std::visit([&](auto& held) { values[value.first] = held; }, value.second);
    MeasuredState measured;
    Archive(std::move(values))("save_state", measured);
    return measured;
  } catch (const std::exception&) {
    return {};
  }
}

GRADACCUM_INLINE std::vector<std::filesystem::path> best_states(const std::filesystem::path& directory,
                                                                std::int64_t count) {
  std::vector<std::pair<std::filesystem::path, MeasuredState>> found;
  for (auto& state : count > 0 ? StateDirectory(directory).finished() : std::vector<StateDirectory::State>())
    if (auto measured = measured_state(state.path); measured.number && !is_nan(*measured.number))
      found.emplace_back(state.path, measured);
  // compare by the newest state's metric: older states may have been measured by another
  if (!found.empty())
    std::erase_if(found, [metric = found.back().second.metric](auto& one) { return one.second.metric != metric; });
  std::stable_sort(found.begin(), found.end(), [](auto& a, auto& b) {
    const auto mode = a.second.better == "max" ? Mode::max : Mode::min;
    return is_better(mode, *a.second.number, *b.second.number);
  });
  std::vector<std::filesystem::path> best;
  for (auto& one : found)
    if (std::ssize(best) < count) best.push_back(std::move(one.first));
  return best;
}

GRADACCUM_INLINE std::filesystem::path path_of_first(const Communicator* peers, const std::filesystem::path& own) {
  return peers ? std::filesystem::path(broadcast_text(*peers, own.string())) : own;
}

GRADACCUM_INLINE std::filesystem::path of_rank_0(const Communicator* peers,
                                                 const std::function<std::optional<std::filesystem::path>()>& find) {
  const auto found = on_all(peers, [&] {
    return peers && peers->rank() > 0 ? std::filesystem::path() : find().value_or(std::filesystem::path());
  });
  return path_of_first(peers, found);
}

inline constexpr auto world_size_name = "rank_0.world_size";  // no part's: rank 0's values have no rank in their names

/// Returns how many ranks saved a state and how many load it, with its values that are not tensors.
GRADACCUM_INLINE Archive::Ranks ranks_of(Archive::Values& values, const Communicator* peers) {
  std::int64_t saved = 1;  // a state without a number of ranks has values of each, if they are not equal
  for (const auto* const name : {world_size_name, "data_parallel.world_size"}) {
    const auto told = values.find(name);
    const auto* const number = told == values.end() ? nullptr : std::get_if<std::int64_t>(&told->second);
    if (number && *number < 1 << 20) saved = std::max(saved, *number);  // a damaged state may have any number
  }
  values.erase(world_size_name);
  Archive::Ranks ranks{.loading = peers ? peers->world_size() : 1};
  std::string last;
  for (auto& [name, value] : values) {
    if (!std::holds_alternative<at::Tensor>(value)) ranks.values.emplace(name, value);
    if (without_rank(name) == name) continue;
    const auto rank = name.substr(0, name.find('.'));
    ranks.saved += rank != last;
    last = rank;
  }
  ranks.saved = std::max(ranks.saved, saved);
  return ranks;
}

GRADACCUM_INLINE Archive open_state(const std::filesystem::path& folder, bool allow_changes,
                                    const Communicator* peers) {
  return on_all(peers, [&] {
    try {
      auto values = read_state(folder, /*mapped=*/peers && peers->shards());
      auto pieces = take_shared_pieces(values);
      auto ranks = ranks_of(values, peers);
      if (allow_changes && peers && peers->rank() >= ranks.saved)  // keeps its current random state
        std::erase_if(values, [](auto& value) { return value.first.starts_with("random."); });
      if (peers) peers->keep_own_values(values);
      values.merge(pieces);
      Archive archive(std::move(values));
      archive.set_ranks(std::move(ranks));
      archive.set_folder(folder.string());
      archive.allow_changes(allow_changes);
      return archive;
    } catch (const std::exception& error) {
      throw std::runtime_error(std::string(error.what()) + newest_intact_beside(folder));
    }
  });
}

GRADACCUM_INLINE void load_state(Archive& archive, const AnyTraining& training) try {
  archive.together([&] {
    run_on_all(training.peers.get(), [&] {
      training.state(archive);
      if (!archive.changes_allowed()) archive.check_all_used();
    });
  });
} catch (c10::Error& error) {
  error.add_context("while loading " + archive.folder());
  throw;
}

GRADACCUM_INLINE void check_is_newest(const std::filesystem::path& directory, std::int64_t updates) {
  const auto states = StateDirectory(directory).finished();
  TORCH_CHECK(states.empty() || states.back().step <= updates, "save: ", directory.string(), " has ",
              states.empty() ? "" : states.back().path.filename().string(), ", but this training is at update ",
              updates,
              ": the state is from another run; resume from it ({.resume = directory}), remove it, or save to another "
              "directory");
}

GRADACCUM_INLINE Archive references_to(const AnyTraining& training) {
  auto archive = Archive::of_references();
  training.state(archive);
  return archive;
}

GRADACCUM_INLINE void check_can_be_saved(const AnyTraining& training) { check_can_be_written(references_to(training)); }

/// Returns the path of the list of a rank's files (`.files`), or of its error (`.error`), in an unfinished folder.
GRADACCUM_INLINE std::filesystem::path path_of_rank(const std::filesystem::path& folder, int rank, const char* suffix) {
  return folder / plain_text("rank_", rank, suffix);
}

/// Writes a rank's list, and renames it into place last: once it exists, rank 0 may rename the folder.
GRADACCUM_INLINE void write_list(const std::filesystem::path& path, const StateFiles& files) {
  std::string text;
  for (auto& [name, file] : files) text += plain_text(name, " ", file.bytes, " ", file.crc32, "\n");
  const auto temporary = temporary_name(path);
  make_and_rename(temporary, path, [&] {
    OutputFile file(temporary);
    file.write(text.data(), text.size());
    file.close();
  });
}

/// Adds the entries of the list that another rank has written to `files`, and removes the list.
GRADACCUM_INLINE void take_list(const std::filesystem::path& path, StateFiles& files) {
  auto lines = plain_stream(std::string(MappedFile(path).text()));
  Manifest::File file;
  for (std::string name; lines >> name >> file.bytes >> file.crc32;) files[name] = file;
  std::filesystem::remove(path);
}

GRADACCUM_INLINE StateWriter::StateWriter(const std::filesystem::path& directory, const AnyTraining& training) {
  const auto* const peers = training.peers.get();
  if (peers) std::tie(rank_, world_size_) = std::pair(peers->rank(), peers->world_size());
  archive_ = on_all(peers, [&] {
    if (rank_ == 0) check_is_newest(directory, training.updates());
    return references_to(training);
  });
  if (peers) peers->gather(archive_);
  if (rank_ == 0 && world_size_ > 1) archive_(world_size_name, std::int64_t{world_size_});
  for (auto& [name, value] : archive_.values())
    TORCH_CHECK(peers || !PieceName::of(name), "save: ", name,
                " is a shard of one rank; give the training its peers(), and save on all ranks");
  run_on_all(peers, [&] {
    if (rank_ == 0) state_ = StateDirectory(directory).begin(training.updates());
  });
  folder_ = path_of_first(peers, state_ ? state_->folder() : "");
  manifest_ = manifest_of(archive_);
}

GRADACCUM_INLINE void StateWriter::write(c10::function_ref<StateFiles(const std::filesystem::path& folder)> write) {
  try {
    manifest_.files = write(folder_);
    if (!is_first()) write_list(path_of_rank(folder_, rank_, ".files"), manifest_.files);
  } catch (const std::exception& error) {
    if (!is_first()) std::ofstream(path_of_rank(folder_, rank_, ".error")) << error.what();  // rank 0 stops waiting
    throw;
  }
}

GRADACCUM_INLINE std::filesystem::path StateWriter::finish(c10::function_ref<bool()> keeps_waiting) {
  if (!is_first()) return {};
  for (int rank = 1; rank < world_size_; ++rank) {
    const auto list = path_of_rank(folder_, rank, ".files"), error = path_of_rank(folder_, rank, ".error");
    while (!std::filesystem::exists(list)) {
      TORCH_CHECK(keeps_waiting() && !std::filesystem::exists(error), "save: rank ", rank, " must write its part of ",
                  folder_.string(), ", but has not; the state is discarded");
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    take_list(list, manifest_.files);
  }
  write_manifest(folder_, manifest_);
  const auto path = state_->finish();
  state_.reset();
  return path;
}

GRADACCUM_INLINE std::filesystem::path save(const std::filesystem::path& directory, const AnyTraining& training,
                                            SaveOptions options) {
  TORCH_CHECK(options.keep_last >= 0, "save: keep_last must be >= 0, got ", options.keep_last);
  const auto* const peers = training.peers.get();
  training.finish_background_save();
  StateWriter writer(directory, training);
  const auto values = writer.take_values();
  run_on_all(peers, [&] { writer.write([&](const auto& folder) { return write_tensors(values, folder); }); });
  const auto saved = on_all(peers, [&] {
    auto path = writer.finish([] { return true; });  // all have written; a network file system may lag
    if (!path.empty() && options.keep_last > 0) StateDirectory(directory).keep_last(options.keep_last);
    return path;
  });
  return path_of_first(peers, saved);
}

GRADACCUM_INLINE std::filesystem::path load(const std::filesystem::path& directory, const AnyTraining& training,
                                            LoadOptions options) {
  const auto* const peers = training.peers.get();
  training.finish_background_save();
  const auto folder = of_rank_0(peers, [&] {
    if (!options.best) return newest_state(directory);
    const auto best = best_states(directory, 1);
    return best.empty() ? std::nullopt : std::optional(best.front());
  });
  if (folder.empty() && options.if_any) return folder;
  TORCH_CHECK(!folder.empty() || !options.best, "load: ", directory.string(),
              " must have a state with a validation metric that is not NaN for {.best = true}; save one with "
              "ga::Validate and ga::SaveState{.keep_best = 1}");
  TORCH_CHECK(!folder.empty(), "load: ", directory.string(),
              " must be a state or contain one, a folder such as step-000000");
  auto archive = open_state(folder, options.allow_changes, peers);
  load_state(archive, training);
  return folder;
}

}  // namespace gradaccum::detail

#undef GRADACCUM_INLINE
