// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/optimizers/adafactor_step.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/kernels/dense.hpp>
#include <gradaccum/detail/kernels/element_loop.hpp>
#include <gradaccum/detail/optimizers/adafactor_kernel_moves.hpp>
#include <gradaccum/detail/optimizers/batches.hpp>
#include <gradaccum/detail/optimizers/kernel_moves.hpp>

#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/div.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/mean.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/mul.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <memory>
#include <optional>
#include <utility>

namespace gradaccum::detail {

/// Runs all passes over some tensors. `each(count, body)` calls `body(i)` for each i below `count`.
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

/// Gives each small tensor to a single thread, whose cache keeps the gradient from pass to pass and which never waits
/// for others. Splits tensors that are too large to balance the threads.
GRADACCUM_INLINE void take_passes(std::vector<AdafactorTensor>& tensors) {
  const auto parallel = [](std::size_t count, const auto& body) {
    if (count == 1) return body(0);  // starting threads would take longer
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

/// The 0-dim factors of a step on a device, computed there such that a skipped step changes nothing.
struct AdafactorWeights {
  AdafactorWeights(const AdafactorSettings& settings, const Multiplier& multiplier, at::Device device,
                   at::ScalarType dtype)
      : by(settings), left_out(left_out_on(device, multiplier)) {
    const auto number = [&](double value) {
      return at::full({}, value, at::TensorOptions(at::kDouble).device(device));
    };
    fresh2 = number(by.fresh2);
    step_size = number(by.step_size);
    if (multiplier.left_out.defined()) {
      const auto step = (by.step - multiplier.left_out.to(device, /*non_blocking=*/true).to(at::kDouble)).clamp_min_(1);
      fresh2 = step.pow(by.beta2_decay);
      if (by.relative_step) step_size = at::minimum(by.warmup_init ? 1e-6 * step : number(by.lr), step.rsqrt());
    }
    keep_if_left_out(fresh2, 0);
    kept2 = (1 - fresh2).to(dtype);
    fresh2 = fresh2.to(dtype);
    step_size = step_size.to(dtype);
    kept1 = number(by.beta1).to(dtype);
    keep_if_left_out(kept1, 1);
  }

  bool fit(const AdafactorSettings& settings, at::Device device, at::ScalarType dtype) const {
    return settings == by && step_size.device() == device && step_size.scalar_type() == dtype;
  }

  /// Sets `factor` to `value`, which must leave everything unchanged, if the step is skipped.
  void keep_if_left_out(const at::Tensor& factor, double value) const {
    if (left_out.defined()) factor.masked_fill_(left_out, value);
  }

  AdafactorSettings by;
  at::Tensor left_out, fresh2, kept2, step_size, kept1;
};

/// One parameter's step on a device.
class AdafactorMove final : public Move {
 public:
  AdafactorMove(const AdafactorStep& step, const Multiplier& multiplier, const AdafactorWeights& weights)
      : step_(step), operands_(multiplier), weights_(weights) {
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
    step_size_.copy_(weights_.step_size);
    if (by().scale_parameter) step_size_.mul_(root_mean_square(p).clamp_min_(by().eps2));
    make_update(operands_.gradients().front());
    decay(p);
    step_size_.div_(root_mean_square(update_).div_(by().d).clamp_min_(1));
    p.sub_(with_momentum(update_.mul_(step_size_)));
    operands_.write_back();
  }

 private:
  const AdafactorSettings& by() const { return weights_.by; }

  at::Tensor root_mean_square(const at::Tensor& all) {
    return at::linalg_vector_norm_out(norm_, all, 2).div_(std::sqrt(static_cast<double>(all.numel())));
  }

  /// Updates the running estimate of the squared gradient, and divides the gradient by its root.
  void make_update(const at::Tensor& gradient) {
    at::mul_out(update_, gradient, gradient);
    weights_.keep_if_left_out(update_, 0);
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
      at::div_out(row_, step_.row_var, by().pytorch ? means.clamp_min_(by().eps1) : means);
      at::mul_out(update_, row_, step_.col_var);
    }
    update_.sqrt_();
    if (by().pytorch) update_.clamp_min_(by().eps1);  // eps1^2 may be 0 in float32
    at::div_out(update_, gradient, update_);
    weights_.keep_if_left_out(update_, 0);
  }

  void move_on(const at::Tensor& average, at::Tensor fresh) const {
    average.mul_(weights_.kept2).addcmul_(fresh.add_(by().pytorch ? 0 : by().eps1), weights_.fresh2);
  }

  void decay(const at::Tensor& p) {
    if (by().weight_decay == 0) return;
    if (by().pytorch)
      norm_.fill_(1 - by().lr * by().weight_decay);
    else
      norm_.copy_(step_size_).mul_(-by().weight_decay).add_(1);
    weights_.keep_if_left_out(norm_, 1);
    p.mul_(norm_);
  }

  at::Tensor with_momentum(const at::Tensor& update) const {
    if (!step_.exp_avg.defined()) return update;
    step_.exp_avg.mul_(weights_.kept1).add_(update, 1 - by().beta1);
    if (!weights_.left_out.defined()) return step_.exp_avg;
    return update.copy_(step_.exp_avg).masked_fill_(weights_.left_out, 0);
  }

  AdafactorStep step_;
  DeviceOperands operands_;
  AdafactorWeights weights_;
  at::Tensor update_, step_size_, norm_, row_, col_, means_;
};

GRADACCUM_INLINE void add_aten_moves(Moves& moves, const std::vector<AdafactorStep>& steps,
                                     const Multiplier& multiplier) {
  std::optional<AdafactorWeights> weights;
  for (auto& step : steps) {
    const auto device = step.parameter.device();
    const auto dtype = state_type(step.parameter);
    if (!weights || !weights->fit(step.settings, device, dtype))
      weights.emplace(step.settings, multiplier, device, dtype);
    moves.add(device, std::make_unique<AdafactorMove>(step, multiplier, *weights));
  }
}

GRADACCUM_INLINE void add_moves(Moves& moves, const std::vector<AdafactorStep>& steps, const Multiplier& multiplier) {
  std::vector<AdafactorStep> with_elements;
  for (auto& step : steps)
    if (step.parameter.numel() > 0) with_elements.push_back(step);
  add_moves_by_kernels(moves, with_elements, multiplier);
}

}  // namespace gradaccum::detail
