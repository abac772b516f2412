// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>

namespace gradaccum::detail {

/// Memory of one device, in which moves take turns. Until it is allocated, taking from it only finds how much the
/// largest of them needs.
class Scratch {
 public:
  explicit Scratch(at::Device device) : device_(device) {}

  /// Not initialised; undefined before `allocate()`.
  at::Tensor take(std::int64_t elements, at::ScalarType dtype);
  /// With the sizes and strides of `like`, which is plain.
  at::Tensor take(const at::Tensor& like, at::ScalarType dtype);
  /// The next move's turn: what was taken is taken again.
  void begin_turn() { used_ = 0; }

  void allocate();
  at::Device device() const { return device_; }

 private:
  at::Device device_;
  at::Tensor memory_;
  std::int64_t used_ = 0, most_ = 0;  // bytes
};

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/optimizers/scratch.ipp>
#endif
