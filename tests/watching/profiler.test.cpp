// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/memory_meter.hpp>
#include <gradaccum/profiler.hpp>

#include "support/files.hpp"
#include "support/models.hpp"

#include <chrono>
#include <sstream>
#include <thread>

#include <unistd.h>

namespace ga = gradaccum;
using namespace testing;

namespace {

using Event = ga::detail::ProfiledEvent;

const ga::ProfiledOperation& row(const std::vector<ga::ProfiledOperation>& rows, const std::string& name) {
  for (auto& of : rows)
    if (of.name == name) return of;
  throw std::out_of_range(name);
}

Event operation(std::string name, std::int64_t begin, std::int64_t end, std::uint64_t thread = 1,
                std::uint64_t correlation = 0) {
  return {.name = std::move(name), .begin = begin, .end = end, .thread = thread, .correlation = correlation};
}

Event memory(std::int64_t at, std::int64_t bytes, std::uint64_t thread = 1) {
  return {.kind = Event::Kind::memory, .name = "[memory]", .begin = at, .end = at, .thread = thread, .bytes = bytes};
}

/// Captures this process's stderr.
class CapturedStderr {
 public:
  CapturedStderr() : before_(dup(2)) { dup2(fileno(file_), 2); }
  CapturedStderr(const CapturedStderr&) = delete;
  CapturedStderr& operator=(const CapturedStderr&) = delete;
  ~CapturedStderr() {
    dup2(before_, 2);
    close(before_);
  }
  std::string text() const { return file_.text(); }

 private:
  Scratch file_;
  int before_;
};

}  // namespace

TEST_CASE("Profiler: self time and memory of operations") {
  const auto rows = ga::detail::operations_of({
      operation("inner", 20, 50, 1, 7),
      operation("outer", 10, 100),
      operation("inner", 50, 60),
      operation("last", 60, 61),
      memory(15, 1000),
      memory(20, 64),
      memory(50, -24),
      memory(99, -1000),
      memory(150, 5),  // outside of operations
      operation("outer", 15, 45, 2),
      memory(40, 8, 2),
      operation("same", 200, 300),
      operation("same", 200, 290),
      {.kind = Event::Kind::kernel, .begin = 500, .end = 900, .correlation = 7},
      {.kind = Event::Kind::kernel, .begin = 0, .end = 900, .correlation = 9},
  });
  REQUIRE(rows.size() == 4);
  const auto& inner = row(rows, "inner");
  CHECK(inner.calls == 2);
  CHECK(inner.self_cpu_seconds == Approx(40e-9));
  CHECK(inner.cpu_seconds == Approx(40e-9));
  CHECK(inner.device_seconds == Approx(400e-9));
  CHECK(inner.allocated_bytes == 64);
  CHECK(inner.kept_bytes == 40);
  const auto& outer = row(rows, "outer");
  CHECK(outer.calls == 2);
  CHECK(outer.self_cpu_seconds == Approx((90 - 30 - 10 - 1 + 30) * 1e-9));
  CHECK(outer.cpu_seconds == Approx((90 + 30) * 1e-9));
  CHECK(outer.allocated_bytes == 1008);
  CHECK(outer.kept_bytes == 8);
  const auto& same = row(rows, "same");
  CHECK(same.self_cpu_seconds == Approx(100e-9));
  CHECK(same.cpu_seconds == Approx(100e-9));  // recursive calls
  CHECK(rows[0].name == "inner");
  CHECK(rows[3].name == "last");
  CHECK(ga::detail::operations_of({}).empty());
}

TEST_CASE("Profiler: phases of a user's loop") {
  const Directory directory;
  auto model = make_model();
  const auto batch = make_batches({3})[0];
  torch::optim::SGD sgd(model->parameters(), torch::optim::SGDOptions(0.1));
  const auto begin = std::chrono::steady_clock::now();
  ga::Profiler profiler({.directory = directory / "p"});
  for (int i = 0; i < 3; ++i) {
    auto loss = [&] {
      const auto phase = profiler.phase("forward");
      const auto inner = profiler.phase("the model (its own)");
      return loss_of(model, batch);
    }();
    profiler.run("backward", [&] { loss.backward(); });
    sgd.step();
    sgd.zero_grad();
  }
  const auto report = profiler.finish();
  REQUIRE(report.phases.size() == 4);
  CHECK(report.phases[0].name == "forward");
  CHECK(report.phases[1].name == "the model (its own)");
  CHECK(report.phases[2].name == "backward");
  CHECK(report.phases[3].name == "other");
  double shares = 0;
  for (auto& phase : report.phases) shares += phase.share;
  CHECK(shares == Approx(1).epsilon(1e-12));
  CHECK(report.phases[0].times == 3);
  CHECK(report.phases[1].seconds > 0);
  CHECK(report.seconds <= std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
  CHECK(row(report.operations, "aten::addmm").calls == 6);
  CHECK(row(report.operations, "AddmmBackward0").calls == 6);
  const auto trace = nlohmann::json::parse(text_of(directory / "p/trace.json"));
  CHECK(trace.at("traceEvents").size() > 20);
  std::ostringstream printed;
  printed << report;
  CHECK(printed.str() == text_of(directory / "p/profile.txt"));
  CHECK(ga::MemoryMeter::possible());
}

TEST_CASE("Profiler: memory of operations is what they allocated") {
  ga::Profiler profiler;
  const auto kept = torch::zeros({1000}, at::kFloat);
  { const auto gone = torch::ones({500}, at::kFloat); }
  const auto report = profiler.finish();
  const auto& empty = row(report.operations, "aten::empty");
  CHECK(empty.calls == 2);
  CHECK(empty.allocated_bytes == 6000);
  CHECK(report.by_memory(1).at(0).name == "aten::empty");
}

TEST_CASE("Profiler: nothing is written without a directory, or without finish") {
  const Directory directory;
  { ga::Profiler profiler; }
  CHECK(ga::MemoryMeter::possible());
  try {
    ga::Profiler profiler({.directory = directory / "p"});
    const auto phase = profiler.phase("forward");
    torch::zeros({3});
    throw std::runtime_error("broken");
  } catch (const std::runtime_error&) {
  }
  CHECK(ga::MemoryMeter::possible());
  CHECK(std::filesystem::is_empty(directory / "p"));
}

TEST_CASE("Profiler: refuses invalid uses") {
  const Directory directory;
  ga::Profiler profiler({.directory = directory / "p"});
  REQUIRE_ERROR("Profiler: must not start while LibTorch's profiler runs", ga::Profiler{});
  REQUIRE_ERROR("MemoryMeter: must not start inside LibTorch's profiler", ga::MemoryMeter{});
  for (const std::string name : {"", "a \"b\"", "a\nb", "a\\b"})
    REQUIRE_ERROR("a phase's name must have no quote, backslash or control character, got '" + name,
                  profiler.phase(name));
  {
    const auto phase = profiler.phase("forward");
    REQUIRE_ERROR("Profiler: finish() was called inside a phase", profiler.finish());
  }
  std::string elsewhere;
  std::thread([&] { elsewhere = error_of([&] { profiler.finish(); }); }).join();
  CHECK(contains(elsewhere, "must be finished on the thread that constructed it"));
  profiler.finish();
  REQUIRE_ERROR("Profiler: finish() was already called; construct another", profiler.finish());
  REQUIRE_ERROR("Profiler: finish() was already called; construct another", profiler.phase("forward"));
  const ga::MemoryMeter meter;
  REQUIRE_ERROR("Profiler: must not start while a MemoryMeter counts", ga::Profiler{});
}

TEST_CASE("Profiler: a trace that cannot be written is an error, and leaves no file") {
  const Directory directory;
  std::filesystem::create_directories(directory / "p/trace.json/in_the_way");
  ga::Profiler profiler({.directory = directory / "p"});
  torch::zeros({3});
  REQUIRE_ERROR("trace.json: must be replaced (is as before)", profiler.finish());
  CHECK(ga::MemoryMeter::possible());
  std::size_t names = 0;
  for (auto& entry : std::filesystem::directory_iterator(directory / "p")) names += !entry.path().empty();
  CHECK(names == 1);
}

TEST_CASE("Profiler: prints nothing") {
  const CapturedStderr captured;
  {
    ga::Profiler profiler;
    torch::zeros({3});
    profiler.finish();
  }
  for (auto& line : split(captured.text(), '\n')) {  // Kineto prints these without KINETO_LOG_LEVEL
    INFO(line);
    CHECK((line.starts_with("USDT:") || line.starts_with("ERROR:")));
  }
}
