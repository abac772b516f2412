// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/memory/occupied_memory.hpp>
#include <gradaccum/detail/trainer/mode_guard.hpp>
#include <gradaccum/fit_options.hpp>
#include <gradaccum/fit_report.hpp>
#include <gradaccum/memory_meter.hpp>

#include <ATen/core/grad_mode.h>
#include <c10/core/Device.h>
#include <c10/util/Exception.h>
#include <torch/nn/module.h>

#include <optional>

namespace gradaccum::detail {

/// What is around a `fit`: training mode, gradients, and the memory that its report tells.
class FitScope {
 public:
  FitScope(torch::nn::Module& model, c10::Device device, FitStatus& status, const FitStatus& begin)
      : mode_(model, true), device_(device), status_(checked(status, begin.options)) {
    const bool together = status_.together;
    status_ = begin;
    status_.together = together;
    status_.running = true;
    if (begin.options.measure_memory && MemoryMeter::possible()) meter_.emplace();
  }
  FitScope(const FitScope&) = delete;
  FitScope& operator=(const FitScope&) = delete;
  ~FitScope() {
    status_.options = {};
    status_.running = false;
  }

  FitReport report() const {
    auto report = report_of(status_);
    if (const auto bytes = occupied_memory(device_)) report.occupied_bytes[device_.str()] = *bytes;
    if (!meter_) return report;
    for (const auto device : {c10::Device(c10::kCPU), device_})
      if (const auto peak = meter_->peak_bytes(device); peak > 0) report.peak_bytes[device.str()] = peak;
    return report;
  }

 private:
  static FitStatus& checked(FitStatus& status, const FitOptions& options) {
    check(options);
    TORCH_CHECK(!status.running,
                "Trainer: fit() inside of fit(), in a callback say; there is step() for one micro-batch");
    return status;
  }

  ModeGuard mode_;
  at::AutoGradMode grad_mode_{true};
  c10::Device device_;
  FitStatus& status_;
  std::optional<MemoryMeter> meter_;
};

}  // namespace gradaccum::detail
