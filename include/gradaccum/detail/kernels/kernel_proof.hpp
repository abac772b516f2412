// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/kernels/device/launch.hpp>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace gradaccum::detail {

/// What `prove()` has found of a kernel on a device; asked once in a process. If it is not so, a warning says it.
bool is_proved(const DeviceKernels& kernels, at::Device device, const std::string& name, const OperandTypes& types,
               const std::function<bool()>& prove);

/// Tensors of some thousand numbers for a trial, each other ones; always the same.
class TrialNumbers {
 public:
  explicit TrialNumbers(at::Device device) : device_(device) {}
  at::Tensor of(at::ScalarType dtype) const;        ///< in [-1, 1]
  at::Tensor positive(at::ScalarType dtype) const;  ///< in (0, 1]

 private:
  at::Device device_;
  mutable std::int64_t taken_ = 0;
};

/// A tensor of a trial's results, and how far two of them may be apart: relatively, and where they are small.
struct TrialResult {
  at::Tensor tensor;
  double relative, absolute;
};
/// With the tolerance of its dtype.
TrialResult trial_result(const at::Tensor& tensor);

bool are_close(const std::vector<TrialResult>& a, const std::vector<TrialResult>& b);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/kernels/kernel_proof.ipp>
#endif
