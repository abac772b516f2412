// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/amp_scaler.hpp>
#include <gradaccum/autocast.hpp>
#include <gradaccum/checkpoint.hpp>
#include <gradaccum/grad_accumulator.hpp>
#include <gradaccum/optim/adam8bit.hpp>
#include <gradaccum/optim/adamw.hpp>
#include <gradaccum/optim/sgd.hpp>

#include "support/device.hpp"
#include "support/models.hpp"

#include <cstdint>
#include <string>
#include <vector>

// A device that runs out of memory at any allocation of a window leaves nothing half-changed: the window is discarded,
// run again, and the training is what it would have been.

namespace ga = gradaccum;
using namespace testing;

namespace {

/// Two windows of two micro-batches, in float16 with a loss scale, checkpointed and clipped.
template <class Optimizer>
struct Training {
  torch::nn::Sequential model = make_model(at::kFloat);
  std::unique_ptr<Optimizer> wrapped;
  std::unique_ptr<ga::GradAccumulator<Optimizer>> optimizer;
  ga::AmpScaler scaler{{.init_scale = 8}};
  std::vector<Example> data;

  Training() {
    model->to(at::kCUDA);
    for (auto& batch : make_batches({4, 4, 4, 4}, at::kFloat))
      data.emplace_back(batch.data.to(at::kCUDA), batch.target.to(at::kCUDA));
    wrapped = std::make_unique<Optimizer>(model->parameters(), 1e-2);
    optimizer = std::make_unique<ga::GradAccumulator<Optimizer>>(*wrapped, ga::GradAccumulatorOptions{.steps = 2});
  }

  void window(std::size_t from) {
    for (std::size_t i = from; i < from + 2; ++i) {
      const auto loss = [&] {
        ga::Autocast autocast(data[i].data.device(), at::kHalf);
        return torch::mse_loss(ga::checkpoint(model, data[i].data), data[i].target);
      }();
      scaler.scale(loss).backward();
      optimizer->clip_grad_norm_(0.5);
      scaler.step(*optimizer);
      scaler.update();
      optimizer->zero_grad();
    }
  }

  /// Whether the n-th allocation of the second window, and what was done about its failure, have come.
  bool second_window_without_allocation(std::int64_t n) {
    const auto updates = optimizer->updates();
    try {
      const FailingAllocation failing(n);
      window(2);
    } catch (const c10::OutOfMemoryError&) {
      if (optimizer->updates() > updates) return true;  // it came after the step
      optimizer->discard();
      scaler.update();
      window(2);
      return true;
    }
    return false;
  }

  at::Tensor parameters() const { return flat(model).cpu(); }
};

}  // namespace

TEMPLATE_TEST_CASE("device: out of memory at any allocation of a window, nothing is half-changed", "[cuda]",
                   ga::optim::SGD, ga::optim::AdamW, ga::optim::Adam8bit) {
  if (!FailingAllocation::possible()) SKIP("needs the emulated device, which can be made to run out of memory");
  Training<TestType> whole;
  whole.window(0);
  const auto first = whole.parameters();
  whole.window(2);
  CHECK_FALSE(at::equal(whole.parameters(), first));
  for (std::int64_t n = 1;; ++n) {
    Training<TestType> training;
    training.window(0);
    REQUIRE(at::equal(training.parameters(), first));
    const bool failed = training.second_window_without_allocation(n);
    INFO("allocation " << n);
    CHECK(training.optimizer->updates() == 2);
    CHECK(at::equal(training.parameters(), whole.parameters()));
    if (!failed) {
      CHECK(n > 20);
      break;
    }
  }
}
