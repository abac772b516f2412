// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/state/pieces.hpp>

#include <gradaccum/detail/build/inline.hpp>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/equal.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <charconv>
#include <map>
#include <utility>
#include <variant>
#include <vector>

namespace gradaccum::detail {

GRADACCUM_INLINE std::string PieceName::text() const {
  auto text = c10::str(parameter, "[", begin, ":", end, " of ");
  for (std::size_t i = 0; i < sizes.size(); ++i) text += c10::str(i > 0 ? "x" : "", sizes[i]);
  return text + "]";
}

/// A number without sign or leading zeros at the beginning of `text`, which is taken away there.
GRADACCUM_INLINE std::optional<std::int64_t> take_number(std::string_view& text) {
  std::int64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || number < 0) return {};
  text.remove_prefix(static_cast<std::size_t>(end - text.data()));
  return number;
}

GRADACCUM_INLINE bool take_text(std::string_view& text, std::string_view expected) {
  if (!text.starts_with(expected)) return false;
  text.remove_prefix(expected.size());
  return true;
}

GRADACCUM_INLINE std::optional<PieceName> PieceName::of(std::string_view text) {
  const auto bracket = text.rfind('[');
  if (bracket == text.npos) return {};
  PieceName name{.parameter = std::string(text.substr(0, bracket))};
  auto rest = text.substr(bracket + 1);
  const auto begin = take_number(rest);
  if (!begin || !take_text(rest, ":")) return {};
  const auto end = take_number(rest);
  if (!end || !take_text(rest, " of ")) return {};
  while (!rest.starts_with("]")) {
    const auto size = take_number(rest);
    if (!size) return {};
    name.sizes.push_back(*size);
    if (rest != "]" && !take_text(rest, "x")) return {};
  }
  name.begin = *begin, name.end = *end;
  if (name.text() != text) return {};
  return name;
}

GRADACCUM_INLINE std::string without_rank(const std::string& name) {
  if (!name.starts_with("rank_")) return name;
  const auto digits = name.find_first_not_of("0123456789", 5);
  return digits != name.npos && digits > 5 && name[digits] == '.' ? name.substr(digits + 1) : name;
}

/// The pieces of one tensor, in their order.
class JoinedPieces {
 public:
  explicit JoinedPieces(std::string name) : name_(std::move(name)) {}

  void add(PieceName piece, at::Tensor tensor);
  at::Tensor joined() const;

 private:
  struct Piece {
    std::int64_t begin, end;
    at::Tensor tensor;
  };

  std::int64_t checked_elements() const;
  void check_alike() const;
  at::Tensor number_of_all() const;
  at::Tensor row_of_all(std::int64_t elements) const;

  std::string name_;
  at::DimVector sizes_;
  std::map<std::int64_t, Piece> by_begin_;
};

GRADACCUM_INLINE void JoinedPieces::add(PieceName piece, at::Tensor tensor) {
  TORCH_CHECK(by_begin_.empty() || sizes_ == piece.sizes, "Archive: the pieces of ", name_,
              " must be of one shape, got ", at::IntArrayRef(sizes_), " and ", at::IntArrayRef(piece.sizes));
  sizes_ = std::move(piece.sizes);
  const bool is_new = by_begin_.emplace(piece.begin, Piece{piece.begin, piece.end, std::move(tensor)}).second;
  TORCH_CHECK(is_new, "Archive: two pieces of ", name_, " begin at ", piece.begin);
}

/// Of the whole, which the pieces fill.
GRADACCUM_INLINE std::int64_t JoinedPieces::checked_elements() const {
  std::int64_t elements = 1, filled = 0;
  for (auto size : sizes_)
    TORCH_CHECK(!__builtin_mul_overflow(elements, size, &elements), "Archive: ", name_, " is too large");
  for (auto& [begin, piece] : by_begin_) {
    TORCH_CHECK(begin == filled && piece.end >= begin, "Archive: the pieces of ", name_,
                " must follow each other, got one from ", begin, " to ", piece.end, " after one to ", filled);
    filled = piece.end;
  }
  TORCH_CHECK(filled == elements, "Archive: the pieces of ", name_, " must be of all ", elements, " elements, got ",
              filled);
  return elements;
}

GRADACCUM_INLINE void JoinedPieces::check_alike() const {
  const auto& first = by_begin_.begin()->second.tensor;
  for (auto& [begin, piece] : by_begin_)
    TORCH_CHECK(piece.tensor.defined() && first.defined() && piece.tensor.dim() <= 1 &&
                    piece.tensor.dim() == first.dim() && piece.tensor.scalar_type() == first.scalar_type(),
                "Archive: the pieces of ", name_, " must be rows of one dtype");
}

/// One that counts is the same for all pieces.
GRADACCUM_INLINE at::Tensor JoinedPieces::number_of_all() const {
  const auto& first = by_begin_.begin()->second.tensor;
  for (auto& [begin, piece] : by_begin_)
    TORCH_CHECK(at::equal(piece.tensor, first), "Archive: the pieces of ", name_, " must have the same number");
  return first;
}

/// A number for each element, or for each block of as many elements.
GRADACCUM_INLINE at::Tensor JoinedPieces::row_of_all(std::int64_t elements) const {
  const auto& first = by_begin_.begin()->second;
  const auto block = (first.end - first.begin) / std::max<std::int64_t>(1, first.tensor.numel());
  std::vector<at::Tensor> rows;
  for (auto& [begin, piece] : by_begin_) {
    const auto size = piece.end - piece.begin;
    TORCH_CHECK(block > 0 && piece.tensor.numel() == (size + block - 1) / block, "Archive: the piece of ", name_,
                " from ", begin, " to ", piece.end, " has ", piece.tensor.numel(), " numbers, and the first one has ",
                first.tensor.numel(), " for ", first.end - first.begin);
    rows.push_back(piece.tensor);
  }
  const auto all = at::cat(rows);
  return block == 1 && all.numel() == elements ? all.view(sizes_) : all;
}

GRADACCUM_INLINE at::Tensor JoinedPieces::joined() const {
  const at::NoGradGuard no_grad;
  const auto elements = checked_elements();
  const auto& first = by_begin_.begin()->second.tensor;
  if (by_begin_.size() == 1) return first;
  check_alike();
  return first.dim() == 0 ? number_of_all() : row_of_all(elements);
}

GRADACCUM_INLINE void join_pieces(Archive::Values& values) {
  std::map<std::string, JoinedPieces> all;
  for (auto value = values.begin(); value != values.end();) {
    auto* const tensor = std::get_if<at::Tensor>(&value->second);
    auto name = tensor != nullptr ? PieceName::of(value->first) : std::nullopt;
    if (!name) {
      ++value;
      continue;
    }
    const auto full = without_rank(name->parameter);
    all.try_emplace(full, full).first->second.add(std::move(*name), std::move(*tensor));
    value = values.erase(value);
  }
  for (auto& [full, pieces] : all) {
    const bool is_new = values.emplace(full, pieces.joined()).second;
    TORCH_CHECK(is_new, "Archive: ", full, " is there whole and in pieces");
  }
}

}  // namespace gradaccum::detail
