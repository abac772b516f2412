// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/memory_meter.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/memory/memory_ledger.hpp>

#include <fstream>
#include <string>

namespace gradaccum {

/// An enclosing meter continues to count.
GRADACCUM_INLINE MemoryMeter::MemoryMeter()
    : ledger_(std::make_shared<detail::MemoryLedger>(detail::MemoryLedger::innermost(
          "MemoryMeter: must not start inside LibTorch's profiler, which uses the same slot"))),
      guard_(c10::DebugInfoKind::PROFILER_STATE, ledger_) {}

GRADACCUM_INLINE std::int64_t MemoryMeter::live_bytes() const { return ledger_->total().live; }
GRADACCUM_INLINE std::int64_t MemoryMeter::live_bytes(c10::Device device) const { return ledger_->of(device).live; }
GRADACCUM_INLINE std::int64_t MemoryMeter::peak_bytes() const { return ledger_->total().peak; }
GRADACCUM_INLINE std::int64_t MemoryMeter::peak_bytes(c10::Device device) const { return ledger_->of(device).peak; }
GRADACCUM_INLINE void MemoryMeter::reset_peak() { ledger_->reset_peak(); }
GRADACCUM_INLINE bool MemoryMeter::possible() { return detail::MemoryLedger::possible(); }

GRADACCUM_INLINE std::optional<std::int64_t> peak_resident_memory() {
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;)
    if (std::int64_t kilobytes = 0; word == "VmHWM:" && status >> kilobytes) return kilobytes * 1024;
  return std::nullopt;
}

}  // namespace gradaccum
