// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/kernels/kernel_proof.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/kernels/device_kernels.hpp>

#include <ATen/ops/abs.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/arange.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>
#include <c10/util/accumulate.h>

#include <cstddef>

namespace gradaccum::detail {

GRADACCUM_INLINE bool is_proved(const DeviceKernels& kernels, at::Device device, const std::string& name,
                                const OperandTypes& types, const std::function<bool()>& prove) {
  const KernelFinding finding{&kernels, static_cast<int>(device.index()), name, types};
  if (const auto known = known_finding(finding)) return *known;
  TORCH_CHECK(!kernels.is_capturing(native_stream(device)), "gradaccum: the first step with ", to_string(finding),
              " on ", device,
              " is tried beside ATen's, which cannot be captured for a CUDA graph; take one step before");
  // So that what earlier operations have failed of is not taken for the kernel's failure.
  c10::impl::VirtualGuardImpl(device.type()).synchronizeDevice(device.index());
  bool proved = false;
  std::string problem = "does not do what ATen does";
  try {
    proved = prove();
  } catch (const c10::OutOfMemoryError&) {
    throw;
  } catch (const c10::Error& error) {  // such as of a device for which it was not compiled
    problem = std::string("fails (") + error.what_without_backtrace() + ")";
  }
  if (keep_finding(finding, proved) && !proved)
    TORCH_WARN("gradaccum: on ", device, " (", kernels.describe(static_cast<int>(device.index())), "), the kernel of ",
               to_string(finding), " ", problem, "; it is left to ATen from now on. Please report it");
  return *known_finding(finding);
}

/// Places that are odd are not aligned for more than a number at a time.
GRADACCUM_INLINE at::Tensor TrialNumbers::of(at::ScalarType dtype, at::IntArrayRef sizes) const {
  const auto count = c10::multiply_integers(sizes) + odd_;
  const auto numbers = at::arange(count, at::kDouble).mul_(0.37 + 0.11 * static_cast<double>(++taken_)).sin_();
  return numbers.to(dtype).to(device_).slice(0, odd_).view(sizes);
}

GRADACCUM_INLINE std::vector<TrialNumbers> all_trial_numbers(at::Device device) {
  return {{device, elements_of_block + 1003, false}, {device, 500, true}, {device, 3, false}};
}

GRADACCUM_INLINE at::Tensor TrialNumbers::positive(at::ScalarType dtype, at::IntArrayRef sizes) const {
  return of(dtype, sizes).abs_().add_(0.01);
}

GRADACCUM_INLINE TrialResult trial_result(const at::Tensor& tensor) {
  const auto dtype = tensor.scalar_type();
  const double tolerance = dtype == at::kDouble  ? 1e-12
                           : dtype == at::kFloat ? 1e-5
                           : dtype == at::kHalf  ? 2e-3
                                                 : 1.6e-2;
  return {tensor, tolerance, tolerance / 10};
}

GRADACCUM_INLINE bool are_close(const std::vector<TrialResult>& a, const std::vector<TrialResult>& b) {
  bool close = a.size() == b.size();
  for (std::size_t i = 0; close && i < a.size(); ++i)
    close = at::allclose(a[i].tensor.cpu().to(at::kDouble), b[i].tensor.cpu().to(at::kDouble), a[i].relative,
                         a[i].absolute, /*equal_nan=*/true);
  return close;
}

}  // namespace gradaccum::detail
