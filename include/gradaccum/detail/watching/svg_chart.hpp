// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/watching/chart.hpp>

#include <cstddef>
#include <string>

namespace gradaccum::detail {

/// A chart as HTML: a figure with its heading, a legend, an SVG, and a note on what cannot be seen in it.
///
/// Lines are stretched to whatever width there is, texts are not: places are per cent of the SVG's sides. Numbers under
/// the pointer are shown by CSS alone. `number`: no other chart of the page has it.
std::string svg_chart(const Chart& chart, std::size_t number);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/watching/svg_chart.ipp>
#endif
