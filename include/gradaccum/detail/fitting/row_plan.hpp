// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <cstdint>
#include <optional>

namespace gradaccum {
class Archive;
}

namespace gradaccum::detail {

/// Finds how many rows of one kind a micro-batch may have, from the memory that others took. Uses no tensors.
///
/// Assumes that memory is the largest of several sums a + b * rows, with a and b >= 0. Then n times the rows take at
/// most n times the bytes, and rows between two measured numbers take at most what lies on the line between them.
/// Growing by that never takes too much. When it ends, one more row is tried if the last growth predicts that it fits,
/// which takes at most one row too much. Rows that took too much are not tried again.
class RowPlan {
 public:
  struct Point {
    std::int64_t rows = 0;
    std::int64_t bytes = 0;
  };

  /// The most rows for `bytes`, at least `least`. Rows that take 95 % of `bytes` stay; rows that took more are dropped.
  std::int64_t rows_for(std::int64_t bytes, std::int64_t least);
  /// The bytes that rows are expected to take; nothing while nothing is known.
  std::optional<std::int64_t> bytes_for(std::int64_t rows) const;

  /// Records the bytes of rows. Unless `certain`, they are an upper bound, which counts until a better one is known.
  void measured(Point point, bool certain);
  /// Records rows that took too much; 0 bytes: unknown by how much.
  void failed(Point point);
  /// Starts with the plan of rows that take more.
  void begin_with(const RowPlan& other);

  bool empty() const { return fits_.rows == 0 && too_many_.rows == 0; }
  const Point& fits() const { return fits_; }          ///< the most rows so far
  const Point& too_many() const { return too_many_; }  ///< the fewest rows that took too much; 0 bytes: unknown
  /// Saves or loads the plan.
  void state(Archive& archive);

 private:
  std::int64_t fewer_rows(std::int64_t bytes) const;
  std::int64_t more_rows(std::int64_t bytes) const;
  std::int64_t one_more_bytes() const;

  Point fits_, too_many_, before_;  // before_: fewer rows than fits_, or none
  bool certain_ = false;
};

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/fitting/row_plan.ipp>
#endif
