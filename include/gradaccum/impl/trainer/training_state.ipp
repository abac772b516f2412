// SPDX-License-Identifier: Apache-2.0
// Saves and resumes a training, and chooses among the states in a directory.
#pragma once

#include <gradaccum/fit_options.hpp>
#include <gradaccum/training_state.hpp>

#include <gradaccum/detail/window/communicator.hpp>
#include <gradaccum/progress_line.hpp>

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

/// Returns how many ranks saved a state and how many load it, with its values that are not tensors.
GRADACCUM_INLINE Archive::Ranks ranks_of(const Archive::Values& values, const Communicator* peers) {
  Archive::Ranks ranks{.loading = peers ? peers->world_size() : 1};
  std::string last;
  for (auto& [name, value] : values) {
    if (!std::holds_alternative<at::Tensor>(value)) ranks.values.emplace(name, value);
    if (without_rank(name) == name) continue;
    const auto rank = name.substr(0, name.find('.'));
    ranks.saved += rank != last;
    last = rank;
  }
  const auto told = values.find("data_parallel.world_size");  // values equal on all ranks name no rank
  const auto* const number = told == values.end() ? nullptr : std::get_if<std::int64_t>(&told->second);
  if (number && *number < 1 << 20) ranks.saved = std::max(ranks.saved, *number);  // a damaged state may have any number
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

/// Adds the files of a list to `files`, and removes the list.
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
  TORCH_CHECK(!folder.empty() || !options.best, "load: ", directory.string(),
              " must have a state with a validation metric that is not NaN for {.best = true}; save one with "
              "ga::Validate and ga::SaveState{.keep_best = 1}");
  TORCH_CHECK(!folder.empty(), "load: ", directory.string(),
              " must be a state or contain one, a folder such as step-000000");
  auto archive = open_state(folder, options.allow_changes, peers);
  load_state(archive, training);
  return folder;
}

GRADACCUM_INLINE FitReport report_of(const FitStatus& status) {
  FitReport report{.epochs = status.epochs,
                   .updates = status.updates,
                   .skipped = status.skipped,
                   .samples = status.samples,
                   .seconds = status.seconds(),
                   .resumed_from = status.resumed_from,
                   .stopped = status.stop_reason,
                   .signal = status.signal,
                   .nan_batches = status.nan_batches,
                   .first_nan = status.first_nan,
                   .validations = status.validations};
  if (!status.options.resume.empty() && status.resumed_from.empty())
    report.notes.push_back(status.options.resume.string() + " has no state to resume from, so this fit began anew");
  if (status.at_rate_0 * 10 > status.windows)
    report.notes.push_back(fmt::format("the learning rate was 0 in {} of {} updates, which moved nothing",
                                       status.at_rate_0, status.windows));
  report.samples_per_second = static_cast<double>(report.samples) / report.seconds;
  return report;
}

GRADACCUM_INLINE double in_mb(std::int64_t bytes) { return static_cast<double>(bytes) / static_cast<double>(MiB); }

}  // namespace gradaccum::detail

namespace gradaccum {

GRADACCUM_INLINE void check(const FitOptions& options) {
  TORCH_CHECK(options.epochs.value_or(0) >= 0, "FitOptions: epochs must be >= 0, got ", *options.epochs);
  TORCH_CHECK(options.updates.value_or(0) >= 0, "FitOptions: updates must be >= 0, got ", *options.updates);
  TORCH_CHECK(options.samples.value_or(0) >= 0, "FitOptions: samples must be >= 0, got ", *options.samples);
  TORCH_CHECK(!options.time || options.time->count() >= 0, "FitOptions: time must be >= 0 s, got ",
              options.time->count());
}

/// Records the stop once, so that later calls agree even though time passes. `.time` allows at least one window, so
/// that each of a chain of resumed jobs trains.
GRADACCUM_INLINE void FitStatus::stop_at_limits() {
  if (options.samples && samples >= *options.samples) stop(fmt::format("after {} samples", *options.samples));
  if (options.time && windows > 0 && seconds_of_call() >= options.time->count())
    stop(fmt::format("after {:.6g} s", options.time->count()));
}

GRADACCUM_INLINE bool FitStatus::done() const {
  if (stopped || signal != 0 || (options.smoke && updates + skipped > 0)) return true;
  if (options.updates && updates >= *options.updates) return true;
  return options.has_limit() ? epochs == options.epochs : epochs >= options.epochs.value_or(1);
}

GRADACCUM_INLINE void FitStatus::end_epoch() {
  TORCH_CHECK(batch > 0 || batches.value_or(0) == 0 || done(), "Trainer: epoch ", epoch,
              " (counted from 0) had no batches, but should have had ", *batches,
              "; a range that can be iterated only once lasts for one epoch");
  ++epochs;
  if (!batches) batches = batch;
  batch = 0;
  trained = false;
}

GRADACCUM_INLINE void FitStatus::state(Archive& archive) {
  auto so_far = seconds();
  archive("epoch", epoch);
  archive("epochs", epochs);
  archive("batch", batch);
  archive("batches", batches);
  archive("updates", updates);
  archive("skipped", skipped);
  archive("samples", samples);
  archive("nan_batches", nan_batches);
  archive("first_nan", first_nan);
  archive("trained", trained);
  archive("seconds", so_far);
  archive("validations", detail::ValidationHistory{validations});
  if (!archive.loading()) return;
  TORCH_CHECK(
      std::min({epoch, epochs, batch, batches.value_or(0), updates, skipped, samples, nan_batches}) >= 0 && so_far >= 0,
      "Trainer: the counts of a saved fit must be >= 0");
  if (archive.changes_allowed()) {
    const auto& ranks = archive.ranks();
    const auto of_ranks = archive.of_ranks<std::int64_t>("batch");
    for (const auto each : of_ranks)
      TORCH_CHECK(each >= 0 && each < std::numeric_limits<std::int64_t>::max() / (ranks.saved + 1),
                  "Trainer: each rank of a saved fit must have a batch >= 0 that an epoch can have, got ", each);
    batch = std::ranges::max(of_ranks);  // equal on all ranks, because a Schedule plans with it
    if (ranks.are_others()) {
      batch = std::accumulate(of_ranks.begin(), of_ranks.end(), ranks.loading - 1) / ranks.loading;
      batches.reset();
    }
  }
  start = Clock::now() - std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(so_far));
}

GRADACCUM_INLINE std::optional<double> FitStatus::fraction() const {
  if (done()) return 1;
  std::optional<double> most;  // the largest: of the limit that is reached first
  const auto add = [&most](double part) { most = std::max(part, most.value_or(0)); };
  if (options.updates) add(static_cast<double>(updates) / static_cast<double>(*options.updates));
  if (options.samples.value_or(0) > 0) add(static_cast<double>(samples) / static_cast<double>(*options.samples));
  if (options.time) add(seconds_of_call() / options.time->count());
  if (batches.value_or(0) > 0 && (options.epochs || !options.has_limit())) {
    const auto of_epoch = static_cast<double>(std::min(batch, *batches)) / static_cast<double>(*batches);
    add((static_cast<double>(epochs) + of_epoch) / static_cast<double>(options.epochs.value_or(1)));
  }
  if (most) most = std::min(*most, 1.0);
  return most;
}

GRADACCUM_INLINE std::ostream& operator<<(std::ostream& stream, const FitReport& report) {
  const auto rate = report.samples_per_second;  // two decimals; below 1 as in rate_text()
  stream << fmt::format("Time: {:.2f}\nSamples/second: {}\n", report.seconds,
                        rate < 1 ? rate_text(rate) : fmt::format("{:.2f}", rate));
  for (auto& [device, bytes] : report.occupied_bytes)
    stream << fmt::format("{} memory occupied: {:.0f} MB.\n", device == "cpu" ? "CPU" : "GPU", detail::in_mb(bytes));
  for (auto& [device, bytes] : report.peak_bytes)
    stream << fmt::format("Peak tensor memory: {} {:.2f} MB\n", device, detail::in_mb(bytes));
  if (report.peak_resident_bytes > 0)
    stream << fmt::format("Peak resident memory: {:.0f} MB\n", detail::in_mb(report.peak_resident_bytes));
  stream << fmt::format("Epochs: {}, updates: {}, skipped: {}\n", report.epochs, report.updates, report.skipped);
  if (report.nan_batches > 0)
    stream << fmt::format("Micro-batches left out for a loss or gradient of NaN or infinity: {}, the first: {}\n",
                          report.nan_batches, report.first_nan);
  if (!report.stopped.empty()) stream << "Stopped early: " << report.stopped << '\n';
  std::map<std::string, const Validation*> last;
  for (auto& validation : report.validations) last[validation.name] = &validation;
  for (auto& [name, validation] : last)
    stream << "Last " << name << ", at update " << validation->update << ": " << validation->found << '\n';
  for (auto& note : report.notes) stream << "Note: " << note << '\n';
  return stream;
}

}  // namespace gradaccum

#undef GRADACCUM_INLINE
