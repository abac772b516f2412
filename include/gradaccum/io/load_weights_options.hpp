// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/io/safetensors.hpp>

#include <c10/util/Exception.h>

#include <algorithm>
#include <string>
#include <vector>

namespace gradaccum::io {

struct LoadWeightsOptions {
  bool strict = true;  ///< throw where the file and the module differ; else load what fits

  /// Hugging Face's; "transformer" for BLOOM, where a model with a head has `transformer.ln_f.weight`, and the model
  /// without one `ln_f.weight`. Weights that the file has not are looked for under their names with the prefix, or
  /// without it, unless the module has that name too.
  std::string base_model_prefix = {};

  /// Weights that the file need not have, such as a new head's; a module's name means all of its weights. Where the
  /// file has them, they are loaded.
  std::vector<std::string> may_be_missing = {};
};

}  // namespace gradaccum::io

namespace gradaccum::detail {

/// The weight has that name, or is in a module of that name.
inline bool belongs_to(const std::string& weight, const std::string& name) {
  return weight == name || weight.starts_with(name + ".");
}

inline void check_options(const io::LoadWeightsOptions& options, const io::Tensors& weights) {
  TORCH_CHECK(!options.base_model_prefix.ends_with('.'),
              "LoadWeightsOptions: base_model_prefix must be given without the dot at its end, got '",
              options.base_model_prefix, "'");
  for (auto& name : options.may_be_missing)
    TORCH_CHECK(std::ranges::any_of(weights, [&](auto& weight) { return belongs_to(weight.first, name); }),
                "LoadWeightsOptions: may_be_missing must have names of the module's weights or modules, got '", name,
                "'");
}

}  // namespace gradaccum::detail
