// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/archive.hpp>

#include <ATen/core/Tensor.h>

#include <string>

namespace torch::nn {
class Module;
}

namespace gradaccum::detail {

/// Parameters and buffers with their full names; a shared one under each of its names.
Archive::Tensors tensors_of_module(const torch::nn::Module& module);

/// Throws where it has no memory for each of its numbers.
void check_can_be_loaded(const std::string& name, const at::Tensor& tensor);

/// Parameters and buffers by name; loaded into the tensors that are there.
void archive_module(Archive& archive, torch::nn::Module& module);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/state/module_state.ipp>
#endif
