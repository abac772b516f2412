// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace gradaccum::detail {

struct CurvePoint {
  std::int64_t update = 0;
  double value = 0;
};

/// Points of a curve that are beside each other: their mean, and which of them is the lowest and which the highest.
/// NaN and infinities are only counted.
struct CurvePiece {
  std::int64_t first = 0, last = 0;   ///< updates of its points
  std::int64_t finite = 0, gaps = 0;  ///< how many are numbers, and how many are none
  CurvePoint lowest = {}, highest = {};
  double mean = 0;

  double middle() const;
  void take(const CurvePoint& point);
  void take(const CurvePiece& next);
};

/// A number over the updates of a training, in bounded memory: however many points are added, they are kept as at most
/// `most_pieces` pieces, all of as many updates, twice as many whenever there are too many pieces.
///
/// Where a piece begins depends on the updates alone, not on where a program was stopped and went on.
class Curve {
 public:
  static constexpr std::size_t most_pieces = 256;

  Curve() = default;
  /// One that was saved. Throws where it is none.
  Curve(std::int64_t level, double last_value, std::vector<CurvePiece> pieces);

  /// Updates go up, or stay: one that goes back forgets what was there from then on, since that is done once more.
  void add(std::int64_t update, double value);

  bool empty() const { return pieces_.empty(); }
  const std::vector<CurvePiece>& pieces() const { return pieces_; }
  std::int64_t level() const { return level_; }  ///< a piece is 2^level updates
  std::int64_t points() const;
  std::int64_t gaps() const;  ///< points that are no numbers
  CurvePoint last() const;    ///< may be no number
  std::optional<CurvePoint> lowest() const, highest() const;
  /// The piece that is nearest to there, of those that have a number.
  const CurvePiece* nearest(double update) const;

 private:
  std::int64_t piece_of(std::int64_t update) const { return update >> level_; }
  void append(const CurvePiece& piece);
  void coarsen();

  std::vector<CurvePiece> pieces_;
  std::int64_t level_ = 0;
  double last_value_ = 0;
};

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/watching/curve.ipp>
#endif
