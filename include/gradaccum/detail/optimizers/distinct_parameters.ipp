// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/optimizers/distinct_parameters.hpp>

#include <gradaccum/detail/build/inline.hpp>

#include <c10/util/Exception.h>

#include <utility>

namespace gradaccum::detail {

GRADACCUM_INLINE void DistinctParameters::check(const char* optimizer,
                                                const std::vector<torch::optim::OptimizerParamGroup>& groups) {
  std::size_t i = 0;
  bool same = true;
  for (auto& group : groups)
    for (auto& parameter : group.params()) {
      same = same && i < known_.size() && known_[i] == parameter.unsafeGetTensorImpl();
      ++i;
    }
  if (same && i == known_.size()) return;
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

}  // namespace gradaccum::detail
