// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/grad_accumulator.hpp>
#include <gradaccum/gradients.hpp>
#include <gradaccum/memory_meter.hpp>
#include <gradaccum/optim/adam.hpp>
#include <gradaccum/optim/adamw.hpp>
#include <gradaccum/optim/sgd.hpp>

#include "support/leaves.hpp"

#include <sstream>

// Inputs that the one-pass optimizers must refuse before any update, and unusual ones that are valid.

namespace ga = gradaccum;
using testing::leaf;
using testing::Parameters;
using torch::optim::AdamOptions;
using torch::optim::AdamWOptions;
using torch::optim::SGDOptions;

namespace {

at::Tensor with_gradient(at::Tensor parameter, const at::Tensor& gradient) {
  parameter.mutable_grad() = gradient;
  return parameter;
}

torch::OrderedDict<std::string, at::Tensor> named(const at::Tensor& parameter) {
  torch::OrderedDict<std::string, at::Tensor> names;
  names.insert("p", parameter);
  return names;
}

/// Steps a good parameter together with a bad one, and returns the error; the good one must not change.
template <class Optimizer, class Options>
std::string refusal(const at::Tensor& bad, const Options& options) {
  auto good = with_gradient(leaf(torch::ones({3})), torch::ones({3}));
  Optimizer optimizer(Parameters{good, bad}, options);
  auto message = testing::error_of([&] { optimizer.step(); });
  CHECK(good.eq(1).all().template item<bool>());
  CHECK(optimizer.state().empty());
  return message;
}

void check_refused(const std::string& part, const at::Tensor& bad) {
  INFO("expected '" << part << "'");
  CHECK(testing::contains(refusal<ga::optim::AdamW>(bad, AdamWOptions(0.1)), part));
  CHECK(testing::contains(refusal<ga::optim::SGD>(bad, SGDOptions(0.1).momentum(0.9)), part));
  CHECK(testing::contains(refusal<ga::optim::SGD>(bad, SGDOptions(0.1)), part));
}

}  // namespace

TEST_CASE("one-pass optimizers: parameters that cannot be stepped are refused before any update") {
  auto shrunk = with_gradient(leaf(torch::ones({3, 4})), torch::ones({3, 4}));
  shrunk.set_data(torch::zeros({1000, 4}));  // the gradient keeps the old shape, as when a vocabulary grows
  check_refused("must have the shape and device of its parameter, [1000, 4] on cpu, got [3, 4] on cpu", shrunk);

  auto expanded = torch::zeros({1}).expand({4}).detach().set_requires_grad(true);
  check_refused("single memory location", with_gradient(expanded, torch::ones({4})));

  auto zero = at::_efficientzerotensor({3}, at::TensorOptions(at::kFloat));
  check_refused("must be writable", with_gradient(zero, torch::ones({3})));

  auto csr = leaf(torch::ones({3, 3}));
  check_refused("dense or sparse COO", with_gradient(csr, torch::eye(3).to_sparse_csr()));
}

TEST_CASE("one-pass optimizers: a parameter without memory is named") {
  ga::optim::AdamW on_meta({torch::ones({3}, at::kMeta).set_requires_grad(true)});
  REQUIRE_ERROR("AdamW: a parameter must have memory, got one on the meta device", on_meta.step());
}

TEST_CASE("one-pass optimizers: a sparse gradient of another shape is refused before any update") {
  auto bad = with_gradient(leaf(torch::ones({3, 2})), torch::ones({3, 2}).to_sparse());
  bad.set_data(torch::zeros({2, 2}));
  CHECK(testing::contains(refusal<ga::optim::SGD>(bad, SGDOptions(0.1)), "must have the shape"));
}

TEST_CASE("one-pass optimizers: gradients of another optimizer's parameters are an error") {
  auto mine = with_gradient(leaf(torch::ones({3})), torch::ones({3}));
  auto other = with_gradient(leaf(torch::ones({3})), torch::ones({3}));
  ga::optim::AdamW adamw({mine});
  REQUIRE_ERROR("got those of other parameters", adamw.step(ga::Gradients(Parameters{other})));
  adamw.step(ga::Gradients(Parameters{other, mine}));  // further parameters are allowed
  CHECK(mine.ne(1).all().item<bool>());
  CHECK(other.eq(1).all().item<bool>());
}

TEST_CASE("one-pass optimizers: state of another kind is refused") {
  auto p = with_gradient(leaf(torch::ones({3})), torch::ones({3}));
  const auto wrong_states = {torch::zeros({3}, at::kMeta), torch::zeros({3}, at::kComplexFloat), torch::zeros({4}),
                             torch::zeros({4}).to_sparse()};
  for (auto& wrong : wrong_states) {
    ga::optim::AdamW adamw({p});
    adamw.step();
    auto& state = static_cast<torch::optim::AdamWParamState&>(*adamw.state().begin()->second);
    state.exp_avg(wrong);
    REQUIRE_ERROR("exp_avg must have the shape and device", adamw.step());
    state.exp_avg(torch::zeros({3})).step(-1);
    REQUIRE_ERROR("step count must be >= 0, got -1", adamw.step());
  }
  ga::optim::SGD sgd({p}, SGDOptions(0.1).momentum(0.9));
  for (auto& wrong : {torch::zeros({3}, at::kComplexFloat), torch::zeros({3}).to_sparse()})
    REQUIRE_ERROR("must be dense, of the shape of its parameter",
                  sgd.load_named_state(named(p), {{"momentum_buffer.p", wrong}}));
}

TEST_CASE("one-pass optimizers: state that LibTorch kept in 16 bits is converted") {
  for (auto dtype : {at::kBFloat16, at::kHalf}) {
    auto p = leaf(torch::randn({300}).to(dtype));
    torch::optim::AdamW theirs({p});
    for (int i = 0; i < 3; ++i) {
      p.mutable_grad() = torch::randn({300}).to(dtype);
      theirs.step();
    }
    std::stringstream file;
    torch::save(theirs, file);
    ga::optim::AdamW ours({p}, AdamWOptions(0));
    torch::load(ours, file);
    auto& state = static_cast<torch::optim::AdamWParamState&>(*ours.state().begin()->second);
    REQUIRE(state.exp_avg().scalar_type() == dtype);
    const auto before = state.exp_avg().to(at::kFloat).clone();
    p.mutable_grad() = torch::zeros({300}, dtype);
    ours.step();
    CHECK(state.exp_avg().scalar_type() == at::kFloat);
    CHECK(torch::allclose(state.exp_avg(), before * 0.9, 1e-5));
  }
}

TEST_CASE("one-pass optimizers: loaded state is converted to the order of the parameter's elements") {
  auto transposed = torch::randn({8, 6}).t().detach().set_requires_grad(true), plain = leaf(transposed.contiguous());
  ga::optim::Adam a({transposed}), b({plain});
  const std::map<std::string, at::Tensor> state{
      {"exp_avg.p", torch::randn({6, 8})}, {"exp_avg_sq.p", torch::rand({6, 8})}, {"step.p", torch::tensor(3.0)}};
  a.load_named_state(named(transposed), state);
  b.load_named_state(named(plain), state);
  transposed.mutable_grad() = torch::ones({6, 8});
  plain.mutable_grad() = torch::ones({6, 8});
  a.step();
  b.step();
  CHECK(transposed.equal(plain));
}

TEST_CASE("one-pass optimizers: lazily negated parameters, gradients of another dtype") {
  const auto values = torch::randn({30});
  auto plain = leaf(-values), negated = at::_neg_view(values).detach();
  ga::optim::SGD a({with_gradient(negated, torch::ones({30}))}, SGDOptions(0.5)),
      b({with_gradient(plain, torch::ones({30}))}, SGDOptions(0.5));
  a.step();
  b.step();
  CHECK(negated.resolve_neg().equal(plain));

  auto same = leaf(values), wider = leaf(values);
  const auto gradient = torch::randn({30});
  same.mutable_grad() = gradient;
  wider.mutable_grad() = gradient.to(at::kDouble);
  ga::optim::AdamW c({same}), d({wider});
  c.step();
  d.step();
  CHECK(same.equal(wider));
}

TEST_CASE("one-pass optimizers: a float64 sum beyond float32 is multiplied before it is narrowed") {
  for (bool taking : {true, false}) {
    auto p = leaf(torch::zeros({2}));
    ga::optim::SGD ours({p}, SGDOptions(1.0));
    torch::optim::SGD theirs({p}, SGDOptions(1.0));
    ga::GradAccumulator optimizer(taking ? static_cast<torch::optim::Optimizer&>(ours) : theirs,
                                  {.steps = 2, .accumulate_in = at::kDouble});
    for (int i = 0; i < 2; ++i) {
      (p * 3e38f).sum().backward();
      optimizer.step();
    }
    CHECK(p[0].item<float>() == -3e38f);
  }
}

TEST_CASE("Adam without a first moment: tiny gradients are not lost after large ones") {
  for (double gradient : {1e-3, 1e-6, 1e-8}) {
    auto a = leaf(torch::zeros({100})), b = leaf(a);
    torch::optim::Adam theirs({a}, AdamOptions(1.0).betas({0.0, 0.99}));
    ga::optim::Adam ours({b}, AdamOptions(1.0).betas({0.0, 0.99}));
    for (double g : {1.0, gradient}) {
      a.mutable_grad() = torch::full({100}, g);
      b.mutable_grad() = torch::full({100}, g);
      theirs.step();
      ours.step();
    }
    CHECK(torch::allclose(a.detach(), b.detach(), 1e-6));
    const auto state = ours.named_state(named(b));
    CHECK(state.at("exp_avg.p")[99].item<float>() == static_cast<float>(gradient));
    CHECK(state.size() == 3);  // nothing for amsgrad, which is off
  }
}

TEST_CASE("Adam: gradients whose square exceeds float32 overflow no earlier than in LibTorch") {
  for (float gradient : {1e19f, 2e19f, 1e20f, 5e20f}) {
    auto p = leaf(torch::ones({100}));
    ga::optim::Adam adam({p}, AdamOptions(0.1));
    for (float g : {gradient, 1.0f, 1.0f}) {
      p.mutable_grad() = torch::full({100}, g);
      adam.step();
    }
    CHECK(p[99].item<float>() == Approx(0.781).epsilon(0.01));
  }
}

TEST_CASE("one-pass optimizers: the memory of a step") {
  constexpr std::int64_t size = 1 << 20, count = 16;
  constexpr double of_one = size * 4;
  const auto peak_of_step = [&](bool transposed) {
    Parameters parameters;
    for (int i = 0; i < count; ++i) {
      const auto gradient = torch::ones({1024, 1024});
      parameters.push_back(with_gradient(leaf(torch::zeros({1024, 1024})), transposed ? gradient.t() : gradient));
    }
    ga::optim::AdamW adamw(parameters);
    adamw.step();  // creates its state
    ga::MemoryMeter meter;
    adamw.step();
    return static_cast<double>(meter.peak_bytes());
  };
  CHECK(peak_of_step(false) < 0.01 * of_one);
  const double copies = peak_of_step(true);
  CHECK(copies > of_one / 2);
  CHECK(copies < 6 * of_one);
}
