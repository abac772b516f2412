// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/trainer/fit_scope.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/memory/occupied_memory.hpp>
#include <gradaccum/memory_meter.hpp>

#include <c10/util/Exception.h>

namespace gradaccum::detail {

GRADACCUM_INLINE FitStatus& checked_status(FitStatus& status, const FitOptions& options) {
  check(options);
  TORCH_CHECK(!status.running, "Trainer: fit() inside of fit(), in a policy say; there is step() for one micro-batch");
  return status;
}

GRADACCUM_INLINE FitScope::FitScope(torch::nn::Module& model, c10::Device device, FitStatus& status,
                                    const FitStatus& begin)
    : mode_(model, true), device_(device), status_(checked_status(status, begin.options)) {
  const bool together = status_.together;
  status_ = begin;
  status_.together = together;
  status_.running = true;
  if (begin.options.measure_memory && MemoryMeter::possible()) meter_.emplace();
}

GRADACCUM_INLINE FitScope::~FitScope() {
  status_.options = {};
  status_.running = false;
}

GRADACCUM_INLINE FitReport FitScope::report() const {
  auto report = report_of(status_);
  if (const auto bytes = occupied_memory(device_)) report.occupied_bytes[device_.str()] = *bytes;
  report.peak_resident_bytes = peak_resident_memory().value_or(0);
  if (!meter_) return report;
  for (const auto device : {c10::Device(c10::kCPU), device_})
    if (const auto peak = meter_->peak_bytes(device); peak > 0) report.peak_bytes[device.str()] = peak;
  return report;
}

}  // namespace gradaccum::detail
