// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/torch.h>

#include <cstdint>

namespace fashion_mnist {

/// The mean over samples of losses that are means over their batches, summed on the device where they are.
///
/// Reading a loss makes the program wait until the device has computed it. Here only value() does.
class RunningMean {
 public:
  void add(const at::Tensor& batch_mean, std::int64_t samples) {
    // In float64: a float32 sum over an epoch would round away what the last batches bring.
    if (samples_ == 0) sum_ = torch::zeros({}, batch_mean.options().dtype(torch::kFloat64).requires_grad(false));
    sum_.add_(batch_mean.detach(), static_cast<double>(samples));
    samples_ += samples;
  }

  double value() const { return sum_.item<double>() / static_cast<double>(samples_); }
  std::int64_t samples() const { return samples_; }

 private:
  at::Tensor sum_;
  std::int64_t samples_ = 0;
};

}  // namespace fashion_mnist
