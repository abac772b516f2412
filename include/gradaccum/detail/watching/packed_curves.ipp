// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/watching/packed_curves.hpp>

#include <gradaccum/archive.hpp>
#include <gradaccum/detail/build/inline.hpp>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstddef>
#include <utility>

namespace gradaccum::detail {

/// Reads numbers one after another, and no further than they go.
template <class T>
class NumbersInTurn {
 public:
  explicit NumbersInTurn(const std::vector<T>& numbers) : next_(numbers.data()), left_(numbers.size()) {}

  const T* take(std::size_t count) {
    TORCH_CHECK(count <= left_, "Curves: saved curves must not be cut off");
    left_ -= count;
    return std::exchange(next_, next_ + count);
  }
  T take() { return *take(1); }
  std::size_t left() const { return left_; }

 private:
  const T* next_;
  std::size_t left_;
};

GRADACCUM_INLINE void PackedCurves::add(std::string_view name, const Curve& curve) {
  names_.insert(names_.end(), name.begin(), name.end());
  const auto& pieces = curve.pieces();
  for (const auto number :
       {static_cast<std::int64_t>(name.size()), curve.level(), static_cast<std::int64_t>(pieces.size())})
    whole_.push_back(number);
  real_.push_back(curve.last().value);
  for (auto& piece : pieces) {
    for (const auto number :
         {piece.first, piece.last, piece.finite, piece.gaps, piece.lowest.update, piece.highest.update})
      whole_.push_back(number);
    for (const auto number : {piece.lowest.value, piece.highest.value, piece.mean}) real_.push_back(number);
  }
}

GRADACCUM_INLINE CurvePiece next_piece(NumbersInTurn<std::int64_t>& whole, NumbersInTurn<double>& real) {
  CurvePiece piece;
  for (auto* const number :
       {&piece.first, &piece.last, &piece.finite, &piece.gaps, &piece.lowest.update, &piece.highest.update})
    *number = whole.take();
  for (auto* const number : {&piece.lowest.value, &piece.highest.value, &piece.mean}) *number = real.take();
  return piece;
}

GRADACCUM_INLINE void PackedCurves::for_each(const std::function<void(std::string, Curve)>& take) const {
  NumbersInTurn names(names_);
  NumbersInTurn whole(whole_);
  NumbersInTurn real(real_);
  while (whole.left() > 0) {
    const auto letters = whole.take(), level = whole.take(), count = whole.take();
    TORCH_CHECK(letters >= 0 && count >= 0, "Curves: a saved curve must have a name and pieces, got ", letters, " and ",
                count);
    const auto* const name = names.take(static_cast<std::size_t>(letters));
    const double last_value = real.take();
    std::vector<CurvePiece> pieces;
    for (std::int64_t i = 0; i < count; ++i) pieces.push_back(next_piece(whole, real));
    take(std::string(name, name + letters), Curve(level, last_value, std::move(pieces)));
  }
  TORCH_CHECK(names.left() == 0 && real.left() == 0, "Curves: saved curves must have as many numbers as they say");
}

template <class T>
void archive_numbers(Archive& archive, std::string_view name, std::vector<T>& numbers) {
  constexpr auto dtype = c10::CppTypeToScalarType<T>::value;
  auto tensor = at::empty({static_cast<std::int64_t>(numbers.size())}, at::TensorOptions(dtype));
  std::copy(numbers.begin(), numbers.end(), tensor.template mutable_data_ptr<T>());
  archive(name, tensor);
  if (!archive.loading()) return;
  TORCH_CHECK(tensor.scalar_type() == dtype && tensor.dim() == 1, "Curves: '", std::string(name),
              "' of saved curves must be a row of ", dtype, ", got ", tensor.scalar_type(), tensor.sizes());
  tensor = tensor.cpu().contiguous();
  const auto* const first = tensor.template const_data_ptr<T>();
  numbers.assign(first, first + tensor.numel());
}

GRADACCUM_INLINE void PackedCurves::state(Archive& archive) {
  archive_numbers(archive, "names", names_);
  archive_numbers(archive, "whole", whole_);
  archive_numbers(archive, "real", real_);
}

}  // namespace gradaccum::detail
