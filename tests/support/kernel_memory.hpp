// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/kernels/device/launch.hpp>

#include "support/emulated_cuda/emulated_cuda.hpp"
#include "support/guarded_memory.hpp"

#include <torch/types.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>

namespace testing {

/// A copy of a tensor for kernels of devices, which detects accesses around it: by inaccessible pages on the host,
/// where the emulated device runs kernels, and by checking bytes on a GPU.
class KernelMemory {
 public:
  explicit KernelMemory(const at::Tensor& numbers, bool at_front = false) {
    if (emulated_cuda::is_loaded()) {
      guarded_ = std::make_unique<GuardedMemory>(numbers, at_front);
      tensor_ = guarded_->tensor();
      return;
    }
    const auto bytes = static_cast<std::int64_t>(numbers.nbytes());
    begin_ = margin + (at_front ? static_cast<std::int64_t>(numbers.element_size()) : 0);
    all_ = torch::full({begin_ + bytes + margin}, untouched, torch::dtype(torch::kByte).device(torch::kCUDA));
    tensor_ = all_.narrow(0, begin_, bytes).view(numbers.scalar_type()).view(numbers.sizes()).copy_(numbers);
  }

  void* data() const { return tensor_.mutable_data_ptr(); }
  /// Returns the copy on the CPU after all kernels have finished.
  at::Tensor result() const {
    if (all_.defined()) {
      const auto after = begin_ + static_cast<std::int64_t>(tensor_.nbytes());
      const bool intact = all_.narrow(0, 0, begin_).eq(untouched).all().item<bool>() &&
                          all_.narrow(0, after, margin).eq(untouched).all().item<bool>();
      if (!intact) throw std::runtime_error("KernelMemory: a kernel wrote beside its array");
    }
    return tensor_.cpu().clone();
  }

 private:
  static constexpr std::int64_t margin = 256, untouched = 0xA5;

  std::unique_ptr<GuardedMemory> guarded_;
  std::int64_t begin_ = 0;
  at::Tensor all_, tensor_;
};

/// A factor with parts that only the device knows.
class KernelMultiplier {
 public:
  KernelMultiplier(double numerator = 1, double denominator = 1, std::optional<double> device_numerator = {},
                   std::optional<double> device_denominator = {}, std::optional<float> found_inf = {},
                   std::optional<float> skipped_steps = {})
      : by_{.numerator = numerator, .denominator = denominator} {
    by_.device_numerator = keep(device_numerator, places_[0]);
    by_.device_denominator = keep(device_denominator, places_[1]);
    by_.found_inf = keep(found_inf, places_[2]);
    by_.skipped_steps = keep(skipped_steps, places_[3]);
  }
  const gradaccum::detail::DeviceMultiplier& pointers() const { return by_; }

 private:
  template <class T>
  static const T* keep(std::optional<T> number, std::unique_ptr<KernelMemory>& place) {
    if (!number) return nullptr;
    place = std::make_unique<KernelMemory>(torch::tensor(*number, c10::CppTypeToScalarType<T>::value));
    return static_cast<const T*>(place->data());
  }

  std::unique_ptr<KernelMemory> places_[4];
  gradaccum::detail::DeviceMultiplier by_;
};

/// Returns whether two tensors are equal up to rounding of their dtype, with NaNs at the same positions.
inline bool close_to_rounding(const at::Tensor& a, const at::Tensor& b) {
  const auto dtype = a.scalar_type();
  const double tolerance = dtype == at::kDouble  ? 1e-12
                           : dtype == at::kFloat ? 1e-5
                           : dtype == at::kHalf  ? 2e-3
                                                 : 1.6e-2;
  return dtype == b.scalar_type() && a.sizes() == b.sizes() &&
         at::allclose(a.to(at::kDouble), b.to(at::kDouble), tolerance, tolerance / 10, /*equal_nan=*/true);
}

}  // namespace testing
