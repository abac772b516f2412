// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/amp_scaler.hpp>
#include <gradaccum/grad_accumulator.hpp>
#include <gradaccum/optim/adafactor.hpp>
#include <gradaccum/optim/adam.hpp>
#include <gradaccum/optim/adam8bit.hpp>
#include <gradaccum/optim/adamw.hpp>
#include <gradaccum/optim/adamw8bit.hpp>
#include <gradaccum/optim/sgd.hpp>
#include <gradaccum/policies/mixed_precision.hpp>
#include <gradaccum/trainer.hpp>

#include "support/device.hpp"
#include "support/kernels_on_device.hpp"
#include "support/models.hpp"

#include <cstddef>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <type_traits>
#include <vector>

// A loss scale on the device, where only the device sees overflows, gives the results of one that the host reads.

namespace ga = gradaccum;
using namespace testing;

namespace {

constexpr double inf = std::numeric_limits<double>::infinity();

/// Makes an optimizer; empty if it does not step on devices now.
using Make = std::function<std::unique_ptr<torch::optim::Optimizer>(const std::vector<at::Tensor>&)>;

template <class Optimizer, class Options>
Make with(Options options) {
  if (!steps_on_devices<Optimizer>()) return {};
  return
      [options](const std::vector<at::Tensor>& parameters) { return std::make_unique<Optimizer>(parameters, options); };
}

/// Optimizers with all of their options, by name.
const std::map<std::string, Make>& optimizers() {
  namespace optim = ga::optim;
  static const std::map<std::string, Make> all{
      {"SGD", with<optim::SGD>(optim::SGDOptions(0.1))},
      {"SGD, momentum", with<optim::SGD>(optim::SGDOptions(0.1).momentum(0.9).nesterov(true).weight_decay(0.1))},
      {"SGD, dampening", with<optim::SGD>(optim::SGDOptions(0.1).momentum(0.9).dampening(0.5))},
      {"Adam", with<optim::Adam>(optim::AdamOptions(0.1).amsgrad(true))},
      {"AdamW", with<optim::AdamW>(optim::AdamWOptions(0.1))},
      {"Adam8bit", with<optim::Adam8bit>(optim::Adam8bitOptions(0.1))},
      {"AdamW8bit", with<optim::AdamW8bit>(optim::AdamW8bitOptions(0.1))},
      {"Adafactor", with<optim::Adafactor>(optim::AdafactorOptions(0.1)
                                               .weight_decay(0.1)
                                               .variant(optim::AdafactorVariant::pytorch)
                                               .relative_step(false)
                                               .scale_parameter(true))},
      {"Adafactor, momentum", with<optim::Adafactor>(optim::AdafactorOptions(0.1).beta1(0.9).relative_step(false))},
      {"Adafactor, relative",
       with<optim::Adafactor>(optim::AdafactorOptions(0.1).relative_step(true).warmup_init(true))}};
  return all;
}

/// Makes parameters of three dtypes, one of them large enough for moments of 8 bits, on two devices if there are two.
std::vector<at::Tensor> make_parameters(bool one_device) {
  const auto other = at::Device(at::kCUDA, one_device || torch::cuda::device_count() < 2 ? 0 : 1);
  std::vector<at::Tensor> parameters{torch::linspace(-1, 1, 6000).view({60, 100}).to(at::kCUDA),
                                     torch::linspace(-1, 1, 5000).to(at::kCUDA).to(at::kBFloat16),
                                     torch::linspace(-1, 1, 12).view({3, 4}).to(other)};
  for (auto& parameter : parameters) parameter.requires_grad_();
  return parameters;
}

struct Run {
  std::vector<at::Tensor> parameters;
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  ga::AmpScaler scaler;

  Run(const Make& make, bool on_device, bool one_device = false)
      : parameters(make_parameters(one_device)),
        optimizer(make(parameters)),
        scaler({.init_scale = 64, .growth_interval = 2, .on_device = on_device}) {}

  bool window(int number, bool overflows) {
    for (auto& parameter : parameters)
      scaler.scale((parameter.to(at::kFloat) * (0.01 + 0.01 * number)).cos().sum()).backward();
    if (overflows) parameters.back().mutable_grad().view({-1})[5] = inf;
    const bool moved = scaler.step(*optimizer);
    scaler.update();
    optimizer->zero_grad();
    return moved;
  }

  std::vector<double> numbers() {
    std::vector<double> all{scaler.get_scale(), scaler.state_dict().at("_growth_tracker")};
    for (auto& parameter : parameters) all.push_back(parameter.detach().to(at::kDouble).square().sum().item<double>());
    return all;
  }
};

ga::detail::NamedTensors state_of(torch::optim::Optimizer& optimizer, const std::vector<at::Tensor>& parameters) {
  ga::detail::NamedParameters named;
  for (std::size_t i = 0; i < parameters.size(); ++i) named.insert(std::to_string(i), parameters[i]);
  return dynamic_cast<ga::optim::OnePass&>(optimizer).named_state(named);
}

/// Compares results, up to rounding for Adafactor, whose numbers are computed on the device.
bool same(const at::Tensor& a, const at::Tensor& b, bool to_rounding) {
  if (!to_rounding) return at::equal(a, b);
  return at::allclose(a.to(at::kDouble), b.to(at::kDouble), a.scalar_type() == at::kBFloat16 ? 1e-2 : 1e-5, 1e-6);
}

}  // namespace

TEST_CASE("AmpScaler on the device: updated and skipped values are the same as with a scale that the host reads",
          "[cuda]") {
  if (!torch::cuda::is_available()) SKIP("needs a CUDA device");
  const bool one_device = torch::cuda::device_count() < 2 || GENERATE(false, true);
  for (auto& [name, make] : optimizers()) {
    if (!make) continue;
    INFO(name);
    const bool to_rounding = name.rfind("Adafactor", 0) == 0;
    Run asking(make, false, one_device), left(make, true, one_device);
    for (int number = 0; number < 9; ++number) {
      INFO("window " << number);
      const bool overflows = number == 0 || number == 3 || number == 4;
      const auto before = left.parameters.front().detach().clone();
      CHECK(asking.window(number, overflows) == !overflows);
      const bool host_must_know = name == "SGD, dampening" && number <= 1;
      CHECK(left.window(number, overflows) == (!host_must_know || !overflows));
      CHECK(at::equal(before, left.parameters.front()) == overflows);
      for (std::size_t i = 0; i < left.parameters.size(); ++i)
        CHECK(same(left.parameters[i], asking.parameters[i], to_rounding));
    }
    CHECK(left.scaler.get_scale() == asking.scaler.get_scale());
    CHECK(left.scaler.state_dict() == asking.scaler.state_dict());
    const auto states = state_of(*left.optimizer, left.parameters),
               expected = state_of(*asking.optimizer, asking.parameters);
    CHECK(states.size() == expected.size());
    for (auto& [key, tensor] : expected)
      if (key.rfind("rounding", 0) != 0) {
        INFO(key);
        CHECK(same(states.at(key), tensor, to_rounding));
      }
  }
}

TEST_CASE("AmpScaler on the device: an optimizer's step count excludes skipped steps", "[cuda]") {
  if (!torch::cuda::is_available()) SKIP("needs a CUDA device");
  Run run(with<ga::optim::AdamW>(ga::optim::AdamWOptions(0.1)), true);
  auto& adamw = dynamic_cast<ga::optim::AdamW&>(*run.optimizer);
  const auto step_of = [&](torch::optim::AdamW& optimizer) {
    return static_cast<torch::optim::AdamWParamState&>(*optimizer.state().at(run.parameters[0].unsafeGetTensorImpl()))
        .step();
  };
  for (int number = 0; number < 4; ++number) run.window(number, number % 2 == 1);
  CHECK(step_of(adamw) != 2);  // counts skipped steps until the state is read
  CHECK(state_of(adamw, run.parameters).at("step.0").item<double>() == 2);
  CHECK(step_of(adamw) == 2);
  run.window(4, true);
  CHECK(
      static_cast<torch::optim::AdamWParamState&>(*adamw.state().at(run.parameters[0].unsafeGetTensorImpl())).step() ==
      2);
  run.window(5, false);
  run.window(6, true);
  std::stringstream file;
  torch::save(adamw, file);
  auto others = make_parameters(false);
  ga::optim::AdamW loaded(others, ga::optim::AdamWOptions(0.1));
  torch::load(loaded, file);
  CHECK(state_of(loaded, others).at("step.0").item<double>() == 3);
  run.window(7, true);
  run.parameters[0].mutable_grad() = torch::ones_like(run.parameters[0]);
  adamw.step();  // a direct step
  CHECK(state_of(adamw, run.parameters).at("step.0").item<double>() == 4);
  CHECK(state_of(adamw, run.parameters).at("step.1").item<double>() == 3);
}

TEST_CASE("AmpScaler on the device: parameters that are updated in some windows only have separate counts", "[cuda]") {
  if (!torch::cuda::is_available()) SKIP("needs a CUDA device");
  const auto counts = [](bool on_device) {
    Run run(with<ga::optim::Adam>(ga::optim::AdamOptions(0.1)), on_device, true);
    for (int number = 0; number < 8; ++number) {
      for (std::size_t i = 0; i < run.parameters.size(); ++i)
        run.parameters[i].requires_grad_(i == 2 || number % 3 > 0);
      const auto frozen = number % 3 == 0;
      run.scaler.scale((run.parameters[2] * 2).sum() + (frozen ? run.parameters[2].sum() : run.parameters[0].sum()))
          .backward();
      if (number == 2 || number == 3) run.parameters[2].mutable_grad()[0][0] = inf;
      run.scaler.step(*run.optimizer);
      run.scaler.update();
      run.optimizer->zero_grad();
    }
    const auto state = state_of(*run.optimizer, run.parameters);
    std::vector<double> all = run.numbers();
    for (auto name : {"step.0", "step.2"}) all.push_back(state.at(name).item<double>());
    return all;
  };
  CHECK(counts(true) == counts(false));
}

TEST_CASE("AmpScaler on the device: sparse rows are skipped, too", "[cuda]") {
  if (!torch::cuda::is_available()) SKIP("needs a CUDA device");
  auto table = torch::ones({10, 4}, at::kCUDA).requires_grad_();
  ga::optim::SGD sgd({table}, ga::optim::SGDOptions(0.5));
  ga::AmpScaler scaler({.init_scale = 8, .on_device = true});
  const auto window = [&](double factor) {
    const auto ids = torch::tensor({3, 7, 3}).to(at::kCUDA);
    scaler.scale((torch::embedding(table, ids, -1, false, /*sparse=*/true) * factor).sum()).backward();
    CHECK((scaler.step(sgd) == ga::StepResult::left_to_device));
    scaler.update();
    sgd.zero_grad();
  };
  window(inf);
  CHECK(table.eq(1).all().item<bool>());
  CHECK(scaler.get_scale() == 4);
  window(1);
  CHECK(table.sum(1).cpu().equal(torch::tensor({4., 4., 4., 0., 4., 4., 4., 2., 4., 4.}, at::kFloat)));
}

TEST_CASE("AmpScaler on the device: if another window is open, or with several devices, the host reads the result",
          "[cuda]") {
  if (!torch::cuda::is_available()) SKIP("needs a CUDA device");
  auto a = torch::ones({4}, at::kCUDA).requires_grad_(), b = torch::ones({4}, at::kCUDA).requires_grad_();
  ga::optim::SGD first({a}, ga::optim::SGDOptions(1)), second({b}, ga::optim::SGDOptions(1));
  ga::GradAccumulator one(first, {.steps = 1}), two(second, {.steps = 2});
  ga::AmpScaler scaler({.init_scale = 8, .on_device = true});
  const auto micro_batch = [&](double spoil) {
    scaler.scale((a * spoil).sum() + b.sum()).backward();
    scaler.step(one);
    scaler.step(two);
    scaler.update();
    one.zero_grad();
    two.zero_grad();
  };
  micro_batch(inf);  // the scale changes, so the open window of `two` is discarded
  CHECK(two.gradients().items() == 0);
  CHECK(scaler.get_scale() == 4);
  micro_batch(1);
  CHECK(two.gradients().items() == 1);
  micro_batch(1);
  CHECK(two.updates() == 1);
  CHECK(b.detach().cpu().equal(torch::zeros({4})));
  CHECK(a.detach().cpu().equal(torch::full({4}, -1.)));
  micro_batch(1);
  micro_batch(inf);
  CHECK(two.updates() == 2);
  CHECK(scaler.get_scale() == 2);

  auto here = torch::ones({4}).requires_grad_();
  ga::optim::SGD both({a, here}, ga::optim::SGDOptions(1));
  scaler.scale(a.sum().cpu() + here.sum() * inf).backward();
  CHECK_FALSE(scaler.step(both));
  scaler.update();
  CHECK(scaler.get_scale() == 1);
}

TEST_CASE("AmpScaler on the device: update after a flush needs no wait, and without update the host reads the result",
          "[cuda]") {
  if (!torch::cuda::is_available()) SKIP("needs a CUDA device");
  const bool behind_its_back = GENERATE(false, true);
  auto a = torch::ones({4}, at::kCUDA).requires_grad_();
  ga::optim::SGD sgd({a}, ga::optim::SGDOptions(1));
  ga::GradAccumulator optimizer(sgd, {.steps = 3});
  ga::AmpScaler scaler({.init_scale = 8, .on_device = true});
  const auto micro_batch = [&](double spoil) {
    scaler.scale((a * spoil).sum()).backward();
    scaler.step(optimizer);
    scaler.update();
    optimizer.zero_grad();
  };
  std::int64_t waits = 0;
  for (double spoil : {inf, 1.0, inf}) {
    micro_batch(spoil);
    std::optional<WaitCount> count;
    if (WaitCount::possible()) count.emplace();
    optimizer.flush();
    if (!behind_its_back) scaler.update();
    optimizer.zero_grad();
    micro_batch(1);
    if (count) waits += count->waits();
    optimizer.discard();
  }
  if (WaitCount::possible()) CHECK((waits == 0) == !behind_its_back);
  CHECK(scaler.get_scale() == 2);
}

TEST_CASE("AmpScaler on the device: scales from the host, states, and gradients that overflow at every scale",
          "[cuda]") {
  if (!torch::cuda::is_available()) SKIP("needs a CUDA device");
  const auto adam = with<ga::optim::Adam>(ga::optim::AdamOptions(0.1));
  Run run(adam, true), asking(adam, false);
  const auto both = [&](const std::function<void(Run&)>& action) {
    action(run);
    action(asking);
    CHECK(run.scaler.state_dict() == asking.scaler.state_dict());
  };
  both([](Run& one) { one.window(0, true), one.window(1, false); });
  both([](Run& one) { one.scaler.update(512.0); });
  both([](Run& one) { one.window(2, false), one.window(3, false), one.window(4, false); });
  both([](Run& one) { one.scaler.set_growth_factor(4), one.scaler.set_backoff_factor(0.25); });
  both([](Run& one) { one.window(5, true), one.window(6, false), one.window(7, false); });
  both([](Run& one) { one.window(8, false), one.scaler.set_growth_interval(1), one.window(9, false); });  // overdue
  both([](Run& one) { one.scaler.load_state_dict(one.scaler.state_dict()), one.window(8, true); });
  CHECK(run.numbers() == asking.numbers());

  for (const double least : {0.0, 2.0}) {
    Run hopeless(adam, true);
    ga::AmpScaler scaler({.init_scale = 64, .min_scale = least, .on_device = true});
    const auto endless = [&] {
      for (int number = 0; number < 500; ++number) {
        scaler.scale((hopeless.parameters[0] * inf).sum()).backward();
        scaler.step(*hopeless.optimizer);
        scaler.update();
        hopeless.optimizer->zero_grad();
      }
    };
    REQUIRE_ERROR("gradients overflow at every scale", endless());
    CHECK(at::equal(hopeless.parameters[0], make_parameters(false)[0]));
  }
}

TEST_CASE("AmpScaler on the device: a step that threw is not counted, and one without its state begins again",
          "[cuda]") {
  if (!FailingAllocation::possible()) SKIP("needs the emulated device, which can be made to run out of memory");
  for (bool on_device : {false, true}) {
    Run run(with<ga::optim::AdamW>(ga::optim::AdamWOptions(0.1)), on_device);
    for (int number = 0; number < 3; ++number) run.window(number, number != 1);  // the scale has changed
    const auto before = run.scaler.state_dict();
    run.scaler.scale(run.parameters[0].sum()).backward();
    for (std::int64_t n = 1;; ++n) {
      Run other(with<ga::optim::AdamW>(ga::optim::AdamWOptions(0.1)), on_device);
      other.scaler.scale(other.parameters[0].sum()).backward();
      bool threw = false;
      try {
        const FailingAllocation failing(n);
        other.scaler.step(*other.optimizer);
      } catch (const c10::OutOfMemoryError&) {
        threw = true;
      }
      other.scaler.update();
      CHECK(other.scaler.state_dict().at("_growth_tracker") == (threw ? 0 : 1));
      if (!threw) break;
    }
    run.optimizer->zero_grad();
    run.optimizer->state().clear();
    run.window(3, false);
    for (auto& parameter : run.parameters) CHECK(parameter.isfinite().all().item<bool>());
    CHECK(run.scaler.state_dict().at("scale") == before.at("scale"));
  }
}

TEST_CASE("AmpScaler on the device: a rejected window changes nothing, and one that overflows lowers the scale",
          "[cuda]") {
  auto batches = make_batches({5, 5, 5, 5, 5}, at::kFloat);
  for (auto& batch : batches) batch = {batch.data.to(at::kCUDA), batch.target.to(at::kCUDA)};
  batches[1].target *= 1e6;
  const auto train = [&](std::optional<bool> on_device) {  // empty: without the two bad batches, and without a scale
    auto model = make_model(at::kFloat);
    model->to(at::kCUDA);
    ga::optim::AdamW adamw(model->parameters(), 0.1);
    ga::GradAccumulator optimizer(adamw);
    ga::AmpScaler scaler({.init_scale = 64, .enabled = on_device.has_value(), .on_device = on_device.value_or(false)});
    ga::GuardNorm::Running guard({.max = 100.0});
    for (std::size_t i = 0; i < batches.size(); ++i) {
      if (!on_device && (i == 1 || i == 3)) continue;
      scaler.scale(loss_of(model, batches[i]) * (i == 3 ? inf : 1.0)).backward();
      scaler.unscale_(optimizer);
      guard.before_step(optimizer.gradients());
      CHECK(bool(scaler.step(optimizer)) == (i != 1 && i != 3));
      scaler.update();
      optimizer.zero_grad();
      if (!on_device) continue;
      const auto state = scaler.state_dict();
      CHECK(state.at("_growth_tracker") == std::vector<double>{1, 1, 2, 0, 1}[i]);
      CHECK(state.at("scale") == (i < 3 ? 64 : 32));
    }
    CHECK(optimizer.updates() == 3);
    return flat(model);
  };
  const auto expected = train(std::nullopt);
  CHECK(at::equal(train(false), expected));
  CHECK(at::equal(train(true), expected));
}

TEST_CASE("AmpScaler on the device: a Trainer refuses it, with the option's name", "[cuda]") {
  auto model = make_model(at::kFloat);
  ga::optim::SGD sgd(model->parameters(), 0.1);
  const auto trainer = [&] {
    ga::Trainer(
        model, sgd, [](auto& net, auto& batch) { return loss_of(net, batch); },
        ga::MixedPrecision{.dtype = at::kHalf, .scaler = {.on_device = true}});
  };
  REQUIRE_ERROR("MixedPrecision: scaler.on_device must be false", trainer());
}
