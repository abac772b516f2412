// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <sstream>

#include "measured.hpp"

/// Windows of 1, 2 and 4 processes of this machine, measured, beside what the simulation makes of the numbers of the
/// same machine.
namespace scaling::check {

using namespace fit;

constexpr double tolerance = 0.15;

/// How measurements are started.
struct Options {
  std::string program, launch = "./launch.sh";
  int rounds = 61;
};

/// Has that many processes measure. Two programs with several OpenMP threads each would take ten times as long.
inline Samples measure(const Options& options, std::int64_t processes) {
  const auto results = std::filesystem::temp_directory_path() / fmt::format("scaling_model.{}", getpid());
  const auto command = fmt::format("OMP_NUM_THREADS=1 '{}' {} '{}' --measure '{}' --rounds {}", options.launch,
                                   processes, options.program, results.string(), options.rounds);
  if (std::system(command.c_str()) != 0) throw std::runtime_error("scaling_model: this failed: " + command);
  Samples samples;
  std::ifstream file(results);
  for (std::string line, name; std::getline(file, line);) {
    std::istringstream words(line);
    words >> name;
    for (double seconds = 0; words >> seconds;) samples[name].push_back(seconds);
  }
  std::filesystem::remove(results);
  return samples;
}

inline std::string processes(std::int64_t ranks) { return fmt::format("{} process{}", ranks, ranks == 1 ? "" : "es"); }

inline void print(const Compute& compute, std::int64_t ranks) {
  fmt::print("measured  {}: forward {:.1f} ms, backward {:.1f} ms, a further micro-batch {:.1f} ms, step {:.1f} ms\n",
             processes(ranks), 1e3 * compute.forward, 1e3 * compute.backward,
             1e3 * (compute.forward + compute.backward + compute.further), 1e3 * compute.step);
}

inline Machine machine_of(const Samples& samples, std::int64_t ranks) {
  if (ranks == 1) return {};
  const auto [link, error] = link_of(samples, ranks);
  const Machine machine{.ranks = ranks,
                        .inside = link,
                        .overlap = overlap_of(samples),
                        .scatter = of_half_a_sum(samples, "scatter"),
                        .gather = of_half_a_sum(samples, "gather")};
  fmt::print(
      "measured  {}: a message {:.0f} us and {:.2f} GB/s (a line that is off by {:.0f} % at most), overlap {:.2f}\n",
      processes(ranks), 1e6 * link.latency, link.bytes_per_s / 1e9, 100 * error, machine.overlap);
  fmt::print("measured  {}: of half an all-reduce a reduce-scatter takes {:.2f} of the time, an all-gather {:.2f}\n",
             processes(ranks), machine.scatter, machine.gather);
  return machine;
}

/// One window, both ways. True if they agree.
class Comparison {
 public:
  /// `alone`: of a network that takes no time, which is to be seen to be further off.
  Comparison(std::string what, double computed, double alone, std::vector<double> times)
      : what_(std::move(what)),
        times_(std::move(times)),
        computed_(computed),
        alone_(alone),
        measured_(harness::median(times_)) {}

  bool agrees() const { return std::abs(computed_ / measured_ - 1) <= tolerance; }
  void print() const {
    const auto [fastest, slowest] = std::minmax_element(times_.begin(), times_.end());
    fmt::print("computed  {}: {:.1f} ms (with a network that takes no time {:.1f}, {:+.1f} % off)\n", what_,
               1e3 * computed_, 1e3 * alone_, 100 * (alone_ / measured_ - 1));
    fmt::print("measured  {}: {:.1f} ms ({:.1f} to {:.1f}); what is computed is {:+.1f} % off, {} {:.0f} %\n", what_,
               1e3 * measured_, 1e3 * *fastest, 1e3 * *slowest, 100 * (computed_ / measured_ - 1),
               agrees() ? "within" : "NOT within", 100 * tolerance);
  }
  void append(const harness::Options& options, const std::string& where) const {
    append(options, where, "measured", measured_);
    append(options, where, "computed by scaling_model", computed_);
  }

 private:
  void append(const harness::Options& options, const std::string& where, const char* who, double seconds) const {
    harness::append_json(options, fmt::format(R"({{"benchmark": "A window, measured and computed: {}", )"
                                              R"("contestant": "{}", "median_s": {}, "time_over_ours": {}, )"
                                              R"("repeats": {}, "machine": "{}"}})",
                                              what_, who, seconds, seconds / measured_, times_.size(), where));
  }

  std::string what_;
  std::vector<double> times_;
  double computed_, alone_, measured_;
};

inline std::vector<Comparison> compare(const Samples& samples, std::int64_t ranks) {
  const auto compute = compute_of(samples);
  print(compute, ranks);
  const auto machine = machine_of(samples, ranks);
  const auto buckets = buckets_of(std::vector<double>(layers, bucket_bytes));
  std::vector<Comparison> all;
  for (auto& kind : measured::kinds)
    for (auto micro_batches : window_lengths) {
      if (!kind.way) continue;
      const auto seconds = [&](std::int64_t of) {
        return window(machine, compute, buckets, of, *kind.way, micro_batches).seconds;
      };
      all.emplace_back(fmt::format("{}, {}, a window of {}", processes(ranks), kind.name, micro_batches),
                       seconds(ranks), seconds(1), samples.at(kind.name + std::to_string(micro_batches)));
    }
  return all;
}

inline void run(const Options& how, const harness::Options& options) {
  const auto where = harness::machine(options);
  fmt::print("measured  on {}; medians of {} rounds, one thread a process\n", where, how.rounds);
  bool agree = true;
  for (std::int64_t ranks : {1, 2, 4})
    for (auto& comparison : compare(measure(how, ranks), ranks)) {
      comparison.print();
      comparison.append(options, where);
      std::fflush(stdout);
      agree &= comparison.agrees();
    }
  fmt::print("{}: what is computed is {} {:.0f} % of what is measured, in all windows\n", agree ? "passed" : "FAILED",
             agree ? "within" : "NOT within", 100 * tolerance);
}

}  // namespace scaling::check
