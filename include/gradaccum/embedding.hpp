// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace gradaccum {

/// Options for the gradient of the table.
struct EmbeddingOptions {
  std::int64_t padding_idx = -1;  ///< this row gets no gradient; negative: no such row
  bool sparse = false;            ///< the gradient is a sparse tensor of the rows that were looked up
};

/// Works like torch.nn.functional.embedding, except that backward only touches the rows that were looked up.
///
///     auto table = torch::randn({5000, 16}).requires_grad_();
///     for (int micro_batch = 0; micro_batch < 8; ++micro_batch) {
///       auto tokens = torch::randint(5000, {1, 32});
///       ga::embedding(tokens, table).sum().backward();     // the first makes the gradient, the others add 32 rows
///     }
///
/// LibTorch's backward creates and adds a gradient of the whole table each time, which with a large vocabulary and
/// small micro-batches dominates the memory traffic of a training.
///
/// With `.sparse` the gradient consists of those rows only, from the first micro-batch on, and `ga::optim::SGD`,
/// `Adam`, `AdamW`, `Adam8bit` and `AdamW8bit` keep moments only for rows that have been looked up: training is the
/// same bit for bit, in less memory. The gradient is dense if something else uses the table too, and for float16 on the
/// CPU. LibTorch's own Adam and AdamW reject sparse gradients.
///
/// `input`: int64 or int32, any shape. `weight`: [rows, width]. Returns [..., width]. On a CPU the gradients equal
/// LibTorch's bit for bit if `weight` is used once in a backward pass; with several uses the order of rounding differs.
/// On a CUDA device a row is added once per lookup, which also changes the order of rounding; 16-bit gradients are
/// computed for the whole table there. Falls back to LibTorch's where adding rows would be wrong: a first gradient, a
/// non-leaf weight, hooks on it, `autograd::grad`, `create_graph`, a gradient of another dtype or layout.
///
/// @note Does not synchronize, except once in backward with `.sparse`, to get the number of rows. On a device,
/// rows are added on the stream of the forward pass.
at::Tensor embedding(const at::Tensor& input, const at::Tensor& weight, EmbeddingOptions options = {});

}  // namespace gradaccum

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/window/embedding.ipp>
#endif
