// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/verify_errors.hpp>
#include <gradaccum/detail/verify_guard.hpp>
#include <gradaccum/detail/verify_passes.hpp>
#include <gradaccum/detail/verify_shares.hpp>

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
#include <string>
#include <vector>

namespace gradaccum::detail {

/// Finds by experiment why micro-batches do not give what one batch gives.
///
/// First with all modules in evaluation mode, where only the loss can be a reason: is there any sum of the
/// micro-batches' gradients that is the whole batch's? Then with some modules in training mode.
class CauseSearch {
 public:
  CauseSearch(VerifyPasses& passes, double tolerance)
      : passes_(passes), tolerance_(tolerance), as_it_is_(passes.model().modes()), quiet_(as_it_is_.size(), false) {}

  /// `whole`: the gradients of one batch. `equal`: those of the micro-batches were equal to them.
  std::vector<std::string> run(const GradientList& whole, bool equal);

 private:
  using Modes = ModelGuard::Modes;
  using Parts = std::set<std::size_t>;  // their numbers
  using Shares = std::optional<std::vector<double>>;

  void look_closer();
  Shares shares_in_loss();
  std::string sentence_on_rows() const;
  std::string sentence_on_items(const std::vector<double>& shares) const;
  std::string sentence_on_sum() const;
  std::string sentence_on_coupling(double error) const;
  void name_modules(const Shares& shares);
  Parts that_draw();
  Parts with_statistics(const Shares& shares);
  template <class Test>
  void descend(std::size_t part, const Modes& candidates, const Test& test, Parts& found) const;
  void say(const std::string& sentence) { causes_.push_back(sentence); }
  void say(const Parts& parts, const std::string& what);

  double error(const GradientList& a, const GradientList& b) const {
    const auto errors = relative_errors(a, b, passes_.rounding());
    return *std::max_element(errors.begin(), errors.end());
  }
  bool differ(const GradientList& a, const GradientList& b) const { return error(a, b) > tolerance_; }
  bool unequal(const Modes& modes, const std::vector<double>& shares) {
    const auto whole = passes_.gradients_of(VerifyPasses::whole_batch, modes);
    return differ(passes_.accumulated(modes, shares), whole);
  }
  bool random(const Modes& modes) {
    const auto some = passes_.gradients_of(VerifyPasses::whole_batch, modes);
    return differ(passes_.gradients_of(VerifyPasses::whole_batch, modes, /*other_random_numbers=*/true), some);
  }

  VerifyPasses& passes_;
  double tolerance_;
  Modes as_it_is_, quiet_;
  bool random_ = false, random_when_quiet_ = false;
  std::vector<std::string> causes_;
};

inline std::vector<std::string> CauseSearch::run(const GradientList& whole, bool equal) {
  const double size = largest(whole);
  if (!std::isfinite(size)) return {"the gradients of the whole batch are not finite: there is nothing to compare"};
  if (size == 0) say("the gradients of the whole batch are 0: there is nothing to compare");
  const auto other = passes_.gradients_of(VerifyPasses::whole_batch, as_it_is_, /*other_random_numbers=*/true);
  random_ = differ(other, whole);
  if (random_ && differ(passes_.gradients_of(VerifyPasses::whole_batch, as_it_is_), whole))
    return {
        "the same batch gives other gradients each time, from the same random numbers: the objective or a module "
        "keeps a state of its own, or draws from a generator of its own"};
  if (equal && !random_) return causes_;
  try {
    look_closer();
    if (causes_.empty()) say("in evaluation mode the gradients are equal, but no module alone makes the difference");
  } catch (const c10::Error& error) {
    say(std::string("the search ended early, with the model in evaluation mode: ") + error.what_without_backtrace());
  } catch (const std::exception& error) {
    say(std::string("the search ended early, with the model in evaluation mode: ") + error.what());
  }
  return causes_;
}

inline void CauseSearch::look_closer() {
  random_when_quiet_ = random_ && random(quiet_);
  if (random_when_quiet_)
    say("random numbers are drawn in evaluation mode, too, by the objective or by a forward() that does not ask "
        "is_training(): other ones for micro-batches than for one batch");
  name_modules(random_when_quiet_ ? Shares() : shares_in_loss());
}

/// The shares of the micro-batches in the whole batch's gradient, where there are any.
inline CauseSearch::Shares CauseSearch::shares_in_loss() {
  const auto whole = passes_.gradients_of(VerifyPasses::whole_batch, quiet_);
  const auto as_returned = error(passes_.accumulated(quiet_), whole);
  const auto items = shares_of(passes_.items()), rows = shares_of(passes_.rows());
  const auto fits = [&](const std::vector<double>& shares) {
    return !differ(passes_.accumulated(quiet_, shares), whole);
  };
  if (as_returned <= tolerance_) return items;
  if (rows != items && fits(rows)) return say(sentence_on_rows()), rows;
  const std::vector<double> sum(rows.size(), 1.0);
  if (fits(sum)) return say(sentence_on_sum()), sum;
  if (sample_of(whole, whole).numel() <= static_cast<std::int64_t>(rows.size()))
    return say("the loss: the parameters are too few to find out more; ask with fewer steps"), std::nullopt;
  const auto solved = solve_shares(passes_, quiet_, whole);
  if (solved && fits(*solved)) return say(sentence_on_items(*solved)), solved;
  return say(sentence_on_coupling(as_returned)), std::nullopt;
}

inline void CauseSearch::name_modules(const Shares& shares) {
  const auto draw = random_ ? that_draw() : Parts();
  const auto keep_statistics = with_statistics(shares);
  say(draw, "draws random numbers in training mode, other ones for micro-batches than for one batch");
  say(keep_statistics, "computes over its whole batch in training mode, and changes its buffers");
  if (!shares) return;
  auto rest = as_it_is_;
  for (auto part : draw) rest[part] = false;
  for (auto part : keep_statistics) rest[part] = false;
  Parts found;
  descend(
      0, rest, [&](const Modes& modes) { return unequal(modes, *shares); }, found);
  say(found, "computes over its whole batch in training mode");
}

/// Those after which the random numbers are elsewhere than if all had been in evaluation mode.
inline CauseSearch::Parts CauseSearch::that_draw() {
  const auto state_after = [&](const Modes& modes) {
    passes_.forward(modes);
    return passes_.model().random_state();
  };
  const auto quiet = state_after(quiet_);
  const auto draws = [&](const Modes& modes) {
    const auto state = state_after(modes);
    return !std::equal(state.begin(), state.end(), quiet.begin(), [](auto& a, auto& b) { return a.equal(b); });
  };
  Parts found;
  descend(0, as_it_is_, draws, found);
  return found;
}

/// Those whose buffers a forward pass changes. Where the loss has shares, only the classes that break the equality: a
/// counter in a buffer does not.
inline CauseSearch::Parts CauseSearch::with_statistics(const Shares& shares) {
  passes_.forward(as_it_is_);
  std::map<std::string, Parts> by_class;
  auto& parts = passes_.model().parts();
  for (std::size_t i = 0; i < parts.size(); ++i)
    if (as_it_is_[i] && passes_.model().changed_buffers(parts[i])) by_class[type_name(*parts[i].module)].insert(i);
  Parts found;
  for (auto& [name, candidates] : by_class) {
    auto modes = quiet_;
    for (auto part : candidates) modes[part] = true;
    if (!shares || unequal(modes, *shares)) found.insert(candidates.begin(), candidates.end());
  }
  return found;
}

/// Adds the modules that alone, in training mode, pass the test: those in a module that does not pass it with all that
/// is in it are left out.
template <class Test>
void CauseSearch::descend(std::size_t part, const Modes& candidates, const Test& test, Parts& found) const {
  const auto& parts = passes_.model().parts();
  const auto end = parts[part].end;
  auto with_all_inside = quiet_, alone = quiet_;
  for (auto i = part; i < end; ++i) with_all_inside[i] = candidates[i];
  alone[part] = candidates[part];
  if (with_all_inside == quiet_ || !test(with_all_inside)) return;
  if (alone == with_all_inside || (alone != quiet_ && test(alone))) found.insert(part);
  for (auto child = part + 1; child < end; child = parts[child].end) descend(child, candidates, test, found);
}

inline void CauseSearch::say(const Parts& parts, const std::string& what) {
  if (parts.empty()) return;
  constexpr std::size_t most = 6;
  std::string names;
  std::size_t count = 0;
  for (auto part : parts) {
    if (++count > most) break;
    names += (count > 1 ? ", " : "") + name_of(passes_.model().parts()[part]);
  }
  if (parts.size() > most) names += " and " + std::to_string(parts.size() - most) + " more";
  say(names + ": " + what);
}

/// `3, 3, 2, 2`
template <class Number>
std::string listed(const std::vector<Number>& numbers) {
  constexpr std::size_t most = 8;
  std::string text;
  for (std::size_t i = 0; i < std::min(most, numbers.size()); ++i) text += c10::str(i > 0 ? ", " : "", numbers[i]);
  return text + (numbers.size() > most ? ", ..." : "");
}

inline std::string CauseSearch::sentence_on_rows() const {
  return "the loss is a mean over rows, and the micro-batches have unequal ones (" + listed(passes_.rows()) +
         "): return ga::Loss{mean, rows}";
}

inline std::string CauseSearch::sentence_on_items(const std::vector<double>& shares) const {
  std::vector<double> rounded;
  for (auto share : shares) rounded.push_back(std::round(1000 * share) / 1000);
  std::string text = "the loss is a mean over items that the micro-batches have unequal shares of (" + listed(rounded) +
                     "), as valid tokens are: return ga::Loss{mean, items}";
  for (std::size_t i = 0; i < passes_.losses().size(); ++i)
    if (!std::isfinite(passes_.losses()[i]))
      return text + "; with 0 items where there are none: the loss of number " + std::to_string(i) + " is not finite";
  return text;
}

inline std::string CauseSearch::sentence_on_sum() const {
  return "the loss is a sum, not a mean: the whole batch has " + std::to_string(passes_.rows().size()) +
         " times the gradient of a micro-batch; divide it by its rows";
}

inline std::string CauseSearch::sentence_on_coupling(double error) const {
  std::string text =
      "no sum of the micro-batches' gradients is the whole batch's, in evaluation mode either: what a sample adds to "
      "the "
      "loss depends on the others, as in a contrastive loss or in a BatchNorm without running statistics";
  if (error < 0.05)
    text += c10::str("; or, as the error there is but ", error, ", it is rounding in 16 bits (autocast)");
  return text;
}

}  // namespace gradaccum::detail
