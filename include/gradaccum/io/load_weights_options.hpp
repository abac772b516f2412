// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/io/safetensors.hpp>

#include <string>
#include <vector>

namespace gradaccum::io {

/// Permitted differences between a file of weights and a module.
struct LoadWeightsOptions {
  bool strict = true;  ///< throw if the file and the module differ; otherwise load what fits

  /// Hugging Face's attribute of this name; "transformer" for BLOOM, where a model with a head has
  /// `transformer.ln_f.weight`, and the model without one `ln_f.weight`. A weight that the file lacks is looked up with
  /// the prefix added or removed, unless the module has that name too.
  std::string base_model_prefix = {};

  /// Weights that the file may lack, such as those of a new head; the name of a module stands for all of its weights.
  /// If the file has them, they are loaded.
  std::vector<std::string> may_be_missing = {};
};

}  // namespace gradaccum::io
