// SPDX-License-Identifier: Apache-2.0
// Saves and resumes a whole training, and chooses among the states in a directory.
#pragma once

#include <gradaccum/fit_options.hpp>
#include <gradaccum/training_state.hpp>

#include <gradaccum/detail/io/formats.hpp>
#include <gradaccum/detail/state/pieces.hpp>
#include <gradaccum/detail/window/communicator.hpp>
#include <gradaccum/progress_line.hpp>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <fmt/format.h>

#include <algorithm>
#include <exception>
#include <ostream>
#include <sstream>
#include <stdexcept>
#include <variant>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum::detail {

GRADACCUM_INLINE void refuse_optimizer(const std::string& type) {
  TORCH_CHECK(false, "OptimizerState: an optimizer of your own, as ", type,
              ", needs a member void state(ga::Archive&)");
}

GRADACCUM_INLINE void check_is_not_divided(bool is_divided, const std::string& type) {
  TORCH_CHECK(!is_divided, "OptimizerState: an optimizer with a state(ga::Archive&) of its own, as ", type,
              ", must not be divided among processes: use {.shard = ga::Shard::none}");
}

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

/// Returns nullopt if the state was not measured or its manifest is damaged.
GRADACCUM_INLINE std::optional<MeasuredState> measured_state(const std::filesystem::path& path) {
  try {
    const auto manifest = read_manifest(path);
    Archive::Values values;
    for (auto& value : manifest.values)
      if (value.first.starts_with("save_state."))
        std::visit([&](auto& held) { values[value.first] = held; }, value.second);
    MeasuredState measured;
    Archive(std::move(values))("save_state", measured);
    return measured.number ? std::optional(std::move(measured)) : std::nullopt;
  } catch (const std::exception&) {
    return {};
  }
}

GRADACCUM_INLINE std::vector<std::filesystem::path> best_states(const std::filesystem::path& directory,
                                                                std::int64_t count) {
  std::vector<std::pair<std::filesystem::path, MeasuredState>> found;
  for (auto& state : count > 0 ? StateDirectory(directory).finished() : std::vector<StateDirectory::State>())
    if (auto measured = measured_state(state.path)) found.emplace_back(state.path, std::move(*measured));
  // compare by the newest state's metric: older states may have been measured by another
  if (!found.empty())
    std::erase_if(found, [metric = found.back().second.metric](auto& one) { return one.second.metric != metric; });
  std::stable_sort(found.begin(), found.end(), [](auto& a, auto& b) {
    const auto mode = a.second.better == "max" ? Mode::max : Mode::min;
    return is_better(mode, *a.second.number, *b.second.number);
  });
  std::vector<std::filesystem::path> best;
  for (auto& one : found)
    if (static_cast<std::int64_t>(best.size()) < count) best.push_back(std::move(one.first));
  return best;
}

/// Broadcasts rank 0's path.
GRADACCUM_INLINE std::filesystem::path path_of_first(const Communicator* peers, const std::filesystem::path& own) {
  return peers ? std::filesystem::path(broadcast_text(*peers, own.string())) : own;
}

GRADACCUM_INLINE std::filesystem::path of_rank_0(const Communicator* peers,
                                                 const std::function<std::optional<std::filesystem::path>()>& find) {
  const auto found = on_all(peers, [&] {
    const bool asked = !peers || peers->rank() == 0;
    return asked ? find().value_or(std::filesystem::path()).string() : std::string();
  });
  return path_of_first(peers, found);
}

GRADACCUM_INLINE Archive open_state(const std::filesystem::path& folder, bool allow_changes,
                                    const Communicator* peers) {
  return on_all(peers, [&] {
    try {
      const bool needs_a_part = peers && peers->shards();
      auto values = needs_a_part ? map_state(folder) : io::read_state(folder);
      auto pieces = take_shared_pieces(values);
      if (peers) peers->keep_own_values(values);
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

GRADACCUM_INLINE Archive references_to(const AnyTraining& training) {
  auto archive = Archive::of_references();
  training.state(archive);
  return archive;
}

GRADACCUM_INLINE void check_can_be_saved(const AnyTraining& training) { check_can_be_written(references_to(training)); }

/// Writes each rank's tensors into the folder that rank 0 broadcasts. The folder is empty if rank 0 could not make one;
/// rank 0 reports that error later.
GRADACCUM_INLINE StateFiles write_by_all(const Communicator& peers, const Archive& archive,
                                         const std::filesystem::path& folder) {
  const auto where = broadcast_text(peers, folder.string());
  if (where.empty()) return {};
  std::string own;
  for (auto& [name, file] : on_all(&peers, [&] { return write_tensors(archive, where); }))
    own += c10::str(name, " ", file.bytes, " ", file.crc32, "\n");
  StateFiles all;
  for (auto& text : peers.all_gather_text(own)) {
    std::istringstream lines(text);
    Manifest::File file;
    for (std::string name; lines >> name >> file.bytes >> file.crc32;) all[name] = file;
  }
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
    if (peers && !told) broadcast_text(*peers, "");
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
  if (peers) peers->gather(archive);
  for (auto& [name, value] : archive.values())
    TORCH_CHECK(peers || !PieceName::of(name), "save: ", name,
                " is a part of what several processes have divided; give the training their peers(), and save on all");
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
  const auto folder = of_rank_0(peers, [&] {
    if (!options.best) return newest_state(directory);
    const auto best = best_states(directory, 1);
    return best.empty() ? std::nullopt : std::optional(best.front());
  });
  TORCH_CHECK(!folder.empty() || !options.best, "load: ", directory.string(),
              " must have a state that was validated, for {.best = true}: one of a ga::Validate and a "
              "ga::SaveState{.keep_best = 1}");
  TORCH_CHECK(!folder.empty(), "load: ", directory.string(),
              " must be a state or have one, a folder step-000000 of any number");
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

/// Once it is said it stays: whoever asks after that hears the same, however late it is. However short the time, it is
/// enough for a window.
GRADACCUM_INLINE void FitStatus::stop_at_limits() {
  if (options.samples && samples >= *options.samples) stop(fmt::format("after {} samples", *options.samples));
  if (options.time && updates + skipped > 0 && seconds() >= options.time->count())
    stop(fmt::format("after {:.6g} s", options.time->count()));
}

GRADACCUM_INLINE bool FitStatus::done() const {
  if (stopped || signal != 0 || (options.smoke && updates + skipped > 0)) return true;
  if (options.updates && updates >= *options.updates) return true;
  return options.has_limit() ? epochs == options.epochs : epochs >= options.epochs.value_or(1);
}

/// Without a number of epochs, batches that bring no update would be gone through for ever.
GRADACCUM_INLINE void FitStatus::end_epoch(bool window_has_items) {
  TORCH_CHECK(options.epochs || !options.has_limit() || done() || trained || window_has_items, "Trainer: fit must ",
              options.updates ? c10::str("make ", *options.updates, " updates") : "go on to its limit", ", but epoch ",
              epoch, " (counted from 0) brought ", options.updates ? "none" : "no update",
              ": the batches are empty, have losses without items, or give no gradient "
              "to the optimizer's parameters; was it made for this model?");
  TORCH_CHECK(batch > 0 || batches.value_or(0) == 0 || done(), "Trainer: epoch ", epoch,
              " (counted from 0) brought no batch, and was to bring ", *batches,
              "; a range that can be gone through only once is good for one epoch");
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
  start = Clock::now() - std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(so_far));
}

GRADACCUM_INLINE std::optional<double> FitStatus::fraction() const {
  if (done()) return 1;
  std::optional<double> most;  // what ends it first is furthest
  const auto add = [&most](double part) { most = std::max(part, most.value_or(0)); };
  if (options.updates) add(static_cast<double>(updates) / static_cast<double>(*options.updates));
  if (options.samples.value_or(0) > 0) add(static_cast<double>(samples) / static_cast<double>(*options.samples));
  if (options.time) add(seconds() / options.time->count());
  if (batches.value_or(0) > 0 && (options.epochs || !options.has_limit())) {
    const auto of_epoch = static_cast<double>(std::min(batch, *batches)) / static_cast<double>(*batches);
    add((static_cast<double>(epochs) + of_epoch) / static_cast<double>(options.epochs.value_or(1)));
  }
  if (most) most = std::min(*most, 1.0);
  return most;
}

GRADACCUM_INLINE std::ostream& operator<<(std::ostream& stream, const FitReport& report) {
  const auto rate = report.samples_per_second;  // two decimals, and three digits where these would be none
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
    stream << fmt::format("Micro-batches left out for a loss of NaN or infinity: {}, the first: {}\n",
                          report.nan_batches, report.first_nan);
  if (!report.stopped.empty()) stream << "Stopped early: " << report.stopped << '\n';
  std::map<std::string, const Validation*> last;
  for (auto& validation : report.validations) last[validation.name] = &validation;
  for (auto& [name, validation] : last)
    stream << "Last " << name << ", at update " << validation->update << ": " << validation->found << '\n';
  return stream;
}

}  // namespace gradaccum

#undef GRADACCUM_INLINE
