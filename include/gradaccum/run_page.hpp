// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <chrono>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace gradaccum {

class Archive;

/// A number at an update.
struct CurvePoint {
  std::int64_t update = 0;  ///< counted by the caller
  double value = 0;         ///< may be NaN or infinite
};

/// Neighbouring points of a curve. NaN and infinities are counted, and are in no other number.
struct CurvePiece {
  std::int64_t first = 0, last = 0;      ///< updates of its points
  std::int64_t finite = 0, gaps = 0;     ///< how many are numbers, and how many are NaN or infinite
  CurvePoint lowest = {}, highest = {};  ///< the first of equal ones
  double mean = 0;                       ///< lies between both, whatever is rounded or overflows
};

/// A number over the updates of a training: at most 256 pieces of as many updates each, twice as many whenever there
/// would be more pieces. Where a piece begins depends on the updates alone, not on where a program was stopped.
class Curve {
 public:
  static constexpr std::size_t most_pieces = 256;  ///< bounds its memory

  /// Adds a point. Updates go up, or stay; one that goes back forgets what was there from then on.
  void add(std::int64_t update, double value);

  bool empty() const { return pieces_.empty(); }                     ///< has no point
  const std::vector<CurvePiece>& pieces() const { return pieces_; }  ///< in the order of their updates
  std::int64_t level() const { return level_; }                      ///< a piece has 2^level updates
  CurvePoint last() const;                                           ///< the last point, which may be NaN or infinite
  /// The first of the lowest points, or of the highest; none where no point is a number.
  std::optional<CurvePoint> lowest() const { return extreme(&CurvePiece::lowest); }
  std::optional<CurvePoint> highest() const { return extreme(&CurvePiece::highest); }

 private:
  friend class Curves;
  std::optional<CurvePoint> extreme(CurvePoint CurvePiece::*which) const;
  void append(const CurvePiece& piece);
  void check() const;

  std::vector<CurvePiece> pieces_;
  std::int64_t level_ = 0;
  double last_value_ = 0;
};

/// Numbers over the updates of a run, by name: what a `RunPage` draws.
///
///     ga::Curves curves;
///     for (std::int64_t update = 1; update <= 1000; ++update) {
///       curves.add("train/loss", update, 1.0 / update);
///       if (update % 100 == 0) curves.add("validation/loss", update, 1.1 / update);
///     }
///
/// Names are what you like: the part after the last `/` is the chart that a curve is drawn on, the part before it its
/// name there. A curve takes at most 18 KB. NaN and infinities are gaps. Curves are a part of a state: a run that goes
/// on has the curves of one that was never stopped, to the bit.
class Curves {
 public:
  /// A curve and its name.
  struct Named {
    std::string name;  ///< as it was given, of any bytes
    Curve curve;       ///< its points
  };

  /// Adds a point to the curve of this name, which begins with it where there is none.
  void add(std::string_view name, std::int64_t update, double value) { at(name).add(update, value); }
  bool empty() const { return all_.empty(); }             ///< has no curve
  const std::vector<Named>& all() const { return all_; }  ///< in the order in which they came
  const Curve* find(std::string_view name) const;         ///< null where there is none of this name
  void state(Archive& archive);                           ///< saves and loads all curves

 private:
  Curve& at(std::string_view name);

  std::vector<Named> all_;
  std::map<std::string, std::size_t, std::less<>> indices_;
};

/// How a run ended, on its page.
enum class RunEnd {
  finished,     ///< it did all that it was asked for
  stopped,      ///< early, since somebody wanted that: it would not have become better
  interrupted,  ///< by a signal or an exception; it can go on
};

/// Options of a `RunPage`: its file, its heading, and how often it is written.
struct RunPageOptions {
  std::filesystem::path path = {};          ///< the HTML file
  std::string title = "Training";           ///< its heading
  std::chrono::duration<double> every{10};  ///< from one writing to the next, and from one reading to the next
};

/// The share of a run that is done, and the time that it took.
struct RunProgress {
  std::optional<double> fraction = {};  ///< in [0, 1]; none: nobody knows
  std::optional<double> seconds = {};   ///< none: those since the page was made
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
/// names and gaps. In a browser the page reads itself anew until the run is over. Names and texts are shown as text,
/// whatever is in them, and nothing in them can run. Programs find all numbers as JSON in the page's element `run`.
///
/// The file is replaced as a whole, so that nobody sees half a page, and its folder is made. Throws
/// `std::runtime_error` with its name where it cannot be written: also when the page is made. A page that is never
/// ended says that its run was interrupted.
///
/// @note Writing takes a few milliseconds, and memory for the text of the page.
class RunPage {
 public:
  explicit RunPage(RunPageOptions options);
  ~RunPage();

  /// Adds a point to a curve.
  void add(std::string_view curve, std::int64_t update, double value);
  /// Adds a run in a colour of its own. Its curves can be added to until the page is gone.
  Curves& add_run(std::string name, Curves curves = {});

  /// Shows a setting, or another text, line by line. What has a name replaces what had that name, here and below.
  void set(std::string_view name, std::string text);
  /// Shows a key figure with a line below it.
  void tile(std::string_view name, std::string text, std::string note = {});
  void tile(std::string_view name, double value, std::string note = {});
  /// Shows a number of the summary, as `text` where there is one; the JSON has its digits.
  void number(std::string_view name, double value, std::string text = {});
  void number(std::string_view name, std::integral auto value, std::string text = {}) {
    whole_number(name, static_cast<std::int64_t>(value), std::move(text));
  }

  /// Writes the page where it has not been written for `every`, and the run goes on.
  void update(const RunProgress& progress = {});
  /// Tells whether `update` would write the page, for callers that first have to find out what to show.
  bool is_due() const;
  /// Writes the page of a run that is over.
  void end(RunEnd how = RunEnd::finished, std::string reason = {}, const RunProgress& progress = {});
  /// Begins another run: time counts from now on, and the time that is left is computed from what is done from now on.
  void restart();

  /// The curves that `add` writes to.
  const Curves& curves() const;
  /// Saves and loads the curves and the time so far, so that a run that goes on has one curve, each point once.
  void state(Archive& archive);

 private:
  using Clock = std::chrono::steady_clock;
  struct Content;

  void whole_number(std::string_view name, std::int64_t value, std::string text);
  void write(std::string_view state, std::string_view reason, const RunProgress& progress);
  double seconds() const;
  std::optional<double> seconds_left(double seconds);

  RunPageOptions options_;
  std::unique_ptr<Content> content_;
  Clock::time_point start_ = Clock::now();
  std::optional<Clock::time_point> written_ = {};
  double seconds_before_ = 0;                                           // spent before the state that was loaded
  std::optional<RunProgress> first_ = {{.fraction = 0, .seconds = 0}};  // where the speed is measured from
  std::optional<double> fraction_ = {};                                 // on the page on the disk
  bool goes_on_ = false;                                                // the page on the disk says so
};

}  // namespace gradaccum

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/watching/run_page.ipp>
#endif
