// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/watching/kineto_session.hpp>

#include <gradaccum/detail/io/files.hpp>
#include <gradaccum/detail/memory/memory_ledger.hpp>

#include <ATen/Context.h>
#include <ATen/record_function.h>
#include <c10/core/DeviceType.h>
#include <c10/core/Storage.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/csrc/autograd/profiler_kineto.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <fstream>
#include <optional>
#include <set>
#include <stdexcept>
#include <string_view>
#include <system_error>
#include <unordered_set>

#include <gradaccum/impl/begin.ipp>

extern "C" {
/// Kineto's function, which LibTorch calls only after Kineto's first lines; nullptr in a LibTorch without Kineto.
__attribute__((weak)) void suppressLibkinetoLogMessages();
}

namespace gradaccum::detail {

namespace kineto = torch::autograd::profiler;

GRADACCUM_INLINE void check_can_profile(const char* who) {
  const bool taken = c10::ThreadLocalDebugInfo::get(c10::DebugInfoKind::PROFILER_STATE) != nullptr;
  TORCH_CHECK(!taken || !MemoryLedger::possible(), who,
              ": must not start where a MemoryMeter counts (FitOptions::measure_memory has one): LibTorch has one slot "
              "for both");
  TORCH_CHECK(!taken, who, ": must not start where LibTorch's profiler is at work already, on this thread");
}

GRADACCUM_INLINE kineto::ProfilerConfig profiler_config() {
  return kineto::ProfilerConfig(kineto::ProfilerState::KINETO, /*report_input_shapes=*/false, /*profile_memory=*/true);
}

GRADACCUM_INLINE std::set<kineto::ActivityType> profiler_activities() {
  std::set<kineto::ActivityType> activities{kineto::ActivityType::CPU};
  if (at::hasCUDA()) activities.insert(kineto::ActivityType::CUDA);
  return activities;
}

GRADACCUM_INLINE KinetoSession::KinetoSession(const char* who) {
  check_can_profile(who);
  if (suppressLibkinetoLogMessages) suppressLibkinetoLogMessages();  // respects KINETO_LOG_LEVEL if set
  kineto::prepareProfiler(profiler_config(), profiler_activities());
  kineto::enableProfiler(profiler_config(), profiler_activities());
  running_ = true;
}

GRADACCUM_INLINE KinetoSession::~KinetoSession() {
  if (!running_) return;
  try {
    kineto::disableProfiler();
  } catch (...) {  // the profiler was ended elsewhere
  }
}

/// True if a trace ends with a brace, and so is complete. Kineto does not report a full disk.
GRADACCUM_INLINE bool is_whole_trace(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  for (auto place = static_cast<std::streamoff>(file.tellg()); place > 0;) {
    file.seekg(--place);
    const int c = file.peek();
    if (c != '\n' && c != ' ') return c == '}';
  }
  return false;
}

GRADACCUM_INLINE void save_trace(kineto::ProfilerResult& result, const std::filesystem::path& path) {
  const auto temporary = temporary_name(path);
  try {
    result.save("file://" + temporary.string());
    if (!is_whole_trace(temporary)) throw std::runtime_error(path.string() + ": LibTorch could not write the trace");
    if (std::rename(temporary.c_str(), path.c_str()) != 0) file_error(path, "must be replaced (is as before)", errno);
  } catch (...) {
    std::error_code ignored;
    std::filesystem::remove(temporary, ignored);
    throw;
  }
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

/// Waits for the kernels in flight, which would otherwise be missing.
GRADACCUM_INLINE void wait_for_kernels() {
  if (!at::hasCUDA()) return;
  const c10::impl::VirtualGuardImpl cuda(c10::DeviceType::CUDA);
  cuda.synchronizeDevice(cuda.getDevice().index());
}

GRADACCUM_INLINE std::vector<ProfiledEvent> KinetoSession::end(const std::filesystem::path& trace) {
  TORCH_CHECK(thread_ == std::this_thread::get_id(), "Profiler: must be finished on the thread that it was begun on");
  wait_for_kernels();
  running_ = false;
  const auto result = kineto::disableProfiler();
  auto events = events_of(*result);
  if (!trace.empty()) save_trace(*result, trace);
  return events;
}

GRADACCUM_INLINE MemoryByPhase::MemoryByPhase(std::function<void(SeeHeld)> for_each_held)
    : for_each_held_(std::move(for_each_held)) {
  std::unordered_set<const void*> known;
  for_each_held_([&](std::int64_t MemoryByKind::*, const at::Tensor& tensor) {
    for_each_storage(tensor, [&](const c10::Storage& storage) {
      if (known.insert(storage.unsafeGetStorageImpl()).second)
        older_.emplace_back(storage.getWeakStorageImpl(), static_cast<std::int64_t>(storage.nbytes()));
    });
  });
  rest_before_ = now().rest;
}

GRADACCUM_INLINE void MemoryByPhase::end(const std::string& phase) {
  auto bytes = now();
  const auto rest = bytes.rest;
  if (phase == "forward") {
    bytes.activations = std::max<std::int64_t>(rest - rest_before_, 0);
    bytes.rest = rest - bytes.activations;
  }
  rest_before_ = rest;
  const auto same = std::find_if(phases_.begin(), phases_.end(), [&](auto& of) { return of.phase == phase; });
  if (same == phases_.end())
    phases_.push_back({phase, bytes});
  else if (bytes.total() > same->bytes.total())
    same->bytes = bytes;
}

GRADACCUM_INLINE MemoryByKind MemoryByPhase::now() const {
  StorageCount count;
  MemoryByKind bytes;
  for_each_held_([&](std::int64_t MemoryByKind::*kind, const at::Tensor& tensor) { bytes.*kind += count.add(tensor); });
  bytes.rest = older_bytes() + meter_.live_bytes() - bytes.total();
  return bytes;
}

GRADACCUM_INLINE std::int64_t MemoryByPhase::older_bytes() const {
  std::int64_t bytes = 0;
  for (auto& [storage, its_bytes] : older_)
    if (!storage.expired()) bytes += its_bytes;
  return bytes;
}

GRADACCUM_INLINE void PhaseTimes::enter(const std::string& name) {
  count();
  const auto place = place_of(name);
  ++phases_[place].times;
  open_.push_back(place);
}

GRADACCUM_INLINE void PhaseTimes::leave() {
  count();
  open_.pop_back();
}

GRADACCUM_INLINE void PhaseTimes::count() {
  const auto now = Clock::now();
  (open_.empty() ? other_ : phases_[open_.back()]).time += now - std::exchange(counted_, now);
}

GRADACCUM_INLINE std::size_t PhaseTimes::place_of(const std::string& name) {
  for (std::size_t place = 0; place < phases_.size(); ++place)
    if (phases_[place].name == name) return place;
  phases_.push_back({name});
  return phases_.size() - 1;
}

GRADACCUM_INLINE std::vector<ProfiledPhase> PhaseTimes::phases() {
  count();
  // A user's phase may have that name, too.
  auto all = phases_;
  std::size_t other = 0;
  while (other < all.size() && all[other].name != other_.name) ++other;
  if (other == all.size()) all.push_back({other_.name});
  all[other].time += other_.time;

  std::chrono::duration<double> whole{};
  for (auto& phase : all) whole += phase.time;
  std::vector<ProfiledPhase> result;
  for (auto& phase : all) {
    const std::chrono::duration<double> time = phase.time;
    result.push_back({phase.name, phase.times, time.count(), whole.count() > 0 ? time / whole : 0});
  }
  return result;
}

GRADACCUM_INLINE TraceMark::TraceMark(const std::string& name)
    : record_(std::make_unique<at::RecordFunction>(at::RecordScope::USER_SCOPE)) {
  if (record_->isActive()) record_->before(std::string_view(name));
}

GRADACCUM_INLINE TraceMark::~TraceMark() = default;

}  // namespace gradaccum::detail

#undef GRADACCUM_INLINE
