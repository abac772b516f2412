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

/// What an evaluation in the middle of a training has found, and when: what `Validate` tells every policy that has
/// `on_validation`.
///
///     ga::Trainer trainer(model, sgd, [](auto& net, auto& batch) {
///       return torch::mse_loss(net->forward(batch.data), batch.target);
///     });
///     auto report = trainer.fit(batches);
///     for (const ga::Validation& validation : report.validations)
///       std::cout << validation.update << ": " << validation["loss"].value() << '\n';
struct Validation {
  std::string name = "validation";  ///< of what: that of its `Validate`
  std::int64_t update = 0;          ///< of the trainer, so far
  std::int64_t epoch = 0;           ///< counted from 0
  std::int64_t samples = 0;         ///< that this `fit` has trained with
  double seconds = 0;               ///< that this `fit` has taken
  Evaluation found = {};

  /// A number by its own name, `loss`, where this validation is the one called "validation"; or by both names,
  /// `test/loss`. None where it is not among those of this one.
  std::optional<double> operator[](std::string_view metric) const;
};

namespace detail {

/// All validations of a `fit`, as a part of its state.
struct ValidationHistory {
  std::vector<Validation>& all;
  void state(Archive& archive);
};

}  // namespace detail
}  // namespace gradaccum

#ifndef GRADACCUM_COMPILED
#include <gradaccum/validation.ipp>
#endif
