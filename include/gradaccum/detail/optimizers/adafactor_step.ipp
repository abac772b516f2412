// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/optimizers/adafactor_step.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/kernels/dense.hpp>
#include <gradaccum/detail/kernels/element_loop.hpp>

#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/full.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <utility>

namespace gradaccum::detail {

/// All passes over some tensors; `each(count, body)` calls `body(i)` for each i below `count`.
template <class Each>
void take_passes(const std::vector<AdafactorTensor*>& tensors, const Each& each) {
  std::vector<std::pair<AdafactorTensor*, AdafactorPiece*>> pieces, cut;
  std::vector<std::pair<AdafactorTensor*, std::int64_t>> matrices;
  for (auto* tensor : tensors) {
    for (auto& piece : tensor->pieces()) pieces.emplace_back(tensor, &piece);
    for (std::int64_t i = 0; i < tensor->cut_matrices(); ++i) matrices.emplace_back(tensor, i);
    if (tensor->cut_matrices() > 0)
      for (auto& piece : tensor->pieces()) cut.emplace_back(tensor, &piece);
  }
  each(pieces.size(), [&](std::size_t i) { pieces[i].first->sum(*pieces[i].second); });
  each(matrices.size(), [&](std::size_t i) { matrices[i].first->make_factors(matrices[i].second); });
  each(cut.size(), [&](std::size_t i) { cut[i].first->measure_update(*cut[i].second); });
  for (auto* tensor : tensors) tensor->set_step_size();
  each(pieces.size(), [&](std::size_t i) { pieces[i].first->move(*pieces[i].second); });
}

/// Tensors that leave enough work for all threads are each one thread's alone: a gradient is still in its cache from
/// pass to pass, and nobody waits. Large ones are cut.
GRADACCUM_INLINE void take_passes(std::vector<AdafactorTensor>& tensors) {
  const auto parallel = [](std::size_t count, const auto& body) {
    if (count == 1) return body(0);  // threads would take longer to start
    if (count > 1)
      parallel_for(static_cast<std::int64_t>(count), [&](std::int64_t i) { body(static_cast<std::size_t>(i)); });
  };
  const auto serial = [](std::size_t count, const auto& body) {
    for (std::size_t i = 0; i < count; ++i) body(i);
  };
  std::vector<AdafactorTensor*> whole, large;
  std::int64_t elements = 0;
  for (auto& tensor : tensors) elements += tensor.elements();
  const auto threads = at::get_num_threads();
  for (auto& tensor : tensors) (2 * threads * tensor.elements() <= elements ? whole : large).push_back(&tensor);
  std::stable_sort(whole.begin(), whole.end(), [](auto* a, auto* b) { return a->elements() > b->elements(); });
  const auto hands = static_cast<std::size_t>(threads);
  parallel(std::min(hands, whole.size()), [&](std::size_t first) {
    for (auto i = first; i < whole.size(); i += hands) take_passes({whole[i]}, serial);
  });
  take_passes(large, parallel);
  for (auto& tensor : tensors) tensor.write_back();
}

GRADACCUM_INLINE void take_on_cpu(const std::vector<AdafactorStep>& steps, double multiplier) {
  std::vector<AdafactorTensor> tensors;
  std::int64_t extra = 0;
  for (auto& step : steps) {
    if (step.parameter.numel() == 0) continue;
    tensors.emplace_back(step, multiplier);
    extra += tensors.back().extra_elements();
    if (extra <= most_copied) continue;
    take_passes(tensors);
    tensors.clear();
    extra = 0;
  }
  take_passes(tensors);
}

/// The gradient divided by the root of the estimate of its square, which moves on.
GRADACCUM_INLINE at::Tensor update_on_device(const AdafactorStep& step, const at::Tensor& gradient) {
  const auto& by = step.settings;
  const auto average = [&](const at::Tensor& variance, const at::Tensor& fresh) {
    variance.mul_(1 - by.fresh2).add_(fresh.add(by.pytorch ? 0 : by.eps1), by.fresh2);
  };
  const auto square = gradient.square();
  at::Tensor estimate;
  if (step.variance.defined()) {
    average(step.variance, square);
    estimate = step.variance;
  } else {
    average(step.row_var, square.mean(-1, /*keepdim=*/true));
    average(step.col_var, square.mean(-2, /*keepdim=*/true));
    const auto mean = step.row_var.mean(-2, /*keepdim=*/true);
    estimate = step.row_var / (by.pytorch ? mean.clamp_min(by.eps1) : mean) * step.col_var;
  }
  const auto root = estimate.sqrt();
  return gradient / (by.pytorch ? root.clamp_min(by.eps1) : root);  // eps1^2 may be 0 in float32
}

/// Multiplied before it is narrowed: a sum may be out of reach of float32 until then.
GRADACCUM_INLINE at::Tensor multiplied_gradient(const AdafactorStep& step, const Multiplier& by) {
  const auto type = state_type(step.parameter);
  const auto narrow = at::elementSize(step.gradient.scalar_type()) < at::elementSize(type);
  const auto gradient = narrow ? step.gradient.to(type) : step.gradient;
  return by.is_one() ? gradient : gradient.mul(by.on(gradient.device()));
}

GRADACCUM_INLINE void take_on_device(const AdafactorStep& step, const Multiplier& multiplier) {
  const auto& by = step.settings;
  const auto count = static_cast<double>(step.parameter.numel());
  if (step.parameter.numel() == 0) return;
  const DenseOperands operands(step.parameter, multiplied_gradient(step, multiplier), state_type(step.parameter),
                               step.rounding_key);
  const auto p = operands.parameter();
  auto step_size = at::full({}, by.step_size, p.options());
  if (by.scale_parameter) step_size.mul_((p.norm() / std::sqrt(count)).clamp_min_(by.eps2));
  auto update = update_on_device(step, operands.gradient());
  if (by.pytorch)
    p.mul_(1 - by.lr * by.weight_decay);
  else if (by.weight_decay != 0)
    p.mul_(1 - by.weight_decay * step_size);
  update.mul_(step_size / (update.norm() / (std::sqrt(count) * by.d)).clamp_min_(1));
  if (step.exp_avg.defined()) update = step.exp_avg.mul_(by.beta1).add_(update, 1 - by.beta1);
  p.sub_(update);
  operands.write_back();
}

GRADACCUM_INLINE void take_on_device(const std::vector<AdafactorStep>& steps, const Multiplier& multiplier) {
  for (auto& step : steps) take_on_device(step, multiplier);
}

}  // namespace gradaccum::detail
