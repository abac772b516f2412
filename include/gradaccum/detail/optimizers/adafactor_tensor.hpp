// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/kernels/dense.hpp>
#include <gradaccum/detail/kernels/kernels.hpp>
#include <gradaccum/detail/kernels/numbers.hpp>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace gradaccum::detail {

/// One parameter's step of Adafactor, with all that it reads and writes. State is row-major.
struct AdafactorStep {
  AdafactorSettings settings;
  at::Tensor parameter, gradient, row_var, col_var, variance, exp_avg;
  std::optional<std::uint64_t> rounding_key = {};  ///< of stochastic rounding
};

/// Whole rows of a tensor, or elements of a vector; of small matrices several.
struct AdafactorPiece {
  std::int64_t from, to, part;
  double parameter_squares = 0, update_squares = 0;
};

/// A parameter on the CPU, and the memory of its step. It is cut into pieces, which do not depend on the number of
/// threads, and whose sums are added in their order.
class AdafactorTensor {
 public:
  AdafactorTensor(const AdafactorStep& step, double multiplier);

  // The passes: all pieces are summed, then all matrices have their factors, then the updates are measured.
  void sum(AdafactorPiece& piece) const;
  void make_factors(std::int64_t matrix) const { kernels_.factors(operand_, matrix); }
  void measure_update(AdafactorPiece& piece) const {
    piece.update_squares = kernels_.update_squares(operand_, piece.from, piece.to);
  }
  void set_step_size();
  void move(const AdafactorPiece& piece) const { kernels_.move(operand_, piece.from, piece.to); }
  void write_back() const { detail::write_back(owner_, parameter_); }

  std::vector<AdafactorPiece>& pieces() { return pieces_; }
  /// Matrices of which pieces have but a part; those of others are done with in `sum`.
  std::int64_t cut_matrices() const { return operand_.parts > 1 ? operand_.matrices : 0; }
  std::int64_t elements() const { return parameter_.numel(); }
  std::int64_t extra_elements() const { return extra_elements_; }  ///< that it has beside the parameter's own

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

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/optimizers/adafactor_tensor.ipp>
#endif
