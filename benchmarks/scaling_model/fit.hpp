// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "simulation.hpp"

/// From what has been measured to the numbers of the simulation.
namespace scaling::fit {

constexpr std::int64_t width = 1024, layers = 8, rows = 64;
constexpr std::int64_t bucket_bytes = width * width * 4;  // of a layer's gradient, which goes alone
constexpr std::array<std::int64_t, 4> message_bytes{bucket_bytes / 64, bucket_bytes / 4, bucket_bytes,
                                                    4 * bucket_bytes};
constexpr std::array<std::int64_t, 2> window_lengths{1, 4};

/// By name, the seconds of each round.
using Samples = std::map<std::string, std::vector<double>>;

inline double median(const Samples& samples, const std::string& name) {
  auto values = samples.at(name);
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

/// From windows that exchange nothing, while all processes run at once.
inline Compute compute_of(const Samples& samples) {
  const auto part = [&](const char* name) { return samples.at(name).back(); };  // of all windows of one
  const auto one = median(samples, "alone1"), further = (median(samples, "alone4") - one) / 3;
  const auto scale = one / (part("forward") + part("backward") + part("step"));
  const auto forward = scale * part("forward"), backward = scale * part("backward");
  return {.forward = forward,
          .backward = backward,
          .step = scale * part("step"),
          .norm = median(samples, "norm"),
          .further = further - forward - backward};
}

struct FittedLink {
  Link link;
  double error = 0;  ///< the largest, relative
};

/// The line through the times of all-reduces with the least squares of relative errors.
inline FittedLink link_of(const Samples& samples, std::int64_t ranks) {
  std::vector<std::pair<double, double>> points;
  double sum = 0, x_sum = 0, xx_sum = 0, y_sum = 0, xy_sum = 0, error = 0;
  for (auto bytes : message_bytes) {
    const auto x = static_cast<double>(bytes), y = median(samples, "sum" + std::to_string(bytes)) / layers;
    const auto weight = 1 / (y * y);
    sum += weight, x_sum += weight * x, xx_sum += weight * x * x, y_sum += weight * y, xy_sum += weight * x * y;
    points.emplace_back(x, y);
  }
  const auto slope = (sum * xy_sum - x_sum * y_sum) / (sum * xx_sum - x_sum * x_sum);
  const auto start = (y_sum - slope * x_sum) / sum;
  for (auto& [x, y] : points) error = std::max(error, std::abs((start + slope * x) / y - 1));
  const auto all = static_cast<double>(ranks), messages = 2 * (all - 1);  // of a ring, each of bytes / ranks
  return {{.latency = std::max(0.0, start) / messages, .bytes_per_s = messages / all / slope}, error};
}

/// What "scatter" or "gather" takes of half an all-reduce of the same bytes.
inline double of_half_a_sum(const Samples& samples, const std::string& name) {
  return 2 * median(samples, name) / median(samples, "sum" + std::to_string(bucket_bytes));
}

/// How much of the shorter of two things is hidden when both go on at once.
inline double overlap_of(const Samples& samples) {
  const auto compute = median(samples, "multiply"), both = median(samples, "both");
  const auto exchange = median(samples, "sum" + std::to_string(bucket_bytes));
  return std::clamp((compute + exchange - both) / std::min(compute, exchange), 0.0, 1.0);
}

}  // namespace scaling::fit
