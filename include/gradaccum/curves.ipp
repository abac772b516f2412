// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/curves.hpp>

#include <gradaccum/archive.hpp>
#include <gradaccum/detail/build/inline.hpp>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <utility>

namespace gradaccum {
namespace detail {

/// Adds the points of the next piece. The first of equal numbers stays the lowest.
GRADACCUM_INLINE void extend(CurvePiece& piece, const CurvePiece& next) {
  if (piece.finite + piece.gaps == 0) piece.first = next.first;
  piece.last = next.last;
  piece.gaps += next.gaps;
  if (next.finite == 0) return;
  if (piece.finite == 0 || next.lowest.value < piece.lowest.value) piece.lowest = next.lowest;
  if (piece.finite == 0 || next.highest.value > piece.highest.value) piece.highest = next.highest;
  const double share = static_cast<double>(next.finite) / static_cast<double>(piece.finite + next.finite);
  piece.mean = piece.finite == 0 ? next.mean : piece.mean * (1 - share) + next.mean * share;
  piece.mean = std::clamp(piece.mean, piece.lowest.value, piece.highest.value);
  piece.finite += next.finite;
}

/// A row of numbers of a state, one after another.
template <class T>
class NumbersInTurn {
 public:
  NumbersInTurn(Archive& archive, std::string_view name) : archive_(archive), name_(name) {
    if (archive_.loading()) load();
  }

  /// Saves the number, or gives the loaded one that stands in its place.
  T next(T number) {
    if (!archive_.loading()) return numbers_.emplace_back(number);
    TORCH_CHECK(read_ < numbers_.size(), "Curves: saved curves must not be cut off");
    return numbers_[read_++];
  }
  bool is_read() const { return read_ == numbers_.size(); }
  void save() const {
    auto tensor = at::empty({static_cast<std::int64_t>(numbers_.size())}, at::TensorOptions(dtype));
    std::copy(numbers_.begin(), numbers_.end(), tensor.template mutable_data_ptr<T>());
    archive_(name_, tensor);
  }

 private:
  static constexpr auto dtype = c10::CppTypeToScalarType<T>::value;

  void load() {
    at::Tensor tensor;
    archive_(name_, tensor);
    TORCH_CHECK(tensor.scalar_type() == dtype && tensor.dim() == 1, "Curves: '", std::string(name_),
                "' of saved curves must be a row of ", dtype, ", got ", tensor.scalar_type(), tensor.sizes());
    tensor = tensor.cpu().contiguous();
    const auto* const first = tensor.template const_data_ptr<T>();
    numbers_.assign(first, first + tensor.numel());
  }

  Archive& archive_;
  std::string_view name_;
  std::vector<T> numbers_;
  std::size_t read_ = 0;
};

/// Visits `count` elements. Loaded ones are made one by one, since a damaged count may be anything.
template <class Elements, class Visit>
void each_of(Elements& all, std::int64_t count, bool loading, const Visit& visit) {
  for (std::int64_t i = 0; i < count; ++i) {
    if (loading) all.push_back({});
    visit(all[static_cast<std::size_t>(i)]);
  }
}

GRADACCUM_INLINE void pack(CurvePiece& piece, NumbersInTurn<std::int64_t>& whole, NumbersInTurn<double>& real) {
  for (auto* const number :
       {&piece.first, &piece.last, &piece.finite, &piece.gaps, &piece.lowest.update, &piece.highest.update})
    *number = whole.next(*number);
  for (auto* const number : {&piece.lowest.value, &piece.highest.value, &piece.mean}) *number = real.next(*number);
}

}  // namespace detail

GRADACCUM_INLINE void Curve::add(std::int64_t update, double value) {
  if (!pieces_.empty() && update < pieces_.back().last)
    while (!pieces_.empty() && pieces_.back().last >= update) pieces_.pop_back();
  const bool finite = std::isfinite(value);
  const CurvePoint point{update, value};
  append({update, update, finite, !finite, point, point, value});
  last_value_ = value;
  while (pieces_.size() > most_pieces) {
    ++level_;
    for (auto& piece : std::exchange(pieces_, {})) append(piece);
  }
}

GRADACCUM_INLINE void Curve::append(const CurvePiece& piece) {
  const bool is_new = pieces_.empty() || pieces_.back().last >> level_ != piece.first >> level_;
  detail::extend(is_new ? pieces_.emplace_back() : pieces_.back(), piece);
}

GRADACCUM_INLINE CurvePoint Curve::last() const { return {pieces_.empty() ? 0 : pieces_.back().last, last_value_}; }

GRADACCUM_INLINE std::optional<CurvePoint> Curve::lowest() const {
  CurvePiece all;
  for (auto& piece : pieces_) detail::extend(all, piece);
  return all.finite > 0 ? std::optional(all.lowest) : std::nullopt;
}

GRADACCUM_INLINE std::optional<CurvePoint> Curve::highest() const {
  CurvePiece all;
  for (auto& piece : pieces_) detail::extend(all, piece);
  return all.finite > 0 ? std::optional(all.highest) : std::nullopt;
}

GRADACCUM_INLINE void Curve::check() const {
  TORCH_CHECK(0 <= level_ && level_ < 63, "Curves: the level of a saved curve must be in [0, 62], got ", level_);
  TORCH_CHECK(pieces_.size() <= most_pieces, "Curves: a saved curve must have at most ", most_pieces, " pieces, got ",
              pieces_.size());
  for (std::size_t i = 0; i < pieces_.size(); ++i) {
    const auto& piece = pieces_[i];
    const bool in_order =
        piece.first <= piece.last && (i == 0 || pieces_[i - 1].last >> level_ < piece.first >> level_);
    const bool counts = piece.finite >= 0 && piece.gaps >= 0 && piece.finite <= INT64_MAX / 1024 &&
                        piece.gaps <= INT64_MAX / 1024 && piece.finite + piece.gaps > 0;
    const bool numbers = piece.finite == 0 || (std::isfinite(piece.lowest.value) && std::isfinite(piece.mean) &&
                                               std::isfinite(piece.highest.value));
    TORCH_CHECK(in_order && counts && numbers, "Curves: piece ", i, " of a saved curve is none");
  }
}

GRADACCUM_INLINE Curve& Curves::at(std::string_view name) {
  const auto found = places_.find(name);
  if (found != places_.end()) return all_[found->second].curve;
  places_.emplace(std::string(name), all_.size());
  return all_.emplace_back(Named{std::string(name), {}}).curve;
}

GRADACCUM_INLINE void Curves::add(std::string_view name, std::int64_t update, double value) {
  at(name).add(update, value);
}

GRADACCUM_INLINE const Curve* Curves::find(std::string_view name) const {
  const auto found = places_.find(name);
  return found == places_.end() ? nullptr : &all_[found->second].curve;
}

/// Curves as three rows of numbers. Names are bytes: they may be whatever a program calls its metrics, and texts of a
/// state are UTF-8.
struct Curves::Packed {
  std::vector<Named> all;

  void state(Archive& archive);
};

GRADACCUM_INLINE void Curves::Packed::state(Archive& archive) {
  const bool loading = archive.loading();
  detail::NumbersInTurn<std::uint8_t> names(archive, "names");
  detail::NumbersInTurn<std::int64_t> whole(archive, "whole");
  detail::NumbersInTurn<double> real(archive, "real");
  for (std::size_t i = 0; loading ? !whole.is_read() : i < all.size(); ++i) {
    auto& [name, curve] = loading ? all.emplace_back() : all[i];
    const auto letters = whole.next(std::ssize(name));
    curve.level_ = whole.next(curve.level_);
    const auto pieces = whole.next(std::ssize(curve.pieces_));
    TORCH_CHECK(letters >= 0 && pieces >= 0, "Curves: a saved curve must have a name and pieces, got ", letters,
                " and ", pieces);
    detail::each_of(name, letters, loading, [&names](char& letter) {
      letter = static_cast<char>(names.next(static_cast<std::uint8_t>(letter)));
    });
    curve.last_value_ = real.next(curve.last_value_);
    detail::each_of(curve.pieces_, pieces, loading, [&](CurvePiece& piece) { detail::pack(piece, whole, real); });
    curve.check();
  }
  TORCH_CHECK(!loading || (names.is_read() && real.is_read()),
              "Curves: saved curves must have as many numbers as they say");
  if (loading) return;
  names.save();
  whole.save();
  real.save();
}

GRADACCUM_INLINE void Curves::state(Archive& archive) {
  Packed packed{archive.loading() ? std::vector<Named>() : all_};
  archive("packed", packed);
  if (!archive.loading()) return;
  Curves loaded;
  for (auto& [name, curve] : packed.all) loaded.at(name) = std::move(curve);
  archive.when_all_fit([this, loaded = std::move(loaded)] { *this = loaded; });
}

}  // namespace gradaccum
