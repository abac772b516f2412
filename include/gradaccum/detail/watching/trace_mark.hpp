// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <memory>
#include <string>

namespace at {
struct RecordFunction;
}

namespace gradaccum::detail {

/// A name that a trace shows for the lifetime of this object, if a profiler runs.
class TraceMark {
 public:
  explicit TraceMark(const std::string& name);
  TraceMark(const TraceMark&) = delete;
  TraceMark& operator=(const TraceMark&) = delete;
  ~TraceMark();

 private:
  std::unique_ptr<at::RecordFunction> record_;
};

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/watching/trace_mark.ipp>
#endif
