// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/detail/kernels/device_kernels.hpp>
#include <gradaccum/gradaccum.hpp>

#include "support/device.hpp"
#include "support/files.hpp"
#include "support/models.hpp"
#include "support/ranks.hpp"

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

// Counts the host's waits for a device, part by part, and compares them with the table of docs/architecture.md.

namespace ga = gradaccum;
using namespace testing;

namespace {

/// A model on a device, and batches there.
struct Rig {
  torch::nn::Sequential model = make_model(at::kFloat);
  std::vector<Example> data;

  explicit Rig(at::Device device = at::Device(at::kCUDA, 0)) {
    model->to(device);
    for (auto& batch : make_batches({4, 4, 4, 4}, at::kFloat))
      data.emplace_back(batch.data.to(device), batch.target.to(device));
  }
};

/// Returns the waits per window of `windows` of these, after a first one, which initializes.
double waits_of(const std::function<void()>& window, int windows = 3) {
  window();
  const WaitCount count;
  for (int i = 0; i < windows; ++i) window();
  return static_cast<double>(count.waits()) / windows;
}

template <class Optimizer>
double of_windows(const ga::GradAccumulatorOptions& options, const std::function<void(Optimizer&)>& prepare = {}) {
  Rig rig;
  Optimizer wrapped(rig.model->parameters(), 1e-3);
  if (prepare) prepare(wrapped);
  ga::GradAccumulator optimizer(wrapped, options);
  return waits_of([&] {
    for (auto& batch : rig.data) {
      optimizer.backward(ga::Loss{loss_of(rig.model, batch), batch.target.numel()});
      if (!options.in_backward) optimizer.clip_grad_norm_(1.0);
      optimizer.step();
      optimizer.zero_grad();
    }
  });
}

/// Counts a step of a parameter large enough for moments of 8 bits, and of one that has a sparse gradient.
template <class Optimizer>
double of_steps(bool sparse) {
  const auto table = torch::ones({100, 50}, at::kCUDA).requires_grad_();
  const auto ids = torch::arange(10, at::kLong).to(at::kCUDA);
  Optimizer optimizer({table}, 1e-3);
  return waits_of([&] {
    torch::embedding(table, ids, -1, false, sparse).sum().backward();
    ga::Gradients gradients({table});
    gradients.factor().multiply(0.5);
    optimizer.step(gradients);
    table.mutable_grad().reset();
  });
}

double of_plain_windows() {
  Rig rig;
  torch::optim::AdamW adamw(rig.model->parameters(), 1e-3);
  ga::GradAccumulator optimizer(adamw, {.steps = 4});
  return waits_of([&] {
    for (auto& batch : rig.data) {
      loss_of(rig.model, batch).backward();
      if (optimizer.ready()) {
        optimizer.gradients().factor().multiply(torch::full({}, 0.5, batch.data.options()));
        optimizer.gradients().norm();
        optimizer.gradients().apply();
      }
      optimizer.step();
      optimizer.zero_grad();
    }
  });
}

double of_clipping() {
  Rig first, second(at::Device(at::kCUDA, 1));
  auto parameters = first.model->parameters();
  for (auto& parameter : second.model->parameters()) parameters.push_back(parameter);
  return waits_of([&] {
    loss_of(first.model, first.data[0]).backward();
    loss_of(second.model, second.data[0]).backward();
    ga::clip_grad_norm_(parameters, 0.1);
    ga::clip_grad_value_(parameters, 0.01);
  });
}

double of_autocast() {
  Rig rig;
  return waits_of([&] {
    ga::Autocast autocast(rig.data[0].data.device(), at::kHalf);
    loss_of(rig.model, rig.data[0]);
  });
}

template <class Optimizer>
double of_scaler(bool on_device) {
  Rig rig;
  Optimizer wrapped(rig.model->parameters(), 1e-3);
  ga::GradAccumulator optimizer(wrapped, {.steps = 4});
  ga::AmpScaler scaler({.on_device = on_device});
  return waits_of([&] {
    for (auto& batch : rig.data) {
      scaler.scale(loss_of(rig.model, batch)).backward();
      optimizer.clip_grad_norm_(1.0);
      scaler.step(optimizer);
      scaler.update();
      optimizer.zero_grad();
    }
  });
}

double of_checkpoint() {
  Rig rig;
  return waits_of([&] {
    auto x = rig.data[0].data.clone().requires_grad_();
    ga::checkpoint(rig.model, x).sum().backward();
  });
}

/// Counts a chain after planning, which waits.
double of_checkpointed_sequential() {
  Rig rig;
  ga::CheckpointedSequential net(rig.model, {.memory_budget = 1 * ga::MiB});
  return waits_of([&] { torch::mse_loss(net->forward(rig.data[0].data), rig.data[0].target).backward(); });
}

double of_saved_tensor_hooks() {
  Rig rig;
  return waits_of([&] {
    const auto loss = [&] {
      const auto same = [](const at::Tensor& tensor) { return tensor; };
      ga::SavedTensorHooks hooks(same, same);
      return loss_of(rig.model, rig.data[0]);
    }();
    loss.backward();
  });
}

double of_trainer(ga::OnNan on_nan, bool clips = true, bool scales = false) {
  Rig rig;
  ga::optim::AdamW adamw(rig.model->parameters(), 1e-3);
  ga::Trainer trainer(
      rig.model, adamw, [](auto& net, auto& batch) { return loss_of(net, batch); }, ga::Accumulate{.steps = 4},
      clips ? std::optional(ga::ClipNorm{.max = 1.0}) : std::nullopt,
      clips ? std::optional(ga::ClipValue{.max = 0.1}) : std::nullopt,
      scales ? std::optional(ga::MixedPrecision{.dtype = torch::kHalf}) : std::nullopt,
      ga::Schedule{ga::lr::Cosine{.peak = 1e-3, .total = 100}}, ga::Ema{.decay = 0.9}, std::optional<ga::Progress>());
  return waits_of([&] { trainer.fit(rig.data, {.epochs = 1, .on_nan = on_nan}); }, 1);
}

/// Counts a Trainer with steps in backward, which waits before the micro-batch that fills the window.
double of_trainer_in_backward() {
  Rig rig;
  ga::optim::AdamW adamw(rig.model->parameters(), 1e-3);
  ga::Trainer trainer(
      rig.model, adamw, [](auto& net, auto& batch) { return loss_of(net, batch); }, ga::Accumulate{.steps = 4},
      ga::OptimizerInBackward{}, std::optional<ga::Progress>());
  return waits_of([&] { trainer.fit(rig.data, {.epochs = 1}); }, 1);
}

/// Counts a window in which nothing is saved.
double of_saving() {
  Rig rig;
  const Directory directory;
  ga::optim::AdamW adamw(rig.model->parameters(), 1e-3);
  ga::Trainer trainer(
      rig.model, adamw, [](auto& net, auto& batch) { return loss_of(net, batch); }, ga::Accumulate{.steps = 4},
      ga::SaveState{.directory = directory / "states", .every_updates = 1000}, std::optional<ga::Progress>());
  return waits_of([&] {
    for (auto& batch : rig.data) trainer.step(batch);
  });
}

/// Counts two ranks with a device each, before a window closes.
double of_replicas() {
  double waits = 0;
  tests::as_ranks(2, [&](const ga::ProcessGroup& group) {
    Rig rig(at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(group.rank())));
    torch::optim::AdamW adamw(rig.model->parameters(), 1e-3);
    ga::GradAccumulator optimizer(adamw, {.steps = 4});
    ga::Replicas replicas(group, rig.model, optimizer);
    group.barrier();
    const WaitCount count;
    for (std::size_t i = 0; i < 3; ++i) {
      loss_of(rig.model, rig.data[i]).backward();
      optimizer.step();
      optimizer.zero_grad();
    }
    if (group.rank() == 0) waits = static_cast<double>(count.waits());
    group.barrier();
  });
  return waits;
}

double of_schedules() {
  Rig rig;
  torch::optim::AdamW adamw(rig.model->parameters(), 1e-3);
  ga::LearningRates rates(adamw);
  ga::lr::Cosine cosine{.peak = 1e-3, .total = 100};
  ga::Ema::Running ema({.decay = 0.9});
  return waits_of([&] {
    rates.set(cosine(1));
    ema.update(rig.model);
    ema.swap(rig.model);
    ema.swap(rig.model);
  });
}

/// Counts the gradient of a window: dense ones accumulate, a sparse one comes once.
double of_embedding(bool sparse) {
  const auto table = torch::ones({50, 3}, at::kCUDA).requires_grad_();
  const auto ids = torch::arange(10, at::kLong).to(at::kCUDA);
  return waits_of([&] {
    if (sparse) table.mutable_grad().reset();
    ga::embedding(ids, table, {.padding_idx = 3, .sparse = sparse}).sum().backward();
  });
}

double of_memory_meter() {
  Rig rig;
  ga::MemoryMeter meter;
  return waits_of([&] {
    loss_of(rig.model, rig.data[0]).backward();
    meter.peak_bytes(at::Device(at::kCUDA, 0));
  });
}

/// Counts one batch.
double of_length_buckets() {
  std::vector<at::Tensor> sequences;
  for (std::int64_t length : {3, 5, 2, 4}) sequences.push_back(torch::arange(length, at::kLong).to(at::kCUDA));
  ga::data::LengthBuckets batches(sequences, torch::zeros({4}, at::kLong).to(at::kCUDA),
                                  {.batch_size = 2, .shuffle = true});
  return waits_of([&] {
           for (auto& batch : batches) batch.data.sum();
         }) /
         2;
}

/// Counts an epoch.
double of_batches(bool shuffle) {
  Rig rig;
  ga::data::TensorBatches batches(rig.data[0].data, rig.data[0].target, {.batch_size = 2, .shuffle = shuffle});
  return waits_of([&] {
    for (auto& batch : batches) torch::mse_loss(rig.model->forward(batch.data), batch.target);
  });
}

/// Returns the third column of each row by the beginning of its first.
std::map<std::string, std::string> table() {
  std::map<std::string, std::string> rows;
  std::istringstream lines(text_of(DOCS "/architecture.md"));
  for (std::string line; std::getline(lines, line);) {
    if (line.rfind("| ", 0) != 0 || line.size() < 4) continue;
    const auto cut = line.rfind(" | ", line.size() - 3);
    rows[line.substr(2)] = line.substr(cut + 3, line.size() - cut - 5);
  }
  return rows;
}

std::string says(const std::string& part) {
  for (auto& [row, waits] : table())
    if (row.rfind(part, 0) == 0) return waits;
  return "no such row";
}

}  // namespace

TEST_CASE("device: parts wait as often as the table of docs/architecture.md says", "[cuda]") {
  if (!WaitCount::possible()) SKIP("needs the emulated device, which counts");
  struct Part {
    std::string row, says;
    double expected;
    std::function<double()> run;
    bool by_kernels = false;
  };
  const std::string scaler = "4 bytes a window; with `.on_device` and `ga::optim` no";
  const std::vector<Part> parts{
      {"`GradAccumulator`", "no", 0, [] { return of_windows<torch::optim::AdamW>({.steps = 4}); }},
      {"`ga::Loss{mean, items}`", "no", 0, [] { return of_windows<torch::optim::SGD>({.steps = 4}); }},
      {"`Gradients`, `Factor`", "no", 0, of_plain_windows},
      {"`clip_grad_norm_`", "no (LibTorch's own does)", 0, of_clipping},
      {"`Autocast`", "no", 0, of_autocast},
      {"`AmpScaler`", scaler, 1, [] { return of_scaler<ga::optim::AdamW>(false); }},
      {"`AmpScaler`", scaler, 1, [] { return of_scaler<torch::optim::SGD>(false); }},
      {"`AmpScaler`", scaler, 0, [] { return of_scaler<ga::optim::SGD>(true); }},
      {"`AmpScaler`", scaler, 0, [] { return of_scaler<ga::optim::Adam>(true); }},
      {"`AmpScaler`", scaler, 0, [] { return of_scaler<ga::optim::AdamW>(true); }},
      {"`AmpScaler`", scaler, 0, [] { return of_scaler<ga::optim::AdamW8bit>(true); }, /*by_kernels=*/true},
      {"`AmpScaler`", scaler, 0, [] { return of_scaler<ga::optim::Adafactor>(true); }, /*by_kernels=*/true},
      {"`optim::SGD`", "no", 0, [] { return of_windows<ga::optim::SGD>({.steps = 4}); }},
      {"`optim::SGD`", "no", 0, [] { return of_steps<ga::optim::SGD>(/*sparse=*/true); }},
      {"`optim::SGD`", "no", 0, [] { return of_windows<ga::optim::Adam>({.steps = 4}); }},
      {"`optim::SGD`", "no", 0, [] { return of_windows<ga::optim::AdamW>({.steps = 4}); }},
      {"`optim::Adafactor`", "no", 0, [] { return of_windows<ga::optim::Adafactor>({.steps = 4}); },
       /*by_kernels=*/true},
      {"`optim::Adafactor`", "no", 0, [] { return of_windows<ga::optim::AdamW8bit>({.steps = 4}); },
       /*by_kernels=*/true},
      {"`optim::Adafactor`", "no", 0, [] { return of_steps<ga::optim::AdamW8bit>(/*sparse=*/false); },
       /*by_kernels=*/true},
      {"`.in_backward`", "no", 0, [] { return of_windows<ga::optim::AdamW>({.steps = 4, .in_backward = true}); }},
      {"`checkpoint`", "no", 0, of_checkpoint},
      {"`CheckpointedSequential`", "once, to plan", 0, of_checkpointed_sequential},
      {"`SavedTensorHooks`", "no", 0, of_saved_tensor_hooks},
      {"`Trainer`", "once a window, or not", 1, [] { return of_trainer(ga::OnNan::stop); }},
      {"`Trainer`", "once a window, or not", 1, [] { return of_trainer(ga::OnNan::stop, /*clips=*/false); }},
      {"`Trainer`", "once a window, or not", 1, [] { return of_trainer(ga::OnNan::stop, true, /*scales=*/true); }},
      {"`Trainer`", "once a window, or not", 0, [] { return of_trainer(ga::OnNan::ignore); }},
      {"`.in_backward`", "no", 1, of_trainer_in_backward},  // for the losses, like any Trainer
      {"`SaveState`", "when it saves", 1, of_saving},
      {"`DataParallel`", "when a window closes", 0, of_replicas},
      {"`lr::Constant`", "no", 0, of_schedules},
      {"`embedding`", "no; with `.sparse` once in backward", 0, [] { return of_embedding(/*sparse=*/false); }},
      {"`embedding`", "no; with `.sparse` once in backward", 1, [] { return of_embedding(/*sparse=*/true); }},
      {"`MemoryMeter`", "no", 0, of_memory_meter},
      {"`data::TensorBatches`", "no", 0, [] { return of_batches(false); }},
      {"`data::TensorBatches`", "no", 0, [] { return of_batches(true); }},
      {"`data::TensorBatches`", "no", 0, of_length_buckets},
  };
  for (auto& part : parts) {
    if (part.by_kernels && !ga::detail::device_kernels()) continue;
    INFO(part.row);
    CHECK(says(part.row) == part.says);
    CHECK(part.run() == part.expected);
  }
}

TEST_CASE("device: waiting operations are counted", "[cuda]") {
  if (!WaitCount::possible()) SKIP("needs the emulated device, which counts");
  const auto x = torch::ones({3}, at::kCUDA);
  CHECK(waits_of([&] { x.add(1); }) == 0);
  CHECK(waits_of([&] { x.sum().item<double>(); }) == 1);
  CHECK(waits_of([&] { x.cpu(); }) == 1);
  CHECK(waits_of([&] { torch::ones({3}).to(at::kCUDA); }) == 1);
  CHECK(waits_of([&] { torch::cuda::synchronize(); }) == 1);
}
