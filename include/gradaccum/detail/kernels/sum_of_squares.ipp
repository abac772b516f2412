// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/kernels/sum_of_squares.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/kernels/dense.hpp>
#include <gradaccum/detail/kernels/element_loop.hpp>
#include <gradaccum/detail/kernels/kernels.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace gradaccum::detail {

GRADACCUM_INLINE bool can_be_summed_here(const at::Tensor& tensor) {
  return tensor.device().is_cpu() && tensor.is_non_overlapping_and_dense() && !tensor._is_zerotensor() &&
         has_kernels(tensor.scalar_type());
}

/// Places the table's rows among zeros first, so that the sum has the bits of the dense table's.
GRADACCUM_INLINE double sum_of_squares_of_rows(const SquaredNumbers& of, std::int64_t from, std::int64_t count) {
  const auto width = of.values.numel() / of.rows.numel(), size = static_cast<std::int64_t>(of.values.element_size());
  const auto* const begin = of.rows.const_data_ptr<std::int64_t>();
  const auto* const end = begin + of.rows.numel();
  const auto* const values = static_cast<const char*>(of.values.const_data_ptr());
  std::vector<char> numbers;
  for (const auto* row = std::lower_bound(begin, end, from / width); row != end && *row * width < from + count; ++row) {
    if (numbers.empty()) numbers.resize(static_cast<std::size_t>(count * size));
    const auto first = std::max(*row * width, from), last = std::min((*row + 1) * width, from + count);
    std::copy_n(values + ((row - begin) * width + first - *row * width) * size, (last - first) * size,
                numbers.data() + (first - from) * size);
  }
  return numbers.empty() ? 0 : sum_of_squares_of(of.values.scalar_type())(numbers.data(), count);
}

GRADACCUM_INLINE double sum_of_squares_of_part(const SquaredNumbers& of, std::int64_t from, std::int64_t count) {
  if (of.rows.defined()) return sum_of_squares_of_rows(of, from, count);
  const auto* const begin = static_cast<const char*>(of.values.const_data_ptr());
  return sum_of_squares_of(of.values.scalar_type())(begin + from * static_cast<std::int64_t>(of.values.element_size()),
                                                    count);
}

GRADACCUM_INLINE std::vector<double> sums_of_squares(const std::vector<SquaredNumbers>& all) {
  ElementLoop loop;
  for (auto& of : all)
    loop.add(of.rows.defined() ? of.values.numel() / of.rows.numel() * of.rows_of_table : of.values.numel());
  // Every slice and every array adds at most one part, so that array + slice is unique for each part.
  std::vector<double> parts(all.size() + static_cast<std::size_t>(loop.slices())), sums(all.size());
  std::vector<std::size_t> owners(parts.size());
  loop.run([&](std::size_t array, std::int64_t from, std::int64_t count, std::int64_t slice) {
    const auto part = array + static_cast<std::size_t>(slice);
    parts[part] = sum_of_squares_of_part(all[array], from, count);
    owners[part] = array;
  });
  for (std::size_t i = 0; i < parts.size(); ++i) sums[owners[i]] += parts[i];
  return sums;
}

}  // namespace gradaccum::detail
