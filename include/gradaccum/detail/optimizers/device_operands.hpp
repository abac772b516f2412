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

/// A range of a tensor's real numbers in memory order, `[from, to)`; or all of them, in any order.
struct Extent {
  std::int64_t from, to;
  bool whole;

  std::int64_t size() const { return to - from; }
  at::Tensor of(const at::Tensor& tensor) const;
};

/// A parameter and its gradient, to be stepped by ATen's operations or by our own kernel.
struct DeviceOperand {
  at::Tensor parameter, gradient;
  std::optional<std::uint64_t> rounding_key;
  bool by_kernel = false;  ///< our own kernel, which takes dtypes and a factor as they are, and rounds
  bool row_major = false;  ///< for kernels that use rows and columns

  /// True if a copy is needed: for a factor (`multiplied`), the dtype, or the order of the elements.
  bool copies_parameter() const;
  bool copies_gradient(bool multiplied) const;
  bool copied(bool multiplied) const { return copies_parameter() || copies_gradient(multiplied); }

  Extent whole() const;
  at::Tensor layout() const;  ///< a tensor with the sizes and strides of copies
  at::ScalarType dtype_of_parameter() const, dtype_of_gradient() const;  ///< dtypes of copies
  /// Splits the elements into parts of at most `most_copied`, if their order allows it.
  std::vector<Extent> cut() const;
};

/// Returns `found_inf` on `device`, for operations that skip a step by themselves.
std::optional<at::Tensor> found_inf_on(at::Device device, const Multiplier& multiplier);
/// Returns a bool for other operations, true if the step is skipped; undefined if the device never skips it.
at::Tensor left_out_on(at::Device device, const Multiplier& multiplier);

/// Rounds float32 numbers stochastically to adjacent bfloat16 values. `random_bits` (int32) and `is_nan` are scratch.
void round_stochastically_(const at::Tensor& numbers, std::uint64_t key, at::Tensor random_bits, at::Tensor is_nan);

/// The parameters and gradients of one move in the memory that is used in the computation, which is their own or
/// copies. All are on one device and, except for our own kernels, computed in one dtype.
class DeviceOperands {
 public:
  explicit DeviceOperands(Multiplier by) : by_(std::move(by)) {}
  void add(const DeviceOperand& operand, const Extent& extent);

  /// A tensor with the sizes and strides of the first operand's copies.
  const at::Tensor& layout() const { return parts_.front().layout; }

  void take(Scratch& scratch);
  /// Fills the copies, and multiplies the gradients by the factor.
  void read();
  std::vector<at::Tensor> parameters() const;
  std::vector<at::Tensor> gradients() const;
  /// Ends the step: rounds copies stochastically if requested, and writes the parameters back.
  void write_back() const;

 private:
  struct Part {
    DeviceOperand of;
    at::Tensor layout;               // has the sizes and strides of copies
    at::Tensor parameter, gradient;  // the user's
    at::Tensor parameter_copy = {}, gradient_copy = {}, random_bits = {}, is_nan = {};

    const at::Tensor& stepped() const { return parameter_copy.defined() ? parameter_copy : parameter; }
  };

  std::vector<Part> parts_;
  Multiplier by_;
  at::Tensor factor_, wide_factor_;  // known only on the device: in the computation's dtype, and in float64
};

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/optimizers/device_operands.ipp>
#endif
