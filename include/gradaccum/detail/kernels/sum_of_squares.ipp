// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/kernels/sum_of_squares.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/kernels/element_loop.hpp>
#include <gradaccum/detail/kernels/kernels.hpp>

#include <cstddef>
#include <cstdint>

namespace gradaccum::detail {

GRADACCUM_INLINE bool can_be_summed_here(const at::Tensor& tensor) {
  const auto dtype = tensor.scalar_type();
  return tensor.device().is_cpu() && tensor.is_non_overlapping_and_dense() && !tensor._is_zerotensor() &&
         (dtype == at::kDouble || dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16);
}

GRADACCUM_INLINE std::vector<double> sums_of_squares(const std::vector<at::Tensor>& tensors) {
  ElementLoop loop;
  for (auto& tensor : tensors) loop.add(tensor.numel());
  // A slice that goes on has one part more, an array that goes on has one part more: so every part has a place.
  std::vector<double> parts(tensors.size() + static_cast<std::size_t>(loop.slices())), sums(tensors.size());
  std::vector<std::size_t> owners(parts.size());
  loop.run([&](std::size_t array, std::int64_t from, std::int64_t count, std::int64_t slice) {
    const auto& tensor = tensors[array];
    const auto* const begin =
        static_cast<const char*>(tensor.const_data_ptr()) + from * static_cast<std::int64_t>(tensor.element_size());
    const auto part = array + static_cast<std::size_t>(slice);
    parts[part] = sum_of_squares_of(tensor.scalar_type())(begin, count);
    owners[part] = array;
  });
  for (std::size_t i = 0; i < parts.size(); ++i) sums[owners[i]] += parts[i];
  return sums;
}

}  // namespace gradaccum::detail
