// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/optimizers/own_optimizer.hpp>
#include <gradaccum/detail/optimizers/param_states.hpp>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace gradaccum::optim {

/// The moments of one parameter: codes of 8 bits with their scales, or float tensors where it is small.
class Adam8bitParamState : public detail::OwnParamState {
 public:
  GRADACCUM_INLINE std::unique_ptr<torch::optim::OptimizerParamState> clone() const override;
  GRADACCUM_INLINE std::vector<std::pair<std::string, at::Tensor*>> tensors() override;
  GRADACCUM_INLINE void check(const at::Tensor& parameter) const override;
  bool coded() const { return exp_avg.defined() && exp_avg.scalar_type() == at::kByte; }
  /// Files have elements row by row, and scales are of blocks as they lay in memory: codes go back to that order.
  void restore_order();

  at::Tensor exp_avg, exp_avg_sq, exp_avg_scale, exp_avg_sq_scale;
  at::Tensor order;  ///< of codes that do not lie row by row: their dimensions, those with the largest strides first
};

}  // namespace gradaccum::optim

namespace gradaccum::detail {

/// What Adam8bit and AdamW8bit share: all but where the weight decay goes.
template <class Derived, class Options>
class Adam8bitOptimizer : public OwnOptimizer<Derived, Options, optim::Adam8bitParamState> {
 public:
  using Adam8bitOptimizer::OwnOptimizer::OwnOptimizer;
  Adam8bitOptimizer(Adam8bitOptimizer&&) = default;
  Adam8bitOptimizer& operator=(Adam8bitOptimizer&&) = default;
  GRADACCUM_INLINE ~Adam8bitOptimizer() override;

  /// Smaller tensors, and those of other dtypes than float32, bfloat16 and float16, keep their moments as floats.
  static constexpr std::int64_t smallest_coded = 4096;

  static void check(const Options& options);

 protected:
  void move_blocks(const GradientOf& gradient_of, const Multiplier& multiplier, bool decoupled);
};

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/optimizers/adam8bit_optimizer.ipp>
#endif
