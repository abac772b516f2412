// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fmt/format.h>
#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#ifdef __GLIBC__
#include <malloc.h>
#endif

/// Times programs that do the same thing, in turn, in one process: only their ratios mean anything.
namespace harness {

struct Options {
  int repeats = 9, threads = 0;
  bool keep_memory = false;
  std::string json;
};

/// Something to be timed. The first contestant of a contest is ours, the second the peer; others are bounds.
struct Contestant {
  std::string name;
  std::function<void()> run;
};

inline Options parse(int argc, char** argv, const std::string& purpose) {
  Options options;
  CLI::App app(purpose);
  app.add_option("--repeats", options.repeats, "how often each is timed, after one warm-up")
      ->check(CLI::Range(7, 1000));
  app.add_option("--threads", options.threads, "processor threads; 0: LibTorch chooses")->check(CLI::Range(0, 1024));
  app.add_flag("--keep-memory", options.keep_memory, "keep freed memory in the process (mallopt), for all contestants");
  app.add_option("--json", options.json, "append the results to this file, an object a line");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    std::exit(app.exit(error));
  }
  if (options.threads > 0) torch::set_num_threads(options.threads);
#ifdef __GLIBC__
  if (options.keep_memory) {
    mallopt(M_MMAP_THRESHOLD, 1 << 30);
    mallopt(M_TRIM_THRESHOLD, 1 << 30);
    mallopt(M_TOP_PAD, 64 << 20);
  }
#endif
  return options;
}

inline double seconds(const std::function<void()>& run) {
  const auto start = std::chrono::steady_clock::now();
  run();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

inline double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const auto middle = values.size() / 2;
  return values.size() % 2 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

/// What a reader has to know to judge the figures: load, threads, BLAS, and how fast this machine multiplies matrices.
inline std::string machine() {
  double load[1] = {0};
  if (getloadavg(load, 1) != 1) load[0] = -1;
  const auto a = torch::rand({1024, 1024}), b = torch::rand({1024, 1024});
  std::vector<double> times;
  for (int i = 0; i < 7; ++i) times.push_back(seconds([&] { torch::mm(a, b); }));
  return fmt::format("LibTorch {}, {} threads, load {:.2f}, {}, sgemm {:.0f} GFLOP/s", TORCH_VERSION,
                     torch::get_num_threads(), load[0], at::hasMKL() ? "MKL" : "no MKL",
                     2 * std::pow(1024.0, 3) / median(times) / 1e9);
}

/// Times the contestants in turn and prints their medians, and the median of the ratios pair by pair.
/// `units`: how many of what one run does, such as samples.
inline void contest(const std::string& title, const std::vector<Contestant>& all, double units, const std::string& unit,
                    const Options& options) {
  std::vector<std::vector<double>> times(all.size());
  for (auto& contestant : all) contestant.run();
  for (int repeat = 0; repeat < options.repeats; ++repeat)
    for (std::size_t i = 0; i < all.size(); ++i) {
      const auto turn = repeat % 2 ? all.size() - 1 - i : i;  // nobody is always first
      times[turn].push_back(seconds(all[turn].run));
    }
  const auto where = machine();
  fmt::print("{}\n  {}\n", title, where);
  for (std::size_t i = 0; i < all.size(); ++i) {
    std::vector<double> ratios;
    for (int repeat = 0; repeat < options.repeats; ++repeat) ratios.push_back(times[i][repeat] / times[0][repeat]);
    const auto [fastest, slowest] = std::minmax_element(times[i].begin(), times[i].end());
    const auto middle = median(times[i]);
    fmt::print("  {:<44} {:>10.3f} ms ({:.3f} to {:.3f})  {:>10.0f} {}/s  x {:.2f}\n", all[i].name, middle * 1e3,
               *fastest * 1e3, *slowest * 1e3, units / middle, unit, median(ratios));
    if (!options.json.empty())
      std::ofstream(options.json, std::ios::app)
          << fmt::format(R"({{"benchmark": "{}", "contestant": "{}", "median_s": {}, "min_s": {}, "max_s": {}, )"
                         R"("{}_per_s": {}, "time_over_ours": {}, "repeats": {}, "machine": "{}"}})",
                         title, all[i].name, middle, *fastest, *slowest, unit, units / middle, median(ratios),
                         options.repeats, where)
          << '\n';
  }
  std::fflush(stdout);
}

}  // namespace harness
