// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>

namespace gradaccum::detail {

/// The memory of one device that moves use in turn. Before `allocate()`, `take` only measures how much they need.
class Scratch {
 public:
  explicit Scratch(at::Device device) : device_(device) {}

  /// Returns uninitialised memory; undefined before `allocate()`.
  at::Tensor take(std::int64_t elements, at::ScalarType dtype);
  /// Returns memory with the sizes and strides of `like`, which must be plain.
  at::Tensor take(const at::Tensor& like, at::ScalarType dtype);
  /// Starts the next move, which reuses the memory of the previous one.
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
