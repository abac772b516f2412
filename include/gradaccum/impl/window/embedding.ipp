// SPDX-License-Identifier: Apache-2.0
// Implements an embedding whose backward adds rows to the gradient without a sparse tensor.
#pragma once

#include <gradaccum/embedding.hpp>

#include <gradaccum/detail/window/grad_ready_hooks.hpp>

#include <ATen/core/List.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_index_put_impl.h>
#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <ATen/ops/_unique2.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/embedding_dense_backward.h>
#include <ATen/ops/where.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/custom_function.h>

#include <mutex>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum {
namespace detail {

struct RowGradients {
  at::Tensor rows, gradients;
};

/// Computes the gradients of the rows that were looked up, in ascending order. LibTorch's function sums each row in its
/// usual order, for a small table of only these rows.
GRADACCUM_INLINE RowGradients row_gradients(const at::Tensor& gradient, const at::Tensor& input,
                                            std::int64_t padding_idx) {
  const auto [rows, places, counts] = at::_unique2(input, /*sorted=*/true, /*return_inverse=*/true);
  auto summed = at::embedding_dense_backward(gradient, places, rows.size(0), /*padding_idx=*/-1, false);
  if (padding_idx >= 0) summed.masked_fill_(rows.eq(padding_idx).unsqueeze(1), 0);
  return {rows, summed};
}

/// Returns one row and gradient for each lookup, with repetitions, so that the host need not know their number. Padding
/// becomes zeros for distinct rows (there are more than lookups), since a device serialises additions to one row.
GRADACCUM_INLINE RowGradients repeated_row_gradients(const at::Tensor& gradient, const at::Tensor& input,
                                                     std::int64_t padding_idx) {
  const auto rows = input.to(at::kLong);
  if (padding_idx < 0) return {rows, gradient};
  const auto is_padding = rows.eq(padding_idx);
  return {at::where(is_padding, at::arange(rows.numel(), rows.options()).view_as(rows), rows),
          gradient.masked_fill(is_padding.unsqueeze(-1), 0)};
}

/// Implements `embedding` for a leaf that requires gradients.
class EmbeddingFunction : public torch::autograd::Function<EmbeddingFunction> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& input,
                            const at::Tensor& weight, std::int64_t padding_idx, bool sparse) {
    context->save_for_backward({input});
    context->saved_data["sparse"] = sparse;
    context->saved_data["weight"] = weight;  // needed for its gradient; its values may change
    context->saved_data["padding_idx"] = padding_idx;
    return at::embedding(weight, input, padding_idx);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    const auto input = context->get_saved_variables().front();
    const auto weight = context->saved_data["weight"].toTensor();
    const auto padding_idx = context->saved_data["padding_idx"].toInt();
    const auto& gradient = gradients.front();
    torch::autograd::variable_list results(4);
    if (!gradient.defined()) return results;
    // LibTorch cannot add sparse tensors in float16 on the CPU.
    const bool can_be_sparse =
        !at::GradMode::is_enabled() && !(gradient.is_cpu() && gradient.scalar_type() == at::kHalf);
    // A device would round the sum of a row in 16 bits at each lookup.
    const bool rounded_too_often = gradient.is_cuda() && gradient.element_size() < 4;
    if (context->saved_data["sparse"].toBool() && can_be_sparse) {
      const auto of = row_gradients(gradient, input, padding_idx);
      results[1] = at::_sparse_coo_tensor_unsafe(of.rows.to(at::kLong).unsqueeze(0), of.gradients, weight.sizes(),
                                                 of.gradients.options().layout(at::kSparse))
                       ._coalesced_(true);
    } else if (input.numel() >= weight.size(0) || rounded_too_often || !is_added_in_place(weight, gradient)) {
      results[1] = at::embedding_dense_backward(gradient, input, weight.size(0), padding_idx, false);
    } else {
      const auto of = gradient.is_cuda() ? repeated_row_gradients(gradient, input, padding_idx)
                                         : row_gradients(gradient, input, padding_idx);
      const std::lock_guard lock(adding_in_place());
      auto sum = weight.grad();
      if (sum.is_cuda())  // unsafe: the forward pass has checked the indices
        at::_index_put_impl_(sum, {of.rows}, of.gradients, /*accumulate=*/true, /*unsafe=*/true);
      else
        sum.index_add_(0, of.rows, of.gradients);
      say_added(weight);
    }
    return results;
  }
};

}  // namespace detail

GRADACCUM_INLINE at::Tensor embedding(const at::Tensor& input, const at::Tensor& weight, EmbeddingOptions options) {
  TORCH_CHECK(weight.dim() == 2, "embedding: weight must be [rows, width], got ", weight.sizes());
  TORCH_CHECK(options.padding_idx < weight.size(0), "embedding: padding_idx must be less than the rows of weight, ",
              weight.size(0), ", got ", options.padding_idx);
  if (!weight.requires_grad() || !weight.is_leaf() || !at::GradMode::is_enabled())
    return at::embedding(weight, input, options.padding_idx);
  return detail::EmbeddingFunction::apply(input, weight, options.padding_idx, options.sparse);
}

}  // namespace gradaccum

#undef GRADACCUM_INLINE
