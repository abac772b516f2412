// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/autocast.hpp>
#include <gradaccum/detail/checkpoint/recomputation.hpp>

#include <concepts>
#include <type_traits>
#include <utility>

namespace gradaccum {

/// Options for recomputing a checkpointed part.
struct CheckpointOptions {
  /// Restores random generators to their state in the forward pass, so that dropout drops the same elements. Without
  /// it, a part that draws no random numbers is a microsecond faster.
  bool preserve_rng = true;
  /// Ends the recomputation with the last tensor that backward needs, rather than with the part.
  bool early_stop = true;
  /// Compares contents of saved and recomputed tensors, not just shapes, dtypes and devices, to find a part that does
  /// not do the same twice. Slow: reads everything twice, and synchronizes with the device.
  bool check_content = false;
};

/// Runs a part of the model without keeping its activations, and reruns it in backward, like torch.utils.checkpoint.
///
///     auto h = ga::checkpoint(model, x);                                   // a module
///     auto z = ga::checkpoint([](at::Tensor t) { return model->forward(t).relu(); }, x);   // or any function
///     auto w = ga::checkpoint({.preserve_rng = false}, model, x);          // options come first
///     (h + z + w).sum().backward();                                        // runs each of the three once more
///
/// Only the part's inputs are kept. Tensors that its operations need for gradients are recomputed when backward needs
/// the first of them, up to the last (usually before the last matrix product). Outputs, gradients and the stream of
/// random numbers are those of the plain call, to the bit.
///
/// `function` is a module in any of its forms, or a callable. It is copied and called again in backward, so a plain
/// module, and what a lambda captures by reference, must live until then. Both calls must do the same: other shapes,
/// dtypes, devices or random numbers are an error that names the operation (`CheckpointOptions`). Nothing that
/// `function` reads may change before backward, including parameters, and it must not change its inputs in place.
///
/// Registered buffers of a module that is `function` or among `inputs` change once, and the recomputation begins with
/// those that the first run began with: copies of those that changed are kept. A buffer that `forward` replaces by
/// another tensor, rather than writing to it, is an error. Of a lambda, all that its operations write to changes once,
/// unless they do so through `data()`, `detach()`, a pointer or a view that was made before.
///
/// `inputs` are any number of copyable values that own their memory: a `string_view` would refer to freed memory.
/// Tensors may be inside optionals, pairs, tuples, vectors and maps. Inputs and outputs may be of any type, with or
/// without gradients (token ids).
///
/// The recomputation runs with the first run's grad mode, autocast, current device, and default random generators of
/// the CPU and of all CUDA devices then in use. It puts the present ones back, even after an exception. Works with
/// `autograd::grad`, `retain_graph` (recomputes for each backward), `create_graph`, and nested: an inner checkpoint is
/// dropped and recomputed with the rest. With gradients disabled it is a plain call.
///
/// @note Does not synchronize, unless `check_content` is set. Random generators belong to the process: a draw
/// by another thread at the same time cannot be repeated, which is detected.
template <class Function, class... Inputs>
auto checkpoint(const CheckpointOptions& options, Function&& function, Inputs&&... inputs) {
  return detail::run_checkpointed<!model<Function>>(options, std::forward<Function>(function),
                                                    std::forward<Inputs>(inputs)...);
}

template <class Function, class... Inputs>
auto checkpoint(Function&& function,
                Inputs&&... inputs) requires(!std::same_as<std::remove_cvref_t<Function>, CheckpointOptions>) {
  return checkpoint(CheckpointOptions(), std::forward<Function>(function), std::forward<Inputs>(inputs)...);
}

}  // namespace gradaccum

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/checkpoint/recomputation.ipp>
#endif
