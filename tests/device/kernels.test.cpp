// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/detail/kernels/kernels.hpp>
#include <gradaccum/detail/optimizers/adam8bit_step.hpp>
#include <gradaccum/detail/optimizers/adam_step.hpp>
#include <gradaccum/detail/optimizers/batches.hpp>
#include <gradaccum/detail/optimizers/kernel_moves.hpp>
#include <gradaccum/detail/optimizers/sgd_step.hpp>
#include <gradaccum/detail/window/tensor_lists.hpp>
#include <gradaccum/gradaccum.hpp>

#include "support/device.hpp"
#include "support/guarded_memory.hpp"
#include "support/kernel_types.hpp"
#include "support/kernels_on_device.hpp"
#include "support/models.hpp"
#include "support/take_on_device.hpp"
#include "support/warnings.hpp"

#include <array>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <vector>

// The kernels of devices, from the source that a CUDA compiler compiles, run on the host: they are the kernels of the
// processor, to the bit where it multiplies and adds in one instruction.

namespace ga = gradaccum;
namespace inner = gradaccum::detail;
using namespace testing;

namespace {

const at::Device host(at::kCPU), device(at::kCUDA, 0), other_device(at::kCUDA, 1);

/// The portable kernels multiply and add in two steps.
bool has_fused_multiply_add() { return inner::instruction_set() != inner::InstructionSet::portable; }

/// The same bits, but of NaN.
bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  const auto dtype = a.element_size() == 8   ? at::kLong
                     : a.element_size() == 4 ? at::kInt
                     : a.element_size() == 2 ? at::kShort
                                             : at::kByte;
  const auto same = a.view(dtype).eq(b.view(dtype));
  return (a.is_floating_point() ? same.logical_or(a.isnan().logical_and(b.isnan())) : same).all().item<bool>();
}

bool agree(const at::Tensor& kernel, const at::Tensor& processor) {
  if (kernel.dtype() != processor.dtype() || kernel.sizes() != processor.sizes()) return false;
  if (has_fused_multiply_add()) return same_bits(kernel, processor);
  return inner::are_close({inner::trial_result(kernel)}, {inner::trial_result(processor)});
}

/// Tensors of one step: parameter, gradient and state.
using Arrays = std::vector<at::Tensor>;

/// Copies between pages that cannot be touched, at any offset.
class Guarded {
 public:
  explicit Guarded(const Arrays& arrays) {
    for (std::size_t i = 0; i < arrays.size(); ++i)
      copies_.push_back(arrays[i].defined() ? std::make_unique<GuardedMemory>(arrays[i], i % 2 == 1) : nullptr);
  }
  std::array<void*, 6> pointers() const {
    std::array<void*, 6> all{};
    for (std::size_t i = 0; i < copies_.size(); ++i) all[i] = copies_[i] ? copies_[i]->data() : nullptr;
    return all;
  }
  const at::Tensor& operator[](std::size_t i) const { return copies_[i]->tensor(); }

 private:
  std::vector<std::unique_ptr<GuardedMemory>> copies_;
};

Arrays clones(const Arrays& arrays) {
  Arrays all;
  for (auto& array : arrays) all.push_back(array.defined() ? array.clone() : array);
  return all;
}

void* data(const at::Tensor& tensor) { return tensor.defined() ? tensor.mutable_data_ptr() : nullptr; }

constexpr std::uint64_t key = 0x123456789abcdef;

void take_on_processor(const inner::SgdSettings& by, double multiplier, const KernelTypes& types, const Arrays& of) {
  const inner::SgdOperand operand{inner::numbers_of(by, multiplier), data(of[0]), data(of[1]), data(of[2]), key};
  inner::sgd_kernel(types.parameter, types.gradient, inner::instruction_set(), types.rounded)(operand, 0,
                                                                                              of[0].numel());
}
void take_on_processor(const inner::AdamSettings& by, double multiplier, const KernelTypes& types, const Arrays& of) {
  const inner::AdamOperand operand{
      inner::numbers_of(by, multiplier), data(of[0]), data(of[1]), data(of[2]), data(of[3]), data(of[4]), key};
  inner::adam_kernel(types.parameter, types.gradient, inner::instruction_set(), types.rounded)(operand, 0,
                                                                                               of[0].numel());
}

void take_on_processor(const inner::Adam8bitSettings& by, double multiplier, const KernelTypes& types,
                       const Arrays& of) {
  const inner::Adam8bitOperand operand{inner::numbers_of(by.adam, multiplier),
                                       data(of[0]),
                                       data(of[1]),
                                       static_cast<std::uint8_t*>(data(of[2])),
                                       static_cast<std::uint8_t*>(data(of[3])),
                                       static_cast<float*>(data(of[4])),
                                       static_cast<float*>(data(of[5])),
                                       key};
  inner::adam8bit_kernel(types.parameter, types.gradient, inner::instruction_set(), types.rounded)(operand, 0,
                                                                                                   of[0].numel());
}

auto kernel_for(const inner::SgdSettings&) { return emulated_cuda::kernels().sgd; }
auto kernel_for(const inner::AdamSettings&) { return emulated_cuda::kernels().adam; }
auto kernel_for(const inner::Adam8bitSettings&) { return emulated_cuda::kernels().adam8bit; }

template <class Settings>
inner::StepLaunch<Settings> launch_of(const Settings& settings, double multiplier) {
  return {settings, {.numerator = multiplier}};
}

template <class Settings>
void check(const Settings& settings, double multiplier, const KernelTypes& types, const Arrays& arrays) {
  const auto expected = clones(arrays);
  const Guarded guarded(arrays);
  take_on_processor(settings, multiplier, types, expected);
  auto launch = launch_of(settings, multiplier);
  launch.tensors.add(guarded.pointers(), 0, arrays[0].numel(), key);
  kernel_for(settings)(launch, types.of_kernel(), nullptr);
  for (std::size_t i = 0; i < arrays.size(); ++i) {
    INFO("array " << i << " of " << types.parameter << ", " << types.gradient << ", rounded " << types.rounded
                  << ", elements " << arrays[0].numel());
    if (arrays[i].defined()) REQUIRE(agree(guarded[i], expected[i]));
  }
}

const std::vector<inner::SgdSettings> sgd_settings{{0.1, 0, 0, 0, false, false},
                                                   {0.1, 0, 0, 0.01, false, false},
                                                   {0.1, 0.9, 0, 0, false, true},
                                                   {0.1, 0.9, 0.3, 0.01, false, false},
                                                   {0.1, 0.9, 0, 0.01, true, false}};
const std::vector<inner::AdamSettings> adam_settings{{1e-2, 0.9, 0.999, 1e-8, 0, false, true, 1},
                                                     {1e-2, 0.9, 0.99, 1e-6, 0.1, false, true, 7},
                                                     {1e-2, 0.8, 0.99, 1e-6, 0.1, true, true, 3},
                                                     {1e-2, 0.9, 0.999, 1e-8, 0.1, false, false, 2},
                                                     {0.5, 0.0, 0.0, 1e-3, 0.1, true, false, 2}};

Arrays arrays_of(const inner::SgdSettings& by, const KernelTypes& types, const at::Tensor& gradient) {
  const auto n = gradient.numel();
  return {torch::randn({n}).to(types.parameter), gradient.to(types.gradient),
          by.momentum != 0 ? torch::randn({n}, types.state()) : at::Tensor()};
}
Arrays arrays_of(const inner::AdamSettings& by, const KernelTypes& types, const at::Tensor& gradient) {
  const auto n = gradient.numel();
  return {torch::randn({n}).to(types.parameter), gradient.to(types.gradient), torch::randn({n}, types.state()) * 0.1,
          torch::rand({n}, types.state()) + 0.01, by.amsgrad ? torch::rand({n}, types.state()) + 0.01 : at::Tensor()};
}

const std::vector<inner::Adam8bitSettings> adam8bit_settings = [] {
  std::vector<inner::Adam8bitSettings> all;
  for (auto& settings : adam_settings)
    if (!settings.amsgrad) all.push_back({settings, {inner::signed_map(), inner::second_moment_map()}});
  return all;
}();
Arrays arrays_of(const inner::Adam8bitSettings&, const KernelTypes& types, const at::Tensor& gradient) {
  const auto n = gradient.numel();
  const auto m = inner::encoded(torch::randn({n}) * 0.1, true), v = inner::encoded(torch::rand({n}) + 0.01, false);
  return {torch::randn({n}).to(types.parameter), gradient.to(types.gradient), m.codes, v.codes, m.scales, v.scales};
}

template <class Settings>
void check_sizes(const std::vector<Settings>& all) {
  torch::manual_seed(3);
  std::size_t turn = 0;
  const auto next = [&]() -> const Settings& { return all[turn++ % all.size()]; };
  for (auto& types : all_kernel_types) {
    if (std::is_same_v<Settings, inner::Adam8bitSettings> && types.parameter == at::kDouble) continue;
    for (std::int64_t n = 0; n <= 3000; n += n < 40 ? 1 : n < 1100 ? 53 : 379) {
      const auto& settings = next();
      check(settings, n % 3 == 0 ? 1.0 : 0.25, types, arrays_of(settings, types, torch::randn({n}, at::kDouble)));
    }
    for (auto& settings : all)  // more than one block of threads
      check(settings, 0.5, types,
            arrays_of(settings, types, torch::randn({2 * inner::elements_of_block + 5}, at::kDouble)));
  }
}

template <class Settings>
void check_odd_numbers(const std::vector<Settings>& all) {
  torch::manual_seed(3);
  const double infinity = std::numeric_limits<double>::infinity();
  for (auto& types : all_kernel_types) {
    if (std::is_same_v<Settings, inner::Adam8bitSettings> && types.parameter == at::kDouble) continue;
    for (double odd : {infinity, -infinity, std::nan(""), 1e-40, 1e-44, 0.0, -0.0, 1e30, 6e4}) {
      auto gradient = torch::randn({150}, at::kDouble);
      for (int place : {0, 17, 63, 64, 100, 149}) gradient[place] = odd;
      for (auto& settings : all) check(settings, 1.0, types, arrays_of(settings, types, gradient));
    }
  }
}

}  // namespace

TEST_CASE("kernels of devices: SGD of all sizes, types and settings, to the processor's bits", "[cuda]") {
  if (!KernelsOnDevice::possible()) SKIP("needs the emulated device");
  check_sizes(sgd_settings);
  check_odd_numbers(sgd_settings);
}

TEST_CASE("kernels of devices: Adam of all sizes, types and settings, to the processor's bits", "[cuda]") {
  if (!KernelsOnDevice::possible()) SKIP("needs the emulated device");
  check_sizes(adam_settings);
  check_odd_numbers(adam_settings);
}

TEST_CASE("kernels of devices: Adam8bit of all sizes, types and settings, to the processor's bits", "[cuda]") {
  if (!KernelsOnDevice::possible()) SKIP("needs the emulated device");
  check_sizes(adam8bit_settings);
  check_odd_numbers(adam8bit_settings);
}

namespace {

/// Parameters of many sizes and dtypes, some of which lie in memory otherwise; with gradients.
std::vector<at::Tensor> many_parameters(std::size_t count, at::Device where) {
  const std::array dtypes{at::kFloat, at::kBFloat16, at::kHalf, at::kDouble, at::kFloat};
  std::vector<at::Tensor> all;
  torch::manual_seed(11);
  for (std::size_t i = 0; i < count; ++i) {
    const auto dtype = dtypes[i % dtypes.size()];
    const auto n = static_cast<std::int64_t>(i % 7 == 3 ? 0 : 1 + i * i % 61);
    const auto numbers = torch::randn({n, 3, 2, 2}).to(dtype).to(where), grad = torch::randn({n, 3, 2, 2}).to(dtype);
    auto parameter = i % 5 == 4 ? numbers.to(at::MemoryFormat::ChannelsLast) : numbers;
    if (i % 11 == 5) parameter = torch::zeros({n, 3, 2, 4}).to(dtype).to(where).slice(3, 0, 4, 2).copy_(parameter);
    parameter.requires_grad_();
    parameter.mutable_grad() = grad.to(where);
    all.push_back(parameter);
  }
  return all;
}

/// Windows' factors and all: three updates.
template <class Optimizer>
std::vector<at::Tensor> updated(std::size_t count, at::Device where) {
  auto parameters = many_parameters(count, where);
  Optimizer optimizer(parameters, 0.1);
  optimizer.stochastic_rounding(1);
  for (int i = 0; i < 3; ++i) optimizer.step();
  for (auto& parameter : parameters) parameter = parameter.detach().cpu();
  return parameters;
}

bool all_agree(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  bool agreed = a.size() == b.size();
  for (std::size_t i = 0; agreed && i < a.size(); ++i) agreed = agree(a[i].contiguous(), b[i].contiguous());
  return agreed;
}

}  // namespace

TEMPLATE_TEST_CASE("kernels of devices: any number of tensors, of any dtypes, as on the processor", "[cuda]",
                   ga::optim::SGD, ga::optim::Adam, ga::optim::AdamW, ga::optim::Adam8bit, ga::optim::AdamW8bit) {
  if (!KernelsOnDevice::possible()) SKIP("needs the emulated device");
  const auto by_aten = updated<TestType>(60, device);
  const KernelsOnDevice kernels;
  for (std::size_t count : {1, 2, 33, 34, 35, 200, 1000}) {
    CAPTURE(count);
    CHECK(all_agree(updated<TestType>(count, device), updated<TestType>(count, host)));
  }
  CHECK_FALSE(all_agree(updated<TestType>(60, host), by_aten));  // which has other last bits
}

TEST_CASE("kernels of devices: a step is a launch for each mix of dtypes and 34 tensors, and no copy", "[cuda]") {
  if (!KernelsOnDevice::possible()) SKIP("needs the emulated device");
  std::vector<at::Tensor> parameters;
  for (int i = 0; i < 100; ++i) {
    parameters.push_back(torch::randn({50}, device).to(i % 2 ? at::kBFloat16 : at::kFloat).requires_grad_());
    parameters.back().mutable_grad() = torch::randn({50}, device).to(parameters.back().scalar_type());
  }
  ga::optim::AdamW optimizer(parameters, 0.1);
  const auto launches_of_step = [&] {
    emulated_cuda::reset_counts();
    optimizer.step();
    return emulated_cuda::counts();
  };
  launches_of_step();
  CHECK(launches_of_step().launches > 100);  // ATen's, which copy what has 16 bits
  const KernelsOnDevice kernels;
  launches_of_step();  // proves them
  const auto counts = launches_of_step();
  CHECK(counts.launches == 4);
  CHECK(counts.waits == 0);
  CHECK(counts.copies_to_device == 0);
}

TEST_CASE("kernels of devices: a factor, an overflow and left out steps that the device alone knows", "[cuda]") {
  if (!KernelsOnDevice::possible()) SKIP("needs the emulated device");
  torch::manual_seed(5);
  const KernelTypes types{at::kFloat, at::kFloat};
  auto settings = adam_settings[1];
  const auto start = arrays_of(settings, types, torch::randn({300}));
  const double numerator = 0.3, denominator = 7;
  const float yes = 1, no = 0, left_out = 4, all = 100;
  const auto taken = [&](const inner::DeviceMultiplier& by) {
    const auto arrays = clones(start);
    auto launch = launch_of(settings, 1);
    launch.by = by;
    launch.tensors.add({data(arrays[0]), data(arrays[1]), data(arrays[2]), data(arrays[3])}, 0, 300, 0);
    emulated_cuda::kernels().adam(launch, types.of_kernel(), nullptr);
    return arrays[0];
  };
  const auto expected = [&](double multiplier, std::int64_t step) {
    const auto arrays = clones(start);
    auto by = settings;
    by.step = step;
    take_on_processor(by, multiplier, types, arrays);
    return arrays[0];
  };
  CHECK(agree(taken({2, 5, &numerator, &denominator}), expected(2 * numerator / (5 * denominator), 7)));
  CHECK(agree(taken({2, 5, nullptr, nullptr, &no}), expected(0.4, 7)));
  CHECK(agree(taken({2, 5, nullptr, nullptr, &yes}), start[0]));
  CHECK(agree(taken({2, 5, nullptr, nullptr, &no, &left_out}), expected(0.4, 3)));
  CHECK(agree(taken({2, 5, nullptr, nullptr, &no, &all}), expected(0.4, 1)));
  CHECK_FALSE(agree(taken({2, 5, nullptr, nullptr, &no, &left_out}), expected(0.4, 7)));
}

TEST_CASE("kernels of devices: one that does not do what ATen does is left, with a warning, once", "[cuda]") {
  if (!KernelsOnDevice::possible()) SKIP("needs the emulated device");
  static const auto wrong = [] {
    auto kernels = emulated_cuda::kernels();
    kernels.adam = [](const inner::StepLaunch<inner::AdamSettings>& launch, const inner::OperandTypes& types,
                      void* stream) {
      auto other = launch;
      other.numbers.beta2 += 1e-3;
      emulated_cuda::kernels().adam(other, types, stream);
    };
    return kernels;
  }();
  const auto by_aten = updated<ga::optim::AdamW>(1, device);
  const auto sgd_by_aten = updated<ga::optim::SGD>(60, device);
  Warnings warnings;
  const KernelsOnDevice kernels(wrong);
  CHECK(same_bits(updated<ga::optim::AdamW>(1, device)[0], by_aten[0]));
  CHECK(same_bits(updated<ga::optim::AdamW>(1, device)[0], by_aten[0]));
  REQUIRE(warnings.texts().size() == 1);
  CHECK(contains(warnings.texts()[0],
                 "on cuda:0 (an emulated device), the kernel of AdamW for parameters in Float and "
                 "gradients in Float does not do what ATen does"));
  updated<ga::optim::AdamW>(1, other_device);
  CHECK(warnings.texts().size() == 2);
  CHECK(all_agree(updated<ga::optim::SGD>(60, device), updated<ga::optim::SGD>(60, host)));
  CHECK_FALSE(all_agree(updated<ga::optim::SGD>(60, device), sgd_by_aten));
  CHECK(warnings.texts().size() == 2);
}

namespace {

double norm_by_kernel(const at::Tensor& numbers) {
  double partial_sums[100], norm = -1;
  inner::SquaresLaunch launch(partial_sums, &norm);
  launch.add(numbers.const_data_ptr(), numbers.numel());
  emulated_cuda::kernels().l2_norms(launch, numbers.scalar_type(), nullptr);
  return norm;
}

}  // namespace

TEST_CASE("kernels of devices: norms of all sizes and types", "[cuda]") {
  if (!KernelsOnDevice::possible()) SKIP("needs the emulated device");
  torch::manual_seed(6);
  for (auto dtype : {at::kDouble, at::kFloat, at::kHalf, at::kBFloat16}) {
    for (std::int64_t n = 0; n <= 30000; n += n < 300 ? 1 : n / 3) {
      const GuardedMemory numbers(torch::randn({n}).to(dtype), n % 2 == 1);
      const auto expected = std::sqrt(numbers.tensor().to(at::kDouble).square().sum().item<double>());
      REQUIRE(norm_by_kernel(numbers.tensor()) == Approx(expected).epsilon(1e-14).margin(0));
    }
    for (double odd : {std::numeric_limits<double>::infinity(), std::nan("")})
      for (std::int64_t place : {0, 8191, 8192, 20000})
        REQUIRE_FALSE(
            std::isfinite(norm_by_kernel(torch::ones({20001}, dtype).index_fill_(0, torch::tensor(place), odd))));
  }
  CHECK(norm_by_kernel(torch::full({30}, 3e38f)) == Approx(3e38 * std::sqrt(30.0)));  // squares stay finite
}

TEST_CASE("kernels of devices: the norm of a tensor does not depend on the others, nor is a device waited for",
          "[cuda]") {
  if (!KernelsOnDevice::possible()) SKIP("needs the emulated device");
  torch::manual_seed(7);
  std::vector<at::Tensor> tensors;
  for (std::int64_t i = 0; i < 400; ++i)
    tensors.push_back(
        torch::randn({i % 13 == 0 ? 20000 + i : 1 + i}).to(i % 3 ? at::kFloat : at::kBFloat16).to(device));
  const auto by_aten = inner::norms(tensors, 2).cpu();
  const KernelsOnDevice kernels;
  inner::norms(tensors, 2);  // proves them
  emulated_cuda::reset_counts();
  const auto all = inner::norms(tensors, 2);
  CHECK(emulated_cuda::counts().waits == 0);
  CHECK(emulated_cuda::counts().launches <= 9);  // two for each 160 tensors of one dtype, and one that joins
  CHECK(torch::allclose(std::get<0>(all.cpu().sort()), std::get<0>(by_aten.sort()), 1e-13));
  std::vector<double> alone;
  for (auto& tensor : tensors) alone.push_back(inner::norms({tensor}, 2).item<double>());
  CHECK(std::get<0>(all.cpu().sort()).equal(std::get<0>(torch::tensor(alone, at::kDouble).sort())));
}

TEMPLATE_TEST_CASE("kernels of devices: a step allocates nothing and waits for nothing, from the second on", "[cuda]",
                   ga::optim::SGD, ga::optim::Adam, ga::optim::AdamW, ga::optim::Adam8bit, ga::optim::AdamW8bit) {
  if (!KernelsOnDevice::possible()) SKIP("needs the emulated device");
  const KernelsOnDevice kernels;
  const auto parameter = torch::ones({5000}, device).requires_grad_();
  TestType optimizer({parameter}, 0.1);
  parameter.mutable_grad() = torch::ones({5000}, device);
  for (int i = 0; i < 3; ++i) {
    ga::Gradients gradients({parameter});
    gradients.factor().multiply(torch::full({}, 0.5, device));
    emulated_cuda::reset_counts();
    const auto allocations = emulated_cuda::memory().allocations;
    optimizer.step(gradients);
    if (i == 0) continue;
    CHECK(emulated_cuda::memory().allocations == allocations);
    CHECK(emulated_cuda::counts().waits == 0);
    CHECK(emulated_cuda::counts().launches == 1);
  }
}

TEST_CASE("kernels of devices: one that cannot be launched is left, but memory that is lacking is an error", "[cuda]") {
  if (!KernelsOnDevice::possible()) SKIP("needs the emulated device");
  static const auto failing = [] {
    auto kernels = emulated_cuda::kernels();
    kernels.adam = [](const inner::StepLaunch<inner::AdamSettings>&, const inner::OperandTypes&, void*) {
      TORCH_CHECK(false, "no kernel image is available for this device");
    };
    return kernels;
  }();
  const auto by_aten = updated<ga::optim::AdamW>(1, device);
  Warnings warnings;
  const KernelsOnDevice kernels(failing);
  {
    auto parameters = many_parameters(1, device);
    ga::optim::AdamW optimizer(parameters, 0.1);
    const LimitedMemory limit(emulated_cuda::memory().bytes + 20000);
    CHECK_THROWS_AS(optimizer.step(), c10::OutOfMemoryError);
  }
  CHECK(warnings.texts().empty());
  CHECK(same_bits(updated<ga::optim::AdamW>(1, device)[0], by_aten[0]));
  REQUIRE(warnings.texts().size() == 1);
  CHECK(contains(warnings.texts()[0], "fails (no kernel image is available for this device"));
}

TEST_CASE("kernels of devices: machine_report tells which are in use", "[cuda]") {
  if (!KernelsOnDevice::possible()) SKIP("needs the emulated device");
  const auto told = [] {
    const auto report = ga::machine_report();
    return report.findings.back().what + ": " + report.findings.back().seen;
  };
  CHECK(contains(told(), "CUDA kernels: none in this program"));
  const KernelsOnDevice kernels;
  updated<ga::optim::SGD>(1, device);
  CHECK(contains(told(), "SGD for parameters in Float and gradients in Float on cuda:0"));
}

namespace {

/// Windows of several micro-batches, clipped, of a float32 model.
template <class Optimizer>
at::Tensor trained_by_kernels(at::Device where, bool scaled) {
  auto model = make_model(at::kFloat);
  model->to(where);
  Optimizer wrapped(model->parameters(), 0.01);
  ga::GradAccumulator optimizer(wrapped, {.steps = 4});
  ga::AmpScaler scaler({.init_scale = 1e38, .backoff_factor = 0.01, .enabled = scaled, .on_device = !where.is_cpu()});
  for (int epoch = 0; epoch < 3; ++epoch)
    for (auto& batch : make_batches({4, 3, 5, 4, 2, 6, 4, 4}, at::kFloat)) {
      const Example there{batch.data.to(where), batch.target.to(where)};
      scaler.scale(loss_of(model, there)).backward();
      optimizer.clip_grad_norm_(0.3);
      scaler.step(optimizer);
      scaler.update();
      optimizer.zero_grad();
    }
  return flat(model).cpu();
}

}  // namespace

TEMPLATE_TEST_CASE("kernels of devices: a training has the bits of the processor's", "[cuda]", ga::optim::SGD,
                   ga::optim::Adam, ga::optim::AdamW, ga::optim::Adam8bit, ga::optim::AdamW8bit) {
  if (!KernelsOnDevice::possible()) SKIP("needs the emulated device");
  for (bool scaled : {false, true}) {  // so large that the first window overflows
    CAPTURE(scaled);
    const auto by_processor = trained_by_kernels<TestType>(host, scaled);
    if (!std::is_same_v<TestType, ga::optim::SGD>)  // by ATen, which rounds SGD alike
      CHECK_FALSE(same_bits(trained_by_kernels<TestType>(device, scaled), by_processor));
    const KernelsOnDevice kernels;
    CHECK(agree(trained_by_kernels<TestType>(device, scaled), by_processor));
  }
}

namespace {

Arrays tensors_of(const inner::SgdStep& step) { return {step.parameter, step.momentum_buffer}; }
Arrays tensors_of(const inner::AdamStep& step) { return {step.parameter, step.exp_avg, step.exp_avg_sq}; }
Arrays tensors_of(const inner::Adam8bitStep& step) {
  return {step.parameter, step.exp_avg.codes, step.exp_avg.scales, step.exp_avg_sq.codes, step.exp_avg_sq.scales};
}

}  // namespace

TEMPLATE_TEST_CASE("kernels of devices: a large parameter that is cut moves as on the processor", "[cuda]",
                   inner::SgdStep, inner::AdamStep, inner::Adam8bitStep) {
  if (!KernelsOnDevice::possible()) SKIP("needs the emulated device");
  constexpr auto size = inner::most_copied + 1003;
  const KernelsOnDevice kernels;
  for (auto& types : {KernelTypes{at::kFloat, at::kBFloat16}, KernelTypes{at::kBFloat16, at::kHalf},
                      KernelTypes{at::kBFloat16, at::kHalf, true}}) {
    torch::manual_seed(17);
    const auto p = torch::randn({size}).to(types.parameter), g = torch::randn({size}).to(types.gradient);
    const auto m = torch::randn({size}) * 0.1, v = torch::rand({size}) + 0.01;
    const auto step_on = [&](at::Device where) {
      TestType step{};
      step.parameter = p.to(where, types.parameter, false, true);
      step.gradient = g.to(where);
      if (types.rounded) step.rounding_key = key;
      if constexpr (std::is_same_v<TestType, inner::SgdStep>) {
        step.settings = sgd_settings[3];
        step.momentum_buffer = m.to(where, at::kFloat, false, true);
      } else if constexpr (std::is_same_v<TestType, inner::AdamStep>) {
        step.settings = adam_settings[1];
        step.exp_avg = m.to(where, at::kFloat, false, true);
        step.exp_avg_sq = v.to(where, at::kFloat, false, true);
      } else {
        step.settings = adam_settings[1];
        step.exp_avg = inner::encoded(m.to(where), true);
        step.exp_avg_sq = inner::encoded(v.to(where), false);
      }
      return step;
    };
    const auto on_host = step_on(host), on_device = step_on(device);
    take_on_cpu(std::vector{on_host}, 0.5);
    take_on_device(std::vector{on_device}, inner::Multiplier{.numerator = 0.5});
    const auto ours = tensors_of(on_device), theirs = tensors_of(on_host);
    for (std::size_t i = 0; i < ours.size(); ++i) {
      CAPTURE(types.parameter, types.gradient, types.rounded, i);
      CHECK(agree(ours[i].cpu(), theirs[i]));
    }
  }
}

TEST_CASE("kernels of devices: none is tried while a graph is captured, and those that were go on", "[cuda]") {
  if (!KernelsOnDevice::possible()) SKIP("needs the emulated device");
  static const auto others = emulated_cuda::kernels();
  const KernelsOnDevice kernels(others);
  struct Capture {
    Capture() { emulated_cuda::capture(true); }
    ~Capture() { emulated_cuda::capture(false); }
  };
  auto parameters = many_parameters(1, device);
  ga::optim::AdamW optimizer(parameters, 0.1);
  const auto before = parameters[0].detach().cpu();
  {
    const Capture capture;
    REQUIRE_ERROR("take one step before", optimizer.step());
  }
  CHECK(same_bits(parameters[0].detach().cpu(), before));
  optimizer.step();
  const Capture capture;
  CHECK_NOTHROW(optimizer.step());
}

namespace {

/// What the device allocates for the close of a window, from the second on: clipping, the step, and the scale.
std::int64_t allocations_of_window(bool scaled) {
  auto model = make_model(at::kFloat);
  model->to(device);
  ga::optim::AdamW wrapped(model->parameters(), 1e-3);
  ga::GradAccumulator optimizer(wrapped, {.steps = 1});
  ga::AmpScaler scaler({.enabled = scaled, .on_device = scaled});
  std::int64_t allocations = 0;
  for (auto& batch : make_batches({4, 4, 4}, at::kFloat)) {
    const Example there{batch.data.to(device), batch.target.to(device)};
    scaler.scale(loss_of(model, there)).backward();
    const auto before = emulated_cuda::memory().allocations;
    emulated_cuda::reset_counts();
    optimizer.clip_grad_norm_(1.0);
    scaler.step(optimizer);
    scaler.update();
    allocations = emulated_cuda::memory().allocations - before;
    optimizer.zero_grad();
  }
  CHECK(emulated_cuda::counts().waits == 0);
  return allocations;
}

}  // namespace

TEST_CASE("kernels of devices: what is new in each window is the norm, and with a scaler the scale", "[cuda]") {
  if (!KernelsOnDevice::possible()) SKIP("needs the emulated device");
  const KernelsOnDevice kernels;
  CHECK(allocations_of_window(false) == 4);
  CHECK(allocations_of_window(true) == 18);
}
