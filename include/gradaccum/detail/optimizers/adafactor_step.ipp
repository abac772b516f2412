// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/optimizers/adafactor_step.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/kernels/dense.hpp>
#include <gradaccum/detail/kernels/element_loop.hpp>
#include <gradaccum/detail/optimizers/batches.hpp>

#include <ATen/Parallel.h>
#include <ATen/ops/div.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/mean.h>
#include <ATen/ops/mul.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <memory>
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

/// A parameter's step on a device.
class AdafactorMove final : public Move {
 public:
  AdafactorMove(const AdafactorStep& step, const Multiplier& multiplier) : step_(step), operands_(multiplier) {
    operands_.add(operand_of(step), operand_of(step).whole());
  }

  void take(Scratch& scratch) override {
    const auto dtype = state_type(step_.parameter);
    const auto number = [&] {
      const auto one = scratch.take(1, dtype);
      return one.defined() ? one.squeeze(0) : one;
    };
    operands_.take(scratch);
    update_ = scratch.take(operands_.layout(), dtype);
    step_size_ = number();
    norm_ = number();
    if (step_.variance.defined()) return;
    row_ = scratch.take(step_.row_var, dtype);
    col_ = scratch.take(step_.col_var, dtype);
    means_ = scratch.take(step_.row_var.numel() / step_.row_var.size(-2), dtype);
  }

  void run() override {
    operands_.read();
    auto p = operands_.parameters().front();
    set_step_size(p);
    make_update(operands_.gradients().front());
    decay(p);
    step_size_.div_(root_mean_square(update_).div_(step_.settings.d).clamp_min_(1));
    p.sub_(with_momentum(update_.mul_(step_size_)));
    operands_.write_back();
  }

 private:
  void set_step_size(const at::Tensor& p) {
    const auto& by = step_.settings;
    step_size_.fill_(by.step_size);
    if (by.scale_parameter) step_size_.mul_(root_mean_square(p).clamp_min_(by.eps2));
  }

  at::Tensor root_mean_square(const at::Tensor& numbers) {
    return at::linalg_vector_norm_out(norm_, numbers, 2).div_(std::sqrt(static_cast<double>(numbers.numel())));
  }

  /// The gradient divided by the root of the estimate of its square, which moves on.
  void make_update(const at::Tensor& gradient) {
    const auto& by = step_.settings;
    at::mul_out(update_, gradient, gradient);
    if (step_.variance.defined()) {
      move_on(step_.variance, update_);
      update_.copy_(step_.variance);
    } else {
      move_on(step_.row_var, at::mean_out(row_, update_, -1, /*keepdim=*/true));
      move_on(step_.col_var, at::mean_out(col_, update_, -2, /*keepdim=*/true));
      auto sizes = step_.row_var.sizes().vec();
      sizes[sizes.size() - 2] = 1;
      auto means = means_.view(sizes);
      at::mean_out(means, step_.row_var, -2, /*keepdim=*/true);
      at::div_out(row_, step_.row_var, by.pytorch ? means.clamp_min_(by.eps1) : means);
      at::mul_out(update_, row_, step_.col_var);
    }
    update_.sqrt_();
    if (by.pytorch) update_.clamp_min_(by.eps1);  // eps1^2 may be 0 in float32
    at::div_out(update_, gradient, update_);
  }

  void move_on(const at::Tensor& average, at::Tensor fresh) const {
    const auto& by = step_.settings;
    average.mul_(1 - by.fresh2).add_(fresh.add_(by.pytorch ? 0 : by.eps1), by.fresh2);
  }

  void decay(const at::Tensor& p) {
    const auto& by = step_.settings;
    if (by.pytorch)
      p.mul_(1 - by.lr * by.weight_decay);
    else if (by.weight_decay != 0)
      p.mul_(norm_.copy_(step_size_).mul_(-by.weight_decay).add_(1));
  }

  at::Tensor with_momentum(const at::Tensor& update) const {
    if (!step_.exp_avg.defined()) return update;
    return step_.exp_avg.mul_(step_.settings.beta1).add_(update, 1 - step_.settings.beta1);
  }

  AdafactorStep step_;
  DeviceOperands operands_;
  at::Tensor update_, step_size_, norm_, row_, col_, means_;
};

GRADACCUM_INLINE void add_moves(Moves& moves, const std::vector<AdafactorStep>& steps, const Multiplier& multiplier) {
  for (auto& step : steps)
    if (step.parameter.numel() > 0)
      moves.add(step.parameter.device(), std::make_unique<AdafactorMove>(step, multiplier));
}

}  // namespace gradaccum::detail
