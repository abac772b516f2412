// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/dense.hpp>
#include <gradaccum/detail/element_loop.hpp>
#include <gradaccum/detail/simd/kernels.hpp>

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace gradaccum::detail {

/// One parallel loop of kernels over all parameters on the CPU. Nothing is written before `run`.
template <class Operand>
class KernelLoop {
 public:
  using Kernel = void (*)(const Operand&, std::int64_t from, std::int64_t count);

  explicit KernelLoop(std::size_t size) {
    dense_.reserve(size);
    operands_.reserve(size);
    kernels_.reserve(size);
  }

  /// `kernel_for(parameter's type, gradient's type, instruction set)` has the kernel.
  template <class KernelFor>
  void add(Operand operand, const KernelFor& kernel_for, const at::Tensor& parameter, const at::Tensor& gradient) {
    dense_.emplace_back(parameter, gradient, working_type(parameter));
    const auto p = dense_.back().parameter(), g = dense_.back().gradient();
    operand.parameter = p.mutable_data_ptr();
    operand.gradient = g.const_data_ptr();
    operands_.push_back(std::move(operand));
    kernels_.push_back(kernel_for(p.scalar_type(), g.scalar_type(), instruction_set()));
    loop_.add(p.numel());
  }
  const Operand& last() const { return operands_.back(); }

  void run() const {
    loop_.run([this](std::size_t i, std::int64_t from, std::int64_t count, std::int64_t) {
      kernels_[i](operands_[i], from, count);
    });
    for (auto& dense : dense_) dense.write_back();
  }

 private:
  static at::ScalarType working_type(const at::Tensor& parameter) {
    const auto dtype = parameter.scalar_type();
    if (dtype == at::kComplexHalf) return state_type(parameter);
    const auto number = at::toRealValueType(dtype);
    TORCH_CHECK(number == at::kDouble || number == at::kFloat || number == at::kHalf || number == at::kBFloat16,
                "optimizer: a parameter must be of a floating or complex type of 16 bits or more, got ", dtype);
    return dtype;
  }

  ElementLoop loop_;
  std::vector<DenseOperands> dense_;
  std::vector<Operand> operands_;
  std::vector<Kernel> kernels_;
};

}  // namespace gradaccum::detail
