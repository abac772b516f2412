// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"
#include "support/warnings.hpp"

#include <gradaccum/autocast.hpp>
#include <gradaccum/detail/machine/comparison.hpp>
#include <gradaccum/detail/machine/machine_times.hpp>
#include <gradaccum/detail/machine/undisturbed_scope.hpp>
#include <gradaccum/machine_report.hpp>

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/autocast_mode.h>

#include <algorithm>
#include <cstddef>
#include <functional>
#include <stdexcept>
#include <vector>

namespace ga = gradaccum;
namespace inner = gradaccum::detail;

namespace {

/// A stopwatch that goes on only when it is told to.
struct Time {
  double now = 0;
  inner::Clock clock() {
    return [this] { return now; };
  }
  std::function<void()> takes(std::vector<double> seconds) {
    return [this, seconds, call = std::size_t{0}]() mutable { now += seconds[std::min(call++, seconds.size() - 1)]; };
  }
};

/// What measuring changes, and has to change back.
struct Settings {
  int threads = at::get_num_threads();
  bool flash = at::globalContext().userEnabledFlashSDP();
  bool gradients = at::GradMode::is_enabled();
  bool autocast = at::autocast::is_autocast_enabled(at::kCPU);
  c10::DispatchKeySet excluded = c10::impl::tls_local_dispatch_key_set().excluded_;

  bool operator==(const Settings&) const = default;
};

}  // namespace

TEST_CASE("compare: the least of each, without the first") {
  Time time;
  const auto times =
      inner::compare(time.clock(), time.takes({0.001, 0.5, 0.25, 0.75}), time.takes({0.002, 0.5, 0.125}));
  CHECK(times.as_it_is == 0.25);
  CHECK(times.at_best == 0.125);
}

TEST_CASE("least_seconds: the least, without the first") {
  Time time;
  CHECK(inner::least_seconds(time.clock(), time.takes({0.001, 0.5, 0.25, 0.75})) == 0.25);
}

TEST_CASE("compare: ends, whatever the clock says") {
  for (const double step : {0.0, 1e-9, 0.01, 100.0}) {
    Time time;
    int calls = 0;
    inner::compare(
        time.clock(), [&] { time.now += step, ++calls; }, [] {});
    CHECK(calls >= 4);
    CHECK(calls <= 101);
  }
}

TEST_CASE("compare: an exception of the work is the caller's") {
  const auto fail = [] { throw std::runtime_error("failed"); };
  REQUIRE_ERROR("failed", inner::compare(inner::wall_seconds, fail, [] {}));
  REQUIRE_ERROR("failed", inner::compare(
                              inner::thread_seconds, [] {}, fail));
}

TEST_CASE("Clocks go forward") {
  for (auto* clock : {&inner::wall_seconds, &inner::thread_seconds}) {
    const double before = clock();
    CHECK(clock() >= before);
  }
}

TEST_CASE("Scopes of measuring: what they set, and that it ends with them") {
  const Settings before;
  {
    const inner::UndisturbedScope scope;
    CHECK(at::get_num_threads() == 1);
    CHECK_FALSE(at::GradMode::is_enabled());
    {
      const inner::ThreadsScope threads(3);
      const inner::FlashScope flash(!before.flash);
      CHECK(at::get_num_threads() == 3);
      CHECK(at::globalContext().userEnabledFlashSDP() != before.flash);
    }
    CHECK(at::get_num_threads() == 1);
    CHECK(at::globalContext().userEnabledFlashSDP() == before.flash);
  }
  CHECK(Settings() == before);
}

TEST_CASE("Scopes of measuring: what they set ends with an exception, too") {
  const Settings before;
  REQUIRE_ERROR("failed", [] {
    const inner::UndisturbedScope scope;
    const inner::ThreadsScope threads(2);
    const inner::FlashScope flash(!at::globalContext().userEnabledFlashSDP());
    throw std::runtime_error("failed");
  }());
  CHECK(Settings() == before);
}

TEST_CASE("UndisturbedScope: autocast outside changes no dtype inside") {
  const ga::Autocast autocast(at::kCPU, at::kBFloat16);
  const auto x = torch::ones({4, 4});
  CHECK(torch::mm(x, x).scalar_type() == at::kBFloat16);
  const inner::UndisturbedScope scope;
  CHECK(torch::mm(x, x).scalar_type() == at::kFloat);
}

TEST_CASE("machine_times: all of it, and nothing that there is not") {
  auto facts = inner::machine_facts();
  facts.threads = facts.usable_cpus() + 1;
  facts.flash_attention = true;
  const auto times = inner::machine_times(facts);
  CHECK(times.freed_memory);
  CHECK(times.bfloat16);
  CHECK(times.denormals);
  CHECK(times.threads);
  CHECK(times.attention);
  CHECK(times.products.has_value() == (at::hasMKL() && at::hasMKLDNN()));
  for (auto& one : {times.freed_memory, times.bfloat16, times.denormals, times.threads, times.attention}) {
    CHECK(one->as_it_is > 0);
    CHECK(one->loss() >= 1);
  }
}

TEST_CASE("machine_times: threads that are as many as CPUs, and attention that is not by flash, are not measured") {
  auto facts = inner::machine_facts();
  facts.threads = facts.usable_cpus();
  facts.flash_attention = false;
  const auto times = inner::machine_times(facts);
  CHECK_FALSE(times.threads);
  CHECK_FALSE(times.attention);
}

TEST_CASE("machine_times: what is new to a CUDA device, where there is one", "[cuda]") {
  if (!torch::cuda::is_available()) SKIP("needs a CUDA device");
  auto facts = inner::machine_facts();
  const auto times = inner::machine_times(facts);
  for (auto& one : {times.device_products, times.device_attention}) {
    REQUIRE(one);
    CHECK(one->as_it_is > 0);
    CHECK(one->at_best > 0);
  }
  CHECK(ga::machine_report().findings.size() == 11);
  facts.has_cuda = false;
  CHECK_FALSE(inner::machine_times(facts).device_products);
}

TEST_CASE("machine_report: leaves all as it was, in a scope of autocast, too") {
  const inner::ThreadsScope threads(2);
  const inner::FlashScope flash(true);
  const ga::Autocast autocast(at::kCPU, at::kBFloat16);
  const auto generator = at::globalContext().defaultGenerator(at::kCPU);
  const auto random = generator.get_state().clone();
  const Settings before;
  testing::Warnings warnings;
  CHECK(ga::machine_report().findings.size() == 8);
  CHECK(Settings() == before);
  CHECK(torch::equal(generator.get_state(), random));
  CHECK(warnings.texts().empty());
}

TEST_CASE("machine_report: where no tensor can have gradients, without what trains") {
  const c10::InferenceMode inference;
  CHECK(ga::machine_report().findings.size() == 8);
}
