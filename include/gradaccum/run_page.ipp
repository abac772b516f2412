// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/run_page.hpp>

#include <gradaccum/archive.hpp>
#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/io/files.hpp>
#include <gradaccum/detail/watching/page_template.hpp>

#include <c10/util/Exception.h>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <ctime>
#include <deque>
#include <exception>
#include <utility>

namespace gradaccum {
namespace detail {

struct PageRun {
  std::string name = {};
  Curves curves = {};
};

/// All that a page shows but its progress. Its own run is the first. Callers hold references to the runs' curves, which
/// a deque keeps where they are.
struct PageContent {
  std::deque<PageRun> runs = std::deque<PageRun>(1);
  nlohmann::json tiles = nlohmann::json::array(), numbers = tiles, settings = tiles;
};

/// `2026-01-31 23:59:59 UTC`
GRADACCUM_INLINE std::string time_text() {
  const auto now = std::time(nullptr);
  std::tm parts{};
  std::array<char, 64> text{};
  if (!gmtime_r(&now, &parts)) return "";
  return {text.data(), std::strftime(text.data(), text.size(), "%Y-%m-%d %H:%M:%S UTC", &parts)};
}

/// Shortens a text of any bytes. `dump` replaces what is no UTF-8, and a character that is cut in two.
GRADACCUM_INLINE nlohmann::json json_text(std::string_view text, std::size_t most_bytes = 200) {
  return std::string(text.substr(0, most_bytes)) + (text.size() > most_bytes ? "…" : "");
}

/// JSON has no numbers but finite ones.
GRADACCUM_INLINE nlohmann::json json_number(double number) {
  if (std::isfinite(number)) return number;
  return std::isnan(number) ? "NaN" : number > 0 ? "∞" : "−∞";
}

GRADACCUM_INLINE nlohmann::json json_number(const std::optional<double>& number) {
  return number ? nlohmann::json(*number) : nlohmann::json();
}

/// `[name, last value, pieces]`; a piece without a number has neither mean nor extremes.
GRADACCUM_INLINE nlohmann::json json_curve(const Curves::Named& named) {
  auto pieces = nlohmann::json::array();
  for (auto& piece : named.curve.pieces()) {
    const auto finite = [&piece](double number) {
      return piece.finite > 0 ? nlohmann::json(number) : nlohmann::json();
    };
    pieces.push_back({piece.first, piece.last, finite(piece.mean), finite(piece.lowest.value),
                      finite(piece.highest.value), piece.lowest.update, piece.highest.update, piece.gaps});
  }
  return {json_text(named.name), json_number(named.curve.last().value), std::move(pieces)};
}

/// Adds a row, or replaces the one of that name.
GRADACCUM_INLINE void put_row(nlohmann::json& rows, nlohmann::json row) {
  const auto same = std::find_if(rows.begin(), rows.end(), [&row](auto& other) { return other[0] == row[0]; });
  if (same == rows.end())
    rows.push_back(std::move(row));
  else
    *same = std::move(row);
}

/// Puts the JSON between the constant texts. It is ASCII without a `<`, the only character that could end its element.
GRADACCUM_INLINE std::string page_text(const nlohmann::json& content) {
  std::string text(page_before_json);
  for (const char c : content.dump(-1, ' ', true, nlohmann::json::error_handler_t::replace))
    c == '<' ? text += "\\u003c" : text += c;
  return text.append(page_after_json);
}

GRADACCUM_INLINE std::filesystem::path part_of(std::filesystem::path path) { return path += ".part"; }

/// Writes a page beside its place without a wait for the disk. Leaves nothing behind where that fails.
GRADACCUM_INLINE void write_part(const std::filesystem::path& path, std::string_view text) {
  const auto part = part_of(path);
  auto* const file = std::fopen(part.c_str(), "wbe");
  if (!file) file_error(path, "must be written beside, as " + part.filename().string(), errno);
  const bool is_whole = std::fwrite(text.data(), 1, text.size(), file) == text.size();
  const int error = errno;
  if (std::fclose(file) == 0 && is_whole) return;
  const int why = is_whole ? errno : error;
  std::remove(part.c_str());
  file_error(path, "must be written", why);
}

/// Replaces the page as a whole, so that a reader sees the old one or the new one.
GRADACCUM_INLINE void replace_page(const std::filesystem::path& path, std::string_view text) {
  write_part(path, text);
  if (std::rename(part_of(path).c_str(), path.c_str()) == 0) return;
  const int error = errno;
  std::remove(part_of(path).c_str());
  file_error(path, "must be replaced (is as before)", error);
}

}  // namespace detail

GRADACCUM_INLINE RunPage::RunPage(RunPageOptions options)
    : options_(std::move(options)), content_(std::make_unique<detail::PageContent>()) {
  TORCH_CHECK(!options_.path.empty(), "RunPage: path must be given");
  TORCH_CHECK(options_.every.count() >= 0, "RunPage: every must be >= 0 s, got ", options_.every.count(), " s");
  if (std::filesystem::is_directory(options_.path)) detail::file_error(options_.path, "must be a file", EISDIR);
  detail::write_part(options_.path, "");
  std::remove(detail::part_of(options_.path).c_str());
}

GRADACCUM_INLINE RunPage::~RunPage() {
  try {
    if (goes_on_) end(RunEnd::interrupted);
  } catch (const std::exception&) {  // a destructor has nobody to tell
  }
}

GRADACCUM_INLINE void RunPage::add(std::string_view curve, std::int64_t update, double value) {
  content_->runs.front().curves.add(curve, update, value);
}

GRADACCUM_INLINE Curves& RunPage::add_run(std::string name, Curves curves) {
  return content_->runs.emplace_back(detail::PageRun{std::move(name), std::move(curves)}).curves;
}

GRADACCUM_INLINE void RunPage::set(std::string_view name, std::string text) {
  detail::put_row(content_->settings, {detail::json_text(name), detail::json_text(text, 5000)});
}

GRADACCUM_INLINE void RunPage::tile(std::string_view name, std::string text, std::string note) {
  detail::put_row(content_->tiles, {detail::json_text(name, 60), detail::json_text(text, 60), detail::json_text(note)});
}

GRADACCUM_INLINE void RunPage::tile(std::string_view name, double value, std::string note) {
  detail::put_row(content_->tiles, {detail::json_text(name, 60), detail::json_number(value), detail::json_text(note)});
}

GRADACCUM_INLINE void RunPage::number(std::string_view name, double value, std::string text) {
  detail::put_row(content_->numbers, {detail::json_text(name), detail::json_number(value), detail::json_text(text)});
}

GRADACCUM_INLINE void RunPage::whole_number(std::string_view name, std::int64_t value, std::string text) {
  detail::put_row(content_->numbers, {detail::json_text(name), value, detail::json_text(text)});
}

GRADACCUM_INLINE double RunPage::seconds() const {
  return seconds_before_ + std::chrono::duration<double>(Clock::now() - start_).count();
}

GRADACCUM_INLINE bool RunPage::is_due() const { return !written_ || Clock::now() - *written_ >= options_.every; }

GRADACCUM_INLINE void RunPage::update(const RunProgress& progress) {
  if (!is_due()) return;
  write("running", "", progress);
  goes_on_ = true;
}

/// Shows a finished run as whole, if its progress was ever known.
GRADACCUM_INLINE void RunPage::end(RunEnd how, std::string reason, const RunProgress& progress) {
  static constexpr std::array<const char*, 3> names{"finished", "stopped", "interrupted"};
  auto last = progress;
  if (!last.fraction) last.fraction = fraction_;
  if (last.fraction && how == RunEnd::finished) last.fraction = 1;
  goes_on_ = false;
  write(names.at(static_cast<std::size_t>(how)), reason, last);
}

/// Assumes the speed since the first progress that was told.
GRADACCUM_INLINE std::optional<double> RunPage::seconds_left(double seconds) {
  if (!fraction_) return std::nullopt;
  if (!first_) first_ = RunProgress{.fraction = *fraction_, .seconds = seconds};
  const double done = *fraction_ - *first_->fraction;
  return done > 0 ? std::optional((seconds - *first_->seconds) * (1 - *fraction_) / done) : std::nullopt;
}

GRADACCUM_INLINE void RunPage::write(std::string_view state, std::string_view reason, const RunProgress& progress) {
  const double seconds = progress.seconds.value_or(this->seconds());
  fraction_ = progress.fraction;
  if (fraction_) fraction_ = std::clamp(*fraction_, 0.0, 1.0);
  written_ = Clock::now();
  auto runs = nlohmann::json::array();
  for (auto& [name, curves] : content_->runs) {
    auto all = nlohmann::json::array();
    for (auto& named : curves.all()) all.push_back(detail::json_curve(named));
    runs.push_back({{"name", detail::json_text(name)}, {"curves", std::move(all)}});
  }
  detail::replace_page(options_.path, detail::page_text({{"title", detail::json_text(options_.title)},
                                                         {"state", state},
                                                         {"reason", detail::json_text(reason, 300)},
                                                         {"fraction", detail::json_number(fraction_)},
                                                         {"seconds", seconds},
                                                         {"left", detail::json_number(seconds_left(seconds))},
                                                         {"refresh", std::clamp(options_.every.count(), 1.0, 3600.0)},
                                                         {"written", detail::time_text()},
                                                         {"tiles", content_->tiles},
                                                         {"numbers", content_->numbers},
                                                         {"settings", content_->settings},
                                                         {"runs", std::move(runs)}}));
}

GRADACCUM_INLINE void RunPage::restart() {
  start_ = Clock::now();
  seconds_before_ = 0;
  first_.reset();
}

GRADACCUM_INLINE const Curves& RunPage::curves() const { return content_->runs.front().curves; }

GRADACCUM_INLINE void RunPage::state(Archive& archive) {
  double so_far = seconds();
  archive("curves", content_->runs.front().curves);
  archive("seconds", so_far);
  if (!archive.loading()) return;
  archive.when_all_fit([this, so_far] {
    restart();
    seconds_before_ = so_far;
  });
}

}  // namespace gradaccum
