// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/detail/kernels/kernel_loop.hpp>
#include <gradaccum/detail/optimizers/steps.hpp>
#include <gradaccum/grad_accumulator.hpp>
#include <gradaccum/gradients.hpp>
#include <gradaccum/memory_meter.hpp>
#include <gradaccum/optim/adafactor.hpp>

#include "support/kernels_on_device.hpp"
#include "support/leaves.hpp"
#include "support/models.hpp"
#include "support/outcome.hpp"
#include "support/run_kernel.hpp"

#include <functional>
#include <limits>
#include <memory>
#include <sstream>

// Compares Adafactor with plain formulas in float64; pytorch_values/adafactor.test.cpp compares with Python.

namespace ga = gradaccum;
namespace inner = gradaccum::detail;
using ga::optim::Adafactor;
using ga::optim::AdafactorOptions;
using ga::optim::AdafactorParamState;
using ga::optim::AdafactorVariant;
using inner::InstructionSet;
using testing::leaf;
using testing::leaves;
using testing::Parameters;
using testing::same_bits;

namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();

AdafactorOptions pytorch(double lr = 1e-2) {
  return AdafactorOptions(lr).variant(AdafactorVariant::pytorch).eps({1e-7, 1e-3});
}
const std::vector<AdafactorOptions> all_options{
    AdafactorOptions(),
    AdafactorOptions(0.1).relative_step(false).scale_parameter(false).beta1(0.9),
    AdafactorOptions().warmup_init(true).weight_decay(0.3),
    AdafactorOptions(0.05).relative_step(false).beta1(0.5).weight_decay(0.1).d(0.3).eps({0.5, 0.7}).beta2_decay(-0.5),
    pytorch(),
    pytorch(0.3).weight_decay(0.1).d(2.0).beta1(0.8),
    pytorch(0.3).eps({0.9, 0.1}),
    AdafactorOptions(0.1).d(infinity).beta2_decay(0)};

/// One parameter in float64, with the formulas of the paper, and of PyTorch if they differ.
struct Reference {
  Reference(const at::Tensor& start, AdafactorOptions with) : p(start.detach().to(at::kDouble).clone()), by(with) {}

  void step(const at::Tensor& gradient) {
    const auto g = gradient.detach().to(at::kDouble);
    const bool torchs = by.variant() == AdafactorVariant::pytorch;
    const auto [eps1, eps2] = by.eps();
    const double beta2 = 1 - std::pow(++t, by.beta2_decay()), count = static_cast<double>(p.numel());
    double size = by.lr();
    if (by.relative_step()) size = std::min(by.warmup_init() ? 1e-6 * t : by.lr(), 1 / std::sqrt(t));
    if (by.scale_parameter()) size *= std::max(eps2, p.norm().item<double>() / std::sqrt(count));
    const auto squares = torchs ? g * g : g * g + eps1;
    const auto moved = [&](const at::Tensor& old, const at::Tensor& fresh) {
      return old.defined() ? beta2 * old + (1 - beta2) * fresh : fresh;
    };
    at::Tensor estimate;
    if (p.dim() < 2) {
      estimate = variance = moved(variance, squares);
    } else {
      rows = moved(rows, squares.mean(-1, true));
      columns = moved(columns, squares.mean(-2, true));
      const auto mean = rows.mean(-2, true);
      estimate = torch::matmul(rows, columns) / (torchs ? mean.clamp_min(eps1) : mean);
    }
    if (torchs) estimate = estimate.clamp_min(eps1 * eps1);
    auto update = g / estimate.sqrt();
    update = size * update / std::max(1.0, update.norm().item<double>() / std::sqrt(count) / by.d());
    if (by.beta1() > 0)
      update = average = (1 - by.beta1()) * update + (average.defined() ? by.beta1() * average : torch::zeros_like(p));
    p = p - by.weight_decay() * (torchs ? by.lr() : size) * p - update;
  }

  at::Tensor p, rows, columns, variance, average;
  AdafactorOptions by;
  double t = 0;
};

at::Tensor some_gradient(const at::Tensor& parameter, int seed) {
  torch::manual_seed(seed);
  return torch::randn(parameter.sizes(), parameter.options().dtype(at::kDouble)).to(parameter.scalar_type());
}

double difference(const at::Tensor& a, const at::Tensor& b) {
  if (a.numel() == 0) return 0;
  return (a.detach().to(at::kDouble) - b.detach().to(at::kDouble)).abs().max().item<double>();
}

torch::OrderedDict<std::string, at::Tensor> named(const Parameters& parameters) {
  torch::OrderedDict<std::string, at::Tensor> names;
  for (std::size_t i = 0; i < parameters.size(); ++i) names.insert("p" + std::to_string(i), parameters[i]);
  return names;
}

void train(torch::optim::Optimizer& optimizer, const Parameters& parameters, int from, int to) {
  for (int step = from; step < to; ++step) {
    for (auto& p : parameters) p.mutable_grad() = some_gradient(p.detach(), step);
    optimizer.step();
  }
}

const std::vector<std::vector<std::int64_t>> shapes{{},     {1},      {9},     {1, 1},       {1, 40},      {40, 1},
                                                    {7, 5}, {33, 17}, {2, 65}, {4, 3, 6},    {3, 2, 5, 4}, {300, 20},
                                                    {0, 3}, {2, 0},   {0},     {2, 300, 33}, {5, 1, 1},    {20000}};

}  // namespace

TEST_CASE("Adafactor: all options, shapes of 0 to 4 dimensions; in float64, equal the formulas") {
  for (auto& options : all_options)
    for (auto& shape : shapes) {
      torch::manual_seed(1);
      auto p = leaf(torch::randn(shape, at::kDouble));
      Reference reference(p, options);
      Adafactor adafactor({p}, options);
      for (int step = 0; step < 4 && p.numel() > 0; ++step) {
        p.mutable_grad() = some_gradient(p.detach(), step) * (step == 2 ? 10 : 0.1);
        reference.step(p.grad());
        adafactor.step();
        INFO("shape " << p.sizes() << ", step " << step);
        REQUIRE(difference(p, reference.p) < 1e-12);
      }
      if (p.numel() == 0) train(adafactor, {p}, 0, 2);
    }
  // Control: another option gives a different result.
  auto p = leaf(torch::randn({7, 5}, at::kDouble));
  Reference reference(p, pytorch(0.3));
  Adafactor adafactor({p});
  p.mutable_grad() = some_gradient(p.detach(), 1);
  reference.step(p.grad());
  adafactor.step();
  CHECK(difference(p, reference.p) > 1e-4);
}

TEST_CASE("Adafactor: float32 and 16-bit parameters with float32 state; their gradients may be float32 or float64") {
  const std::map<at::ScalarType, double> tolerance{{at::kFloat, 2e-6}, {at::kHalf, 1e-3}, {at::kBFloat16, 8e-3}};
  for (auto [dtype, relative] : tolerance)
    for (auto gradient_type : {dtype, at::kFloat, at::kDouble})
      for (auto& options : all_options)
        for (auto& shape : shapes) {
          torch::manual_seed(2);
          auto p = leaf(torch::randn(shape).to(dtype));
          Reference reference(p, options);
          Adafactor adafactor({p}, options);
          for (int step = 0; step < 3; ++step) {
            const auto gradient = some_gradient(p.detach().to(at::kDouble), step).to(gradient_type);
            reference.step(gradient);
            p.mutable_grad() = gradient;
            adafactor.step();
            INFO(dtype << ", shape " << p.sizes() << ", step " << step);
            REQUIRE(torch::allclose(p.detach().to(at::kDouble), reference.p, relative, relative));
            reference.p = p.detach().to(at::kDouble);  // each step is exact up to the last bit but one
          }
          if (p.numel() == 0) continue;
          for (auto& [slot, tensor] : adafactor.named_state(named({p})))
            if (slot.find("step") == std::string::npos) REQUIRE(tensor.scalar_type() == at::kFloat);
        }
}

namespace {

/// Unaligned memory, with guard elements before and after.
struct Array {
  Array(const at::Tensor& numbers, at::ScalarType dtype) : all(torch::full({numbers.numel() + 6}, 7.0, dtype)) {
    inner().copy_(numbers.flatten());
  }
  at::Tensor inner() const { return all.narrow(0, 3, all.numel() - 6); }
  void* data() const { return inner().mutable_data_ptr(); }
  bool intact() const {
    return all.narrow(0, 0, 3).eq(7).all().item<bool>() && all.slice(0, -3).eq(7).all().item<bool>();
  }
  at::Tensor all;
};

struct Types {
  at::ScalarType parameter, gradient, state;
  double tolerance;
};
const std::vector<Types> all_types{
    {at::kDouble, at::kDouble, at::kDouble, 1e-13},   {at::kFloat, at::kFloat, at::kFloat, 2e-6},
    {at::kHalf, at::kHalf, at::kFloat, 1e-3},         {at::kHalf, at::kFloat, at::kFloat, 1e-3},
    {at::kBFloat16, at::kBFloat16, at::kFloat, 8e-3}, {at::kBFloat16, at::kFloat, at::kFloat, 8e-3}};

const inner::AdafactorNumbers numbers{.multiplier = 0.5,
                                      .beta1 = 0.7,
                                      .beta2 = 0.4,
                                      .fresh2 = 0.6,
                                      .added = 0.01,
                                      .least_mean = 0.1,
                                      .largest_scale = 3,
                                      .kept = 0.9,
                                      .step_size = 0.2};

/// Checks one step of matrices in two parts, or of vectors, with one instruction set.
void check_kernels(const inner::AdafactorKernels& kernels, const Types& types, at::IntArrayRef shape, bool momentum) {
  const auto matrices = shape[0], rows = shape[1], columns = shape[2];
  const auto like = torch::randn(shape, at::kDouble);
  const Array p(like, types.parameter), g(torch::randn(shape), types.gradient), m(torch::randn(shape), types.state),
      r(torch::rand({matrices, rows, 1}), types.state), c(torch::rand({matrices, 1, columns}), types.state),
      row_factors(torch::zeros({matrices * rows}), types.state),
      column_factors(torch::zeros({2 * matrices * columns}), types.state);
  const auto in_float64 = [&](const Array& array, at::IntArrayRef sizes) {
    return array.inner().to(at::kDouble).reshape(sizes).clone();
  };
  const auto g64 = in_float64(g, shape) * numbers.multiplier, p64 = in_float64(p, shape);
  const auto r64 = in_float64(r, {matrices, rows, 1}) * 0.4 + 0.6 * (g64.square().mean(-1, true) + 0.01);
  const auto c64 = in_float64(c, {matrices, 1, columns}) * 0.4 + 0.6 * (g64.square().mean(-2, true) + 0.01);
  const auto update = g64 * (r64 * c64 / r64.mean(-2, true).clamp_min(0.1)).rsqrt().clamp_max(3);
  const auto m64 = in_float64(m, shape) * 0.7 + update * (0.2 * 0.3);

  inner::AdafactorOperand o{.numbers = numbers,
                            .parameter = p.data(),
                            .gradient = g.data(),
                            .row_var = r.data(),
                            .col_var = c.data(),
                            .exp_avg = momentum ? m.data() : nullptr,
                            .row_factors = row_factors.data(),
                            .column_factors = column_factors.data(),
                            .matrices = matrices,
                            .rows = rows,
                            .columns = columns,
                            .parts = 2};
  double squares = 0;
  for (std::int64_t i = 0; i < matrices; ++i) {
    kernels.sums(o, i * rows, i * rows + rows / 2, 0);
    kernels.sums(o, i * rows + rows / 2, (i + 1) * rows, 1);
    kernels.factors(o, i);
    squares += kernels.update_squares(o, i * rows, (i + 1) * rows);
  }
  kernels.move(o, 0, matrices * rows);
  const double of_state = types.state == at::kDouble ? 1e-13 : 3e-6;
  const auto close = [](const at::Tensor& a, const at::Tensor& b, double tolerance) {
    return torch::allclose(a.to(at::kDouble), b.flatten(), tolerance, tolerance);
  };
  REQUIRE(close(r.inner(), r64, of_state));
  REQUIRE(close(c.inner(), c64, of_state));
  REQUIRE(squares == Approx(update.square().sum().item<double>()).epsilon(of_state));
  REQUIRE(close(p.inner(), p64 * 0.9 - (momentum ? m64 : update * 0.2), types.tolerance));
  if (momentum) REQUIRE(close(m.inner(), m64, of_state));
  for (auto* array : {&p, &g, &m, &r, &c, &row_factors, &column_factors}) REQUIRE(array->intact());
}

void check_vector_kernels(const inner::AdafactorKernels& kernels, const Types& types, std::int64_t n, bool momentum) {
  const Array p(torch::randn({n}), types.parameter), g(torch::randn({n}), types.gradient),
      m(torch::randn({n}), types.state), v(torch::rand({n}), types.state);
  const auto g64 = g.inner().to(at::kDouble) * 0.5, p64 = p.inner().to(at::kDouble).clone();
  const auto v64 = v.inner().to(at::kDouble) * 0.4 + 0.6 * (g64.square() + 0.01);
  const auto update = g64 * v64.rsqrt().clamp_max(3), m64 = m.inner().to(at::kDouble) * 0.7 + update * (0.2 * 0.3);
  inner::AdafactorOperand o{.numbers = numbers,
                            .parameter = p.data(),
                            .gradient = g.data(),
                            .variance = v.data(),
                            .exp_avg = momentum ? m.data() : nullptr,
                            .matrices = 1,
                            .rows = n,
                            .columns = 1,
                            .parts = 1};
  const auto half = n / 2;
  const double of_state = types.state == at::kDouble ? 1e-13 : 3e-6;
  const auto squares = kernels.vector_squares(o, 0, half) + kernels.vector_squares(o, half, n);
  REQUIRE(squares == Approx(update.square().sum().item<double>()).epsilon(of_state));
  kernels.move(o, half, n);
  kernels.move(o, 0, half);
  REQUIRE(torch::allclose(v.inner().to(at::kDouble), v64, of_state));
  REQUIRE(torch::allclose(p.inner().to(at::kDouble), p64 * 0.9 - (momentum ? m64 : update * 0.2), types.tolerance,
                          types.tolerance));
  for (auto* array : {&p, &g, &m, &v}) REQUIRE(array->intact());
}

}  // namespace

TEST_CASE("Adafactor's kernels: all instruction sets, types and odd sizes") {
  torch::manual_seed(3);
  for (auto& types : all_types) {
    std::vector<inner::AdafactorKernels> all{inner::narrow_adafactor_kernels({types.parameter, types.gradient, false})};
    for (auto set : testing::instruction_sets())
      all.push_back(inner::adafactor_kernels({types.parameter, types.gradient, false}, set));
    for (auto& kernels : all) {
      for (std::int64_t columns = 1; columns <= 200; columns += columns < 40 ? 1 : 31)
        check_kernels(kernels, types, {1 + columns % 3, 2 + columns % 5, columns}, columns % 2 == 0);
      for (std::int64_t rows = 2; rows <= 100; rows += 7) check_kernels(kernels, types, {2, rows, 5}, rows % 2 == 0);
      check_kernels(kernels, types, {1, 2, 9001}, false);
      for (std::int64_t n = 1; n <= 200; n += n < 70 ? 1 : 23) check_vector_kernels(kernels, types, n, n % 2 == 0);
      check_vector_kernels(kernels, types, 9001, true);
    }
  }
}

TEST_CASE("Adafactor: parameters and gradients of any strides; memory between their elements stays unchanged") {
  const std::vector<std::function<at::Tensor(const at::Tensor&)>> layouts{
      [](auto& t) { return t.transpose(-1, -2).contiguous().transpose(-1, -2); },
      [](auto& t) {
        return torch::stack({t, t}, -1).select(-1, 0);
      },
      [](auto& t) { return t.transpose(0, -1).contiguous().transpose(0, -1); },
      [](auto& t) { return at::_neg_view(-t); },
  };
  for (auto& options : all_options)
    for (auto& shape : std::vector<std::vector<std::int64_t>>{{8, 6}, {4, 3, 5}, {150, 40}})
      for (std::size_t i = 0; i < layouts.size() * 2; ++i) {
        const bool of_parameter = i < layouts.size();
        const auto& layout = layouts[i % layouts.size()];
        torch::manual_seed(4);
        auto plain = leaf(torch::randn(shape, at::kDouble));
        auto strided = of_parameter ? layout(plain.detach()) : leaf(plain);
        const auto storage = at::from_blob(strided.storage().mutable_data(),
                                           {static_cast<std::int64_t>(strided.storage().nbytes() / 8)}, at::kDouble);
        const auto before = storage.clone();
        Adafactor a({plain}, options), b({strided}, options);
        for (int step = 0; step < 3; ++step) {
          plain.mutable_grad() = some_gradient(plain.detach(), step);
          strided.mutable_grad() = of_parameter ? plain.grad().clone() : layout(plain.grad());
          a.step();
          b.step();
        }
        INFO("layout " << i << ", shape " << plain.sizes());
        REQUIRE(same_bits(plain.detach(), strided.resolve_neg()));
        REQUIRE(storage.ne(before).sum().item<std::int64_t>() == plain.numel());
      }
}

TEST_CASE("Adafactor: autograd detects the step") {
  for (bool transposed : {false, true}) {
    auto p = torch::ones({3, 2});
    if (transposed) p = p.t();
    p.requires_grad_();
    auto loss = (p * p).sum();
    p.mutable_grad() = torch::ones_like(p);
    Adafactor({p}).step();
    REQUIRE_ERROR("modified by an inplace operation", loss.backward());
  }
}

TEST_CASE("Adafactor: with eps1^2 of 0 in float32, a gradient of zeros still changes nothing") {
  const auto p = torch::ones({4, 5});
  const inner::AdafactorStep step{{.lr = 0.1,
                                   .step_size = 0.1,
                                   .fresh2 = 1,
                                   .eps1 = 1e-30,
                                   .eps2 = 0,
                                   .d = 1,
                                   .weight_decay = 0,
                                   .beta1 = 0,
                                   .scale_parameter = true,
                                   .pytorch = true},
                                  p,
                                  torch::zeros({4, 5}),
                                  torch::zeros({4, 1}),
                                  torch::zeros({1, 5}),
                                  at::Tensor(),
                                  at::Tensor()};
  inner::step_on_cpu(std::vector{step}, 1);
  CHECK(p.eq(1).all().item<bool>());
}

TEST_CASE("Adafactor: the bits do not depend on the number of threads, nor on other parameters") {
  const auto run = [](int threads, bool all, std::optional<std::uint64_t> seed) {
    at::set_num_threads(threads);
    torch::manual_seed(6);
    auto p = leaves({torch::randn({700, 300}), torch::randn({60000}), torch::randn({30, 20, 5, 3}),
                     torch::randn({2, 400, 50}), torch::randn({77, 131}).to(at::kBFloat16),
                     torch::randn({700, 129}).to(at::kBFloat16)});
    if (all)
      for (int i = 0; i < 20; ++i) p.push_back(leaf(torch::randn({50, 1000 * (i % 3)})));
    Adafactor adafactor(p, AdafactorOptions().beta1(0.5));
    if (seed) adafactor.stochastic_rounding(*seed);
    train(adafactor, p, 0, 3);
    p.resize(6);
    return p;
  };
  const auto threads = at::get_num_threads();
  for (auto seed : {std::optional<std::uint64_t>(), std::optional<std::uint64_t>(17)}) {
    const auto one = run(1, false, seed);
    for (int count : {2, 3, 7})
      for (bool all : {false, true}) CHECK(same_bits(run(count, all, seed), one));
    CHECK_FALSE(same_bits(run(1, false, 18), one));
  }
  at::set_num_threads(threads);
}

TEST_CASE("Adafactor: stochastic rounding keeps, in the mean, steps that bfloat16 would lose") {
  for (auto& shape : std::vector<std::vector<std::int64_t>>{{100, 33}, {5000}}) {
    const auto run = [&](bool stochastic) {
      auto p = leaf(torch::ones(shape, at::kBFloat16));
      Adafactor adafactor({p}, AdafactorOptions(1e-5).relative_step(false));
      if (stochastic) adafactor.stochastic_rounding(1);
      for (int step = 0; step < 100; ++step) {
        p.mutable_grad() = torch::ones_like(p.detach());
        adafactor.step();
      }
      return p.detach().to(at::kFloat).mean().item<double>();
    };
    CHECK(run(false) == 1);
    CHECK(run(true) == Approx(1 - 100 * 1e-5).margin(1e-4));
  }
}

TEST_CASE("Adafactor: step(Gradients) multiplies and clips in its pass, and does not change the gradients") {
  auto a = leaves({torch::randn({50}, at::kDouble), torch::randn({4, 6}, at::kDouble)}), b = leaves(a);
  Adafactor plain(a), taking(b);
  for (int step = 0; step < 4; ++step) {
    for (std::size_t i = 0; i < a.size(); ++i) {
      a[i].mutable_grad() = some_gradient(a[i].detach(), step);
      b[i].mutable_grad() = a[i].grad() * 1024;
    }
    torch::nn::utils::clip_grad_norm_(a, 0.5);
    plain.step();
    const auto before = b[0].grad().clone();
    ga::Gradients gradients(b);
    gradients.factor().divide(1024.0);
    gradients.factor().require_finite();
    ga::clip_grad_norm_(gradients, 0.5);
    taking.step(gradients);
    CHECK(same_bits(b[0].grad(), before));
  }
  for (std::size_t i = 0; i < a.size(); ++i) CHECK(difference(a[i], b[i]) < 1e-12);
}

TEST_CASE("Adafactor in windows of 3, weighted, clipped, flushed: the plain step of the mean gradient") {
  using namespace testing;
  const auto batches = make_batches({4, 4, 4, 4, 4, 4, 4, 4});
  const std::vector<double> weights{5, 1, 2, 3, 3, 4, 1, 6};
  for (bool weighted : {false, true}) {
    auto a = make_model(), b = make_model();
    Adafactor in_windows(a->parameters()), plain(b->parameters());
    ga::GradAccumulator optimizer(in_windows, {.steps = 3});
    for (std::size_t i = 0; i < batches.size(); ++i) {
      auto loss = loss_of(a, batches[i]);
      weighted ? optimizer.backward(ga::Loss{loss, weights[i]}) : loss.backward();
      optimizer.clip_grad_norm_(0.3);
      optimizer.step();
      optimizer.zero_grad();
    }
    optimizer.flush();
    for (std::size_t from = 0; from < batches.size(); from += 3) {
      plain.zero_grad();
      double total = 0;
      const auto to = std::min(from + 3, batches.size());
      for (auto i = from; i < to; ++i) total += weighted ? weights[i] : 1;
      for (auto i = from; i < to; ++i) (loss_of(b, batches[i]) * ((weighted ? weights[i] : 1) / total)).backward();
      torch::nn::utils::clip_grad_norm_(b->parameters(), 0.3);
      plain.step();
    }
    CHECK(distance(a, b) < 1e-10);
  }
}

TEST_CASE("Adafactor: an overflow that a scaler detected changes nothing, the state and the step count included") {
  for (double bad : {infinity, -infinity, double(NAN)}) {
    auto p = leaves({torch::ones({40, 3}), torch::ones({5})});
    Adafactor adafactor(p);
    const auto step = [&](bool finite) {
      for (auto& each : p) each.mutable_grad() = torch::ones_like(each.detach());
      if (!finite) p[0].mutable_grad()[17][1] = bad;
      ga::Gradients gradients(p);
      gradients.factor().require_finite();
      adafactor.step(gradients);
    };
    step(false);
    CHECK(adafactor.state().empty());
    step(true);
    const auto after = leaves(p);
    auto state = adafactor.named_state(named(p));
    for (auto& [name, tensor] : state) tensor = tensor.clone();
    step(false);
    CHECK(same_bits(after, p));
    for (auto& [name, tensor] : adafactor.named_state(named(p))) CHECK(same_bits(tensor, state.at(name)));
    CHECK(state.at("step.p0").item<double>() == 1);
  }
}

TEST_CASE("Adafactor: special gradients and parameters") {
  for (auto& options : {AdafactorOptions(), pytorch(), AdafactorOptions().beta1(0.9)})
    for (auto& shape : std::vector<std::vector<std::int64_t>>{{9}, {5, 9}, {3, 2, 3}, {1, 1}, {}}) {
      const auto after = [&](const at::Tensor& start, double gradient, int place = -1) {
        auto p = leaf(start);
        Adafactor adafactor({p}, options);
        for (int step = 0; step < 2; ++step) {
          p.mutable_grad() = torch::full_like(p.detach(), place < 0 ? gradient : 1.0);
          if (place >= 0) p.mutable_grad().view(-1)[place] = gradient;
          adafactor.step();
        }
        return p.detach();
      };
      for (auto dtype : {at::kFloat, at::kDouble}) {
        const auto ones = torch::ones(shape, dtype);
        INFO("shape " << ones.sizes());
        for (double bad : {infinity, -infinity, double(NAN)}) CHECK(after(ones, bad, 0).isnan().any().item<bool>());
        CHECK(after(ones, 0.0).eq(1).all().item<bool>());
        CHECK(after(ones, -0.0).eq(1).all().item<bool>());
        for (double tiny : {1e-45, 1e-40, 1e-30, 1e-20}) CHECK(after(ones, tiny).isfinite().all().item<bool>());
        CHECK(after(torch::zeros(shape, dtype), 1.0).lt(0).all().item<bool>());  // eps[1] of a step, at least
      }
      // If float64 squares are finite, the size of a gradient does not matter.
      const auto ones = torch::ones(shape, at::kDouble);
      if (options.variant() == AdafactorVariant::paper) CHECK(difference(after(ones, 1e100), after(ones, 1.0)) < 1e-12);
    }
  auto p = leaf(torch::randn({4, 5})), q = leaf(p);
  Adafactor still({p}, AdafactorOptions(0.0)),
      manual({q}, AdafactorOptions(0.0).relative_step(false).weight_decay(0.1));
  train(still, {p}, 0, 3);
  const auto before = leaf(q);
  train(manual, {q}, 0, 3);
  CHECK(same_bits(p.detach(), q.detach()));
  CHECK(same_bits(q.detach(), before.detach()));
}

TEST_CASE("Adafactor: files and named state resume with the same bits") {
  for (auto dtype : {at::kFloat, at::kDouble, at::kBFloat16})
    for (auto& options : all_options)
      for (bool by_name : {false, true}) {
        torch::manual_seed(7);
        const auto start = std::vector{torch::randn({6, 5}).to(dtype), torch::randn({9}).to(dtype),
                                       torch::randn({2, 3, 4}).to(dtype), torch::randn({}).to(dtype)};
        auto a = leaves(start);
        Adafactor first(a, options);
        first.stochastic_rounding(3);
        train(first, a, 0, 3);
        auto b = leaves(a);
        Adafactor second(b, AdafactorOptions(by_name ? options : AdafactorOptions(0.7)));
        second.stochastic_rounding(3);
        if (by_name) {
          second.load_named_state(named(b), first.named_state(named(a)));
        } else {
          std::stringstream file;
          torch::save(first, file);
          torch::load(second, file);
        }
        CHECK(static_cast<AdafactorOptions&>(second.param_groups()[0].options()) == options);
        train(first, a, 3, 6);
        train(second, b, 3, 6);
        CHECK(same_bits(a, b));
        Adafactor afresh(b, options);
        const auto names = first.named_state(named(a));
        CHECK(names.contains("row_var.p0"));
        CHECK(names.at("row_var.p2").sizes() == at::IntArrayRef({2, 3, 1}));
        CHECK(names.at("col_var.p2").sizes() == at::IntArrayRef({2, 1, 4}));
        CHECK(names.contains("exp_avg.p0") == (options.beta1() != 0));
        CHECK(names.contains("variance.p1"));
        CHECK_FALSE(names.contains("variance.p0"));
        CHECK(names.at("step.p3").item<double>() == 6);
      }
  // Control: without the state the next steps differ.
  auto a = leaves({torch::randn({6, 5})});
  Adafactor first(a);
  train(first, a, 0, 3);
  auto b = leaves(a);
  Adafactor afresh(b);
  train(first, a, 3, 4);
  train(afresh, b, 3, 4);
  CHECK_FALSE(same_bits(a, b));
}

TEST_CASE("Adafactor: incompatible state is refused, and nothing changes") {
  auto p = leaves({torch::ones({4, 5}), torch::ones({3})});
  Adafactor adafactor(p, AdafactorOptions().beta1(0.5));
  train(adafactor, p, 0, 2);
  auto good = adafactor.named_state(named(p));
  for (auto& [name, tensor] : good) tensor = tensor.clone();
  const auto attempt = [&](auto change) {
    auto state = good;
    change(state);
    return testing::error_of([&] { adafactor.load_named_state(named(p), state); });
  };
  const std::vector<std::pair<std::string, std::function<void(std::map<std::string, at::Tensor>&)>>> attempts{
      {"row_var must be floating, of shape [4, 1] on cpu, got [5, 1]",
       [](auto& s) {
         s["row_var.p0"] = torch::ones({5, 1});
       }},
      {"col_var must be floating, of shape [1, 5]", [](auto& s) { s["col_var.p0"] = torch::ones({5}); }},
      {"row_var must be floating",
       [](auto& s) {
         s["row_var.p0"] = torch::ones({4, 1}, at::kInt);
       }},
      {"variance must be floating, of shape [3]", [](auto& s) { s["variance.p1"] = torch::ones({2}); }},
      {"exp_avg must be floating, of shape [4, 5]",
       [](auto& s) {
         s["exp_avg.p0"] = torch::ones({5, 4});
       }},
      {"row_var of step 2 must be defined", [](auto& s) { s.erase("row_var.p0"); }},
      {"variance of step 2 must be defined", [](auto& s) { s.erase("variance.p1"); }},
      {"has no variance, got one of [3]", [](auto& s) { s["variance.p0"] = torch::ones({3}); }},
      {"has no row_var", [](auto& s) { s["row_var.p1"] = torch::ones({3}); }},
      {"must be dense",
       [](auto& s) {
         s["col_var.p0"] = torch::ones({1, 5}).to_sparse();
       }},
      {"undefined", [](auto& s) { s["col_var.p0"] = at::Tensor(); }},
      {"whole number >= 0, got -1", [](auto& s) { s["step.p0"] = torch::tensor(-1.0); }},
      {"state of p0 is incomplete", [](auto& s) { s.erase("step.p0"); }},
      {"momentum_buffer.p0", [](auto& s) {
         s["momentum_buffer.p0"] = torch::ones({4, 5});
       }}};
  for (auto& [message, change] : attempts) {
    const auto found = attempt(change);
    INFO("expected '" << message << "', got '" << found << "'");
    CHECK(testing::contains(found, message));
    for (auto& [name, tensor] : adafactor.named_state(named(p))) CHECK(same_bits(tensor, good.at(name)));
  }
  CHECK(attempt([](auto& s) { s.erase("exp_avg.p0"); }).empty());  // momentum may begin later

  // In a file of LibTorch it is detected before any update.
  auto q = leaves({torch::ones({2}), torch::ones({6, 5})});
  Adafactor other(q);
  std::stringstream file;
  torch::save(adafactor, file);
  torch::load(other, file);
  for (auto& each : q) each.mutable_grad() = torch::ones_like(each.detach());
  REQUIRE_ERROR("variance of step 2 must be defined", other.step());
  for (auto& each : q) CHECK(each.eq(1).all().item<bool>());
  for (auto step : {std::int64_t{-1}, std::numeric_limits<std::int64_t>::max()}) {
    static_cast<AdafactorParamState&>(*adafactor.state().at(p[1].unsafeGetTensorImpl())).step(step);
    const auto before = leaves(p);
    REQUIRE_ERROR("step count must be", adafactor.step());
    CHECK(same_bits(before, p));
  }
}

TEST_CASE("Adafactor: parameters that cannot be stepped are refused before any update") {
  const auto check_refused = [](const std::string& part, at::Tensor bad, const at::Tensor& gradient) {
    auto good = leaf(torch::ones({3, 2}, at::kBFloat16));
    good.mutable_grad() = torch::ones_like(good.detach());
    bad.mutable_grad() = gradient;
    Adafactor adafactor(Parameters{good, bad});
    adafactor.stochastic_rounding(1);
    REQUIRE_ERROR(part, adafactor.step());
    CHECK(good.eq(1).all().item<bool>());
    CHECK(adafactor.state().empty());
    CHECK(adafactor.named_state(named({good, bad})).empty());  // not even a count of roundings
  };
  check_refused("Adafactor: a gradient must be dense, got a sparse one", leaf(torch::ones({3, 2})),
                torch::ones({3, 2}).to_sparse());
  check_refused("Adafactor: a parameter must be real", leaf(torch::ones({3, 2}, at::kComplexFloat)),
                torch::ones({3, 2}, at::kComplexFloat));
  check_refused("single memory location", torch::zeros({1}).expand({4}).detach(), torch::ones({4}));
  auto shrunk = leaf(torch::ones({3, 4}));
  shrunk.mutable_grad() = torch::ones({3, 4});
  shrunk.set_data(torch::zeros({9, 4}));
  check_refused("must have the shape and device of its parameter, [9, 4]", shrunk, shrunk.grad());
  check_refused("must be floating or complex, of 16 bits or more", torch::ones({3}).to(at::kFloat8_e5m2),
                torch::ones({3}).to(at::kFloat8_e5m2));
  auto p = leaf(torch::ones({3}));
  p.mutable_grad() = torch::ones({3});
  REQUIRE_ERROR("Adafactor: a parameter of shape [3] is listed twice", Adafactor({p, p}).step());
  auto other = leaf(p);
  other.mutable_grad() = torch::ones({3});
  Adafactor adafactor({p});
  REQUIRE_ERROR("got those of other parameters", adafactor.step(ga::Gradients(Parameters{other})));
}

TEST_CASE("Adafactor: wrong options are refused when they are given, loaded or changed") {
  const std::vector<std::pair<std::string, AdafactorOptions>> wrong{
      {"lr must be finite and >= 0, got -1", AdafactorOptions(-1)},
      {"lr must be finite", AdafactorOptions(NAN)},
      {"lr must be finite", AdafactorOptions(infinity)},
      {"beta2_decay must be finite and <= 0, got 0.8", AdafactorOptions().beta2_decay(0.8)},
      {"beta2_decay must be", AdafactorOptions().beta2_decay(NAN)},
      {"eps[0], of the squared gradient, must be finite and >= 0, got -1", AdafactorOptions().eps({-1, 0})},
      {"eps[1], of the parameter's RMS, must be", AdafactorOptions().eps({0, NAN})},
      {"d must be > 0, got 0", AdafactorOptions().d(0)},
      {"d must be > 0", AdafactorOptions().d(NAN)},
      {"weight_decay must be finite and >= 0, got -0.1", AdafactorOptions().weight_decay(-0.1)},
      {"weight_decay must be", AdafactorOptions().weight_decay(NAN)},
      {"beta1 must be in [0, 1), got 1", AdafactorOptions().beta1(1)},
      {"beta1 must be in [0, 1)", AdafactorOptions().beta1(NAN)},
      {"warmup_init must come with relative_step", AdafactorOptions().warmup_init(true).relative_step(false)},
      {"variant must be", AdafactorOptions().variant(static_cast<AdafactorVariant>(7))}};
  for (auto& [part, wrong_options] : wrong) {
    const auto& options = wrong_options;  // clang's lambdas do not capture bindings
    auto p = leaf(torch::ones({3, 2}));
    p.mutable_grad() = torch::ones({3, 2});
    REQUIRE_ERROR("Adafactor: " + part, Adafactor({p}, options));
    std::vector<torch::optim::OptimizerParamGroup> groups;
    groups.emplace_back(Parameters{p}, std::make_unique<AdafactorOptions>(options));
    REQUIRE_ERROR(part, Adafactor(groups));
    Adafactor adafactor({p});
    REQUIRE_ERROR(part, adafactor.add_param_group(groups[0]));
    REQUIRE(adafactor.param_groups().size() == 1);
    std::stringstream file;
    {
      Adafactor saved({leaf(p)});
      static_cast<AdafactorOptions&>(saved.param_groups()[0].options()) = options;
      torch::save(saved, file);
    }
    CHECK_FALSE(testing::error_of([&] { torch::load(adafactor, file); }).empty());
    CHECK(static_cast<AdafactorOptions&>(adafactor.param_groups()[0].options()) == AdafactorOptions());
    static_cast<AdafactorOptions&>(adafactor.param_groups()[0].options()) = options;
    REQUIRE_ERROR(part, adafactor.step());
    CHECK(p.eq(1).all().item<bool>());
  }
  Adafactor adafactor({leaf(torch::ones({3}))});
  REQUIRE_ERROR("options of a group must be AdafactorOptions",
                adafactor.add_param_group({{leaf(torch::ones({3}))}, std::make_unique<torch::optim::SGDOptions>(0.1)}));
  CHECK_FALSE(AdafactorOptions() == AdafactorOptions().beta1(0.1));
  CHECK_FALSE(AdafactorOptions() == pytorch());
}

TEST_CASE("Adafactor: groups with separate options, frozen parameters, parameters without a gradient") {
  auto p =
      leaves({torch::randn({4, 5}, at::kDouble), torch::randn({6}, at::kDouble), torch::randn({3, 3}, at::kDouble)});
  const auto frozen = torch::ones({2, 2}, at::kDouble);
  Adafactor adafactor({p[0], frozen});
  adafactor.add_param_group({{p[1], p[2]}, std::make_unique<AdafactorOptions>(pytorch(0.2).weight_decay(0.1))});
  Reference a(p[0], AdafactorOptions()), b(p[1], pytorch(0.2).weight_decay(0.1)),
      c(p[2], pytorch(0.2).weight_decay(0.1));
  for (int step = 0; step < 6; ++step) {
    adafactor.zero_grad();
    for (std::size_t i = 0; i < 3; ++i) {
      if (step % 3 == static_cast<int>(i)) continue;  // each parameter has its own count of steps
      p[i].mutable_grad() = some_gradient(p[i].detach(), step);
      (i == 0 ? a : i == 1 ? b : c).step(p[i].grad());
    }
    adafactor.step();
  }
  CHECK(difference(p[0], a.p) < 1e-12);
  CHECK(difference(p[1], b.p) < 1e-12);
  CHECK(difference(p[2], c.p) < 1e-12);
  CHECK(frozen.eq(1).all().item<bool>());
  CHECK(adafactor.state().size() == 3);
  Adafactor none((Parameters()));
  none.step();
  CHECK(none.state().empty());
}

TEST_CASE("Adafactor: LibTorch's schedulers change its learning rate; a closure's loss is returned") {
  auto p = leaf(torch::ones({3, 4}, at::kDouble));
  Adafactor adafactor({p}, AdafactorOptions(0.1).relative_step(false));
  Reference reference(p, AdafactorOptions(0.1).relative_step(false));
  torch::optim::StepLR scheduler(adafactor, 2, 0.5);
  for (int step = 0; step < 6; ++step) {
    const auto loss = adafactor.step([&] {
      adafactor.zero_grad();
      auto result = (p * p).sum();
      result.backward();
      return result;
    });
    CHECK(loss.item<double>() == Approx(reference.p.square().sum().item<double>()));
    reference.by.lr(0.1 * std::pow(0.5, std::max(step - 1, 0) / 2));  // LibTorch counts 0 twice
    reference.step(2 * reference.p);
    scheduler.step();
  }
  CHECK(difference(p, reference.p) < 1e-12);
}

TEST_CASE("Adafactor: it learns XOR, and finds the minimum of Rosenbrock's function") {
  torch::manual_seed(8);
  torch::nn::Sequential model(torch::nn::Linear(2, 8), torch::nn::Tanh(), torch::nn::Linear(8, 1));
  const auto x = torch::tensor({0., 0., 0., 1., 1., 0., 1., 1.}).reshape({4, 2}).to(at::kFloat),
             y = torch::tensor({0., 1., 1., 0.}).reshape({4, 1}).to(at::kFloat);
  Adafactor adafactor(model->parameters(), AdafactorOptions(0.03).relative_step(false).scale_parameter(false));
  for (int step = 0; step < 500; ++step) {
    adafactor.zero_grad();
    torch::binary_cross_entropy_with_logits(model->forward(x), y).backward();
    adafactor.step();
  }
  CHECK(model->forward(x).gt(0).to(at::kFloat).equal(y));

  auto xy = leaf(torch::tensor({-1.2, 1.0}, at::kDouble));
  Adafactor descent({xy}, AdafactorOptions(0.5).scale_parameter(false));
  for (int step = 0; step < 8000; ++step) {
    descent.zero_grad();
    ((1 - xy[0]).square() + 100 * (xy[1] - xy[0].square()).square()).backward();
    descent.step();
  }
  INFO("reached " << xy[0].item<double>() << ", " << xy[1].item<double>());
  CHECK((xy.detach() - 1).abs().max().item<double>() < 0.05);
}

TEST_CASE("Adafactor: the state takes a row and a column, and a step little more") {
  auto p = leaves({torch::randn({512, 1024}), torch::randn({512, 1024})});
  for (auto& each : p) each.mutable_grad() = torch::randn({512, 1024});
  Adafactor adafactor(p);
  ga::MemoryMeter meter;
  adafactor.step();
  CHECK(meter.live_bytes() == 2 * 4 * (512 + 1024));
  CHECK(meter.peak_bytes() < 0.1 * 4 * 2 * 512 * 1024);
  meter.reset_peak();
  const auto live = meter.live_bytes();
  for (auto& each : p) each.mutable_grad() = each.grad().t().contiguous().t();  // not contiguous, so it is copied
  meter.reset_peak();
  adafactor.step();
  CHECK(meter.peak_bytes() - live <= 2 * 2 * 4 * 512 * 1024 + 0.1 * 4 * 2 * 512 * 1024);
}

TEST_CASE("Adafactor on a device matches the CPU", "[cuda]") {
  if (!testing::KernelsOnDevice::possible()) SKIP(testing::KernelsOnDevice::missing);
  const testing::KernelsOnDevice kernels;
  for (auto dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf})
    for (auto& options : all_options) {
      torch::manual_seed(9);
      auto host =
          leaves({torch::randn({40, 30}).to(dtype), torch::randn({}).to(dtype), torch::randn({6, 5}).t().to(dtype),
                  torch::randn({70}).to(dtype), torch::randn({0, 3}).to(dtype)});
      Parameters device;
      for (auto& each : host) device.push_back(each.detach().to(at::kCUDA).set_requires_grad(true));
      Adafactor a(host, options), b(device, options);
      for (int step = 0; step < 4; ++step) {
        for (std::size_t i = 0; i < host.size(); ++i) {
          host[i].mutable_grad() = some_gradient(host[i].detach(), step) * 8;
          device[i].mutable_grad() = host[i].grad().to(at::kCUDA);
        }
        for (auto* side : {&host, &device}) {
          ga::Gradients gradients(*side);
          gradients.factor().divide(8.0);
          gradients.factor().require_finite();
          ga::clip_grad_norm_(gradients, 1.0);
          (side == &host ? a : b).step(gradients);
        }
      }
      const double tolerance = dtype == at::kDouble ? 1e-12 : dtype == at::kFloat ? 1e-5 : 3e-2;
      for (std::size_t i = 0; i < host.size(); ++i) CHECK(difference(host[i], device[i].cpu()) < tolerance);
    }
}
