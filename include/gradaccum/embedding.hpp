// SPDX-License-Identifier: Apache-2.0
#pragma once
// module: window

#include <gradaccum/detail/build/inline.hpp>

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace gradaccum {

/// Options of `embedding`.
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
/// LibTorch's backward adds a gradient of the whole table each time, which dominates memory traffic with a large
/// vocabulary and small micro-batches. `input`: int64 or int32, any shape. `weight`: [rows, width]. Returns [...,
/// width].
///
/// Sparse. With `.sparse` the gradient has only these rows, and `ga::optim::SGD`, `Adam`, `AdamW`, `Adam8bit` and
/// `AdamW8bit` keep moments only for them: training is bitwise the same in less memory. The gradient is dense if
/// another operation uses the table, and for float16 on the CPU. LibTorch's Adam and AdamW reject sparse gradients.
///
/// Rounding. On the CPU the gradients are bitwise LibTorch's if `weight` is used once per backward pass. With several
/// uses, and on CUDA devices, where a row is added once per lookup, the order of rounding differs.
///
/// @note Does not synchronize, except once in backward with `.sparse`, to get the number of rows. On a device, rows are
/// added on the stream of the forward pass, and 16-bit gradients are computed for the whole table. Uses LibTorch's
/// backward if adding rows would be wrong: for a first gradient, a non-leaf weight, hooks on it, `autograd::grad`,
/// `create_graph`, and a gradient of another dtype or layout.
at::Tensor embedding(const at::Tensor& input, const at::Tensor& weight, EmbeddingOptions options = {});

}  // namespace gradaccum

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/window/embedding.ipp>
#endif
