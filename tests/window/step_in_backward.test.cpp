// SPDX-License-Identifier: Apache-2.0
//
// Compares GradAccumulator with in_backward to the same loop without it.
#include "support/catch.hpp"

#include <gradaccum/amp_scaler.hpp>
#include <gradaccum/checkpoint.hpp>
#include <gradaccum/checkpointed_sequential.hpp>
#include <gradaccum/detail/window/open_window.hpp>
#include <gradaccum/detail/window/window_gradients.hpp>
#include <gradaccum/grad_accumulator.hpp>
#include <gradaccum/memory_meter.hpp>
#include <gradaccum/optim/adam.hpp>
#include <gradaccum/optim/adamw.hpp>
#include <gradaccum/optim/sgd.hpp>

#include "support/leaves.hpp"
#include "support/models.hpp"

#include <functional>
#include <string>
#include <thread>

namespace ga = gradaccum;
namespace inner = gradaccum::detail;
using namespace testing;

namespace {

using ga::optim::AdamOptions;
using ga::optim::AdamWOptions;
using ga::optim::SGDOptions;
using torch::nn::Linear;
using torch::nn::Sequential;
using Slot = std::unique_ptr<torch::autograd::PostAccumulateGradHook>;

constexpr std::int64_t wide = 300;  // 90'000 elements: large enough to be updated within backward

Sequential wide_model(at::ScalarType dtype = at::kFloat) {
  torch::manual_seed(2);
  Sequential model(Linear(4, wide), torch::nn::Tanh(), Linear(wide, wide), torch::nn::Tanh(), Linear(wide, wide),
                   torch::nn::Tanh(), Linear(wide, 3));
  model->to(dtype);
  return model;
}

/// Returns the optimizer's state in the order of the parameters.
template <class Optimizer>
Parameters state_of(const Optimizer& optimizer, const Parameters& parameters) {
  torch::OrderedDict<std::string, at::Tensor> named;
  for (auto& parameter : parameters) named.insert(std::to_string(named.size()), parameter);
  Parameters state;
  for (auto& [name, tensor] : optimizer.named_state(named)) state.push_back(tensor);
  return state;
}

bool equal(const Parameters& a, const Parameters& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](auto& x, auto& y) { return at::equal(x, y); });
}

/// The results of a training: the parameters' bits, the optimizer's state, and return values.
struct Outcome {
  at::Tensor parameters;
  Parameters state;
  std::vector<bool> moved;
  std::int64_t updates;
};
bool operator==(const Outcome& a, const Outcome& b) {
  return at::equal(a.parameters, b.parameters) && equal(a.state, b.state) && a.moved == b.moved &&
         a.updates == b.updates;
}

/// Trains with micro-batches weighted by their rows; the last window is shorter, and flushed.
template <class Optimizer, class Options>
Outcome trained(Sequential model, Options options, ga::GradAccumulatorOptions how,
                const std::vector<Example>& batches) {
  Optimizer optimizer(model->parameters(), options);
  ga::GradAccumulator accumulator(optimizer, how);
  std::vector<bool> moved;
  for (auto& batch : batches) {
    accumulator.backward(ga::Loss(loss_of(model, batch), batch.data.size(0)));
    moved.push_back(accumulator.step());
    accumulator.zero_grad();
  }
  moved.push_back(accumulator.flush());
  for (auto& p : model->parameters()) CHECK_FALSE(p.grad().defined());
  return {flat(model), state_of(optimizer, model->parameters()), moved, accumulator.updates()};
}

template <class Optimizer, class Options>
void check_same(Options options, std::int64_t steps) {
  for (const auto& make : {+[] { return make_model(at::kFloat); }, +[] { return wide_model(); }}) {
    const auto batches = make_batches({3, 5, 2, 7, 1, 4}, at::kFloat);
    const auto ordinary = trained<Optimizer>(make(), options, {.steps = steps}, batches);
    const auto early = trained<Optimizer>(make(), options, {.steps = steps, .in_backward = true}, batches);
    CHECK(early == ordinary);
    CHECK_FALSE(trained<Optimizer>(make(), options, {.steps = steps + 1, .in_backward = true}, batches) == ordinary);
    CHECK(ordinary.updates == (6 + steps - 1) / steps);
  }
}

Slot& hook_of(const at::Tensor& parameter) { return torch::autograd::impl::post_acc_grad_hooks(parameter); }

std::vector<const void*> hooks_of(const torch::nn::Sequential& model) {
  std::vector<const void*> hooks;
  for (auto& parameter : model->parameters()) hooks.push_back(hook_of(parameter).get());
  return hooks;
}

/// Calls a function after the gradient is accumulated.
struct Listener : torch::autograd::PostAccumulateGradHook {
  explicit Listener(std::function<void(const at::Tensor&)> f) : call(std::move(f)) {}
  void operator()(const at::Tensor& parameter) override { call(parameter); }
  std::function<void(const at::Tensor&)> call;
};
void listen(const at::Tensor& parameter, std::function<void(const at::Tensor&)> call) {
  hook_of(parameter) = std::make_unique<Listener>(std::move(call));
}

/// The identity, whose backward calls a function.
struct Probe : torch::autograd::Function<Probe> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, at::Tensor x, std::function<void()>* call) {
    context->saved_data["call"] = reinterpret_cast<std::int64_t>(call);
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    (*reinterpret_cast<std::function<void()>*>(context->saved_data["call"].toInt()))();
    return {gradients[0], at::Tensor()};
  }
};

struct Rig {
  explicit Rig(ga::GradAccumulatorOptions options) : accumulator(optimizer, options), before(flat(model)) {}
  /// Calls a function in backward when the gradients of all but the first layer are complete.
  at::Tensor forward_with(at::Tensor x, std::function<void()>& call) {
    std::size_t layer = 0;
    for (auto& module : *model) {
      x = module.forward(x);
      if (layer++ == 1) x = Probe::apply(x, &call);
    }
    return x;
  }
  bool untouched() { return at::equal(flat(model), before); }

  Sequential model = wide_model();
  ga::optim::AdamW optimizer{model->parameters(), AdamWOptions(0.01)};
  ga::GradAccumulator<ga::optim::AdamW> accumulator;
  at::Tensor before;
  std::vector<Example> batches = make_batches({3, 5, 2}, at::kFloat);
};

}  // namespace

TEST_CASE("in_backward: bitwise the ordinary step, with any optimizer and window") {
  const auto steps = GENERATE(1, 4);
  check_same<ga::optim::SGD>(SGDOptions(0.1).momentum(0.9).weight_decay(0.1), steps);
  check_same<ga::optim::Adam>(AdamOptions(0.01).weight_decay(0.1).amsgrad(true), steps);
  check_same<ga::optim::AdamW>(AdamWOptions(0.01), steps);
}

TEST_CASE(
    "in_backward: parameters are updated within the backward that fills the window, and their gradients are freed") {
  Rig rig({.steps = 2, .in_backward = true});
  const auto parameters = rig.model->parameters();
  const auto last = parameters[4].detach().clone();  // the first wide one with a gradient
  int seen = 0;
  bool moved = false, freed = false;
  listen(parameters[0], [&](const at::Tensor&) {
    ++seen;
    moved = !at::equal(parameters[4], last);
    freed = !parameters[4].grad().defined();
  });
  rig.accumulator.backward(loss_of(rig.model, rig.batches[0]));
  CHECK((seen == 1 && !moved && !freed));
  CHECK(rig.untouched());
  CHECK_FALSE(rig.accumulator.step());
  rig.accumulator.backward(loss_of(rig.model, rig.batches[1]));
  CHECK((seen == 2 && moved && freed));
  for (auto& p : parameters) CHECK_FALSE(p.grad().defined());
  const auto after = flat(rig.model);
  CHECK(rig.accumulator.updates() == 0);
  CHECK(rig.accumulator.step());
  CHECK(rig.accumulator.updates() == 1);
  CHECK(at::equal(flat(rig.model), after));  // no second update
}

TEST_CASE("in_backward: weights of 0, also of the last micro-batch") {
  const auto weights = GENERATE(std::vector<double>{2, 0, 3}, std::vector<double>{2, 3, 0},
                                std::vector<double>{0, 0, 5}, std::vector<double>{0, 0, 0});
  const auto run = [&](bool in_backward) {
    Rig rig({.steps = 3, .in_backward = in_backward});
    std::vector<bool> moved;
    for (std::size_t i = 0; i < 3; ++i) {
      rig.accumulator.backward(ga::Loss(loss_of(rig.model, rig.batches[i]), weights[i]));
      moved.push_back(rig.accumulator.step());
      rig.accumulator.zero_grad();
    }
    CHECK(moved.back() == (weights != std::vector<double>{0, 0, 0}));
    return Outcome{flat(rig.model), state_of(rig.optimizer, rig.model->parameters()), moved, rig.accumulator.updates()};
  };
  CHECK(run(true) == run(false));
}

TEST_CASE("in_backward: parameters that the last micro-batch does not reach are updated when the window closes") {
  const auto accumulate_in = GENERATE(std::optional<at::ScalarType>(), std::optional<at::ScalarType>(at::kFloat));
  const auto run = [&](bool in_backward, bool both) {
    torch::manual_seed(3);
    Linear a(4, wide), b(4, wide), never(4, wide);
    Parameters all;
    for (auto* layer : {&a, &b, &never}) {
      (*layer)->to(at::kBFloat16);
      for (auto& p : (*layer)->parameters()) all.push_back(p);
    }
    ga::optim::AdamW adamw(all, AdamWOptions(0.01));
    ga::GradAccumulator optimizer(adamw, {.steps = 2, .accumulate_in = accumulate_in, .in_backward = in_backward});
    const auto x = torch::randn({5, 4}, at::kBFloat16);
    std::vector<bool> moved;
    for (int window = 0; window < 3; ++window) {
      optimizer.backward(both ? (a->forward(x) * b->forward(x)).mean() : a->forward(x).square().mean());
      moved.push_back(optimizer.step());
      optimizer.backward(b->forward(x).square().mean());
      moved.push_back(optimizer.step());
      optimizer.zero_grad();
    }
    std::vector<at::Tensor> flattened;
    for (auto& p : all) flattened.push_back(p.detach().flatten());
    return Outcome{torch::cat(flattened), state_of(adamw, all), moved, optimizer.updates()};
  };
  CHECK(run(true, true) == run(false, true));
  CHECK(run(true, false) == run(false, false));
  CHECK_FALSE(run(true, true) == run(false, false));
}

TEST_CASE("in_backward: bfloat16 parameters with sums in float32") {
  const auto steps = GENERATE(1, 4);
  const auto batches = make_batches({3, 5, 2, 7, 1, 4}, at::kBFloat16);
  const auto run = [&](std::optional<at::ScalarType> accumulate_in, bool in_backward) {
    return trained<ga::optim::AdamW>(wide_model(at::kBFloat16), AdamWOptions(0.01),
                                     {.steps = steps, .accumulate_in = accumulate_in, .in_backward = in_backward},
                                     batches);
  };
  CHECK(run(at::kFloat, true) == run(at::kFloat, false));
  CHECK(run({}, true) == run({}, false));
  if (steps > 1) CHECK_FALSE(run({}, true) == run(at::kFloat, false));
}

TEST_CASE("in_backward: stochastic rounding draws the same numbers") {
  const auto run = [](bool in_backward, std::uint64_t seed) {
    auto model = wide_model(at::kBFloat16);
    ga::optim::AdamW adamw(model->parameters(), AdamWOptions(1e-4));
    adamw.stochastic_rounding(seed);
    ga::GradAccumulator optimizer(adamw, {.in_backward = in_backward});
    for (auto& batch : make_batches({3, 5, 2}, at::kBFloat16)) {
      optimizer.backward(loss_of(model, batch));
      optimizer.step();
      optimizer.zero_grad();
    }
    return flat(model);
  };
  CHECK(at::equal(run(true, 1), run(false, 1)));
  CHECK_FALSE(at::equal(run(true, 1), run(false, 2)));
}

TEST_CASE("in_backward: sparse gradients, frozen and tied parameters, groups with separate options") {
  const auto run = [](bool in_backward, double second_rate) {
    torch::manual_seed(4);
    torch::nn::Embedding embedding(torch::nn::EmbeddingOptions(500, wide).sparse(true));
    Linear tied(wide, wide), other(wide, wide), frozen(wide, wide);
    for (auto& p : frozen->parameters()) p.set_requires_grad(false);
    std::vector<torch::optim::OptimizerParamGroup> groups;
    groups.emplace_back(Parameters{embedding->weight});
    groups.emplace_back(Parameters{tied->weight, tied->bias, other->weight, other->bias, frozen->weight, frozen->bias},
                        std::make_unique<SGDOptions>(SGDOptions(second_rate).momentum(0.9)));
    ga::optim::SGD sgd(groups, SGDOptions(0.5));
    ga::GradAccumulator optimizer(sgd, {.steps = 2, .in_backward = in_backward});
    for (int i = 0; i < 6; ++i) {
      const auto ids = torch::tensor({i, i, 7, 20 + i});
      auto h = tied->forward(embedding->forward(ids)).tanh();
      h = frozen->forward(tied->forward(other->forward(h).tanh()));
      optimizer.backward(ga::Loss(h.square().mean(), i + 1));
      optimizer.step();
      optimizer.zero_grad();
    }
    Parameters all;
    for (auto& group : sgd.param_groups())
      for (auto& p : group.params()) all.push_back(p.detach().flatten());
    return torch::cat(all);
  };
  CHECK(at::equal(run(true, 0.1), run(false, 0.1)));
  CHECK_FALSE(at::equal(run(true, 0.1), run(false, 0.2)));
}

TEST_CASE("in_backward: checkpointed blocks are recomputed with unchanged parameters") {
  const auto run = [](int kind, bool in_backward) {
    auto model = wide_model();
    torch::nn::Sequential stages;
    for (auto& stage : *model) stages->push_back(stage);  // the same modules
    ga::CheckpointedSequential segmented(stages, {.segments = 3});
    ga::optim::AdamW adamw(model->parameters(), AdamWOptions(0.01));
    ga::GradAccumulator optimizer(adamw, {.steps = 2, .in_backward = in_backward});
    const auto forward = [&](const at::Tensor& x) {
      if (kind == 0) return model->forward(x);
      if (kind == 1) return ga::checkpoint(model, x);
      return segmented->forward(x);
    };
    for (auto& batch : make_batches({3, 5, 2, 4}, at::kFloat)) {
      optimizer.backward(torch::mse_loss(forward(batch.data), batch.target));
      optimizer.step();
      optimizer.zero_grad();
    }
    return flat(model);
  };
  const auto expected = run(0, false);
  for (int kind : {0, 1, 2}) CHECK(at::equal(run(kind, true), expected));
}

TEST_CASE("in_backward: retain_graph, as far as LibTorch allows") {
  Rig rig({.steps = 2, .in_backward = true}), peer({.steps = 2});
  for (auto* each : {&rig, &peer}) {  // the same graph twice, without an update in between
    const auto loss = loss_of(each->model, each->batches[0]);
    each->accumulator.backward(loss, /*retain_graph=*/true);
    each->accumulator.step();
    each->accumulator.backward(loss, /*retain_graph=*/true);
    each->accumulator.step();
    each->accumulator.zero_grad();
    REQUIRE_ERROR("modified by an inplace operation", each->accumulator.backward(loss));
    each->accumulator.discard();
  }
  CHECK(at::equal(flat(rig.model), flat(peer.model)));
}

TEST_CASE("in_backward: discard() inside a window, and add_param_group and set_steps between windows") {
  const auto run = [](bool in_backward) {
    Rig rig({.steps = 2, .in_backward = in_backward});
    auto& optimizer = rig.accumulator;
    Linear more(3, wide);
    torch::nn::init::ones_(more->weight);
    torch::nn::init::zeros_(more->bias);
    const auto pass = [&](std::size_t i) {
      optimizer.backward(more->forward(rig.model->forward(rig.batches[i].data)).square().mean());
      const bool moved = optimizer.step();
      optimizer.zero_grad();
      return moved;
    };
    pass(0);
    optimizer.discard();
    CHECK(rig.untouched());
    optimizer.add_param_group(torch::optim::OptimizerParamGroup(more->parameters()));
    more->zero_grad();
    CHECK_FALSE(pass(1));
    CHECK(pass(2));
    optimizer.set_steps(1);
    CHECK(pass(0));
    return torch::cat({flat(rig.model), flat(more)});
  };
  CHECK(at::equal(run(true), run(false)));
}

TEST_CASE("in_backward: an accumulator behind a torch::optim::Optimizer&") {
  Rig rig({.in_backward = true}), peer({});
  for (auto* each : {&rig, &peer}) {
    torch::optim::Optimizer& behind = each->accumulator;
    torch::optim::StepLR schedule(behind, 1, 0.5);
    for (auto& batch : each->batches) {
      each->accumulator.backward(loss_of(each->model, batch));
      behind.step();
      schedule.step();
    }
  }
  CHECK(at::equal(flat(rig.model), flat(peer.model)));
  CHECK(rig.accumulator.param_groups()[0].options().get_lr() == 0.01 / 4);  // the scheduler's first step does nothing

  torch::optim::Optimizer& behind = rig.accumulator;
  rig.before = flat(rig.model);
  REQUIRE_ERROR("before each step(), call optimizer.backward(loss)", behind.step([&] {
    auto loss = loss_of(rig.model, rig.batches[0]);
    loss.backward();
    return loss;
  }));
  CHECK(rig.untouched());
}

TEST_CASE("in_backward: two optimizers over two parts of a model") {
  const auto run = [](bool first_in_backward, bool second_in_backward, bool passes_of_their_own) {
    auto model = wide_model();
    const auto all = model->parameters();
    ga::optim::AdamW head(Parameters(all.begin() + 4, all.end()), AdamWOptions(0.01));
    ga::optim::SGD body(Parameters(all.begin(), all.begin() + 4), SGDOptions(0.1));
    ga::GradAccumulator first(head, {.in_backward = first_in_backward});
    ga::GradAccumulator second(body, {.in_backward = second_in_backward});
    for (auto& batch : make_batches({3, 5, 2}, at::kFloat)) {
      if (passes_of_their_own) {
        first.backward(loss_of(model, batch));
        first.step();
        second.zero_grad();
        second.backward(loss_of(model, batch));
      } else {
        first.backward(loss_of(model, batch));
        first.step();
      }
      second.step();
      first.zero_grad();
      second.zero_grad();
    }
    return flat(model);
  };
  CHECK(at::equal(run(true, false, false), run(false, false, false)));
  CHECK(at::equal(run(true, true, true), run(false, false, true)));
  CHECK_FALSE(at::equal(run(true, true, true), run(false, false, false)));
}

TEST_CASE("in_backward: other hooks still run, before the step, and remain afterwards") {
  Rig rig({.steps = 2, .in_backward = true});
  const auto parameter = rig.model->parameters()[2];
  int calls = 0;
  at::Tensor value;
  listen(parameter, [&](const at::Tensor& p) {
    ++calls;
    CHECK(p.grad().defined());
    value = p.detach().clone();
  });
  const auto hooks = hooks_of(rig.model);
  const auto before = parameter.detach().clone();
  for (std::size_t i : {0, 1}) {
    rig.accumulator.backward(loss_of(rig.model, rig.batches[i]));
    CHECK(hooks_of(rig.model) == hooks);
    rig.accumulator.step();
  }
  CHECK(calls == 2);
  CHECK(at::equal(value, before));
  CHECK_FALSE(at::equal(parameter, before));
}

TEST_CASE("in_backward: at most one large gradient is held, and 12 bytes per parameter in all") {
  constexpr std::int64_t layers = 24, size = 512, one = size * size;
  const auto peak = [&](bool in_backward) {
    const auto x = torch::randn({1, size});
    ga::MemoryMeter meter;
    Sequential model;
    for (std::int64_t i = 0; i < layers; ++i)
      model->push_back(Linear(torch::nn::LinearOptions(size, size).bias(false)));
    ga::optim::AdamW adamw(model->parameters(), AdamWOptions(0.01));
    ga::GradAccumulator optimizer(adamw, {.in_backward = in_backward});
    for (int i = 0; i < 3; ++i) {
      optimizer.backward(model->forward(x).square().mean());
      optimizer.step();
      optimizer.zero_grad();
    }
    return meter.peak_bytes();
  };
  const auto parameters = layers * one, early = peak(true), ordinary = peak(false);
  CAPTURE(static_cast<double>(early) / parameters, static_cast<double>(ordinary) / parameters);
  CHECK(early <= 12.1 * parameters + 4 * one);
  CHECK(early >= 12 * parameters + 4 * one);
  CHECK(ordinary >= 16 * parameters);
  CHECK(ordinary - early >= 4 * (layers - 2) * one);
}

TEST_CASE("in_backward: a thousand windows need the same memory") {
  auto model = make_model(at::kFloat);
  ga::optim::AdamW adamw(model->parameters(), AdamWOptions(0.01));
  const auto batch = make_batches({3}, at::kFloat)[0];
  ga::MemoryMeter meter;
  ga::GradAccumulator optimizer(adamw, {.in_backward = true});
  std::int64_t after_ten = 0;
  for (int i = 0; i < 1000; ++i) {
    optimizer.backward(loss_of(model, batch));
    optimizer.step();
    optimizer.zero_grad();
    if (i == 9) after_ten = meter.live_bytes();
  }
  CHECK(meter.live_bytes() == after_ten);
  CHECK(optimizer.updates() == 1000);
}

TEST_CASE("in_backward: operations that need all gradients together are refused before any update") {
  Rig rig({.steps = 2, .in_backward = true});
  auto& optimizer = rig.accumulator;
  const auto loss = [&] { return loss_of(rig.model, rig.batches[0]); };
  REQUIRE_ERROR("clipping needs all gradients at once", optimizer.clip_grad_norm_(1.0));
  REQUIRE_ERROR("clipping needs all gradients at once", optimizer.clip_grad_value_(1.0));
  REQUIRE_ERROR("create_graph keeps the gradients", optimizer.backward(loss(), {}, /*create_graph=*/true));
  ga::AmpScaler scaler;
  REQUIRE_ERROR("use bfloat16, which needs no scaler", optimizer.backward(scaler.scale(ga::Loss(loss()))));
  for (auto& p : rig.model->parameters()) CHECK_FALSE(p.grad().defined());

  REQUIRE_ERROR("before each step(), call optimizer.backward(loss)", optimizer.step());
  loss().backward();
  REQUIRE_ERROR("before each step(), call optimizer.backward(loss)", optimizer.step());
  REQUIRE_ERROR("before each step(), call optimizer.backward(loss)", optimizer.gradients());
  optimizer.discard();

  optimizer.backward(loss());
  CHECK(optimizer.gradients().norm().item<double>() > 0);  // the window is not full yet
  CHECK_FALSE(optimizer.step());
  optimizer.gradients().factor().require_finite();
  REQUIRE_ERROR("use bfloat16, which needs no scaler", optimizer.backward(loss()));
  optimizer.discard();
  CHECK(rig.untouched());
  CHECK(optimizer.updates() == 0);

  scaler.set_growth_interval(10);
  ga::AmpScaler disabled({.enabled = false});
  for (int i : {0, 1}) {
    optimizer.backward(disabled.scale(ga::Loss(loss())));
    CHECK(disabled.step(optimizer) == (i == 1));
  }
  CHECK_FALSE(rig.untouched());
}

TEST_CASE("in_backward: a loss that was scaled by hand is detected by the scaler, after the update") {
  Rig rig({.in_backward = true});
  ga::AmpScaler scaler;
  rig.accumulator.backward(scaler.scale(loss_of(rig.model, rig.batches[0])));
  REQUIRE_ERROR("with in_backward, the gradients of this window were freed", scaler.step(rig.accumulator));
  REQUIRE_ERROR("with in_backward, the gradients of this window were freed", scaler.unscale_(rig.accumulator));
}

TEST_CASE("in_backward: reading freed gradients is an error") {
  Rig rig({.in_backward = true});
  auto held = rig.accumulator.gradients();
  rig.accumulator.backward(loss_of(rig.model, rig.batches[0]));
  auto asked = rig.accumulator.gradients();
  for (auto* each : {&held, &asked}) {
    const std::string sentence = "with in_backward, the gradients of this window were freed";
    REQUIRE_ERROR(sentence, each->norm());
    REQUIRE_ERROR(sentence, each->values());
    REQUIRE_ERROR(sentence, each->apply());
    REQUIRE_ERROR(sentence, each->raw());
    REQUIRE_ERROR(sentence, each->parameters());
    REQUIRE_ERROR(sentence, each->found_inf());
    REQUIRE_ERROR(sentence, each->factor().multiply(2));
    CHECK(each->items() == 1);
  }
  CHECK(rig.accumulator.step());
  CHECK(held.closed());
  REQUIRE_ERROR("with in_backward, the gradients of this window were freed", held.norm());
  CHECK_FALSE(rig.accumulator.gradients().closed());  // the next window
}

TEST_CASE("in_backward: an optimizer that does not take gradients is refused") {
  auto model = make_model();
  torch::optim::SGD sgd(model->parameters(), 0.1);
  REQUIRE_ERROR("in_backward needs an optimizer that takes gradients: ga::optim::SGD, Adam, AdamW",
                ga::GradAccumulator(sgd, {.in_backward = true}));
  REQUIRE_ERROR("got SGD", ga::GradAccumulator(sgd, {.in_backward = true}));
  ga::optim::SGD ours(model->parameters(), 0.1);
  torch::optim::Optimizer& hidden = ours;
  ga::GradAccumulator optimizer(hidden, {.in_backward = true});
  const auto before = flat(model);
  optimizer.backward(loss_of(model, make_batches({3})[0]));
  CHECK(optimizer.step());
  CHECK_FALSE(at::equal(flat(model), before));
}

TEST_CASE("in_backward: an exception in the middle") {
  Rig rig({.in_backward = true});
  const auto parameters = rig.model->parameters();
  const auto hooks = hooks_of(rig.model);
  const bool from_libtorch = GENERATE(true, false);
  std::function<void()> throws = [&] {
    TORCH_CHECK(!from_libtorch, "from backward");
    throw std::domain_error("from backward");
  };
  const auto broken = [&](std::size_t i) {
    const auto x = rig.forward_with(rig.batches[i].data, throws);
    rig.accumulator.backward(torch::mse_loss(x, rig.batches[i].target));
  };
  const std::string part = "backward had stepped some of the parameters but not the others; load a saved state";
  if (from_libtorch) {
    REQUIRE_ERROR("from backward", broken(0));
    REQUIRE_ERROR("GradAccumulator: ", rig.accumulator.step());
    rig.accumulator.discard();
    REQUIRE_ERROR(part, broken(0));
  } else {
    CHECK_THROWS_AS(broken(0), std::domain_error);
  }
  CHECK(hooks_of(rig.model) == hooks);
  CHECK_FALSE(rig.untouched());
  CHECK(rig.accumulator.updates() == 0);
  REQUIRE_ERROR(part, rig.accumulator.step());
  REQUIRE_ERROR(part, rig.accumulator.flush());
  REQUIRE_ERROR(part, rig.accumulator.gradients());
  rig.accumulator.discard();
  for (auto& p : parameters) CHECK_FALSE(p.grad().defined());
  rig.accumulator.backward(loss_of(rig.model, rig.batches[1]));
  CHECK(rig.accumulator.step());
}

TEST_CASE("in_backward: an exception before the first update changes no parameter") {
  Rig rig({.in_backward = true});
  std::function<void()> throws = [] { TORCH_CHECK(false, "from backward"); };
  const auto message =
      error_of([&] { rig.accumulator.backward(Probe::apply(loss_of(rig.model, rig.batches[0]), &throws)); });
  CHECK(contains(message, "from backward"));
  CHECK_FALSE(contains(message, "saved state"));
  REQUIRE_ERROR("an exception left this window's gradients incomplete", rig.accumulator.step());
  CHECK(rig.untouched());
}

TEST_CASE("in_backward: a gradient that arrives twice in one pass is an error") {
  Rig rig({.in_backward = true});
  const auto parameters = rig.model->parameters();
  const auto hooks = hooks_of(rig.model);
  const auto which = GENERATE(std::size_t(4), std::size_t(5));  // updated within backward, and when the window closes
  std::function<void()> backward_inside = [&] {
    at::AutoGradMode with_gradients(true);
    parameters[which].sum().backward();
  };
  const auto loss = [&] {
    return torch::mse_loss(rig.forward_with(rig.batches[0].data, backward_inside), rig.batches[0].target);
  };
  loss().backward();  // allowed without in_backward
  rig.accumulator.zero_grad();
  REQUIRE_ERROR("arrived twice in one pass: an operation runs its own backward inside",
                rig.accumulator.backward(loss()));
  CHECK(hooks_of(rig.model) == hooks);
  rig.accumulator.discard();
  rig.accumulator.backward(loss_of(rig.model, rig.batches[0]));
  CHECK(rig.accumulator.step());
}

TEST_CASE("in_backward: discard() inside of the pass ignores later gradients") {
  Rig rig({.in_backward = true});
  const auto first = rig.model->parameters()[0].detach().clone();
  listen(rig.model->parameters()[2], [&](const at::Tensor&) { rig.accumulator.discard(); });
  const auto hooks = hooks_of(rig.model);
  rig.accumulator.backward(loss_of(rig.model, rig.batches[0]));
  CHECK(at::equal(rig.model->parameters()[0], first));
  CHECK_FALSE(rig.untouched());
  CHECK(hooks_of(rig.model) == hooks);
}

TEST_CASE("step_in_backward: gradients arrive from several threads simultaneously") {
  torch::manual_seed(6);
  Parameters parameters, expected;
  for (int i = 0; i < 64; ++i) parameters.push_back(leaf(torch::randn({i % 3 == 0 ? 70'000 : 500})));
  expected = leaves(parameters);
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    parameters[i].mutable_grad() = torch::randn_like(parameters[i]);
    expected[i].mutable_grad() = parameters[i].grad().clone();
  }
  ga::optim::AdamW adamw(parameters, AdamWOptions(0.01)), peer(expected, AdamWOptions(0.01));
  peer.step();
  const auto window = std::make_shared<inner::WindowGradients>(parameters);
  inner::OptimizerOf optimizer(adamw);
  inner::step_in_backward(window, optimizer, [&] {
    std::vector<std::thread> threads;
    for (std::size_t thread = 0; thread < 4; ++thread)
      threads.emplace_back([&, thread] {
        for (auto i = thread; i < parameters.size(); i += 4) (*hook_of(parameters[i]))(parameters[i]);
      });
    for (auto& thread : threads) thread.join();
  });
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    CHECK(at::equal(parameters[i], expected[i]));
    CHECK_FALSE(parameters[i].grad().defined());
  }
  CHECK(window->stepped());
}
