// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/TensorIterator.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cstdint>
#include <vector>

namespace gradaccum::detail {

/// Runs `body(i)` for i in [0, count) on LibTorch's own threads. at::parallel_for would be serial in every program that
/// is compiled without -fopenmp; the loop of an iterator over one byte a task is not.
template <class Body>
void parallel_for(std::int64_t count, const Body& body) {
  const auto tasks = at::empty({count}, at::TensorOptions(at::kByte));
  const auto* const first = static_cast<const char*>(tasks.const_data_ptr());
  auto iterator = at::TensorIteratorConfig()
                      .check_all_same_dtype(false)
                      .declare_static_dtype_and_device(at::kByte, at::kCPU)
                      .resize_outputs(false)
                      .declare_static_shape(tasks.sizes())
                      .add_output(tasks)
                      .build();
  iterator.for_each(
      [&](char** data, const std::int64_t* strides, std::int64_t inner, std::int64_t outer) {
        for (std::int64_t j = 0; j < outer; ++j)
          for (std::int64_t i = 0; i < inner; ++i) body(data[0] + j * strides[1] + i * strides[0] - first);
      },
      /*grain_size=*/1);
}

/// In float64: the squares of finite 16- and 32-bit numbers stay finite, and millions of them lose nothing.
template <class T>
double sum_of_squares(const T* numbers, std::int64_t count) {
  constexpr int lanes = 16;  // independent sums, which a compiler may keep in vector registers
  double sums[lanes] = {};
  std::int64_t i = 0;
  for (; i + lanes <= count; i += lanes)
    for (int lane = 0; lane < lanes; ++lane) {
      const double number = numbers[i + lane];
      sums[lane] += number * number;
    }
  for (; i < count; ++i) sums[0] += static_cast<double>(numbers[i]) * static_cast<double>(numbers[i]);
  double sum = 0;
  for (double part : sums) sum += part;
  return sum;
}

/// A piece of a tensor's memory; in what order its elements lie does not matter to a sum.
struct Piece {
  const char* begin;
  std::int64_t count;
  at::ScalarType dtype;

  double sum_of_squares() const {
    if (dtype == at::kDouble) return detail::sum_of_squares(reinterpret_cast<const double*>(begin), count);
    if (dtype == at::kFloat) return detail::sum_of_squares(reinterpret_cast<const float*>(begin), count);
    if (dtype == at::kHalf) return detail::sum_of_squares(reinterpret_cast<const at::Half*>(begin), count);
    return detail::sum_of_squares(reinterpret_cast<const at::BFloat16*>(begin), count);
  }
};

inline bool can_be_summed_here(const at::Tensor& tensor) {
  const auto dtype = tensor.scalar_type();
  return tensor.device().is_cpu() && tensor.is_non_overlapping_and_dense() && !tensor._is_zerotensor() &&
         (dtype == at::kDouble || dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16);
}

/// The sum of squares of each tensor (for which `can_be_summed_here`), in one parallel loop over the pieces of all of
/// them. The pieces do not depend on the number of threads, and so the bits neither.
inline std::vector<double> sums_of_squares(const std::vector<at::Tensor>& tensors) {
  constexpr std::int64_t piece_size = 1 << 15;
  std::vector<Piece> pieces;
  std::vector<std::size_t> owners;
  for (std::size_t i = 0; i < tensors.size(); ++i)
    for (std::int64_t from = 0; from < tensors[i].numel(); from += piece_size) {
      const auto* const begin = static_cast<const char*>(tensors[i].const_data_ptr());
      pieces.push_back({begin + from * tensors[i].element_size(), std::min(piece_size, tensors[i].numel() - from),
                        tensors[i].scalar_type()});
      owners.push_back(i);
    }
  std::vector<double> parts(pieces.size()), sums(tensors.size());
  parallel_for(static_cast<std::int64_t>(pieces.size()),
               [&](std::int64_t i) { parts[i] = pieces[i].sum_of_squares(); });
  for (std::size_t i = 0; i < parts.size(); ++i) sums[owners[i]] += parts[i];
  return sums;
}

}  // namespace gradaccum::detail
