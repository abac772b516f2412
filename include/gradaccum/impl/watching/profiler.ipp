// SPDX-License-Identifier: Apache-2.0
// Profiles with LibTorch's Kineto, and sums events by operation.
#pragma once

#include <gradaccum/profiler.hpp>

#include <gradaccum/detail/io/files.hpp>
#include <gradaccum/detail/memory/memory_ledger.hpp>
#include <gradaccum/detail/types/types.hpp>

#include <ATen/Context.h>
#include <ATen/record_function.h>
#include <c10/core/DeviceType.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/csrc/autograd/profiler_kineto.h>

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <functional>
#include <map>
#include <optional>
#include <ostream>
#include <set>
#include <stdexcept>
#include <string_view>
#include <thread>
#include <tuple>
#include <unordered_map>

#include <gradaccum/impl/begin.ipp>

extern "C" {
/// Silences Kineto's log. LibTorch calls it only after the first lines; nullptr in a LibTorch without Kineto.
__attribute__((weak)) void suppressLibkinetoLogMessages();
}

namespace gradaccum::detail {

namespace kineto = torch::autograd::profiler;

GRADACCUM_INLINE void check_can_profile(const char* who) {
  const bool taken = c10::ThreadLocalDebugInfo::get(c10::DebugInfoKind::PROFILER_STATE) != nullptr;
  TORCH_CHECK(!taken || !MemoryLedger::possible(), who,
              ": must not start while a MemoryMeter counts (FitOptions::measure_memory starts one): LibTorch has one "
              "hook for both");
  TORCH_CHECK(!taken, who, ": must not start while LibTorch's profiler runs on this thread");
}

/// True if a trace ends with a brace, and so is complete. Kineto does not report a full disk.
GRADACCUM_INLINE bool is_whole_trace(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  for (auto position = static_cast<std::streamoff>(file.tellg()); position > 0;) {
    file.seekg(--position);
    const int c = file.peek();
    if (c != '\n' && c != ' ') return c == '}';
  }
  return false;
}

GRADACCUM_INLINE void save_trace(kineto::ProfilerResult& result, const std::filesystem::path& path) {
  const auto temporary = temporary_name(path);
  make_and_rename(temporary, path, [&] {
    result.save("file://" + temporary.string());
    if (!is_whole_trace(temporary)) throw std::runtime_error(path.string() + ": LibTorch could not write the trace");
  });
}

/// Returns the kind of an event; nullopt for others, such as users' marks and calls of the CUDA runtime.
GRADACCUM_INLINE std::optional<ProfiledEvent::Kind> kind_of_event(const kineto::KinetoEvent& event) {
  constexpr std::uint8_t operation = 0, mark_on_device = 2;  // Kineto's numbers
  if (event.name() == "[memory]") return ProfiledEvent::Kind::memory;
  if (event.deviceType() != c10::DeviceType::CPU)
    return event.activityType() != mark_on_device && event.linkedCorrelationId() > 0
               ? std::optional(ProfiledEvent::Kind::kernel)
               : std::nullopt;
  const bool is_mark = event.scope() == static_cast<std::uint8_t>(at::RecordScope::USER_SCOPE);
  if (event.activityType() != operation || is_mark || event.isAsync()) return std::nullopt;
  return ProfiledEvent::Kind::operation;
}

GRADACCUM_INLINE std::vector<ProfiledEvent> events_of(const kineto::ProfilerResult& result) {
  std::vector<ProfiledEvent> events;
  for (auto& event : result.events()) {
    const auto kind = kind_of_event(event);
    if (!kind) continue;
    const bool is_kernel = *kind == ProfiledEvent::Kind::kernel;
    events.push_back({.kind = *kind,
                      .name = event.name(),
                      .begin = static_cast<std::int64_t>(event.startNs()),
                      .end = static_cast<std::int64_t>(event.endNs()),
                      .thread = event.startThreadId(),
                      .correlation = is_kernel ? event.linkedCorrelationId() : event.correlationId(),
                      .bytes = *kind == ProfiledEvent::Kind::memory ? event.nBytes() : 0});
  }
  return events;
}

/// Operation that has begun but not ended during the pass over the events of its thread.
struct OpenOperation {
  const ProfiledEvent* event;
  ProfiledOperation* row;
  std::int64_t of_others = 0;  // nanoseconds
};

/// Ends the innermost operation. The time of one that calls itself, even indirectly, counts once.
GRADACCUM_INLINE void close_last(std::vector<OpenOperation>& open) {
  const auto last = open.back();
  open.pop_back();
  const auto duration = last.event->duration();
  last.row->self_cpu_seconds += 1e-9 * static_cast<double>(std::max<std::int64_t>(duration - last.of_others, 0));
  if (std::none_of(open.begin(), open.end(), [&](auto& outer) { return outer.row == last.row; }))
    last.row->cpu_seconds += 1e-9 * static_cast<double>(duration);
  if (!open.empty()) open.back().of_others += duration;
}

GRADACCUM_INLINE std::vector<ProfiledOperation> operations_of(const std::vector<ProfiledEvent>& events) {
  using Kind = ProfiledEvent::Kind;
  std::map<std::uint64_t, std::vector<const ProfiledEvent*>> threads;
  for (auto& event : events)
    if (event.kind != Kind::kernel) threads[event.thread].push_back(&event);
  std::map<std::string, ProfiledOperation> rows;
  std::unordered_map<std::uint64_t, ProfiledOperation*> by_correlation;
  for (auto& [thread, in_order] : threads) {
    std::vector<OpenOperation> open;
    // Sorts an outer operation before an inner one with the same begin, and memory last, so that the inner one has it.
    std::ranges::stable_sort(in_order, {}, [](const ProfiledEvent* event) {
      return std::tuple(event->begin, event->kind == Kind::memory, -event->end);
    });
    for (const auto* event : in_order) {
      const bool is_memory = event->kind == Kind::memory;
      const auto begin = event->begin + (is_memory ? 0 : 1);  // memory at its very end belongs to it
      while (!open.empty() && open.back().event->end < begin) close_last(open);
      if (!is_memory) {
        auto& row = rows[event->name];
        row.name = event->name;
        ++row.calls;
        by_correlation[event->correlation] = &row;
        open.push_back({event, &row});
      } else if (!open.empty()) {
        open.back().row->allocated_bytes += std::max<std::int64_t>(event->bytes, 0);
        open.back().row->kept_bytes += event->bytes;
      }
    }
    while (!open.empty()) close_last(open);
  }
  for (auto& event : events) {
    const auto launched_by = by_correlation.find(event.correlation);
    if (event.kind == Kind::kernel && launched_by != by_correlation.end())
      launched_by->second->device_seconds += 1e-9 * static_cast<double>(event.duration());
  }
  std::vector<ProfiledOperation> operations;
  for (auto& [name, row] : rows) operations.push_back(std::move(row));
  const auto own_time = [](const ProfiledOperation& of) { return of.self_cpu_seconds + of.device_seconds; };
  std::ranges::stable_sort(operations, std::greater{}, own_time);
  return operations;
}

GRADACCUM_INLINE std::unique_ptr<at::RecordFunction> trace_mark(const std::string& name) {
  auto mark = std::make_unique<at::RecordFunction>(at::RecordScope::USER_SCOPE);
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 9
  if (mark->isActive()) mark->before(std::string_view(name));
#else
  if (mark->isActive()) mark->before(name);
#endif
  return mark;
}

inline constexpr std::size_t shown_operations = 10;

GRADACCUM_INLINE std::string milliseconds_text(double seconds) { return fmt::format("{:.3f}", 1e3 * seconds); }
GRADACCUM_INLINE std::string mebibytes_text(std::int64_t bytes) {
  return fmt::format("{:.3f}", static_cast<double>(bytes) / (1 << 20));
}

/// Formats the operations by time. Has a column for devices only if one was used.
GRADACCUM_INLINE std::string operations_by_time(const std::vector<ProfiledOperation>& operations) {
  double self_cpu = 0, device = 0;
  for (auto& operation : operations) self_cpu += operation.self_cpu_seconds, device += operation.device_seconds;
  auto text = fmt::format("{:<56} {:>8} {:>12} {:>7} {:>12}{}\n", "Operation, by its own time", "Calls", "CPU ms",
                          "Share", "in all, ms", device > 0 ? "    Device ms" : "");
  for (std::size_t i = 0; i < std::min(operations.size(), shown_operations); ++i) {
    const auto& of = operations[i];
    text +=
        fmt::format("{:<56} {:>8} {:>12} {:>6.1f}% {:>12}", of.name, of.calls, milliseconds_text(of.self_cpu_seconds),
                    self_cpu > 0 ? 100 * of.self_cpu_seconds / self_cpu : 0, milliseconds_text(of.cpu_seconds));
    if (device > 0) text += fmt::format(" {:>12}", milliseconds_text(of.device_seconds));
    text += '\n';
  }
  return text;
}

GRADACCUM_INLINE void write_profile(const std::filesystem::path& directory, const ProfileReport& report) {
  const auto text = plain_text(report);
  replace_file(directory / "profile.txt", [&](OutputFile& file) { file.write(text.data(), text.size()); });
}

}  // namespace gradaccum::detail

namespace gradaccum {

GRADACCUM_INLINE std::vector<ProfiledOperation> ProfileReport::by_memory(std::size_t most) const {
  auto sorted = operations;
  std::ranges::stable_sort(sorted, std::greater{}, &ProfiledOperation::allocated_bytes);
  sorted.resize(std::min(sorted.size(), most));
  while (!sorted.empty() && sorted.back().allocated_bytes == 0) sorted.pop_back();
  return sorted;
}

GRADACCUM_INLINE std::ostream& operator<<(std::ostream& stream, const ProfileReport& report) {
  const auto mb = detail::mebibytes_text;
  if (report.updates > 0) stream << "Updates: " << report.updates << '\n';
  stream << "Time: " << detail::milliseconds_text(report.seconds) << " ms\n\n"
         << fmt::format("{:<24} {:>7} {:>12} {:>8}\n", "Phase", "Share", "ms", "Times");
  for (auto& phase : report.phases)
    stream << fmt::format("{:<24} {:>6.1f}% {:>12} {:>8}\n", phase.name, 100 * phase.share,
                          detail::milliseconds_text(phase.seconds), phase.times);
  stream << '\n'
         << detail::operations_by_time(report.operations) << '\n'
         << fmt::format("{:<56} {:>8} {:>12} {:>12}\n", "Operation, by what it allocates", "Calls", "MB", "kept, MB");
  for (auto& of : report.by_memory(detail::shown_operations))
    stream << fmt::format("{:<56} {:>8} {:>12} {:>12}\n", of.name, of.calls, mb(of.allocated_bytes), mb(of.kept_bytes));
  if (report.memory.empty()) return stream;
  constexpr auto memory_row = "{:<24} {:>12} {:>12} {:>12} {:>12} {:>12} {:>12} {:>12}\n";
  stream << '\n'
         << fmt::format(memory_row, "Memory at the end, MB", "Parameters", "Optimizer", "Gradients", "Activations",
                        "State copy", "Rest", "Sum");
  for (auto& [phase, bytes] : report.memory)
    stream << fmt::format(memory_row, phase, mb(bytes.parameters), mb(bytes.optimizer_state), mb(bytes.gradients),
                          mb(bytes.activations), mb(bytes.state_copy), mb(bytes.rest), mb(bytes.total()));
  return stream << fmt::format("Peak: {} MB\n", mb(report.peak_bytes));
}

/// Measures the time by phase. Each moment counts for the innermost open phase, or for "other" if none is open.
struct Profiler::Parts {
  using Clock = std::chrono::steady_clock;

  std::filesystem::path directory;
  std::thread::id thread = std::this_thread::get_id();
  bool running = true;
  Clock::time_point counted = {};
  std::vector<ProfiledPhase> phases = {};
  std::vector<std::size_t> open = {};  // indices of phases, the innermost last
  double outside = 0;                  // seconds

  void count() {
    const auto now = Clock::now();
    const std::chrono::duration<double> time = now - std::exchange(counted, now);
    (open.empty() ? outside : phases[open.back()].seconds) += time.count();
  }
  std::size_t index_of(const std::string& name) {
    const auto found = std::ranges::find(phases, name, &ProfiledPhase::name);
    const auto index = static_cast<std::size_t>(found - phases.begin());
    if (found == phases.end()) phases.push_back({.name = name});
    return index;
  }
};

/// Starts LibTorch's profiler on this thread and on the threads of its backward passes.
GRADACCUM_INLINE Profiler::Profiler(ProfilerOptions options)
    : parts_(new Parts{.directory = std::move(options.directory)}) {
  namespace kineto = torch::autograd::profiler;
  if (!parts_->directory.empty()) detail::make_directory(parts_->directory);
  detail::check_can_profile("Profiler");
  if (suppressLibkinetoLogMessages) suppressLibkinetoLogMessages();  // respects KINETO_LOG_LEVEL if set
  const kineto::ProfilerConfig config(kineto::ProfilerState::KINETO, /*report_input_shapes=*/false,
                                      /*profile_memory=*/true);
  std::set<kineto::ActivityType> activities{kineto::ActivityType::CPU};
  if (at::hasCUDA()) activities.insert(kineto::ActivityType::CUDA);
  kineto::prepareProfiler(config, activities);
  kineto::enableProfiler(config, activities);
  parts_->counted = Parts::Clock::now();
}

GRADACCUM_INLINE Profiler::~Profiler() {
  if (!parts_->running) return;
  try {
    torch::autograd::profiler::disableProfiler();
  } catch (...) {  // other code has ended the profiler
  }
}

GRADACCUM_INLINE Profiler::Parts& Profiler::running() const {
  TORCH_CHECK(parts_->running, "Profiler: finish() was already called; construct another Profiler");
  return *parts_;
}

/// Checks the name, which Kineto writes to its file unescaped.
GRADACCUM_INLINE Profiler::Phase::Phase(Profiler& profiler, const std::string& name) : profiler_(profiler) {
  const auto is_plain = [](unsigned char c) { return c >= ' ' && c != '"' && c != '\\' && c != 127; };
  TORCH_CHECK(!name.empty() && std::all_of(name.begin(), name.end(), is_plain),
              "Profiler: a phase's name must have no quote, backslash or control character, got '", name, "'");
  mark_ = detail::trace_mark(name);
  auto& parts = profiler.running();
  parts.count();
  parts.open.push_back(parts.index_of(name));
  ++parts.phases[parts.open.back()].times;
}

GRADACCUM_INLINE Profiler::Phase::~Phase() {
  profiler_.parts_->count();
  profiler_.parts_->open.pop_back();
}

/// Waits for running kernels, which would otherwise be missing.
GRADACCUM_INLINE ProfileReport Profiler::finish(ProfileReport report) {
  auto& parts = running();
  TORCH_CHECK(parts.open.empty(), "Profiler: finish() was called inside a phase; end its scope first");
  TORCH_CHECK(parts.thread == std::this_thread::get_id(),
              "Profiler: must be finished on the thread that constructed it");
  parts.count();
  if (at::hasCUDA()) {
    const c10::impl::VirtualGuardImpl cuda(c10::DeviceType::CUDA);
    cuda.synchronizeDevice(cuda.getDevice().index());
  }
  parts.running = false;
  const auto result = torch::autograd::profiler::disableProfiler();
  parts.phases[parts.index_of("other")].seconds += parts.outside;  // a user's phase may have that name, too
  report.phases = std::move(parts.phases);
  report.seconds = 0;
  for (auto& phase : report.phases) report.seconds += phase.seconds;
  for (auto& phase : report.phases) phase.share = report.seconds > 0 ? phase.seconds / report.seconds : 0;
  report.operations = detail::operations_of(detail::events_of(*result));
  if (parts.directory.empty()) return report;
  detail::save_trace(*result, parts.directory / "trace.json");
  detail::write_profile(parts.directory, report);
  return report;
}

}  // namespace gradaccum

#undef GRADACCUM_INLINE
