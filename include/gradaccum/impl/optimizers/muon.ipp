// SPDX-License-Identifier: Apache-2.0
// Muon: groups matrices of equal shape, and makes their directions orthogonal.
#pragma once

#include <gradaccum/optim/muon.hpp>

#include <gradaccum/autocast.hpp>
#include <gradaccum/detail/kernels/dense.hpp>
#include <gradaccum/detail/optimizers/device_batches.hpp>
#include <gradaccum/detail/optimizers/steps.hpp>

#include <ATen/ops/baddbmm.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum::detail {

/// The steps of parameters on the CPU.
class CpuSteps final : public DeviceStep {
 public:
  CpuSteps(std::vector<ElementStep> steps, const Multiplier& multiplier)
      : steps_(std::move(steps)), multiplier_(multiplier) {}
  void allocate(Scratch& /*scratch*/) override {}
  void run() override { step_on_cpu(steps_, host_number(multiplier_)); }

 private:
  std::vector<ElementStep> steps_;
  Multiplier multiplier_;
};

/// Makes matrices [n, rows, columns] orthogonal in their memory, by the iterations of Newton and Schulz.
class NewtonSchulz final : public DeviceStep {
 public:
  NewtonSchulz(const at::Tensor& matrices, const optim::MuonOptions& by, at::ScalarType dtype)
      : wide_(matrices.size(1) > matrices.size(2) ? matrices.mT() : matrices), by_(by), dtype_(dtype) {}

  void allocate(Scratch& scratch) override {
    const auto n = wide_.size(0), rows = wide_.size(1), columns = wide_.size(2);
    const auto memory = [&](std::int64_t height, std::int64_t width) {
      const auto flat = scratch.tensor(n * height * width, dtype_);
      return flat.defined() ? flat.view({n, height, width}) : flat;
    };
    norm_ = memory(1, 1);
    gram_ = memory(rows, rows);
    polynomial_ = memory(rows, rows);
    next_ = memory(rows, columns);
    // A product into transposed memory takes a hundred times longer.
    if (!wide_.is_contiguous() || wide_.scalar_type() != dtype_) copy_ = memory(rows, columns);
  }

  void run() override {
    const auto [a, b, c] = by_.ns_coefficients();
    auto x = copy_.defined() ? copy_.copy_(wide_) : wide_;
    at::linalg_vector_norm_out(norm_, x, 2, at::IntArrayRef{1, 2}, /*keepdim=*/true);
    x.div_(norm_.clamp_min_(by_.eps()));
    for (std::int64_t i = 0; i < by_.ns_steps(); ++i) {
      at::bmm_out(gram_, x, x.mT());
      at::baddbmm_out(polynomial_, gram_, gram_, gram_, /*beta=*/b, /*alpha=*/c);
      at::baddbmm_out(next_, x, polynomial_, x, /*beta=*/a, /*alpha=*/1);
      std::swap(x, next_);
    }
    if (!x.is_same(wide_)) wide_.copy_(x);
  }

 private:
  at::Tensor wide_;  // with no more rows than columns, so that the products are small
  optim::MuonOptions by_;
  at::ScalarType dtype_;
  at::Tensor norm_, gram_, polynomial_, next_, copy_;
};

/// Matrices that are multiplied together: of one group, device, dtype and shape.
struct MuonBatch {
  const optim::MuonOptions* options;
  at::ScalarType dtype, direction;  ///< of the iterations, and of the directions before and after them
  std::int64_t rows, columns;
  std::vector<std::pair<at::Tensor, at::Tensor>> of = {};  ///< parameters and gradients

  bool takes(const MuonBatch& other) const {
    return options == other.options && dtype == other.dtype && direction == other.direction && rows == other.rows &&
           columns == other.columns && of.front().first.device() == other.of.front().first.device() &&
           static_cast<std::int64_t>(of.size() + 1) * rows * columns <= most_copied;
  }
};

GRADACCUM_INLINE double adjusted_rate(const optim::MuonOptions& by, double rows, double columns) {
  using enum optim::MuonAdjustLr;
  if (by.adjust_lr_fn() == original) return by.lr() * std::sqrt(std::max(1.0, rows / columns));
  if (by.adjust_lr_fn() == match_rms_adamw) return by.lr() * 0.2 * std::sqrt(std::max(rows, columns));
  return by.lr() * std::sqrt(rows / columns);
}

}  // namespace gradaccum::detail

namespace gradaccum::optim {

GRADACCUM_INLINE void MuonOptions::check() const {
  TORCH_CHECK(lr() >= 0, "Muon: lr must be >= 0, got ", lr());
  TORCH_CHECK(weight_decay() >= 0, "Muon: weight_decay must be >= 0, got ", weight_decay());
  TORCH_CHECK(momentum() >= 0 && momentum() <= 1, "Muon: momentum must be in [0, 1], got ", momentum());
  TORCH_CHECK(eps() >= 0, "Muon: eps must be >= 0, got ", eps());
  TORCH_CHECK(ns_steps() >= 0 && ns_steps() < 100, "Muon: ns_steps must be in [0, 100), got ", ns_steps());
  TORCH_CHECK(adjust_lr_fn() >= MuonAdjustLr::original && adjust_lr_fn() <= MuonAdjustLr::spectral_unclamped,
              "Muon: adjust_lr_fn must be a value of MuonAdjustLr, got ", static_cast<int>(adjust_lr_fn()));
  const auto type = ns_dtype();
  TORCH_CHECK(type == at::ScalarType::Undefined || type == at::kBFloat16 || type == at::kFloat || type == at::kDouble,
              "Muon: ns_dtype must be bfloat16, float32 or float64, got ", type);
}

GRADACCUM_INLINE void Muon::check_group(const torch::optim::OptimizerParamGroup& group) {
  const bool flatten = static_cast<const MuonOptions&>(group.options()).flatten();
  std::string others;
  bool any_has_more = false;
  for (auto& parameter : group.params()) {
    if (parameter.dim() == 2 || (flatten && parameter.dim() > 2) || parameter.numel() == 0) continue;
    others += (others.empty() ? "" : ", ") + c10::str(parameter.sizes());
    any_has_more = any_has_more || parameter.dim() > 2;
  }
  TORCH_CHECK(others.empty(), "Muon: its parameters must be matrices, got shapes ", others,
              any_has_more ? "; flatten(true) takes those of more dimensions as matrices of [out, all others]" : "",
              "; give the others to AdamW: for (auto& p : model->parameters()) (p.dim() == 2 ? matrices : "
              "others).push_back(p); and step both by MultiOptimizer(muon, adamw)");
}

GRADACCUM_INLINE at::ScalarType Muon::ns_dtype(const MuonOptions& options, const at::Tensor& parameter) {
  if (options.ns_dtype() != at::ScalarType::Undefined) return options.ns_dtype();
  if (parameter.scalar_type() == at::kDouble) return at::kDouble;
  return is_bf16_fast(parameter.device()) ? at::kBFloat16 : at::kFloat;
}

GRADACCUM_INLINE detail::PreparedStep Muon::prepare_steps(const detail::GradientOf& gradient_of,
                                                          const detail::Multiplier& multiplier) {
  std::vector<detail::MuonBatch> batches;
  for (auto& group : param_groups()) {
    const auto& options = static_cast<const MuonOptions&>(group.options());
    check(options);  // may have been changed or loaded
    check_group(group);
    for (auto& parameter : group.params()) {
      const auto& gradient = gradient_of(parameter);
      if (!gradient.defined() || parameter.numel() == 0) continue;
      detail::check_can_be_stepped(name, parameter, gradient);
      TORCH_CHECK(!parameter.is_complex(), "Muon: a parameter must be real, got ", parameter.scalar_type());
      TORCH_CHECK(!gradient.is_sparse(), "Muon: a gradient must be dense, got a sparse one for a parameter of shape ",
                  parameter.sizes(), "; use AdamW, or an embedding that is not sparse");
      const auto rows = parameter.size(0);
      const auto dtype = ns_dtype(options, parameter), state = detail::state_type(parameter);
      const auto direction =
          state == at::kFloat && dtype == at::kBFloat16 ? dtype : state;  // the state has its precision
      const detail::MuonBatch alone{
          &options, dtype, direction, rows, parameter.numel() / rows, {{parameter, gradient}}};
      const auto batch = std::ranges::find_if(batches, [&](auto& of) { return of.takes(alone); });
      batch == batches.end() ? batches.push_back(alone) : batch->of.push_back(alone.of.front());
    }
  }

  std::vector<detail::ElementStep> directions, updates;
  detail::StepPlan plan;
  std::vector<std::pair<at::Device, std::unique_ptr<detail::DeviceStep>>> products;
  for (auto& batch : batches) {
    const auto& by = *batch.options;
    const auto number = static_cast<std::int64_t>(batch.of.size());
    const auto all = at::empty({number, batch.rows, batch.columns},
                               batch.of.front().first.options().dtype(batch.direction).requires_grad(false));
    const MuonUpdateStep update{
        detail::adjusted_rate(by, static_cast<double>(batch.rows), static_cast<double>(batch.columns)),
        detail::one_minus_product(by.lr(), by.weight_decay())};
    for (std::int64_t i = 0; i < number; ++i) {
      auto& [parameter, gradient] = batch.of[static_cast<std::size_t>(i)];
      const auto direction = all.select(0, i).view(parameter.sizes());
      const auto* const known = known_state(parameter);
      auto& step = directions.emplace_back(
          detail::ElementStep{MuonDirectionStep{by.momentum(), by.nesterov()}, direction, gradient});
      if (known) step.state[0] = known->of[0];
      detail::prepare(step, multiplier);
      updates.push_back({update, parameter, direction});
    }
    products.emplace_back(all.device(), std::make_unique<detail::NewtonSchulz>(all, by, batch.dtype));
  }

  std::vector<detail::ElementStep> on_cpu, on_devices;
  for (auto& step : directions) (step.parameter.is_cpu() ? on_cpu : on_devices).push_back(step);
  if (!on_devices.empty()) plan_steps(plan, on_devices, multiplier, name);
  if (!on_cpu.empty()) plan.add(at::kCPU, std::make_unique<detail::CpuSteps>(on_cpu, multiplier));
  for (auto& [device, product] : products) plan.add(device, std::move(product));
  auto finish = [this, directions = std::move(directions)](auto& stepped) {
    for (std::size_t i = 0; i < stepped.size(); ++i) state_of(stepped[i].parameter).of[0] = directions[i].state[0];
  };
  return prepared<detail::ElementStep>(std::move(plan), {.found_inf = multiplier.found_inf}, std::move(updates),
                                       std::move(finish));
}

}  // namespace gradaccum::optim

#undef GRADACCUM_INLINE
