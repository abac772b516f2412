// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/metrics.hpp>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace gradaccum {

class Archive;

/// A validation during training and its position. `Validate` passes it to every policy that has `on_validation`.
///
///     ga::Trainer trainer(model, sgd, [](auto& net, auto& batch) {
///       return torch::mse_loss(net->forward(batch.data), batch.target);
///     });
///     auto report = trainer.fit(batches);
///     for (const ga::Validation& validation : report.validations)
///       std::cout << validation.update << ": " << validation["loss"].value() << '\n';
struct Validation {
  std::string name = "validation";  ///< the name of its `Validate`
  std::int64_t update = 0;          ///< the trainer's updates so far
  std::int64_t epoch = 0;           ///< counted from 0
  std::int64_t samples = 0;         ///< samples that this `fit` has trained on
  double seconds = 0;               ///< duration of this `fit` so far
  Evaluation found = {};

  /// Looks up a number: by its own name, `loss`, if this validation is named "validation", or by both names,
  /// `test/loss`. Returns nullopt if it does not exist.
  std::optional<double> operator[](std::string_view metric) const;
};

namespace detail {

/// All validations of a `fit`, as part of its state.
struct ValidationHistory {
  std::vector<Validation>& all;
  void state(Archive& archive);
};

}  // namespace detail
}  // namespace gradaccum

#ifndef GRADACCUM_COMPILED
#include <gradaccum/validation.ipp>
#endif
