// SPDX-License-Identifier: Apache-2.0
// Writes a page with the curves of one or more runs, as one HTML file.
#pragma once

#include <gradaccum/run_page.hpp>

#include <gradaccum/archive.hpp>
#include <gradaccum/detail/io/files.hpp>
#include <gradaccum/detail/watching/page_template.hpp>

#include <ATen/ops/tensor.h>
#include <c10/util/Exception.h>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <ctime>
#include <deque>
#include <exception>
#include <fstream>
#include <span>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum {
namespace detail {

/// Saves or loads numbers as one tensor of a state.
template <class T>
void row_state(Archive& archive, const std::string& name, std::vector<T>& numbers) {
  auto row = at::tensor(at::ArrayRef<T>(numbers));
  const auto dtype = row.scalar_type();
  archive("packed." + name, row);
  TORCH_CHECK(row.scalar_type() == dtype && row.dim() == 1, "Curves: '", name, "' of saved curves must be a row of ",
              dtype, ", got ", row.scalar_type(), row.sizes());
  row = row.cpu().contiguous();
  const auto* const first = row.template const_data_ptr<T>();
  numbers.assign(first, first + row.numel());
}

/// Removes the first numbers of a loaded row, and returns them.
template <class T>
std::span<const T> take(std::span<const T>& row, std::int64_t count) {
  TORCH_CHECK(0 <= count && count <= std::ssize(row), "Curves: saved curves must not be truncated: ", count,
              " more numbers are needed, got ", row.size());
  const auto taken = row.first(static_cast<std::size_t>(count));
  row = row.subspan(taken.size());
  return taken;
}

}  // namespace detail

GRADACCUM_INLINE void Curve::add(std::int64_t update, double value) {
  if (!pieces_.empty() && update < pieces_.back().last)
    while (!pieces_.empty() && pieces_.back().last >= update) pieces_.pop_back();
  if (detail::is_finite(value))
    append({update, update, /*finite=*/1, /*gaps=*/0, {update, value}, {update, value}, value});
  else
    append({update, update, /*finite=*/0, /*gaps=*/1});
  last_value_ = value;
  while (pieces_.size() > most_pieces) {
    ++level_;
    for (auto& piece : std::exchange(pieces_, {})) append(piece);
  }
}

/// Adds a piece, or its points to the last one. Among equal extremes, the first stays.
GRADACCUM_INLINE void Curve::append(const CurvePiece& next) {
  if (pieces_.empty() || pieces_.back().last >> level_ != next.first >> level_) return pieces_.push_back(next);
  auto& piece = pieces_.back();
  piece.last = next.last;
  piece.gaps += next.gaps;
  if (next.finite == 0) return;
  if (piece.finite == 0 || next.lowest.value < piece.lowest.value) piece.lowest = next.lowest;
  if (piece.finite == 0 || next.highest.value > piece.highest.value) piece.highest = next.highest;
  const double share = static_cast<double>(next.finite) / static_cast<double>(piece.finite + next.finite);
  piece.mean = piece.finite == 0 ? next.mean : piece.mean * (1 - share) + next.mean * share;
  piece.mean = std::clamp(piece.mean, piece.lowest.value, piece.highest.value);
  piece.finite += next.finite;
}

GRADACCUM_INLINE CurvePoint Curve::last() const { return {pieces_.empty() ? 0 : pieces_.back().last, last_value_}; }

/// Checks what `add` relies on: pieces in the order of their updates, whose numbers can be added.
GRADACCUM_INLINE void Curve::check() const {
  TORCH_CHECK(0 <= level_ && level_ < 63 && !pieces_.empty() && pieces_.size() <= most_pieces, "Curves: a saved curve ",
              "must have 1 to ", most_pieces, " pieces and a level in [0, 62], got ", pieces_.size(), " and ", level_);
  for (std::size_t i = 0; i < pieces_.size(); ++i) {
    const auto& [first, last, finite, gaps, lowest, highest, mean] = pieces_[i];
    const double low = lowest.value, high = highest.value;
    const bool in_order = first <= last && (i == 0 || pieces_[i - 1].last >> level_ < first >> level_);
    const bool counts = finite >= 0 && gaps >= 0 && std::max(finite, gaps) <= INT64_MAX / 1024 && finite + gaps > 0;
    const bool numbers = detail::is_finite(low) && detail::is_finite(high) && !detail::is_nan(mean);
    TORCH_CHECK(in_order && counts && (finite == 0 || (numbers && low <= mean && mean <= high)), "Curves: piece ", i,
                " of a saved curve must follow the others, have points, and lowest <= mean <= highest: load another ",
                "state. Got updates ", first, " to ", last, ", points ", finite, " and ", gaps, ", numbers ", low, ", ",
                mean, " and ", high);
  }
}

GRADACCUM_INLINE const Curve* Curves::find(std::string_view name) const {
  const auto found = std::find_if(all_.begin(), all_.end(), [name](auto& one) { return one.name == name; });
  return found == all_.end() ? nullptr : &found->curve;
}

GRADACCUM_INLINE Curve& Curves::at(std::string_view name) {
  for (auto& [other, curve] : all_)
    if (other == name) return curve;
  return all_.emplace_back(Named{std::string(name), {}}).curve;
}

/// Names are saved as bytes, because texts of a state must be UTF-8 and names need not.
GRADACCUM_INLINE void Curves::state(Archive& archive) {
  std::vector<std::uint8_t> names;
  std::vector<std::int64_t> whole;
  std::vector<double> real;
  for (auto& [name, curve] : all_) {
    names.insert(names.end(), name.begin(), name.end());
    whole.insert(whole.end(), {std::ssize(name), curve.level_, std::ssize(curve.pieces_)});
    real.push_back(curve.last_value_);
    for (auto& [first, last, finite, gaps, lowest, highest, mean] : curve.pieces_) {
      whole.insert(whole.end(), {first, last, finite, gaps, lowest.update, highest.update});
      real.insert(real.end(), {lowest.value, highest.value, mean});
    }
  }
  detail::row_state(archive, "names", names);
  detail::row_state(archive, "whole", whole);
  detail::row_state(archive, "real", real);
  if (archive.loading()) archive.when_all_fit([this, loaded = unpacked(names, whole, real)] { *this = loaded; });
}

GRADACCUM_INLINE Curves Curves::unpacked(std::span<const std::uint8_t> names, std::span<const std::int64_t> whole,
                                         std::span<const double> real) {
  Curves loaded;
  while (!whole.empty()) {
    const auto head = detail::take(whole, 3);
    const auto name = detail::take(names, head[0]);
    auto& curve = loaded.at(std::string(name.begin(), name.end()));
    curve.level_ = head[1];
    curve.last_value_ = detail::take(real, 1)[0];
    for (std::int64_t i = 0; i < head[2]; ++i) {
      const auto counts = detail::take(whole, 6);
      const auto values = detail::take(real, 3);
      curve.pieces_.push_back(
          {counts[0], counts[1], counts[2], counts[3], {counts[4], values[0]}, {counts[5], values[1]}, values[2]});
    }
    curve.check();
  }
  TORCH_CHECK(names.empty() && real.empty(), "Curves: saved curves must have as many numbers as they say");
  return loaded;
}

namespace detail {

/// Returns whole numbers as such, and NaN and infinities as texts, because JSON has only finite numbers.
GRADACCUM_INLINE nlohmann::json json_number(double number) {
  if (!is_finite(number)) return is_nan(number) ? "NaN" : number > 0 ? "∞" : "−∞";
  if (std::abs(number) < 1e15 && std::trunc(number) == number) return static_cast<std::int64_t>(number);
  return number;
}

/// Returns `[name, last value, pieces]`. A piece without finite numbers has no mean and no extremes.
GRADACCUM_INLINE nlohmann::json json_curve(const Curves::Named& named) {
  auto pieces = nlohmann::json::array();
  for (auto& [first, last, finite, gaps, lowest, highest, mean] : named.curve.pieces()) {
    pieces.push_back({first, last, mean, lowest.value, highest.value, lowest.update, highest.update, gaps});
    if (finite == 0) pieces.back()[2] = pieces.back()[3] = pieces.back()[4] = nullptr;
  }
  return {named.name, json_number(named.curve.last().value), std::move(pieces)};
}

/// Adds a row, or replaces the row of that name.
GRADACCUM_INLINE void put_row(nlohmann::json& rows, nlohmann::json row) {
  const auto same = std::find_if(rows.begin(), rows.end(), [&row](auto& other) { return other[0] == row[0]; });
  (same == rows.end() ? rows.emplace_back() : *same) = std::move(row);
}

/// Returns `[width, height, caption, [[line width, colour, points], …]]`.
GRADACCUM_INLINE nlohmann::json json_drawing(const Drawing& drawing) {
  const auto number = [](double value) {
    TORCH_CHECK(is_finite(value), "RunPage: numbers of a drawing must be finite, got ", value);
    return value;
  };
  TORCH_CHECK(drawing.width > 0 && drawing.height > 0,
              "RunPage: a drawing must have a width and a height above 0, got ", drawing.width, " and ",
              drawing.height);
  auto lines = nlohmann::json::array();
  for (auto& [points, width, colour] : drawing.lines) {
    TORCH_CHECK(0 <= colour && colour < 8, "RunPage: the colour of a line must be in [0, 7], got ", colour);
    TORCH_CHECK(!points.empty(), "RunPage: a line of a drawing must have a point");
    auto all = nlohmann::json::array();
    for (auto [x, y] : points) all.push_back({number(x), number(y)});
    lines.push_back({number(width), colour, std::move(all)});
  }
  return {number(drawing.width), number(drawing.height), drawing.caption, std::move(lines)};
}

/// Inserts the JSON into the page, as ASCII without `<`, the only character that could end its element. Texts may be of
/// any bytes: invalid UTF-8 is replaced.
GRADACCUM_INLINE std::string page_text(const nlohmann::json& content) {
  std::string text(page_before_json);
  for (const char c : content.dump(-1, ' ', true, nlohmann::json::error_handler_t::replace))
    c == '<' ? text += "\\u003c" : text += c;
  return text.append(page_after_json);
}

/// Replaces the file of a page, without waiting for the disk. Only tries whether that can be done if the page is empty.
GRADACCUM_INLINE void write_page(const std::filesystem::path& path, const nlohmann::json& content) {
  make_directory(path.parent_path());
  auto part = path;
  part += ".part";
  make_and_rename(part, content.empty() ? part : path, [&] {
    const auto text = page_text(content);
    std::ofstream file(part, std::ios::binary);
    if (!file.write(text.data(), std::ssize(text)).flush()) file_error(path, "must be written", last_error());
  });
  if (content.empty()) std::filesystem::remove(part);
}

}  // namespace detail

/// Contents of a page except its progress. Its own run is the first. Callers hold references to the runs' curves, and a
/// deque does not move them.
struct RunPage::Content {
  std::deque<std::pair<std::string, Curves>> runs = {{}};
  nlohmann::json tiles = nlohmann::json::array(), numbers = tiles, settings = tiles, drawings = tiles;
};

/// Tries to write the page, which is not empty, so that a full disk is found.
GRADACCUM_INLINE RunPage::RunPage(RunPageOptions options)
    : options_(std::move(options)), content_(std::make_unique<Content>()) {
  TORCH_CHECK(!options_.path.empty(), "RunPage: path must be given");
  TORCH_CHECK(options_.every.count() >= 0, "RunPage: every must be >= 0 s, got ", options_.every.count(), " s");
  if (std::filesystem::is_directory(options_.path))
    detail::file_error(options_.path, "must be a file", std::make_error_code(std::errc::is_a_directory));
  detail::write_page(options_.path, {});
}

GRADACCUM_INLINE RunPage::~RunPage() {
  try {
    if (goes_on_) end(RunEnd::interrupted);
  } catch (const std::exception& error) {
    TORCH_WARN("RunPage: the page was not written: ", error.what());
  }
}

GRADACCUM_INLINE void RunPage::add(std::string_view curve, std::int64_t update, double value) {
  content_->runs.front().second.add(curve, update, value);
}

GRADACCUM_INLINE Curves& RunPage::add_run(std::string name, Curves curves) {
  return content_->runs.emplace_back(std::move(name), std::move(curves)).second;
}

GRADACCUM_INLINE void RunPage::set(std::string_view name, std::string text) {
  detail::put_row(content_->settings, {name, text});
}

GRADACCUM_INLINE void RunPage::tile(std::string_view name, std::string text, std::string note) {
  detail::put_row(content_->tiles, {name, text, note});
}

GRADACCUM_INLINE void RunPage::tile(std::string_view name, double value, std::string note) {
  detail::put_row(content_->tiles, {name, detail::json_number(value), note});
}

GRADACCUM_INLINE void RunPage::number(std::string_view name, double value, std::string text) {
  detail::put_row(content_->numbers, {name, detail::json_number(value), text});
}

GRADACCUM_INLINE void RunPage::draw(std::string_view name, const std::vector<Drawing>& drawings) {
  auto all = nlohmann::json::array();
  for (auto& drawing : std::span(drawings).first(std::min<std::size_t>(drawings.size(), 100)))
    all.push_back(detail::json_drawing(drawing));
  detail::put_row(content_->drawings, {name, std::move(all)});
}

GRADACCUM_INLINE bool RunPage::is_due() const { return !written_ || Clock::now() - *written_ >= options_.every; }

GRADACCUM_INLINE void RunPage::update(const RunProgress& progress) {
  if (!is_due()) return;
  write("running", "", progress);
  goes_on_ = true;
}

/// Shows a finished run as complete if its progress is known.
GRADACCUM_INLINE void RunPage::end(RunEnd how, std::string reason, const RunProgress& progress) {
  static constexpr std::array<const char*, 3> names{"finished", "stopped", "interrupted"};
  auto last = progress;
  if (!last.fraction) last.fraction = fraction_;
  if (last.fraction && how == RunEnd::finished) last.fraction = 1;
  goes_on_ = false;
  write(names.at(static_cast<std::size_t>(how)), reason, last);
}

GRADACCUM_INLINE double RunPage::seconds() const {
  return seconds_before_ + std::chrono::duration<double>(Clock::now() - start_).count();
}

/// Extrapolates the speed since the first known progress.
GRADACCUM_INLINE std::optional<double> RunPage::seconds_left(double seconds) {
  if (!first_.fraction) first_ = {.fraction = fraction_, .seconds = seconds};
  const double done = fraction_.value_or(0) - first_.fraction.value_or(0);
  return done > 0 ? std::optional((seconds - *first_.seconds) * (1 - *fraction_) / done) : std::nullopt;
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
    runs.push_back({{"name", name}, {"curves", std::move(all)}});
  }
  const auto known = [](std::optional<double> number) { return number ? nlohmann::json(*number) : nlohmann::json(); };
  detail::write_page(options_.path, {{"title", options_.title},
                                     {"state", state},
                                     {"reason", reason},
                                     {"fraction", known(fraction_)},
                                     {"seconds", seconds},
                                     {"left", known(seconds_left(seconds))},
                                     {"refresh", std::clamp(options_.every.count(), 1.0, 3600.0)},
                                     {"written", std::time(nullptr)},
                                     {"tiles", content_->tiles},
                                     {"numbers", content_->numbers},
                                     {"settings", content_->settings},
                                     {"drawings", content_->drawings},
                                     {"runs", std::move(runs)}});
}

GRADACCUM_INLINE void RunPage::restart() {
  start_ = Clock::now();
  seconds_before_ = 0;
  first_ = {};
}

GRADACCUM_INLINE const Curves& RunPage::curves() const { return content_->runs.front().second; }

GRADACCUM_INLINE void RunPage::state(Archive& archive) {
  double so_far = seconds();
  archive("curves", content_->runs.front().second);
  archive("seconds", so_far);
  if (!archive.loading()) return;
  archive.when_all_fit([this, so_far] {
    restart();
    seconds_before_ = so_far;
  });
}

}  // namespace gradaccum

#undef GRADACCUM_INLINE
