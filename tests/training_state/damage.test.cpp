// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/data/tensor_batches.hpp>
#include <gradaccum/gradaccum.hpp>

#include "support/failing_files.hpp"
#include "support/files.hpp"
#include "training_state/bits.hpp"

#include <csignal>

namespace ga = gradaccum;
namespace fs = std::filesystem;
using namespace testing;
using How = FailingFiles::How;

namespace {

/// A function that is called inside of a micro-batch, or in the policy after it.
std::function<void()> in_objective = [] {};

struct Scene {
  static ga::data::TensorBatches make_batches() {
    auto generator = at::make_generator<at::CPUGeneratorImpl>(3);
    return {at::randn({42, 4}, generator), at::randn({42, 3}, generator), {.batch_size = 4, .shuffle = true}};
  }
  ga::data::TensorBatches batches = make_batches();
  torch::nn::Sequential net{torch::nn::Linear(4, 8), torch::nn::Dropout(0.2), torch::nn::Linear(8, 3)};
  ga::optim::AdamW optimizer{net->parameters(), ga::optim::AdamWOptions(1e-2)};

  auto fit(const ga::FitOptions& options, ga::SaveState save, const auto&... policies) {
    const auto objective = [](auto& model, auto& batch) {
      in_objective();
      return torch::mse_loss(model->forward(batch.data), batch.target);
    };
    ga::Trainer trainer(net, optimizer, objective, ga::Accumulate{.steps = 3}, ga::Ema{.decay = 0.9}, policies...,
                        std::move(save));
    return trainer.fit(batches, options);
  }
  /// A value that `ga::save` stores.
  std::int64_t count = 0;
  std::int64_t updates() const { return count; }
  void state(ga::Archive& archive) {
    archive("model", ga::ModelState(net));
    archive("optimizer", ga::OptimizerState(optimizer, net));
    archive("random", ga::RandomState());
    auto next = count;
    archive("count", next);
    archive.when_all_fit([this, next] { count = next; });
  }
  void train() {
    const auto batch = *batches.begin();
    torch::mse_loss(net->forward(batch.data), batch.target).backward();
    optimizer.step();
    optimizer.zero_grad();
    ++count;
  }
  Bits bits() {
    Bits bits;
    bits.add_model(*net);
    bits.add_optimizer(optimizer, *net);
    bits.add_generator();
    bits.add("count", static_cast<double>(count));
    return bits;
  }
};

std::vector<std::string> names_in(const fs::path& directory) {
  auto names = ga::detail::names_in(directory);
  std::sort(names.begin(), names.end());
  return names;
}
using Names = std::vector<std::string>;

}  // namespace

TEST_CASE("damage: any change of a state is an error that names the file and the intact states") {
  const Directory directory;
  const auto runs = directory / "runs";
  Scene scene;
  {
    const FailingFiles no_disk_to_wait_for;
    for (int i = 0; i < 3; ++i) {
      scene.train();
      ga::save(runs, scene);
    }
  }
  const auto newest = runs / "step-000003";
  REQUIRE(names_in(newest) ==
          Names{"manifest.json", "model.safetensors", "optimizer.safetensors", "random.safetensors"});
  const auto before = scene.bits();
  const auto check_is_noticed = [&](const std::string& name, const std::string& intact) {
    const auto message = error_of([&] { ga::load(runs, scene); });
    INFO("message: '" << message << "'");
    CHECK(contains(message, (newest / name).string()));
    CHECK(contains(message, intact));
    CHECK(contains(message, "load it by its own path"));
    CHECK(difference(before, scene.bits()) == "");
  };
  const auto step2 = "the newest intact state is " + (runs / "step-000002").string();
  for (const auto& name : names_in(newest)) {
    INFO(name);
    const auto path = newest / name;
    const auto text = text_of(path);
    for (std::size_t i = 0; i < 16; ++i) {
      auto flipped = text;
      flipped[text.size() * i / 16] ^= static_cast<char>(1 << (i % 8));
      write_text(path, flipped);
      check_is_noticed(name, step2);
    }
    for (const std::size_t size : {std::size_t{0}, std::size_t{1}, text.size() / 2, text.size() - 1}) {
      write_text(path, text.substr(0, size));
      check_is_noticed(name, step2);
    }
    write_text(path, text + '\0');
    check_is_noticed(name, step2);
    fs::remove(path);
    check_is_noticed(name, step2);
    fs::create_directory(path);
    check_is_noticed(name, step2);
    fs::remove(path);
    write_text(directory / name, text);
    fs::create_symlink(directory / name, path);
    check_is_noticed(name, step2);
    fs::remove(path);
    for (const auto& other : names_in(runs / "step-000002")) {  // replaced by another state's, or another file
      fs::copy(runs / "step-000002" / other, path);
      if (other != name || other != "manifest.json")
        check_is_noticed(other == name || name != "manifest.json" ? name : "manifest.json", step2);
      fs::remove(path);
    }
    write_text(path, text);
  }
  for (const auto* name : {"more.safetensors", "notes.txt", ".hidden"}) {
    write_text(newest / name, "text");
    check_is_noticed(name, step2);
    fs::remove(newest / name);
  }
  // The other states are checked, too.
  fs::remove(newest / "random.safetensors");
  write_text(runs / "step-000002/model.safetensors", "text");
  check_is_noticed("random.safetensors", "the newest intact state is " + (runs / "step-000001").string());
  fs::remove(runs / "step-000001/manifest.json");
  REQUIRE_ERROR("there is no intact state beside it", ga::load(runs, scene));
  REQUIRE_ERROR("random.safetensors", scene.fit({.resume = runs}, {.directory = directory / "others"}));
  CHECK(difference(before, scene.bits()) == "");
}

TEST_CASE("damage: an older state is loaded by its own path") {
  const FailingFiles no_disk_to_wait_for;
  const Directory directory;
  Scene scene;
  std::vector<Bits> all;
  for (int i = 0; i < 3; ++i) {
    scene.train();
    all.push_back(scene.bits());
    ga::save(directory / "runs", scene);
  }
  for (const std::size_t i : {1, 0, 2}) {
    Scene other;
    ga::load(directory / "runs" / ("step-00000" + std::to_string(i + 1)), other);
    CHECK(difference(all[i], other.bits()) == "");
  }
}

TEST_CASE("damage: after any failing system call, earlier states are intact, and training resumes") {
  const Directory directory;
  Scene scene;
  long calls = 0;
  {
    const FailingFiles files;
    scene.train();
    ga::save(directory / "count", scene, {.keep_last = 2});
    scene.train();
    ga::save(directory / "count", scene, {.keep_last = 1});
    calls = static_cast<long>(files.calls().size());
  }
  REQUIRE(calls > 50);
  for (const auto how : {How::fail, How::fail_forever, How::shorten, How::interrupt})
    for (long at = 0; at < calls; at += 1) {
      const auto path = directory / (std::to_string(static_cast<int>(how)) + "-" + std::to_string(at));
      {
        const FailingFiles none;
        scene.count = 1;
        ga::save(path, scene);
        scene.count = 2;
      }
      const auto before = scene.bits();
      std::string failed, message;
      {
        const FailingFiles files(at, how, ENOSPC);
        message = error_of([&] { ga::save(path, scene, {.keep_last = 2}); });
        if (!files.has_failed()) break;
        failed = files.failed();
      }
      INFO(at << ": " << failed << ": " << message);
      if (!message.empty()) CHECK((contains(message, path.string()) && contains(message, "No space left on device")));
      if (how == How::shorten || how == How::interrupt) CHECK(message == "");
      if (how == How::fail && (failed.starts_with("write") || failed.starts_with("fsync"))) CHECK(message != "");
      CHECK(difference(before, scene.bits()) == "");
      const FailingFiles none;
      Scene other;
      ga::load(path / "step-000001", other);
      CHECK(other.count == 1);
      scene.count = 3;
      ga::save(path, scene, {.keep_last = 2});
      CHECK(names_in(path).size() == 2);  // no leftovers
      ga::load(path, other);
      CHECK(difference(scene.bits(), other.bits()) == "");
      fs::remove_all(path);
    }
}

namespace {

/// Resources of this process: descriptors, mappings, and pages of memory.
std::size_t descriptors() { return names_in("/proc/self/fd").size(); }
std::size_t mappings() { return split(text_of("/proc/self/maps"), '\n').size(); }
long pages() { return std::stol(split(text_of("/proc/self/statm"), ' ').at(1)); }

}  // namespace

TEST_CASE("load: a hundred loads take no more resources than one") {
  const FailingFiles no_disk_to_wait_for;
  const Directory directory;
  const auto runs = directory / "runs";
  Scene scene;
  scene.fit({.epochs = 1}, {.directory = runs});
  const auto load = [&] {
    Scene other;
    other.fit({.epochs = 1, .resume = runs}, {.directory = directory / "others"});
  };
  const auto load_damaged = [&] {
    Scene other;
    CHECK_THROWS(other.fit({.resume = directory / "damaged"}, {.directory = directory / "others"}));
  };
  fs::create_directories(directory / "damaged");
  fs::copy(ga::detail::newest_state(runs).value(), directory / "damaged/step-000001");
  write_text(directory / "damaged/step-000001/ema.safetensors", "text");
  for (int i = 0; i < 10; ++i) load(), load_damaged();
  const auto descriptors_before = descriptors(), mappings_before = mappings();
  const auto pages_before = pages();
  ga::MemoryMeter meter;
  for (int i = 0; i < 100; ++i) load(), load_damaged();
  CHECK(meter.live_bytes(at::kCPU) == 0);
  CHECK(descriptors() == descriptors_before);
#ifndef __SANITIZE_ADDRESS__  // keeps freed memory for a while
  CHECK(mappings() <= mappings_before + 4);
  CHECK(pages() <= pages_before + 2048);  // 8 MB
#else
  static_cast<void>(mappings_before), static_cast<void>(pages_before);
#endif
}

TEST_CASE("SaveState: saves at the given updates and keeps the given number") {
  const FailingFiles no_disk_to_wait_for;
  const Directory directory;
  // 11 micro-batches per epoch, 3 per window: 4 updates per epoch.
  Scene().fit({.epochs = 2}, {.directory = directory / "all", .every_updates = 3, .keep_last = 0});
  CHECK(names_in(directory / "all") == Names{"step-000003", "step-000006", "step-000008"});
  Scene().fit({.epochs = 2}, {.directory = directory / "two", .every_updates = 1, .keep_last = 2});
  CHECK(names_in(directory / "two") == Names{"step-000007", "step-000008"});
  Scene().fit({.epochs = 2}, {.directory = directory / "one", .every_updates = 1000, .keep_last = 1});
  CHECK(names_in(directory / "one") == Names{"step-000008"});
  Scene().fit({.smoke = true}, {.directory = directory / "smoke", .every_updates = 1});
  CHECK_FALSE(fs::exists(directory / "smoke"));
  // A state of another run is detected before the training has run for long.
  int micro_batches = 0;
  in_objective = [&] { ++micro_batches; };
  REQUIRE_ERROR("the state is from another run", Scene().fit({.epochs = 2}, {.directory = directory / "one"}));
  in_objective = [] {};
  CHECK(micro_batches == 1);
  CHECK(names_in(directory / "one") == Names{"step-000008"});
}

namespace {

volatile std::sig_atomic_t heard = 0;
void hear(int signal) { heard = signal; }
void hear_all(int signal, siginfo_t*, void*) { heard = signal; }

}  // namespace

TEST_CASE("SaveState: a signal ends the fit after the current micro-batch, and the state is saved") {
  const FailingFiles no_disk_to_wait_for;
  for (const int signal : {SIGTERM, SIGINT}) {
    const Directory directory;
    const auto runs = directory / "runs";
    struct sigaction handler {};
    handler.sa_handler = hear;
    struct sigaction before {
    }, after{};
    REQUIRE(::sigaction(signal, &handler, &before) == 0);
    heard = 0;
    int seen = 0;
    in_objective = [&] {
      if (++seen == 5) ::raise(signal);
    };
    Scene scene;
    torch::manual_seed(1);
    const auto report = scene.fit({.epochs = 2}, {.directory = runs, .on_signals = true});
    CHECK(report.signal == signal);
    CHECK(seen == 5);
    CHECK(heard == signal);
    CHECK(report.updates == 1);
    CHECK(names_in(runs) == Names{"step-000001"});
    CHECK(std::get<std::int64_t>(ga::io::read_state(runs / "step-000001").at("window.micro_batches")) == 2);

    heard = 0;  // the user's own handler is back
    REQUIRE(::sigaction(signal, nullptr, &after) == 0);
    CHECK(after.sa_handler == hear);
    ::raise(signal);
    CHECK(heard == signal);

    in_objective = [] {};
    Scene other;
    const auto whole = other.fit({.epochs = 2, .resume = runs}, {.directory = runs, .on_signals = true});
    CHECK(whole.signal == 0);
    CHECK(whole.updates == 8);

    // A handler that takes more arguments.
    handler.sa_sigaction = hear_all;
    handler.sa_flags = SA_SIGINFO;
    ::sigaction(signal, &handler, nullptr);
    heard = seen = 0;
    in_objective = [&] {
      if (++seen == 2) ::raise(signal);
    };
    CHECK(Scene().fit({.epochs = 2}, {.directory = directory / "more", .on_signals = true}).signal == signal);
    CHECK(heard == signal);

    // An exception, and a fit that saves nothing.
    in_objective = [] { throw std::runtime_error("stop"); };
    CHECK_THROWS(Scene().fit({}, {.directory = directory / "thrown", .on_signals = true}));
    REQUIRE(::sigaction(signal, nullptr, &after) == 0);
    CHECK(after.sa_sigaction == hear_all);
    heard = 0;
    in_objective = [&] {  // a second SIGINT would end the program
      if (heard == 0) ::raise(signal);
    };
    Scene().fit({.smoke = true}, {.directory = directory / "smoke", .on_signals = true});
    CHECK(heard == signal);
    CHECK_FALSE(fs::exists(directory / "smoke"));

    // Without on_signals no handler is set; ignored signals stay ignored.
    handler = {};
    handler.sa_handler = hear;
    ::sigaction(signal, &handler, nullptr);
    heard = 0;
    CHECK(Scene().fit({}, {.directory = directory / "none"}).signal == 0);
    CHECK(heard == signal);
    in_objective = [&] { ::raise(signal); };
    handler.sa_handler = SIG_IGN;
    ::sigaction(signal, &handler, nullptr);
    CHECK(Scene().fit({}, {.directory = directory / "ignored", .on_signals = true}).signal == 0);
    in_objective = [] {};
    ::sigaction(signal, &before, nullptr);
  }
}

namespace {

/// A policy: calls `stop`, as after a test of a metric.
struct Stopper {
  std::int64_t after = 0, seen = 0;
  std::function<void()> stop = {};
  void attach(auto& trainer) {
    stop = [&trainer] { trainer.stop(); };
  }
  void after_backward(const ga::Gradients&) {
    if (++seen == after) stop();
  }
};

}  // namespace

TEST_CASE("SaveState: a stop by the program saves everything that was trained") {
  const FailingFiles no_disk_to_wait_for;
  for (std::int64_t after = 1; after < 13; ++after) {
    const Directory directory;
    Scene scene;
    const auto report = scene.fit({.epochs = 2}, {.directory = directory / "runs"}, Stopper{.after = after});
    INFO("stopped in micro-batch " << after << ", with updates: " << report.updates);
    const auto state = ga::detail::newest_state(directory / "runs").value();
    CHECK(std::get<std::int64_t>(ga::io::read_state(state).at("updates")) == report.updates);
    const auto weight = std::get<at::Tensor>(ga::io::read_state(state).at("model.0.weight"));
    CHECK(at::equal(weight, scene.net->named_parameters()["0.weight"]));
  }
}
