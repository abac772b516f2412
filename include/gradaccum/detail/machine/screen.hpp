// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <cstddef>
#include <string>

namespace gradaccum::detail {

/// The text in lines of at most `width` characters: the first behind `head`, which is narrower, the others behind as
/// many blanks. A word that is wider than a line is broken; control characters are blanks.
std::string in_column(std::string head, const std::string& text, std::size_t width);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/machine/screen.ipp>
#endif
