// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/types/type_name.hpp>
#include <gradaccum/detail/verification/model_guard.hpp>
#include <gradaccum/detail/verification/passes.hpp>
#include <gradaccum/detail/verification/sentences.hpp>

#include <algorithm>
#include <cstddef>
#include <map>
#include <set>
#include <string>
#include <vector>

namespace gradaccum::detail {

/// Finds the modules that are not the same for micro-batches as for one batch, while they are in training mode.
class ModuleSearch {
 public:
  using Modes = ModelGuard::Modes;
  using Shares = std::vector<double>;

  explicit ModuleSearch(VerifyPasses& passes)
      : passes_(passes), parts_(passes.model().parts()), candidates_(passes.model().modes()) {}

  /// Sentences that name them. `random`: random numbers matter. `shares`: with which the micro-batches are equal to the
  /// whole batch where all modules are in evaluation mode; null if there are none.
  std::vector<std::string> run(bool random, const Shares* shares);

 private:
  using Parts = std::set<std::size_t>;  // their numbers

  Parts that_draw();
  Parts with_statistics(const Shares* shares);
  template <class Test>
  void descend(std::size_t part, const Test& test, Parts& found) const;
  Modes only(const Parts& parts) const {
    Modes modes(parts_.size(), false);
    for (auto part : parts) modes[part] = candidates_[part];
    return modes;
  }
  void name(const Parts& parts, const char* what);

  VerifyPasses& passes_;
  const std::vector<ModelGuard::Part>& parts_;
  Modes candidates_;  // in training mode, and not found yet
  std::vector<std::string> sentences_;
};

inline std::vector<std::string> ModuleSearch::run(bool random, const Shares* shares) {
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

/// Those after which the random numbers are elsewhere than if all had been in evaluation mode.
inline ModuleSearch::Parts ModuleSearch::that_draw() {
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

/// Those whose buffers a forward pass changes. Where that can be told, only the classes that break the equality: a
/// counter in a buffer does not.
inline ModuleSearch::Parts ModuleSearch::with_statistics(const Shares* shares) {
  passes_.forward(candidates_);
  std::map<std::string, Parts> by_class;
  for (std::size_t i = 0; i < parts_.size(); ++i)
    if (candidates_[i] && passes_.model().changed_buffers(parts_[i])) by_class[type_name(*parts_[i].module)].insert(i);
  Parts found;
  for (auto& [type, parts] : by_class)
    if (!shares || passes_.unequal(only(parts), *shares)) found.insert(parts.begin(), parts.end());
  return found;
}

/// Adds the modules that pass the test alone. Where one does not pass it together with all that is in it, nothing that
/// is in it is looked at.
template <class Test>
void ModuleSearch::descend(std::size_t part, const Test& test, Parts& found) const {
  const auto end = parts_[part].end;
  Parts inside;
  for (auto i = part; i < end; ++i) inside.insert(i);
  const auto none = only({}), alone = only({part}), all = only(inside);
  if (all == none || !test(all)) return;
  if (alone == all || (alone != none && test(alone))) found.insert(part);
  for (auto child = part + 1; child < end; child = parts_[child].end) descend(child, test, found);
}

inline void ModuleSearch::name(const Parts& parts, const char* what) {
  std::vector<std::string> names;
  for (auto part : parts) {
    names.push_back(name_of(parts_[part]));
    candidates_[part] = false;
  }
  if (!names.empty()) sentences_.push_back(listed(names, " and ") + ": " + what);
}

}  // namespace gradaccum::detail
