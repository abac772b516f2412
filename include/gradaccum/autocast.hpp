// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <optional>
#include <string>

namespace gradaccum {

/// Whether products of bfloat16 matrices are worth their while on this device. On x86 processors LibTorch computes them
/// with AVX-512; on one without it they take some 80 times as long as those of float32.
///
///     ga::Autocast autocast(x.device(), torch::kBFloat16, /*enabled=*/ga::is_bf16_fast(x.device()));
///     auto y = model->forward(x);
///
/// Only the device's type counts, and for the CPU the processor that this runs on. Of all others than x86 processors it
/// says true.
///
/// @note Does not wait for the device.
bool is_bf16_fast(at::Device device);

/// torch.autocast as a scope: operations that gain from it run in 16 bits, those that need their precision in float32.
///
///     for (auto& batch : batches) {
///       auto loss = [&] {
///         ga::Autocast autocast(torch::kCPU, torch::kBFloat16);
///         return torch::mse_loss(model->forward(batch.data), batch.target);
///       }();
///       loss.backward();                                   // outside: backward takes the dtypes of forward by itself
///       optimizer.step();
///       optimizer.zero_grad();
///     }
///
/// Parameters stay in float32, and so do their gradients and sums. In float16 gradients underflow without an
/// `AmpScaler`; bfloat16 needs none. On a CPU ask `is_bf16_fast` first.
///
/// LibTorch casts a parameter once, and keeps the cast until the outermost scope ends. So a scope holds the forward
/// pass and the loss of one micro-batch: held across `optimizer.step()` it would go on with the old parameters. Scopes
/// nest, with another dtype too, or disabled for a part that needs float32. An exception ends them like anything else.
///
/// `device`: only its type counts (`torch::kCUDA`, "cuda", where a tensor lies). `dtype`: bfloat16 or float16; by
/// default float16 on CUDA and bfloat16 on the CPU. `cache_enabled`: by default as it is around the scope.
///
/// @note Does not wait for the device. Dtype and nesting belong to the thread; the casts that are kept belong
/// to the process, so threads that run one model at the same time use one dtype, or `cache_enabled = false`.
class [[nodiscard]] Autocast {
 public:
  explicit Autocast(at::Device device, std::optional<at::ScalarType> dtype = {}, bool enabled = true,
                    std::optional<bool> cache_enabled = {});
  explicit Autocast(const std::string& device, std::optional<at::ScalarType> dtype = {}, bool enabled = true,
                    std::optional<bool> cache_enabled = {})
      : Autocast(at::Device(device), dtype, enabled, cache_enabled) {}
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;
  ~Autocast();

 private:
  struct State {
    bool enabled;
    at::ScalarType dtype;
    bool cache_enabled;
  };

  static at::DeviceType checked(at::Device device);
  State state() const;
  void change_to(const State& next) const;

  at::DeviceType device_;
  State before_;
};

}  // namespace gradaccum

#ifndef GRADACCUM_COMPILED
#include <gradaccum/autocast.ipp>
#endif
