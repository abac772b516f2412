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

/// Makes tensors of numbers for a trial, each of other ones; always the same.
class TrialNumbers {
 public:
  TrialNumbers(at::Device device, std::int64_t size, bool at_odd_places)
      : device_(device), size_(size), odd_(at_odd_places ? 1 : 0) {}

  std::int64_t size() const { return size_; }
  at::Tensor of(at::ScalarType dtype) const { return of(dtype, size_); }              ///< in [-1, 1]
  at::Tensor positive(at::ScalarType dtype) const { return positive(dtype, size_); }  ///< in (0, 2)
  /// Of other sizes.
  at::Tensor of(at::ScalarType dtype, at::IntArrayRef sizes) const;
  at::Tensor positive(at::ScalarType dtype, at::IntArrayRef sizes) const;

 private:
  at::Device device_;
  std::int64_t size_, odd_;
  mutable std::int64_t taken_ = 0;
};
/// Some, for tensors that are tried together: more than a block of threads, at odd places, and few.
std::vector<TrialNumbers> all_trial_numbers(at::Device device);

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
