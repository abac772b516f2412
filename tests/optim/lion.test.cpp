// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/grad_accumulator.hpp>
#include <gradaccum/optim/lion.hpp>

#include "support/take_on_device.hpp"

#include <array>
#include <cmath>
#include <memory>
#include <sstream>
#include <string>
#include <tuple>
#include <vector>

// Lion, and an optimizer that a program defines.

namespace ga = gradaccum;
namespace inner = gradaccum::detail;
using ga::optim::Lion, ga::optim::LionOptions;

namespace {

/// Signs of a moving average: this library has no such optimizer.
struct SignSgdStep {
  static constexpr const char* state[] = {"momentum_buffer"};
  double lr, momentum;
  bool operator==(const SignSgdStep&) const = default;
  template <class Vector>
  void operator()(Vector& parameter, const Vector& gradient, Vector& buffer) const {
    buffer = multiply_add(buffer, Vector::all(momentum), gradient);
    parameter = multiply_add(sign(buffer), Vector::all(-lr), parameter);
  }
};

struct SignSgdOptions : ga::optim::OwnOptions<SignSgdOptions> {
  SignSgdOptions(double lr = 1e-3) : lr_(lr) {}
  TORCH_ARG(double, lr);
  TORCH_ARG(double, momentum) = 0.9;

 public:
  static auto all(auto& of) {
    return std::tuple(ga::optim::named("lr", of.lr_), ga::optim::named("momentum", of.momentum_));
  }
};

class SignSgd : public ga::optim::ElementwiseOptimizer<SignSgd, SignSgdOptions, SignSgdStep> {
 public:
  static constexpr const char* name = "SignSgd";
  using ElementwiseOptimizer::ElementwiseOptimizer;
  static SignSgdStep next_step(const SignSgdOptions& options) { return {options.lr(), options.momentum()}; }
};

/// Every operation that the arithmetic of a step may use, with a count of steps, two tensors and no change of zeros.
struct EveryOperationStep {
  static constexpr const char* state[] = {"a", "b"};
  double lr;
  std::int64_t step;
  bool operator==(const EveryOperationStep&) const = default;
  template <class Vector>
  void operator()(Vector& p, const Vector& g, Vector& a, Vector& b) const {
    a = larger(a, magnitude(g)) * Vector::all(0.9) + smaller(g, p);
    b = square_root(magnitude(a - g) / Vector::all(static_cast<double>(step)));
    p = multiply_add(sign(g) - b, Vector::all(-lr), p);
  }
};

struct EveryOperationOptions : ga::optim::OwnOptions<EveryOperationOptions> {
  EveryOperationOptions(double lr = 1e-3) : lr_(lr) {}
  TORCH_ARG(double, lr);

 public:
  static auto all(auto& of) { return std::tuple(ga::optim::named("lr", of.lr_)); }
};

class EveryOperation
    : public ga::optim::ElementwiseOptimizer<EveryOperation, EveryOperationOptions, EveryOperationStep> {
 public:
  static constexpr const char* name = "EveryOperation";
  using ElementwiseOptimizer::ElementwiseOptimizer;
  static EveryOperationStep next_step(const EveryOperationOptions& options,
                                      const ga::optim::ElementState<EveryOperationStep>& state) {
    return {options.lr(), state.step() + 1};
  }
};

/// Moves its tensors around: the parameter to a state, and a state to another.
struct MovingStep {
  static constexpr const char* state[] = {"older", "previous"};
  double lr;
  bool operator==(const MovingStep&) const = default;
  template <class Vector>
  void operator()(Vector& p, const Vector& g, Vector& older, Vector& previous) const {
    older = previous;
    previous = p;
    p = multiply_add(g, Vector::all(-lr), p);
  }
};

/// Counts its steps, and has no tensors.
struct CountingStep {
  static constexpr std::array<const char*, 0> state{};
  std::int64_t step;
  bool operator==(const CountingStep&) const = default;
  template <class Vector>
  void operator()(Vector& p, const Vector& g) const {
    p = multiply_add(g, Vector::all(static_cast<double>(-step)), p);
  }
};

class Counting : public ga::optim::ElementwiseOptimizer<Counting, EveryOperationOptions, CountingStep> {
 public:
  static constexpr const char* name = "Counting";
  using ElementwiseOptimizer::ElementwiseOptimizer;
  static CountingStep next_step(const EveryOperationOptions&, const ga::optim::ElementState<CountingStep>& state) {
    return {state.step() + 1};
  }
};

bool close(const at::Tensor& a, const at::Tensor& b, double tolerance) {
  return torch::allclose(a.to(at::kDouble), b.to(at::kDouble), tolerance, tolerance / 2, /*equal_nan=*/true);
}

/// Five steps of windows of two micro-batches, clipped, on a parameter whose gradients are given.
template <class Optimizer, class Options>
at::Tensor windows(const Options& options, at::ScalarType dtype) {
  torch::manual_seed(5);
  const auto p = torch::randn({300}).to(dtype).requires_grad_();
  Optimizer of_parameter({p}, options);
  ga::GradAccumulator optimizer(of_parameter, {.steps = 2});
  for (int i = 0; i < 10; ++i) {
    optimizer.backward((p * torch::randn({300})).sum());
    optimizer.clip_grad_norm_(1.0);
    optimizer.step();
    optimizer.zero_grad();
  }
  return p.detach();
}

}  // namespace

TEST_CASE("steps of a program: ATen's operations on any device agree with the kernels") {
  torch::manual_seed(8);
  const std::vector<inner::AnyStep> all{ga::optim::LionStep{0.01, 0.9, 0.99, 0.1}, SignSgdStep{0.01, 0.9},
                                        EveryOperationStep{0.01, 3}, MovingStep{0.01}};
  for (auto& settings : all)
    for (auto dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kComplexFloat})
      for (auto shape : {std::vector<std::int64_t>{}, {300}, {4, 5}}) {
        CAPTURE(settings.name_of_state(0), dtype, shape);
        const auto type = at::toOpMathType(dtype);
        inner::ElementStep ours{settings, torch::randn(shape, dtype), torch::randn(shape, dtype)};
        for (std::size_t i = 0; i < settings.states; ++i) ours.state[i] = torch::randn(shape, type);
        auto atens = ours;
        atens.parameter = ours.parameter.clone();
        for (auto& state : atens.state)
          if (state.defined()) state = state.clone();
        step_on_cpu(std::vector{ours}, 0.5);
        testing::step_on_device(std::vector{atens}, {.numerator = 0.5});
        const double tolerance = dtype == at::kBFloat16 ? 8e-3 : 1e-5;
        CHECK(close(inner::as_real(ours.parameter), inner::as_real(atens.parameter), tolerance));
        for (std::size_t i = 0; i < settings.states; ++i)
          CHECK(close(inner::as_real(ours.state[i]), inner::as_real(atens.state[i]), 1e-5));
      }
}

TEST_CASE("steps of a program: a step that the device skips changes nothing") {
  const auto before = torch::randn({7});
  inner::ElementStep step{SignSgdStep{0.1, 0.9}, before.clone(), torch::full({7}, std::nan("")), {torch::ones({7})}};
  testing::step_on_device(std::vector{step}, {.found_inf = torch::ones({})});
  CHECK(step.parameter.equal(before));
  CHECK(step.state[0].eq(1).all().item<bool>());
  testing::step_on_device(std::vector{step}, {.found_inf = torch::zeros({})});
  CHECK(step.parameter.isnan().all().item<bool>());
}

TEST_CASE("an optimizer of a program: windows, groups, sparse gradients, and files") {
  SECTION("windows give the loop by hand") {
    const auto found = windows<SignSgd>(SignSgdOptions(0.01), at::kFloat);
    torch::manual_seed(5);
    auto p = torch::randn({300}), b = torch::zeros({300});
    for (int i = 0; i < 5; ++i) {
      const auto first = torch::randn({300}), g = (first + torch::randn({300})) / 2;
      b = 0.9 * b + g * (1 / (g.norm() + 1e-6)).clamp_max(1);
      p = p - 0.01 * b.sign();
    }
    CHECK(close(found, p, 1e-5));
    CHECK_FALSE(close(found, windows<SignSgd>(SignSgdOptions(0.01).momentum(0.5), at::kFloat), 1e-5));
    const auto in_16_bits = windows<SignSgd>(SignSgdOptions(0.01), at::kBFloat16);
    CHECK((in_16_bits.to(at::kFloat) - found).abs().mean().item<double>() < 0.01);
  }
  SECTION("a group's options") {
    const auto p = torch::ones({3}).requires_grad_(), q = torch::ones({3}).requires_grad_();
    SignSgd sgd({torch::optim::OptimizerParamGroup({p}),
                 torch::optim::OptimizerParamGroup({q}, std::make_unique<SignSgdOptions>(0.5))},
                SignSgdOptions(0.25).momentum(0.7));
    (p + q).sum().backward();
    sgd.step();
    CHECK(p.eq(0.75).all().item<bool>());
    CHECK(q.eq(0.5).all().item<bool>());
    torch::optim::SGD theirs({torch::optim::OptimizerParamGroup({q}, std::make_unique<torch::optim::SGDOptions>(0.5))},
                             torch::optim::SGDOptions(0.25).momentum(0.7));
    const bool inherits =  // not with LibTorch 2.11 and older
        static_cast<torch::optim::SGDOptions&>(theirs.param_groups()[0].options()).momentum() == 0.7;
    CHECK(static_cast<SignSgdOptions&>(sgd.param_groups()[1].options()).momentum() == (inherits ? 0.7 : 0.9));
    CHECK_THROWS_WITH(sgd.add_param_group(torch::optim::OptimizerParamGroup(
                          {torch::ones({2})}, std::make_unique<torch::optim::SGDOptions>(0.1))),
                      Catch::Contains("SignSgd: the options of a group must be SignSgdOptions"));
  }
  SECTION("rows of a sparse gradient") {
    const double decay = GENERATE(0.0, 0.5);
    CAPTURE(decay);
    const auto table = torch::randn({50, 8}).requires_grad_(), dense = table.detach().clone().requires_grad_();
    const auto options = LionOptions(0.1).weight_decay(decay);
    Lion by_rows({table}, options), whole({dense}, options);
    const auto untouched = table[40].detach().clone();
    for (int i = 0; i < 3; ++i) {
      const auto rows = torch::tensor({{i, 7, 30}});
      table.mutable_grad() = torch::sparse_coo_tensor(rows, torch::randn({3, 8}), {50, 8});
      dense.mutable_grad() = table.grad().to_dense();
      by_rows.step();
      whole.step();
    }
    CHECK(table.equal(dense));
    CHECK(table[40].equal(untouched) == (decay == 0));
    const auto& state =
        static_cast<ga::optim::ElementState<ga::optim::LionStep>&>(*by_rows.state().at(table.unsafeGetTensorImpl()));
    CHECK(state.of[0].is_sparse());
    CHECK(state.of[0]._values().size(0) == 5);  // rows 7, 30, 0, 1 and 2
  }
  SECTION("files of LibTorch's format, and named state") {
    const auto p = torch::randn({9}).requires_grad_(), q = p.detach().clone().requires_grad_();
    EveryOperation one({p}, EveryOperationOptions(0.1)), other({q}, EveryOperationOptions(0.2));
    const auto step = [](auto& optimizer, const at::Tensor& parameter) {
      parameter.mutable_grad() = torch::full({9}, 0.5);
      optimizer.step();
    };
    step(one, p);
    step(one, p);
    std::stringstream file;
    torch::save(one, file);
    torch::load(other, file);
    q.data().copy_(p);
    step(one, p);
    step(other, q);
    CHECK(p.equal(q));
    torch::OrderedDict<std::string, at::Tensor> names;
    names.insert("p", p);
    const auto state = one.named_state(names);
    CHECK(state.size() == 3);
    CHECK(state.at("step.p").item<double>() == 3);
    EveryOperation third({p}, EveryOperationOptions(0.1));
    third.load_named_state(names, state);
    CHECK(third.named_state(names).at("a.p").equal(state.at("a.p")));
    Lion lion({p});
    step(lion, p);
    CHECK(lion.named_state(names).size() == 1);
  }
}

TEST_CASE("an optimizer of a program: a step without tensors counts") {
  const auto p = torch::zeros({3}).requires_grad_();
  Counting counting({p});
  for (int i = 0; i < 3; ++i) {
    p.mutable_grad() = torch::ones({3});
    counting.step();
  }
  CHECK(p.eq(-6).all().item<bool>());
}

TEST_CASE("Lion: bad options") {
  const auto p = torch::ones({3}).requires_grad_();
  CHECK_THROWS_WITH(Lion({p}, LionOptions(-1)), Catch::Contains("Lion: lr must be >= 0, got -1"));
  CHECK_THROWS_WITH(Lion({p}, LionOptions().betas({0.9, 1.0})), Catch::Contains("Lion: betas must be in [0, 1)"));
  CHECK_THROWS_WITH(Lion({p}, LionOptions().weight_decay(-1)), Catch::Contains("Lion: weight_decay must be >= 0"));
  Lion lion({p});
  static_cast<LionOptions&>(lion.param_groups()[0].options()).lr(-2);
  p.mutable_grad() = torch::ones({3});
  CHECK_THROWS_WITH(lion.step(), Catch::Contains("Lion: lr must be >= 0, got -2"));
}
