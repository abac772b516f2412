// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/amp_scaler.hpp>
#include <gradaccum/autocast.hpp>
#include <gradaccum/detail/optimizers/param_states.hpp>
#include <gradaccum/grad_accumulator.hpp>
#include <gradaccum/optim/muon.hpp>

#include "support/device.hpp"
#include "support/leaves.hpp"

#include <cmath>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

// Muon beyond PyTorch's values: shapes, windows, dtypes, devices, files and errors.

namespace ga = gradaccum;
using ga::optim::Muon, ga::optim::MuonOptions;
using testing::leaf;

namespace {

torch::OrderedDict<std::string, at::Tensor> names(const std::vector<at::Tensor>& parameters) {
  torch::OrderedDict<std::string, at::Tensor> all;
  for (std::size_t i = 0; i < parameters.size(); ++i) all.insert("p" + std::to_string(i), parameters[i]);
  return all;
}

/// Steps of one optimizer for all parameters, whose gradients are given by their index.
void step(Muon& muon, const std::vector<at::Tensor>& parameters, int steps) {
  for (int i = 0; i < steps; ++i) {
    torch::manual_seed(static_cast<std::uint64_t>(i));
    for (auto& p : parameters) p.mutable_grad() = torch::randn(p.sizes(), at::kDouble).to(p.options());
    muon.step();
  }
}

bool close(const at::Tensor& a, const at::Tensor& b, double tolerance = 1e-12) {
  return torch::allclose(a.detach().to(at::kDouble), b.detach().to(at::kDouble), tolerance, tolerance);
}

}  // namespace

TEST_CASE("Muon: singular values of a step are about 1, for wide, square and tall matrices, in any dtype") {
  torch::manual_seed(1);
  for (auto dtype : {at::kDouble, at::kFloat, at::kBFloat16, at::kHalf})
    for (auto in : {at::kBFloat16, at::kFloat, at::kDouble})
      for (auto [rows, columns] : std::vector<std::pair<int, int>>{{8, 8}, {8, 40}, {40, 8}, {1, 7}, {7, 1}}) {
        CAPTURE(dtype, in, rows, columns);
        const auto p = torch::zeros({rows, columns}, dtype).requires_grad_();
        Muon muon({p}, MuonOptions(1).weight_decay(0).ns_dtype(in));
        p.mutable_grad() = torch::randn({rows, columns}).to(dtype);
        muon.step();
        const double factor = std::sqrt(std::max(1.0, static_cast<double>(rows) / columns));
        const auto values = torch::linalg_svdvals(p.detach().to(at::kDouble)) / factor;
        CHECK(values.min().item<double>() > 0.3);
        CHECK(values.max().item<double>() < 1.3);
      }
}

TEST_CASE("Muon: matrices of equal shape step as if each were alone, with any strides") {
  torch::manual_seed(2);
  std::vector<at::Tensor> together, alone;
  for (int i = 0; i < 3; ++i) {
    together.push_back(leaf(torch::randn({6, 10}, at::kDouble)));
    together.push_back(leaf(torch::randn({10, 6}, at::kDouble)));
  }
  together.push_back(torch::randn({10, 6}, at::kDouble).t().requires_grad_());
  together.push_back(torch::randn({12, 20}, at::kDouble).slice(0, 0, 12, 2).slice(1, 0, 20, 2).requires_grad_());
  for (auto& p : together) alone.push_back(p.detach().clone(at::MemoryFormat::Contiguous).requires_grad_());
  Muon muon(together, MuonOptions(0.1));
  step(muon, together, 3);
  std::vector<std::unique_ptr<Muon>> each;
  for (auto& p : alone) each.push_back(std::make_unique<Muon>(std::vector{p}, MuonOptions(0.1)));
  for (int i = 0; i < 3; ++i) {
    torch::manual_seed(static_cast<std::uint64_t>(i));
    for (std::size_t k = 0; k < alone.size(); ++k) {
      alone[k].mutable_grad() = torch::randn(alone[k].sizes(), at::kDouble);
      each[k]->step();
    }
  }
  for (std::size_t i = 0; i < alone.size(); ++i) {
    CAPTURE(i);
    CHECK(close(together[i], alone[i]));
  }
  CHECK_FALSE(close(together[0], together[2], 1e-3));
}

TEST_CASE("Muon: flatten takes a convolution's weight as the matrix [out, all others]") {
  const auto values = torch::randn({4, 3, 5, 5}, at::kDouble);
  const auto weight = leaf(values), matrix = leaf(values.view({4, 75}));
  Muon of_weight({weight}, MuonOptions(0.1).flatten(true)), of_matrix({matrix}, MuonOptions(0.1));
  for (int i = 0; i < 3; ++i) {
    weight.mutable_grad() = torch::randn({4, 3, 5, 5}, at::kDouble).contiguous(at::MemoryFormat::ChannelsLast);
    matrix.mutable_grad() = weight.grad().reshape({4, 75});
    of_weight.step();
    of_matrix.step();
  }
  CHECK(close(weight.view({4, 75}), matrix));
}

TEST_CASE("Muon: windows with a scale and clipping give the step with the large batch's gradient") {
  for (auto dtype : {at::kDouble, at::kFloat}) {
    const auto p = leaf(torch::randn({6, 5}, dtype)), q = leaf(p), x = torch::randn({8, 6}, dtype);
    Muon of_windows({p}, MuonOptions(0.1).ns_dtype(at::kDouble)), whole({q}, MuonOptions(0.1).ns_dtype(at::kDouble));
    ga::GradAccumulator optimizer(of_windows, {.steps = 4});
    ga::AmpScaler scaler({.init_scale = 1024});
    for (int window = 0; window < 3; ++window) {
      for (int i = 0; i < 4; ++i) {
        optimizer.backward(scaler.scale(x.narrow(0, 2 * i, 2).mm(p).square().mean()));
        optimizer.clip_grad_norm_(0.5);
        scaler.step(optimizer);
        scaler.update();
        optimizer.zero_grad();
      }
      whole.zero_grad();
      x.mm(q).square().mean().backward();
      torch::nn::utils::clip_grad_norm_({q}, 0.5);
      whole.step();
    }
    CHECK(close(p, q, dtype == at::kDouble ? 1e-9 : 1e-4));
    CHECK(optimizer.updates() == 3);
  }
  const auto p = leaf(torch::ones({3, 3}));
  Muon muon({p}, MuonOptions(0.1));
  ga::GradAccumulator optimizer(muon, {.steps = 1});
  ga::AmpScaler scaler;
  optimizer.backward(scaler.scale((p * std::nan("")).sum()));
  scaler.step(optimizer);
  CHECK(p.eq(1).all().item<bool>());
  CHECK(muon.named_state(names({p})).empty());
}

TEST_CASE("Muon: files and named state, which Python's optimizer has, too") {
  torch::manual_seed(4);
  const auto p = leaf(torch::randn({4, 7}, at::kDouble)), q = leaf(p);
  Muon one({p},
           MuonOptions(0.1).ns_coefficients({2, -1.5, 0.5}).adjust_lr_fn(ga::optim::MuonAdjustLr::match_rms_adamw)),
      other({q}), third({q});
  step(one, {p}, 2);
  std::stringstream file;
  torch::save(one, file);
  torch::load(other, file);
  CHECK(static_cast<MuonOptions&>(other.param_groups()[0].options()) ==
        static_cast<MuonOptions&>(one.param_groups()[0].options()));
  Muon fourth({q});
  ga::detail::set_options({{"", fourth}}, ga::detail::options_of({{"", one}}));  // as in a training's state
  CHECK(static_cast<MuonOptions&>(fourth.param_groups()[0].options()) ==
        static_cast<MuonOptions&>(one.param_groups()[0].options()));
  CHECK_FALSE(static_cast<MuonOptions&>(third.param_groups()[0].options()) ==
              static_cast<MuonOptions&>(one.param_groups()[0].options()));
  const auto state = one.named_state(names({p}));
  CHECK(state.size() == 1);
  CHECK(state.at("momentum_buffer.p0").sizes() == p.sizes());
  q.data().copy_(p);
  third.load_named_state(names({q}), state);
  third.param_groups()[0].set_options(one.param_groups()[0].options().clone());
  step(one, {p}, 1);
  step(third, {q}, 1);
  CHECK(p.equal(q));
  Muon fresh({q}, static_cast<MuonOptions&>(one.param_groups()[0].options()));
  q.data().copy_(p);
  step(fresh, {q}, 1);
  step(one, {p}, 1);
  CHECK_FALSE(close(p, q, 1e-6));
}

TEST_CASE("Muon: stochastic rounding of bfloat16 parameters keeps small steps in the mean") {
  const auto p = leaf(torch::ones({64, 64}, at::kBFloat16)), q = leaf(p);
  const auto options = MuonOptions(1e-3).weight_decay(0);
  Muon rounded({p}, options), nearest({q}, options);
  const auto exact = leaf(torch::ones({64, 64}));
  Muon in_float32({exact}, options);
  rounded.stochastic_rounding(1);
  step(rounded, {p}, 20);
  step(nearest, {q}, 20);
  step(in_float32, {exact}, 20);
  CHECK(q.eq(1).all().item<bool>());
  const auto moved = (p.detach().to(at::kFloat) - 1) * (exact.detach() - 1).sign();  // in the direction of float32's
  CHECK(moved.mean().item<double>() == Approx((exact.detach() - 1).abs().mean().item<double>()).epsilon(0.3));
}

TEST_CASE("Muon: what it cannot step") {
  const auto matrix = leaf(torch::ones({2, 3})), bias = leaf(torch::ones({3})),
             weight = leaf(torch::ones({2, 3, 1, 1}));
  CHECK_THROWS_WITH(Muon({matrix, bias}),
                    Catch::Contains("Muon: its parameters must be matrices, got shapes [3]; give the"));
  CHECK_THROWS_WITH(Muon({bias, weight}), Catch::Contains("got shapes [3], [2, 3, 1, 1]; flatten(true) takes"));
  CHECK_THROWS_WITH(Muon({bias}, MuonOptions().flatten(true)), Catch::Contains("got shapes [3]"));
  CHECK_NOTHROW(Muon({weight}, MuonOptions().flatten(true)));
  Muon muon({matrix});
  CHECK_THROWS_WITH(muon.add_param_group({{bias}}), Catch::Contains("must be matrices"));
  CHECK(muon.param_groups().size() == 1);
  matrix.mutable_grad() = torch::ones({2, 3}).to_sparse();
  CHECK_THROWS_WITH(muon.step(), Catch::Contains("Muon: a gradient must be dense"));
  CHECK(matrix.eq(1).all().item<bool>());
  const auto complex = leaf(torch::ones({2, 2}, at::kComplexFloat));
  Muon of_complex({complex});
  complex.mutable_grad() = torch::ones_like(complex);
  CHECK_THROWS_WITH(of_complex.step(), Catch::Contains("Muon: a parameter must be real"));
  for (auto& [options, error] : std::vector<std::pair<MuonOptions, std::string>>{
           {MuonOptions(-1), "lr must be >= 0"},
           {MuonOptions().momentum(1.5), "momentum must be in [0, 1]"},
           {MuonOptions().ns_steps(100), "ns_steps must be in [0, 100)"},
           {MuonOptions().eps(-1), "eps must be >= 0"},
           {MuonOptions().weight_decay(-1), "weight_decay must be >= 0"},
           {MuonOptions().ns_dtype(at::kHalf), "ns_dtype must be bfloat16, float32 or float64"}})
    CHECK_THROWS_WITH(Muon({matrix}, options), Catch::Contains("Muon: " + error));
}

TEST_CASE("Muon: empty parameters, and those without a gradient, stay") {
  const auto empty = leaf(torch::ones({0, 3})), still = leaf(torch::ones({2, 2})), p = leaf(torch::ones({2, 2}));
  Muon muon({empty, still, p});
  empty.mutable_grad() = torch::ones({0, 3});
  p.mutable_grad() = torch::eye(2);
  muon.step();
  CHECK(still.eq(1).all().item<bool>());
  CHECK_FALSE(p.eq(1).all().item<bool>());
  CHECK(muon.named_state(names({empty, still, p})).size() == 1);
}

TEST_CASE("Muon: the state has the precision of the parameter's, and its strides, whatever the iterations have") {
  for (auto dtype : {at::kDouble, at::kFloat, at::kBFloat16, at::kHalf})
    for (auto in : {at::kBFloat16, at::kFloat, at::kDouble}) {
      const auto p = torch::ones({3, 5}, dtype).t().requires_grad_();
      Muon muon({p}, MuonOptions().ns_dtype(in));
      step(muon, {p}, 2);
      const auto state = muon.named_state(names({p})).at("momentum_buffer.p0");
      CHECK(state.scalar_type() == (dtype == at::kDouble ? at::kDouble : at::kFloat));
      CHECK(state.sizes() == p.sizes());
      static_cast<MuonOptions&>(muon.param_groups()[0].options()).ns_dtype(at::kFloat);
      step(muon, {p}, 1);
      CHECK(muon.named_state(names({p})).at("momentum_buffer.p0").scalar_type() == state.scalar_type());
    }
}

TEST_CASE("Muon: iterates in bfloat16 where that is fast") {
  const auto type = [](const MuonOptions& options, at::ScalarType dtype) {
    return Muon::ns_dtype(options, torch::ones({2, 2}, dtype));
  };
  CHECK(type({}, at::kFloat) == (ga::is_bf16_fast(at::kCPU) ? at::kBFloat16 : at::kFloat));
  CHECK(type({}, at::kDouble) == at::kDouble);
  CHECK(type(MuonOptions().ns_dtype(at::kBFloat16), at::kDouble) == at::kBFloat16);
}

TEST_CASE("Muon: on a device as on the processor, also when the device skips a step", "[cuda]") {
  if (!torch::cuda::is_available()) SKIP("needs a device");
  const at::Device device(at::kCUDA, 0);
  torch::manual_seed(6);
  std::vector<at::Tensor> here, there;
  for (auto shape : {std::vector<std::int64_t>{6, 10}, {10, 6}, {6, 10}, {5, 5}}) {
    here.push_back(leaf(torch::randn(shape)));
    there.push_back(leaf(here.back().to(device)));
  }
  const auto options = MuonOptions(0.1).ns_dtype(at::kFloat);
  Muon on_processor(here, options), on_device(there, options);
  ga::GradAccumulator optimizer(on_device, {.steps = 1});
  ga::AmpScaler scaler({.init_scale = 4, .on_device = true});
  for (int i = 0; i < 4; ++i) {
    auto loss = torch::zeros({}, device);
    for (std::size_t k = 0; k < here.size(); ++k) {
      const auto g = torch::randn(here[k].sizes());
      here[k].mutable_grad() = g;
      loss = loss + (there[k] * g.to(device) * (i == 1 ? std::nan("") : 1.0)).sum();
    }
    if (i != 1) on_processor.step();
    optimizer.backward(scaler.scale(loss));
    scaler.step(optimizer);
    scaler.update();
    optimizer.zero_grad();
  }
  for (std::size_t k = 0; k < here.size(); ++k) CHECK(close(there[k].cpu(), here[k], 1e-4));
}
