// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace gradaccum {

class Archive;

/// A number at an update.
struct CurvePoint {
  std::int64_t update = 0;  ///< counted by the caller
  double value = 0;         ///< may be NaN or infinite
};

/// Neighbouring points of a curve. NaN and infinities are counted, and are in no other number.
struct CurvePiece {
  std::int64_t first = 0, last = 0;      ///< updates of its points
  std::int64_t finite = 0, gaps = 0;     ///< how many are numbers, and how many are NaN or infinite
  CurvePoint lowest = {}, highest = {};  ///< the first of equal ones
  double mean = 0;                       ///< lies between both, whatever is rounded or overflows
};

/// A number over the updates of a training: at most 256 pieces of as many updates each, twice as many whenever there
/// would be more pieces. Where a piece begins depends on the updates alone, not on where a program was stopped.
class Curve {
 public:
  static constexpr std::size_t most_pieces = 256;  ///< bounds its memory

  /// Adds a point. Updates go up, or stay; one that goes back forgets what was there from then on.
  void add(std::int64_t update, double value);

  bool empty() const { return pieces_.empty(); }                     ///< has no point
  const std::vector<CurvePiece>& pieces() const { return pieces_; }  ///< in the order of their updates
  std::int64_t level() const { return level_; }                      ///< a piece has 2^level updates
  CurvePoint last() const;                                           ///< the last point, which may be NaN or infinite
  std::optional<CurvePoint> lowest() const;                          ///< none where no point is a number
  std::optional<CurvePoint> highest() const;                         ///< none where no point is a number

 private:
  friend class Curves;
  void append(const CurvePiece& piece);
  void check() const;

  std::vector<CurvePiece> pieces_;
  std::int64_t level_ = 0;
  double last_value_ = 0;
};

/// Numbers over the updates of a run, by name: what a `RunPage` draws.
///
///     ga::Curves curves;
///     for (std::int64_t update = 1; update <= 1000; ++update) {
///       curves.add("train/loss", update, 1.0 / update);
///       if (update % 100 == 0) curves.add("validation/loss", update, 1.1 / update);
///     }
///
/// Names are what you like: the part after the last `/` is the chart that a curve is drawn on, the part before it its
/// name there. Memory is bounded, for a million updates as well: 18 KB a curve. NaN and infinities are gaps.
///
/// Curves are a part of a state: a run that goes on has the curves of one that was never stopped, to the bit.
class Curves {
 public:
  /// A curve and its name.
  struct Named {
    std::string name;  ///< as it was given, of any bytes
    Curve curve;       ///< its points
  };

  /// Adds a point to the curve of this name, which begins with it where there is none.
  void add(std::string_view name, std::int64_t update, double value);
  /// Tells whether there is no curve.
  bool empty() const { return all_.empty(); }
  /// All curves, in the order in which they came.
  const std::vector<Named>& all() const { return all_; }
  /// The curve of this name; null where there is none.
  const Curve* find(std::string_view name) const;
  /// Saves and loads all curves.
  void state(Archive& archive);

 private:
  struct Packed;
  Curve& at(std::string_view name);

  std::vector<Named> all_;
  std::map<std::string, std::size_t, std::less<>> places_;
};

}  // namespace gradaccum

#ifndef GRADACCUM_COMPILED
#include <gradaccum/curves.ipp>
#endif
