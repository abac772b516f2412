// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/fitting/row_plan.hpp>

#include <gradaccum/archive.hpp>
#include <gradaccum/detail/build/inline.hpp>

#include <c10/util/Exception.h>

#include <algorithm>
#include <limits>
#include <string>

namespace gradaccum::detail {

/// Returns first * second / third, rounded down, without overflow.
GRADACCUM_INLINE std::int64_t scaled(std::int64_t first, std::int64_t second, std::int64_t third) {
  const auto result =
      static_cast<long double>(first) * static_cast<long double>(second) / static_cast<long double>(third);
  constexpr auto most = std::numeric_limits<std::int64_t>::max() / 2;
  return result < static_cast<long double>(most) ? static_cast<std::int64_t>(result) : most;
}

GRADACCUM_INLINE std::int64_t RowPlan::rows_for(std::int64_t bytes, std::int64_t least) {
  if (empty()) return least;
  if (fits_.bytes > bytes) failed(fits_);
  if (fits_.rows == 0) return std::max(fewer_rows(bytes), least);
  if (fits_.bytes >= bytes - bytes / 20) return std::max(fits_.rows, least);
  return std::max(more_rows(bytes), least);
}

/// Guesses the rows that fit by assuming that rows account for half of the bytes.
GRADACCUM_INLINE std::int64_t RowPlan::fewer_rows(std::int64_t bytes) const {
  if (too_many_.bytes <= bytes || bytes <= 0) return too_many_.rows / 2;
  return too_many_.rows - 2 * (too_many_.rows - scaled(too_many_.rows, bytes, too_many_.bytes));
}

GRADACCUM_INLINE std::int64_t RowPlan::more_rows(std::int64_t bytes) const {
  const auto in_proportion = scaled(fits_.rows, bytes, std::max<std::int64_t>(fits_.bytes, 1));
  if (in_proportion == fits_.rows && too_many_.rows != fits_.rows + 1 && one_more_bytes() <= bytes)
    return fits_.rows + 1;
  if (too_many_.rows == 0 || in_proportion < too_many_.rows) return in_proportion;
  const auto between = too_many_.rows - fits_.rows;
  const auto more =
      too_many_.bytes > bytes ? scaled(between, bytes - fits_.bytes, too_many_.bytes - fits_.bytes) : between / 2;
  return std::min(fits_.rows + more, too_many_.rows - 1);
}

/// The bytes of one more row than fits_: adds the last growth per row, or half of an average row before any growth.
GRADACCUM_INLINE std::int64_t RowPlan::one_more_bytes() const {
  if (before_.rows == 0) return fits_.bytes + fits_.bytes / (2 * fits_.rows);
  return fits_.bytes + scaled(fits_.bytes - before_.bytes, 1, fits_.rows - before_.rows);
}

GRADACCUM_INLINE std::optional<std::int64_t> RowPlan::bytes_for(std::int64_t rows) const {
  if (fits_.rows == 0) return std::nullopt;
  if (rows == fits_.rows + 1) return one_more_bytes();
  if (rows > fits_.rows && too_many_.rows > fits_.rows && too_many_.bytes > fits_.bytes)
    return fits_.bytes + scaled(rows - fits_.rows, too_many_.bytes - fits_.bytes, too_many_.rows - fits_.rows);
  return scaled(fits_.bytes, rows, fits_.rows);
}

GRADACCUM_INLINE void RowPlan::measured(Point point, bool certain) {
  const bool better = certain && !certain_ && point.rows >= fits_.rows / 2;
  if (point.rows < fits_.rows && !better) return;
  if (point.rows > fits_.rows && certain_) before_ = fits_;
  if (point.rows < fits_.rows) before_ = {};
  fits_ = point;
  certain_ = certain_ || certain;
  if (too_many_.rows <= fits_.rows) too_many_ = {};
}

GRADACCUM_INLINE void RowPlan::failed(Point point) {
  if (too_many_.rows == 0 || point.rows <= too_many_.rows) too_many_ = point;
  if (fits_.rows >= point.rows) fits_ = before_ = {};
}

GRADACCUM_INLINE void RowPlan::begin_with(const RowPlan& other) {
  fits_ = other.fits_;
  certain_ = false;
}

GRADACCUM_INLINE void RowPlan::state(Archive& archive) {
  RowPlan plan = *this;
  const auto point = [&archive](const std::string& name, Point& of) {
    archive(name + "rows", of.rows);
    archive(name + "bytes", of.bytes);
    TORCH_CHECK(of.rows >= 0 && of.bytes >= 0, "FitMemory: the rows and bytes of a saved plan must be >= 0, got ",
                of.rows, " and ", of.bytes);
  };
  point("", plan.fits_);
  point("too_many_", plan.too_many_);
  point("before_", plan.before_);
  archive("certain", plan.certain_);
  *this = plan;
}

}  // namespace gradaccum::detail
