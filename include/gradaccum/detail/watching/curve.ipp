// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/watching/curve.hpp>

#include <gradaccum/detail/build/inline.hpp>

#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <utility>

namespace gradaccum::detail {

GRADACCUM_INLINE double CurvePiece::middle() const {
  return static_cast<double>(first) / 2 + static_cast<double>(last) / 2;
}

GRADACCUM_INLINE void CurvePiece::take(const CurvePoint& point) {
  const bool is_number = std::isfinite(point.value);
  take(CurvePiece{.first = point.update,
                  .last = point.update,
                  .finite = is_number,
                  .gaps = !is_number,
                  .lowest = point,
                  .highest = point,
                  .mean = point.value});
}

/// Of equal ones the first is the lowest. The mean lies between both, whatever is rounded, or overflows.
GRADACCUM_INLINE void CurvePiece::take(const CurvePiece& next) {
  if (finite + gaps == 0) first = next.first;
  last = next.last;
  gaps += next.gaps;
  if (next.finite == 0) return;
  if (finite == 0 || next.lowest.value < lowest.value) lowest = next.lowest;
  if (finite == 0 || next.highest.value > highest.value) highest = next.highest;
  const double share = static_cast<double>(next.finite) / static_cast<double>(finite + next.finite);
  mean = finite == 0 ? next.mean : mean * (1 - share) + next.mean * share;
  mean = std::clamp(mean, lowest.value, highest.value);
  finite += next.finite;
}

GRADACCUM_INLINE void check_pieces(std::int64_t level, const std::vector<CurvePiece>& pieces) {
  TORCH_CHECK(0 <= level && level < 63, "Curves: the level of a saved curve must be in [0, 62], got ", level);
  TORCH_CHECK(pieces.size() <= Curve::most_pieces, "Curves: a saved curve must have at most ", Curve::most_pieces,
              " pieces, got ", pieces.size());
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    const auto& piece = pieces[i];
    const bool in_order = piece.first <= piece.last && (i == 0 || pieces[i - 1].last >> level < piece.first >> level);
    const bool counts = piece.finite >= 0 && piece.gaps >= 0 && piece.finite <= INT64_MAX / 1024 &&
                        piece.gaps <= INT64_MAX / 1024 && piece.finite + piece.gaps > 0;
    const bool numbers = piece.finite == 0 || (std::isfinite(piece.lowest.value) && std::isfinite(piece.mean) &&
                                               std::isfinite(piece.highest.value));
    TORCH_CHECK(in_order && counts && numbers, "Curves: piece ", i, " of a saved curve is none");
  }
}

GRADACCUM_INLINE Curve::Curve(std::int64_t level, double last_value, std::vector<CurvePiece> pieces)
    : pieces_(std::move(pieces)), level_(level), last_value_(last_value) {
  check_pieces(level_, pieces_);
}

GRADACCUM_INLINE void Curve::add(std::int64_t update, double value) {
  if (!pieces_.empty() && update < pieces_.back().last)
    while (!pieces_.empty() && pieces_.back().last >= update) pieces_.pop_back();
  CurvePiece piece;
  piece.take(CurvePoint{update, value});
  append(piece);
  last_value_ = value;
  while (pieces_.size() > most_pieces) coarsen();
}

GRADACCUM_INLINE void Curve::append(const CurvePiece& piece) {
  if (pieces_.empty() || piece_of(pieces_.back().last) != piece_of(piece.first))
    pieces_.push_back(piece);
  else
    pieces_.back().take(piece);
}

GRADACCUM_INLINE void Curve::coarsen() {
  ++level_;
  for (auto& piece : std::exchange(pieces_, {})) append(piece);
}

GRADACCUM_INLINE std::int64_t Curve::points() const {
  std::int64_t all = 0;
  for (auto& piece : pieces_) all += piece.finite + piece.gaps;
  return all;
}

GRADACCUM_INLINE std::int64_t Curve::gaps() const {
  std::int64_t all = 0;
  for (auto& piece : pieces_) all += piece.gaps;
  return all;
}

GRADACCUM_INLINE CurvePoint Curve::last() const { return {pieces_.empty() ? 0 : pieces_.back().last, last_value_}; }

GRADACCUM_INLINE std::optional<CurvePoint> Curve::lowest() const {
  CurvePiece all;
  for (auto& piece : pieces_) all.take(piece);
  return all.finite > 0 ? std::optional(all.lowest) : std::nullopt;
}

GRADACCUM_INLINE std::optional<CurvePoint> Curve::highest() const {
  CurvePiece all;
  for (auto& piece : pieces_) all.take(piece);
  return all.finite > 0 ? std::optional(all.highest) : std::nullopt;
}

GRADACCUM_INLINE const CurvePiece* Curve::nearest(double update) const {
  const CurvePiece* nearest = nullptr;
  for (auto& piece : pieces_)
    if (piece.finite > 0 && (!nearest || std::abs(piece.middle() - update) < std::abs(nearest->middle() - update)))
      nearest = &piece;
  return nearest;
}

}  // namespace gradaccum::detail
