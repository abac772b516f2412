// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/gradaccum.hpp>

#include "support/device.hpp"
#include "support/files.hpp"
#include "support/kernels_on_device.hpp"
#include "support/models.hpp"
#include "support/warnings.hpp"

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

// Trainings on a device match those on the CPU: windows equal the large batch, a Trainer with its policies gives the
// same results, budgets are kept, and a training resumes bitwise.

namespace ga = gradaccum;
using namespace testing;

namespace {

const at::Device host(at::kCPU), device(at::kCUDA, 0), other_device(at::kCUDA, 1);

std::vector<Example> batches_on(at::Device where, at::ScalarType dtype = at::kDouble) {
  std::vector<Example> batches;
  for (auto& batch : make_batches({4, 3, 5, 4, 2, 6, 4, 4}, dtype))
    batches.emplace_back(batch.data.to(where), batch.target.to(where));
  return batches;
}

const auto weighted = [](auto& net, auto& batch) { return ga::Loss{loss_of(net, batch), batch.target.numel()}; };

/// Trains two windows of four, or two large batches.
template <class Optimizer>
at::Tensor trained(at::Device where, bool large, ga::GradAccumulatorOptions options) {
  auto model = make_model();
  model->to(where);
  const auto data = batches_on(where);
  Optimizer wrapped(model->parameters(), 0.01);
  options.steps = large ? 1 : 4;
  ga::GradAccumulator optimizer(wrapped, options);
  for (std::size_t i = 0; i < data.size(); i += large ? 4 : 1) {
    const auto batch = large ? joined(data, i, i + 4) : data[i];
    optimizer.backward(weighted(model, batch));
    if (!options.in_backward) optimizer.clip_grad_norm_(0.3);
    optimizer.step();
    optimizer.zero_grad();
  }
  return flat(model).cpu();
}

}  // namespace

TEMPLATE_TEST_CASE("device: windows equal the large batch and those on the CPU", "[cuda]", torch::optim::SGD,
                   torch::optim::AdamW, ga::optim::SGD, ga::optim::Adam, ga::optim::AdamW, ga::optim::Adafactor) {
  if (!torch::cuda::is_available()) SKIP("needs a CUDA device");
  if (!steps_on_devices<TestType>()) return;
  const auto windows = trained<TestType>(device, false, {});
  CHECK(distance(windows, trained<TestType>(device, true, {})) < 1e-10);
  CHECK(distance(windows, trained<TestType>(host, false, {})) < 1e-6);  // Adafactor's states are float32
  CHECK(distance(windows, flat(make_model())) > 1e-3);
}

TEMPLATE_TEST_CASE("device: stepping in backward gives the bits of the ordinary step", "[cuda]", ga::optim::SGD,
                   ga::optim::AdamW, ga::optim::AdamW8bit, ga::optim::Adafactor) {
  if (!torch::cuda::is_available()) SKIP("needs a CUDA device");
  if (!steps_on_devices<TestType>()) return;
  const auto run = [](bool in_backward) {
    auto model = make_model(at::kFloat);
    model->to(device);
    TestType wrapped(model->parameters(), 0.01);
    ga::GradAccumulator optimizer(wrapped, {.steps = 2, .in_backward = in_backward});
    for (auto& batch : batches_on(device, at::kFloat)) {
      optimizer.backward(loss_of(model, batch));
      optimizer.step();
      optimizer.zero_grad();
    }
    return flat(model).cpu();
  };
  CHECK(at::equal(run(true), run(false)));
}

TEST_CASE("device: a Trainer with its policies gives the CPU's results", "[cuda]") {
  if (!torch::cuda::is_available()) SKIP("needs a CUDA device");
  const auto run = [](at::Device where) {
    auto model = make_model();
    model->to(where);
    ga::optim::AdamW adamw(model->parameters(), 1e-2);
    const Directory directory;
    ga::Trainer trainer(model, adamw, weighted, ga::Accumulate{.steps = 2}, ga::ClipNorm{.max = 0.3},
                        ga::ClipValue{.max = 0.1}, ga::Schedule{ga::lr::Cosine{.peak = 1e-2, .total = 12}},
                        ga::Ema{.decay = 0.9}, ga::MetricsLog{.path = directory / "log.csv"}, ga::Progress{});
    const auto data = batches_on(where);
    const auto report = trainer.fit(data, {.epochs = 3, .measure_memory = true});
    CHECK(report.updates == 12);
    const auto loss = trainer.evaluate(data)["loss"];
    trainer.template policy<ga::Ema>().swap(model);
    return torch::cat({flat(model).cpu(), torch::full({1}, loss, at::kDouble)});
  };
  CHECK(distance(run(device), run(host)) < 1e-10);
}

TEST_CASE("device: a training resumes bitwise, random numbers of the device included, with graphs or without",
          "[cuda]") {
  if (!torch::cuda::is_available()) SKIP("needs a CUDA device");
  const bool graphed = GENERATE(false, true);
  if (graphed && !has_graphs(device)) SKIP("needs a CUDA device whose LibTorch has graphs");
  const Directory directory;
  const auto run = [&](std::uint64_t seed, std::int64_t updates, bool saves) {
    torch::manual_seed(seed);
    torch::nn::Sequential model(torch::nn::Linear(4, 8), torch::nn::Dropout(0.5), torch::nn::Linear(8, 3));
    model->to(device);
    ga::optim::AdamW adamw(model->parameters(), 1e-2);
    std::optional<ga::SaveState> saving;
    if (saves) saving = ga::SaveState{.directory = directory / "states", .every_updates = 3};
    std::function<at::Tensor(torch::nn::Sequential&, const Example&)> objective = [](auto& net, auto& batch) {
      return loss_of(net, batch);
    };
    if (graphed && saves) objective = ga::GraphedStep(model, objective);
    ga::Trainer trainer(model, adamw, objective, ga::Accumulate{.steps = 2}, saving);
    trainer.fit(batches_on(device, at::kFloat),
                {.epochs = 3, .updates = updates, .resume = saves ? directory / "states" : std::filesystem::path()});
    return flat(model).cpu();
  };
  const auto straight = run(3, 100, false);
  CHECK_FALSE(at::equal(run(3, 5, true), straight));
  CHECK(at::equal(run(4, 100, true), straight));  // parameters and random numbers come from the state
}

TEST_CASE("device: a chain keeps its budget, with the gradients of the plain one", "[cuda]") {
  if (!torch::cuda::is_available()) SKIP("needs a CUDA device");
  torch::manual_seed(4);
  torch::nn::Sequential stages;
  for (int i = 0; i < 6; ++i) {
    stages->push_back(torch::nn::Linear(64, 64));
    stages->push_back(torch::nn::GELU());
  }
  stages->to(device);
  const auto input = torch::randn({512, 64}, device);
  const auto gradients = [&](auto& net) {
    stages->zero_grad();
    net->forward(input).square().mean().backward();
    std::vector<at::Tensor> all;
    for (auto& parameter : stages->parameters()) all.push_back(parameter.grad().cpu().flatten());
    return torch::cat(all);
  };
  const auto peak = [&](auto& net) {
    ga::MemoryMeter meter;
    gradients(net);
    return meter.peak_bytes(device) - meter.live_bytes(device);
  };
  const auto plain = gradients(stages);
  const auto of_plain = peak(stages);
  const std::int64_t budget = of_plain / 2;
  ga::CheckpointedSequential net(stages, {.memory_budget = budget});
  CHECK(at::equal(gradients(net), plain));  // plans
  CHECK(at::equal(gradients(net), plain));
  CHECK(peak(net) < of_plain);
  CHECK(net->plan().predicted.peak_bytes <= budget);
}

TEST_CASE("device: a direct step in the middle of a window is a warning, and the numbers are not read", "[cuda]") {
  if (!torch::cuda::is_available()) SKIP("needs a CUDA device");
  const Warnings warnings;
  auto model = make_model();
  model->to(device);
  torch::optim::Adam adam(model->parameters(), 0.1);
  ga::GradAccumulator optimizer(adam, {.steps = 4});
  const auto data = batches_on(device);
  for (std::size_t i = 0; i < 4; ++i) {
    loss_of(model, data[i]).backward();
    if (i == 1) torch::nn::utils::clip_grad_norm_(model->parameters(), 0.01);
    optimizer.step();
    if (i == 1) adam.step();
    optimizer.zero_grad();
  }
  CHECK(optimizer.updates() == 1);
  REQUIRE(warnings.texts().size() == 1);
  CHECK(contains(warnings.texts()[0], "was written to in the middle of a window"));
}

TEST_CASE("device: two devices in one window", "[cuda]") {
  if (torch::cuda::device_count() < 2) SKIP("needs two CUDA devices");
  const auto run = [](at::Device first, at::Device second) {
    auto one = make_model(), another = make_model();
    one->to(first);
    another->to(second);
    auto parameters = one->parameters();
    for (auto& parameter : another->parameters()) parameters.push_back(parameter);
    ga::optim::AdamW adamw(parameters, 0.01);
    ga::GradAccumulator optimizer(adamw, {.steps = 4});
    for (auto& batch : batches_on(first)) {
      const auto hidden = one->forward(batch.data);
      const auto in = torch::cat({hidden, hidden.slice(1, 0, 1)}, 1).to(second);
      torch::mse_loss(another->forward(in), batch.target.to(second)).backward();
      optimizer.clip_grad_norm_(0.1);
      optimizer.step();
      optimizer.zero_grad();
    }
    return torch::cat({flat(one).cpu(), flat(another).cpu()});
  };
  CHECK(distance(run(device, other_device), run(host, host)) < 1e-10);
}
