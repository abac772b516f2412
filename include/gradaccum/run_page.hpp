// SPDX-License-Identifier: Apache-2.0
#pragma once
// module: watching

#include <gradaccum/detail/build/inline.hpp>

#include <array>
#include <chrono>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace gradaccum {

class Archive;

/// A point of a curve: a number at an update.
struct CurvePoint {
  std::int64_t update = 0;  ///< counted by the caller
  double value = 0;         ///< may be NaN or infinite
};

/// A summary of consecutive points of a curve. Non-finite values are counted, and excluded from the other members.
struct CurvePiece {
  std::int64_t first = 0, last = 0;      ///< updates of its points
  std::int64_t finite = 0, gaps = 0;     ///< numbers of finite and of non-finite values
  CurvePoint lowest = {}, highest = {};  ///< the first of equal points
  double mean = 0;                       ///< always between lowest and highest, also after rounding or overflow
};

/// A number over the updates of a training, in at most 256 pieces of equal numbers of updates. When there would be more
/// pieces, each gets twice the updates. Their boundaries depend on updates only, not on when a program was stopped.
class Curve {
 public:
  static constexpr std::size_t most_pieces = 256;  ///< bounds its memory

  /// Adds a point. If its update is less than the last one, first removes all pieces that reach it.
  void add(std::int64_t update, double value);

  const std::vector<CurvePiece>& pieces() const { return pieces_; }  ///< pieces in the order of their updates
  std::int64_t level() const { return level_; }                      ///< each piece has 2^level updates
  CurvePoint last() const;                                           ///< the last point, which may be non-finite

 private:
  friend class Curves;
  void append(const CurvePiece& next);
  void check() const;

  std::vector<CurvePiece> pieces_;
  std::int64_t level_ = 0;
  double last_value_ = 0;
};

/// Curves by name, which a `RunPage` draws.
///
///     ga::Curves curves;
///     for (std::int64_t update = 1; update <= 1000; ++update) {
///       curves.add("train/loss", update, 1.0 / update);
///       if (update % 100 == 0) curves.add("validation/loss", update, 1.1 / update);
///     }
///
/// In a name such as `train/loss`, the part after the last `/` names the chart, and the part before it the curve in
/// that chart. A curve takes at most 18 KB. Non-finite values are gaps. Curves can be saved in a state: the curves of a
/// resumed run are bitwise the same as without interruption.
class Curves {
 public:
  /// A curve and its name.
  struct Named {
    std::string name;  ///< any bytes
    Curve curve;       ///< the points
  };

  /// Adds a point to the curve of this name, which is created if needed.
  void add(std::string_view name, std::int64_t update, double value) { at(name).add(update, value); }
  bool empty() const { return all_.empty(); }             ///< true if there is no curve
  const std::vector<Named>& all() const { return all_; }  ///< curves in the order in which they were created
  const Curve* find(std::string_view name) const;         ///< the curve of this name, or nullptr
  void state(Archive& archive);                           ///< saves or loads all curves

 private:
  Curve& at(std::string_view name);
  static Curves unpacked(std::span<const std::uint8_t> names, std::span<const std::int64_t> whole,
                         std::span<const double> real);

  std::vector<Named> all_;
};

/// How a run ended, as shown on its page.
enum class RunEnd {
  finished,     ///< reached its limits
  stopped,      ///< stopped early on purpose, for example by EarlyStopping
  interrupted,  ///< ended by a signal or an exception; it can resume
};

/// Options of a `RunPage`.
struct RunPageOptions {
  std::filesystem::path path = {};          ///< the HTML file
  std::string title = "Training";           ///< its heading
  std::chrono::duration<double> every{10};  ///< time between two writes of the file, and between reloads in a browser
};

/// The fraction of a run that is done, and the time that it took.
struct RunProgress {
  std::optional<double> fraction = {};  ///< in [0, 1]; nullopt if unknown
  std::optional<double> seconds = {};   ///< by default the time since the page was constructed
};

/// A line of a `Drawing` through points. A line of one point is a dot.
struct DrawnLine {
  std::vector<std::array<double, 2>> points = {};  ///< x and y, in the units of the drawing
  double width = 2;                                ///< in pixels
  std::int64_t colour = 0;                         ///< index of a colour of the curves, 0 to 7; 7 is gray
};

/// A picture of lines, such as a frame of a simulation or a robot's path.
struct Drawing {
  double width = 1, height = 1;       ///< x goes from 0 to `width`, y upwards from 0 to `height`
  std::vector<DrawnLine> lines = {};  ///< later lines cover earlier ones
  std::string caption = {};           ///< shown below
};

/// Writes an HTML page with curves, progress and numbers of a run, also while it runs. The page is one file that needs
/// no network and no server.
///
///     ga::RunPage page({.path = "run.html", .title = "A linear model"});
///     page.set("optimizer", "SGD, lr 1e-3");
///     for (std::int64_t update = 1; update <= 100; ++update) {
///       page.add("train/loss", update, 1.0 / update);
///       page.update({.fraction = update / 100.0});         // writes it where it is time to
///     }
///     page.end();
///
/// `train/loss` and `validation/loss` share a chart, and curves named `memory/…`, in bytes, are stacked; see `Curves`.
/// In a browser the page reloads until the run is over. Names and texts are escaped, so no code in them can run.
/// Programs find all numbers as JSON in the page's element `run`.
///
/// The file is replaced atomically, and its folder is created. The constructor and each write throw
/// `std::runtime_error` with the file's name if writing fails. The destructor of a page without `end` reports that the
/// run was interrupted.
///
/// @note Writing takes a few milliseconds, and memory for the text of the page.
class RunPage {
 public:
  explicit RunPage(RunPageOptions options);
  ~RunPage();

  /// Adds a point to a curve.
  void add(std::string_view curve, std::int64_t update, double value);
  /// Adds a run, which gets its own colour. Points can be added to the returned curves while the page exists.
  Curves& add_run(std::string name, Curves curves = {});

  /// Shows a setting, or another text, line by line. Here and below, a name that is set again replaces its old content.
  void set(std::string_view name, std::string text);
  /// Shows a key figure with a line below it.
  void tile(std::string_view name, std::string text, std::string note = {});
  void tile(std::string_view name, double value, std::string note = {});
  /// Shows a number of the summary, as `text` if there is one. The JSON has the number itself.
  void number(std::string_view name, double value, std::string text = {});
  void number(std::string_view name, std::integral auto value, std::string text = {}) {
    number(name, static_cast<double>(value), std::move(text));
  }

  /// Shows at most 100 drawings side by side, such as frames of an episode. Throws if a number is not finite.
  void draw(std::string_view name, const std::vector<Drawing>& drawings);

  /// Writes the page if it has not been written for `every`.
  void update(const RunProgress& progress = {});
  /// Returns true if `update` would write the page, for callers whose numbers take time to compute.
  bool is_due() const;
  /// Writes the page of a run that is over.
  void end(RunEnd how = RunEnd::finished, std::string reason = {}, const RunProgress& progress = {});
  /// Starts another run: restarts the clock and the estimate of the remaining time.
  void restart();

  /// Returns the curves that `add` writes to.
  const Curves& curves() const;
  /// Saves or loads the curves and the time so far, so that a resumed run continues its curves without duplicates.
  void state(Archive& archive);

 private:
  using Clock = std::chrono::steady_clock;
  struct Content;

  void write(std::string_view state, std::string_view reason, const RunProgress& progress);
  double seconds() const;
  std::optional<double> seconds_left(double seconds);

  RunPageOptions options_;
  std::unique_ptr<Content> content_;
  Clock::time_point start_ = Clock::now();
  std::optional<Clock::time_point> written_ = {};
  double seconds_before_ = 0;                              // time before the loaded state
  RunProgress first_ = {.fraction = 0.0, .seconds = 0.0};  // start of the measurement of speed
  std::optional<double> fraction_ = {};                    // the fraction in the file
  bool goes_on_ = false;                                   // the file says that the run is not over
};

}  // namespace gradaccum

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/watching/run_page.ipp>
#endif
