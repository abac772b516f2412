// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/detail/kernels/device/launch.hpp>
#include <gradaccum/detail/optimizers/steps.hpp>
#include <gradaccum/gradients.hpp>
#include <gradaccum/optim/adafactor.hpp>

#include "support/kernel_memory.hpp"
#include "support/kernel_types.hpp"
#include "support/kernels_on_device.hpp"
#include "support/leaves.hpp"

#include <array>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

// Adafactor's kernels of devices, on a GPU or on the host by the emulated device, compared to the CPU's: the formulas
// are the same for each element, but sums are in another order.

namespace ga = gradaccum;
namespace inner = gradaccum::detail;
using ga::optim::Adafactor;
using ga::optim::AdafactorOptions;
using ga::optim::AdafactorParamState;
using ga::optim::AdafactorVariant;
using namespace testing;

namespace {

const at::Device host(at::kCPU), device(at::kCUDA, 0);
constexpr double infinity = std::numeric_limits<double>::infinity();
constexpr std::uint64_t key = 0x123456789abcdef;

AdafactorOptions pytorch(double lr) {
  return AdafactorOptions(lr).variant(AdafactorVariant::pytorch).eps({1e-7, 1e-3});
}
const std::vector<AdafactorOptions> all_options{
    AdafactorOptions(),
    AdafactorOptions(0.1).relative_step(false).scale_parameter(false).beta1(0.9),
    AdafactorOptions().warmup_init(true).weight_decay(0.3),
    AdafactorOptions(0.05).relative_step(false).beta1(0.5).weight_decay(0.1).d(0.3).eps({0.5, 0.7}).beta2_decay(-0.5),
    pytorch(0.01),
    pytorch(0.3).weight_decay(0.1).d(2.0).beta1(0.8),
    pytorch(0.3).eps({0.9, 0.1}),
    AdafactorOptions(0.1).d(infinity).beta2_decay(0).scale_parameter(false)};

inner::AdafactorSettings settings_of(const AdafactorOptions& options, double step) {
  const auto [eps1, eps2] = options.eps();
  return inner::at_step({.lr = options.lr(),
                         .step_size = 0,
                         .fresh2 = 0,
                         .eps1 = eps1,
                         .eps2 = eps2,
                         .d = options.d(),
                         .weight_decay = options.weight_decay(),
                         .beta1 = options.beta1(),
                         .scale_parameter = options.scale_parameter(),
                         .pytorch = options.variant() == AdafactorVariant::pytorch,
                         .beta2_decay = options.beta2_decay(),
                         .relative_step = options.relative_step(),
                         .warmup_init = options.warmup_init()},
                        step);
}

/// Makes a step that shares no tensors with others.
inner::AdafactorStep step_of(const AdafactorOptions& options, const KernelTypes& types, const at::Tensor& gradient,
                             double step = 3) {
  const auto p = torch::randn(gradient.sizes()).to(types.parameter);
  AdafactorParamState state;
  state.prepare(p, options.beta1() != 0);
  for (auto& [name, tensor] : state.tensors())
    if (tensor->defined()) tensor->uniform_(0.1, 1);
  inner::AdafactorStep all{settings_of(options, step),
                           p,
                           gradient.to(types.gradient).clone(),
                           state.row_var(),
                           state.col_var(),
                           state.variance(),
                           state.exp_avg()};
  if (types.rounded) all.rounding_key = key;
  return all;
}

using Member = at::Tensor inner::AdafactorStep::*;
constexpr std::array<Member, 6> members{&inner::AdafactorStep::parameter, &inner::AdafactorStep::gradient,
                                        &inner::AdafactorStep::row_var,   &inner::AdafactorStep::col_var,
                                        &inner::AdafactorStep::variance,  &inner::AdafactorStep::exp_avg};

inner::AdafactorStep clone(inner::AdafactorStep step) {
  for (auto member : members)
    if ((step.*member).defined()) step.*member = (step.*member).clone();
  return step;
}

inner::AdafactorShape shape_of(const inner::AdafactorStep& step) {
  const auto& p = step.parameter;
  if (step.variance.defined()) return inner::AdafactorShape::of_vector(p.numel());
  return inner::AdafactorShape::of_matrices(p.numel(), p.size(-2), p.size(-1));
}

/// Launches only these tensors' steps, with NaNs in the memory that kernels pass to one another.
void launch(const std::vector<inner::AdafactorStep>& steps, const KernelTypes& types, const KernelMultiplier& by) {
  inner::AdafactorLaunch launch{steps.front().settings, by.pointers(), {}};
  std::vector<std::pair<at::Tensor, std::unique_ptr<KernelMemory>>> copies;
  const auto copied = [&](const at::Tensor& tensor) -> void* {
    if (!tensor.defined()) return nullptr;
    copies.emplace_back(tensor, std::make_unique<KernelMemory>(tensor, tensor.numel() % 2 == 1));
    return copies.back().second->data();
  };
  for (auto& step : steps) {
    const auto shape = shape_of(step);
    const auto bytes = inner::AdafactorMemory::bytes(shape, static_cast<std::int64_t>(at::elementSize(types.state())));
    launch.tensors.add({.parameter = copied(step.parameter),
                        .gradient = copied(step.gradient),
                        .row_var = copied(step.variance.defined() ? step.variance : step.row_var),
                        .col_var = copied(step.col_var),
                        .exp_avg = copied(step.exp_avg),
                        .memory = copied(torch::full({bytes}, 255, at::kByte)),
                        .shape = shape,
                        .rounding_key = key});
  }
  KernelsOnDevice::kernels().adafactor(launch, types.of_kernel(), KernelsOnDevice::stream());
  for (auto& [tensor, copy] : copies) tensor.copy_(copy->result());
}

/// Returns whether numbers differ only by the order of sums: in a few last bits, in 16 bits in the last.
bool close(const at::Tensor& a, const at::Tensor& b) {
  const auto dtype = a.scalar_type();
  const double tolerance = dtype == at::kDouble ? 1e-13 : dtype == at::kFloat ? 3e-6 : dtype == at::kHalf ? 1e-3 : 8e-3;
  return dtype == b.scalar_type() && a.sizes() == b.sizes() &&
         at::allclose(a.to(at::kDouble), b.to(at::kDouble), tolerance, tolerance / 10, /*equal_nan=*/true);
}
bool close(const inner::AdafactorStep& a, const inner::AdafactorStep& b) {
  bool all = true;
  for (auto member : members)
    if ((a.*member).defined()) all = all && close(a.*member, b.*member);
  return all;
}

bool same_bytes(const at::Tensor& a, const at::Tensor& b) {
  return a.contiguous().view(-1).view(at::kByte).equal(b.contiguous().view(-1).view(at::kByte));
}
bool same_bytes(const inner::AdafactorStep& a, const inner::AdafactorStep& b) {
  bool all = true;
  for (auto member : members)
    if ((a.*member).defined()) all = all && same_bytes(a.*member, b.*member);
  return all;
}

void check(const inner::AdafactorStep& step, const KernelTypes& types, double multiplier) {
  INFO("sizes " << step.parameter.sizes() << ", " << types.parameter << ", " << types.gradient << ", rounded "
                << types.rounded << ", pytorch " << step.settings.pytorch << ", exp_avg " << step.exp_avg.defined());
  const auto expected = clone(step), moved = clone(step);
  inner::step_on_cpu({expected}, multiplier);
  launch({moved}, types, multiplier);
  for (auto member : members)
    if ((step.*member).defined()) {
      INFO("member " << (member == members[0] ? "parameter" : "other") << ", off by "
                     << (moved.*member - expected.*member).abs().max().to(at::kDouble).item<double>());
      REQUIRE(close(moved.*member, expected.*member));
    }
  const auto average = step.variance.defined() ? members[4] : members[3];
  REQUIRE_FALSE(same_bytes(moved.*average, step.*average));
  if (types.parameter == at::kDouble) REQUIRE_FALSE(same_bytes(moved.parameter, step.parameter));
}

const std::vector<std::vector<std::int64_t>> matrix_shapes{
    {1, 1},       {1, 2},        {2, 1},         {3, 5},       {8, 8},      {5, 13},      {13, 5},   {9, 33},
    {1, 300},     {300, 1},      {63, 4},        {64, 4},      {65, 4},     {31, 32},     {33, 32},  {64, 255},
    {64, 256},    {65, 257},     {129, 515},     {300, 700},   {40, 9000},  {5000, 3},    {513, 30}, {1100, 70},
    {6, 5, 3, 3}, {64, 9, 7, 7}, {2, 3, 40, 50}, {5, 513, 33}, {300, 1, 3}, {2, 260, 260}};

}  // namespace

TEST_CASE("Adafactor's kernels of devices: vectors of all sizes and types match the processor's", "[cuda]") {
  if (!KernelsOnDevice::possible()) SKIP(KernelsOnDevice::missing);
  torch::manual_seed(3);
  std::size_t turn = 0;
  for (auto& types : all_kernel_types) {
    for (std::int64_t n = 1; n <= 3000; n += n < 40 ? 1 : n < 1100 ? 53 : 379)
      check(step_of(all_options[turn++ % all_options.size()], types, torch::randn({n}, at::kDouble)), types, 0.25);
    for (auto& options : all_options) check(step_of(options, types, torch::randn({40001}, at::kDouble)), types, 1.0);
    check(step_of(all_options[0], types, torch::randn({}, at::kDouble)), types, 2.0);
    const AdafactorOptions without_eps = AdafactorOptions().eps({0, 1e-3});  // elements beyond the end may be 0 / 0
    check(step_of(without_eps, types, torch::randn({701}, at::kDouble), 1), types, 1.0);
    check(step_of(without_eps, types, torch::randn({70, 301}, at::kDouble), 1), types, 1.0);
  }
}

TEST_CASE("Adafactor's kernels of devices: matrices of all shapes and types match the processor's", "[cuda]") {
  if (!KernelsOnDevice::possible()) SKIP(KernelsOnDevice::missing);
  torch::manual_seed(4);
  std::size_t turn = 0;
  for (auto& types : all_kernel_types)
    for (auto& shape : matrix_shapes) {
      const auto gradient = torch::randn(shape, at::kDouble);
      check(step_of(all_options[turn % all_options.size()], types, gradient), types, turn % 2 ? 1.0 : 0.25);
      ++turn;
    }
}

TEST_CASE("Adafactor's kernels of devices: all settings from the first step on", "[cuda]") {
  if (!KernelsOnDevice::possible()) SKIP(KernelsOnDevice::missing);
  torch::manual_seed(5);
  const std::vector<std::vector<std::int64_t>> shapes{{700}, {70, 300}, {300, 3, 3}};
  for (auto& types : {all_kernel_types[0], all_kernel_types[1], all_kernel_types[4], all_kernel_types[7]})
    for (auto& options : all_options)
      for (auto& shape : shapes) {
        const auto kernels = step_of(options, types, torch::randn(shape, at::kDouble), 1);
        for (auto member : {members[2], members[3], members[4], members[5]})
          if ((kernels.*member).defined()) (kernels.*member).zero_();
        auto step = clone(kernels), expected = clone(kernels);
        for (int i = 1; i <= 4; ++i) {
          step.settings = expected.settings = settings_of(options, i);
          step.gradient.copy_(expected.gradient.normal_());
          inner::step_on_cpu({expected}, 0.5);
          launch({step}, types, {1, 2});
          CAPTURE(shape, i);
          REQUIRE(close_to_rounding(step.parameter, expected.parameter));
        }
      }
}

TEST_CASE("Adafactor's kernels of devices: special numbers give the processor's results", "[cuda]") {
  if (!KernelsOnDevice::possible()) SKIP(KernelsOnDevice::missing);
  torch::manual_seed(6);
  const std::vector<std::vector<std::int64_t>> shapes{{701}, {70, 301}, {30, 3, 3}};
  for (auto& types : all_kernel_types)
    for (double odd : {infinity, -infinity, std::nan(""), 1e-40, 1e-44, 0.0, -0.0, 1e30, 6e4})
      for (auto& shape : shapes)
        for (bool everywhere : {false, true}) {
          auto gradient = torch::randn(shape, at::kDouble);
          everywhere ? gradient.fill_(odd) : gradient.view(-1)[100].fill_(odd);
          for (auto& options : {all_options[0], all_options[3], all_options[5]}) {
            const auto step = step_of(options, types, gradient, everywhere ? 1 : 3);  // 1: averages may become 0
            const auto expected = clone(step);
            inner::step_on_cpu({expected}, 1);
            launch({step}, types, {});
            CAPTURE(shape, odd, everywhere, types.parameter, types.gradient);
            REQUIRE(close(step, expected));
          }
        }
}

TEST_CASE("Adafactor's kernels of devices: a factor, an overflow and skipped steps that only the device knows",
          "[cuda]") {
  if (!KernelsOnDevice::possible()) SKIP(KernelsOnDevice::missing);
  torch::manual_seed(7);
  const auto none = std::nullopt;
  for (auto& types : {all_kernel_types[1], all_kernel_types[6]})
    for (auto& options : {all_options[0], all_options[2], all_options[3], all_options[5]})
      for (auto& shape : {std::vector<std::int64_t>{700}, {70, 300}, {30, 3, 3}}) {
        const auto start = step_of(options, types, torch::randn(shape, at::kDouble), 7);
        const auto taken = [&](const KernelMultiplier& by) {
          const auto step = clone(start);
          launch({step}, types, by);
          return step;
        };
        const auto expected = [&](double multiplier, double step) {
          auto other = clone(start);
          other.settings = settings_of(options, step);
          inner::step_on_cpu({other}, multiplier);
          return other;
        };
        CHECK(close(taken({2, 5, 0.3, 7.0}), expected(2 * 0.3 / (5 * 7.0), 7)));
        CHECK(close(taken({2, 5, none, none, 0.0f}), expected(0.4, 7)));
        CHECK(same_bytes(taken({2, 5, none, none, 1.0f}), start));
        CHECK(same_bytes(taken({2, 5, none, none, 1.0f, 4.0f}), start));
        CHECK(close(taken({2, 5, none, none, 0.0f, 4.0f}), expected(0.4, 3)));
        CHECK(close(taken({2, 5, none, none, 0.0f, 100.0f}), expected(0.4, 1)));
        CHECK_FALSE(close(taken({2, 5, none, none, 0.0f, 4.0f}), expected(0.4, 7)));
      }
}

TEST_CASE("Adafactor's kernels of devices: a tensor's bits do not depend on other tensors in the step", "[cuda]") {
  if (!KernelsOnDevice::possible()) SKIP(KernelsOnDevice::missing);
  torch::manual_seed(8);
  const auto& types = all_kernel_types[1];
  std::vector<inner::AdafactorStep> together, alone;
  for (auto& shape : matrix_shapes) together.push_back(step_of(all_options[1], types, torch::randn(shape)));
  together.push_back(step_of(all_options[1], types, torch::randn({33000})));
  for (auto& step : together) alone.push_back(clone(step));
  REQUIRE(together.size() <= inner::AdafactorTable::capacity);
  launch(together, types, {});
  for (auto& step : alone) launch({step}, types, {});
  for (std::size_t i = 0; i < alone.size(); ++i) CHECK(same_bytes(together[i], alone[i]));
}

namespace {

/// Makes parameters of many shapes, dtypes and strides, with gradients.
Parameters many_parameters(std::size_t count, at::Device where) {
  const std::array dtypes{at::kFloat, at::kBFloat16, at::kHalf, at::kDouble, at::kFloat};
  const std::vector<std::vector<std::int64_t>> shapes{{7}, {20, 30}, {6, 5, 3, 3}, {0, 3}, {}, {3, 4, 9, 10}, {300}};
  Parameters all;
  torch::manual_seed(11);
  for (std::size_t i = 0; i < count; ++i) {
    const auto dtype = dtypes[i % dtypes.size()];
    const auto numbers = torch::randn(shapes[i % shapes.size()]).to(dtype).to(where),
               grad = torch::randn(shapes[i % shapes.size()]).to(dtype);
    auto parameter = numbers.dim() == 4 && i % 3 == 0 ? numbers.to(at::MemoryFormat::ChannelsLast)
                     : numbers.dim() == 2 && i % 2    ? numbers.t().contiguous().t()
                                                      : numbers;
    if (i % 11 == 6) parameter = torch::stack({numbers, numbers}, -1).select(-1, 0);
    parameter.requires_grad_();
    parameter.mutable_grad() = grad.to(where);
    all.push_back(parameter);
  }
  return all;
}

/// Makes three updates of two groups, with scaling and clipping.
Parameters updated(std::size_t count, at::Device where) {
  const auto parameters = many_parameters(count, where);
  const auto half = parameters.begin() + static_cast<std::ptrdiff_t>(count / 2);
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(Parameters(parameters.begin(), half));
  groups.emplace_back(Parameters(half, parameters.end()));
  groups[0].set_options(std::make_unique<AdafactorOptions>(all_options[3]));
  groups[1].set_options(std::make_unique<AdafactorOptions>(all_options[4]));
  Adafactor optimizer(groups);
  optimizer.stochastic_rounding(1);
  for (int i = 0; i < 3; ++i) {
    ga::Gradients gradients(parameters);
    gradients.factor().divide(8.0);
    gradients.factor().require_finite();
    ga::clip_grad_norm_(gradients, 1.0);
    optimizer.step(gradients);
  }
  Parameters results;
  for (auto& parameter : parameters) results.push_back(parameter.detach().cpu());
  return results;
}

bool all_close(const Parameters& a, const Parameters& b) {
  bool all = a.size() == b.size();
  for (std::size_t i = 0; all && i < a.size(); ++i) all = close_to_rounding(a[i], b[i]);
  return all;
}

}  // namespace

TEST_CASE("Adafactor's kernels of devices: any number of tensors, of any dtypes and strides, match the processor's",
          "[cuda]") {
  if (!KernelsOnDevice::possible()) SKIP(KernelsOnDevice::missing);
  const KernelsOnDevice kernels;
  for (std::size_t count : {2, 3, 200, 900}) {  // a launch has up to 320 of a dtype
    CAPTURE(count);
    CHECK(all_close(updated(count, device), updated(count, host)));
  }
}

TEST_CASE("Adafactor's kernels of devices: one launch for each mix of dtypes and 320 tensors, no copy, and no wait",
          "[cuda]") {
  if (!emulated_cuda::is_loaded()) SKIP(KernelsOnDevice::only_emulated);
  const auto launches_of_step = [](Adafactor& optimizer) {
    emulated_cuda::reset_counts();
    optimizer.step();
    return emulated_cuda::counts();
  };
  const auto parameters = [](std::vector<std::int64_t> sizes) {
    Parameters all;
    for (int i = 0; i < 1000; ++i) {
      all.push_back(torch::randn(sizes, device).to(i % 2 ? at::kBFloat16 : at::kFloat).requires_grad_());
      all.back().mutable_grad() = torch::randn(sizes, device).to(all.back().scalar_type());
    }
    return all;
  };
  Adafactor vectors(parameters({50})), matrices(parameters({20, 20})), small(parameters({9, 3, 3}));
  const KernelsOnDevice kernels;
  for (auto* const optimizer : {&vectors, &matrices, &small}) launches_of_step(*optimizer);
  for (auto* const optimizer : {&vectors, &matrices, &small}) {
    const auto counts = launches_of_step(*optimizer);
    CHECK(counts.launches == 4 * (optimizer == &matrices ? 5 : 3));
    CHECK(counts.waits == 0);
    CHECK(counts.copies_to_device == 0);
  }
}

TEST_CASE("Adafactor's kernels of devices: they run out of memory before any update, and need little", "[cuda]") {
  if (!emulated_cuda::is_loaded()) SKIP("only the emulated device fails an allocation that is asked to");
  const KernelsOnDevice kernels;
  const auto parameters = many_parameters(40, device);
  Adafactor optimizer(parameters, all_options[5]);
  optimizer.step();
  const auto on_host = [&] {
    Parameters copies;
    for (auto& parameter : parameters) copies.push_back(parameter.detach().cpu());
    return copies;
  };
  const auto before = on_host();
  std::int64_t failures = 0;
  for (bool failed = true; failed;) {
    emulated_cuda::fail_allocation(failures + 1);
    try {
      optimizer.step();
      failed = false;
    } catch (const c10::OutOfMemoryError&) {
      ++failures;
      const auto now = on_host();
      for (std::size_t i = 0; i < now.size(); ++i) REQUIRE(same_bytes(now[i], before[i]));
    }
    emulated_cuda::fail_allocation(0);
  }
  CHECK(failures > 0);
  const auto& shape = inner::AdafactorShape::of_matrices(4096 * 4096, 4096, 4096);
  CHECK(inner::AdafactorMemory::bytes(shape, 4) < 4 * 4096 * 4096 / 50);
}

TEST_CASE("Adafactor's kernels of devices: a trained model matches the processor's", "[cuda]") {
  if (!KernelsOnDevice::possible()) SKIP(KernelsOnDevice::missing);
  const KernelsOnDevice kernels;
  const auto trained = [](at::Device where) {
    torch::manual_seed(12);
    torch::nn::Sequential model(torch::nn::Linear(4, 80), torch::nn::Tanh(), torch::nn::Linear(80, 3));
    const auto x = torch::randn({16, 4}, at::kDouble).to(where), y = torch::randn({16, 3}, at::kDouble).to(where);
    model->to(at::kDouble);
    model->to(where);
    Adafactor optimizer(model->parameters(), AdafactorOptions(0.05));
    const auto loss = [&] { return torch::mse_loss(model->forward(x), y); };
    const auto first = loss().item<double>();
    for (int i = 0; i < 30; ++i) {
      optimizer.zero_grad();
      loss().backward();
      optimizer.step();
    }
    CHECK(loss().item<double>() < 0.5 * first);
    Parameters all;
    for (auto& parameter : model->parameters()) all.push_back(parameter.detach().flatten().cpu());
    return torch::cat(all);
  };
  CHECK(torch::allclose(trained(device), trained(host), 1e-9, 1e-10));
}
