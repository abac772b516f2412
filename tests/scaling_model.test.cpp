// SPDX-License-Identifier: Apache-2.0
//
// The simulation of benchmarks/scaling_model against windows that are worked out by hand.

#include "support/catch.hpp"

#include "../benchmarks/scaling_model/fit.hpp"

#include <cstdint>
#include <numeric>
#include <vector>

using namespace scaling;

namespace {

/// Latency 1 s, 10 bytes a second; two ranks reduce-scatter 20 bytes in 1 + 10 / 10 = 2 s.
const Link slow{.latency = 1, .bytes_per_s = 10};
const Machine ethernet{.ranks = 1, .between = slow};
const Compute work{.forward = 10, .backward = 20, .step = 4, .further = 1};
const std::vector<Bucket> one{{.bytes = 20, .ready = 1}};
const auto all_ways = {Way::unsharded, Way::shard_optimizer, Way::shard_gradients};

/// A transformer's worth of buckets, made at even distances.
std::vector<Bucket> even(std::int64_t count, double bytes) {
  std::vector<Bucket> buckets;
  for (std::int64_t i = 1; i <= count; ++i)
    buckets.push_back({bytes, static_cast<double>(i) / static_cast<double>(count)});
  return buckets;
}

double seconds(const Machine& machine, const std::vector<Bucket>& buckets, std::int64_t ranks, Way way,
               std::int64_t micro_batches) {
  return window(machine, work, buckets, ranks, way, micro_batches).seconds;
}

}  // namespace

TEST_CASE("scaling: one rank exchanges nothing, whatever the link and the way", "[scaling]") {
  for (auto way : all_ways) {
    const auto window = scaling::window(ethernet, work, one, 1, way, 4);
    REQUIRE(window.seconds == Approx(4 * 30 + 3 * 1 + 4));
    REQUIRE(window.sent_bytes == 0);
    REQUIRE(efficiency(ethernet, work, one, 1, way, 4) == Approx(1));
  }
}

TEST_CASE("scaling: two ranks and one bucket, which nothing can hide", "[scaling]") {
  // An all-reduce of 2 x 2 s, what is agreed 2 x 1 s, and the step.
  REQUIRE(seconds(ethernet, one, 2, Way::unsharded, 1) == Approx(30 + 4 + 2 + 4));
  REQUIRE(seconds(ethernet, one, 2, Way::unsharded, 3) == Approx(92 + 4 + 2 + 4));
  // A reduce-scatter of 2 s, what is agreed, norms of 1 s, half of the step, an all-gather.
  REQUIRE(seconds(ethernet, one, 2, Way::shard_optimizer, 1) == Approx(30 + 2 + 2 + 1 + 2 + 2));
  REQUIRE(seconds(ethernet, one, 2, Way::shard_optimizer, 3) == Approx(92 + 2 + 2 + 1 + 2 + 2));
  // A reduce-scatter a micro-batch, of which the next forward hides all but the last.
  REQUIRE(seconds(ethernet, one, 2, Way::shard_gradients, 3) == Approx(92 + 2 + 2 + 1 + 2 + 2));
}

TEST_CASE("scaling: a reduce-scatter and an all-gather may take longer than half an all-reduce", "[scaling]") {
  auto machine = ethernet;
  machine.scatter = 1.5, machine.gather = 2;
  REQUIRE(seconds(machine, one, 2, Way::shard_optimizer, 3) == Approx(92 + 3 + 2 + 1 + 2 + 4));
  REQUIRE(seconds(machine, one, 2, Way::shard_gradients, 3) == Approx(92 + 3 + 2 + 1 + 2 + 4));
  REQUIRE(seconds(machine, one, 2, Way::unsharded, 3) == Approx(92 + 4 + 2 + 4));
  auto measured = work;
  measured.norm = 6;  // of which each of two takes its half
  REQUIRE(scaling::window(ethernet, measured, one, 2, Way::shard_optimizer, 1).seconds ==
          Approx(30 + 2 + 2 + 3 + 1 + 2 + 2));
  fit::Samples samples{{"sum" + std::to_string(fit::bucket_bytes), {4}}, {"scatter", {3}}};
  REQUIRE(fit::of_half_a_sum(samples, "scatter") == Approx(1.5));
}

TEST_CASE("scaling: backward hides what is sent beside it, as far as the machine lets it", "[scaling]") {
  const std::vector<Bucket> halves{{.bytes = 20, .ready = 0.5}, {.bytes = 20, .ready = 1}};
  auto machine = ethernet;
  // The first all-reduce goes from 20 to 24 s, the second from 30 to 34 s.
  REQUIRE(seconds(machine, halves, 2, Way::unsharded, 1) == Approx(30 + 4 + 2 + 4));
  machine.overlap = 0.5;  // 2 s of backward are done beside the first
  REQUIRE(seconds(machine, halves, 2, Way::unsharded, 1) == Approx(32 + 4 + 2 + 4));
  machine.overlap = 0;
  REQUIRE(seconds(machine, halves, 2, Way::unsharded, 1) == Approx(34 + 4 + 2 + 4));
  machine.overlap =
      0.5;  // sent from 20 to 28 s, the second made at 24 s and sent to 32 s: 4 s of backward are left then
  REQUIRE(seconds(machine, {{60, 0.5}, {20, 0.6}}, 2, Way::unsharded, 1) == Approx(36 + 2 + 4));
  // A link that is still busy when the next bucket is there: from 20 to 44 s, then to 68 s.
  const std::vector<Bucket> large{{.bytes = 220, .ready = 0.5}, {.bytes = 220, .ready = 1}};
  REQUIRE(seconds(ethernet, large, 2, Way::unsharded, 1) == Approx(20 + 24 + 24 + 2 + 4));
  machine.overlap = 0.25;  // backward has 4 s to go at 44 s: the second is made at 48 s
  REQUIRE(seconds(machine, large, 2, Way::unsharded, 1) == Approx(48 + 24 + 2 + 4));
}

TEST_CASE("scaling: of gradients that are divided no more than a bucket is under way", "[scaling]") {
  const std::vector<Bucket> large{{.bytes = 220, .ready = 0.5}, {.bytes = 220, .ready = 1}};  // of 12 s
  const auto divided = [&](Way way, std::int64_t micro_batches, double bucket_bytes) {
    return window(ethernet, work, large, 2, way, micro_batches, bucket_bytes).seconds;
  };
  const double after = 2 + 1 + 2 + 2 * 12;  // what is agreed, norms, half of the step, parameters
  // Sent from 20 and 32 s, then from 50.5 and 62.5 s: what is left at 30 s goes beside the next forward.
  REQUIRE(divided(Way::shard_gradients, 2, 440) == Approx(62.5 + 12 + after));
  // At 30 s the first is waited for, until 32 s; then from 52.5 and 64.5 s.
  REQUIRE(divided(Way::shard_gradients, 2, 220) == Approx(64.5 + 12 + after));
  REQUIRE(divided(Way::shard_optimizer, 1, 220) == Approx(32 + 12 + after));
  // Halves of 6.5 s, of which the second waits for the first: from 20 s, from 36.5 s.
  REQUIRE(divided(Way::shard_optimizer, 1, 110) == Approx(36.5 + 13 + after));
  REQUIRE(divided(Way::unsharded, 1, 110) == Approx(divided(Way::unsharded, 1, 440)));
}

TEST_CASE("scaling: a bucket that is late holds up those behind it", "[scaling]") {
  const std::vector<Bucket> in_order{{20, 0.5}, {20, 1}}, late_first{{20, 1}, {20, 0.5}};
  REQUIRE(seconds(ethernet, in_order, 2, Way::unsharded, 1) == Approx(40));
  REQUIRE(seconds(ethernet, late_first, 2, Way::unsharded, 1) == Approx(44));
}

TEST_CASE("scaling: latencies of a ring grow with the ranks, those of halving with their logarithm", "[scaling]") {
  auto machine = ethernet;
  machine.between.bytes_per_s = 1e30;
  REQUIRE(Exchange(machine, 65536).seconds(20) == Approx(65535));
  machine.pattern = Pattern::halving;
  REQUIRE(Exchange(machine, 65536).seconds(20) == Approx(16));
  REQUIRE(Exchange(machine, 6).seconds(20) == Approx(3));
  machine.between = {.latency = 0, .bytes_per_s = 10};  // the bytes are the same
  REQUIRE(Exchange(machine, 4).seconds(20) == Approx(1.5));
}

TEST_CASE("scaling: between machines each rank sends its share only", "[scaling]") {
  const Machine two_levels{.ranks = 4, .inside = {.latency = 1, .bytes_per_s = 100}, .between = slow};
  REQUIRE(Exchange(two_levels, 2).seconds(400) == Approx(1 + 2));
  REQUIRE(Exchange(two_levels, 4).seconds(400) == Approx(3 + 3));
  REQUIRE(Exchange(two_levels, 8).seconds(400) == Approx(3 + 3 + 1 + 5));
  REQUIRE(Exchange(two_levels, 8).sent_bytes(400) == Approx(350));
  REQUIRE_THROWS_AS(Exchange(two_levels, 6), std::invalid_argument);
}

TEST_CASE("scaling: bytes are those of the formulas", "[scaling]") {
  const auto buckets = even(5, 64);  // 320 bytes
  for (std::int64_t ranks : {2, 8, 4096}) {
    const double part = static_cast<double>(ranks - 1) / static_cast<double>(ranks);
    for (std::int64_t n : {1, 4, 64}) {
      const auto sent = [&](Way way) { return window(ethernet, work, buckets, ranks, way, n).sent_bytes; };
      REQUIRE(sent(Way::unsharded) == Approx(2 * part * 320));
      REQUIRE(sent(Way::shard_optimizer) == Approx(2 * part * 320));
      REQUIRE(sent(Way::shard_gradients) == Approx(static_cast<double>(n + 1) * part * 320));
    }
  }
}

TEST_CASE("scaling: more ranks are never better, longer windows are, and a shard is where it steps more than it sends",
          "[scaling]") {
  const auto buckets = even(8, 20);
  for (auto way : all_ways)
    for (std::int64_t ranks = 8; ranks <= 65536; ranks *= 2) {
      const auto at = [&](std::int64_t r, std::int64_t n) { return efficiency(ethernet, work, buckets, r, way, n); };
      REQUIRE(at(2 * ranks, 4) < at(ranks, 4));
      if (way != Way::shard_gradients) REQUIRE(at(ranks, 16) > at(ranks, 4));
    }
  const Machine fast{.ranks = 1, .between = {.latency = 0, .bytes_per_s = 1e9}};
  REQUIRE(efficiency(fast, work, one, 8, Way::shard_optimizer, 1) > 1);
  REQUIRE(efficiency(ethernet, work, one, 8, Way::shard_optimizer, 1) < 1);
}

TEST_CASE("scaling: buckets as the library makes them", "[scaling]") {
  constexpr double MiB = 1 << 20;
  // Large ones alone, the last first; small ones together until they are full.
  const auto buckets = buckets_of({4 * MiB, 0.5 * MiB, 0.5 * MiB, 2 * MiB}, 25 * MiB);
  REQUIRE(buckets.size() == 3);
  REQUIRE(buckets[0].bytes == 2 * MiB);
  REQUIRE(buckets[0].ready == Approx(2.0 / 7));
  REQUIRE(buckets[1].bytes == MiB);
  REQUIRE(buckets[1].ready == Approx(3.0 / 7));
  REQUIRE(buckets[2].ready == Approx(1));
  // One that waits for the first layer is sent last, though it was begun first.
  const auto small_last = buckets_of({0.5 * MiB, 2 * MiB, 2 * MiB, 0.5 * MiB}, 25 * MiB);
  REQUIRE(small_last.size() == 3);
  REQUIRE(small_last[0].ready == Approx(0.5));
  REQUIRE(small_last[2].bytes == MiB);
  REQUIRE(small_last[2].ready == Approx(1));
  REQUIRE(buckets_of(std::vector<double>(10, 0.75 * MiB), 2 * MiB).size() == 5);
  REQUIRE(buckets_of(std::vector<double>(10, 0.75 * MiB), 0.5 * MiB).size() == 10);
}

TEST_CASE("scaling: memory is 16, 8 + 8 / R and 4 + 12 / R bytes a parameter, and two buckets", "[scaling]") {
  const auto buckets = even(10, 40);  // 100 parameters
  REQUIRE(memory_bytes(buckets, 8, Way::unsharded) == Approx(1600));
  REQUIRE(memory_bytes(buckets, 8, Way::shard_optimizer) == Approx(900 + 80));
  REQUIRE(memory_bytes(buckets, 8, Way::shard_gradients) == Approx(550 + 80));
}

namespace {

/// What a machine of these numbers would measure, each of them once.
fit::Samples samples_of(const Link& link, std::int64_t ranks, double both) {
  fit::Samples samples{{"alone1", {34}},   {"alone4", {127}}, {"multiply", {60}}, {"both", {both}}, {"forward", {5}},
                       {"backward", {10}}, {"step", {2}},     {"norm", {3}}};  // parts of another number of windows
  const Machine machine{.ranks = ranks, .inside = link};
  for (auto bytes : fit::message_bytes)
    samples["sum" + std::to_string(bytes)] = {fit::layers * 2 *
                                              Exchange(machine, ranks).seconds(static_cast<double>(bytes))};
  return samples;
}

}  // namespace

TEST_CASE("scaling: what is measured of a machine gives its numbers back", "[scaling]") {
  for (std::int64_t ranks : {2, 4}) {
    const auto fitted = fit::link_of(samples_of({.latency = 0.25, .bytes_per_s = 1e6}, ranks, 0), ranks);
    REQUIRE(fitted.link.latency == Approx(0.25));
    REQUIRE(fitted.link.bytes_per_s == Approx(1e6));
    REQUIRE(fitted.error == Approx(0).margin(1e-9));
  }
  auto samples = samples_of({.latency = 0.25, .bytes_per_s = 1e6}, 2, 0);
  samples["sum" + std::to_string(fit::message_bytes.back())][0] *= 1.5;  // what is no line is said to be none
  const auto fitted = fit::link_of(samples, 2);
  REQUIRE(fitted.error > 0.1);
  REQUIRE(fitted.link.latency == Approx(0.25).epsilon(0.2));  // and large messages do not hide the latency
  const auto compute = fit::compute_of(samples);
  REQUIRE(compute.forward == Approx(10));
  REQUIRE(compute.backward == Approx(20));
  REQUIRE(compute.step == Approx(4));
  REQUIRE(compute.norm == Approx(3));
  REQUIRE(compute.further == Approx(1));
}

TEST_CASE("scaling: overlap is what two things at once save of the shorter one", "[scaling]") {
  const Link link{.latency = 0,
                  .bytes_per_s = fit::bucket_bytes * fit::layers / 100.0};  // 100 s for all, 60 s beside it
  REQUIRE(fit::overlap_of(samples_of(link, 2, 160)) == Approx(0).margin(1e-9));
  REQUIRE(fit::overlap_of(samples_of(link, 2, 130)) == Approx(0.5));
  REQUIRE(fit::overlap_of(samples_of(link, 2, 100)) == Approx(1));
  REQUIRE(fit::overlap_of(samples_of(link, 2, 90)) == 1);
  REQUIRE(fit::overlap_of(samples_of(link, 2, 170)) == 0);
}
