// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/optim/adafactor_options.hpp>

#include <gradaccum/archive.hpp>
#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/kernels/dense.hpp>

#include <ATen/core/ivalue.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <torch/optim/serialize.h>
#include <torch/serialize/archive.h>

#include <cmath>
#include <cstdint>

namespace gradaccum::detail {

/// Calls `visit(name, tensor, shape)` for each state tensor that a step of the parameter needs.
template <class Visit>
void for_each_needed(optim::AdafactorParamState& state, const at::Tensor& parameter, bool momentum,
                     const Visit& visit) {
  if (parameter.dim() < 2) {
    visit("variance", state.variance(), parameter.sizes());
  } else {
    auto rows = parameter.sizes().vec(), columns = rows;
    rows.back() = columns[columns.size() - 2] = 1;
    visit("row_var", state.row_var(), at::IntArrayRef(rows));
    visit("col_var", state.col_var(), at::IntArrayRef(columns));
  }
  if (momentum) visit("exp_avg", state.exp_avg(), parameter.sizes());
}

}  // namespace gradaccum::detail

namespace gradaccum::optim {

GRADACCUM_INLINE void AdafactorOptions::check() const {
  const auto [eps1, eps2] = eps();
  const auto not_negative = [](const char* what, double value) {
    TORCH_CHECK(value >= 0 && std::isfinite(value), "Adafactor: ", what, " must be finite and >= 0, got ", value);
  };
  not_negative("lr", lr());
  not_negative("eps[0], of the squared gradient,", eps1);
  not_negative("eps[1], of the parameter's RMS,", eps2);
  not_negative("weight_decay", weight_decay());
  TORCH_CHECK(beta2_decay() <= 0 && std::isfinite(beta2_decay()),
              "Adafactor: beta2_decay must be finite and <= 0, got ", beta2_decay());
  TORCH_CHECK(d() > 0, "Adafactor: d must be > 0, got ", d(), "; infinity switches clipping off");
  TORCH_CHECK(beta1() >= 0 && beta1() < 1, "Adafactor: beta1 must be in [0, 1), got ", beta1());
  TORCH_CHECK(relative_step() || !warmup_init(), "Adafactor: warmup_init must come with relative_step, got it without");
  TORCH_CHECK(variant() == AdafactorVariant::paper || variant() == AdafactorVariant::pytorch,
              "Adafactor: variant must be AdafactorVariant::paper or pytorch, got ", static_cast<int>(variant()));
}

GRADACCUM_INLINE void AdafactorOptions::serialize(torch::serialize::OutputArchive& archive) const {
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(lr);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(beta2_decay);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(eps);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(d);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(weight_decay);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(beta1);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(relative_step);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(warmup_init);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(scale_parameter);
  archive.write("variant", c10::IValue(static_cast<std::int64_t>(variant())));
}

GRADACCUM_INLINE void AdafactorOptions::state(Archive& archive) {
  archive("lr", lr_);
  archive("beta2_decay", beta2_decay_);
  archive("eps1", std::get<0>(eps_));
  archive("eps2", std::get<1>(eps_));
  archive("d", d_);
  archive("weight_decay", weight_decay_);
  archive("beta1", beta1_);
  archive("relative_step", relative_step_);
  archive("warmup_init", warmup_init_);
  archive("scale_parameter", scale_parameter_);
  auto number = static_cast<std::int64_t>(variant());
  archive("variant", number);
  variant_ = static_cast<AdafactorVariant>(number);
  check();
}

GRADACCUM_INLINE void AdafactorOptions::serialize(torch::serialize::InputArchive& archive) {
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, lr);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, beta2_decay);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(eps_t, eps);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, d);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, weight_decay);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, beta1);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(bool, relative_step);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(bool, warmup_init);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(bool, scale_parameter);
  c10::IValue number;
  archive.read("variant", number);
  TORCH_CHECK(number.toInt() == 0 || number.toInt() == 1, "Adafactor: a file's variant must be 0 or 1, got ",
              number.toInt());
  variant(static_cast<AdafactorVariant>(number.toInt()));
  check();
}

GRADACCUM_INLINE bool operator==(const AdafactorOptions& a, const AdafactorOptions& b) {
  const auto all = [](const AdafactorOptions& of) {
    return std::tie(of.lr_, of.beta2_decay_, of.eps_, of.d_, of.weight_decay_, of.beta1_, of.relative_step_,
                    of.warmup_init_, of.scale_parameter_, of.variant_);
  };
  return all(a) == all(b);
}

GRADACCUM_INLINE std::unique_ptr<torch::optim::OptimizerParamState> AdafactorParamState::clone() const {
  return std::make_unique<AdafactorParamState>(*this);
}

GRADACCUM_INLINE std::vector<std::pair<std::string, at::Tensor*>> AdafactorParamState::tensors() {
  return {{"row_var", &row_var_}, {"col_var", &col_var_}, {"variance", &variance_}, {"exp_avg", &exp_avg_}};
}

GRADACCUM_INLINE void AdafactorParamState::check(const at::Tensor& parameter) const {
  TORCH_CHECK(step() >= 0 && step() < std::int64_t{1} << 53, "Adafactor: the step count must be >= 0, got ", step());
  auto copy = *this;  // copies handles: unneeded tensors remain in `copy`
  detail::for_each_needed(
      copy, parameter, /*momentum=*/true, [&](const char* slot, at::Tensor& state, at::IntArrayRef shape) {
        TORCH_CHECK(
            !state.defined() || (state.layout() == at::kStrided && state.sizes() == shape &&
                                 state.device() == parameter.device() && at::isFloatingType(state.scalar_type())),
            "Adafactor: state: ", slot, " must be floating, of shape ", shape, " on ", parameter.device(), ", got ",
            state.sizes(), " on ", state.device(), " (", state.scalar_type(),
            "); the state was loaded for another model");
        TORCH_CHECK(state.defined() || step() == 0 || &state == &copy.exp_avg_, "Adafactor: state: ", slot, " of step ",
                    step(), " must be there, of a parameter of shape ", parameter.sizes(), ", got none");
        state.reset();
      });
  for (auto& [slot, tensor] : copy.tensors())
    TORCH_CHECK(!tensor->defined(), "Adafactor: state: a parameter of shape ", parameter.sizes(), " has no ", slot,
                ", got one of ", tensor->sizes(), "; the state was loaded for another model");
}

GRADACCUM_INLINE void AdafactorParamState::prepare(const at::Tensor& parameter, bool momentum) {
  const auto type = detail::state_type(parameter);
  detail::for_each_needed(*this, parameter, momentum, [&](const char*, at::Tensor& state, at::IntArrayRef shape) {
    state = state.defined() ? detail::row_major(state, type) : at::zeros(shape, parameter.options().dtype(type));
  });
}

}  // namespace gradaccum::optim
