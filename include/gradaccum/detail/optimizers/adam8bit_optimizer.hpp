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

/// The moments of one parameter: 8-bit codes with their scales, or float tensors if the parameter is small.
class Adam8bitParamState : public detail::OwnParamState {
 public:
  GRADACCUM_INLINE std::unique_ptr<torch::optim::OptimizerParamState> clone() const override;
  GRADACCUM_INLINE std::vector<std::pair<std::string, at::Tensor*>> tensors() override;
  GRADACCUM_INLINE void check(const at::Tensor& parameter) const override;
  bool coded() const { return exp_avg.defined() && exp_avg.scalar_type() == at::kByte; }
  /// Restores the memory order of codes from a file. Files are row-major, but scales belong to blocks in memory order.
  void restore_order();

  at::Tensor exp_avg, exp_avg_sq, exp_avg_scale, exp_avg_sq_scale;
  at::Tensor order;  ///< the codes' dimensions by descending stride; undefined if they are row-major
};

}  // namespace gradaccum::optim

namespace gradaccum::detail {

/// The base of Adam8bit and AdamW8bit, which differ only in how they apply the weight decay.
template <class Derived, class Options>
class Adam8bitOptimizer : public OwnOptimizer<Derived, Options, optim::Adam8bitParamState> {
 public:
  using Adam8bitOptimizer::OwnOptimizer::OwnOptimizer;
  Adam8bitOptimizer(Adam8bitOptimizer&&) = default;
  Adam8bitOptimizer& operator=(Adam8bitOptimizer&&) = default;
  GRADACCUM_INLINE ~Adam8bitOptimizer() override;

  /// The least size for 8-bit moments, which also need float32, bfloat16 or float16. Other tensors keep float moments.
  static constexpr std::int64_t smallest_coded = 4096;

  static void check(const Options& options);

 protected:
  void move_blocks(const GradientOf& gradient_of, const Multiplier& multiplier, bool decoupled);
};

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/optimizers/adam8bit_optimizer.ipp>
#endif
