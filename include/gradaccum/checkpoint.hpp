// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/autocast.hpp>
#include <gradaccum/checkpoint_options.hpp>
#include <gradaccum/detail/checkpoint/run_checkpointed.hpp>

#include <utility>

namespace gradaccum {

/// torch.utils.checkpoint: runs a part of the model without keeping its activations, and once more in backward.
///
///     auto h = ga::checkpoint(model, x);                                   // a module
///     auto z = ga::checkpoint([](at::Tensor t) { return model->forward(t).relu(); }, x);   // or any function
///     auto w = ga::checkpoint({.preserve_rng = false}, model, x);          // options come first
///     (h + z + w).sum().backward();                                        // runs each of the three once more
///
/// Memory for time: of the part only the inputs are kept; what an operation in it needs for its gradient is there again
/// when the first of them asks. The second run ends with the last tensor that is needed, so what comes after (as a rule
/// the last product of matrices) is not repeated. Outputs, gradients and the stream of random numbers are those of the
/// plain call, to the bit.
///
/// `function`: a module in any of its forms, or a callable. It is copied and called again in backward, so what a lambda
/// captures by reference must still be there then, as must a plain module. It must do the same twice: other shapes,
/// dtypes, devices or random numbers are an error that names the operation (`CheckpointOptions`). Nothing that it reads
/// may change before backward, parameters included, and it must not change its inputs in place. Of a module's BatchNorm
/// and InstanceNorm layers the running statistics move once; those that a lambda calls move twice. `inputs`: any
/// number, of any copyable kind; tensors also within optionals, pairs, tuples, vectors and maps (owned: a `string_view`
/// would look at memory that is gone). They and the outputs may be anything, with gradients or without (token ids).
///
/// Restored for the second run, and put back after it or after an exception: gradient mode, autocast, the current
/// device, and the default random generators of the CPU and of all CUDA devices in use when the first began. Works
/// under `autograd::grad`, with `retain_graph` (runs again for each backward), `create_graph`, and nested: a checkpoint
/// inside is forgotten with the rest and made anew. With gradients disabled it is a plain call.
///
/// @note Does not wait for the device, unless `check_content` asks. The random generators belong to the
/// process: threads that draw from them at the same time cannot repeat what they drew, which is found out.
template <class Function, class... Inputs>
auto checkpoint(const CheckpointOptions& options, Function&& function, Inputs&&... inputs) {
  return detail::run_checkpointed(options, std::forward<Function>(function), std::forward<Inputs>(inputs)...);
}

template <detail::not_options Function, class... Inputs>
auto checkpoint(Function&& function, Inputs&&... inputs) {
  return checkpoint(CheckpointOptions(), std::forward<Function>(function), std::forward<Inputs>(inputs)...);
}

}  // namespace gradaccum
