// SPDX-License-Identifier: Apache-2.0
#pragma once
// module: scaling

#include <gradaccum/detail/build/inline.hpp>

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <optional>
#include <string>

namespace gradaccum {

/// Returns true if bfloat16 matrix products are fast on this device. On x86 processors LibTorch computes them with
/// AVX-512; without it they take about 80 times as long as in float32. On Arm they need the instructions for bfloat16,
/// which Graviton 3 and Grace have, and Graviton 2 and Jetson Orin lack.
///
///     ga::Autocast autocast(x.device(), torch::kBFloat16, /*enabled=*/ga::is_bf16_fast(x.device()));
///     auto y = model->forward(x);
///
/// Only the device's type matters.
///
/// @note Does not synchronize.
bool is_bf16_fast(at::Device device);

/// A scope like torch.autocast: operations that benefit run in 16 bits, operations that need precision in float32.
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
/// Parameters, their gradients and their sums stay in float32. In float16, gradients underflow without an `AmpScaler`;
/// bfloat16 needs none. On a CPU check `is_bf16_fast` first.
///
/// LibTorch casts a parameter once and caches the result until the outermost scope ends. A scope should therefore hold
/// the forward pass and loss of one micro-batch: across `optimizer.step()` it would keep using the old parameters.
/// Scopes nest, also with another dtype, or disabled for a part that needs float32.
///
/// `device`: only its type matters (`torch::kCUDA`, "cuda", a tensor's device). `dtype`: bfloat16 or float16; the
/// default is float16 on CUDA and bfloat16 on the CPU. `cache_enabled`: by default inherited from the enclosing scope.
///
/// @note Does not synchronize. The dtype and nesting are per thread; the cache of casts is per process, so
/// threads that run one model concurrently must use one dtype, or `cache_enabled = false`.
class [[nodiscard]] Autocast {
 public:
  explicit Autocast(at::Device device, std::optional<at::ScalarType> dtype = {}, bool enabled = true,
                    std::optional<bool> cache_enabled = {});
  explicit Autocast(const std::string& device, std::optional<at::ScalarType> dtype = {}, bool enabled = true,
                    std::optional<bool> cache_enabled = {})
      : Autocast(at::Device(device), dtype, enabled, cache_enabled) {}
  Autocast& operator=(Autocast&&) = delete;
  ~Autocast();

 private:
  struct State {
    bool enabled;
    at::ScalarType dtype;
    bool cache_enabled;
  };

  void change_to(const State& next) const;

  at::DeviceType device_;
  State before_ = {};
};

}  // namespace gradaccum

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/scaling/amp_scaler.ipp>
#endif
