// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/state/module_state.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/state/owned_tensor.hpp>

#include <ATen/MemoryOverlap.h>
#include <c10/util/Exception.h>
#include <torch/nn/module.h>

#include <cstddef>
#include <sstream>
#include <utility>
#include <vector>

namespace gradaccum::detail {

GRADACCUM_INLINE Archive::Tensors tensors_of_module(const torch::nn::Module& module) {
  Archive::Tensors all;
  const auto add = [&](const auto& named) {
    for (auto& item : named)
      if (item.value().defined()) all.emplace(item.key(), item.value());
  };
  add(module.named_parameters());
  add(module.named_buffers());
  return all;
}

/// Describes a tensor: `weight, Float [2, 3]`.
GRADACCUM_INLINE std::string described(const std::string& name, const at::Tensor& tensor) {
  return c10::str(name, ", ", tensor.scalar_type(), " ", tensor.sizes());
}

GRADACCUM_INLINE void check_can_be_loaded(const std::string& name, const at::Tensor& tensor) {
  TORCH_CHECK(!tensor.is_meta() && at::has_internal_overlap(tensor) != at::MemOverlap::Yes, "the module's ", name,
              " must have memory for each of its numbers, got ",
              tensor.is_meta() ? "a tensor on the device meta" : "an expanded tensor", "; give it a clone()");
}

/// Lists the first differences between the names, dtypes and shapes of two sets of tensors.
GRADACCUM_INLINE std::string differences(const Archive::Tensors& saved, const Archive::Tensors& here) {
  std::vector<std::string> all;
  for (auto& [name, tensor] : saved) {
    const auto other = here.find(name);
    if (other == here.end())
      all.push_back("the state alone has " + described(name, tensor));
    else if (described(name, tensor) != described(name, other->second))
      all.push_back("the state has " + described(name, tensor) + ", the model " + described(name, other->second));
  }
  for (auto& [name, tensor] : here)
    if (!saved.contains(name)) all.push_back("the model alone has " + described(name, tensor));
  std::ostringstream text;
  constexpr std::size_t shown = 10;
  for (std::size_t i = 0; i < all.size() && i < shown; ++i) text << "\n  " << all[i];
  if (all.size() > shown) text << "\n  and " << all.size() - shown << " more";
  return text.str();
}

GRADACCUM_INLINE void archive_module(Archive& archive, torch::nn::Module& module) {
  auto here = tensors_of_module(module);
  if (!archive.loading()) return archive.tensors(here);
  Archive::Tensors saved;
  archive.tensors(saved);
  const auto different = differences(saved, here);
  TORCH_CHECK(different.empty() || archive.changes_allowed(),
              "ModelState: the state is of another model; {.allow_changes = true} loads what fits:", different);
  std::vector<std::pair<at::Tensor, at::Tensor>> loads;
  for (auto& [name, tensor] : saved) {
    const auto to = here.find(name);
    if (to == here.end() || described(name, tensor) != described(name, to->second)) continue;
    check_can_be_loaded(name, to->second);
    loads.emplace_back(to->second, tensor);
  }
  saved.clear();
  archive.when_all_fit([loads = std::move(loads)] {
    for (auto& [to, from] : loads) load_into(to, from);
  });
}

}  // namespace gradaccum::detail
