// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/verification/errors.hpp>
#include <gradaccum/detail/verification/modules.hpp>
#include <gradaccum/detail/verification/passes.hpp>
#include <gradaccum/detail/verification/sentences.hpp>
#include <gradaccum/detail/verification/shares.hpp>

#include <c10/util/Exception.h>

#include <cmath>
#include <cstdint>
#include <exception>
#include <optional>
#include <string>
#include <vector>

namespace gradaccum::detail {

/// Finds by experiment why micro-batches do not give what one batch gives.
///
/// First with all modules in evaluation mode, where only the loss can be a reason: is there any sum of the
/// micro-batches' gradients that is the whole batch's? Then with some modules in training mode.
class CauseSearch {
 public:
  explicit CauseSearch(VerifyPasses& passes)
      : passes_(passes), as_it_is_(passes.model().modes()), quiet_(as_it_is_.size(), false) {}

  /// `whole`: the gradients of one batch. `equal`: those of the micro-batches were equal to them.
  std::vector<std::string> run(const GradientList& whole, bool equal);

 private:
  using Modes = ModelGuard::Modes;
  using Shares = std::vector<double>;

  void look_closer(bool random);
  std::optional<Shares> shares_in_loss();
  void say(const std::string& sentence) { causes_.push_back(sentence); }
  GradientList whole(const Modes& modes, bool other_random_numbers = false) {
    return passes_.gradients_of(VerifyPasses::whole_batch, modes, other_random_numbers);
  }

  VerifyPasses& passes_;
  Modes as_it_is_, quiet_;
  std::vector<std::string> causes_;
};

inline std::vector<std::string> CauseSearch::run(const GradientList& gradients, bool equal) {
  const double size = largest(gradients);
  if (!std::isfinite(size)) return {sentences::not_finite};
  if (size == 0) say(sentences::zero);
  const bool random = passes_.differ(whole(as_it_is_, /*other_random_numbers=*/true), gradients);
  if (random && passes_.differ(whole(as_it_is_), gradients)) return {sentences::not_a_function};
  if (equal && !random) return causes_;
  try {
    look_closer(random);
    if (causes_.empty()) say(sentences::no_module_alone);
  } catch (const c10::Error& error) {
    say(sentences::ended_early + std::string(error.what_without_backtrace()));
  } catch (const std::exception& error) {
    say(sentences::ended_early + std::string(error.what()));
  }
  return causes_;
}

inline void CauseSearch::look_closer(bool random) {
  const bool always_random = random && passes_.differ(whole(quiet_, /*other_random_numbers=*/true), whole(quiet_));
  if (always_random) say(sentences::always_random);
  const auto shares = always_random ? std::nullopt : shares_in_loss();
  for (auto& sentence : ModuleSearch(passes_).run(random, shares ? &*shares : nullptr)) say(sentence);
}

/// The shares that the micro-batches' gradients have in the whole batch's, if they have any.
inline std::optional<CauseSearch::Shares> CauseSearch::shares_in_loss() {
  const auto gradients = whole(quiet_);
  const auto as_returned = passes_.error(passes_.accumulated(quiet_), gradients);
  const auto items = shares_of(passes_.items()), rows = shares_of(passes_.rows());
  const auto fits = [&](const Shares& shares) {
    return !passes_.differ(passes_.accumulated(quiet_, shares), gradients);
  };
  if (as_returned <= passes_.tolerance()) return items;
  if (rows != items && fits(rows)) return say(sentences::rows(passes_.rows())), rows;
  const Shares sum(rows.size(), 1.0);
  if (fits(sum)) return say(sentences::sum(rows.size())), sum;
  if (sample_of(gradients, gradients).numel() <= static_cast<std::int64_t>(rows.size()))
    return say(sentences::too_few_parameters), std::nullopt;
  const auto solved = solve_shares(passes_, quiet_, gradients);
  if (solved && fits(*solved)) return say(sentences::items(*solved, passes_.losses())), solved;
  return say(sentences::coupling(as_returned)), std::nullopt;
}

}  // namespace gradaccum::detail
