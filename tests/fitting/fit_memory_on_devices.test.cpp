// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/detail/fitting/memory_fitter.hpp>
#include <gradaccum/grad_accumulator.hpp>
#include <gradaccum/memory_meter.hpp>
#include <gradaccum/policies/fit_memory.hpp>
#include <gradaccum/trainer.hpp>

#include "support/device.hpp"
#include "support/models.hpp"
#include "support/outcome.hpp"

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace ga = gradaccum;
namespace inner = gradaccum::detail;
using namespace testing;

namespace {

const at::Device device(at::kCUDA, 0);

/// A training with dropout, whose random numbers are the device's.
struct Training {
  torch::nn::Sequential model = with_dropout();
  torch::optim::Adam adam{model->parameters(), 0.01};
  ga::GradAccumulator<torch::optim::Adam> optimizer{adam};
  std::vector<std::vector<std::int64_t>> rows;  // of each micro-batch, by update

  static torch::nn::Sequential with_dropout() {
    auto model = make_model();
    model->push_back(torch::nn::Dropout(0.4));
    model->to(device);
    torch::manual_seed(3);
    return model;
  }

  void update(ga::FitMemory::Running& memory, const Example& batch) {
    backward(memory, batch);
    step(memory);
  }
  void backward(ga::FitMemory::Running& memory, const Example& batch) {
    memory.backward(optimizer, model, batch, [](auto& net, auto& part) { return loss_of(net, part); });
  }
  void step(const ga::FitMemory::Running& memory) {
    CHECK(optimizer.step());
    optimizer.zero_grad();
    rows.push_back(memory.plan().last_rows);
  }

  /// Makes an update by hand, with micro-batches of these rows.
  void update(const std::vector<std::int64_t>& parts, const Example& batch) {
    optimizer.set_steps(static_cast<std::int64_t>(parts.size()));
    std::int64_t from = 0;
    for (const auto count : parts) {
      const Example part(batch.data.narrow(0, from, count), batch.target.narrow(0, from, count));
      optimizer.backward(ga::Loss{loss_of(model, part), count});
      optimizer.step();
      optimizer.zero_grad();
      from += count;
    }
    CHECK(from == batch.data.size(0));
  }

  /// Returns the parameters, and the state of the device's generator.
  std::vector<at::Tensor> left() {
    return {flat(model).cpu(), at::globalContext().defaultGenerator(device).get_state().clone()};
  }
};

std::vector<Example> batches_on_device(const std::vector<std::int64_t>& sizes) {
  auto batches = make_batches(sizes);
  for (auto& batch : batches) batch = {batch.data.to(device), batch.target.to(device)};
  return batches;
}

std::vector<at::Tensor> by_hand(const std::vector<Example>& batches,
                                const std::vector<std::vector<std::int64_t>>& rows) {
  Training training;
  for (std::size_t i = 0; i < batches.size(); ++i) training.update(rows[i], batches[i]);
  return training.left();
}

}  // namespace

TEST_CASE("available_memory: of a device, the free memory and the memory that LibTorch keeps", "[cuda]") {
  if (!torch::cuda::is_available()) SKIP("no CUDA device");
  const auto before = inner::available_memory(device);
  REQUIRE(before.has_value() == device_memory_is_known);  // also before any allocation
  if (!before) return;
  CHECK(*before > 0);
  auto held = torch::zeros({1 << 20}, at::TensorOptions(device).dtype(at::kByte));
  const auto while_held = inner::available_memory(device);
  held.reset();
  CHECK(*while_held <= *before - (1 << 20));
  CHECK(*inner::available_memory(device) >= *while_held + (1 << 20));  // kept by LibTorch, and available
  inner::release_kept_memory(device);
  CHECK(*inner::available_memory(device) >= *while_held + (1 << 20));
}

TEST_CASE("FitMemory: on a device it stays within its budget", "[cuda]") {
  if (!torch::cuda::is_available()) SKIP("no CUDA device");
  const auto batches = batches_on_device({400, 400, 300});
  const std::int64_t budget = GENERATE(8, 24, 64) * 1024;
  std::optional<Workspaces> workspaces;  // like a GPU's libraries in the first micro-batch
  if (Workspaces::possible()) workspaces.emplace(ga::MiB);
  ga::FitMemory::Running memory({.budget = budget});
  Training training;
  for (auto& batch : batches) {
    const ga::MemoryMeter meter;
    training.update(memory, batch);
    const auto kept = meter.live_bytes(device);                               // workspaces and Adam's state
    if (workspaces && training.rows.size() == 1) CHECK(kept >= 2 * ga::MiB);  // of the loop's thread and of backward's
    CHECK(meter.peak_bytes(device) <= kept + budget);
  }
  CHECK(training.rows.back().size() > 1);
  CHECK(memory.plan().replays <= 1);
  CHECK(memory.plan().gradient_bytes <= 4096);  // four blocks of 512 bytes, and the loss
  CHECK(memory.plan().layouts.front().measured_bytes <= budget);
  CHECK(memory.plan().layouts.front().measured_bytes >= budget / 2);
  CHECK(same_bits(training.left(), by_hand(batches, training.rows)));
}

TEST_CASE("FitMemory: in a Trainer on a device, the unmeasured first run changes nothing", "[cuda]") {
  if (!torch::cuda::is_available()) SKIP("no CUDA device");
  const auto batches = batches_on_device({1, 16});  // the first is run and undone as a whole
  Training training;
  int runs = 0;
  std::int64_t samples = 0;
  ga::Trainer trainer(
      training.model, training.adam,
      [&](auto& net, auto& part) {
        ++runs;
        return loss_of(net, part);
      },
      ga::FitMemory{.budget = ga::GiB}, [&](const ga::Step& step) { samples += step.samples; });
  for (auto& batch : batches) {
    CHECK(trainer.step(batch));
    training.rows.push_back(trainer.policy<ga::FitMemory>().plan().last_rows);
  }
  CHECK(runs == 3);
  CHECK(samples == 17);
  CHECK(training.rows == std::vector<std::vector<std::int64_t>>{{1}, {16}});
  CHECK(same_bits(training.left(), by_hand(batches, training.rows)));
}

TEST_CASE("FitMemory: a device that runs out of memory for a whole batch trains with it", "[cuda]") {
  if (!LimitedMemory::possible()) SKIP("needs the emulated device, which can be made to run out of memory");
  const auto batches = batches_on_device({4000, 4000});
  ga::FitMemory::Running memory({});
  Training training;
  {
    const LimitedMemory limit(emulated_cuda::memory().bytes + 256 * 1024);
    for (auto& batch : batches) training.update(memory, batch);
  }
  CHECK(memory.plan().replays > 0);
  CHECK(training.rows.back().size() > 1);
  CHECK(same_bits(training.left(), by_hand(batches, training.rows)));
}

TEST_CASE("FitMemory: a failure at any allocation of a device is undone", "[cuda]") {
  if (!FailingAllocation::possible()) SKIP("needs the emulated device, which can be made to run out of memory");
  const auto batches = batches_on_device({16, 16});
  const std::size_t fails_in = GENERATE(0u, 1u);  // a device's libraries allocate workspaces in the first
  int failures = 0;
  for (std::int64_t at = 1;; ++at) {
    CAPTURE(fails_in, at);
    const Workspaces workspaces(ga::MiB);
    ga::FitMemory::Running memory({.budget = ga::GiB});
    Training training;
    std::int64_t made = 0;
    for (std::size_t i = 0; i < batches.size(); ++i) {
      const auto before = emulated_cuda::memory().allocations;
      {
        const FailingAllocation failing(i == fails_in ? at : 0);
        training.backward(memory, batches[i]);
      }
      if (i == fails_in) made = emulated_cuda::memory().allocations - before;
      training.step(memory);
    }
    REQUIRE(same_bits(training.left(), by_hand(batches, training.rows)));
    if (made < at) break;
    failures += memory.plan().replays > 0;
  }
  CHECK(failures > 15);
}
