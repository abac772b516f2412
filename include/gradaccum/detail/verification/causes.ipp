// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/verification/causes.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/types/type_name.hpp>
#include <gradaccum/detail/verification/sentences.hpp>

#include <ATen/ops/cat.h>
#include <ATen/ops/linalg_lstsq.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <map>
#include <numeric>
#include <optional>
#include <set>
#include <tuple>

namespace gradaccum::detail {

/// The share of each number in their sum.
template <class Number>
std::vector<double> shares_of(const std::vector<Number>& numbers) {
  const double all = std::accumulate(numbers.begin(), numbers.end(), 0.0);
  std::vector<double> shares;
  for (auto number : numbers) shares.push_back(all > 0 ? static_cast<double>(number) / all : 0);
  return shares;
}

/// Some elements of each gradient as one float64 vector on the CPU, enough to solve for a few unknowns.
GRADACCUM_INLINE at::Tensor sample_of(const GradientList& gradients, const GradientList& like) {
  constexpr std::int64_t most = 4096;
  std::vector<at::Tensor> samples;
  for (std::size_t i = 0; i < like.size(); ++i) {
    if (!like[i].defined()) continue;
    auto flat = (gradients[i].defined() ? gradients[i] : at::zeros_like(like[i])).flatten();
    flat = flat.slice(0, 0, flat.numel(), flat.numel() / most + 1).cpu();
    samples.push_back((flat.is_complex() ? at::view_as_real(flat.resolve_conj()).flatten() : flat).to(at::kDouble));
  }
  return at::cat(samples);
}

/// Finds the share of each micro-batch's gradient in the whole batch's by least squares, as a gradient has more
/// elements than there are micro-batches. Returns nothing unless the shares add up to 1, as those of a mean do. The
/// share of a gradient that is not finite is 0.
GRADACCUM_INLINE std::optional<std::vector<double>> solve_shares(VerifyPasses& passes, const ModelGuard::Modes& modes,
                                                                 const GradientList& whole) {
  const auto wanted = sample_of(whole, whole);
  const auto count = static_cast<std::int64_t>(passes.rows().size());
  std::vector<at::Tensor> columns, finite;
  for (std::int64_t i = 0; i < count; ++i) {
    auto column = sample_of(passes.gradients_of(i, modes), whole);
    finite.push_back(column.isfinite().all());
    columns.push_back(finite.back().item<bool>() ? column : at::zeros_like(column));
  }
  const auto found = std::get<0>(at::linalg_lstsq(at::stack(columns, 1), wanted.unsqueeze(1), {}, "gelsd"));
  // Sets shares of zero columns to exactly 0: solved ones may be close to 0, and that times NaN is NaN.
  const auto clamped = found.flatten().clamp_min(0).mul(at::stack(finite)).contiguous();
  if (std::abs(clamped.sum().item<double>() - 1) > 0.05) return std::nullopt;
  return std::vector<double>(clamped.data_ptr<double>(), clamped.data_ptr<double>() + count);
}

/// Finds modules that treat micro-batches differently from one batch in training mode.
class ModuleSearch {
 public:
  using Modes = ModelGuard::Modes;
  using Shares = std::vector<double>;

  explicit ModuleSearch(VerifyPasses& passes)
      : passes_(passes), parts_(passes.model().parts()), candidates_(passes.model().modes()) {}

  /// Returns sentences that name the modules. `random`: random numbers matter. `shares`: weights by which the
  /// micro-batches equal the whole batch in evaluation mode; null if there are none.
  std::vector<std::string> run(bool random, const Shares* shares) {
    const auto draw = random ? that_draw() : Parts();
    const auto statistics = with_statistics(shares);
    name(draw, sentences::draws);
    name(statistics, sentences::statistics);
    if (!shares) return sentences_;
    Parts others;
    descend(
        0, [&](const Modes& modes) { return passes_.unequal(modes, *shares); }, others);
    name(others, sentences::over_the_batch);
    return sentences_;
  }

 private:
  using Parts = std::set<std::size_t>;  // indices of modules

  /// Finds modules that leave another random state than a forward pass in evaluation mode.
  Parts that_draw() {
    const auto state_after = [&](const Modes& modes) {
      passes_.forward(modes);
      return passes_.model().random_state();
    };
    const auto quiet = state_after(only({}));
    Parts found;
    const auto draws = [&](const Modes& modes) {
      const auto state = state_after(modes);
      return !std::equal(state.begin(), state.end(), quiet.begin(), [](auto& a, auto& b) { return a.equal(b); });
    };
    descend(0, draws, found);
    return found;
  }

  /// Finds modules whose buffers a forward pass changes. With `shares`, keeps only classes that break the equality,
  /// which a counter in a buffer does not.
  Parts with_statistics(const Shares* shares) {
    passes_.forward(candidates_);
    std::map<std::string, Parts> by_class;
    for (std::size_t i = 0; i < parts_.size(); ++i)
      if (candidates_[i] && passes_.model().changed_buffers(parts_[i]))
        by_class[type_name(*parts_[i].module)].insert(i);
    Parts found;
    for (auto& [type, parts] : by_class)
      if (!shares || passes_.unequal(only(parts), *shares)) found.insert(parts.begin(), parts.end());
    return found;
  }

  /// Adds modules that pass the test alone. Skips a module's children if it fails the test together with them.
  template <class Test>
  void descend(std::size_t part, const Test& test, Parts& found) const {
    const auto end = parts_[part].end;
    Parts inside;
    for (auto i = part; i < end; ++i) inside.insert(i);
    const auto none = only({}), alone = only({part}), all = only(inside);
    if (all == none || !test(all)) return;
    if (alone == all || (alone != none && test(alone))) found.insert(part);
    for (auto child = part + 1; child < end; child = parts_[child].end) descend(child, test, found);
  }

  Modes only(const Parts& parts) const {
    Modes modes(parts_.size(), false);
    for (auto part : parts) modes[part] = candidates_[part];
    return modes;
  }

  void name(const Parts& parts, const char* what) {
    std::vector<std::string> names;
    for (auto part : parts) {
      names.push_back(name_of(parts_[part]));
      candidates_[part] = false;
    }
    if (!names.empty()) sentences_.push_back(listed(names, " and ") + ": " + what);
  }

  VerifyPasses& passes_;
  const std::vector<ModelGuard::Part>& parts_;
  Modes candidates_;  // modules in training mode, not found yet
  std::vector<std::string> sentences_;
};

class CauseSearch {
 public:
  explicit CauseSearch(VerifyPasses& passes)
      : passes_(passes), as_it_is_(passes.model().modes()), quiet_(as_it_is_.size(), false) {}

  std::vector<std::string> run(const GradientList& gradients, bool equal) {
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

 private:
  using Modes = ModelGuard::Modes;
  using Shares = std::vector<double>;

  void look_closer(bool random) {
    const bool always_random = random && passes_.differ(whole(quiet_, /*other_random_numbers=*/true), whole(quiet_));
    if (always_random) say(sentences::always_random);
    const auto shares = always_random ? std::nullopt : shares_in_loss();
    for (auto& sentence : ModuleSearch(passes_).run(random, shares ? &*shares : nullptr)) say(sentence);
  }

  /// The shares of the micro-batches' gradients in the whole batch's, if there are any.
  std::optional<Shares> shares_in_loss() {
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

  void say(const std::string& sentence) { causes_.push_back(sentence); }
  GradientList whole(const Modes& modes, bool other_random_numbers = false) {
    return passes_.gradients_of(SplitBatch::whole, modes, other_random_numbers);
  }

  VerifyPasses& passes_;
  Modes as_it_is_, quiet_;
  std::vector<std::string> causes_;
};

GRADACCUM_INLINE std::vector<std::string> causes_of_difference(VerifyPasses& passes, const GradientList& whole,
                                                               bool equal) {
  return CauseSearch(passes).run(whole, equal);
}

}  // namespace gradaccum::detail
