// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/archive.hpp>

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>
#include <torch/ordered_dict.h>

#include <functional>
#include <map>
#include <string>
#include <unordered_map>

namespace gradaccum::detail {

/// An optimizer's state as named tensors: `exp_avg.0.weight`. LibTorch's own files identify parameters only by
/// position.

using NamedTensors = std::map<std::string, at::Tensor>;
using NamedParameters = torch::OrderedDict<std::string, at::Tensor>;  // the type of Module::named_parameters()

/// Looks up a parameter's name.
class NameOf {
 public:
  explicit NameOf(const NamedParameters& parameters);
  const std::string& operator()(const at::Tensor& parameter) const;

 private:
  std::unordered_map<const void*, std::string> names_;
};

template <class Body>
void for_each_parameter(const torch::optim::Optimizer& optimizer, const Body& body) {
  for (auto& group : optimizer.param_groups())
    for (auto& parameter : group.params()) body(parameter);
}

/// Options that serialize themselves.
struct ArchivesItself {
  virtual ~ArchivesItself() = default;
  virtual void state(Archive& archive) = 0;
};

/// An optimizer that defines its own state.
struct NamesItsState {
  virtual ~NamesItsState() = default;
  virtual NamedTensors named_state(const NamedParameters& parameters) const = 0;
  /// Checks and copies a result of `named_state`. Returns a function that installs it.
  virtual std::function<void()> take_named_state(const NamedParameters& parameters, NamedTensors state,
                                                 bool lenient) = 0;
};

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/state/named_state.ipp>
#endif
