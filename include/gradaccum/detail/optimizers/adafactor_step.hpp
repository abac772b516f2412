// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/gradients.hpp>

#include <gradaccum/detail/kernels/dense.hpp>
#include <gradaccum/detail/kernels/device/launch.hpp>
#include <gradaccum/detail/kernels/kernel_loop.hpp>
#include <gradaccum/detail/kernels/numbers.hpp>
#include <gradaccum/detail/optimizers/step_plan.hpp>
#include <gradaccum/detail/window/window_gradients.hpp>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace gradaccum::detail {

/// One parameter's Adafactor step, with the tensors that it reads and writes. The state is row-major.
struct AdafactorStep {
  AdafactorSettings settings;
  at::Tensor parameter, gradient, row_var, col_var, variance, exp_avg;
  std::optional<std::uint64_t> rounding_key = {};  ///< set for stochastic rounding
};

/// A range of whole rows, or of elements of a vector. May span several small matrices.
struct AdafactorPiece {
  std::int64_t from, to, part;
  double parameter_squares = 0, update_squares = 0;
};

/// A parameter on the CPU, and its step's memory. Its pieces do not depend on the number of threads, and their sums are
/// added in order, so neither does the result.
class AdafactorTensor {
 public:
  AdafactorTensor(const AdafactorStep& step, double multiplier);

  // The passes, in this order. Each must finish for the whole tensor before the next begins.
  void sum(AdafactorPiece& piece) const;
  void make_factors(std::int64_t matrix) const { kernels_.factors(operand_, matrix); }
  void measure_update(AdafactorPiece& piece) const {
    piece.update_squares = kernels_.update_squares(operand_, piece.from, piece.to);
  }
  void set_step_size();
  void move(const AdafactorPiece& piece) const { kernels_.move(operand_, piece.from, piece.to); }
  void write_back() const { detail::write_back(owner_, parameter_); }

  std::vector<AdafactorPiece>& pieces() { return pieces_; }
  /// The number of matrices that are split into pieces. `sum` makes the factors and measures the update of all others.
  std::int64_t cut_matrices() const { return operand_.parts > 1 ? operand_.matrices : 0; }
  std::int64_t elements() const { return parameter_.numel(); }
  std::int64_t extra_elements() const { return extra_elements_; }  ///< allocated besides the parameter's own

 private:
  void set_shape(const AdafactorStep& step);
  void cut();

  AdafactorSettings settings_;
  at::Tensor owner_, parameter_, gradient_, factors_;
  AdafactorOperand operand_;
  AdafactorKernels kernels_;
  std::vector<AdafactorPiece> pieces_;
  std::int64_t extra_elements_ = 0;
};

class StepPlan;

/// Runs the steps on the CPU in a few parallel passes; in groups if many parameters have to be copied first.
void step_on_cpu(const std::vector<AdafactorStep>& steps, double multiplier);
/// Adds steps by our own kernels if there are any, otherwise by ATen. Does not wait for the device.
void plan_steps(StepPlan& moves, const std::vector<AdafactorStep>& steps, const Multiplier& multiplier);
/// Adds steps by ATen's operations. No parameter may be empty.
void plan_aten_steps(StepPlan& moves, const std::vector<AdafactorStep>& steps, const Multiplier& multiplier);

// Overloads that `add_moves_by_kernels` needs for a step type.

/// Returns the operand of a step. Adafactor's kernels need row-major tensors.
DeviceOperand operand_of(const AdafactorStep& step, bool by_kernel = false);

/// Adds steps by our own kernels, in a few passes over many tensors.
void add_kernel_moves(StepPlan& moves, const std::vector<AdafactorStep>& steps, const Multiplier& multiplier,
                      const DeviceKernels& kernels);
}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/optimizers/adafactor.ipp>
#endif
