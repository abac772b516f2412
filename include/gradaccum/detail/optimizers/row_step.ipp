// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/optimizers/row_step.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/kernels/dense.hpp>
#include <gradaccum/detail/kernels/element_loop.hpp>

#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <ATen/ops/_unique2.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/tensor.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <tuple>

namespace gradaccum::detail {

GRADACCUM_INLINE bool steps_by_rows(const at::Tensor& parameter, const at::Tensor& gradient,
                                    const Multiplier& multiplier) {
  if (!gradient.is_sparse() || gradient.sparse_dim() != 1 || !parameter.is_cpu() || parameter.numel() == 0)
    return false;
  if (!is_plain(parameter) || !parameter.is_contiguous() || parameter.is_complex() || gradient.is_complex())
    return false;
  if (parameter.size(0) > std::numeric_limits<std::int32_t>::max()) return false;
  const double by = multiplier.on_host() ? multiplier.host() : multiplier.on(at::kCPU).item<double>();
  const double most =
      state_type(parameter) == at::kDouble ? std::numeric_limits<double>::max() : std::numeric_limits<float>::max();
  return by <= most && !std::signbit(by);
}

GRADACCUM_INLINE bool has_duplicates(const at::Tensor& rows) {
  return std::get<0>(at::_unique2(rows)).numel() < rows.numel();
}

GRADACCUM_INLINE at::Tensor dense_of(const at::Tensor& moments, std::int64_t zero) {
  if (!moments.defined() || !moments.is_sparse()) return moments;
  const auto rows = moments._indices()[0], values = moments._values();
  if (moments.sparse_dim() != 1 || has_duplicates(rows)) return moments.to_dense();       // from another optimizer
  return at::full(moments.sizes(), zero, values.options()).index_copy_(0, rows, values);  // a sum would lose -0
}

/// Returns the rows in which the bits of a moment differ from zero.
GRADACCUM_INLINE at::Tensor rows_in_use(std::int64_t number, const std::vector<Moments>& all) {
  constexpr std::int64_t at_once = 4096;
  std::vector<at::Tensor> found;
  for (std::int64_t from = 0; from < number; from += at_once) {
    const auto rows = std::min(at_once, number - from);
    auto used = at::full({rows}, false, at::TensorOptions(at::kBool));
    for (auto& moments : all) {
      if (!moments.tensor.defined()) continue;
      const auto size = moments.tensor.element_size();
      const auto bits = moments.tensor.contiguous().view({number, moments.per_row}).narrow(0, from, rows);
      used.logical_or_(bits.view(size == 8 ? at::kLong : size == 4 ? at::kInt : at::kByte).ne(moments.zero).any(1));
    }
    found.push_back(used.nonzero().flatten().add_(from));
  }
  return at::cat(found);
}

GRADACCUM_INLINE StepRows::StepRows(const at::Tensor& parameter, const at::Tensor& gradient,
                                    const std::vector<Moments>& moments)
    : moments_(static_cast<std::size_t>(parameter.size(0)), -1), values_(moments_.size(), -1) {
  const auto summed = gradient.coalesce();
  gradient_ = summed._values();
  const auto known = std::ranges::find_if(moments, [](const Moments& of) { return of.tensor.defined(); });
  if (known == moments.end())
    rows_ = at::empty({0}, at::kLong);
  else
    rows_ = known->tensor.is_sparse() ? known->tensor._indices()[0] : rows_in_use(parameter.size(0), moments);
  had_ = rows_.size(0);
  const auto* const had = rows_.contiguous().const_data_ptr<std::int64_t>();
  std::int32_t place = 0;
  for (std::int64_t i = 0; i < had_; ++i) moments_[static_cast<std::size_t>(had[i])] = place++;
  const auto of_gradient = summed._indices()[0].contiguous();
  const auto* const numbers = of_gradient.const_data_ptr<std::int64_t>();
  std::vector<std::int64_t> added;
  for (std::int64_t i = 0; i < of_gradient.size(0); ++i) {
    const auto row = static_cast<std::size_t>(numbers[i]);
    values_[row] = static_cast<std::int32_t>(i);
    if (moments_[row] >= 0) continue;
    moments_[row] = place++;
    added.push_back(numbers[i]);
  }
  if (!added.empty()) rows_ = at::cat({rows_, at::tensor(added, at::kLong)});
}

/// Appends a scratch row for each task. Grows the memory by an eighth, not row by row.
GRADACCUM_INLINE at::Tensor StepRows::values_of(const Moments& moments) const {
  const auto needed = count() + tasks;
  at::Tensor values;
  if (moments.tensor.defined())
    values = moments.tensor.is_sparse()
                 ? moments.tensor._values().reshape({-1, moments.per_row})
                 : moments.tensor.reshape({-1, moments.per_row}).index_select(0, rows_.narrow(0, 0, had_));
  if (values.defined()) {
    const auto room = static_cast<std::int64_t>(values.storage().nbytes()) / values.element_size() / moments.per_row;
    if (values.storage_offset() == 0 && values.is_contiguous() && room >= needed) {
      auto all = values.as_strided({needed, moments.per_row}, {moments.per_row, 1});
      all.narrow(0, had_, needed - had_).fill_(moments.zero);  // a step that failed may have written there
      return all;
    }
  }
  auto grown = at::full({needed + count() / 8, moments.per_row}, moments.zero, at::TensorOptions(moments.type));
  if (values.defined()) grown.narrow(0, 0, had_).copy_(values);
  return grown.narrow(0, 0, needed);
}

GRADACCUM_INLINE at::Tensor StepRows::state_of(const at::Tensor& values, const at::Tensor& parameter) const {
  const auto per_row = values.size(1);
  std::vector<std::int64_t> sizes{parameter.size(0), per_row}, of_values{count(), per_row};
  if (per_row == parameter.numel() / parameter.size(0)) {
    sizes = parameter.sizes().vec();
    of_values = sizes;
    of_values[0] = count();
  }
  return at::_sparse_coo_tensor_unsafe(rows_.unsqueeze(0), values.narrow(0, 0, count()).view(of_values), sizes,
                                       values.options().layout(at::kSparse));
}

/// Makes all moments dense if one is, since all must have the same rows.
GRADACCUM_INLINE std::shared_ptr<const StepRows> rows_of(const at::Tensor& parameter, const at::Tensor& gradient,
                                                         std::vector<Moments>& moments) {
  const bool mixed =
      std::ranges::any_of(moments, [](const Moments& of) { return of.tensor.defined() && !of.tensor.is_sparse(); });
  if (mixed)
    for (auto& of : moments) of.tensor = dense_of(of.tensor, of.zero);
  auto rows = std::make_shared<const StepRows>(parameter, gradient, moments);
  for (auto& of : moments) of.tensor = rows->values_of(of);
  return rows;
}

GRADACCUM_INLINE std::shared_ptr<const StepRows> settle(const at::Tensor& parameter, at::Tensor& gradient,
                                                        const std::vector<FloatMoments>& moments, bool by_rows) {
  if (!by_rows) {
    if (gradient.is_sparse()) gradient = gradient.to_dense();
    for (auto& [tensor, name] : moments) tensor = settled(dense_of(tensor), parameter, name);
    return nullptr;
  }
  std::vector<Moments> all;
  for (auto& [tensor, name] : moments) {
    TORCH_CHECK(!tensor.defined() || !tensor.is_sparse() ||
                    (tensor.sparse_dim() == 1 && tensor.sizes() == parameter.sizes() && tensor.is_cpu()),
                "optimizer state: ", name, " must have the shape and device of its parameter, ", parameter.sizes(),
                ", got rows of ", tensor.sizes());
    const bool is_dense = tensor.defined() && !tensor.is_sparse();
    all.push_back({is_dense ? settled(tensor, parameter, name) : tensor, state_type(parameter),
                   parameter.numel() / parameter.size(0)});
  }
  auto rows = rows_of(parameter, gradient, all);
  for (std::size_t i = 0; i < all.size(); ++i) moments[i].tensor = all[i].tensor;
  return rows;
}

GRADACCUM_INLINE void StepRows::run(bool all, c10::function_ref<void(const Row&)> body) const {
  const auto number = static_cast<std::int64_t>(moments_.size()), share = (number + tasks - 1) / tasks;
  parallel_for(tasks, [&](std::int64_t task) {
    for (auto row = task * share; row < std::min(number, (task + 1) * share); ++row) {
      const auto place = moments_[static_cast<std::size_t>(row)];
      if (place >= 0 || all) body({row, place >= 0 ? place : count() + task, values_[static_cast<std::size_t>(row)]});
    }
  });
}

}  // namespace gradaccum::detail
