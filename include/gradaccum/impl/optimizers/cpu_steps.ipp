// SPDX-License-Identifier: Apache-2.0
// Runs steps of single elements on the CPU, in one loop over all parameters.
#pragma once

#include <gradaccum/detail/optimizers/steps.hpp>

#include <gradaccum/detail/kernels/dense.hpp>
#include <gradaccum/detail/kernels/kernel_loop.hpp>

#include <algorithm>
#include <cstddef>
#include <vector>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum::detail {

/// Runs kernels over all CPU parameters in one parallel loop, or in several if many parameters must be copied.
class KernelLoop {
 public:
  explicit KernelLoop(const std::vector<ElementStep>& steps) : alignment_(alignment_of(steps)), loop_(alignment_) {
    taken_.reserve(steps.size());
  }

  void add(const ElementStep& step, Operand operand) {
    const auto& parameter = step.parameter;
    const auto dtype = parameter.scalar_type() == at::kComplexHalf ? state_type(parameter) : parameter.scalar_type();
    const auto stepped = in_order_of(plain_layout_of(parameter), parameter, dtype);
    const auto read = in_reach(step.gradient, parameter, operand.multiplier);
    const auto ordered = in_order_of(stepped, read, gradient_type(stepped, read));
    const auto p = as_real(stepped), g = as_real(ordered);
    operand.parameter = p.mutable_data_ptr();
    operand.gradient = g.const_data_ptr();
    taken_.push_back({parameter, stepped, ordered, operand, step.kernel(p.scalar_type(), g.scalar_type())});
    loop_.add(p.numel());
    copied_ += (stepped.is_same(parameter) ? 0 : parameter.numel()) + (ordered.is_same(read) ? 0 : read.numel());
    if (copied_ > most_copied) run();
  }

  void run() {
    loop_.run([this](std::size_t i, std::int64_t from, std::int64_t count, std::int64_t) {
      taken_[i].kernel(taken_[i].operand, from, count);
    });
    for (auto& step : taken_) write_back(step.parameter, step.stepped);
    loop_ = ElementLoop(alignment_);
    taken_.clear();
    copied_ = 0;
  }

 private:
  struct Taken {
    at::Tensor parameter;
    at::Tensor stepped, gradient;  ///< plain and of equal order: the parameter and its gradient, or copies
    Operand operand;
    Kernel* kernel;
  };

  /// Kernels of 8-bit moments get whole blocks, except at the end of an array.
  static std::int64_t alignment_of(const std::vector<ElementStep>& steps) {
    const bool any_coded = std::ranges::any_of(steps, [](auto& step) { return step.settings.is_coded(); });
    return any_coded ? eight_bit_block : ElementLoop::cache_line;
  }

  std::int64_t alignment_;
  ElementLoop loop_;
  std::vector<Taken> taken_;
  std::int64_t copied_ = 0;
};

GRADACCUM_INLINE void step_on_cpu(const std::vector<ElementStep>& steps, double multiplier) {
  KernelLoop loop(steps);
  Operand operand;
  operand.multiplier = multiplier;
  const ElementStep* last = nullptr;
  for (auto& step : steps) {
    if (!step.parameter.is_cpu()) continue;
    if (!last || !(step.settings == last->settings)) operand.numbers = step.settings.numbers();
    last = &step;
    operand.state = step.pointers();
    operand.rounding_key = step.rounding_key.value_or(0);
    step.rows ? step_rows(step, operand) : loop.add(step, operand);
  }
  loop.run();
}

}  // namespace gradaccum::detail

#undef GRADACCUM_INLINE
