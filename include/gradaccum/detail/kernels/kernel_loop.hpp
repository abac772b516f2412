// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/kernels/dense.hpp>
#include <gradaccum/detail/kernels/element_loop.hpp>
#include <gradaccum/detail/kernels/kernels.hpp>

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

namespace gradaccum::detail {

/// Runs kernels over all CPU parameters in one parallel loop, or in several if many parameters must be copied.
template <class Operand>
class KernelLoop {
 public:
  using Kernel = void (*)(const Operand&, std::int64_t from, std::int64_t count);

  /// Kernels get a multiple of `alignment` elements, except at the end of an array.
  explicit KernelLoop(std::size_t size, std::int64_t alignment = ElementLoop::cache_line)
      : alignment_(alignment), loop_(alignment) {
    dense_.reserve(size);
    operands_.reserve(size);
    kernels_.reserve(size);
  }

  /// `kernel_for(parameter's dtype, gradient's dtype, instruction set, stochastic rounding)` returns the kernel.
  template <class KernelFor>
  void add(Operand operand, const KernelFor& kernel_for, const at::Tensor& parameter, const at::Tensor& gradient,
           std::optional<std::uint64_t> rounding_key) {
    dense_.emplace_back(parameter, in_reach(gradient, parameter, operand.numbers.multiplier), working_type(parameter));
    const auto p = dense_.back().parameter(), g = dense_.back().gradient();
    operand.parameter = p.mutable_data_ptr();
    operand.gradient = g.const_data_ptr();
    operand.rounding_key = rounding_key.value_or(0);
    operands_.push_back(std::move(operand));
    kernels_.push_back(kernel_for(p.scalar_type(), g.scalar_type(), instruction_set(), rounding_key.has_value()));
    loop_.add(p.numel());
    copied_ += dense_.back().copied();
    if (copied_ > most_copied) run();
  }

  void run() {
    loop_.run([this](std::size_t i, std::int64_t from, std::int64_t count, std::int64_t) {
      kernels_[i](operands_[i], from, count);
    });
    for (auto& dense : dense_) dense.write_back();
    loop_ = ElementLoop(alignment_);
    dense_.clear();
    operands_.clear();
    kernels_.clear();
    copied_ = 0;
  }

 private:
  static at::ScalarType working_type(const at::Tensor& parameter) {
    return parameter.scalar_type() == at::kComplexHalf ? state_type(parameter) : parameter.scalar_type();
  }
  /// Multiplies a float64 sum right away, since without the multiplier it may exceed the range of float32.
  static at::Tensor in_reach(const at::Tensor& gradient, const at::Tensor& parameter, double& multiplier) {
    if (at::elementSize(gradient.scalar_type()) <= at::elementSize(state_type(parameter))) return gradient;
    return gradient.mul(std::exchange(multiplier, 1.0));
  }

  std::int64_t alignment_;
  ElementLoop loop_;
  std::vector<DenseOperands> dense_;
  std::vector<Operand> operands_;
  std::vector<Kernel> kernels_;
  std::int64_t copied_ = 0;
};

}  // namespace gradaccum::detail
