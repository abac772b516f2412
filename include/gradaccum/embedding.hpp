// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace gradaccum {

/// How the gradient of a table comes.
struct EmbeddingOptions {
  std::int64_t padding_idx = -1;  ///< its row gets no gradient; negative: no such row
  bool sparse = false;            ///< the gradient is a sparse tensor, of the rows that were looked up
};

/// torch.nn.functional.embedding, whose backward adds up the rows that were looked up, and does not touch the others.
///
///     auto table = torch::randn({5000, 16}).requires_grad_();
///     for (int micro_batch = 0; micro_batch < 8; ++micro_batch) {
///       auto tokens = torch::randint(5000, {1, 32});
///       ga::embedding(tokens, table).sum().backward();     // the first makes the gradient, the others add 32 rows
///     }
///
/// LibTorch's makes a gradient of the whole table each time, of zeros but for those rows, and adds all of it: with a
/// large vocabulary and small micro-batches that is most of a training's traffic.
///
/// With `.sparse` the gradient has nothing but those rows, from the first micro-batch on, and `ga::optim::SGD`, `Adam`,
/// `AdamW`, `Adam8bit` and `AdamW8bit` keep moments for rows that were ever looked up: training is the same, to the
/// bit, without the memory of a table's gradient and moments. Where something else uses the table, too, its gradient is
/// dense; and so it is of float16 on the CPU. LibTorch's own Adam and AdamW refuse sparse gradients.
///
/// `input`: int64 or int32, any shape. `weight`: [rows, width]. Gives [..., width]. On a CPU the gradients are
/// LibTorch's to the bit, as long as `weight` is used once in a backward pass (used twice, the sums are rounded in
/// another order). On a CUDA device a row is added as often as it was looked up, which rounds in another order, too;
/// gradients of 16 bits are those of the whole table there.
/// Where adding rows would not be right, it does as LibTorch does: a first gradient, a weight that is no leaf, hooks on
/// it, `autograd::grad`, `create_graph`, a gradient of another dtype or layout.
///
/// @note Does not wait for a device; with `.sparse` it does once in backward, to learn how many rows there are. On a
/// device the rows are added on the stream of the forward pass.
at::Tensor embedding(const at::Tensor& input, const at::Tensor& weight, EmbeddingOptions options = {});

}  // namespace gradaccum

#ifndef GRADACCUM_COMPILED
#include <gradaccum/embedding.ipp>
#endif
