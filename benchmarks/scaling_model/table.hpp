// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fmt/format.h>

#include <array>
#include <string>
#include <vector>

#include "../trade_off_picture.hpp"
#include "simulation.hpp"

/// What the simulation says of 8 to 65,536 ranks, as a table and as a picture.
namespace scaling::table {

constexpr std::int64_t fewest = 8, most = 65536;
constexpr std::array<std::int64_t, 4> window_lengths{1, 4, 16, 64};

/// A machine with a model on it: everything that is given.
struct Setup {
  std::string name;
  Machine machine;
  Compute compute;
  double parameter_bytes = 0, bucket_bytes = library_bucket_bytes;
  std::int64_t layers = 1, gradients = 1;  ///< of a layer, equally large
  double small_bytes = 0;                  ///< of one more gradient a layer: its biases, say

  std::vector<Bucket> buckets() const {
    std::vector<double> all;
    for (std::int64_t i = 0; i < layers * gradients; ++i) {
      all.push_back(parameter_bytes / static_cast<double>(layers * gradients));
      if (small_bytes > 0 && i % gradients == 0) all.push_back(small_bytes);
    }
    return buckets_of(all, bucket_bytes);
  }
  double efficiency(const std::vector<Bucket>& of, std::int64_t ranks, Way way, std::int64_t micro_batches) const {
    return scaling::efficiency(machine, compute, of, ranks, way, micro_batches, bucket_bytes);
  }
};

struct NamedWay {
  Way way;
  const char *name, *colour;
  int width;  ///< of a line, so that those that lie on each other are all seen
};
constexpr std::array<NamedWay, 3> ways{{{Way::unsharded, "unsharded", "#9bd", 6},
                                        {Way::shard_optimizer, "Shard::optimizer", "#e80", 3},
                                        {Way::shard_gradients, "Shard::gradients", "#063", 1}}};

inline std::string described(const Link& link) {
  return fmt::format("{:.1f} us + {:.2f} GB/s", 1e6 * link.latency, link.bytes_per_s / 1e9);
}

inline const char* described(Pattern pattern) {
  return pattern == Pattern::ring ? "rings: n - 1 messages" : "halving: log2(n) messages";
}

inline void print_given(const Setup& setup) {
  const auto& [name, machine, compute, bytes, bucket_bytes, layers, gradients, small_bytes] = setup;
  fmt::print("given     {}\n", name);
  if (machine.ranks > 1)
    fmt::print("given     {} ranks a machine, inside {}\n", machine.ranks, described(machine.inside));
  fmt::print("given     between machines {}; {}; overlap {:.2f}\n", described(machine.between),
             described(machine.pattern), machine.overlap);
  fmt::print("given     forward {:.1f} ms, backward {:.1f} ms, a further micro-batch {:.1f} ms, step {:.1f} ms\n",
             1e3 * compute.forward, 1e3 * compute.backward,
             1e3 * (compute.forward + compute.backward + compute.further), 1e3 * compute.step);
  fmt::print("given     {:.3f} GB of parameters in {} layers of {} gradients and {:.0f} bytes, buckets of {:.0f} MiB\n",
             bytes / 1e9, layers, gradients, small_bytes, bucket_bytes / (1 << 20));
}

inline void print_row(const Setup& setup, Way way, std::int64_t ranks) {
  const auto buckets = setup.buckets();
  fmt::print("computed  {:>6}  ", ranks);
  for (auto n : window_lengths) fmt::print("{:>6.3f}", setup.efficiency(buckets, ranks, way, n));
  fmt::print("  ");
  for (auto n : window_lengths)
    fmt::print("{:>9.3f}", window(setup.machine, setup.compute, buckets, ranks, way, n).sent_bytes / 1e9);
  fmt::print("{:>9.3f}\n", memory_bytes(buckets, ranks, way) / 1e9);
}

inline void print(const Setup& setup) {
  print_given(setup);
  for (auto& [way, name, colour, width] : ways) {
    fmt::print(
        "computed  {}: efficiency, and GB that a rank sends in a window, for 1, 4, 16 and 64 micro-batches; GB it "
        "holds\n",
        name);
    for (auto ranks = fewest; ranks <= most; ranks *= 2) print_row(setup, way, ranks);
  }
}

namespace picture {

using harness::picture::text;
constexpr double width = 420, height = 300, left = 60, top = 60, highest = 1.1;

inline double x_of(double ranks) { return left + std::log2(ranks / fewest) / std::log2(double{most} / fewest) * width; }
inline double y_of(double efficiency) { return top + height * (1 - std::min(efficiency, highest) / highest); }

inline std::string axes(const Setup& setup) {
  auto svg =
      fmt::format("<rect x='{}' y='{}' width='{}' height='{}' fill='none' stroke='#999'/>\n", left, top, width, height);
  for (double ranks : {8, 64, 512, 4096, 65536})
    svg += text(x_of(ranks), top + height + 18, fmt::format("{:.0f}", ranks));
  for (int percent = 0; percent <= 100; percent += 25) {
    svg += text(left - 8, y_of(percent / 100.0) + 4, fmt::format("{} %", percent), "end");
    svg += fmt::format("<path d='M{} {:.1f}h{}' stroke='#ddd'/>\n", left, y_of(percent / 100.0), width);
  }
  svg += text(left + width / 2, top - 14, described(setup.machine.pattern));
  return svg + text(left + width / 2, top + height + 38, "ranks; upwards: efficiency");
}

inline std::string line(const Setup& setup, const NamedWay& way, std::int64_t micro_batches, const char* dashes) {
  const auto buckets = setup.buckets();
  std::string points;
  for (auto ranks = fewest; ranks <= most; ranks *= 2)
    points += fmt::format("{:.1f},{:.1f} ", x_of(static_cast<double>(ranks)),
                          y_of(setup.efficiency(buckets, ranks, way.way, micro_batches)));
  return fmt::format("<polyline points='{}' fill='none' stroke='{}' stroke-width='{}' stroke-dasharray='{}'/>\n",
                     points, way.colour, way.width, dashes);
}

inline std::string legend() {
  const double y = top + height + 60;
  std::string svg;
  double x = left;
  for (auto& way : ways) {
    svg += fmt::format("<path d='M{} {}h24' stroke='{}' stroke-width='{}'/>\n", x, y, way.colour, way.width);
    svg += text(x + 32, y + 4, way.name, "start");
    x += 60 + 7 * static_cast<double>(std::string(way.name).size());
  }
  return svg + text(left, y + 28, "dashed: windows of 1 micro-batch; solid: of 16", "start");
}

}  // namespace picture

/// Both patterns side by side; a line for each way and for windows of 1 and 16.
inline std::string to_svg(Setup setup) {
  using namespace picture;
  auto svg = fmt::format(
      "<svg xmlns='http://www.w3.org/2000/svg' width='{0:.0f}' height='{1:.0f}' viewBox='0 0 {0:.0f} {1:.0f}' "
      "font-family='sans-serif' font-size='12'>\n<rect width='100%' height='100%' fill='white'/>\n",
      2 * (left + width + 20), top + height + 104);
  svg += text(left + width + 10, 20, "Computed, not measured: " + setup.name);
  for (auto pattern : {Pattern::ring, Pattern::halving}) {
    setup.machine.pattern = pattern;
    const double x = pattern == Pattern::ring ? 0 : left + width + 20;
    svg += fmt::format("<g transform='translate({:.0f},0)'>\n{}", x, axes(setup));
    for (auto& way : ways) svg += line(setup, way, 1, "8 6") + line(setup, way, 16, "none");
    svg += "</g>\n";
  }
  return svg + legend() + "</svg>\n";
}

}  // namespace scaling::table
