// SPDX-License-Identifier: Apache-2.0
#pragma once
// module: checkpoint

#include <gradaccum/autocast.hpp>
#include <gradaccum/detail/checkpoint/recomputation.hpp>

#include <concepts>
#include <type_traits>
#include <utility>

namespace gradaccum {

/// Options for recomputing a checkpointed part.
struct CheckpointOptions {
  /// Restores random generators to their state in the forward pass, so that dropout drops the same elements. False
  /// saves a microsecond for a part that draws no random numbers.
  bool preserve_rng = true;
  /// Ends the recomputation with the last tensor that backward needs, rather than with the part.
  bool early_stop = true;
  /// Compares contents of saved and recomputed tensors, not just shapes, dtypes and devices, to find a part whose runs
  /// differ. Slow: reads all of them twice, and synchronizes with the device.
  bool check_content = false;
};

/// Runs a part of the model without keeping its activations, and reruns it in backward, like torch.utils.checkpoint.
///
///     auto h = ga::checkpoint(model, x);                                   // a module
///     auto z = ga::checkpoint([](at::Tensor t) { return model->forward(t).relu(); }, x);   // or any function
///     auto w = ga::checkpoint({.preserve_rng = false}, model, x);          // options come first
///     (h + z + w).sum().backward();                                        // runs each of the three once more
///
/// Keeps only the inputs, and recomputes saved tensors when backward needs the first of them. Outputs, gradients and
/// random numbers are bitwise the same as without it.
///
/// Function. A module in any of its forms, or a callable. It is copied and called again in backward, so plain modules
/// and objects that a lambda captures by reference must live until then, and nothing that it reads may change before.
/// It must not change its inputs in place. Throws, naming the operation, if the calls differ.
///
/// Buffers. Buffers of modules that are `function` or `inputs` are updated once, as are tensors that a lambda's
/// operations write to, unless through `data()`, `detach()`, a pointer or an older view.
///
/// Inputs. Copyable values of any type that own their memory, also optionals, pairs, tuples, vectors and maps of
/// tensors.
///
/// @note Does not synchronize, unless `check_content` is set. Keeps copies of buffers that changed; throws if `forward`
/// replaces a buffer's tensor. The recomputation uses the first run's grad mode, autocast, device, and default random
/// generators of the CPU and the CUDA devices in use, and restores the current ones. Random numbers that another thread
/// draws at the same time are detected. Works with `autograd::grad`, `retain_graph` (recomputes for each backward) and
/// `create_graph`, and nested: an inner checkpoint is recomputed with the outer one. With gradients disabled it is a
/// plain call. The first checkpoint of the process installs an autograd engine: see `SavedTensorHooks`.
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
