// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/archive.hpp>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

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

/// Puts the pieces of each tensor together, whichever ranks have saved them: the values are those of a training that
/// was not divided. Throws where one is missing, or does not go with the others.
void join_pieces(Archive::Values& values);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/state/pieces.ipp>
#endif
