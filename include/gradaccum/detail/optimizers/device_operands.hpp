// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/optimizers/scratch.hpp>
#include <gradaccum/detail/window/multiplier.hpp>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

namespace gradaccum::detail {

/// Elements of a tensor, as they lie in memory: `[from, to)` of its real numbers; or all, wherever they lie.
struct Extent {
  std::int64_t from, to;
  bool whole;

  std::int64_t size() const { return to - from; }
  at::Tensor of(const at::Tensor& tensor) const;
};

/// A parameter and its gradient, to be stepped by ATen's operations, or by a kernel of our own.
struct DeviceOperand {
  at::Tensor parameter, gradient;
  std::optional<std::uint64_t> rounding_key;
  bool by_kernel = false;  ///< which takes dtypes and a factor as they are, and rounds
  bool row_major = false;  ///< for one that knows rows and columns

  /// What it has to be copied for is a factor (`multiplied`), dtype, or the order of the elements.
  bool copies_parameter() const;
  bool copies_gradient(bool multiplied) const;
  bool copied(bool multiplied) const { return copies_parameter() || copies_gradient(multiplied); }

  Extent whole() const;
  at::Tensor layout() const;  ///< a tensor of the sizes and strides that copies have
  at::ScalarType dtype_of_parameter() const, dtype_of_gradient() const;  ///< of copies
  /// In parts of `most_copied` elements at most, where the order of the elements allows it.
  std::vector<Extent> cut() const;
};

/// For operations that leave out a step by themselves.
std::optional<at::Tensor> found_inf_on(at::Device device, const Multiplier& multiplier);
/// For others: a bool; undefined where no step is left out.
at::Tensor left_out_on(at::Device device, const Multiplier& multiplier);

/// Float32 numbers become such as bfloat16 has, of those on either side at random. Of the memory of `random_bits`
/// (int32) and `is_nan` (bool), nothing is kept.
void round_stochastically_(const at::Tensor& numbers, std::uint64_t key, at::Tensor random_bits, at::Tensor is_nan);

/// Parameters and gradients of one move, in the memory in which they are computed with: their own, or copies. All are
/// on one device, and of one dtype where they are computed with.
class DeviceOperands {
 public:
  explicit DeviceOperands(Multiplier by) : by_(std::move(by)) {}
  void add(const DeviceOperand& operand, const Extent& extent);

  /// Sizes and strides of the first's copies.
  const at::Tensor& layout() const { return parts_.front().layout; }

  void take(Scratch& scratch);
  /// Fills the copies. The gradients have their true size then.
  void read();
  std::vector<at::Tensor> parameters() const;
  std::vector<at::Tensor> gradients() const;
  /// Ends the step.
  void write_back() const;

 private:
  struct Part {
    DeviceOperand of;
    at::Tensor layout;               // whose sizes and strides copies have
    at::Tensor parameter, gradient;  // the user's
    at::Tensor parameter_copy = {}, gradient_copy = {}, random_bits = {}, is_nan = {};

    const at::Tensor& stepped() const { return parameter_copy.defined() ? parameter_copy : parameter; }
  };

  std::vector<Part> parts_;
  Multiplier by_;
  at::Tensor factor_, wide_factor_;  // known on the device only: in the dtype that is computed with, and in float64
};

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/optimizers/device_operands.ipp>
#endif
