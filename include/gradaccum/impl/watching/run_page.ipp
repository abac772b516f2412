// SPDX-License-Identifier: Apache-2.0
// Writes a page with the curves of one or more runs, as one HTML file.
#pragma once

#include <gradaccum/run_page.hpp>

#include <gradaccum/archive.hpp>
#include <gradaccum/detail/io/files.hpp>
#include <gradaccum/detail/watching/page_template.hpp>

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <ctime>
#include <deque>
#include <exception>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum {
namespace detail {

/// Adds the points of the next piece. Among equal extremes, the first stays.
GRADACCUM_INLINE void extend(CurvePiece& piece, const CurvePiece& next) {
  if (piece.finite + piece.gaps == 0) piece.first = next.first;
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

/// Saves or loads numbers one by one, as one tensor of a state.
template <class T>
struct NumbersInTurn {
  Archive& archive;
  std::string name;
  std::vector<T> numbers = {};
  std::size_t read = 0;

  /// Saves the number, or returns the loaded number at the same index.
  T next(T number) {
    if (!archive.loading()) return numbers.emplace_back(number);
    TORCH_CHECK(read < numbers.size(), "Curves: saved curves must not be truncated");
    return numbers[read++];
  }
  std::int64_t left() const { return std::ssize(numbers) - static_cast<std::int64_t>(read); }

  /// Saves or loads the tensor. Call it after every `next` when saving, and before the first when loading.
  void state() {
    constexpr auto dtype = c10::CppTypeToScalarType<T>::value;
    auto row = at::empty({std::ssize(numbers)}, at::TensorOptions(dtype));
    std::copy(numbers.begin(), numbers.end(), row.template mutable_data_ptr<T>());
    archive("packed." + name, row);
    if (!archive.loading()) return;
    TORCH_CHECK(row.scalar_type() == dtype && row.dim() == 1, "Curves: '", name, "' of saved curves must be a row of ",
                dtype, ", got ", row.scalar_type(), row.sizes());
    row = row.cpu().contiguous();
    const auto* const first = row.template const_data_ptr<T>();
    numbers.assign(first, first + row.numel());
  }
};

GRADACCUM_INLINE void pack(CurvePiece& piece, NumbersInTurn<std::int64_t>& whole, NumbersInTurn<double>& real) {
  for (auto* const number :
       {&piece.first, &piece.last, &piece.finite, &piece.gaps, &piece.lowest.update, &piece.highest.update})
    *number = whole.next(*number);
  for (auto* const number : {&piece.lowest.value, &piece.highest.value, &piece.mean}) *number = real.next(*number);
}

}  // namespace detail

GRADACCUM_INLINE void Curve::add(std::int64_t update, double value) {
  if (!pieces_.empty() && update < pieces_.back().last)
    while (!pieces_.empty() && pieces_.back().last >= update) pieces_.pop_back();
  const bool finite = detail::is_finite(value);
  const CurvePoint point{update, value};
  append({update, update, finite, !finite, point, point, value});
  last_value_ = value;
  while (pieces_.size() > most_pieces) {
    ++level_;
    for (auto& piece : std::exchange(pieces_, {})) append(piece);
  }
}

GRADACCUM_INLINE void Curve::append(const CurvePiece& piece) {
  const bool is_new = pieces_.empty() || pieces_.back().last >> level_ != piece.first >> level_;
  detail::extend(is_new ? pieces_.emplace_back() : pieces_.back(), piece);
}

GRADACCUM_INLINE CurvePoint Curve::last() const { return {pieces_.empty() ? 0 : pieces_.back().last, last_value_}; }

GRADACCUM_INLINE std::optional<CurvePoint> Curve::extreme(CurvePoint CurvePiece::*which) const {
  CurvePiece all;
  for (auto& piece : pieces_) detail::extend(all, piece);
  return all.finite > 0 ? std::optional(all.*which) : std::nullopt;
}

GRADACCUM_INLINE void Curve::check() const {
  TORCH_CHECK(0 <= level_ && level_ < 63, "Curves: the level of a saved curve must be in [0, 62], got ", level_);
  TORCH_CHECK(pieces_.size() <= most_pieces, "Curves: a saved curve must have at most ", most_pieces, " pieces, got ",
              pieces_.size());
  for (std::size_t i = 0; i < pieces_.size(); ++i) {
    const auto& piece = pieces_[i];
    const bool in_order =
        piece.first <= piece.last && (i == 0 || pieces_[i - 1].last >> level_ < piece.first >> level_);
    const bool counts = piece.finite >= 0 && piece.gaps >= 0 && piece.finite <= INT64_MAX / 1024 &&
                        piece.gaps <= INT64_MAX / 1024 && piece.finite + piece.gaps > 0;
    const double low = piece.lowest.value, mean = piece.mean, high = piece.highest.value;
    const bool numbers = piece.finite == 0 || (detail::is_finite(low) && detail::is_finite(high));
    TORCH_CHECK(in_order && counts && numbers, "Curves: piece ", i, " of a saved curve is invalid");
    TORCH_CHECK(piece.finite == 0 || (!detail::is_nan(mean) && low <= mean && mean <= high), "Curves: piece ", i,
                " of a saved curve must have lowest <= mean <= highest, got ", low, ", ", mean, " and ", high);
  }
}

GRADACCUM_INLINE Curve& Curves::at(std::string_view name) {
  const auto found = indices_.find(name);
  if (found != indices_.end()) return all_[found->second].curve;
  indices_.emplace(std::string(name), all_.size());
  return all_.emplace_back(Named{std::string(name), {}}).curve;
}

GRADACCUM_INLINE const Curve* Curves::find(std::string_view name) const {
  const auto found = indices_.find(name);
  return found == indices_.end() ? nullptr : &all_[found->second].curve;
}

/// Packs curves into three tensors. Names of metrics are saved as bytes, because texts of a state must be UTF-8 and
/// names need not.
GRADACCUM_INLINE void Curves::state(Archive& archive) {
  const bool loading = archive.loading();
  auto all = loading ? std::vector<Named>() : all_;
  detail::NumbersInTurn<std::uint8_t> names{archive, "names"};
  detail::NumbersInTurn<std::int64_t> whole{archive, "whole"};
  detail::NumbersInTurn<double> real{archive, "real"};
  const auto rows = [&] {
    names.state();
    whole.state();
    real.state();
  };
  if (loading) rows();
  for (std::size_t i = 0; loading ? whole.left() > 0 : i < all.size(); ++i) {
    auto& [name, curve] = loading ? all.emplace_back() : all[i];
    const auto letters = whole.next(std::ssize(name));
    curve.level_ = whole.next(curve.level_);
    const auto pieces = whole.next(std::ssize(curve.pieces_));
    TORCH_CHECK(letters >= 0 && pieces >= 0, "Curves: a saved curve must have a name and pieces, got ", letters,
                " and ", pieces);
    TORCH_CHECK(!loading || (letters <= names.left() && pieces <= whole.left() / 6),  // six numbers each
                "Curves: saved curves must not be truncated");
    name.resize(static_cast<std::size_t>(letters));
    curve.pieces_.resize(static_cast<std::size_t>(pieces));
    for (char& letter : name) letter = static_cast<char>(names.next(static_cast<std::uint8_t>(letter)));
    curve.last_value_ = real.next(curve.last_value_);
    for (auto& piece : curve.pieces_) detail::pack(piece, whole, real);
    curve.check();
  }
  if (!loading) return rows();
  TORCH_CHECK(names.left() == 0 && real.left() == 0, "Curves: saved curves must have as many numbers as they say");
  Curves loaded;
  for (auto& [name, curve] : all) loaded.at(name) = std::move(curve);
  archive.when_all_fit([this, loaded = std::move(loaded)] { *this = loaded; });
}

namespace detail {

/// Returns the time as `2026-01-31 23:59:59 UTC`.
GRADACCUM_INLINE std::string time_text() {
  const auto now = std::time(nullptr);
  std::tm parts{};
  std::array<char, 64> text{};
  if (!gmtime_r(&now, &parts)) return "";
  return {text.data(), std::strftime(text.data(), text.size(), "%Y-%m-%d %H:%M:%S UTC", &parts)};
}

/// Shortens a text of any bytes. `dump` replaces invalid UTF-8, such as a character that is cut in two.
GRADACCUM_INLINE nlohmann::json json_text(std::string_view text, std::size_t most_bytes = 200) {
  return std::string(text.substr(0, most_bytes)) + (text.size() > most_bytes ? "…" : "");
}

/// Returns NaN and infinities as texts, because JSON has only finite numbers.
GRADACCUM_INLINE nlohmann::json json_number(double number) {
  if (detail::is_finite(number)) return number;
  return detail::is_nan(number) ? "NaN" : number > 0 ? "∞" : "−∞";
}

GRADACCUM_INLINE nlohmann::json json_number(const std::optional<double>& number) {
  return number ? nlohmann::json(*number) : nlohmann::json();
}

/// Returns `[name, last value, pieces]`. A piece without finite numbers has no mean and no extremes.
GRADACCUM_INLINE nlohmann::json json_curve(const Curves::Named& named) {
  auto pieces = nlohmann::json::array();
  for (auto& piece : named.curve.pieces()) {
    const auto finite = [&piece](double number) { return piece.finite > 0 ? json_number(number) : nlohmann::json(); };
    pieces.push_back({piece.first, piece.last, finite(piece.mean), finite(piece.lowest.value),
                      finite(piece.highest.value), piece.lowest.update, piece.highest.update, piece.gaps});
  }
  return {json_text(named.name), json_number(named.curve.last().value), std::move(pieces)};
}

/// Adds a row, or replaces the row of that name. Names are shortened later.
GRADACCUM_INLINE void put_row(nlohmann::json& rows, nlohmann::json row) {
  const auto same = std::find_if(rows.begin(), rows.end(), [&row](auto& other) { return other[0] == row[0]; });
  (same == rows.end() ? rows.emplace_back() : *same) = std::move(row);
}

GRADACCUM_INLINE nlohmann::json with_short_names(nlohmann::json rows, std::size_t most_bytes = 200) {
  for (auto& row : rows) row[0] = json_text(row[0].get_ref<const std::string&>(), most_bytes);
  return rows;
}

/// Inserts the JSON into the page, as ASCII without `<`, the only character that could end its element.
GRADACCUM_INLINE std::string page_text(const nlohmann::json& content) {
  std::string text(page_before_json);
  for (const char c : content.dump(-1, ' ', true, nlohmann::json::error_handler_t::replace))
    c == '<' ? text += "\\u003c" : text += c;
  return text.append(page_after_json);
}

GRADACCUM_INLINE std::filesystem::path part_of(std::filesystem::path path) { return path += ".part"; }

/// Writes a page to a temporary file in the same directory, without waiting for the disk.
GRADACCUM_INLINE void write_part(const std::filesystem::path& path, std::string_view text) {
  const NoFileSizeSignal no_signal;
  make_directory(path.parent_path());
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

}  // namespace detail

/// Contents of a page except its progress. Its own run is the first. Callers hold references to the runs' curves, and a
/// deque does not move them.
struct RunPage::Content {
  struct Run {
    std::string name = {};
    Curves curves = {};
  };
  std::deque<Run> runs = std::deque<Run>(1);
  nlohmann::json tiles = nlohmann::json::array(), numbers = tiles, settings = tiles;
};

GRADACCUM_INLINE RunPage::RunPage(RunPageOptions options)
    : options_(std::move(options)), content_(std::make_unique<Content>()) {
  TORCH_CHECK(!options_.path.empty(), "RunPage: path must be given");
  TORCH_CHECK(options_.every.count() >= 0, "RunPage: every must be >= 0 s, got ", options_.every.count(), " s");
  if (std::filesystem::is_directory(options_.path)) detail::file_error(options_.path, "must be a file", EISDIR);
  detail::write_part(options_.path, detail::page_text({}));  // not empty, to detect a full disk
  std::remove(detail::part_of(options_.path).c_str());
}

GRADACCUM_INLINE RunPage::~RunPage() {
  try {
    if (goes_on_) end(RunEnd::interrupted);
  } catch (const std::exception& error) {
    TORCH_WARN("RunPage: the page was not written: ", error.what());
  }
}

GRADACCUM_INLINE void RunPage::add(std::string_view curve, std::int64_t update, double value) {
  content_->runs.front().curves.add(curve, update, value);
}

GRADACCUM_INLINE Curves& RunPage::add_run(std::string name, Curves curves) {
  return content_->runs.emplace_back(Content::Run{std::move(name), std::move(curves)}).curves;
}

GRADACCUM_INLINE void RunPage::set(std::string_view name, std::string text) {
  detail::put_row(content_->settings, {name, detail::json_text(text, 5000)});
}

GRADACCUM_INLINE void RunPage::tile(std::string_view name, std::string text, std::string note) {
  detail::put_row(content_->tiles, {name, detail::json_text(text, 60), detail::json_text(note)});
}

GRADACCUM_INLINE void RunPage::tile(std::string_view name, double value, std::string note) {
  detail::put_row(content_->tiles, {name, detail::json_number(value), detail::json_text(note)});
}

GRADACCUM_INLINE void RunPage::number(std::string_view name, double value, std::string text) {
  detail::put_row(content_->numbers, {name, detail::json_number(value), detail::json_text(text)});
}

GRADACCUM_INLINE void RunPage::whole_number(std::string_view name, std::int64_t value, std::string text) {
  detail::put_row(content_->numbers, {name, value, detail::json_text(text)});
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

/// Shows a finished run as complete if its progress is known.
GRADACCUM_INLINE void RunPage::end(RunEnd how, std::string reason, const RunProgress& progress) {
  static constexpr std::array<const char*, 3> names{"finished", "stopped", "interrupted"};
  auto last = progress;
  if (!last.fraction) last.fraction = fraction_;
  if (last.fraction && how == RunEnd::finished) last.fraction = 1;
  goes_on_ = false;
  write(names.at(static_cast<std::size_t>(how)), reason, last);
}

/// Extrapolates the speed since the first known progress.
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
  const auto text = detail::page_text({{"title", detail::json_text(options_.title)},
                                       {"state", state},
                                       {"reason", detail::json_text(reason, 300)},
                                       {"fraction", detail::json_number(fraction_)},
                                       {"seconds", seconds},
                                       {"left", detail::json_number(seconds_left(seconds))},
                                       {"refresh", std::clamp(options_.every.count(), 1.0, 3600.0)},
                                       {"written", detail::time_text()},
                                       {"tiles", detail::with_short_names(content_->tiles, 60)},
                                       {"numbers", detail::with_short_names(content_->numbers)},
                                       {"settings", detail::with_short_names(content_->settings)},
                                       {"runs", std::move(runs)}});
  detail::write_part(options_.path, text);
  detail::make_and_rename(detail::part_of(options_.path), options_.path, [] {});
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

#undef GRADACCUM_INLINE
