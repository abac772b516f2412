// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/watching/chart.hpp>
#include <gradaccum/run_end.hpp>

#include <deque>
#include <optional>
#include <string>
#include <vector>

namespace gradaccum::detail {

struct PageFact {
  std::string name, text;
};
struct PageTile {
  std::string name, text, note;
};
struct PageNumber {
  std::string name, text;
  std::string exact;  ///< for programs that read the page
};

/// All that a page shows.
struct PageContent {
  std::string title = {};
  std::optional<RunEnd> end = {};  ///< none: it goes on
  std::string reason = {};         ///< for how it ended
  std::optional<double> fraction = {}, seconds = {}, seconds_left = {};
  double refresh = 10;            ///< seconds after which a browser reads the page once more, while the run goes on
  std::string written = {};       ///< when
  std::deque<PageRun> runs = {};  ///< a deque: they are handed out
  std::vector<PageTile> tiles = {};
  std::vector<PageNumber> numbers = {};
  std::vector<PageFact> facts = {};
};

/// The page, whole: it names no other file, and has no script.
std::string html_of(const PageContent& content);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/watching/page_content.ipp>
#endif
