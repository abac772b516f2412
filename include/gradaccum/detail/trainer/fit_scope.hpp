// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/trainer/mode_guard.hpp>
#include <gradaccum/fit_options.hpp>
#include <gradaccum/fit_report.hpp>
#include <gradaccum/memory_meter.hpp>

#include <ATen/core/grad_mode.h>
#include <c10/core/Device.h>

#include <optional>

namespace torch::nn {
class Module;
}

namespace gradaccum::detail {

/// What is around a `fit`: training mode, gradients, and the memory that its report tells.
class FitScope {
 public:
  FitScope(torch::nn::Module& model, c10::Device device, FitStatus& status, const FitStatus& begin);
  FitScope(const FitScope&) = delete;
  FitScope& operator=(const FitScope&) = delete;
  ~FitScope();

  FitReport report() const;

 private:
  ModeGuard mode_;
  at::AutoGradMode grad_mode_{true};
  c10::Device device_;
  FitStatus& status_;
  std::optional<MemoryMeter> meter_;
};

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/trainer/fit_scope.ipp>
#endif
