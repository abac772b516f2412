// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/torch.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

namespace bloom {

/// ALiBi (arXiv 2108.12409): each head adds its slope times the key's position to its scores.
///
/// A power of two of heads, n, has the slopes r, r^2, …, r^n, with r = 2^(-8/n); further heads have every other one of
/// the slopes of 2n heads.
inline std::vector<float> alibi_slopes(std::int64_t n_head) {
  const auto n = static_cast<std::int64_t>(std::bit_floor(static_cast<std::uint64_t>(n_head)));
  const auto ratio_of = [](std::int64_t heads) {
    return static_cast<float>(std::exp2(-8.0 / static_cast<double>(heads)));
  };
  std::vector<float> slopes;
  for (std::int64_t head = 0; head < n_head; ++head)
    slopes.push_back(head < n ? std::pow(ratio_of(n), static_cast<float>(head + 1))
                              : std::pow(ratio_of(2 * n), static_cast<float>(2 * (head - n) + 1)));
  return slopes;
}

/// Additional channels of queries, keys and values that make attention add ALiBi without a [t, t] bias: query x key is
/// slope * sqrt(head_dim) * position, and attention divides by sqrt(head_dim).
///
/// All numbers are exact in bfloat16 and float16, too: the slope is the sum of three pieces of 8 bits, the position
/// the sum of a multiple of 256 and a rest. Two more channels of zeros make it eight, which kernels prefer; all
/// channels of the value are zeros.
inline constexpr std::int64_t alibi_channel_count = 8;
inline constexpr std::int64_t alibi_max_length = 1 << 16;

/// Makes float32 [length, n_head, 3, 8]; the 3 are query, key, value.
inline at::Tensor alibi_channels(std::int64_t n_head, std::int64_t head_dim, std::int64_t length) {
  auto channels = torch::zeros({length, n_head, 3, alibi_channel_count});
  const auto position = torch::arange(length, torch::kFloat).unsqueeze(1);
  const auto rest = position.remainder(256);
  auto query = channels.select(2, 0), key = channels.select(2, 1);
  auto slope = torch::tensor(alibi_slopes(n_head)) * std::sqrt(static_cast<double>(head_dim));
  for (int channel = 0; channel < 6; channel += 2) {
    const auto piece = slope.to(torch::kBFloat16).to(torch::kFloat);
    slope = slope - piece;
    query.select(2, channel).copy_(piece);
    query.select(2, channel + 1).copy_(piece);
    key.select(2, channel).copy_(position - rest);
    key.select(2, channel + 1).copy_(rest);
  }
  return channels;
}

/// Views the numbers of an int64 tensor on the CPU.
inline at::IntArrayRef sizes_of(const at::Tensor& lengths) {
  return {lengths.const_data_ptr<std::int64_t>(), static_cast<std::size_t>(lengths.numel())};
}

/// The channels for any length, shared by all blocks of a model. A length's channels, made up to the next power of two,
/// keep their address, because CUDA graphs read them again. Thread safe.
class AlibiChannels {
 public:
  AlibiChannels(std::int64_t n_head, std::int64_t head_dim) : n_head_(n_head), head_dim_(head_dim) {}

  /// Returns channels with the dtype and device of `like`.
  at::Tensor operator()(std::int64_t length, const at::Tensor& like) {
    TORCH_CHECK(length <= alibi_max_length, "BLOOM: sequences must have at most ", alibi_max_length,
                " tokens, whose positions are exact, got ", length);
    const std::lock_guard lock(mutex_);
    auto found = std::ranges::find_if(made_, [&](const at::Tensor& channels) {
      return channels.size(0) >= length && channels.dtype() == like.dtype() && channels.device() == like.device();
    });
    if (found == made_.end()) {
      const auto longer = static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(length)));
      const auto channels = alibi_channels(n_head_, head_dim_, longer).to(like.scalar_type());
      found = made_.insert(made_.end(), moved(channels, like.device()));
    }
    return found->narrow(0, 0, length);
  }
  /// Returns channels of packed rows, `lengths` int64 [n] on the CPU; positions restart in each row.
  at::Tensor packed(const at::Tensor& lengths, const at::Tensor& like) {
    std::vector<at::Tensor> rows;
    for (const auto length : sizes_of(lengths)) rows.push_back((*this)(length, like));
    return at::cat(rows);
  }

 private:
  /// Copies to a GPU from pinned memory, so that the host does not wait.
  static at::Tensor moved(const at::Tensor& channels, at::Device device) {
    return device.is_cuda() ? channels.pin_memory().to(device, /*non_blocking=*/true) : channels.to(device);
  }

  std::int64_t n_head_, head_dim_;
  std::mutex mutex_;
  std::vector<at::Tensor> made_;
};

}  // namespace bloom
