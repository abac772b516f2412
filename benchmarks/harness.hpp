// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fmt/format.h>
#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <gradaccum/autocast.hpp>
#include <gradaccum/detail/kernels/kernel_loop.hpp>
#include <gradaccum/memory_meter.hpp>
#include <gradaccum/mkl_on_amd.hpp>  // GRADACCUM_MKL_ON_AMD=0 disables it
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

/// Times programs that do the same work, alternately in one process. Only ratios of their times are meaningful.
namespace harness {

struct Options {
  int repeats = 9, threads = 2;
  bool keep_memory = false;
  std::string json;
  std::function<void()> finish = [] {};  ///< the end of a measurement, such as waiting for a device
};

/// A program to time. The first contestant of a contest is ours, the second the peer.
struct Contestant {
  std::string name;
  std::function<void()> run = {};
  std::vector<at::Tensor> results = {};  ///< of the first run; must equal ours up to rounding
  bool bound = false;                    ///< a lower limit of the time
  std::function<double()> seconds = {};  ///< replaces `run`, and measures the time itself
};

inline Options parse(
    int argc, char** argv, const std::string& purpose,
    const std::function<void(CLI::App&)>& add_more = [](CLI::App&) {}) {
  Options options;
  CLI::App app(purpose);
  app.option_defaults()->always_capture_default();
  app.add_option("--repeats", options.repeats, "how often each is timed, after a warm-up")->check(CLI::Range(7, 1000));
  app.add_option("--threads", options.threads, "processor threads; 0: LibTorch chooses")->check(CLI::Range(0, 1024));
  app.add_flag("--keep-memory", options.keep_memory, "keep freed memory in the process, for all contestants");
  app.add_option("--json", options.json, "append the results to this file, an object a line");
  add_more(app);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    std::exit(app.exit(error));
  }
  if (options.threads > 0) torch::set_num_threads(options.threads);
  if (options.keep_memory) gradaccum::keep_freed_memory();
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

inline const char* multiplied_by() {
  if (!at::hasMKL()) return "no MKL";
  return mkl_serv_intel_cpu_true() != 0 ? "MKL at full rate" : "MKL as LibTorch has it on AMD";
}

inline const char* kernels_in_use() {
  constexpr std::array names{"portable", "NEON", "AVX2", "AVX-512"};
  return names.at(static_cast<std::size_t>(gradaccum::detail::instruction_set()));
}

/// Describes the machine, to judge the figures: load, threads, kernels, BLAS, and its rate of matrix products.
inline std::string machine(const Options& options) {
  double load[1] = {0};
  if (getloadavg(load, 1) != 1) load[0] = -1;
  const auto a = torch::rand({1024, 1024}), b = torch::rand({1024, 1024});
  std::vector<double> times;
  for (int i = 0; i < 7; ++i) times.push_back(seconds([&] { torch::mm(a, b); }));
  return fmt::format("LibTorch {}, {} threads, load {:.2f}, {} kernels, {}, sgemm {:.0f} GFLOP/s, {}{}", TORCH_VERSION,
                     torch::get_num_threads(), load[0], kernels_in_use(), multiplied_by(),
                     2 * std::pow(1024.0, 3) / median(times) / 1e9,
                     options.keep_memory ? "freed memory kept by all" : "default malloc",
                     gradaccum::is_bf16_fast(at::kCPU) ? "" : ", no AVX-512: bfloat16 is left out");
}

inline void append_json(const Options& options, const std::string& object) {
  if (!options.json.empty()) std::ofstream(options.json, std::ios::app) << object << '\n';
}

/// Compares results, because contestants with other results must not be timed.
inline void check_results(const std::vector<Contestant>& all) {
  torch::NoGradGuard no_grad;
  for (auto& contestant : all)
    for (std::size_t i = 0; i < contestant.results.size(); ++i) {
      const auto &ours = all[0].results.at(i), &theirs = contestant.results[i];
      if ((ours - theirs).norm().item<double>() <= 1e-4 * ours.norm().item<double>()) continue;
      throw std::runtime_error(fmt::format("{} does not compute what {} does", contestant.name, all[0].name));
    }
}

inline double seconds(const Contestant& contestant) {
  return contestant.seconds ? contestant.seconds() : seconds(contestant.run);
}

/// Returns the number of runs per measurement: 0.1 s of ours, so that short runs are warm, and long enough to be timed.
inline int runs_to_time(const Contestant& ours, const Options& options) {
  int runs = 0;
  for (double elapsed = 0; elapsed < 0.1; ++runs) elapsed += seconds(ours) + seconds(options.finish);
  return runs;
}

inline void print_row(const Contestant& contestant, const std::vector<double>& times, bool in_microseconds, double rate,
                      const std::string& unit, double ratio) {
  const auto [fastest, slowest] = std::minmax_element(times.begin(), times.end());
  const double scale = in_microseconds ? 1e6 : 1e3;
  const auto range = fmt::format("({:.3f} to {:.3f})", *fastest * scale, *slowest * scale);
  fmt::print("  {:<48} {:>9.3f} {} {:<24} {:>7.{}f} {}/s  ", contestant.name, median(times) * scale,
             in_microseconds ? "us" : "ms", range, rate, rate < 1000 ? 1 : 0, unit);
  fmt::print("{}\n", contestant.bound ? fmt::format("ours reaches {:.0f} % of it", 100 * ratio)
                                      : fmt::format("{:.2f} x ours", ratio));
}

/// Times the contestants in turn and prints their medians, and the median of the ratios pair by pair.
/// `units`: the work of one run, such as its number of samples. Returns the medians of a run's seconds.
inline std::vector<double> contest(const std::string& title, const std::vector<Contestant>& all, double units,
                                   const std::string& unit, const Options& options) {
  for (auto& contestant : all) seconds(contestant);
  check_results(all);
  const auto runs = runs_to_time(all[0], options);
  const auto time_of = [&](const Contestant& contestant) {
    if (contestant.seconds) return contestant.seconds();
    return seconds([&] {
             for (int run = 0; run < runs; ++run) contestant.run();
             options.finish();
           }) /
           runs;
  };
  std::vector<std::vector<double>> times(all.size());
  for (auto& contestant : all) time_of(contestant);
  for (int repeat = 0; repeat < options.repeats; ++repeat)
    for (std::size_t i = 0; i < all.size(); ++i) {
      const auto turn = repeat % 2 ? all.size() - 1 - i : i;  // alternates the order
      times[turn].push_back(time_of(all[turn]));
    }
  const auto where = machine(options);
  fmt::print("{}\n  {}\n", title, where);
  std::vector<double> medians;
  for (std::size_t i = 0; i < all.size(); ++i) {
    std::vector<double> ratios;
    for (int repeat = 0; repeat < options.repeats; ++repeat) ratios.push_back(times[i][repeat] / times[0][repeat]);
    const auto middle = medians.emplace_back(median(times[i]));
    print_row(all[i], times[i], median(times[0]) < 1e-3, units / middle, unit, median(ratios));
    append_json(options, fmt::format(R"({{"benchmark": "{}", "contestant": "{}", "bound": {}, "median_s": {}, )"
                                     R"("{}_per_s": {}, "time_over_ours": {}, "repeats": {}, "machine": "{}"}})",
                                     title, all[i].name, all[i].bound, middle, unit, units / middle, median(ratios),
                                     options.repeats, where));
  }
  std::fflush(stdout);
  return medians;
}

}  // namespace harness
