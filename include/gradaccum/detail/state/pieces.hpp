// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/archive.hpp>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

namespace gradaccum::detail {

/// The name of a part of a parameter, in a state that several ranks have saved: `0.weight[4096:8192 of 64x128]`, the
/// elements from 4096 to 8192, as they lie in memory.
struct PieceName {
  std::string parameter;
  std::int64_t begin = 0, end = 0;
  at::DimVector sizes = {};  ///< of the whole

  std::string text() const;
  /// None where it is no such name, to the letter.
  static std::optional<PieceName> of(std::string_view text);
};

/// `seed` of `rank_12.seed`, a value that is a rank's own; any other name as it is.
std::string without_rank(const std::string& name);

/// A tensor of which several ranks have saved a piece each: a number for each element of a parameter, one for each
/// block of as many, or one for all of it. Nothing is copied before it is asked for.
class Pieces {
 public:
  explicit Pieces(std::string name) : name_(std::move(name)) {}

  void add(PieceName piece, at::Tensor tensor);
  /// Throws where one is missing, or does not go with the others.
  void check() const;

  /// Of the whole parameter.
  at::IntArrayRef sizes() const { return sizes_; }
  /// There is one number for all.
  bool is_number() const;
  /// How many elements have a number together: one, or a block of 8-bit moments; 0 where it is neither.
  std::int64_t elements_of_number() const;

  /// A new tensor: the whole, after `check`; or the numbers of these elements in a row, of which `begin` begins one.
  at::Tensor whole() const;
  at::Tensor part(std::int64_t begin, std::int64_t end) const;

 private:
  struct Piece {
    std::int64_t begin, end;
    at::Tensor tensor;
  };

  void check_filled() const;
  void check_alike() const;
  void check_row(const Piece& piece) const;
  std::int64_t numbers_of(std::int64_t elements) const;
  const Piece& first() const { return by_begin_.begin()->second; }

  std::string name_;
  at::DimVector sizes_;
  std::map<std::int64_t, Piece> by_begin_;
};

/// Takes those of each tensor out, whichever rank has saved them, by the name of the whole.
std::map<std::string, Pieces> take_pieces(std::map<std::string, at::Tensor>& tensors);

/// The same of a state, of which they are no longer one rank's own, by their names without that rank. Throws where the
/// pieces of a tensor do not go together.
Archive::Values take_shared_pieces(Archive::Values& values);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/state/pieces.ipp>
#endif
