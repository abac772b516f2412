// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <cstddef>
#include <string>
#include <string_view>

namespace gradaccum::detail {

/// A text from anywhere, as HTML shows it between tags and between the quotes of an attribute: as text, whatever it is.
///
/// What is no UTF-8, control characters but line ends and tabs, and characters that turn the direction of writing are
/// shown as �; after `most` characters comes an ellipsis.
std::string html_text(std::string_view text, std::size_t most = 120);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/watching/html_text.ipp>
#endif
