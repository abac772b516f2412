// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <cstdint>
#include <optional>

namespace gradaccum {
class Archive;
}

namespace gradaccum::detail {

/// How many rows of one kind a micro-batch may have, from what others took: knows no tensor.
///
/// Memory is taken for the largest of sums a + b * rows, a and b >= 0: so n times the rows take at most n times the
/// bytes, and between two numbers of rows that were measured at most what lies on the line between them. Growing by
/// that never takes too much. Where that is at its end, one more row is tried if the last growth says that it will fit:
/// that takes too much by a row at most. What took too much is not tried again.
class RowPlan {
 public:
  struct Point {
    std::int64_t rows = 0;
    std::int64_t bytes = 0;
  };

  /// The most rows for so many bytes, `least` at least. What takes 95 % of them stays as it is; what took more fits no
  /// longer.
  std::int64_t rows_for(std::int64_t bytes, std::int64_t least);
  /// What so many rows are expected to take; none while nothing is known.
  std::optional<std::int64_t> bytes_for(std::int64_t rows) const;

  /// So many rows took so many bytes. `certain`: else at most so many, which counts until something better is known.
  void measured(Point point, bool certain);
  /// So many rows took too much; 0 bytes: nobody knows how much.
  void failed(Point point);
  /// Begins with what is known of rows that take more.
  void begin_with(const RowPlan& other);

  bool empty() const { return fits_.rows == 0 && too_many_.rows == 0; }
  const Point& fits() const { return fits_; }          ///< the most rows so far
  const Point& too_many() const { return too_many_; }  ///< the least rows that took too much; 0 bytes: it is not known
  /// Saves all of it.
  void state(Archive& archive);

 private:
  std::int64_t fewer_rows(std::int64_t bytes) const;
  std::int64_t more_rows(std::int64_t bytes) const;
  std::int64_t one_more_bytes() const;

  Point fits_, too_many_, before_;  // before: fewer rows than fits, or none
  bool certain_ = false;
};

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/fitting/row_plan.ipp>
#endif
