// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <torch/optim/optimizer.h>

#include <cstddef>
#include <unordered_map>
#include <utility>
#include <vector>

namespace gradaccum::detail {

/// The places of an optimizer's parameters, counted through its groups. Notices one that is listed twice: it would be
/// stepped twice, at the same time. Looks closely only where the list has changed.
class DistinctParameters {
 public:
  void check(const char* optimizer, const std::vector<torch::optim::OptimizerParamGroup>& groups) {
    std::size_t i = 0;
    bool same = true;
    for (auto& group : groups)
      for (auto& parameter : group.params()) {
        same = same && i < known_.size() && known_[i] == parameter.unsafeGetTensorImpl();
        ++i;
      }
    if (same && i == known_.size()) return;
    look(optimizer, groups);
  }

  std::size_t place_of(const at::Tensor& parameter) const { return places_.at(parameter.unsafeGetTensorImpl()); }

 private:
  void look(const char* optimizer, const std::vector<torch::optim::OptimizerParamGroup>& groups) {
    std::unordered_map<const void*, std::size_t> places;
    std::vector<const void*> all;
    for (auto& group : groups)
      for (auto& parameter : group.params()) {
        all.push_back(parameter.unsafeGetTensorImpl());
        TORCH_CHECK(places.emplace(all.back(), places.size()).second, optimizer, ": a parameter of shape ",
                    parameter.sizes(), " is listed twice; list it once, in one group");
      }
    known_ = std::move(all);
    places_ = std::move(places);
  }

  std::vector<const void*> known_;
  std::unordered_map<const void*, std::size_t> places_;
};

}  // namespace gradaccum::detail
