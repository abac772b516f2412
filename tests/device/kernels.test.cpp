// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/detail/kernels/kernel_loop.hpp>
#include <gradaccum/detail/optimizers/eight_bit_moments.hpp>
#include <gradaccum/detail/optimizers/steps.hpp>
#include <gradaccum/detail/window/window_gradients.hpp>
#include <gradaccum/gradaccum.hpp>

#include "support/device.hpp"
#include "support/kernel_memory.hpp"
#include "support/kernel_types.hpp"
#include "support/kernels_on_device.hpp"
#include "support/models.hpp"
#include "support/run_kernel.hpp"
#include "support/take_on_device.hpp"

#include <array>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

// Kernels of devices match the CPU's, bitwise if the CPU has fused multiply-add: on a GPU, and, from the same source,
// on the host by the emulated device.

namespace ga = gradaccum;
namespace inner = gradaccum::detail;
using namespace testing;

namespace {

const at::Device host(at::kCPU), device(at::kCUDA, 0);

/// The portable kernels multiply and add in two steps.
bool has_fused_multiply_add() { return inner::instruction_set() != inner::InstructionSet::portable; }

/// Returns whether two tensors have the same bits, except for NaN.
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
  return has_fused_multiply_add() ? same_bits(kernel, processor) : close_to_rounding(kernel, processor);
}

constexpr std::uint64_t key = 0x123456789abcdef;  // for stochastic rounding

/// The tensors of one step: parameter, gradient and state.
using Arrays = std::vector<at::Tensor>;

/// Copies for a kernel: all aligned, or every other one misaligned.
class KernelArrays {
 public:
  explicit KernelArrays(const Arrays& arrays) {
    static std::size_t turn = 0;
    const auto moved = ++turn % 3;
    for (std::size_t i = 0; i < arrays.size(); ++i)
      copies_.push_back(arrays[i].defined() ? std::make_unique<KernelMemory>(arrays[i], moved == 1 + i % 2) : nullptr);
  }
  inner::SteppedElements stepped(std::int64_t count) const {
    const auto data = [this](std::size_t i) { return i < copies_.size() && copies_[i] ? copies_[i]->data() : nullptr; };
    return {data(0), data(1), {data(2), data(3), data(4), data(5)}, 0, count, key};
  }
  at::Tensor result(std::size_t i) const { return copies_[i]->result(); }

 private:
  std::vector<std::unique_ptr<KernelMemory>> copies_;
};

Arrays clones(const Arrays& arrays) {
  Arrays all;
  for (auto& array : arrays) all.push_back(array.defined() ? array.clone() : array);
  return all;
}

void* data(const at::Tensor& tensor) { return tensor.defined() ? tensor.mutable_data_ptr() : nullptr; }

std::array<void*, inner::most_states> states_of(const Arrays& arrays) {
  std::array<void*, inner::most_states> all{};
  for (std::size_t i = 2; i < arrays.size(); ++i) all[i - 2] = data(arrays[i]);
  return all;
}

void step_on_processor(const inner::AnyStep& step, double multiplier, const KernelTypes& types, const Arrays& of) {
  run_kernel(inner::instruction_set(), step, types.of_kernel(),
             {.multiplier = multiplier,
              .parameter = data(of[0]),
              .gradient = data(of[1]),
              .state = states_of(of),
              .rounding_key = key},
             of[0].numel());
}

template <class Step>
void check(const Step& step, double multiplier, const KernelTypes& types, const Arrays& arrays) {
  const auto expected = clones(arrays);
  const KernelArrays copies(arrays);
  step_on_processor(step, multiplier, types, expected);
  auto launch = inner::launch_of(step, {.numerator = multiplier});
  launch.tensors.add(copies.stepped(arrays[0].numel()));
  const auto place = inner::place_in_list<Step>;
  KernelsOnDevice::kernels().steps[place](launch, types.of_kernel(), KernelsOnDevice::stream());
  for (std::size_t i = 0; i < arrays.size(); ++i) {
    INFO("array " << i << " of " << types.parameter << ", " << types.gradient << ", rounded " << types.rounded
                  << ", elements " << arrays[0].numel());
    if (arrays[i].defined()) REQUIRE(agree(copies.result(i), expected[i]));
  }
}

const std::vector<inner::SgdStep> sgd_settings{{0.1, 0, 0, 0, false, false},
                                               {0.1, 0, 0, 0.01, false, false},
                                               {0.1, 0.9, 0, 0, false, true},
                                               {0.1, 0.9, 0.3, 0.01, false, false},
                                               {0.1, 0.9, 0, 0.01, true, false}};
const std::vector<inner::AdamStep> adam_settings{{1e-2, 0.9, 0.999, 1e-8, 0, false, true, 1},
                                                 {1e-2, 0.9, 0.99, 1e-6, 0.1, false, true, 7},
                                                 {1e-2, 0.8, 0.99, 1e-6, 0.1, true, true, 3},
                                                 {1e-2, 0.9, 0.999, 1e-8, 0.1, false, false, 2},
                                                 {0.5, 0.0, 0.0, 1e-3, 0.1, true, false, 2}};

Arrays arrays_of(const inner::SgdStep& by, const KernelTypes& types, const at::Tensor& gradient) {
  const auto n = gradient.numel();
  return {torch::randn({n}).to(types.parameter), gradient.to(types.gradient),
          by.momentum != 0 ? torch::randn({n}, types.state()) : at::Tensor()};
}
Arrays arrays_of(const inner::AdamStep& by, const KernelTypes& types, const at::Tensor& gradient) {
  const auto n = gradient.numel();
  return {torch::randn({n}).to(types.parameter), gradient.to(types.gradient), torch::randn({n}, types.state()) * 0.1,
          torch::rand({n}, types.state()) + 0.01, by.amsgrad ? torch::rand({n}, types.state()) + 0.01 : at::Tensor()};
}

const std::vector<inner::Adam8bitStep> adam8bit_settings = [] {
  std::vector<inner::Adam8bitStep> all;
  for (auto& settings : adam_settings)
    if (!settings.amsgrad) all.push_back({settings});
  return all;
}();
Arrays arrays_of(const inner::Adam8bitStep&, const KernelTypes& types, const at::Tensor& gradient) {
  const auto n = gradient.numel();
  const auto m = inner::encoded(torch::randn({n}) * 0.1, true), v = inner::encoded(torch::rand({n}) + 0.01, false);
  return {torch::randn({n}).to(types.parameter), gradient.to(types.gradient), m.codes, v.codes, m.scales, v.scales};
}

const std::vector<ga::optim::LionStep> lion_settings{{1e-2, 0.9, 0.99, 0}, {1e-2, 0.95, 0.98, 0.5}, {0.3, 0, 0, 0.1}};
Arrays arrays_of(const ga::optim::LionStep&, const KernelTypes& types, const at::Tensor& gradient) {
  const auto n = gradient.numel();
  return {torch::randn({n}).to(types.parameter), gradient.to(types.gradient), torch::randn({n}, types.state())};
}

const std::vector<ga::optim::MuonDirectionStep> direction_settings{{0.95, true}, {0.95, false}, {0.2, true}};
Arrays arrays_of(const ga::optim::MuonDirectionStep&, const KernelTypes& types, const at::Tensor& gradient) {
  return arrays_of(ga::optim::LionStep(), types, gradient);
}
const std::vector<ga::optim::MuonUpdateStep> update_settings{{0.1, 1}, {0.1, 0.9}};
Arrays arrays_of(const ga::optim::MuonUpdateStep&, const KernelTypes& types, const at::Tensor& gradient) {
  return {torch::randn({gradient.numel()}).to(types.parameter), gradient.to(types.gradient)};
}

template <class Step>
void check_sizes(const std::vector<Step>& all) {
  torch::manual_seed(3);
  std::size_t turn = 0;
  const auto next = [&]() -> const Step& { return all[turn++ % all.size()]; };
  for (auto& types : all_kernel_types) {
    if (std::is_same_v<Step, inner::Adam8bitStep> && types.parameter == at::kDouble) continue;
    for (std::int64_t n = 0; n <= 3000; n += n < 40 ? 1 : n < 1100 ? 53 : 379) {
      const auto& settings = next();
      check(settings, n % 3 == 0 ? 1.0 : 0.25, types, arrays_of(settings, types, torch::randn({n}, at::kDouble)));
    }
    for (auto& settings : all)  // more than one block of threads
      check(settings, 0.5, types,
            arrays_of(settings, types, torch::randn({2 * inner::elements_of_block + 5}, at::kDouble)));
  }
}

template <class Step>
void check_odd_numbers(const std::vector<Step>& all) {
  torch::manual_seed(3);
  const double infinity = std::numeric_limits<double>::infinity();
  for (auto& types : all_kernel_types) {
    if (std::is_same_v<Step, inner::Adam8bitStep> && types.parameter == at::kDouble) continue;
    for (double odd : {infinity, -infinity, std::nan(""), 1e-40, 1e-44, 0.0, -0.0, 1e30, 6e4}) {
      auto gradient = torch::randn({150}, at::kDouble);
      for (int place : {0, 17, 63, 64, 100, 149}) gradient[place] = odd;
      for (auto& settings : all) check(settings, 1.0, types, arrays_of(settings, types, gradient));
    }
  }
}

}  // namespace

TEST_CASE("kernels of devices: SGD of all sizes, types and settings, to the processor's bits", "[cuda]") {
  if (!KernelsOnDevice::possible()) SKIP(KernelsOnDevice::missing);
  check_sizes(sgd_settings);
  check_odd_numbers(sgd_settings);
}

TEST_CASE("kernels of devices: Adam of all sizes, types and settings, to the processor's bits", "[cuda]") {
  if (!KernelsOnDevice::possible()) SKIP(KernelsOnDevice::missing);
  check_sizes(adam_settings);
  check_odd_numbers(adam_settings);
}

TEST_CASE("kernels of devices: Adam8bit of all sizes, types and settings, to the processor's bits", "[cuda]") {
  if (!KernelsOnDevice::possible()) SKIP(KernelsOnDevice::missing);
  check_sizes(adam8bit_settings);
  check_odd_numbers(adam8bit_settings);
}

TEST_CASE("kernels of devices: Lion of all sizes, types and settings, to the processor's bits", "[cuda]") {
  if (!KernelsOnDevice::possible()) SKIP(KernelsOnDevice::missing);
  check_sizes(lion_settings);
  check_odd_numbers(lion_settings);
}

TEST_CASE("kernels of devices: Muon's passes of all sizes, types and settings, to the processor's bits", "[cuda]") {
  if (!KernelsOnDevice::possible()) SKIP(KernelsOnDevice::missing);
  check_sizes(direction_settings);
  check_odd_numbers(direction_settings);
  check_sizes(update_settings);
  check_odd_numbers(update_settings);
}

namespace {

/// Makes parameters of many sizes, dtypes and strides, with gradients.
std::vector<at::Tensor> many_parameters(std::size_t count, at::Device where) {
  const std::array dtypes{at::kFloat, at::kBFloat16, at::kHalf, at::kDouble, at::kFloat};
  std::vector<at::Tensor> all;
  torch::manual_seed(11);
  for (std::size_t i = 0; i < count; ++i) {
    const auto dtype = dtypes[i % dtypes.size()];
    const auto n = static_cast<std::int64_t>(i % 7 == 3 ? 0 : i % 9 == 8 ? 400 + i % 7 : 1 + i * i % 61);
    const auto numbers = torch::randn({n, 3, 2, 2}).to(dtype).to(where), grad = torch::randn({n, 3, 2, 2}).to(dtype);
    auto parameter = i % 5 == 4 ? numbers.to(at::MemoryFormat::ChannelsLast) : numbers;
    if (i % 11 == 5) parameter = torch::zeros({n, 3, 2, 4}).to(dtype).to(where).slice(3, 0, 4, 2).copy_(parameter);
    parameter.requires_grad_();
    parameter.mutable_grad() = grad.to(where);
    all.push_back(parameter);
  }
  return all;
}

/// Makes three updates with factors of windows.
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

TEMPLATE_TEST_CASE("kernels of devices: any number of tensors, of any dtypes, match the processor's", "[cuda]",
                   ga::optim::SGD, ga::optim::Adam, ga::optim::AdamW, ga::optim::Adam8bit, ga::optim::AdamW8bit) {
  if (!KernelsOnDevice::possible()) SKIP(KernelsOnDevice::missing);
  if constexpr (!needs_kernels<TestType>) {
    const KernelsOnDevice none(nullptr);
    CHECK_FALSE(all_agree(updated<TestType>(60, host), updated<TestType>(60, device)));  // ATen's last bits differ
  }
  const KernelsOnDevice kernels;
  for (std::size_t count : {1, 2, 200, 1100}) {  // a launch has up to 400 of a dtype
    CAPTURE(count);
    CHECK(all_agree(updated<TestType>(count, device), updated<TestType>(count, host)));
  }
}

TEMPLATE_TEST_CASE("kernels of devices: without them, steps that ATen lacks are refused before any update", "[cuda]",
                   ga::optim::Adam8bit, ga::optim::AdamW8bit, ga::optim::Adafactor) {
  if (!KernelsOnDevice::possible()) SKIP(KernelsOnDevice::missing);
  std::vector<at::Tensor> parameters;
  for (std::int64_t n : {7, 5000}) {  // the first has moments of 32 bits in the 8-bit optimizers
    parameters.push_back(torch::ones({n}, device).requires_grad_());
    parameters.back().mutable_grad() = torch::ones({n}, device);
  }
  TestType optimizer(parameters, 0.1);
  const auto state = [&] {
    ga::detail::NamedParameters named;
    for (auto& parameter : parameters) named.insert(std::to_string(named.size()), parameter);
    return optimizer.named_state(named);
  };
  const auto refused = [&] {
    const KernelsOnDevice none(nullptr);
    auto before = state();
    for (auto& named : before) named.second = named.second.clone();
    const std::vector<at::Tensor> old{parameters[0].detach().clone(), parameters[1].detach().clone()};
    const std::string message = std::string(TestType::name) + ": a parameter on cuda:0 must be stepped by gradaccum's";
    REQUIRE_ERROR(message, optimizer.step());
    REQUIRE_ERROR("-DGRADACCUM_CUDA=ON", optimizer.step(ga::Gradients(parameters)));
    for (std::size_t i = 0; i < old.size(); ++i) CHECK(parameters[i].equal(old[i]));
    const auto after = state();
    REQUIRE(after.size() == before.size());
    for (auto& [name, tensor] : before) CHECK(after.at(name).equal(tensor));
  };
  refused();
  CHECK(state().empty());
  const KernelsOnDevice kernels;
  optimizer.step();
  refused();
  CHECK(parameters[1].ne(1).all().template item<bool>());
  parameters[1].mutable_grad().reset();
  const KernelsOnDevice none(nullptr);
  if constexpr (!std::is_same_v<TestType, ga::optim::Adafactor>) optimizer.step();  // ATen has the step of the first
}

TEST_CASE("kernels of devices: a gradient that is wider than the state is refused, where ATen lacks the step",
          "[cuda]") {
  if (!KernelsOnDevice::possible()) SKIP(KernelsOnDevice::missing);
  const KernelsOnDevice kernels;
  const auto parameter = torch::ones({5}, device).requires_grad_();
  ga::optim::Adafactor optimizer({parameter});
  parameter.mutable_grad() = torch::ones({5}, at::TensorOptions(device).dtype(at::kDouble));
  REQUIRE_ERROR("Adafactor: a gradient on cuda:0 must be at most as wide as the optimizer's state (Float), got Double",
                optimizer.step());
  CHECK(parameter.eq(1).all().item<bool>());
}

TEST_CASE("kernels of devices: a step takes one launch for each mix of dtypes and 400 tensors, and no copy", "[cuda]") {
  if (!emulated_cuda::is_loaded()) SKIP(KernelsOnDevice::only_emulated);
  std::vector<at::Tensor> parameters;
  for (int i = 0; i < 1000; ++i) {
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
  const auto by_aten = [&] {
    const KernelsOnDevice none(nullptr);
    return launches_of_step();
  }();
  CHECK(by_aten.launches > 100);  // ATen also copies 16-bit tensors
  const KernelsOnDevice kernels;
  const auto counts = launches_of_step();
  CHECK(counts.launches == 4);
  CHECK(counts.waits == 0);
  CHECK(counts.copies_to_device == 0);
}

TEST_CASE("kernels of devices: a factor, an overflow and skipped steps that only the device knows", "[cuda]") {
  if (!KernelsOnDevice::possible()) SKIP(KernelsOnDevice::missing);
  torch::manual_seed(5);
  const KernelTypes types{at::kFloat, at::kFloat};
  auto settings = adam_settings[1];
  const auto start = arrays_of(settings, types, torch::randn({300}));
  const auto taken = [&](const KernelMultiplier& by) {
    const KernelArrays arrays(start);
    auto launch = inner::launch_of(settings, by.pointers());
    launch.tensors.add(arrays.stepped(300));
    const auto place = inner::place_in_list<inner::AdamStep>;
    KernelsOnDevice::kernels().steps[place](launch, types.of_kernel(), KernelsOnDevice::stream());
    return arrays.result(0);
  };
  const auto expected = [&](double multiplier, std::int64_t step) {
    const auto arrays = clones(start);
    auto by = settings;
    by.step = step;
    step_on_processor(by, multiplier, types, arrays);
    return arrays[0];
  };
  const auto none = std::nullopt;
  CHECK(agree(taken({2, 5, 0.3, 7.0}), expected(2 * 0.3 / (5 * 7.0), 7)));
  CHECK(agree(taken({2, 5, none, none, 0.0f}), expected(0.4, 7)));
  CHECK(agree(taken({2, 5, none, none, 1.0f}), start[0]));
  // A device computes the powers of its count of steps by its own function.
  CHECK(close_to_rounding(taken({2, 5, none, none, 0.0f, 4.0f}), expected(0.4, 3)));
  CHECK(close_to_rounding(taken({2, 5, none, none, 0.0f, 100.0f}), expected(0.4, 1)));
  CHECK_FALSE(close_to_rounding(taken({2, 5, none, none, 0.0f, 4.0f}), expected(0.4, 7)));
}

namespace {

double norm_by_kernel(const at::Tensor& numbers, bool at_front = false) {
  const KernelMemory of(numbers, at_front), partial_sums(torch::zeros({100}, at::kDouble)),
      norm(torch::zeros({1}, at::kDouble));
  inner::SquaresLaunch launch(static_cast<double*>(partial_sums.data()), static_cast<double*>(norm.data()));
  launch.tensors.add({of.data(), numbers.numel()});
  KernelsOnDevice::kernels().l2_norms(launch, numbers.scalar_type(), KernelsOnDevice::stream());
  return norm.result().item<double>();
}

}  // namespace

TEST_CASE("kernels of devices: norms of all sizes and types", "[cuda]") {
  if (!KernelsOnDevice::possible()) SKIP(KernelsOnDevice::missing);
  torch::manual_seed(6);
  for (auto dtype : {at::kDouble, at::kFloat, at::kHalf, at::kBFloat16}) {
    for (std::int64_t n = 0; n <= 30000; n += n < 300 ? 1 : n / 3) {
      const auto numbers = torch::randn({n}).to(dtype);
      const auto expected = std::sqrt(numbers.to(at::kDouble).square().sum().item<double>());
      REQUIRE(norm_by_kernel(numbers, n % 2 == 1) == Approx(expected).epsilon(1e-14).margin(0));
    }
    for (double odd : {std::numeric_limits<double>::infinity(), std::nan("")})
      for (std::int64_t place : {0, 8191, 8192, 20000})
        REQUIRE_FALSE(
            std::isfinite(norm_by_kernel(torch::ones({20001}, dtype).index_fill_(0, torch::tensor(place), odd))));
  }
  CHECK(norm_by_kernel(torch::full({30}, 3e38f)) == Approx(3e38 * std::sqrt(30.0)));  // squares stay finite
}

TEST_CASE("kernels of devices: the norm of a tensor does not depend on the others, and does not wait for a device",
          "[cuda]") {
  if (!KernelsOnDevice::possible()) SKIP(KernelsOnDevice::missing);
  torch::manual_seed(7);
  std::vector<at::Tensor> tensors;
  for (std::int64_t i = 0; i < 400; ++i)
    tensors.push_back(
        torch::randn({i % 13 == 0 ? 20000 + i : 1 + i}).to(i % 3 ? at::kFloat : at::kBFloat16).to(device));
  const auto by_aten = [&] {
    const KernelsOnDevice none(nullptr);
    return inner::norms(tensors, 2).cpu();
  }();
  const KernelsOnDevice kernels;
  if (emulated_cuda::is_loaded()) emulated_cuda::reset_counts();
  const auto all = inner::norms(tensors, 2);
  if (emulated_cuda::is_loaded()) {
    CHECK(emulated_cuda::counts().waits == 0);
    CHECK(emulated_cuda::counts().launches == 5);  // two per dtype, and one that combines them
  }
  CHECK(torch::allclose(std::get<0>(all.cpu().sort()), std::get<0>(by_aten.sort()), 1e-13));
  std::vector<double> alone;
  for (auto& tensor : tensors) alone.push_back(inner::norms({tensor}, 2).item<double>());
  CHECK(std::get<0>(all.cpu().sort()).equal(std::get<0>(torch::tensor(alone, at::kDouble).sort())));
}

TEMPLATE_TEST_CASE("kernels of devices: from the second step on nothing is allocated, and nothing waits", "[cuda]",
                   ga::optim::SGD, ga::optim::Adam, ga::optim::AdamW, ga::optim::Adam8bit, ga::optim::AdamW8bit) {
  if (!emulated_cuda::is_loaded()) SKIP(KernelsOnDevice::only_emulated);
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

namespace {

/// Trains a float32 model with windows of several micro-batches and clipping.
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

TEMPLATE_TEST_CASE("kernels of devices: a training is bitwise the processor's", "[cuda]", ga::optim::SGD,
                   ga::optim::Adam, ga::optim::AdamW, ga::optim::Adam8bit, ga::optim::AdamW8bit, ga::optim::Lion) {
  if (!emulated_cuda::is_loaded()) SKIP("a GPU multiplies matrices in another order");
  for (bool scaled : {false, true}) {  // the scale makes the first window overflow
    CAPTURE(scaled);
    const auto by_processor = trained_by_kernels<TestType>(host, scaled);
    if (std::is_same_v<TestType, ga::optim::Adam> ||
        std::is_same_v<TestType, ga::optim::AdamW>)  // ATen rounds others alike
      CHECK_FALSE(same_bits(trained_by_kernels<TestType>(device, scaled), by_processor));
    const KernelsOnDevice kernels;
    CHECK(agree(trained_by_kernels<TestType>(device, scaled), by_processor));
  }
}

namespace {

Arrays tensors_of(const inner::ElementStep& step) {
  Arrays all{step.parameter};
  for (auto& state : step.state)
    if (state.defined()) all.push_back(state);
  return all;
}

}  // namespace

TEMPLATE_TEST_CASE("kernels of devices: a large parameter that is cut is updated as on the processor", "[cuda]",
                   inner::SgdStep, inner::AdamStep, inner::Adam8bitStep) {
  if (!KernelsOnDevice::possible()) SKIP(KernelsOnDevice::missing);
  constexpr auto size = inner::most_copied + 1003;
  const KernelsOnDevice kernels;
  for (auto& types : {KernelTypes{at::kFloat, at::kBFloat16}, KernelTypes{at::kBFloat16, at::kHalf},
                      KernelTypes{at::kBFloat16, at::kHalf, true}}) {
    torch::manual_seed(17);
    const auto p = torch::randn({size}).to(types.parameter), g = torch::randn({size}).to(types.gradient);
    const auto m = torch::randn({size}) * 0.1, v = torch::rand({size}) + 0.01;
    const auto step_on = [&](at::Device where) {
      std::optional<inner::ElementStep> step;
      const auto floats = [&](const at::Tensor& of) { return of.to(where, at::kFloat, false, true); };
      if constexpr (std::is_same_v<TestType, inner::SgdStep>) {
        step = inner::ElementStep{sgd_settings[3], {}, {}, {floats(m)}};
      } else if constexpr (std::is_same_v<TestType, inner::AdamStep>) {
        step = inner::ElementStep{adam_settings[1], {}, {}, {floats(m), floats(v)}};
      } else {
        const auto coded_m = inner::encoded(m.to(where), true), coded_v = inner::encoded(v.to(where), false);
        step = inner::ElementStep{
            adam8bit_settings[1], {}, {}, {coded_m.codes, coded_v.codes, coded_m.scales, coded_v.scales}};
      }
      step->parameter = p.to(where, types.parameter, false, true);
      step->gradient = g.to(where);
      if (types.rounded) step->rounding_key = key;
      return *step;
    };
    const auto on_host = step_on(host), on_device = step_on(device);
    step_on_cpu(std::vector{on_host}, 0.5);
    step_on_device(std::vector{on_device}, inner::Multiplier{.numerator = 0.5});
    const auto ours = tensors_of(on_device), theirs = tensors_of(on_host);
    for (std::size_t i = 0; i < ours.size(); ++i) {
      CAPTURE(types.parameter, types.gradient, types.rounded, i);
      CHECK(agree(ours[i].cpu(), theirs[i]));
    }
  }
}

namespace {

struct WindowEnd {
  std::int64_t launches, allocations, waits;
};

/// Counts the operations of clipping, step and loss scale at the end of the fourth window.
WindowEnd window_end(int tensors, bool scaled) {
  std::vector<at::Tensor> parameters;
  for (int i = 0; i < tensors; ++i) parameters.push_back(torch::full({3, 7}, 0.1, device).requires_grad_());
  ga::optim::AdamW adamw(parameters, 1e-3);
  ga::GradAccumulator optimizer(adamw, {.steps = 1});
  ga::AmpScaler scaler({.enabled = scaled, .on_device = scaled});
  WindowEnd end{};
  for (int window = 0; window < 4; ++window) {
    auto loss = torch::zeros({}, device);
    for (auto& parameter : parameters) loss = loss + parameter.sum();
    scaler.scale(loss).backward();
    const auto before = emulated_cuda::memory().allocations;
    emulated_cuda::reset_counts();
    optimizer.clip_grad_norm_(1.0);
    scaler.step(optimizer);
    scaler.update();
    end = {emulated_cuda::counts().launches, emulated_cuda::memory().allocations - before,
           emulated_cuda::counts().waits};
    optimizer.zero_grad();
  }
  return end;
}

}  // namespace

TEST_CASE("kernels of devices: a window ends with at most 8 launches, no wait, and no new tensor but the norm",
          "[cuda]") {
  if (!emulated_cuda::is_loaded()) SKIP(KernelsOnDevice::only_emulated);
  const auto by_aten = [] {
    const KernelsOnDevice none(nullptr);
    return window_end(6, true);
  }();
  CHECK(by_aten.launches > 20);
  CHECK(by_aten.allocations > 10);
  const KernelsOnDevice kernels;
  for (int tensors : {1, 6, 293, 1000})
    for (bool scaled : {false, true}) {
      CAPTURE(tensors, scaled);
      const auto end = window_end(tensors, scaled);
      CHECK(end.launches <= 8);
      CHECK(end.allocations == 1);
      CHECK(end.waits == 0);
    }
}

TEST_CASE("kernels of devices: a retained graph has the loss scale of its forward", "[cuda]") {
  if (!KernelsOnDevice::possible()) SKIP(KernelsOnDevice::missing);
  const KernelsOnDevice kernels;
  const auto parameter = torch::ones({4}, device).requires_grad_();
  ga::optim::SGD sgd({parameter}, 0.0);
  ga::AmpScaler scaler({.init_scale = 64, .growth_interval = 1, .on_device = true});
  const auto update = [&](const at::Tensor& loss) {
    loss.backward({}, /*retain_graph=*/true);
    scaler.step(sgd);
    scaler.update();
    sgd.zero_grad();
  };
  update(scaler.scale(parameter.sum()));  // the scale is on the device from here on
  auto x = torch::ones({4}, device).requires_grad_();
  const auto kept = scaler.scale(x.sum());
  for (int i = 0; i < 4; ++i) update(scaler.scale(parameter.sum()));
  CHECK(scaler.get_scale() == 2048);
  kept.backward();
  CHECK(x.grad().cpu().equal(torch::full({4}, 128.0f)));
}
