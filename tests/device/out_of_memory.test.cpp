// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/amp_scaler.hpp>
#include <gradaccum/autocast.hpp>
#include <gradaccum/checkpoint.hpp>
#include <gradaccum/detail/kernels/device_kernels.hpp>
#include <gradaccum/grad_accumulator.hpp>
#include <gradaccum/memory_meter.hpp>
#include <gradaccum/optim/adafactor.hpp>
#include <gradaccum/optim/adam8bit.hpp>
#include <gradaccum/optim/adamw.hpp>
#include <gradaccum/optim/adamw8bit.hpp>
#include <gradaccum/optim/sgd.hpp>

#include "support/device.hpp"
#include "support/kernels_on_device.hpp"
#include "support/models.hpp"

#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

// A device that runs out of memory at any allocation of a window leaves nothing half-changed: the window is discarded
// and run again, and the training's results are the same.

namespace ga = gradaccum;
using namespace testing;

namespace {

constexpr std::int64_t some_under_sanitizers = testing::sanitized ? 3 : 1;

/// Two windows of two micro-batches, in float16 with a loss scale, checkpointed and clipped.
template <class Optimizer>
struct Training {
  torch::nn::Sequential model = make_model(at::kFloat);
  std::unique_ptr<Optimizer> wrapped;
  std::unique_ptr<ga::GradAccumulator<Optimizer>> optimizer;
  ga::AmpScaler scaler;
  std::vector<Example> data;

  explicit Training(bool scale_on_device) : scaler({.init_scale = 8, .on_device = scale_on_device}) {
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

  /// Runs the second window with a failure of the n-th allocation. Returns whether there was none.
  bool second_window_without_allocation(std::int64_t n) {
    const auto updates = optimizer->updates();
    try {
      const FailingAllocation failing(n);
      window(2);
    } catch (const c10::OutOfMemoryError&) {
      if (optimizer->updates() > updates) return true;  // the failure came after the step
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
                   ga::optim::SGD, ga::optim::AdamW, ga::optim::Adam8bit, ga::optim::Adafactor) {
  if (!FailingAllocation::possible()) SKIP("needs the emulated device, which can be made to run out of memory");
  if (!steps_on_devices<TestType>()) return;
  const bool scale_on_device = GENERATE(false, true);
  Training<TestType> whole(scale_on_device);
  whole.window(0);
  const auto first = whole.parameters();
  whole.window(2);
  CHECK_FALSE(at::equal(whole.parameters(), first));
  for (std::int64_t n = 1;; n += some_under_sanitizers) {
    Training<TestType> training(scale_on_device);
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

namespace {

/// Makes parameters that a device updates in parts: too large for one batch of copies, rounded, out of order, on
/// another device, and with few rows in a sparse gradient.
std::vector<at::Tensor> steppable(bool sparse) {
  const auto on = [](int device, at::ScalarType dtype) {
    return at::TensorOptions(at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(device))).dtype(dtype);
  };
  std::vector<at::Tensor> parameters{torch::linspace(-1, 1, (1 << 22) + 300, on(0, at::kFloat)),
                                     torch::linspace(-1, 1, 5000, on(0, at::kBFloat16)),
                                     torch::linspace(-1, 1, 6000, on(0, at::kFloat)).view({60, 100}).t(),
                                     torch::linspace(-1, 1, 4800, on(0, at::kFloat)).view({60, 80}).slice(1, 0, 70),
                                     torch::linspace(-1, 1, 5000, on(1, at::kFloat)).view({50, 100})};
  for (auto& parameter : parameters) {
    parameter.requires_grad_();
    parameter.mutable_grad() = torch::full_like(parameter, 0.01);
  }
  if (sparse) {
    const auto rows = torch::tensor({3, 7, 3}).unsqueeze(0).to(at::kCUDA);
    parameters.push_back(torch::ones({10, 4}, on(0, at::kFloat)).requires_grad_());
    parameters.back().mutable_grad() = at::_sparse_coo_tensor_unsafe(rows, torch::full({3, 4}, 0.01, on(0, at::kFloat)),
                                                                     {10, 4}, on(0, at::kFloat).layout(at::kSparse));
  }
  return parameters;
}

std::vector<at::Tensor> on_host(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> copies;
  for (auto& tensor : tensors) copies.push_back(tensor.detach().cpu().clone());
  return copies;
}

}  // namespace

TEMPLATE_TEST_CASE("device: an optimizer that runs out of memory at any allocation of a step has changed nothing",
                   "[cuda]", ga::optim::SGD, ga::optim::AdamW, ga::optim::Adam8bit, ga::optim::Adafactor) {
  if (!FailingAllocation::possible()) SKIP("needs the emulated device, which can be made to run out of memory");
  if (!steps_on_devices<TestType>()) return;
  constexpr bool sparse = std::is_same_v<TestType, ga::optim::SGD>;
  const auto step = [](TestType& optimizer, const std::vector<at::Tensor>& parameters) {
    ga::Gradients gradients(parameters);
    gradients.factor().multiply(0.5);
    gradients.factor().multiply(torch::full({}, 0.5, at::kCUDA));
    optimizer.step(gradients);
  };
  const auto parameters = steppable(sparse);
  TestType optimizer(parameters, 1e-2);
  optimizer.stochastic_rounding(1);
  step(optimizer, parameters);
  auto before = on_host(parameters);
  for (std::int64_t n = 1;; ++n) {
    INFO("allocation " << n);
    try {
      const FailingAllocation failing(n);
      step(optimizer, parameters);
    } catch (const c10::OutOfMemoryError&) {
      const auto now = on_host(parameters);
      for (std::size_t i = 0; i < now.size(); ++i) CHECK(at::equal(now[i], before[i]));
      continue;
    }
    CHECK(n > 3);
    break;
  }
  const auto others = steppable(sparse);
  TestType undisturbed(others, 1e-2);
  undisturbed.stochastic_rounding(1);
  for (int i = 0; i < 2; ++i) step(undisturbed, others);
  const auto now = on_host(parameters), expected = on_host(others);
  for (std::size_t i = 0; i < now.size(); ++i) {
    CHECK(at::equal(now[i], expected[i]));
    CHECK_FALSE(at::equal(now[i], before[i]));
  }
}

TEST_CASE("device: a step's temporary memory does not grow with the parameters", "[cuda]") {
  if (!torch::cuda::is_available()) SKIP("no CUDA device");
  constexpr std::int64_t elements = 1 << 24, batch = 16 * ga::MiB;
  constexpr auto little = 2 * ga::MiB;  // CUDA's caching allocator may give blocks that are 1 MiB larger
  const auto peak_of = [&]<class Optimizer>(std::type_identity<Optimizer>, at::ScalarType dtype) {
    const auto parameter = torch::zeros({elements / 1000, 1000}, at::TensorOptions(at::kCUDA).dtype(dtype));
    parameter.requires_grad_().mutable_grad() = torch::ones_like(parameter);
    Optimizer optimizer({parameter}, 1e-2);
    optimizer.stochastic_rounding(1);
    ga::Gradients gradients({parameter});
    gradients.factor().multiply(0.5);
    optimizer.step(gradients);  // creates the state
    const ga::MemoryMeter meter;
    optimizer.step(gradients);
    return meter.peak_bytes(parameter.device());
  };
  const auto rounded = 2 * batch + batch / 4;  // of a bfloat16 parameter: a copy, random bits, and a mask of NaN
  CHECK(peak_of(std::type_identity<ga::optim::SGD>(), at::kFloat) <= batch + little);
  CHECK(peak_of(std::type_identity<ga::optim::AdamW>(), at::kFloat) <= batch + little);
  CHECK(peak_of(std::type_identity<ga::optim::AdamW>(), at::kBFloat16) <= batch + rounded + little);
  if (!gradaccum::detail::device_kernels()) return;
  CHECK(peak_of(std::type_identity<ga::optim::AdamW8bit>(), at::kFloat) <= little);
  CHECK(peak_of(std::type_identity<ga::optim::Adafactor>(), at::kFloat) <= 2 * little);  // sums of rows and columns
}
