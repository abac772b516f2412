// SPDX-License-Identifier: Apache-2.0
// Folds, saves and loads the sums of a window.
#pragma once

#include <gradaccum/detail/window/window_sums.hpp>

#include <gradaccum/detail/state/pieces.hpp>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/sparse_coo_tensor.h>
#include <c10/util/Exception.h>

#include <unordered_set>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum::detail {

GRADACCUM_INLINE void WindowSums::set_parameters(const std::vector<at::Tensor>& parameters) {
  std::unordered_set<const void*> known;
  std::vector<at::Tensor> distinct, apart;
  for (auto& parameter : parameters) {
    TORCH_CHECK(parameter.defined(), "Gradients: a parameter is an undefined tensor");
    if (!known.insert(parameter.unsafeGetTensorImpl()).second) continue;
    distinct.push_back(parameter);
    auto& sum = apart.emplace_back();
    for (std::size_t i = 0; i < size(); ++i)
      if (parameters_[i].is_same(parameter)) sum = apart_[i];
  }
  parameters_ = std::move(distinct);
  apart_ = std::move(apart);
}

GRADACCUM_INLINE void WindowSums::fold(std::size_t place, std::optional<at::ScalarType> dtype) {
  at::NoGradGuard no_grad;
  auto& gradient = parameters_[place].mutable_grad();
  auto& sum = apart_[place];
  const auto begins = [&] { return dtype && at::elementSize(gradient.scalar_type()) < at::elementSize(*dtype); };
  if (!gradient.defined() || (!sum.defined() && !begins())) return;
  if (!sum.defined())
    sum = gradient.detach().to(*dtype);
  else if (sum.is_sparse() && !gradient.is_sparse())  // ATen adds a sparse tensor to a dense one, not the reverse
    sum = gradient.detach().to(sum.scalar_type()).add_(sum);
  else
    sum.add_(gradient);
  gradient.reset();
}

GRADACCUM_INLINE void add_sum(WindowSums::Named& named, const std::string& slot, const std::string& name,
                              const at::Tensor& sum) {
  if (!sum.defined()) return;
  if (!sum.is_sparse()) {
    named.emplace(slot + "." + name, sum.detach());
    return;
  }
  const auto kind = sum.is_coalesced() ? ".coalesced." : ".sparse.";
  named.emplace(slot + ".indices." + name, sum._indices());
  named.emplace(slot + kind + name, sum._values().detach());
}

/// Copies a loaded sum into the parameter's memory order, which backward uses and in which a norm is summed.
GRADACCUM_INLINE at::Tensor dense_sum(const at::Tensor& parameter, const at::Tensor& saved, const std::string& name) {
  TORCH_CHECK(saved.sizes() == parameter.sizes() && saved.is_complex() == parameter.is_complex() &&
                  (saved.is_floating_point() || saved.is_complex()),
              "GradAccumulator: the state's gradient of ", name, " must have shape ", parameter.sizes(), ", got ",
              saved.sizes(), " (", saved.scalar_type(), ")");
  return at::empty_like(parameter, saved.scalar_type()).copy_(saved);
}

/// Removes a sum from `named` and returns it on its parameter's device; undefined if there is none.
GRADACCUM_INLINE at::Tensor extract_sum(WindowSums::Named& named, const std::string& slot, const std::string& name,
                                        const at::Tensor& parameter) {
  const at::NoGradGuard no_grad;
  if (const auto dense = named.extract(slot + "." + name)) return dense_sum(parameter, dense.mapped(), name);
  const auto indices = named.extract(slot + ".indices." + name);
  if (!indices) return {};
  auto values = named.extract(slot + ".sparse." + name);
  const bool coalesced = !values;
  if (coalesced) values = named.extract(slot + ".coalesced." + name);
  TORCH_CHECK(values, "GradAccumulator: the state has the indices of a sparse gradient without its values: ", name);
  const auto dtype = values.mapped().scalar_type();
  TORCH_CHECK(indices.mapped().scalar_type() == at::kLong && (at::isFloatingType(dtype) || at::isComplexType(dtype)),
              "GradAccumulator: the state's sparse gradient of ", name, " must have int64 indices and floating values");
  const auto copied = [&](const at::Tensor& saved) {
    return saved.to(parameter.device(), /*non_blocking=*/false, /*copy=*/true);
  };
  return at::sparse_coo_tensor(copied(indices.mapped()), copied(values.mapped()), parameter.sizes(),
                               parameter.options().dtype(dtype).layout(at::kSparse))
      ._coalesced_(coalesced);
}

GRADACCUM_INLINE WindowSums::Named WindowSums::named(const NameOf& name_of) const {
  Named named;
  for (std::size_t i = 0; i < size(); ++i) {
    add_sum(named, "grad", name_of(parameters_[i]), parameters_[i].grad());
    add_sum(named, "sum", name_of(parameters_[i]), apart_[i]);
  }
  return named;
}

GRADACCUM_INLINE WindowSums::Loaded WindowSums::load(Named named, const NameOf& name_of, bool lenient) const {
  Loaded all;
  for (auto& parameter : parameters_) {
    at::Tensor gradient, sum;
    try {
      const auto& name = name_of(parameter);
      sum = extract_sum(named, "sum", name, parameter);
      gradient = extract_sum(named, "grad", name, parameter);
      TORCH_CHECK(!gradient.defined() || gradient.scalar_type() == parameter.scalar_type(),
                  "GradAccumulator: the state's gradient of ", name, " must be ", parameter.scalar_type(), ", got ",
                  gradient.scalar_type());
    } catch (const c10::Error&) {
      if (!lenient) throw;
      gradient.reset();
    }
    all.in_grad.push_back(gradient);
    all.apart.push_back(sum);
  }
  TORCH_CHECK(lenient || named.empty(),
              "GradAccumulator: the state has a gradient that no parameter here has: ", named.begin()->first);
  return all;
}

GRADACCUM_INLINE WindowSums::Loaded WindowSums::copies() const {
  const auto copied = [](const at::Tensor& sum) { return sum.defined() ? sum.detach().clone() : at::Tensor(); };
  Loaded copies;
  for (std::size_t i = 0; i < size(); ++i) {
    copies.in_grad.push_back(copied(parameters_[i].grad()));
    copies.apart.push_back(copied(apart_[i]));
  }
  return copies;
}

}  // namespace gradaccum::detail

#undef GRADACCUM_INLINE
