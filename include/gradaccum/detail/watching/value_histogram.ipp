// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/watching/value_histogram.hpp>

#include <gradaccum/detail/build/inline.hpp>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/bucketize.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/view_as_real.h>

#include <algorithm>
#include <cmath>
#include <cstddef>

namespace gradaccum::detail {

/// Returns the beginnings of TensorFlow's buckets: ... -1.1e-12, -1e-12, 0, 1e-12, 1.1e-12, ... up to 1e20.
GRADACCUM_INLINE const std::vector<double>& bucket_limits() {
  static const auto limits = [] {
    std::vector<double> above;
    for (double limit = 1e-12; limit < 1e20; limit *= 1.1) above.push_back(limit);
    std::vector<double> all(above.rbegin(), above.rend());
    for (double& limit : all) limit = -limit;
    all.push_back(0);
    all.insert(all.end(), above.begin(), above.end());
    return all;
  }();
  return limits;
}

/// Returns the elements in one dimension, without a copy if possible.
GRADACCUM_INLINE at::Tensor elements_of(const at::Tensor& tensor) {
  auto elements = tensor.detach();
  if (elements.is_sparse()) elements = elements.coalesce().values();
  if (elements.layout() != at::kStrided) elements = elements.to_dense();
  if (elements.is_complex()) elements = at::view_as_real(elements.resolve_conj());
  return elements.reshape({-1});
}

/// Counts float64 numbers on the CPU. counts[i] is the number of those with i limits at or below them.
GRADACCUM_INLINE void count_numbers(const at::Tensor& numbers, std::vector<double>& counts, ValueHistogram& histogram) {
  const auto& limits = bucket_limits();
  const auto all = at::from_blob(const_cast<double*>(limits.data()), {static_cast<std::int64_t>(limits.size())},
                                 at::TensorOptions(at::kDouble));
  const auto places = at::bucketize(numbers, all, /*out_int32=*/true, /*right=*/true);
  const auto* const place = places.const_data_ptr<int>();
  const auto* const number = numbers.const_data_ptr<double>();
  for (std::int64_t i = 0; i < numbers.numel(); ++i) {
    if (!std::isfinite(number[i])) {
      ++histogram.others;
      continue;
    }
    ++counts[static_cast<std::size_t>(place[i])];
    ++histogram.numbers;
    histogram.min = std::min(histogram.min, number[i]);
    histogram.max = std::max(histogram.max, number[i]);
    histogram.sum += number[i];
    histogram.sum_of_squares += number[i] * number[i];
  }
}

/// Keeps the buckets from the one before the first non-empty one, whose beginning is the former's limit, to the last.
GRADACCUM_INLINE void keep_used_buckets(const std::vector<double>& counts, ValueHistogram& histogram) {
  const auto is_used = [](double count) { return count > 0; };
  const auto first = std::find_if(counts.begin(), counts.end(), is_used) - counts.begin();
  const auto last = counts.rend() - std::find_if(counts.rbegin(), counts.rend(), is_used) - 1;
  for (auto i = std::max<std::ptrdiff_t>(first - 1, 0); i <= last; ++i) {
    const auto place = static_cast<std::size_t>(i);
    const bool is_above_all = place == bucket_limits().size();
    histogram.limits.push_back(is_above_all ? histogram.max : bucket_limits()[place]);
    histogram.numbers_below.push_back(counts[place]);
  }
}

GRADACCUM_INLINE ValueHistogram histogram_of(const at::Tensor& tensor, double factor) {
  constexpr std::int64_t piece = 1 << 18;
  const at::NoGradGuard no_grad;
  const auto elements = elements_of(tensor);
  ValueHistogram histogram;
  std::vector<double> counts(bucket_limits().size() + 1);
  for (std::int64_t begin = 0; begin < elements.numel(); begin += piece) {
    auto numbers = elements.narrow(0, begin, std::min(piece, elements.numel() - begin)).to(at::kCPU).to(at::kDouble);
    count_numbers((factor == 1 ? numbers : numbers.mul(factor)).contiguous(), counts, histogram);
  }
  if (histogram.numbers > 0) keep_used_buckets(counts, histogram);
  return histogram;
}

}  // namespace gradaccum::detail
