// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/memory_by_kind.hpp>
#include <gradaccum/memory_meter.hpp>
#include <gradaccum/profile_report.hpp>

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/FunctionRef.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace gradaccum::detail {

/// The memory by kind at the end of each phase. Counts what a `MemoryMeter` counts from construction on, and older
/// memory of the known kinds until it is freed.
class MemoryByPhase {
 public:
  using SeeHeld = c10::function_ref<void(std::int64_t MemoryByKind::*kind, const at::Tensor& tensor)>;

  /// `for_each_held` enumerates the tensors of all known kinds, as TrainerBase does.
  explicit MemoryByPhase(std::function<void(SeeHeld)> for_each_held);

  /// Ends a phase, and keeps its memory if it is the largest so far for that name. Memory that "forward" has added
  /// counts as activations at its end, and as rest from the next phase on.
  void end(const std::string& phase);

  const std::vector<ProfiledMemory>& phases() const { return phases_; }
  std::int64_t peak_bytes() const { return older_bytes() + meter_.peak_bytes(); }

 private:
  MemoryByKind now() const;
  std::int64_t older_bytes() const;

  std::function<void(SeeHeld)> for_each_held_;
  std::vector<std::pair<c10::weak_intrusive_ptr<c10::StorageImpl>, std::int64_t>> older_;
  std::vector<ProfiledMemory> phases_;
  std::int64_t rest_before_ = 0;
  MemoryMeter meter_;
};

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/watching/memory_by_phase.ipp>
#endif
