// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/torch.h>

#include <ATen/Parallel.h>
#include <cmath>
#include <cstdint>
#include <string_view>

namespace bloom {

/// SplitMix64: maps consecutive numbers to unrelated ones.
inline std::uint64_t mixed_bits(std::uint64_t number) {
  number += 0x9E3779B97F4A7C15u;
  number = (number ^ (number >> 30)) * 0xBF58476D1CE4E5B9u;
  number = (number ^ (number >> 27)) * 0x94D049BB133111EBu;
  return number ^ (number >> 31);
}

/// Returns the quantile of the normal distribution for a probability `p` above 0 and below 1: Wichura's AS 241, to 7
/// digits.
inline double normal_quantile(double p) {
  const double q = p - 0.5;
  if (std::abs(q) <= 0.425) {
    const double r = 0.180625 - q * q;
    return q * (((59.10937472 * r + 159.29113202) * r + 50.434271938) * r + 3.3871327179) /
           (((67.18756360 * r + 78.757757664) * r + 17.895169469) * r + 1);
  }
  double r = std::sqrt(-std::log(q < 0 ? p : 1 - p));
  if (r <= 5) {
    r -= 1.6;
    r = (((0.17023821103 * r + 1.3067284816) * r + 2.7568153900) * r + 1.4234372777) /
        ((0.12021132975 * r + 0.73700164250) * r + 1);
  } else {
    r -= 5;
    r = (((0.017337203997 * r + 0.42868294337) * r + 3.0812263860) * r + 6.6579051150) /
        ((0.012258202635 * r + 0.24197894225) * r + 1);
  }
  return q < 0 ? -r : r;
}

/// Returns the seed of the tensor of that name (FNV-1a), which does not depend on other tensors.
inline std::uint64_t seed_of(std::string_view name, std::uint64_t seed) {
  std::uint64_t hash = 0xCBF29CE484222325u;
  for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001B3u;
  return mixed_bits(hash ^ mixed_bits(seed));
}

/// Fills a contiguous float32 tensor with normal numbers around 0. Each depends only on the seed and its index, so the
/// bits are the same with any number of threads and any LibTorch, unlike the bits of LibTorch's generators.
inline void fill_with_normal(const at::Tensor& tensor, double standard_deviation, std::uint64_t seed) {
  auto* const numbers = tensor.data_ptr<float>();
  constexpr std::int64_t grain = 1 << 14;
  at::parallel_for(0, tensor.numel(), grain, [&](std::int64_t begin, std::int64_t end) {
    for (auto i = begin; i < end; ++i) {
      const auto bits = mixed_bits(seed + static_cast<std::uint64_t>(i) * 0x9E3779B97F4A7C15u);
      const double p = (static_cast<double>(bits >> 12) + 0.5) * 0x1p-52;
      numbers[i] = static_cast<float>(standard_deviation * normal_quantile(p));
    }
  });
}

}  // namespace bloom
