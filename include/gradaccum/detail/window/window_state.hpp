// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/archive.hpp>
#include <gradaccum/detail/state/named_state.hpp>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/sparse_coo_tensor.h>
#include <c10/util/Exception.h>

#include <string>
#include <utility>

namespace gradaccum::detail {

/// The sums of a window as tensors with names: `grad.0.weight`, or `sum.0.weight` where they are kept apart; of a
/// sparse one its indices and values.
class SumsByName {
 public:
  SumsByName() = default;
  explicit SumsByName(Archive::Tensors tensors) : tensors_(std::move(tensors)) {}
  Archive::Tensors& tensors() { return tensors_; }

  void add(const std::string& slot, const std::string& name, const at::Tensor& sum) {
    if (!sum.defined()) return;
    if (!sum.is_sparse()) {
      tensors_.emplace(slot + "." + name, sum.detach());
      return;
    }
    const auto kind = sum.is_coalesced() ? ".coalesced." : ".sparse.";
    tensors_.emplace(slot + ".indices." + name, sum._indices());
    tensors_.emplace(slot + kind + name, sum._values().detach());
  }

  /// Takes a sum out, on the device of its parameter; undefined if there is none.
  at::Tensor take(const std::string& slot, const std::string& name, const at::Tensor& parameter) {
    const at::NoGradGuard no_grad;
    if (const auto dense = tensors_.extract(slot + "." + name)) return like(parameter, dense.mapped(), name);
    const auto indices = tensors_.extract(slot + ".indices." + name);
    if (!indices) return {};
    auto values = tensors_.extract(slot + ".sparse." + name);
    const bool coalesced = !values;
    if (coalesced) values = tensors_.extract(slot + ".coalesced." + name);
    TORCH_CHECK(values, "GradAccumulator: the state has the indices of a sparse gradient without its values: ", name);
    return sparse(parameter, indices.mapped(), values.mapped(), name)._coalesced_(coalesced);
  }

  void check_all_taken() const {
    TORCH_CHECK(tensors_.empty(), "GradAccumulator: the state has a gradient of no parameter here: ",
                tensors_.empty() ? "" : tensors_.begin()->first);
  }

 private:
  /// In the order of the parameter's numbers, as backward leaves it: a norm adds them up in that order.
  static at::Tensor like(const at::Tensor& parameter, const at::Tensor& saved, const std::string& name) {
    TORCH_CHECK(saved.sizes() == parameter.sizes() && saved.is_complex() == parameter.is_complex() &&
                    (saved.is_floating_point() || saved.is_complex()),
                "GradAccumulator: the state's gradient of ", name, " must have shape ", parameter.sizes(), ", got ",
                saved.sizes(), " (", saved.scalar_type(), ")");
    return at::empty_like(parameter, saved.scalar_type()).copy_(saved);
  }

  static at::Tensor sparse(const at::Tensor& parameter, const at::Tensor& indices, const at::Tensor& values,
                           const std::string& name) {
    TORCH_CHECK(indices.scalar_type() == at::kLong && (values.is_floating_point() || values.is_complex()),
                "GradAccumulator: the state's sparse gradient of ", name,
                " must have int64 indices and floating values");
    const auto options = parameter.options().dtype(values.scalar_type()).layout(at::kSparse);
    return at::sparse_coo_tensor(indices.to(parameter.device(), /*non_blocking=*/false, /*copy=*/true),
                                 values.to(parameter.device(), /*non_blocking=*/false, /*copy=*/true),
                                 parameter.sizes(), options);
  }

  Archive::Tensors tensors_;
};

}  // namespace gradaccum::detail
