// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/data/tensor_batches.hpp>
#include <gradaccum/gradaccum.hpp>

#include "support/device.hpp"
#include "support/failing_files.hpp"
#include "support/files.hpp"
#include "support/no_threads.hpp"
#include "support/warnings.hpp"
#include "training_state/bits.hpp"

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <utility>

#include <sys/wait.h>
#include <unistd.h>

// States that a thread writes while the training continues.

namespace ga = gradaccum;
namespace fs = std::filesystem;
using namespace testing;
using How = FailingFiles::How;
using Names = std::vector<std::string>;

namespace {

/// A training of tensors of all kinds, each of which `go_on` changes in place.
struct Kinds {
  std::map<std::string, at::Tensor> tensors{
      {"plain", torch::randn({300, 40})},
      {"half", torch::randn({7}).to(at::kHalf)},
      {"transposed", torch::randn({5, 6}).t()},
      {"part", torch::randn({10, 8}).narrow(1, 2, 3)},
      {"number", torch::randn({})},
      {"empty", torch::empty({0, 4})},
      {"flags", torch::randint(2, {9}).to(at::kBool)},
      {"undefined", at::Tensor()},
      {"large", torch::randn({2, 600'000})},  // more than one piece of a parallel copy
  };
  std::int64_t count = 0;

  std::int64_t updates() const { return count; }
  void state(ga::Archive& archive) {
    for (auto& [name, tensor] : tensors) archive("part." + name, tensor);
    archive("count", count);
  }
  void go_on() {
    ++count;
    for (auto& [name, tensor] : tensors)
      if (tensor.defined()) tensor.copy_(tensor.to(at::kFloat) * -2 + 1);
  }
};

std::map<std::string, std::string> files_of(const fs::path& folder) {
  std::map<std::string, std::string> files;
  for (auto& name : ga::detail::names_in(folder)) files[name] = text_of(folder / name);
  return files;
}

Names names_in(const fs::path& directory) {
  auto names = ga::detail::names_in(directory);
  std::sort(names.begin(), names.end());
  return names;
}

struct AtBoundary {
  std::function<void()> run;
  void at_boundary() const { run(); }
};

const auto objective = [](auto& net, auto& batch) { return torch::mse_loss(net->forward(batch.data), batch.target); };

struct Scene {
  torch::nn::Sequential net{torch::nn::Linear(4, 8), torch::nn::BatchNorm1d(8), torch::nn::Linear(8, 3)};
  torch::optim::Adam adam{net->parameters(), torch::optim::AdamOptions(0.01)};
  ga::data::TensorBatches batches{torch::randn({42, 4}), torch::randn({42, 3}), {.batch_size = 4, .shuffle = true}};

  auto trainer(auto... policies) { return ga::Trainer(net, adam, objective, std::move(policies)...); }
  Bits bits() {
    Bits bits;
    bits.add_model(*net);
    bits.add_optimizer(adam, *net);
    return bits;
  }
};

}  // namespace

TEST_CASE("BackgroundSaver: writes the bytes of ga::save, of the moment of the save") {
  const Directory directory;
  torch::manual_seed(1);
  Kinds training;
  ga::BackgroundSaver saver(directory / "background");
  CHECK(saver.bytes() == 0);
  CHECK(saver.wait().empty());
  for (int i = 0; i < 3; ++i) {
    training.go_on();
    const auto expected = ga::save(directory / "plain", training);
    fs::path saved;
    {
      FailingFiles files(1, How::hold, EIO, ".safetensors");  // while the first file is written
      CHECK(saver.save(training));
      CHECK(saver.busy());
      const auto before = training.tensors;
      for (auto& [name, tensor] : training.tensors)
        if (tensor.defined()) tensor = tensor.clone();
      for (auto& [name, tensor] : before)
        if (tensor.defined()) tensor.zero_();
      files.release();
      saved = saver.wait();
    }
    CHECK_FALSE(saver.busy());
    CHECK(saved.filename() == expected.filename());
    CHECK(saver.wait() == saved);
    CHECK(files_of(saved) == files_of(expected));
    CHECK(files_of(saved).size() == 2);
  }
  // The negative control: the next moment's state differs.
  training.go_on();
  CHECK(files_of(ga::save(directory / "plain", training)) != files_of(saver.wait()));
}

TEST_CASE("BackgroundSaver: reuses its copy, which grows with the state") {
  const FailingFiles no_disk_to_wait_for;
  const Directory directory;
  Kinds training;
  ga::BackgroundSaver saver(directory / "states", {.keep_last = 2});
  saver.save(training);
  std::int64_t bytes = 0;
  for (auto& [name, tensor] : training.tensors)
    if (tensor.defined()) bytes += static_cast<std::int64_t>(tensor.nbytes());
  CHECK(saver.bytes() >= bytes);
  CHECK(saver.bytes() < bytes + 8192);  // for a header, and alignment to a page
  saver.wait();
  const ga::MemoryMeter meter;
  for (int i = 0; i < 3; ++i) {
    training.count += 1;
    saver.save(training);
    saver.wait();
  }
  CHECK(meter.peak_bytes() < 1000);
  CHECK(names_in(directory / "states") == Names{"step-000002", "step-000003"});
  training.tensors["plain"] = torch::randn({400, 40});
  training.tensors.erase("half");
  saver.save(training);
  CHECK(saver.bytes() >= bytes + 100 * 40 * 4 - 7 * 2);
}

TEST_CASE("BackgroundSaver: tensors of any strides are copied directly, without another copy") {
  const FailingFiles no_disk_to_wait_for;
  const Directory directory;
  Kinds training;
  training.tensors = {
      {"channels_last", torch::randn({8, 64, 32, 32}).contiguous(at::MemoryFormat::ChannelsLast)},
      {"transposed", torch::randn({700, 600}).t()},
      {"part", torch::randn({500, 1000}).narrow(1, 2, 800)},
      {"expanded", torch::randn({1000}).expand({500, 1000})},
      {"conjugate", torch::randn({300, 200}, at::kComplexFloat).conj()},
      {"negative", torch::imag(torch::randn({300, 200}, at::kComplexFloat).conj().t())},
  };
  REQUIRE(training.tensors.at("negative").is_neg());
  ga::BackgroundSaver saver(directory / "states");
  const ga::MemoryMeter meter;
  saver.save(training);
  CHECK(meter.peak_bytes() < saver.bytes() + 100'000);
  CHECK(files_of(saver.wait()) == files_of(ga::save(directory / "plain", training)));
}

TEST_CASE("BackgroundSaver: a process forked during a write leaves the write to its parent") {
  const Directory directory;
  Kinds training;
  auto saver = std::make_unique<ga::BackgroundSaver>(directory / "states");
  FailingFiles files(1, How::hold, EIO, ".safetensors");
  saver->save(training);
  for (const std::string how : {"destroys", "waits", "saves"}) {
    const auto child = ::fork();
    if (child == 0) {
      ::alarm(20);
      bool good = !saver->busy();
      if (how == "waits") good = saver->wait().empty();
      if (how == "saves") good = contains(error_of([&] { saver->save(training); }), "must have only one writer");
      saver.reset();
      ::_exit(good && names_in(directory / "states").size() == 1 ? 0 : 1);
    }
    int status = 0;
    REQUIRE(::waitpid(child, &status, 0) == child);
    INFO(how);
    CHECK(status == 0);
  }
  files.release();
  CHECK(files_of(saver->wait()).size() == 2);
}

TEST_CASE("BackgroundSaver: while a state is being written, the next one waits or is skipped") {
  const Directory directory;
  Kinds training;
  for (const auto when_busy : {ga::WhenBusy::wait, ga::WhenBusy::skip}) {
    const auto states = directory / (when_busy == ga::WhenBusy::wait ? "wait" : "skip");
    FailingFiles files(1, How::hold, EIO, ".safetensors");
    ga::BackgroundSaver saver(states, {.when_busy = when_busy});
    training.count = 1;
    CHECK(saver.save(training));
    training.count = 2;
    if (when_busy == ga::WhenBusy::skip) {
      CHECK_FALSE(saver.save(training));
      CHECK(names_in(states).at(0).starts_with("step-000001.tmp-"));
      files.release();
      CHECK(saver.wait() == states / "step-000001");
      training.count = 3;
      CHECK(saver.save(training));
      CHECK(saver.wait() == states / "step-000003");
      CHECK(names_in(states) == Names{"step-000001", "step-000003"});
    } else {
      files.release_soon();
      CHECK(saver.save(training));
      CHECK(names_in(states).at(0) == "step-000001");
      CHECK(saver.wait() == states / "step-000002");
    }
  }
}

TEST_CASE("BackgroundSaver: any failing system call is reported, and states are intact") {
  const Directory directory;
  torch::manual_seed(2);
  Kinds training;
  training.tensors.erase("large");
  long calls = 0;
  {
    const FailingFiles files;
    ga::BackgroundSaver saver(directory / "count", {.keep_last = 1});
    for (training.count = 1; training.count <= 2; ++training.count) saver.save(training);
    saver.wait();
    calls = static_cast<long>(files.calls().size());
  }
  REQUIRE(calls > 30);
  int told = 0;
  for (const auto how : {How::fail, How::fail_forever})
    for (long at = 0; at < calls; ++at) {
      const auto path = directory / (std::to_string(static_cast<int>(how)) + "-" + std::to_string(at));
      ga::BackgroundSaver saver(path, {.keep_last = 2});
      {
        const FailingFiles none;
        training.count = 1;
        saver.save(training);
        saver.wait();
        training.count = 2;
      }
      const auto before = files_of(path / "step-000001");
      std::string failed, message;
      {
        const FailingFiles files(at, how, ENOSPC);
        message = error_of([&] {
          saver.save(training);
          saver.wait();
        });
        if (!files.has_failed()) break;
        failed = files.failed();
      }
      INFO(at << ": " << failed << ": " << message);
      if (!message.empty()) CHECK((contains(message, path.string()) && contains(message, "No space left on device")));
      if (how == How::fail && (failed.starts_with("write") || failed.starts_with("fsync"))) CHECK(message != "");
      told += !message.empty();
      CHECK(files_of(path / "step-000001") == before);
      for (auto& state : ga::detail::StateDirectory(path).finished()) CHECK_NOTHROW(ga::io::read_state(state.path));
      const FailingFiles none;
      training.count = 3;
      CHECK(error_of([&] { saver.save(training); }) == "");  // reported only once
      CHECK(saver.wait() == path / "step-000003");
      CHECK(names_in(path).size() == 2);  // no leftovers
    }
  CHECK(told > 20);
}

TEST_CASE("BackgroundSaver: an error is thrown once, or is a warning at the end") {
  const Directory directory;
  Kinds training;
  for (const std::string how : {"wait", "save", "warning"}) {
    const auto states = directory / how;
    const FailingFiles files(1, How::fail, EIO, ".safetensors");
    const Warnings warnings;
    {
      ga::BackgroundSaver saver(states);
      saver.save(training);
      while (saver.busy()) std::this_thread::yield();
      if (how == "wait") {
        REQUIRE_ERROR(states.string(), saver.wait());
        CHECK(saver.wait().empty());
      } else if (how == "save") {
        REQUIRE_ERROR("Input/output error: check the disk", saver.save(training));
        CHECK(saver.save(training));
        saver.wait();
      }
    }
    const auto warned = [&](auto& text) {
      return contains(text, "BackgroundSaver: the last state was not saved: " + states.string());
    };
    CHECK(std::ranges::count_if(warnings.texts(), warned) == (how == "warning" ? 1 : 0));
    CHECK(names_in(states) == (how == "save" ? Names{"step-000000"} : Names{}));
  }
}

TEST_CASE("BackgroundSaver: values that cannot be stored are an error of the save") {
  const Directory directory;
  Kinds training;
  training.tensors["sparse"] = torch::eye(3).to_sparse();
  ga::BackgroundSaver saver(directory / "states");
  REQUIRE_ERROR("must be dense", saver.save(training));
  CHECK(names_in(directory / "states").empty());
  training.tensors.erase("sparse");
  CHECK(saver.save(training));
  REQUIRE_ERROR("BackgroundSaver: keep_last must be >= 0, got -1",
                ga::BackgroundSaver(directory / "states", {.keep_last = -1}));
}

TEST_CASE("BackgroundSaver: failure to start a thread is reported, and the next save is complete") {
  const Directory directory;
  Kinds training;
  ga::BackgroundSaver saver(directory / "states");
  saver.save(training);  // starts the copying threads
  saver.wait();
  training.go_on();
  {
    const NoThreads none;
    REQUIRE_ERROR("BackgroundSaver: must start a thread, but the system has none left (", saver.save(training));
  }
  CHECK(names_in(directory / "states") == Names{"step-000000"});
  CHECK(saver.save(training));
  saver.wait();
  CHECK(names_in(directory / "states") == Names{"step-000000", "step-000001"});
}

TEST_CASE("SaveState: saves in the background match saves in the foreground") {
  const FailingFiles no_disk_to_wait_for;
  const Directory directory;
  for (const bool in_background : {false, true}) {
    torch::manual_seed(5);
    Scene scene;
    auto trainer = scene.trainer(ga::Accumulate{.steps = 3}, ga::Ema{.decay = 0.9},
                                 ga::SaveState{.directory = directory / (in_background ? "background" : "foreground"),
                                               .every_updates = 3,
                                               .keep_last = 0,
                                               .in_background = in_background});
    trainer.fit(scene.batches, {.epochs = 2});
    CHECK(trainer.memory_by_kind().state_copy == 0);  // after the fit
  }
  const Names states{"step-000003", "step-000006", "step-000008"};
  CHECK(names_in(directory / "background") == states);
  CHECK(names_in(directory / "foreground") == states);
  for (auto& state : states)
    for (auto& [name, bytes] : files_of(directory / "background" / state))
      if (name != "manifest.json")  // contains the seconds of the fit
        CHECK(bytes == text_of(directory / "foreground" / state / name));
}

TEST_CASE("SaveState: the copy is reported separately in the memory by kind") {
  const FailingFiles no_disk_to_wait_for;
  const Directory directory;
  Scene scene;
  ga::MemoryByKind bytes;
  struct Look {
    std::function<void()> look;
    void on_epoch_end(std::int64_t) const { look(); }
  };
  std::function<void()> look;
  auto trainer =
      scene.trainer(Look{[&] { look(); }}, ga::SaveState{.directory = directory / "states", .every_updates = 2});
  look = [&] { bytes = trainer.memory_by_kind(); };
  trainer.fit(scene.batches, {.epochs = 1});
  CHECK(bytes.state_copy > bytes.parameters + bytes.optimizer_state);  // plus the random numbers
  CHECK(bytes.total() == bytes.parameters + bytes.optimizer_state + bytes.gradients + bytes.state_copy);
}

TEST_CASE("SaveState: a background error ends the fit at a boundary, and damages nothing") {
  const Directory directory;
  const auto states = directory / "states";
  torch::manual_seed(6);
  Scene scene;
  std::int64_t seen = 0;
  auto trainer = scene.trainer(ga::SaveState{.directory = states, .every_updates = 4},
                               [&](const ga::Step& step) { seen = step.update; });
  {
    const FailingFiles files(60, How::fail_forever, ENOSPC);
    const auto message = error_of([&] { trainer.fit(scene.batches, {.epochs = 200}); });
    CHECK(contains(message, states.string()));
    CHECK(contains(message, "No space left on device"));
  }
  CHECK(seen >= 4);
  CHECK(seen < 100);
  torch::manual_seed(6);
  Scene other;
  other.trainer().fit(other.batches, {.updates = seen});
  CHECK(difference(scene.bits(), other.bits()) == "");
  for (auto& state : ga::detail::StateDirectory(states).finished()) CHECK_NOTHROW(ga::io::read_state(state.path));
  const auto failed_at = seen;
  const auto report = trainer.fit(scene.batches, {.epochs = 1});
  CAPTURE(report.updates, failed_at, trainer.updates());
  CHECK(seen == failed_at + report.updates);
  CHECK(ga::detail::StateDirectory(states).finished().back().step == seen);
}

TEST_CASE("SaveState: an exception of the training waits for the pending write") {
  const Directory directory;
  const auto states = directory / "states";
  Scene scene;
  std::optional<FailingFiles> files;
  auto trainer = scene.trainer(ga::SaveState{.directory = states, .every_updates = 5}, [&](const ga::Step& step) {
    if (step.update == 5) files.emplace(1, How::hold, EIO, ".safetensors");  // during the next save
    if (step.update != 6) return;
    CHECK(names_in(states).at(0).starts_with("step-000005.tmp-"));
    files->release_soon();
    throw std::runtime_error("of the program");
  });
  REQUIRE_ERROR("of the program", trainer.fit(scene.batches, {.epochs = 1}));
  CHECK(names_in(states) == Names{"step-000005"});
}

TEST_CASE("SaveState: another save of the training waits for the pending write") {
  const Directory directory;
  const auto states = directory / "states";
  Scene scene;
  std::optional<FailingFiles> files;
  std::function<void()> save;
  auto trainer = scene.trainer(ga::SaveState{.directory = states, .every_updates = 5}, AtBoundary{[&] { save(); }});
  save = [&] {
    if (trainer.updates() == 4) files.emplace(1, How::hold, EIO, ".safetensors");
    if (trainer.updates() != 5) return;
    files->release_soon();
    CHECK(ga::save(states, trainer) == states / "step-000005.1");
  };
  trainer.fit(scene.batches, {.updates = 6});
  CHECK(names_in(states) == Names{"step-000005", "step-000005.1", "step-000006"});
}

TEST_CASE("SaveState: a load inside of fit finds the pending state") {
  const Directory directory;
  const auto states = directory / "states";
  Scene scene;
  std::optional<FailingFiles> files;
  std::function<void()> load;
  bool loaded = false;  // the load repeats the boundary
  auto trainer = scene.trainer(ga::SaveState{.directory = states, .every_updates = 5, .keep_last = 1},
                               AtBoundary{[&] { load(); }});
  load = [&] {
    if (trainer.updates() == 4) files.emplace(1, How::hold, EIO, ".safetensors");
    if (trainer.updates() != 5 || std::exchange(loaded, true)) return;
    files->release_soon();
    CHECK(ga::load(states, trainer) == states / "step-000005");
  };
  trainer.fit(scene.batches, {.updates = 6});
  CHECK(names_in(states) == Names{"step-000006"});
}

TEST_CASE("SaveState: skips saves that are due during a write, but not the best, nor the last") {
  const Directory directory;
  for (const bool better : {false, true}) {
    const auto states = directory / (better ? "better" : "worse");
    Scene scene;
    FailingFiles files(1, How::hold, EIO, ".safetensors");  // during the first save, which is the best so far
    double number = 1;
    struct Evaluate {
      std::function<void()> run;
      void attach(ga::TrainerBase& trainer) const { trainer.will_validate("validation", {"loss"}); }
      void before_boundary() const { run(); }
    };
    std::function<void()> run;
    auto trainer = scene.trainer(
        Evaluate{[&] { run(); }},
        ga::SaveState{
            .directory = states, .every_updates = 2, .keep_last = 0, .keep_best = 1, .when_busy = ga::WhenBusy::skip});
    run = [&] {
      if (trainer.updates() == 3) number = better ? 0.5 : 2;
      if (trainer.updates() == 3 && better) files.release_soon();
      if (trainer.updates() == 5) files.release();
      ga::Evaluation found;
      found.metrics["loss"] = number;
      trainer.validated("validation", std::move(found));
    };
    trainer.fit(scene.batches, {.updates = 7});
    const auto names = names_in(states);
    const auto has = [&](const char* name) { return std::ranges::find(names, name) != names.end(); };
    CHECK(has("step-000001"));
    CHECK_FALSE(has("step-000002"));
    CHECK(has("step-000003") == better);
    CHECK((better || !has("step-000004")));
    CHECK(has("step-000007"));
  }
}

TEST_CASE("BackgroundSaver: copies from a device to pinned memory", "[cuda]") {
  const Directory directory;
  const bool staged = GENERATE(false, true);
  torch::manual_seed(7);
  Kinds training, expected;
  for (auto& [name, tensor] : training.tensors)
    if (tensor.defined()) tensor = expected.tensors[name].to(at::kCUDA);
  training.tensors["transposed"] = expected.tensors["transposed"].contiguous().to(at::kCUDA).t().contiguous().t();
  expected.tensors["transposed"] = training.tensors["transposed"].cpu();
  std::int64_t bytes = 0;
  for (auto& [name, tensor] : training.tensors)
    bytes += tensor.defined() ? static_cast<std::int64_t>(tensor.nbytes()) : 0;
  ga::BackgroundSaver saver(directory / "device", {.stage_on_device = staged});
  for (int i = 0; i < 2; ++i) {
    const ga::MemoryMeter meter;
    saver.save(training);
    CHECK((meter.peak_bytes(c10::Device(at::kCUDA, 0)) >= bytes) == staged);
    for (auto& [name, tensor] : training.tensors)
      if (tensor.defined() && tensor.scalar_type() != at::kBool) tensor.add_(1);  // after the copy, on the same stream
    const auto saved = saver.wait(), there = ga::save(directory / "host", expected);
    CHECK(files_of(saved) == files_of(there));
    for (auto& [name, tensor] : expected.tensors)
      if (tensor.defined() && tensor.scalar_type() != at::kBool) tensor.add_(1);
    ++training.count, ++expected.count;
  }
}
