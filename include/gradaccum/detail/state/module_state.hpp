// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/archive.hpp>

#include <ATen/core/Tensor.h>

#include <string>

namespace torch::nn {
class Module;
}

namespace gradaccum::detail {

/// Parameters and buffers by their full names; a shared tensor appears under each of its names.
Archive::Tensors tensors_of_module(const torch::nn::Module& module);

/// Throws if the tensor lacks memory for each of its elements (a meta or expanded tensor).
void check_can_be_loaded(const std::string& name, const at::Tensor& tensor);

/// Saves parameters and buffers by name; loading copies into the module's existing tensors.
void archive_module(Archive& archive, torch::nn::Module& module);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/state/module_state.ipp>
#endif
