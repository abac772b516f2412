// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/state/pieces.hpp>

#include <gradaccum/detail/build/inline.hpp>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/equal.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

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

/// `optimizer.exp_avg.0.weight`, without the rank that saved it.
GRADACCUM_INLINE std::string without_rank(const std::string& name) {
  if (!name.starts_with("rank_")) return name;
  auto rest = std::string_view(name).substr(5);
  return take_number(rest) && take_text(rest, ".") ? std::string(rest) : name;
}

/// The pieces of one tensor.
struct JoinedPieces {
  at::DimVector sizes = {};
  std::map<std::int64_t, std::pair<std::int64_t, at::Tensor>> by_begin = {};  // their ends, too

  void add(const std::string& full, PieceName name, at::Tensor tensor);
  at::Tensor joined(const std::string& full);
};

GRADACCUM_INLINE void JoinedPieces::add(const std::string& full, PieceName name, at::Tensor tensor) {
  TORCH_CHECK(by_begin.empty() || sizes == name.sizes, "Archive: the pieces of ", full, " must be of one shape, got ",
              at::IntArrayRef(sizes), " and ", at::IntArrayRef(name.sizes));
  sizes = std::move(name.sizes);
  const bool is_new = by_begin.emplace(name.begin, std::pair(name.end, std::move(tensor))).second;
  TORCH_CHECK(is_new, "Archive: two pieces of ", full, " begin at ", name.begin);
}

/// Numbers that count are the same in all pieces.
GRADACCUM_INLINE at::Tensor JoinedPieces::joined(const std::string& full) {
  const at::NoGradGuard no_grad;
  std::int64_t end = 0;
  std::vector<at::Tensor> pieces;
  for (auto& [begin, piece] : by_begin) {
    TORCH_CHECK(begin == end && piece.first >= begin, "Archive: the pieces of ", full,
                " must follow each other, got one that begins at ", begin, " after one that ends at ", end);
    end = piece.first;
    pieces.push_back(std::move(piece.second));
  }
  std::int64_t elements = 1;
  for (auto size : sizes)
    TORCH_CHECK(!__builtin_mul_overflow(elements, size, &elements), "Archive: ", full, " is too large");
  TORCH_CHECK(end == elements, "Archive: the pieces of ", full, " must be of all ", elements, " elements, got ", end);
  if (pieces.size() == 1) return pieces[0];
  for (auto& piece : pieces)
    TORCH_CHECK(piece.defined() && piece.dim() <= 1 && piece.dim() == pieces[0].dim() &&
                    piece.scalar_type() == pieces[0].scalar_type(),
                "Archive: the pieces of ", full, " must be rows of one dtype");
  if (pieces[0].dim() == 0) {
    for (auto& piece : pieces)
      TORCH_CHECK(at::equal(piece, pieces[0]), "Archive: the pieces of ", full, " must have the same number");
    return pieces[0];
  }
  auto all = at::cat(pieces);
  return all.numel() == elements ? all.view(sizes) : all;  // scales are fewer
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
    all[full].add(full, std::move(*name), std::move(*tensor));
    value = values.erase(value);
  }
  for (auto& [full, pieces] : all) {
    const bool is_new = values.emplace(full, pieces.joined(full)).second;
    TORCH_CHECK(is_new, "Archive: ", full, " is there whole and in pieces");
  }
}

}  // namespace gradaccum::detail
