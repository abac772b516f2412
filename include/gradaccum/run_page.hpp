// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/curves.hpp>
#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/run_end.hpp>

#include <chrono>
#include <concepts>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

namespace gradaccum {

namespace detail {
struct PageContent;
}  // namespace detail

/// Where a `RunPage` is, what it is called, and how often it is written.
struct RunPageOptions {
  std::filesystem::path path = {};          ///< of an HTML file
  std::string title = "Training";           ///< its heading
  std::chrono::duration<double> every{10};  ///< from one writing to the next, and from one reading to the next
};

/// How far a run is.
struct RunProgress {
  std::optional<double> fraction = {};  ///< of the whole, in [0, 1]; none: nobody knows
  std::optional<double> seconds = {};   ///< that it has taken; none: since the page was made
};

/// A page of a run for people to look at while it goes on: one HTML file with curves, progress and numbers, that is
/// rewritten now and then, and needs no network and no server.
///
///     ga::RunPage page({.path = "run.html", .title = "A linear model"});
///     page.set("optimizer", "SGD, lr 1e-3");
///     for (std::int64_t update = 1; update <= 100; ++update) {
///       page.add("train/loss", update, 1.0 / update);
///       page.update({.fraction = update / 100.0});         // writes it where it is time to
///     }
///     page.end();
///
/// `train/loss` and `validation/loss` share a chart, all of `memory/…`, in bytes, is stacked; `Curves` has more on
/// names, thinning and gaps. Several runs on the same axes: `add_run`. In a browser the page reads itself anew until
/// the run is over. Whatever a name or a text is, it is shown as text, and nothing in it can run. Programs find all
/// numbers as JSON in the page's element `run`.
///
/// The file is replaced as a whole, so that nobody sees half a page. Throws `std::runtime_error` with its name where it
/// cannot be written: also when the page is made. A page that is never ended says that its run was interrupted.
///
/// @note Writing takes a few milliseconds. Memory: 18 KB a curve, and the text of the page while it is written.
class RunPage {
 public:
  explicit RunPage(RunPageOptions options);
  RunPage(const RunPage&) = delete;
  RunPage& operator=(const RunPage&) = delete;
  ~RunPage();

  /// A point of a curve.
  void add(std::string_view curve, std::int64_t update, double value);
  /// A run beside the others; its curves can be added to until the page is gone. Its colour is its own.
  Curves& add_run(std::string name, Curves curves = {});

  /// A setting, or another text: shown as it is, line by line. One of that name is replaced, as below.
  void set(std::string_view name, std::string text);
  /// A key figure, with a line below it.
  void tile(std::string_view name, std::string text, std::string note = {});
  void tile(std::string_view name, double value, std::string note = {});
  /// A number of the summary, shown as `text` where there is one; the page's JSON has its exact value.
  void number(std::string_view name, double value, std::string text = {});
  void number(std::string_view name, std::integral auto value, std::string text = {}) {
    whole_number(name, static_cast<std::int64_t>(value), std::move(text));
  }

  /// Writes the page where it has not been written for `every`, and the run goes on.
  void update(const RunProgress& progress = {});
  /// `update` would write it: for who has to find out what to tell it first.
  bool is_due() const;
  /// The run is over: writes the page for good.
  void end(RunEnd how = RunEnd::finished, std::string reason = {}, const RunProgress& progress = {});
  /// Another run begins: its time counts from now on, and the time that is left goes by what is done from now on.
  void restart();

  /// The curves that `add` writes to.
  const Curves& curves() const;
  /// The curves, and the time so far: a run that goes on has one curve, without a point that is there twice.
  void state(Archive& archive);

 private:
  using Clock = std::chrono::steady_clock;

  void whole_number(std::string_view name, std::int64_t value, std::string text);
  void write(std::string_view state, std::string_view reason, const RunProgress& progress);
  double seconds() const;
  std::optional<double> seconds_left(double seconds);

  RunPageOptions options_;
  std::unique_ptr<detail::PageContent> content_;
  Clock::time_point start_ = Clock::now();
  std::optional<Clock::time_point> written_ = {};
  double seconds_before_ = 0;                                           // of a run that was loaded
  std::optional<RunProgress> first_ = {{.fraction = 0, .seconds = 0}};  // what the time that is left goes by
  std::optional<double> fraction_ = {};                                 // that was written last
  bool goes_on_ = false;                                                // the page on the disk says so
};

}  // namespace gradaccum

#ifndef GRADACCUM_COMPILED
#include <gradaccum/run_page.ipp>
#endif
