// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/detail/training/fit_state.hpp>
#include <gradaccum/fit_options.hpp>
#include <gradaccum/memory_meter.hpp>

#include <filesystem>
#include <limits>
#include <sstream>
#include <string>
#include <type_traits>

namespace ga = gradaccum;
namespace inner = gradaccum::detail;

TEST_CASE("FitOptions: numbers below zero are refused") {
  ga::check({});
  ga::check({.epochs = 0, .updates = 0});
  REQUIRE_ERROR("FitOptions: epochs must be >= 0, got -1", ga::check({.epochs = -1}));
  REQUIRE_ERROR("FitOptions: updates must be >= 0, got -2", ga::check({.epochs = 1, .updates = -2}));
}

TEST_CASE("FitOptions: resume accepts all types that convert to a path") {
  const std::filesystem::path runs = "runs";
  const std::string text = "runs";
  ga::FitOptions options{.resume = "runs"};
  for (const auto& given :
       {options, ga::FitOptions{.resume = runs}, ga::FitOptions{.resume = runs / ""}, ga::FitOptions{.resume = text}}) {
    CHECK_FALSE(given.resume.empty());
    CHECK((given.resume.string() == "runs" || given.resume.string() == "runs/"));
  }
  const std::filesystem::path& directory = options.resume;
  CHECK(directory == runs);
  options.resume = {};
  CHECK(options.resume.empty());
  options.resume = text;
  auto copy = options;
  options.resume = copy.resume;
  CHECK(options.resume.string() == "runs");
  CHECK(ga::FitOptions{.resume = ""}.resume.empty());
  STATIC_REQUIRE_FALSE(std::is_convertible_v<int, ga::ResumeFrom>);
}

namespace {

struct Counts {
  ga::FitOptions options = {};
  std::int64_t epochs = 0, batch = 0;
  std::optional<std::int64_t> batches = {};
  std::int64_t updates = 0;
};

inner::FitState fit_with(const Counts& counts) {
  inner::FitState fit(counts.options, counts.batches, /*with_others=*/false);
  fit.epochs = counts.epochs;
  fit.batch = counts.batch;
  fit.updates = counts.updates;
  return fit;
}

}  // namespace

TEST_CASE("FitProgress: done() after the epochs or the updates") {
  const auto done = [](const ga::FitOptions& options, std::int64_t epochs, std::int64_t updates) {
    return fit_with({.options = options, .epochs = epochs, .updates = updates}).done();
  };
  CHECK_FALSE(done({}, 0, 100));
  CHECK(done({}, 1, 0));
  CHECK(done({.epochs = 0}, 0, 0));
  CHECK_FALSE(done({.epochs = 2}, 1, 100));
  CHECK(done({.epochs = 2}, 2, 0));
  CHECK(done({.updates = 0}, 0, 0));
  CHECK_FALSE(done({.updates = 5}, 100, 4));
  CHECK(done({.updates = 5}, 0, 5));
  CHECK_FALSE(done({.epochs = 2, .updates = 5}, 1, 4));
  CHECK(done({.epochs = 2, .updates = 5}, 2, 4));
  CHECK(done({.epochs = 2, .updates = 5}, 0, 5));
}

TEST_CASE("FitProgress: a smoke run is done after a window, skipped or not") {
  auto status = fit_with({.options = {.epochs = 20, .smoke = true}});
  CHECK_FALSE(status.done());
  SECTION("stepped") { status.count_window(true, 4); }
  SECTION("skipped") { status.count_window(false, 4); }
  CHECK(status.done());
  status.options.smoke = false;  // control
  CHECK_FALSE(status.done());
}

TEST_CASE("FitState: counts windows") {
  inner::FitState status;
  status.count_window(false, 0);
  CHECK_FALSE(status.trained);
  status.count_window(false, 2);  // an overflow
  CHECK(status.trained);
  status.count_window(true, 0);
  CHECK(status.trained);
  CHECK(status.updates == 1);
  CHECK(status.skipped == 2);
}

TEST_CASE("FitProgress: fraction() of the epochs or of the updates, the greater one") {
  const auto fraction = [](const Counts& counts) { return fit_with(counts).fraction(); };
  CHECK_FALSE(fraction({}));  // the number of batches is unknown
  CHECK_FALSE(fraction({.options = {.epochs = 3}, .epochs = 1, .batch = 7}));
  CHECK_FALSE(fraction({.batches = 0}));
  CHECK(fraction({.batches = 8}) == 0.0);
  CHECK(fraction({.batch = 2, .batches = 8}) == 0.25);
  CHECK(fraction({.options = {.epochs = 4}, .epochs = 1, .batch = 4, .batches = 8}) == 1.5 / 4);
  CHECK(fraction({.options = {.updates = 10}, .batch = 4, .batches = 8, .updates = 3}) == 0.3);
  CHECK(fraction({.options = {.updates = 10}, .updates = 3}) == 0.3);
  CHECK(fraction({.options = {.epochs = 2, .updates = 10}, .batch = 4, .batches = 8, .updates = 3}) == 0.3);
  CHECK(fraction({.options = {.epochs = 1, .updates = 10}, .batch = 4, .batches = 8, .updates = 3}) == 0.5);
}

TEST_CASE("FitProgress: fraction() is in [0, 1], and 1 at the end") {
  CHECK(fit_with({.options = {.epochs = 0}, .batches = 8}).fraction() == 1.0);
  CHECK(fit_with({.options = {.updates = 0}}).fraction() == 1.0);
  CHECK(fit_with({.epochs = 3, .batches = 8}).fraction() == 1.0);                            // after a fit of 3 epochs
  CHECK(fit_with({.options = {.updates = 5}, .updates = 6}).fraction() == 1.0);              // more than requested
  CHECK(fit_with({.options = {.epochs = 2}, .batch = 12, .batches = 8}).fraction() == 0.5);  // than size() said
}

TEST_CASE("FitState: the end of an epoch") {
  auto status = fit_with({.options = {.updates = 5}, .batch = 7, .batches = 7});
  status.trained = true;
  status.end_epoch();
  CHECK(status.epochs == 1);
  CHECK(status.batch == 0);
  CHECK_FALSE(status.trained);
}

TEST_CASE("FitState: a later epoch without batches is refused") {
  auto status = fit_with({.options = {.epochs = 3}, .batch = 7});
  status.end_epoch();
  CHECK(status.batches == 7);
  REQUIRE_ERROR(
      "epoch 0 (counted from 0) had no batches, but should have had 7; a range that can be iterated only once",
      status.end_epoch());
}

TEST_CASE("FitState: the report has its counts") {
  struct Aged : inner::FitState {
    Aged() : inner::FitState(fit_with({.epochs = 3, .updates = 938})) { start_ -= std::chrono::hours(1); }
  } status;
  status.skipped = 2;
  status.samples = 512;
  status.nan_batches = 4;
  status.first_nan = "batch 7";
  const auto report = status.report();
  CHECK(report.epochs == 3);
  CHECK(report.updates == 938);
  CHECK(report.skipped == 2);
  CHECK(report.samples == 512);
  CHECK(report.nan_batches == 4);
  CHECK(report.first_nan == "batch 7");
  CHECK(report.seconds >= 3600);
  CHECK(report.seconds <= status.seconds());
  CHECK(report.samples_per_second == 512 / report.seconds);
}

TEST_CASE("FitReport: prints a summary, with any format flags of the stream") {
  ga::FitReport report{.epochs = 3,
                       .updates = 938,
                       .skipped = 2,
                       .samples = 512,
                       .seconds = 57.8249,
                       .samples_per_second = 8.8552,
                       .occupied_bytes = {{"cuda:0", 8681 * ga::MiB + 1}},
                       .peak_bytes = {{"cpu", 3 * ga::MiB / 2}, {"cuda:0", 8 * ga::MiB + ga::MiB / 8}},
                       .peak_resident_bytes = 1204 * ga::MiB};
  std::ostringstream text;
  text.precision(2);
  text << std::scientific << report;
  CHECK(text.str() ==
        "Time: 57.82\n"
        "Samples/second: 8.86\n"
        "GPU memory occupied: 8681 MB.\n"
        "Peak tensor memory: cpu 1.50 MB\n"
        "Peak tensor memory: cuda:0 8.12 MB\n"
        "Peak resident memory: 1204 MB\n"
        "Epochs: 3, updates: 938, skipped: 2\n");
}

TEST_CASE("FitReport: a rate below one per second keeps its digits") {
  const auto printed = [](double rate) {
    std::ostringstream text;
    text << ga::FitReport{.samples_per_second = rate};
    return text.str();
  };
  CHECK(printed(0.0123456).starts_with("Time: 0.00\nSamples/second: 0.0123\n"));
  CHECK(printed(1).starts_with("Time: 0.00\nSamples/second: 1.00\n"));
  CHECK(printed(8208.756).starts_with("Time: 0.00\nSamples/second: 8208.76\n"));
}

TEST_CASE("FitReport: on a CPU, with losses of NaN, and nothing measured") {
  std::ostringstream text;
  text << ga::FitReport{.epochs = 1,
                        .updates = 2,
                        .seconds = 0.004,
                        .samples_per_second = std::numeric_limits<double>::infinity(),
                        .nan_batches = 4,
                        .first_nan = "batch 7",
                        .occupied_bytes = {{"cpu", 254 * ga::MiB}}};
  CHECK(text.str() ==
        "Time: 0.00\n"
        "Samples/second: inf\n"
        "CPU memory occupied: 254 MB.\n"
        "Epochs: 1, updates: 2, skipped: 0\n"
        "Micro-batches left out for a loss or gradient of NaN or infinity: 4, the first: batch 7\n");
}
