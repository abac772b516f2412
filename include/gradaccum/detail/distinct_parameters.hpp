// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <torch/optim/optimizer.h>

#include <cstddef>
#include <unordered_set>
#include <utility>
#include <vector>

namespace gradaccum::detail {

/// Notices a parameter that is listed twice: it would be stepped twice, at the same time. Looks closely only where the
/// list has changed.
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

 private:
  void look(const char* optimizer, const std::vector<torch::optim::OptimizerParamGroup>& groups) {
    std::unordered_set<const void*> seen;
    std::vector<const void*> all;
    for (auto& group : groups)
      for (auto& parameter : group.params()) {
        all.push_back(parameter.unsafeGetTensorImpl());
        TORCH_CHECK(seen.insert(all.back()).second, optimizer, ": a parameter of shape ", parameter.sizes(),
                    " is listed twice; list it once, in one group");
      }
    known_ = std::move(all);
  }

  std::vector<const void*> known_;
};

}  // namespace gradaccum::detail
