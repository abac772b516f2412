// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/watching/curve.hpp>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace gradaccum {

class Archive;

/// Numbers over the updates of a run, by name: what a `RunPage` draws.
///
///     ga::Curves curves;
///     for (std::int64_t update = 1; update <= 1000; ++update) {
///       curves.add("train/loss", update, 1.0 / update);
///       if (update % 100 == 0) curves.add("validation/loss", update, 1.1 / update);
///     }
///
/// Names are what you like; what is after the last `/` says on which chart a curve is, what is before it is its name
/// there. Memory is bounded, for a million updates as well: a curve is kept as at most 256 pieces of as many updates
/// each, with their mean and their extremes (18 KB). Updates go up; where they go back, after an older state was loaded
/// say, what was there from then on is forgotten. NaN and infinities are gaps.
///
/// A part of a state: what goes on has the same curves as what was never stopped, to the bit.
class Curves {
 public:
  struct Named {
    std::string name;
    detail::Curve curve;
  };

  void add(std::string_view name, std::int64_t update, double value);
  bool empty() const { return all_.empty(); }
  /// In the order in which they came.
  const std::vector<Named>& all() const { return all_; }
  /// Null where there is none of that name.
  const detail::Curve* find(std::string_view name) const;
  void state(Archive& archive);

 private:
  detail::Curve& at(std::string_view name);

  std::vector<Named> all_;
  std::map<std::string, std::size_t, std::less<>> places_;
};

}  // namespace gradaccum

#ifndef GRADACCUM_COMPILED
#include <gradaccum/curves.ipp>
#endif
