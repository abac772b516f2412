// SPDX-License-Identifier: Apache-2.0
// The Trainer's policies that have no file of their own.
#pragma once

#include <gradaccum/detail/trainer/loop.hpp>
#include <gradaccum/policies/accumulate.hpp>
#include <gradaccum/policies/clip.hpp>
#include <gradaccum/policies/early_stopping.hpp>
#include <gradaccum/policies/ema.hpp>
#include <gradaccum/policies/metrics_log.hpp>
#include <gradaccum/policies/mixed_precision.hpp>
#include <gradaccum/policies/optimizer_in_backward.hpp>
#include <gradaccum/policies/progress.hpp>
#include <gradaccum/policies/save_state.hpp>
#include <gradaccum/policies/schedule.hpp>
#include <gradaccum/policies/validate.hpp>

#include <gradaccum/detail/io/files.hpp>
#include <gradaccum/detail/kernels/dense.hpp>
#include <gradaccum/detail/window/communicator.hpp>
#include <gradaccum/summary_writer.hpp>

#include <ATen/MemoryOverlap.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/_foreach_lerp.h>
#include <c10/core/InferenceMode.h>

#include <fmt/format.h>

#include <signal.h>
#include <unistd.h>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstring>
#include <exception>
#include <iterator>
#include <set>
#include <stdexcept>
#include <unordered_set>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum {

GRADACCUM_INLINE void Accumulate::attach(TrainerBase& trainer) {
  TORCH_CHECK(steps >= 1, "Accumulate: steps must be >= 1, got ", steps);
  TORCH_CHECK(batch_size >= 0, "Accumulate: batch_size must be >= 1, got ", batch_size);
  TORCH_CHECK(batch_size == 0 || (steps == 1 && schedule.empty()),
              "Accumulate: batch_size must come without steps and schedule, which also say when a window is full");
  for (auto [epoch, number] : schedule)
    TORCH_CHECK(epoch >= 0 && number >= 1, "Accumulate: schedule must have epochs >= 0 and steps >= 1, got {", epoch,
                ", ", number, "}");
  trainer.set_accumulate_in(accumulate_in);
  trainer.set_batch_size(batch_size);
  if (batch_size == 0) trainer.loop().steps_in = [this](std::int64_t epoch) { return steps_in(epoch); };
  window = &trainer.window();
}

GRADACCUM_INLINE void Accumulate::state(Archive& archive) const {
  std::string by_epoch;
  for (auto [epoch, number] : schedule) by_epoch += fmt::format("{}:{} ", epoch, number);
  archive.setting("steps", std::int64_t(steps));
  archive.setting("schedule", by_epoch);
  archive.setting("batch_size", std::int64_t(batch_size));
}

GRADACCUM_INLINE std::int64_t Accumulate::steps_in(std::int64_t epoch) const {
  const auto next = schedule.upper_bound(epoch);
  return next == schedule.begin() ? std::int64_t(steps) : std::prev(next)->second;
}

GRADACCUM_INLINE void ClipNorm::attach(TrainerBase&) const {
  TORCH_CHECK(max > 0, "ClipNorm: max must be > 0, got ", max);
}
GRADACCUM_INLINE void ClipNorm::before_step(Gradients& gradients) const { clip_grad_norm_(gradients, max); }

GRADACCUM_INLINE void ClipValue::attach(TrainerBase&) const {
  TORCH_CHECK(max >= 0, "ClipValue: max must be >= 0, got ", max);
}
GRADACCUM_INLINE void ClipValue::before_step(Gradients& gradients) const { clip_grad_value_(gradients, max); }

GRADACCUM_INLINE Mode EarlyStopping::checked_mode() const {
  TORCH_CHECK(patience >= 1, "EarlyStopping: patience must be >= 1, got ", patience);
  TORCH_CHECK(min_delta >= 0, "EarlyStopping: min_delta must be >= 0, got ", min_delta);
  return detail::mode_of("EarlyStopping", metric, mode);
}

GRADACCUM_INLINE bool EarlyStopping::add(double number) {
  const auto which = checked_mode();
  const bool better = detail::is_better(which, number, best, min_delta);
  if (better) detail::warn_if_last("EarlyStopping", metric, which, best = number);
  waited = better ? 0 : waited + 1;
  return is_over();
}

GRADACCUM_INLINE std::string EarlyStopping::reason() const {
  const auto ago = fmt::format("{} validation{}", waited, waited == 1 ? "" : "s");
  if (detail::is_nan(best)) return fmt::format("{} was NaN in {}", metric, ago);
  return fmt::format("{} was best, {}, at update {}, {} ago", metric, detail::number_text("%.6g", best), best_update,
                     ago);
}

GRADACCUM_INLINE void EarlyStopping::attach(TrainerBase& to) {
  to.when_built([this, &to] {
    mode = detail::mode_of("EarlyStopping", metric, mode, &to.metrics());
    checked_mode();
  });
  trainer = &to;
}

GRADACCUM_INLINE int EarlyStopping::fit_scope() {
  best = std::numeric_limits<double>::quiet_NaN();
  best_update = waited = 0;
  return 0;
}

GRADACCUM_INLINE void EarlyStopping::on_validation(const Validation& validation) {
  const auto number = validation[metric];
  if (!number || !validation.due) return;  // of another Validate, or of a fit that ended between two of them
  const bool over = add(*number);
  if (waited == 0) best_update = validation.update;
  if (over && trainer) trainer->stop_on_all(reason());
}

GRADACCUM_INLINE void EarlyStopping::state(Archive& archive) {
  archive("best", best);
  archive("best_update", best_update);
  archive("waited", waited);
  if (!archive.loading()) return;
  TORCH_CHECK(waited >= 0, "EarlyStopping: waited of a state must be >= 0, got ", waited);
  archive.when_all_fit([this] {
    if (is_over() && trainer) trainer->stop_on_all(reason());
  });
}

GRADACCUM_INLINE void ReduceLROnPlateau::check() const {
  TORCH_CHECK(factor > 0 && factor < 1, "ReduceLROnPlateau: factor must be in (0, 1), got ", factor);
  TORCH_CHECK(patience >= 0, "ReduceLROnPlateau: patience must be >= 0, got ", patience);
  TORCH_CHECK(threshold >= 0, "ReduceLROnPlateau: threshold must be >= 0, got ", threshold);
  TORCH_CHECK(cooldown >= 0, "ReduceLROnPlateau: cooldown must be >= 0, got ", cooldown);
  TORCH_CHECK(min_lr >= 0, "ReduceLROnPlateau: min_lr must be >= 0, got ", min_lr);
}

/// Computes in the order in which Python does.
GRADACCUM_INLINE bool ReduceLROnPlateau::step(double number, LearningRates& lowered) {
  check();
  const auto which = detail::mode_of("ReduceLROnPlateau", metric, mode);
  const double sign = which == Mode::min ? 1 : -1;
  const double bound = relative ? best * (1 - sign * threshold) : best - sign * threshold;
  const bool better = detail::is_nan(best) ? detail::is_finite(number) || (sign * number < 0 && !detail::is_nan(number))
                                           : sign * number < sign * bound && !detail::is_nan(number);
  if (better) detail::warn_if_last("ReduceLROnPlateau", metric, which, best = number);
  num_bad_epochs = better ? 0 : num_bad_epochs + 1;
  if (cooldown_counter > 0) --cooldown_counter, num_bad_epochs = 0;
  if (num_bad_epochs <= patience) return false;
  lowered.reduce(factor, min_lr, eps);
  cooldown_counter = cooldown;
  num_bad_epochs = 0;
  return true;
}

GRADACCUM_INLINE void ReduceLROnPlateau::begin(TrainerBase& trainer) {
  check();
  trainer.when_built(
      [this, &trainer] { mode = detail::mode_of("ReduceLROnPlateau", metric, mode, &trainer.metrics()); });
}

GRADACCUM_INLINE void ReduceLROnPlateau::on_validation(const Validation& validation) {
  if (const auto number = validation[metric]; number && validation.due) step(*number, rates.value());
}

GRADACCUM_INLINE void ReduceLROnPlateau::state(Archive& archive) {
  archive("best", best);
  archive("num_bad_epochs", num_bad_epochs);
  archive("cooldown_counter", cooldown_counter);
  TORCH_CHECK(num_bad_epochs >= 0 && cooldown_counter >= 0, "ReduceLROnPlateau: the counts of a state must be >= 0");
}

struct MetricsLog::Run {
  const MetricsLog& options;
  const FitStatus& status;                                                    // the trainer's
  std::shared_ptr<MetricsFile> file = {};                                     // null: this process does not write
  std::set<std::string> validated = {};                                       // the names of all Validates
  std::map<std::string, std::shared_ptr<MetricsFile>> validation_files = {};  // by name, beside a CSV file
  std::int64_t windows = 0;
  bool goes_on = false;  // lines of the run that this one goes on from are to be removed

  std::filesystem::path path_of(const std::string& validation) const {
    if (options.path.extension() != ".csv") return options.path;
    auto beside = options.path;
    return beside.replace_extension('.' + validation + ".csv");
  }

  MetricsFile& file_of(const std::string& validation) {
    if (options.path.extension() != ".csv") return *file;
    auto& beside = validation_files[validation];
    if (!beside)
      beside = std::make_shared<MetricsFile>(MetricsFileOptions{.path = path_of(validation), .append = options.append});
    return *beside;
  }

  /// A run that is made before the first window was not known to the state: its line may be there.
  void go_on_from(std::int64_t samples, bool validates) {
    if (!std::exchange(goes_on, false) || status.options.resume.empty() || !file) return;
    const auto last = static_cast<double>(samples);
    const auto last_validated = validates ? last - 0.5 : last;
    file->remove_lines_at_end("samples", last);
    file->remove_lines_at_end("samples", last_validated, "moved");
    for (auto& validation : validated)
      if (path_of(validation) != options.path && std::filesystem::exists(path_of(validation)))
        file_of(validation).remove_lines_at_end("samples", last_validated);
  }
};

GRADACCUM_INLINE void MetricsLog::attach(TrainerBase& trainer) {
  TORCH_CHECK(every >= 1, "MetricsLog: every must be >= 1, got ", every);
  const auto seconds = flush_every.count();
  TORCH_CHECK(seconds >= 0, "MetricsLog: flush_every must be >= 0 seconds, got ", seconds);
  name = "log of " + path.string();
  run.reset(new Run{*this, trainer.status()});
  trainer.when_built([this, &trainer] {
    for (auto& [metric, mode] : trainer.metrics()) run->validated.insert(metric.substr(0, metric.find('/')));
  });
  if (trainer.is_first())
    run->file =
        std::make_shared<MetricsFile>(MetricsFileOptions{.path = path, .append = append, .flush_every = flush_every});
}

GRADACCUM_INLINE std::shared_ptr<void> MetricsLog::fit_scope() {
  run->goes_on = append;
  return detail::flush_at_end(run->file);
}

GRADACCUM_INLINE void MetricsLog::at_boundary() const {
  if (run->file && run->status.done()) run->file->flush();
}

GRADACCUM_INLINE void MetricsLog::state(Archive& archive) const {
  if (run && run->file && !archive.loading()) run->file->flush();
}

GRADACCUM_INLINE void MetricsLog::after_window(const Step& step) {
  run->go_on_from(run->status.samples - step.samples, /*validates=*/false);
  if (++run->windows % every != 0 || !run->file) return;
  const auto norm = step.grad_norm.defined() ? step.grad_norm.item<double>() : std::numeric_limits<double>::quiet_NaN();
  run->file->write({{"update", step.update},
                    {"epoch", step.epoch},
                    {"samples", run->status.samples},
                    {"items", step.items},
                    {"micro_batches", step.micro_batches},
                    {"moved", step.moved},
                    {"loss", step.loss.item<double>()},
                    {"grad_norm", norm},
                    {"lr", step.lr},
                    {"seconds", run->status.seconds()}});
}

GRADACCUM_INLINE void MetricsLog::on_validation(const Validation& validation) {
  if (!run->file) return;
  run->go_on_from(validation.samples, /*validates=*/true);
  MetricsFile::Fields fields{{"update", validation.update},
                             {"epoch", validation.epoch},
                             {"samples", validation.samples},
                             {"seconds", validation.seconds}};
  for (auto& [metric, number] : validation.found.metrics) fields.emplace_back(validation.name + '/' + metric, number);
  run->file_of(validation.name).write(fields);
}

struct MetricsFile::File {
  using Clock = std::chrono::steady_clock;

  std::filesystem::path path;
  std::chrono::duration<double> flush_every;
  bool is_csv = path.extension() == ".csv", is_torn = false;  // torn: the last line is not terminated
  std::string heading = {};                                   // for CSV files
  std::vector<std::string> known_names = {};                  // the names in the last line
  std::string waiting = {};                                   // whole lines
  Clock::time_point flushed = Clock::now();
  std::FILE* file = nullptr;

  ~File() {
    if (!file) return;
    try {
      flush();
    } catch (const std::exception& error) {
      TORCH_WARN("the last lines were not written: ", error.what());
    }
    std::fclose(file);
  }

  [[noreturn]] void fail(std::string_view problem) const {
    throw std::runtime_error(fmt::format("MetricsFile: {}: {}", path.string(), problem));
  }

  void open(bool append) {
    if (!is_csv && path.extension() != ".jsonl") fail("the name must end in .csv or .jsonl");
    detail::make_directory(path.parent_path());
    file = std::fopen(path.c_str(), append ? "a+b" : "w+b");
    if (!file) fail(std::strerror(errno));
    std::setvbuf(file, nullptr, _IONBF, 0);  // unbuffered: stdio would retry a failed write, and repeat a part
    if (append) look_at_what_is_there();
  }

  void look_at_what_is_there() {
    for (int c = 0; is_csv && (c = std::fgetc(file)) != EOF && (c != '\n' || heading.empty());)
      if (c != '\n') heading += static_cast<char>(c);
    is_torn = std::fseek(file, -1, SEEK_END) == 0 && std::fgetc(file) != '\n';
    std::fseek(file, 0, SEEK_END);  // C requires a seek between reading and writing
  }

  void check(const Fields& fields) {
    if (fields.empty()) fail("a line must have a field");
    const auto is_known = [](const Field& field, const std::string& name) { return field.name == name; };
    if (std::equal(fields.begin(), fields.end(), known_names.begin(), known_names.end(), is_known)) return;
    std::vector<std::string> names;
    for (auto& [name, number] : fields) {
      const auto is_plain = [](unsigned char c) { return c >= ' ' && c != ',' && c != '"' && c != '\\'; };
      if (name.empty() || !std::all_of(name.begin(), name.end(), is_plain))
        fail(fmt::format("a name must have no comma, quote, backslash or control character, got '{}'", name));
      if (std::find(names.begin(), names.end(), name) != names.end())
        fail(fmt::format("two fields of a line are named '{}'", name));
      names.push_back(name);
    }
    const auto columns = c10::Join(",", names);
    if (!heading.empty() && columns != heading) fail(fmt::format("its columns are '{}', got '{}'", heading, columns));
    known_names = std::move(names);
  }

  void put(const std::string& text) {
    waiting += text;
    if (Clock::now() - flushed >= flush_every) flush();
  }

  /// Writes all waiting lines in one piece. A failed write is not retried, since part of it may be in the file.
  void flush() {
    flushed = Clock::now();
    if (waiting.empty()) return;
    const detail::NoFileSizeSignal no_signal;
    const auto whole = (is_torn ? "\n" : "") + std::exchange(waiting, {});
    const auto written = std::fwrite(whole.data(), 1, whole.size(), file);
    if (written > 0) is_torn = whole[written - 1] != '\n';
    if (written < whole.size()) fail(std::strerror(errno));
  }

  std::string text() const {
    std::string all;
    std::fseek(file, 0, SEEK_SET);
    std::array<char, 1 << 16> part;
    for (std::size_t read = 0; (read = std::fread(part.data(), 1, part.size(), file)) > 0;)
      all.append(part.data(), read);
    std::fseek(file, 0, SEEK_END);
    return all;
  }

  /// Returns nullopt if the line does not have the number.
  std::optional<double> number_of(std::string_view name, std::string_view line) const {
    std::size_t at = 0;
    if (is_csv) {
      const auto columns = ',' + heading + ',';
      const auto column = columns.find(fmt::format(",{},", name));
      if (column == columns.npos) return {};
      for (auto before = std::ranges::count(columns.substr(0, column), ','); before > 0 && at != line.npos; --before)
        at = line.find(',', at) == line.npos ? line.npos : line.find(',', at) + 1;
    } else {
      const auto key = fmt::format("\"{}\": ", name);
      at = line.find(key);
      if (at != line.npos) at += key.size();
    }
    if (at == line.npos) return {};
    const auto cell = line.substr(at, line.find_first_of(",}", at) - at);
    double number = 0;
    const auto end = std::from_chars(cell.data(), cell.data() + cell.size(), number).ptr;
    return end == cell.data() ? std::nullopt : std::optional(number);
  }

  std::string line_of(const Fields& fields) const {
    std::string line;
    const char* separator = is_csv ? "" : "{";
    for (auto& [name, number] : fields) {
      line += std::exchange(separator, is_csv ? "," : ", ");
      if (!is_csv) fmt::format_to(std::back_inserter(line), "\"{}\": ", name);
      const auto* const real = std::get_if<double>(&number);
      if (real && !is_csv && !detail::is_finite(*real))
        line += "null";
      else if (real && !detail::is_finite(*real))
        line += detail::is_nan(*real) ? "nan" : *real > 0 ? "inf" : "-inf";  // never "-nan", as fmt prints 0.0 / 0.0
      else
        std::visit([&](auto value) { fmt::format_to(std::back_inserter(line), "{}", value); }, number);
    }
    return line + (is_csv ? "\n" : "}\n");
  }
};

GRADACCUM_INLINE MetricsFile::MetricsFile(MetricsFileOptions options)
    : file_(new File{.path = std::move(options.path), .flush_every = options.flush_every},
            [](File* file) { delete file; }) {
  file_->open(options.append);
}

GRADACCUM_INLINE void MetricsFile::remove_lines_at_end(std::string_view name, double last, std::string_view without) {
  flush();
  const auto text = file_->text();
  std::size_t kept = file_->is_torn ? text.rfind('\n') + 1 : text.size();
  for (double next = std::numeric_limits<double>::infinity(); kept > 0;) {
    const auto begin = kept > 1 ? text.rfind('\n', kept - 2) + 1 : 0;  // npos + 1 is 0
    const auto line = std::string_view(text).substr(begin, kept - begin);
    const auto number = file_->number_of(name, line);
    if (!number || detail::is_nan(*number) || *number <= last || *number > next) break;
    if (!without.empty() && file_->number_of(without, line)) break;
    next = *number;
    kept = begin;
  }
  if (kept == text.size()) return;
  if (::ftruncate(::fileno(file_->file), static_cast<off_t>(kept)) != 0) file_->fail(std::strerror(errno));
  std::fseek(file_->file, 0, SEEK_END);
  file_->is_torn = false;
}

GRADACCUM_INLINE void MetricsFile::write(const Fields& fields) {
  auto& file = *file_;
  file.check(fields);
  const auto line = file.line_of(fields);
  if (!file.is_csv || !file.heading.empty()) return file.put(line);
  auto names = c10::Join(",", file.known_names);
  file.put(names + '\n' + line);
  file.flush();
  file.heading = std::move(names);  // only after it has been written
}

GRADACCUM_INLINE void MetricsFile::flush() { file_->flush(); }

GRADACCUM_INLINE void MixedPrecision::attach(TrainerBase& to) {
  trainer = &to;
  static_cast<void>(forward_scope());  // throws where the device has no autocast, or not for this dtype
  TORCH_CHECK(!scaler.on_device,
              "MixedPrecision: scaler.on_device must be false; a Trainer has to know whether its parameters moved");
  auto options = scaler;
  options.enabled = enabled && scaler.enabled && dtype == at::kHalf;
  if (options.enabled) detail::check_none_is_half(to.parameters());
  amp_scaler = std::make_shared<AmpScaler>(options);
}

GRADACCUM_INLINE std::optional<Autocast> MixedPrecision::forward_scope() const {
  if (!enabled) return std::optional<Autocast>();
  return std::optional<Autocast>(std::in_place, trainer->device(), dtype);
}

GRADACCUM_INLINE void MixedPrecision::before_backward(Loss& loss) { loss = amp_scaler->scale(std::move(loss)); }
GRADACCUM_INLINE void MixedPrecision::scale_gradients(Factor& factor) const { amp_scaler->unscale(factor); }

GRADACCUM_INLINE void MixedPrecision::after_window(const Step& step) {
  if (step.moved || step.overflowed) amp_scaler->record_overflow(step.overflowed);
  amp_scaler->update();
}

GRADACCUM_INLINE void MixedPrecision::state(Archive& archive) { amp_scaler->state(archive); }

struct Progress::Run {
  const TrainerBase& trainer;
  const FitStatus& status;  // the trainer's
  ProgressLine shown;
  detail::WeightedMean loss = {};
  double lr = 0;
  bool begun = false;

  /// Says where a fit that was to go on has begun.
  void begin() {
    const auto& from = status.resumed_from;
    if (!from.empty()) shown.restart(status.fraction().value_or(0), status.samples);
    if (!status.options.resume.empty())
      shown.say(from.empty() ? fmt::format("no state in {} yet: from the beginning", status.options.resume.string())
                             : fmt::format("resumed from {}, in epoch {}", from, status.epoch + 1));
  }

  std::string text() const {
    auto text = fmt::format("epoch {}", status.epoch + 1);
    const auto& options = status.options;
    if (options.epochs || !options.has_limit())
      text += fmt::format("/{}", status.epoch - status.epochs + options.epochs.value_or(1));
    text += fmt::format(" | update {}", trainer.updates());
    if (loss.weight() > 0)
      text += detail::number_text(" | loss %.4f", loss.value().item<double>()) + detail::number_text(" | lr %.1e", lr);
    if (!status.validations.empty())
      text += " | " + status.validations.back().name +
              detail::number_text("/loss %.4f", status.validations.back().found["loss"]);
    if (status.skipped > 0) text += fmt::format(" | {} skipped", status.skipped);
    return text;
  }
};

GRADACCUM_INLINE void Progress::attach(TrainerBase& trainer) {
  if (!trainer.is_first()) line.to = nullptr;
  run.reset(new Run{trainer, trainer.status(), ProgressLine(line)});
}

GRADACCUM_INLINE int Progress::fit_scope() {
  run->begun = false;
  run->shown.restart();
  return 0;
}

GRADACCUM_INLINE void Progress::on_epoch_begin(std::int64_t) { run->loss = {}; }

GRADACCUM_INLINE void Progress::after_window(const Step& step) {
  if (run->shown.silent()) return;  // on a device, adding up takes time, too
  run->loss.add(step.loss, step.items);
  run->lr = step.lr;
}

GRADACCUM_INLINE void Progress::after_backward(Gradients&) {
  const auto& status = run->status;
  if (!status.running) return;
  if (!std::exchange(run->begun, true)) run->begin();
  run->shown.update(status.fraction(), status.samples, [this] { return run->text(); });
}

GRADACCUM_INLINE void Progress::on_epoch_end(std::int64_t) { run->shown.clear(); }

GRADACCUM_INLINE std::vector<int> StopOn::usual() { return {SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGUSR2}; }

struct SaveState::Run {
  TrainerBase& trainer;
  bool rehearsed = false;                          // a state could be written
  std::optional<std::filesystem::path> last = {};  // the state that this fit has saved
  bool due = false, best_is_due = false, finished = false;
  std::optional<double> measured = {};  // of the parameters as they are
  std::vector<double> best = {};        // so far, the best first
  std::unique_ptr<detail::StopSignals> signals = {};
  FitStatus::Clock::time_point saved = FitStatus::Clock::now();  // or begun
  std::unique_ptr<BackgroundSaver> saver = {};                   // the last member, as its thread uses the others

  /// Finds out before hours have gone by whether a state can be written. False while none can be made yet.
  bool rehearse(const std::filesystem::path& folder) const {
    const auto peers = trainer.peers();
    if (peers && peers->take_each_backward() && trainer.window().micro_batches > 0) return false;
    if (trainer.is_first()) detail::check_is_newest(folder, trainer.updates());
    detail::check_can_be_saved(trainer);
    return true;
  }

  void begin_saving_in_background(const SaveState& options) {
    saver.reset(new BackgroundSaver(options.directory,
                                    {.when_busy = options.when_busy, .stage_on_device = options.stage_on_device}));
    trainer.loop().state_copy = &saver->copy_.memory();
    trainer.loop().finish_background_save = [this] { saver->join(); };
  }

  /// Saves, or begins to. A state that must not be skipped waits for an earlier one.
  void save(const SaveState& options, bool must_not_be_skipped) {
    const auto keep = [this, directory = options.directory, keep_last = options.keep_last,
                       keep_best = options.keep_best](const std::filesystem::path& path) {
      detail::StateDirectory states(directory);
      last = last ? states.replace(*last, path) : path;
      if (keep_last > 0) states.keep_last(keep_last, detail::best_states(directory, keep_best));
      return *last;
    };
    auto& loop = trainer.loop();
    loop.status.wants_save = loop.status.saves = false;
    if (saver) {
      if (must_not_be_skipped) saver->wait();
      if (!saver->save(trainer, keep)) return;
    } else if (const auto path = gradaccum::save(options.directory, trainer); trainer.is_first()) {
      keep(path);
    }
    saved = FitStatus::Clock::now();
  }
};

GRADACCUM_INLINE void SaveState::attach(TrainerBase& trainer) {
  TORCH_CHECK(!directory.empty(), "SaveState: directory must be given");
  TORCH_CHECK(every_updates >= 1, "SaveState: every_updates must be >= 1, got ", every_updates);
  TORCH_CHECK(every_minutes >= 0, "SaveState: every_minutes must be >= 0, got ", every_minutes);
  for (const int signal : on_signals.signals())
    TORCH_CHECK(signal > 0 && signal < NSIG && signal != SIGKILL && signal != SIGSTOP,
                "SaveState: on_signals must be signals that a program can catch, got ", signal);
  TORCH_CHECK(keep_last >= 0, "SaveState: keep_last must be >= 0, got ", keep_last);
  TORCH_CHECK(keep_best >= 0, "SaveState: keep_best must be >= 0, got ", keep_best);
  if (keep_best > 0)
    trainer.when_built([this, &trainer] { mode = detail::mode_of("SaveState", metric, mode, &trainer.metrics()); });
  trainer.check_optimizer_state();
  trainer.loop().left_out = leave_out;
  run.reset(new Run{trainer});
}

GRADACCUM_INLINE std::shared_ptr<void> SaveState::fit_scope() {
  run.reset(new Run{.trainer = run->trainer, .rehearsed = run->rehearsed});
  if (!run->trainer.status().options.smoke)
    detail::run_on_all(run->trainer.peers().get(), [this] {
      if (!run->trainer.is_first()) return;
      detail::StateDirectory(directory).sweep();  // though there may be no save
      detail::check_is_writable(directory);
    });
  if (!on_signals.signals().empty()) run->signals = std::make_unique<detail::StopSignals>(on_signals.signals());
  if (in_background) run->begin_saving_in_background(*this);
  return {nullptr, [run = run](void*) {
            run->signals.reset();
            run->trainer.loop().state_copy = nullptr;
            run->trainer.loop().finish_background_save = nullptr;
            run->saver.reset();
          }};
}

GRADACCUM_INLINE void SaveState::before_backward(Loss&) { run->finished = false; }
/// The tail of a fit that was stopped closes a window without a backward pass.
GRADACCUM_INLINE void SaveState::after_window(const Step&) { run->finished = false; }

GRADACCUM_INLINE void SaveState::after_step(const Step& step) {
  run->due = run->due || step.update % every_updates == 0;
  const std::chrono::duration<double, std::ratio<60>> since = FitStatus::Clock::now() - run->saved;
  auto& status = run->trainer.loop().status;
  if (every_minutes > 0 && since.count() >= every_minutes) (status.together ? status.wants_save : run->due) = true;
  run->measured.reset();
}

GRADACCUM_INLINE void SaveState::on_validation(const Validation& validation) {
  const auto number = keep_best > 0 ? validation[metric] : std::nullopt;
  if (!number) return;
  run->measured = number;
  auto& best = run->best;
  const auto count = static_cast<std::size_t>(keep_best);
  const auto position =
      std::find_if(best.begin(), best.end(), [&](double other) { return detail::is_better(*mode, *number, other); });
  if (detail::is_nan(*number) || (position == best.end() && best.size() >= count)) return;
  if (position == best.begin()) detail::warn_if_last("SaveState", metric, *mode, *number);
  best.insert(position, *number);
  if (best.size() > count) best.pop_back();
  run->best_is_due = true;
}

GRADACCUM_INLINE void SaveState::state(Archive& archive) {
  using Text = std::optional<std::string>;
  auto& measured = run->measured;
  detail::MeasuredState of{.metric = measured ? Text(metric) : Text(),
                           .better = measured ? Text(*mode == Mode::min ? "min" : "max") : Text(),
                           .number = measured};
  of.state(archive);
  std::vector<double> bests;
  for (std::optional<double> number = 0; number;) {
    const auto i = bests.size();
    number = i < run->best.size() ? std::optional(run->best[i]) : std::nullopt;
    archive("best" + std::to_string(i), number);
    if (number) bests.push_back(*number);
  }
  run->finished = run->finished || archive.loading();
  if (!archive.loading()) return;
  measured = mode && of.metric == metric ? of.number : std::nullopt;
  run->best = std::move(bests);
}

GRADACCUM_INLINE void SaveState::at_boundary() {
  auto& trainer = run->trainer;
  const auto& status = trainer.status();
  if (status.options.smoke) return;
  if (!std::exchange(run->rehearsed, true)) run->rehearsed = run->rehearse(directory);
  const int signal = run->signals ? run->signals->received() : 0;
  if (signal != 0) trainer.interrupt(signal);
  const bool ends = status.done() && (!run->finished || status.signal != 0);  // a signal that all processes know of
  if (run->saver) run->saver->check();
  if (run->due || run->best_is_due || status.saves || ends) run->save(*this, ends || run->best_is_due);
  if (run->saver && status.done()) run->saver->wait();
  run->due = run->best_is_due = false;
  run->finished = run->finished || ends;
}

namespace detail {

/// The averages of a model, and the way to put them into it; not inside of Ema, whose members have names used here.
struct Averages {
  using Tensors = std::vector<std::pair<std::string, at::Tensor>>;  // of a model
  struct Average {
    std::string name;
    at::ScalarType dtype;  // of the model's tensor
    at::Tensor value;
  };

  std::vector<Average> averages = {};
  std::vector<at::Tensor> originals = {};  // of the model, while the averages are in it
  std::int64_t updates = 0;
  bool swapped = false;
  torch::nn::Module* attached = nullptr;

  static std::string described(const std::string& name, at::ScalarType dtype, const at::Tensor& tensor) {
    return c10::str(name, ", ", dtype, ' ', tensor.sizes(), " on ", tensor.device());
  }

  /// Each tensor of a model once, in the model's order.
  static Tensors distinct_tensors(torch::nn::Module& module, bool buffers) {
    Tensors all;
    std::unordered_set<const void*> seen;
    const auto add = [&](const auto& named) {
      for (auto& item : named)
        if (item.value().defined() && seen.insert(item.value().unsafeGetTensorImpl()).second)
          all.emplace_back(item.key(), item.value());
    };
    add(module.named_parameters());
    if (buffers) add(module.named_buffers());
    for (auto& [name, tensor] : all)
      TORCH_CHECK(tensor.layout() == at::kStrided && at::has_internal_overlap(tensor) != at::MemOverlap::Yes &&
                      !tensor._is_zerotensor() && (!tensor.is_inference() || c10::InferenceMode::is_enabled()),
                  "Ema: ", name,
                  " must be a dense tensor that can be written to, not sparse, expanded or an inference tensor");
    return all;
  }

  void check_not_swapped(const char* call) const {
    TORCH_CHECK(!swapped, "Ema: ", call, " needs the model's own weights, but it holds the averages; swap back first");
  }

  /// The tensors of the model that the averages are of; throws if it has changed.
  Tensors known_tensors(torch::nn::Module& module, bool buffers) const {
    auto tensors = distinct_tensors(module, buffers);
    const auto known = averages.size(), now = tensors.size();
    for (std::size_t i = 0; i < std::min(known, now); ++i) {
      const auto& [name, dtype, value] = averages[i];
      const auto& tensor = tensors[i].second;
      TORCH_CHECK(name == tensors[i].first && dtype == tensor.scalar_type() && value.sizes() == tensor.sizes() &&
                      value.device() == tensor.device(),
                  "Ema: the model must be as it was at the first update, with ", described(name, dtype, value),
                  ", got ", described(tensors[i].first, tensor.scalar_type(), tensor), "; make a new Ema");
    }
    TORCH_CHECK(known == now, "Ema: the model must be as it was at the first update, but ",
                known > now ? averages[now].name + " is gone" : tensors[known].first + " is new", "; make a new Ema");
    return tensors;
  }

  void update(torch::nn::Module& module, bool buffers, double decay) {
    check_not_swapped("an update");
    const bool first = updates == 0;
    const auto tensors = first ? distinct_tensors(module, buffers) : known_tensors(module, buffers);
    c10::InferenceMode outlives_any_mode(false);
    at::NoGradGuard no_grad;
    if (first) {
      std::vector<Average> copies;
      for (auto& [name, tensor] : tensors)
        copies.push_back({name, tensor.scalar_type(), tensor.detach().to(state_type(tensor), false, /*copy=*/true)});
      averages = std::move(copies);
    } else {
      move_towards(tensors, 1 - decay);
    }
    ++updates;
  }

  /// Takes one operation for tensors in a row of one device and dtype. 16-bit ones are copied, so some at a time.
  void move_towards(const Tensors& tensors, double weight) const {
    std::vector<at::Tensor> targets, values;
    std::int64_t copied = 0;
    const auto move = [&] {
      if (!targets.empty()) at::_foreach_lerp_(targets, values, weight);
      targets.clear(), values.clear(), copied = 0;
    };
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      const auto& [name, dtype, average] = averages[i];
      const auto& tensor = tensors[i].second;
      if (!average.is_floating_point() && !average.is_complex()) {
        average.copy_(tensor);
        continue;
      }
      if (!targets.empty() && (targets[0].device() != average.device() || targets[0].dtype() != average.dtype()))
        move();
      targets.push_back(average);
      values.push_back(tensor.detach().to(average.scalar_type()));
      if (dtype != average.scalar_type()) copied += average.numel();
      if (copied > most_copied) move();
    }
    move();
  }

  void swap(torch::nn::Module& module, bool buffers) {
    TORCH_CHECK(updates > 0, "Ema: swap needs averages; call update(model) after a step first");
    at::NoGradGuard no_grad;
    std::vector<at::Tensor> targets, values, own;
    for (auto& [_, tensor] : known_tensors(module, buffers)) targets.push_back(tensor);
    for (auto& average : averages) values.push_back(average.value);
    if (!swapped)
      for (auto& tensor : targets) own.push_back(tensor.detach().clone());
    if (!targets.empty()) at::_foreach_copy_(targets, swapped ? originals : values);
    originals = std::move(own);
    swapped = !swapped;
  }

  /// Checks all before it changes anything.
  void state(Archive& archive, bool buffers) {
    TORCH_CHECK(attached || !archive.loading(), "Ema: loading needs the model; call attach(model) first");
    check_not_swapped(archive.loading() ? "loading" : "saving");
    std::int64_t its_updates = archive.loading() ? 0 : updates;
    archive("updates", its_updates);
    if (!archive.loading()) {
      for (auto& [name, dtype, value] : averages) archive("average." + name, value);
      return;
    }
    c10::InferenceMode outlives_any_mode(false);
    at::NoGradGuard no_grad;
    TORCH_CHECK(its_updates >= 0, "Ema: loaded updates must be >= 0, got ", its_updates);
    std::vector<Average> loaded;
    for (auto& [name, tensor] : its_updates > 0 ? distinct_tensors(*attached, buffers) : Tensors()) {
      at::Tensor value;
      archive("average." + name, value);
      const bool fits = value.defined() && value.layout() == at::kStrided && value.sizes() == tensor.sizes() &&
                        value.scalar_type() == state_type(tensor);
      if (!fits && archive.changes_allowed()) return;  // another model's: those of this one stay as they are
      TORCH_CHECK(fits, "Ema: a loaded average must be that of ", described(name, state_type(tensor), tensor), "; got ",
                  value.defined() ? described("one", value.scalar_type(), value) : "an undefined tensor");
      loaded.push_back({name, tensor.scalar_type(), value.to(tensor.device())});
    }
    averages = std::move(loaded);
    updates = its_updates;
  }
};

}  // namespace detail

struct Ema::Run : detail::Averages {};

GRADACCUM_INLINE Ema::Run& Ema::made_run() {
  if (!run) run = std::make_shared<Run>();
  return *run;
}

GRADACCUM_INLINE void Ema::update_module(torch::nn::Module& module) { made_run().update(module, buffers, decay_now()); }
GRADACCUM_INLINE void Ema::swap_module(torch::nn::Module& module) { made_run().swap(module, buffers); }
GRADACCUM_INLINE std::int64_t Ema::updates() const { return run ? run->updates : 0; }

GRADACCUM_INLINE void Ema::attach_module(torch::nn::Module& module) {
  decay_now();
  made_run().attached = &module;
}

GRADACCUM_INLINE void Ema::after_step(const Step&) { update_module(*run->attached); }

GRADACCUM_INLINE void Ema::state(Archive& archive) { made_run().state(archive, buffers); }

GRADACCUM_INLINE double Ema::decay_now() const {
  TORCH_CHECK(decay >= 0 && decay <= 1, "Ema: decay must be in [0, 1], got ", decay);
  const auto t = static_cast<double>(updates());
  return warmup ? std::min(decay, (1 + t) / (10 + t)) : decay;
}

namespace detail {

GRADACCUM_INLINE void check_options(const ValidateOptions& options) {
  const auto& [every_updates, every_epochs, ema, name] = options;
  TORCH_CHECK(every_updates.value_or(1) >= 1, "Validate: every_updates must be >= 1, got ", *every_updates);
  TORCH_CHECK(every_epochs.value_or(1) >= 1, "Validate: every_epochs must be >= 1, got ", *every_epochs);
  TORCH_CHECK(!name.empty() && name.find('/') == name.npos, "Validate: name must not be empty or contain '/', got '",
              name, "'");
}

GRADACCUM_INLINE std::shared_ptr<void> validating_scope(torch::nn::Module& module, Ema* ema) {
  // Before the first update the averages would be the weights as they are.
  if (ema && ema->updates() == 0) ema = nullptr;
  const auto generators = states_of_generators();
  if (ema) ema->swap(module);
  return {nullptr, [&module, ema, generators](void*) {
            if (ema) ema->swap(module);
            set_generators(generators);
          }};
}

}  // namespace detail
}  // namespace gradaccum

#ifdef GRADACCUM_COMPILED
namespace gradaccum::detail {
template class PolicyOf<Accumulate>;
template class PolicyOf<ClipNorm>;
template class PolicyOf<ClipValue>;
template class PolicyOf<EarlyStopping>;
template class PolicyOf<Ema>;
template class PolicyOf<MetricsLog>;
template class PolicyOf<MixedPrecision>;
template class PolicyOf<OptimizerInBackward>;
template class PolicyOf<Progress>;
template class PolicyOf<ReduceLROnPlateau>;
template class PolicyOf<SaveState>;
}  // namespace gradaccum::detail
#endif

#undef GRADACCUM_INLINE
