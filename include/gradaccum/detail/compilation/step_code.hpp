// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

namespace gradaccum::detail {

/// The compiled code of a graph: a function from tensors to tensors.
class StepCode {
 public:
  /// Loads a shared library, whose code runs with this program's rights. Throws `std::runtime_error` with the path.
  StepCode(const std::filesystem::path& library, const std::string& name);
  /// Uses code in this program, by the function table that generated code exports.
  explicit StepCode(void* const* functions);

  std::size_t inputs() const { return inputs_; }
  std::size_t outputs() const { return outputs_; }

  /// Runs the code without autograd and autocast, which are compiled into it. Several threads may call it in turn.
  std::vector<at::Tensor> run(const std::vector<at::Tensor>& inputs) const;

 private:
  struct Functions;

  std::shared_ptr<void> library_, container_;
  const Functions* functions_ = nullptr;
  std::size_t inputs_ = 0, outputs_ = 0;

  void start(void* const* functions);
};

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/compilation/step_code.ipp>
#endif
