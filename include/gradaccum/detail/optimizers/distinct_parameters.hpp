// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <cstddef>
#include <unordered_map>
#include <vector>

namespace gradaccum::detail {

/// The index of each of an optimizer's parameters, counted across its groups. `check` throws if one is listed twice, as
/// it would be stepped twice at the same time, and is cheap while the list is unchanged.
class DistinctParameters {
 public:
  void check(const char* optimizer, const std::vector<torch::optim::OptimizerParamGroup>& groups);
  std::size_t place_of(const at::Tensor& parameter) const { return places_.at(parameter.unsafeGetTensorImpl()); }

 private:
  std::vector<const void*> known_;
  std::unordered_map<const void*, std::size_t> places_;
};

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/optimizers/distinct_parameters.ipp>
#endif
