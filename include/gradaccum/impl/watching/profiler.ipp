// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/profiler.hpp>

#include <gradaccum/detail/io/files.hpp>
#include <gradaccum/detail/watching/operation_table.hpp>

#include <c10/util/Exception.h>

#include <algorithm>
#include <sstream>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum {

struct Profiler::Parts {
  std::filesystem::path directory;
  detail::KinetoSession session{"Profiler"};
  detail::PhaseTimes times = {};
};

namespace detail {

GRADACCUM_INLINE const std::filesystem::path& made_directory(const std::filesystem::path& directory) {
  if (!directory.empty()) make_directory(directory);
  return directory;
}

/// Checks a phase's name, which Kineto writes to its file unescaped.
GRADACCUM_INLINE const std::string& checked_phase_name(const std::string& name) {
  const auto is_plain = [](unsigned char c) { return c >= ' ' && c != '"' && c != '\\' && c != 127; };
  TORCH_CHECK(!name.empty() && std::all_of(name.begin(), name.end(), is_plain),
              "Profiler: a phase's name must have no quote, backslash or control character, got '", name, "'");
  return name;
}

GRADACCUM_INLINE void write_profile(const std::filesystem::path& directory, const ProfileReport& report) {
  std::ostringstream stream;
  stream << report;
  const auto text = stream.str();
  replace_file(directory / "profile.txt", [&](OutputFile& file) { file.write(text.data(), text.size()); });
}

}  // namespace detail

GRADACCUM_INLINE Profiler::Profiler(ProfilerOptions options)
    : parts_(new Parts{detail::made_directory(options.directory)}) {}

GRADACCUM_INLINE Profiler::Profiler() : Profiler(ProfilerOptions()) {}

GRADACCUM_INLINE Profiler::~Profiler() = default;

GRADACCUM_INLINE Profiler::Parts& Profiler::running() const {
  TORCH_CHECK(parts_->session.running(), "Profiler: is finished; make another");
  return *parts_;
}

GRADACCUM_INLINE Profiler::Phase::Phase(Profiler& profiler, const std::string& name)
    : profiler_(profiler), mark_(detail::checked_phase_name(name)) {
  profiler.running().times.enter(name);
}

GRADACCUM_INLINE Profiler::Phase::~Phase() { profiler_.parts_->times.leave(); }

GRADACCUM_INLINE ProfileReport Profiler::finish(ProfileReport report) {
  auto& parts = running();
  TORCH_CHECK(!parts.times.in_phase(), "Profiler: finish() inside of a phase, whose scope must end before");
  report.phases = parts.times.phases();
  report.seconds = 0;
  for (auto& phase : report.phases) report.seconds += phase.seconds;
  const auto& directory = parts.directory;
  const auto events = parts.session.end(directory.empty() ? directory : directory / "trace.json");
  report.operations = detail::OperationTable(events).by_time();
  if (!directory.empty()) detail::write_profile(directory, report);
  return report;
}

}  // namespace gradaccum

#undef GRADACCUM_INLINE
