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

/// Gradients that were computed with their loss, which need no autograd to be added.
class ReadyGradients {
 public:
  virtual ~ReadyGradients() = default;
  /// Adds them times the seed, as backward from `loss` would. False where backward has to do it: the loss is another
  /// by now, or somebody listens for gradients.
  virtual bool add(const at::Tensor& loss, double seed) = 0;
};

}  // namespace detail

/// How a backward pass runs: as `torch::Tensor::backward` takes it.
struct BackwardOptions {
  std::optional<bool> retain_graph = {};  ///< the graph can be gone through again; like `create_graph` if not given
  bool create_graph = false;              ///< gradients of gradients can be computed
  std::vector<at::Tensor> inputs = {};    ///< only these get gradients; none: all that the loss depends on
};

/// A mean loss, and how many items it is the mean of: what makes a window the mean over *all items*.
///
///     for (auto& batch : batches) {
///       auto mean = torch::mse_loss(model->forward(batch.data), batch.target);
///       optimizer.backward(ga::Loss{mean, batch.target.numel()});
///       optimizer.step();
///       optimizer.zero_grad();
///     }
///
/// A mean of means is another number where micro-batches hold different counts of valid tokens. The weight enters as
/// the seed of backward: the loss that the user prints is never rewritten.
///
/// `mean`: one element, of any floating dtype. `items`: any arithmetic type, finite and >= 0; 0 leaves backward out.
///
/// @note Does not wait for the device: the count is a host number, and so a Tensor as count does not compile.
/// @note A 16-bit loss rounds its seed, and so its weight, to 16 bits: compute the loss in float32.
struct Loss {
  at::Tensor mean;
  double items = 1.0;
  Factor seed = {};                     ///< backward starts from it; a loss scale or a weight multiplies it
  at::Tensor output = {}, target = {};  ///< what metrics look at
  std::shared_ptr<detail::ReadyGradients> ready = {};  ///< of a `CompiledStep`

  Loss(at::Tensor loss) : mean(std::move(loss)) {}  // NOLINT(google-explicit-constructor): a tensor is a loss

  template <class Count>
  Loss(at::Tensor loss, Count count) : mean(std::move(loss)), items(number(count)) {}

  /// The same loss, with what it was computed from: for metrics, which have no other way to it.
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
