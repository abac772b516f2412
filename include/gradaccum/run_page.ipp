// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/run_page.hpp>

#include <gradaccum/archive.hpp>
#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/watching/number_text.hpp>
#include <gradaccum/detail/watching/page_content.hpp>
#include <gradaccum/detail/watching/page_file.hpp>

#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <ctime>
#include <exception>
#include <utility>

namespace gradaccum {
namespace detail {

/// `2026-01-31 23:59:59 UTC`
GRADACCUM_INLINE std::string time_text() {
  const auto now = std::time(nullptr);
  std::tm parts{};
  std::array<char, 64> text{};
  if (!gmtime_r(&now, &parts)) return "";
  return {text.data(), std::strftime(text.data(), text.size(), "%Y-%m-%d %H:%M:%S UTC", &parts)};
}

/// In the order in which the names came.
template <class Named>
void put_by_name(std::vector<Named>& all, Named named) {
  const auto same = std::find_if(all.begin(), all.end(), [&named](auto& other) { return other.name == named.name; });
  if (same == all.end())
    all.push_back(std::move(named));
  else
    *same = std::move(named);
}

}  // namespace detail

GRADACCUM_INLINE RunPage::RunPage(RunPageOptions options)
    : content_(std::make_unique<detail::PageContent>()),
      file_(std::make_unique<detail::PageFile>(options.path, options.every)),
      own_(content_->runs.emplace_back().curves),
      start_(std::chrono::steady_clock::now()) {
  TORCH_CHECK(!options.path.empty(), "RunPage: path must be given");
  TORCH_CHECK(options.every.count() >= 0, "RunPage: every must be >= 0 s, got ", options.every.count(), " s");
  content_->title = std::move(options.title);
  content_->refresh = options.every.count();
  file_->check();
}

GRADACCUM_INLINE RunPage::~RunPage() {
  if (!is_written_ || content_->end) return;
  try {
    end(RunEnd::interrupted);
  } catch (const std::exception&) {  // there is nobody to tell
  }
}

GRADACCUM_INLINE void RunPage::add(std::string_view curve, std::int64_t update, double value) {
  own_.add(curve, update, value);
}

GRADACCUM_INLINE Curves& RunPage::add_run(std::string name, Curves curves) {
  return content_->runs.emplace_back(detail::PageRun{std::move(name), std::move(curves)}).curves;
}

GRADACCUM_INLINE void RunPage::set(std::string_view name, std::string text) {
  detail::put_by_name(content_->facts, {std::string(name), std::move(text)});
}

GRADACCUM_INLINE void RunPage::tile(std::string_view name, std::string text, std::string note) {
  detail::put_by_name(content_->tiles, {std::string(name), std::move(text), std::move(note)});
}

GRADACCUM_INLINE void RunPage::number(std::string_view name, double value, std::string text) {
  if (text.empty()) text = detail::number_text(value);
  detail::put_by_name(content_->numbers, {std::string(name), std::move(text), detail::exact_text(value)});
}

GRADACCUM_INLINE void RunPage::whole_number(std::string_view name, std::int64_t value, std::string text) {
  if (text.empty()) text = detail::count_text(value);
  detail::put_by_name(content_->numbers, {std::string(name), std::move(text), std::to_string(value)});
}

GRADACCUM_INLINE double RunPage::seconds() const {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
}

GRADACCUM_INLINE bool RunPage::is_due() const { return file_->is_due(); }

GRADACCUM_INLINE void RunPage::update(const RunProgress& progress) {
  if (!is_due()) return;
  content_->end.reset();
  content_->reason.clear();
  write(progress);
}

/// What has finished is whole, if it was ever said how far it is.
GRADACCUM_INLINE void RunPage::end(RunEnd how, std::string reason, const RunProgress& progress) {
  content_->end = how;
  content_->reason = std::move(reason);
  auto last = progress;
  if (!last.fraction) last.fraction = content_->fraction;
  if (last.fraction && how == RunEnd::finished) last.fraction = 1;
  write(last);
}

/// From how much was done in how long since the first time that somebody said so.
GRADACCUM_INLINE std::optional<double> RunPage::seconds_left(double fraction, double seconds) {
  if (!first_) first_ = RunProgress{.fraction = fraction, .seconds = seconds};
  const double done = fraction - *first_->fraction;
  return done > 0 ? std::optional((seconds - *first_->seconds) * (1 - fraction) / done) : std::nullopt;
}

GRADACCUM_INLINE void RunPage::write(const RunProgress& progress) {
  auto& content = *content_;
  content.seconds = progress.seconds.value_or(seconds_before_ + seconds());
  content.fraction.reset();
  content.seconds_left.reset();
  if (progress.fraction) {
    content.fraction = std::clamp(*progress.fraction, 0.0, 1.0);
    content.seconds_left = seconds_left(*content.fraction, *content.seconds);
  }
  content.written = detail::time_text();
  file_->write(detail::html_of(content));
  is_written_ = true;
}

GRADACCUM_INLINE void RunPage::restart() {
  start_ = std::chrono::steady_clock::now();
  seconds_before_ = 0;
  first_.reset();
}

GRADACCUM_INLINE const Curves& RunPage::curves() const { return own_; }

GRADACCUM_INLINE void RunPage::state(Archive& archive) {
  double so_far = seconds_before_ + seconds();
  archive("curves", own_);
  archive("seconds", so_far);
  if (!archive.loading()) return;
  archive.when_all_fit([this, so_far] {
    restart();
    seconds_before_ = so_far;
  });
}

}  // namespace gradaccum
