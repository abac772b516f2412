// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <vector>

namespace gradaccum::detail {

using GradientList = std::vector<at::Tensor>;  ///< one a parameter; undefined where it has none, which is like zeros

/// The distance from 1 to the next number, of the dtype that rounds most.
inline double rounding_of(const std::vector<at::Tensor>& parameters) {
  double rounding = 0;
  for (auto& parameter : parameters) {
    const auto dtype = at::toRealValueType(parameter.scalar_type());
    rounding = std::max(rounding, dtype == at::kDouble  ? 0x1p-52
                                  : dtype == at::kFloat ? 0x1p-23
                                  : dtype == at::kHalf  ? 0x1p-10
                                                        : 0x1p-7);
  }
  return rounding;
}

/// What rounding may come to in a sum over a batch.
inline double default_tolerance(double rounding) {
  if (rounding < 1e-15) return 1e-10;
  if (rounding < 1e-6) return 1e-4;
  return 10 * rounding;
}

/// NaN if an element is.
inline double largest(const at::Tensor& tensor) {
  return tensor.defined() && tensor.numel() > 0 ? tensor.abs().max().to(at::kDouble).item<double>() : 0.0;
}
inline double largest(const GradientList& gradients) {
  double all = 0;
  for (auto& gradient : gradients) {
    const auto one = largest(gradient);
    if (!(one <= all)) all = one;  // NaN, too, stays
    if (std::isnan(all)) return all;
  }
  return all;
}

inline double largest_difference(const at::Tensor& a, const at::Tensor& b) {
  if (!a.defined() || !b.defined()) return largest(a.defined() ? a : b);
  return largest(a.sub(b));
}

/// max|a - b| / max|b| for each parameter. Where both are but rounding noise beside the model's largest gradient (the
/// bias of a layer before a normalisation has a gradient of 0), relative to that one. Infinity where one is not finite.
inline std::vector<double> relative_errors(const GradientList& a, const GradientList& b, double rounding) {
  const double all = largest(b), noise = std::min(0.1, 100 * rounding) * all;
  std::vector<double> errors;
  for (std::size_t i = 0; i < a.size(); ++i) {
    const double of_a = largest(a[i]), of_b = largest(b[i]), apart = largest_difference(a[i], b[i]);
    const double error = apart == 0 ? 0 : apart / (std::max(of_a, of_b) <= noise ? all : of_b);
    errors.push_back(std::isnan(error) ? std::numeric_limits<double>::infinity() : error);
  }
  return errors;
}

}  // namespace gradaccum::detail
