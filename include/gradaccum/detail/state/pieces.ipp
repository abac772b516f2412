// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/state/pieces.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/kernels/dynamic_tables.hpp>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/equal.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <charconv>
#include <utility>
#include <variant>
#include <vector>

namespace gradaccum::detail {

GRADACCUM_INLINE std::string PieceName::text() const {
  auto text = c10::str(parameter, "[", begin, ":", end, " of ");
  for (std::size_t i = 0; i < sizes.size(); ++i) text += c10::str(i > 0 ? "x" : "", sizes[i]);
  return text + "]";
}

/// Parses a non-negative decimal number at the beginning of `text`, and removes it there.
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

GRADACCUM_INLINE void Pieces::add(PieceName piece, at::Tensor tensor) {
  TORCH_CHECK(by_begin_.empty() || sizes_ == piece.sizes, "Archive: the pieces of ", name_,
              " must be of one shape, got ", at::IntArrayRef(sizes_), " and ", at::IntArrayRef(piece.sizes));
  sizes_ = std::move(piece.sizes);
  const bool is_new = by_begin_.emplace(piece.begin, Piece{piece.begin, piece.end, std::move(tensor)}).second;
  TORCH_CHECK(is_new, "Archive: two pieces of ", name_, " begin at ", piece.begin);
}

GRADACCUM_INLINE void Pieces::check() const {
  check_filled();
  if (by_begin_.size() == 1) return;  // any shape is valid
  check_alike();
  for (auto& [begin, piece] : by_begin_) {
    if (!is_number()) check_row(piece);
    TORCH_CHECK(!is_number() || at::equal(piece.tensor, first().tensor), "Archive: the pieces of ", name_,
                " must have the same number");
  }
}

GRADACCUM_INLINE void Pieces::check_filled() const {
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
}

GRADACCUM_INLINE void Pieces::check_alike() const {
  const auto& one = first().tensor;
  for (auto& [begin, piece] : by_begin_)
    TORCH_CHECK(piece.tensor.defined() && one.defined() && piece.tensor.dim() <= 1 && piece.tensor.dim() == one.dim() &&
                    piece.tensor.scalar_type() == one.scalar_type(),
                "Archive: the pieces of ", name_, " must be rows of one dtype");
}

GRADACCUM_INLINE void Pieces::check_row(const Piece& piece) const {
  const auto block = elements_of_number(), size = piece.end - piece.begin;
  TORCH_CHECK(block > 0 && piece.begin % block == 0 && piece.tensor.numel() == numbers_of(size),
              "Archive: the piece of ", name_, " from ", piece.begin, " to ", piece.end, " has ", piece.tensor.numel(),
              " numbers, and the first one has ", first().tensor.numel(), " for ", first().end - first().begin);
}

GRADACCUM_INLINE bool Pieces::is_number() const { return first().tensor.defined() && first().tensor.dim() == 0; }

GRADACCUM_INLINE std::int64_t Pieces::elements_of_number() const {
  const auto& [begin, end, tensor] = first();
  const auto elements = end - begin, numbers = tensor.numel();
  if (numbers == elements) return 1;
  return numbers == eight_bit_blocks(elements) ? eight_bit_block : 0;
}

GRADACCUM_INLINE std::int64_t Pieces::numbers_of(std::int64_t elements) const {
  return elements_of_number() == 1 ? elements : eight_bit_blocks(elements);
}

GRADACCUM_INLINE at::Tensor Pieces::whole() const {
  const at::NoGradGuard no_grad;
  const auto& one = first().tensor;
  if (!one.defined()) return one;
  if (by_begin_.size() == 1 || is_number()) return one.clone();
  check();
  const auto row = part(0, by_begin_.rbegin()->second.end);
  return elements_of_number() == 1 ? row.view(sizes_) : row;
}

GRADACCUM_INLINE at::Tensor Pieces::part(std::int64_t begin, std::int64_t end) const {
  const at::NoGradGuard no_grad;
  const auto block = elements_of_number();
  TORCH_CHECK(block > 0, "Archive: the pieces of ", name_, " must have a number for each element or block of it");
  std::vector<at::Tensor> rows;
  for (auto& [unused, piece] : by_begin_) {
    const auto from = std::max(begin, piece.begin), to = std::min(end, piece.end);
    if (from >= to) continue;
    rows.push_back(piece.tensor.reshape({-1}).narrow(0, (from - piece.begin) / block, numbers_of(to - from)));
  }
  return at::cat(rows);
}

GRADACCUM_INLINE std::map<std::string, Pieces> take_pieces(std::map<std::string, at::Tensor>& tensors) {
  std::map<std::string, Pieces> all;
  for (auto tensor = tensors.begin(); tensor != tensors.end();) {
    auto name = PieceName::of(tensor->first);
    if (!name) {
      ++tensor;
      continue;
    }
    const auto whole = name->parameter;
    all.try_emplace(whole, whole).first->second.add(std::move(*name), std::move(tensor->second));
    tensor = tensors.erase(tensor);
  }
  return all;
}

GRADACCUM_INLINE Archive::Values take_shared_pieces(Archive::Values& values) {
  Archive::Values shared;
  std::map<std::string, at::Tensor> tensors;
  for (auto value = values.begin(); value != values.end();) {
    auto* const tensor = std::get_if<at::Tensor>(&value->second);
    if (tensor == nullptr || !PieceName::of(value->first)) {
      ++value;
      continue;
    }
    const auto [same, is_new] = shared.emplace(without_rank(value->first), *tensor);
    TORCH_CHECK(is_new, "Archive: two ranks have saved the piece ", same->first);
    tensors.emplace(same->first, *tensor);
    value = values.erase(value);
  }
  for (auto& [name, pieces] : take_pieces(tensors)) {
    pieces.check();
    TORCH_CHECK(!values.contains(name), "Archive: ", name, " is there whole and in pieces");
  }
  return shared;
}

}  // namespace gradaccum::detail
