// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/detail/window/window_gradients.hpp>
#include <gradaccum/gradaccum.hpp>

#include "support/emulated_cuda/emulated_cuda.hpp"
#include "support/files.hpp"
#include "support/kernels_on_device.hpp"

#include <cstdint>
#include <functional>
#include <map>
#include <regex>
#include <sstream>
#include <string>
#include <vector>

// Checks the table of docs/optimizers.md that counts a step's operations and memory on a device.

namespace ga = gradaccum;
using namespace testing;

namespace {

const at::Device device(at::kCUDA, 0);

std::vector<at::Tensor> parameters_of(std::size_t count, at::ScalarType dtype) {
  std::vector<at::Tensor> parameters;
  for (std::size_t i = 0; i < count; ++i) {
    parameters.push_back(torch::ones({100, 50}, device).to(dtype).requires_grad_());
    parameters.back().mutable_grad() = torch::ones({100, 50}, device).to(dtype);
  }
  return parameters;
}

/// Counts operations on the device, in a second step.
std::int64_t launches_of(const std::function<void()>& step) {
  step();
  emulated_cuda::reset_counts();
  step();
  return emulated_cuda::counts().launches;
}

/// Counts the launches of a step with a factor that the host knows.
template <class Optimizer, class Options>
std::int64_t launches_of_step(std::size_t count, at::ScalarType dtype, Options options, bool rounded) {
  const auto parameters = parameters_of(count, dtype);
  Optimizer optimizer(parameters, options);
  if (rounded) optimizer.stochastic_rounding(1);
  return launches_of([&] {
    ga::Gradients gradients(parameters);
    gradients.factor().multiply(0.5);
    optimizer.step(gradients);
  });
}

std::int64_t launches_of_norms(std::size_t count, at::ScalarType) {
  std::vector<at::Tensor> gradients;
  for (auto& parameter : parameters_of(count, at::kFloat)) gradients.push_back(parameter.grad());
  return launches_of([&] { ga::detail::norms(gradients, 2); });
}

struct Row {
  at::ScalarType dtype = at::kFloat;
  std::function<std::int64_t(std::size_t count, at::ScalarType dtype)> launches = {};
  bool is_in_aten = true;
};

template <class Optimizer, class Options>
Row row(Options options, at::ScalarType dtype = at::kFloat, bool rounded = false) {
  return {
      dtype,
      [=](std::size_t count, at::ScalarType of) { return launches_of_step<Optimizer>(count, of, options, rounded); },
      !needs_kernels<Optimizer>};
}

const std::map<std::string, Row> rows{
    {"`SGD` with momentum", row<ga::optim::SGD>(ga::optim::SGDOptions(0.1).momentum(0.9))},
    {"`Adam`, `AdamW`", row<ga::optim::AdamW>(ga::optim::AdamWOptions(0.1))},
    {"the same, bfloat16 parameters and gradients", row<ga::optim::AdamW>(ga::optim::AdamWOptions(0.1), at::kBFloat16)},
    {"the same, rounded stochastically", row<ga::optim::AdamW>(ga::optim::AdamWOptions(0.1), at::kBFloat16, true)},
    {"`Adam8bit`, `AdamW8bit`", row<ga::optim::AdamW8bit>(ga::optim::AdamW8bitOptions(0.1))},
    {"`Adafactor`, matrices", row<ga::optim::Adafactor>(ga::optim::AdafactorOptions(0.1))},
    {"norms", {at::kFloat, launches_of_norms}}};

}  // namespace

TEST_CASE("docs/optimizers.md counts the operations and memory of a step on a device", "[cuda]") {
  if (!emulated_cuda::is_loaded()) SKIP(KernelsOnDevice::only_emulated);
  const auto text = text_of(DOCS "/optimizers.md");
  for (auto& named : rows) {
    const auto& name = named.first;
    const auto& counted = named.second;
    CAPTURE(name);
    const auto line_begin = text.find("\n| " + name + " |");
    REQUIRE(line_begin != std::string::npos);
    std::vector<std::string> cells;
    std::istringstream line(text.substr(line_begin + 1, text.find('\n', line_begin + 1) - line_begin - 1));
    for (std::string cell; std::getline(line, cell, '|');) cells.push_back(cell);
    REQUIRE(cells.size() == 7);  // empty, name, bytes, bytes of ATen, launches, operations of ATen, bound
    CHECK((cells[5] == " ") != counted.is_in_aten);
    if (counted.is_in_aten) {
      const KernelsOnDevice none(nullptr);
      CHECK(std::stoi(cells[5]) == counted.launches(1, counted.dtype));
    }
    const KernelsOnDevice kernels;
    CHECK(std::stoi(cells[4]) == counted.launches(293, counted.dtype));
    CHECK(std::stod(cells[6]) == Approx(559.2e6 * std::stod(cells[2]) / 4.8e12 * 1e3).epsilon(0.005));
  }
}
