// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/factor.hpp>

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

namespace gradaccum {

namespace detail {

/// Gradients that were computed together with their loss, and are added without autograd.
class ReadyGradients {
 public:
  virtual ~ReadyGradients() = default;
  /// Adds the gradients times the seed, as backward from `loss` would. Returns false if backward has to run: the loss
  /// is no longer the one they belong to, or hooks wait for the gradients.
  virtual bool add(const at::Tensor& loss, double seed) = 0;
};

}  // namespace detail

/// Options of a backward pass, as `torch::Tensor::backward` takes them.
struct BackwardOptions {
  std::optional<bool> retain_graph = {};  ///< keeps the graph for another pass; as `create_graph` if not given
  bool create_graph = false;              ///< allows gradients of gradients
  std::vector<at::Tensor> inputs = {};    ///< only these get gradients; if empty, all that the loss depends on
};

/// A mean loss and the number of items that it averages, so that a window is the mean over *all items*.
///
///     for (auto& batch : batches) {
///       auto mean = torch::mse_loss(model->forward(batch.data), batch.target);
///       optimizer.backward(ga::Loss{mean, batch.target.numel()});
///       optimizer.step();
///       optimizer.zero_grad();
///     }
///
/// A mean of means differs from that mean if micro-batches hold different numbers of valid tokens. The weight enters as
/// the seed of backward, so the loss that the user prints stays as it is.
///
/// `mean`: one element, of any floating dtype. `items`: any arithmetic type, finite and >= 0; 0 skips backward.
///
/// @note Does not wait for the device: the count is a host number, and a Tensor as count does not compile.
/// @note A 16-bit loss rounds its seed, and so its weight, to 16 bits: compute the loss in float32.
struct Loss {
  at::Tensor mean;
  double items = 1.0;
  Factor seed = {};                                    ///< the start of backward; loss scales and weights multiply it
  at::Tensor output = {}, target = {};                 ///< the model's output and the target, for metrics
  std::shared_ptr<detail::ReadyGradients> ready = {};  ///< gradients that a `CompiledStep` has computed

  Loss(at::Tensor loss) : mean(std::move(loss)) {}  // NOLINT(google-explicit-constructor): a tensor is a loss

  template <class Count>
  Loss(at::Tensor loss, Count count) : mean(std::move(loss)), items(number(count)) {}

  /// Attaches the model's output and the target, which metrics need.
  Loss with(at::Tensor output_of_model, at::Tensor wanted) &&;
  Loss with(at::Tensor output_of_model, at::Tensor wanted) const&;

  void check_shape() const;
  void check() const;
  void backward(const BackwardOptions& options = {}) const;

 private:
  template <class Count>
  static double number(Count count) {
    static_assert(!std::is_base_of_v<at::TensorBase, Count>,
                  "Loss: items is a number on the host; a Tensor count would wait for the device at every micro-batch. "
                  "Count on the host, or write count.item<double>() where the wait is meant");
    static_assert(std::is_arithmetic_v<Count> || std::is_base_of_v<at::TensorBase, Count>,
                  "Loss: items must be an arithmetic count");
    if constexpr (std::is_arithmetic_v<Count>) return static_cast<double>(count);
    return 0;
  }
};

}  // namespace gradaccum

#ifndef GRADACCUM_COMPILED
#include <gradaccum/loss.ipp>
#endif
