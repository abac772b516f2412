// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/detail/kernels/kernel_loop.hpp>
#include <gradaccum/detail/optimizers/steps.hpp>

#include "support/run_kernel.hpp"
#include "support/take_on_device.hpp"

#include <ATen/OpMathType.h>
#include <ATen/record_function.h>

#include <limits>
#include <memory>
#include <string_view>

// Tests every kernel of every instruction set that this processor has, against ATen in float64.

namespace inner = gradaccum::detail;
using inner::InstructionSet;
using testing::run_kernel;
using testing::step_on_device;

namespace {

/// Counts ATen's fused steps of AdamW.
class FusedSteps {
 public:
  FusedSteps() { count = 0; }
  FusedSteps(const FusedSteps&) = delete;
  ~FusedSteps() { at::removeCallback(callback_); }
  int so_far() const { return count; }

 private:
  static std::unique_ptr<at::ObserverContext> see(const at::RecordFunction& call) {
    if (std::string_view(call.name()) == "aten::_fused_adamw_") ++count;
    return nullptr;
  }

  static inline thread_local int count = 0;
  at::CallbackHandle callback_ = at::addThreadLocalCallback(at::RecordFunctionCallback(see));
};

constexpr int spare = 3;  // guard elements before and after

/// An unaligned array with guard elements before and after.
struct Array {
  Array(const at::Tensor& numbers, at::ScalarType dtype) : all(torch::full({numbers.numel() + 2 * spare}, 7.0, dtype)) {
    inner().copy_(numbers);
  }
  at::Tensor inner() const { return all.narrow(0, spare, all.numel() - 2 * spare); }
  void* data() const { return inner().mutable_data_ptr(); }
  bool intact() const {
    return all.narrow(0, 0, spare).eq(7).all().item<bool>() &&
           all.narrow(0, all.numel() - spare, spare).eq(7).all().item<bool>();
  }
  at::Tensor all;
};

struct Types {
  at::ScalarType parameter, gradient, state;
  double tolerance;
};
const std::vector<Types> all_types{
    {at::kDouble, at::kDouble, at::kDouble, 1e-14},   {at::kFloat, at::kFloat, at::kFloat, 1e-6},
    {at::kHalf, at::kHalf, at::kFloat, 1e-3},         {at::kHalf, at::kFloat, at::kFloat, 1e-3},
    {at::kBFloat16, at::kBFloat16, at::kFloat, 8e-3}, {at::kBFloat16, at::kFloat, at::kFloat, 8e-3}};

bool close(const at::Tensor& a, const at::Tensor& b, double tolerance) {
  return torch::allclose(a.to(at::kDouble), b.to(at::kDouble), tolerance, tolerance / 2, /*equal_nan=*/true);
}

/// Adam by the paper's formulas, in float64.
void adam_in_float64(at::Tensor& p, at::Tensor g, at::Tensor& m, at::Tensor& v, at::Tensor& x,
                     const inner::AdamStep& by, double multiplier) {
  g = g * multiplier;
  if (!by.decoupled) g = g + by.weight_decay * p;
  if (by.decoupled) p = p * (1 - by.lr * by.weight_decay);
  m = by.beta1 * m + (1 - by.beta1) * g;
  v = by.beta2 * v + (1 - by.beta2) * g * g;
  if (by.amsgrad) x = torch::maximum(x, v);
  const auto denominator = (by.amsgrad ? x : v).sqrt() / std::sqrt(1 - std::pow(by.beta2, by.step)) + by.eps;
  p = p - by.lr / (1 - std::pow(by.beta1, by.step)) * m / denominator;
}

const std::vector<inner::AdamStep> adam_settings{{1e-2, 0.9, 0.999, 1e-8, 0, false, true, 1},
                                                 {1e-2, 0.9, 0.99, 1e-6, 0.1, false, true, 7},
                                                 {1e-2, 0.8, 0.99, 1e-6, 0.1, true, true, 3},
                                                 {1e-2, 0.9, 0.999, 1e-8, 0.1, false, false, 2},
                                                 {0.5, 0.0, 0.0, 1e-3, 0.1, true, false, 2}};

void check_adam(InstructionSet set, const Types& types, const inner::AdamStep& settings, const at::Tensor& gradient,
                double multiplier) {
  const auto n = gradient.numel();
  const Array p(torch::randn({n}), types.parameter), g(gradient, types.gradient),
      m(torch::randn({n}) * 0.1, types.state), v(torch::rand({n}) + 0.01, types.state),
      x(torch::rand({n}) + 0.01, types.state);
  auto p64 = p.inner().to(at::kDouble), m64 = m.inner().to(at::kDouble), v64 = v.inner().to(at::kDouble),
       x64 = x.inner().to(at::kDouble);
  adam_in_float64(p64, g.inner().to(at::kDouble), m64, v64, x64, settings, multiplier);
  run_kernel(set, settings, {types.parameter, types.gradient, false},
             {.multiplier = multiplier,
              .parameter = p.data(),
              .gradient = g.data(),
              .state = {m.data(), v.data(), settings.amsgrad ? x.data() : nullptr}},
             n);
  REQUIRE(close(p.inner(), p64, types.tolerance));
  const double of_state = types.state == at::kDouble ? 1e-14 : 1e-6;
  REQUIRE(close(m.inner(), m64, of_state));
  REQUIRE(close(v.inner(), v64, of_state));
  REQUIRE(close(x.inner(), x64, of_state));
  for (auto* array : {&p, &g, &m, &v, &x}) REQUIRE(array->intact());
}

void check_sgd(InstructionSet set, const Types& types, const inner::SgdStep& by, double multiplier, std::int64_t n) {
  const Array p(torch::randn({n}), types.parameter), g(torch::randn({n}), types.gradient),
      b(torch::randn({n}), types.state);
  auto p64 = p.inner().to(at::kDouble), b64 = b.inner().to(at::kDouble);
  auto g64 = g.inner().to(at::kDouble) * multiplier + by.weight_decay * p64;
  if (by.momentum != 0) {
    b64 = by.first ? g64 : by.momentum * b64 + (1 - by.dampening) * g64;
    g64 = by.nesterov ? g64 + by.momentum * b64 : b64;
  }
  p64 = p64 - by.lr * g64;
  run_kernel(set, by, {types.parameter, types.gradient, false},
             {.multiplier = multiplier,
              .parameter = p.data(),
              .gradient = g.data(),
              .state = {by.momentum != 0 ? b.data() : nullptr}},
             n);
  REQUIRE(close(p.inner(), p64, types.tolerance));
  REQUIRE(close(b.inner(), b64, types.state == at::kDouble ? 1e-14 : 1e-6));
  for (auto* array : {&p, &g, &b}) REQUIRE(array->intact());
}

/// Lion by the paper's formula.
void lion(at::Tensor& p, const at::Tensor& g, at::Tensor& m, const gradaccum::optim::LionStep& by) {
  const auto update = (by.beta1 * m + (1 - by.beta1) * g).sign();
  p = p * (1 - by.lr * by.weight_decay) - by.lr * update;
  m = by.beta2 * m + (1 - by.beta2) * g;
}

}  // namespace

TEST_CASE("kernels: Adam of all sizes, types and settings") {
  torch::manual_seed(3);
  for (auto set : testing::instruction_sets())
    for (auto& types : all_types)
      for (std::int64_t n = 0; n <= 300; n += n < 70 ? 1 : 23)
        check_adam(set, types, adam_settings[n % adam_settings.size()], torch::randn({n}), n % 3 == 0 ? 1.0 : 0.25);
  for (auto set : testing::instruction_sets())
    for (auto& types : all_types)
      for (auto& settings : adam_settings) check_adam(set, types, settings, torch::randn({131}), 0.5);
}

TEST_CASE("kernels: Adam with denormals, infinities and NaN") {
  torch::manual_seed(3);
  const double infinity = std::numeric_limits<double>::infinity();
  for (auto set : testing::instruction_sets())
    for (auto& types : all_types)
      for (double odd : {infinity, -infinity, std::nan(""), 1e-40, 1e-44, 0.0, -0.0, 1e30, 6e4}) {
        INFO("gradient " << odd << ", set " << int(set) << ", parameter " << types.parameter);
        auto gradient = torch::randn({150}, at::kDouble);
        for (int place : {0, 17, 63, 64, 100, 149}) gradient[place] = odd;
        // 1e30 squared is infinite in float32, so the step is 0; float64 with the same state agrees.
        if (odd == 1e30 && types.state == at::kFloat) continue;
        check_adam(set, types, adam_settings[1], gradient, 1.0);
      }
}

TEST_CASE("kernels: a second moment that overflows stops the parameter, as in ATen") {
  for (auto set : testing::instruction_sets()) {
    auto p = torch::ones({100}), g = torch::full({100}, 1e25f), m = torch::zeros({100}), v = torch::zeros({100});
    run_kernel(set, adam_settings[0], {at::kFloat, at::kFloat, false},
               {.parameter = p.data_ptr(), .gradient = g.data_ptr(), .state = {m.data_ptr(), v.data_ptr()}}, 100);
    REQUIRE(v.isinf().all().item<bool>());
    REQUIRE(p.eq(1).all().item<bool>());
  }
}

TEST_CASE("kernels: SGD of all sizes, types and settings") {
  torch::manual_seed(4);
  const std::vector<inner::SgdStep> settings{{0.1, 0, 0, 0, false, false},     {0.1, 0, 0, 0.01, false, false},
                                             {0.1, 0.9, 0, 0, false, true},    {0.1, 0.9, 0.3, 0.01, false, false},
                                             {0.1, 0.9, 0, 0.01, true, false}, {0.1, 0.9, 0, 0, true, true}};
  for (auto set : testing::instruction_sets())
    for (auto& types : all_types)
      for (std::int64_t n = 0; n <= 300; n += n < 70 ? 1 : 23)
        for (auto& by : settings) check_sgd(set, types, by, by.nesterov ? 0.5 : 1.0, n);
}

TEST_CASE("Lion's kernels: all instruction sets, types and sizes, against the formula in float64") {
  torch::manual_seed(3);
  const std::vector<gradaccum::optim::LionStep> all{{1e-2, 0.9, 0.99, 0}, {1e-2, 0.95, 0.98, 0.5}, {0.3, 0, 0, 0.1}};
  for (auto set : testing::instruction_sets())
    for (auto& types : all_types)
      for (std::int64_t n = 0; n <= 300; n += n < 40 ? 1 : 23)
        for (auto& step : all) {
          auto p = torch::randn({n}).to(types.parameter), m = torch::randn({n}).to(types.state);
          const auto g = torch::randn({n}).to(types.gradient);
          auto p64 = p.to(at::kDouble), m64 = m.to(at::kDouble);
          lion(p64, g.to(at::kDouble) * 0.5, m64, step);
          run_kernel(set, step, {types.parameter, types.gradient, false},
                     {.multiplier = 0.5,
                      .parameter = p.mutable_data_ptr(),
                      .gradient = g.const_data_ptr(),
                      .state = {m.mutable_data_ptr()}},
                     n);
          REQUIRE(close(p, p64, types.tolerance));
          REQUIRE(close(m, m64, types.state == at::kDouble ? 1e-14 : 1e-6));
        }
}

TEST_CASE("Lion: an element without gradient and average stays, and NaN makes it NaN, not only its average") {
  for (auto set : testing::instruction_sets())
    for (auto dtype : {at::kFloat, at::kDouble}) {
      auto p = torch::ones({40}, dtype), m = torch::zeros({40}, dtype), g = torch::zeros({40}, dtype);
      const double infinity = std::numeric_limits<double>::infinity();
      g[0] = std::nan(""), g[1] = infinity, g[2] = -infinity, g[3] = -0.0, g[4] = 1e-44;
      run_kernel(set, gradaccum::optim::LionStep{0.25, 0.9, 0.99, 0}, {dtype, dtype, false},
                 {.parameter = p.data_ptr(), .gradient = g.data_ptr(), .state = {m.data_ptr()}}, 40);
      CHECK(p[0].isnan().item<bool>());
      CHECK(p[1].item<double>() == 0.75);
      CHECK(p[2].item<double>() == 1.25);
      CHECK(p.slice(0, 5).eq(1).all().item<bool>());
      CHECK(m[0].isnan().item<bool>());
      CHECK(m[1].item<double>() == infinity);
    }
}

TEST_CASE(
    "kernels: all 65536 numbers of 16 bits convert to float32 and back unchanged, and others are rounded as by ATen") {
  const auto bits = torch::arange(65536).sub(32768).to(at::kShort);
  torch::manual_seed(5);
  const auto floats =
      torch::cat({torch::randn({3000}), torch::randn({3000}) * 1e-41, torch::randn({3000}) * 7e4,
                  torch::randn({3000}) * 1e-7, torch::tensor({3.4028234e38f, -3.4028234e38f, 65519.9f, 65520.0f})});
  for (auto dtype : {at::kHalf, at::kBFloat16})
    for (auto set : testing::instruction_sets()) {
      const auto step = [&](at::Tensor p, const at::Tensor& g, double lr) {
        run_kernel(set, inner::SgdStep{.lr = lr}, {dtype, g.scalar_type(), false},
                   {.parameter = p.data_ptr(), .gradient = g.data_ptr()}, p.numel());
      };
      auto all = bits.view(dtype).clone();
      step(all, torch::zeros_like(all), 0.0);
      const auto number = ~bits.view(dtype).isnan();
      REQUIRE(all.view(at::kShort).eq(bits).logical_or(~number).logical_or(bits.view(dtype).eq(0)).all().item<bool>());
      REQUIRE(all.isnan().eq(~number).all().item<bool>());
      auto rounded = torch::zeros_like(floats, dtype);
      step(rounded, floats, -1.0);
      REQUIRE(rounded.eq(floats.to(dtype)).all().item<bool>());
    }
}

TEST_CASE("kernels: the sum of squares of all sizes and types") {
  torch::manual_seed(6);
  for (auto set : testing::instruction_sets())
    for (auto dtype : {at::kDouble, at::kFloat, at::kHalf, at::kBFloat16})
      for (std::int64_t n = 0; n <= 300; ++n) {
        const Array numbers(torch::randn({n}), dtype);
        const auto expected = numbers.inner().to(at::kDouble).square().sum().item<double>();
        REQUIRE(inner::sum_of_squares_of(dtype, set)(numbers.data(), n) == Approx(expected).epsilon(1e-13));
      }
}

TEST_CASE("sums_of_squares: separate sums for tensors of any sizes; the same bits for any number of threads") {
  torch::manual_seed(7);
  std::vector<at::Tensor> tensors;
  for (std::int64_t n : {0, 1, 10, 8191, 8192, 8193, 0, 64, 100000, 16384, 5, 0})
    tensors.push_back(torch::randn({n}, n % 2 ? at::kFloat : at::kDouble));
  const auto threads = at::get_num_threads();
  at::set_num_threads(1);
  std::vector<inner::SquaredNumbers> all;
  for (auto& tensor : tensors) all.push_back({tensor});
  const auto sums = inner::sums_of_squares(all);
  for (std::size_t i = 0; i < tensors.size(); ++i)
    REQUIRE(sums[i] == Approx(tensors[i].to(at::kDouble).square().sum().item<double>()).epsilon(1e-12));
  for (int count : {2, 3}) {
    at::set_num_threads(count);
    REQUIRE(inner::sums_of_squares(all) == sums);
  }
  at::set_num_threads(threads);
  REQUIRE(inner::sums_of_squares({}).empty());
}

TEST_CASE("sums_of_squares: rows of a table give bitwise the sum of the table") {
  torch::manual_seed(7);
  for (std::int64_t width : {1, 3, 64, 100, 9000})
    for (auto dtype : {at::kFloat, at::kDouble, at::kBFloat16}) {
      CAPTURE(width, dtype);
      const auto rows = torch::tensor({0, 1, 7, 30, 31, 99});
      const auto values = torch::randn({6, width}).to(dtype), other = torch::randn({5000});
      const auto table = torch::zeros({100, width}, dtype).index_copy_(0, rows, values);
      const auto dense = inner::sums_of_squares({{other}, {table}, {other}});
      CHECK(inner::sums_of_squares({{other}, {values, rows, 100}, {other}}) == dense);
      CHECK(dense[1] > 0);
    }
}

TEST_CASE("the steps on a device: ATen's fused operations, run on the CPU, match the kernels") {
  torch::manual_seed(8);
  const auto host = [](double factor) { return inner::Multiplier{.numerator = factor}; };
  for (auto dtype : {at::kFloat, at::kDouble, at::kBFloat16})
    for (auto& settings : adam_settings) {
      std::vector<inner::ElementStep> ours, atens;
      const auto type = at::toOpMathType(dtype);
      for (std::int64_t n : {1, 5, 1000}) {
        const auto p = torch::randn({n}, dtype), g = torch::randn({n}, dtype), m = torch::randn({n}, type),
                   v = torch::rand({n}, type), x = torch::rand({n}, type);
        const auto q = p.clone();
        ours.push_back({settings, p, g, {m, v, x}});
        atens.push_back({settings, q, g, {m.clone(), v.clone(), x.clone()}});
      }
      const auto gradients_before = atens[2].gradient.clone();
      step_on_cpu(ours, 0.5);
      step_on_device(atens, host(0.5));
      for (std::size_t i = 0; i < ours.size(); ++i) {
        REQUIRE(close(ours[i].parameter, atens[i].parameter, dtype == at::kBFloat16 ? 8e-3 : 1e-5));
        REQUIRE(close(ours[i].state[1], atens[i].state[1], 1e-6));
      }
      REQUIRE(atens[2].gradient.equal(gradients_before));
    }
  for (bool first : {false, true})
    for (double momentum : {0.0, 0.9}) {
      const inner::SgdStep settings{0.1, momentum, momentum != 0 && !first ? 0.2 : 0.0, 0.01, false, first};
      const auto p = torch::randn({100}), q = p.clone(), g = torch::randn({100}), b = torch::randn({100}),
                 c = b.clone();
      step_on_cpu(std::vector<inner::ElementStep>{{settings, p, g, {b}}}, 0.5);
      step_on_device(std::vector<inner::ElementStep>{{settings, q, g, {c}}}, host(0.5));
      REQUIRE(close(p, q, 1e-6));
      if (momentum != 0) REQUIRE(close(b, c, 1e-6));
    }
}

TEST_CASE("the steps on a device run in batches: of one dtype, the same settings, and a limited number of copies") {
  const auto step = [](at::ScalarType dtype, std::int64_t count, std::int64_t size) {
    auto settings = adam_settings[1];
    settings.step = count;
    const auto moments = torch::zeros({size}, at::toOpMathType(dtype));
    return inner::ElementStep{
        settings, torch::zeros({size}, dtype), torch::ones({size}, dtype), {moments, moments.clone()}};
  };
  const auto batches_of = [](const std::vector<inner::ElementStep>& steps, bool multiplied) {
    const FusedSteps fused;
    step_on_device(steps, {.numerator = multiplied ? 0.5 : 1.0});
    return fused.so_far();
  };
  constexpr auto most = inner::most_copied;
  CHECK(batches_of({step(at::kFloat, 1, 5), step(at::kFloat, 1, 6), step(at::kFloat, 2, 5)}, false) == 2);
  CHECK(batches_of({step(at::kFloat, 1, 5), step(at::kDouble, 1, 5), step(at::kBFloat16, 1, 5)}, false) == 3);
  CHECK(batches_of({step(at::kHalf, 1, most - 11), step(at::kHalf, 1, 5), step(at::kHalf, 1, 6)}, false) == 1);
  CHECK(batches_of({step(at::kHalf, 1, most), step(at::kHalf, 1, 5), step(at::kHalf, 1, 6)}, false) == 2);
  CHECK(batches_of({step(at::kFloat, 1, 2 * most), step(at::kFloat, 1, 5)}, false) == 1);
  CHECK(batches_of({step(at::kFloat, 1, 2 * most), step(at::kFloat, 1, 5)}, true) == 3);
  CHECK(batches_of({step(at::kFloat, 1, 2 * most + 1), step(at::kFloat, 1, 5)}, true) == 3);
  CHECK(batches_of({}, true) == 0);
}

TEST_CASE("the steps on a device: a parameter that is cut is updated as if it were whole, copied for any reason") {
  torch::manual_seed(9);
  constexpr auto size = inner::most_copied + 300;
  for (auto dtype : {at::kFloat, at::kBFloat16, at::kComplexFloat}) {
    auto settings = adam_settings[1];
    const auto type = at::toOpMathType(dtype);
    const auto whole = inner::ElementStep{settings,
                                          torch::randn({2, size / 2}, dtype),
                                          torch::randn({2, size / 2}, dtype),
                                          {torch::randn({2, size / 2}, type), torch::rand({2, size / 2}, type)}};
    std::vector<inner::ElementStep> rows;
    for (std::int64_t i = 0; i < 2; ++i)
      rows.push_back({settings,
                      whole.parameter[i].clone(),
                      whole.gradient[i],
                      {whole.state[0][i].clone(), whole.state[1][i].clone()}});
    const auto version = whole.parameter._version();
    step_on_device(std::vector{whole}, inner::Multiplier{.numerator = 0.5});
    step_on_device(rows, inner::Multiplier{.numerator = 0.5});
    for (std::int64_t i = 0; i < 2; ++i) {
      const auto row = rows[static_cast<std::size_t>(i)];
      REQUIRE(close(inner::as_real(whole.parameter[i]), inner::as_real(row.parameter),
                    dtype == at::kBFloat16 ? 8e-3 : 1e-5));
      REQUIRE(close(inner::as_real(whole.state[1][i]), inner::as_real(row.state[1]), 1e-6));
    }
    REQUIRE(whole.parameter._version() > version);
  }
}
