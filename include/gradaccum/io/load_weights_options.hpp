// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/io/safetensors.hpp>

#include <string>
#include <vector>

namespace gradaccum::io {

/// In what a file of weights and a module may differ.
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
