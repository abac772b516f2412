// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/autocast.hpp>
#include <gradaccum/checkpoint.hpp>
#include <gradaccum/detail/checkpoint/forward_state.hpp>
#include <gradaccum/detail/checkpoint/recomputation.hpp>
#include <gradaccum/memory_meter.hpp>

#include "support/leaves.hpp"
#include "support/outcome.hpp"

#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/engine.h>

#include <algorithm>
#include <array>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <thread>

namespace ga = gradaccum;
namespace nn = torch::nn;
namespace inner = gradaccum::detail;
using namespace testing;

// Effects of a checkpoint on modes, statistics, memory and threads, and the detection of changes in place.
namespace {

at::Tensor randoms(at::IntArrayRef shape, at::ScalarType dtype = at::kDouble, int seed = 3) {
  torch::manual_seed(seed);
  return torch::randn(shape, dtype);
}

struct Modes {
  bool gradients = at::GradMode::is_enabled();
  bool autocast = at::autocast::is_autocast_enabled(at::kCPU);
  at::ScalarType dtype = at::autocast::get_autocast_dtype(at::kCPU);
  bool cached = at::autocast::is_autocast_cache_enabled();
  const void* scope = inner::SavingScope::innermost();
  bool operator==(const Modes&) const = default;
};

nn::Sequential block(std::int64_t width = 64, int layers = 3) {
  nn::Sequential net;
  for (int i = 0; i < layers; ++i) {
    net->push_back(nn::Linear(width, width));
    net->push_back(nn::GELU());
  }
  return net;
}

std::vector<nn::Sequential> blocks(int count, int seed = 1) {
  torch::manual_seed(seed);
  std::vector<nn::Sequential> result;
  for (int i = 0; i < count; ++i) result.push_back(block());
  return result;
}

std::vector<at::Tensor> parameters_of(const std::vector<nn::Sequential>& parts) {
  std::vector<at::Tensor> all;
  for (auto& part : parts)
    for (auto& parameter : part->parameters()) all.push_back(parameter);
  return all;
}

at::Tensor through(const std::vector<nn::Sequential>& parts, at::Tensor x, bool checkpointed) {
  for (auto part : parts) x = checkpointed ? ga::checkpoint(part, x) : part->forward(x);
  return x;
}

}  // namespace

TEST_CASE("checkpoint: an exception of the function leaves everything unchanged") {
  const auto x = leaf(randoms({4}));
  for (bool nested : {false, true}) {
    const auto fails = [](const at::Tensor& t) -> at::Tensor {
      const auto y = (t * torch::rand_like(t)).exp();
      ga::Autocast autocast(at::kCPU, at::kHalf, true, false);
      throw std::runtime_error("the function broke at " + std::to_string(y.numel()));
    };
    const auto call = [&] {
      return nested ? ga::checkpoint([&](const at::Tensor& t) { return ga::checkpoint(fails, t.exp()); }, x)
                    : ga::checkpoint(fails, x);
    };
    const Modes before;
    REQUIRE_ERROR("the function broke at 4", call());
    CHECK(Modes() == before);
    const auto y = x.exp();
    CHECK(torch::autograd::Engine::get_default_engine().get_default_saved_variable_hooks() == nullptr);
    y.sum().backward();
    CHECK(same_bits(take_gradients({x})[0], x.exp()));
  }
}

TEST_CASE("checkpoint: an exception in the second run leaves everything unchanged, and another backward succeeds") {
  const auto w = leaf(randoms({4, 4})), x = leaf(randoms({4, 4}));
  bool fails = false;
  const auto function = [&](const at::Tensor& t) {
    const auto y = at::dropout(t.mm(w).tanh(), 0.5, true);
    if (fails) throw std::runtime_error("the second run broke");
    return y.mm(w).exp();
  };
  const auto nested = [&](const at::Tensor& t) { return ga::checkpoint(function, t.sin()).cos(); };
  const auto check = [&](auto&& part) {
    fails = false;
    torch::manual_seed(5);
    const auto plain = part(x);
    plain.sum().backward();
    const auto expected = take_gradients({w, x});
    torch::manual_seed(5);
    ga::Autocast autocast(at::kCPU, at::kBFloat16, /*enabled=*/false);
    const auto y = ga::checkpoint(part, x);
    const Modes before;
    const auto random = random_state();
    fails = true;
    REQUIRE_ERROR("the second run broke", y.sum().backward({}, /*retain_graph=*/true));
    CHECK(Modes() == before);
    CHECK(same_bits(random_state(), random));
    take_gradients({w, x});
    fails = false;
    y.sum().backward();
    CHECK(same_bits(take_gradients({w, x}), expected));
    CHECK(same_bits(random_state(), random));
  };
  check(function);
  check(nested);
}

TEST_CASE("checkpoint: modes of the thread after forward and after backward") {
  const auto w = leaf(randoms({4, 4}, at::kFloat)), x = leaf(randoms({4, 4}, at::kFloat));
  const auto function = [&](const at::Tensor& t) { return at::dropout(t.mm(w).tanh(), 0.5, true).exp(); };
  const Modes outside;
  at::Tensor y;
  {
    ga::Autocast autocast(at::kCPU, at::kHalf, true, false);
    const Modes inside;
    y = ga::checkpoint(function, x);
    CHECK(Modes() == inside);
  }
  CHECK(Modes() == outside);
  at::NoGradGuard no_grad;
  const Modes before;
  const auto random = random_state();
  y.sum().set_requires_grad(false);
  torch::autograd::backward({y}, {torch::ones_like(y)});
  CHECK(Modes() == before);
  CHECK(same_bits(random_state(), random));
}

TEST_CASE("checkpoint: random numbers drawn between forward and backward are not drawn again") {
  const auto x = leaf(randoms({4}));
  torch::manual_seed(5);
  const auto y = ga::checkpoint([](const at::Tensor& t) { return at::dropout(t, 0.5, true).exp(); }, x);
  torch::randn({3}, at::kDouble);  // keeps half of a pair
  const auto random = random_state();
  y.sum().backward();
  CHECK(same_bits(random_state(), random));
  // Draws a normal number whose other half was drawn before.
  torch::manual_seed(5);
  torch::randn({1}, at::kDouble);
  const auto noisy = [](const at::Tensor& t) {
    return (t * torch::randn({1}, at::kDouble)).exp() * torch::randn({1}, at::kDouble);
  };
  take_gradients({x});
  const auto z = ga::checkpoint(noisy, x);
  torch::manual_seed(9);
  z.sum().backward();
  const auto ours = take_gradients({x});
  torch::manual_seed(5);
  torch::randn({1}, at::kDouble);
  noisy(x).sum().backward();
  CHECK(same_bits(take_gradients({x}), ours));
}

TEST_CASE("checkpoint: a part that draws no random numbers does not touch the generators") {
  const auto x = leaf(randoms({4}));
  int runs = 0;
  const auto y = ga::checkpoint(
      [&](const at::Tensor& t) {
        auto z = t.exp();
        if (++runs == 2) std::thread([] { torch::rand({5}); }).join();
        return z.sin();
      },
      x);
  torch::manual_seed(5);
  y.sum().backward();
  const auto after = random_state();
  torch::manual_seed(5);
  torch::rand({5});
  CHECK(runs == 2);
  CHECK(same_bits(random_state(), after));  // not restored
}

TEST_CASE("checkpoint: all of a random generator's state is restored") {
  const auto generator = at::detail::getDefaultCPUGenerator();
  auto& cpu = *generator.get<at::CPUGeneratorImpl>();
  torch::manual_seed(5);
  cpu.set_next_float_normal_sample(0.25F);
  cpu.set_next_double_normal_sample(0.75);
  const inner::GeneratorStates before;
  const auto state = random_state();
  torch::randn({100}, at::kDouble);
  cpu.set_next_float_normal_sample({});
  cpu.set_next_double_normal_sample({});
  CHECK_FALSE(inner::GeneratorStates() == before);
  {
    const inner::RandomScope scope(before);
    CHECK(inner::GeneratorStates() == before);
    CHECK(same_bits(random_state(), state));
    CHECK(cpu.next_float_normal_sample() == 0.25F);
    CHECK(cpu.next_double_normal_sample() == 0.75);
  }
  CHECK_FALSE(cpu.next_float_normal_sample());
  for (int i = 0; i < 2; ++i) {  // with and without half of a pair
    before.restore();
    if (i == 0) cpu.set_next_float_normal_sample({});
    if (i == 1) cpu.set_next_double_normal_sample({});
    CHECK_FALSE(inner::GeneratorStates() == before);
  }
}

TEST_CASE("checkpoint: running statistics of a module change once, also in a lambda") {
  struct NormsImpl : nn::Module {
    NormsImpl() {
      register_module("batch", batch);
      register_module("again", batch);  // one layer under two names
      register_module("instance", instance);
      register_module("frozen", frozen);
      frozen->eval();
    }
    at::Tensor forward(const at::Tensor& x) {
      return batch->forward(instance->forward(batch->forward(frozen->forward(x))).tanh());
    }
    nn::BatchNorm1d batch{nn::BatchNormOptions(3).momentum(0.3)}, frozen{3};
    nn::InstanceNorm1d instance{nn::InstanceNorm1dOptions(3).track_running_stats(true)};
  };
  const auto x = leaf(randoms({4, 3, 5}, at::kFloat));
  const auto run = [&](int kind, int steps = 2) {
    auto net = std::make_shared<NormsImpl>();
    std::vector<at::Tensor*> handles{&net->batch->running_mean, &net->batch->running_var,
                                     &net->batch->num_batches_tracked, &net->instance->running_mean};
    std::vector<at::Tensor> tensors;
    for (auto* handle : handles) tensors.push_back(*handle);
    for (int i = 0; i < steps; ++i) {
      at::Tensor y;
      if (kind == 0) y = net->forward(x);
      if (kind == 1) y = ga::checkpoint(net, x);
      if (kind == 2) y = ga::checkpoint([net](const at::Tensor& t) { return ga::checkpoint(net, t).exp(); }, x);
      if (kind == 3) y = ga::checkpoint([net](const at::Tensor& t) { return net->forward(t); }, x);
      uneven_sum(y).backward({}, /*retain_graph=*/true);
      if (kind > 0) uneven_sum(y).backward();
    }
    for (std::size_t i = 0; i < handles.size(); ++i) CHECK(handles[i]->is_same(tensors[i]));
    take_gradients({x});
    return std::pair(copies(net->buffers()), net->batch->num_batches_tracked.item<std::int64_t>());
  };
  const auto plain = run(0);
  CHECK(plain.second == 4);
  CHECK(same_bits(run(1).first, plain.first));
  CHECK(same_bits(run(2).first, plain.first));
  CHECK(same_bits(run(3).first, plain.first));
}

TEST_CASE("checkpoint: running statistics stay the model's if the second run fails") {
  nn::BatchNorm1d norm(3);
  struct FailsImpl : nn::Module {
    explicit FailsImpl(nn::BatchNorm1d n) : norm(register_module("norm", n)) {}
    at::Tensor forward(const at::Tensor& x) {
      const auto y = norm->forward(x);
      TORCH_CHECK(++runs < 2, "the second run broke");
      return y.exp();
    }
    nn::BatchNorm1d norm;
    int runs = 0;
  };
  const auto mean = norm->running_mean;
  const auto y = ga::checkpoint(std::make_shared<FailsImpl>(norm), leaf(randoms({4, 3}, at::kFloat)));
  const auto before = mean.clone();
  REQUIRE_ERROR("the second run broke", y.sum().backward());
  CHECK(norm->running_mean.is_same(mean));
  CHECK(same_bits(mean, before));
}

TEST_CASE("checkpoint: the function must not change its inputs in place") {
  const auto x = leaf(randoms({4}));
  const char* message = "checkpoint: the function must not change its inputs in place, but changes tensor 1 of them";
  const auto changes = [](const at::Tensor& a, at::Tensor b) { return a * b.add_(1); };
  REQUIRE_ERROR(message, ga::checkpoint(changes, x, torch::ones({4}, at::kDouble)));
  REQUIRE_ERROR(message, ga::checkpoint([](const at::Tensor& a, std::vector<at::Tensor> b) { return a * b[0].relu_(); },
                                        x, std::vector{x * 2}));
  REQUIRE_ERROR(message, ga::checkpoint(
                             [](const at::Tensor& a, at::Tensor b) {
                               return a * b.view({2, 2}).mul_(2).sum();
                             },
                             x, torch::ones({4}, at::kDouble)));
  const auto copies_first = [&](const at::Tensor& a, at::Tensor b) { return changes(a, b.clone()); };
  CHECK(difference(outcome([&] { return ga::checkpoint(copies_first, x, x * 2); }, {x}),
                   outcome([&] { return copies_first(x, x * 2); }, {x})) == "");
  const Modes before;
  REQUIRE_ERROR(message, ga::checkpoint(changes, x, torch::ones({4}, at::kDouble)));
  CHECK(Modes() == before);
  const auto token = std::make_shared<int>(0);  // the graph before the input is destroyed
  const auto holds = [token](const at::Tensor& a, at::Tensor b) { return a * b.relu_(); };
  const auto owners = token.use_count();
  REQUIRE_ERROR(message, ga::checkpoint(holds, x, x * 2));
  CHECK(token.use_count() == owners);
}

TEST_CASE("checkpoint: changes in place between forward and backward are errors, or have no effect") {
  using Function = std::function<at::Tensor(const at::Tensor&, const at::Tensor&)>;
  const std::vector<std::pair<std::string, Function>> functions{
      {"x * w", [](auto& x, auto& w) { return x * w; }},
      {"x + w", [](auto& x, auto& w) { return x + w; }},
      {"tanh(x)", [](auto& x, auto&) { return x.tanh(); }},
      {"tanh(x + w)", [](auto& x, auto& w) { return (x + w).tanh(); }},
      {"exp(x) * w", [](auto& x, auto& w) { return x.exp() * w; }},
      {"relu in place", [](auto& x, auto& w) { return (x + w).relu_(); }},
      {"a view", [](auto& x, auto& w) { return (x * w).t(); }},
      {"the input", [](auto& x, auto&) { return x; }},
      {"exp(x) + x", [](auto& x, auto&) { return x.exp() + x; }},
      {"sin(exp(x))", [](auto& x, auto&) { return x.exp().sin(); }},
      {"a change of what was saved",
       [](auto& x, auto& w) {
         auto y = x * w;
         const auto z = y.exp() * y;
         y.add_(1);
         return z;
       }},
      {"a change before it is saved",
       [](auto& x, auto& w) {
         auto y = x * w;
         y.add_(1);
         return y.exp() * y;
       }},
  };
  using Change = std::function<void(at::Tensor&, at::Tensor&, at::Tensor&)>;
  const std::vector<std::pair<std::string, Change>> changes{
      {"nothing", [](auto&, auto&, auto&) {}},
      {"x", [](auto& x, auto&, auto&) { x.detach().mul_(3); }},
      {"w", [](auto&, auto& w, auto&) { w.detach().mul_(3); }},
      {"the output", [](auto&, auto&, auto& y) { y.detach().mul_(3); }},
      {"the output, for real", [](auto&, auto&, auto& y) { y.mul_(3); }},
      {"x, by its data, which nobody sees", [](auto& x, auto&, auto&) { x = x.detach().clone(); }},
  };
  int errors = 0, stricter = 0, equal = 0;
  for (auto& [name, function] : functions)
    for (auto& [changed, change] : changes) {
      INFO(name << ", then a change of " << changed);
      std::vector<at::Tensor> gradients[2];
      std::string error[2];
      for (bool ours : {false, true}) {
        auto leaf_x = leaf(randoms({2, 2})), w = leaf(randoms({2, 2}, at::kDouble, 4));
        auto x = leaf_x * 1.5;
        auto y = ours ? ga::checkpoint(function, x, w) : function(x, w);
        change(x, w, y);
        error[ours] = testing::error_of([&] { uneven_sum(y).backward(); });
        gradients[ours] = take_gradients({leaf_x, w});
      }
      INFO("plain: '" << error[0] << "', ours: '" << error[1] << "'");
      if (!error[0].empty()) {
        ++errors;
        CHECK(!error[1].empty());
      } else if (error[1].empty()) {
        ++equal;
        CHECK(same_bits(gradients[1], gradients[0]));
      } else {
        ++stricter;  // recomputation may need more tensors than gradients do
        CHECK((changed == "x" || changed == "w"));
      }
      if (!error[1].empty()) CHECK((contains(error[1], "in place") || contains(error[1], "inplace")));
    }
  CHECK(errors > 10);
  CHECK(equal > 20);
  CHECK(stricter > 0);
}

TEST_CASE("checkpoint: a parameter that changes in place before backward") {
  const auto error = [](bool input_with_gradient, std::optional<ga::CheckpointOptions> options) {
    torch::manual_seed(1);
    nn::Sequential net(nn::Linear(4, 4), nn::Sigmoid());
    const auto x = randoms({2, 4}, at::kFloat).set_requires_grad(input_with_gradient);
    const auto y = options ? ga::checkpoint(*options, net, x) : net->forward(x);
    net->parameters()[0].detach().mul_(3);
    return testing::error_of([&] { uneven_sum(y).backward(); });
  };
  CHECK(contains(error(true, {}), "modified by an inplace operation"));
  CHECK(contains(error(true, ga::CheckpointOptions()), "must not change in place after it was saved"));
  // No operation saves a first layer's weight, which recomputation needs nevertheless.
  CHECK(error(false, {}) == "");
  CHECK(contains(error(false, {{.check_content = true}}), "at aten::sigmoid: the contents of a saved tensor"));
}

TEST_CASE("checkpoint: eight blocks take less memory than without") {
  const auto peak = [](bool checkpointed) {
    const auto parts = blocks(8);
    const auto x = leaf(randoms({256, 64}, at::kFloat));
    ga::MemoryMeter meter;
    uneven_sum(through(parts, x, checkpointed)).backward();
    return meter.peak_bytes();
  };
  CHECK(peak(true) < 0.6 * peak(false));
}

TEST_CASE("checkpoint: between forward and backward a step holds only the inputs of the blocks") {
  const auto parts = blocks(8);
  const auto x = leaf(randoms({256, 64}, at::kFloat));
  ga::MemoryMeter meter;
  const auto y = through(parts, x, true);
  CHECK(meter.live_bytes() == 8 * 256 * 64 * 4);  // seven inputs and the output; x was there before
}

TEST_CASE("checkpoint: memory decreases after each stage of backward, also with retain_graph") {
  const auto stages = [](bool checkpointed, bool retain_graph) {
    const auto parts = blocks(6);
    auto x = leaf(randoms({256, 64}, at::kFloat));
    for (auto& parameter : parameters_of(parts)) parameter.mutable_grad() = torch::zeros_like(parameter);
    x.mutable_grad() = torch::zeros_like(x);
    std::vector<std::int64_t> live;
    ga::MemoryMeter meter;
    at::Tensor y = x;
    for (auto part : parts) {
      y = checkpointed ? ga::checkpoint(part, y) : part->forward(y);
      y.register_hook([&](const at::Tensor&) { live.push_back(meter.live_bytes()); });
    }
    auto loss = y.sum();
    y.reset();
    loss.backward({}, retain_graph);
    live.push_back(meter.live_bytes());
    return live;
  };
  const auto rises = [](const std::vector<std::int64_t>& live) {
    return std::adjacent_find(live.begin(), live.end(), std::less<>()) != live.end();
  };
  constexpr std::int64_t activations = 256 * 64 * 4;
  const auto plain = stages(false, false), ours = stages(true, false);
  REQUIRE(plain.size() == 7);
  REQUIRE_FALSE(rises(plain));
  CHECK_FALSE(rises(ours));
  CHECK(ours.front() < plain.front() / 6);
  CHECK(ours.back() < activations);
  // The inputs stay, and recomputed tensors are freed.
  for (auto& live : stages(true, true)) CHECK(live <= ours.front() + activations);
  CHECK(stages(false, true).back() > 5 * stages(true, true).back());
}

namespace {
// 2 x, which saves a tensor that its backward does not use.
struct SavesForNothing : torch::autograd::Function<SavesForNothing> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, bool saves) {
    if (saves) context->save_for_backward({x.exp()});
    return 2 * x;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 torch::autograd::variable_list gradients) {
    return {2 * gradients[0], at::Tensor()};
  }
};
}  // namespace

TEST_CASE("checkpoint: an unused saved tensor is freed with its operation") {
  const auto held_after = [](bool saves) {
    const auto x = leaf(randoms({1000}));
    std::int64_t live = -1;
    ga::MemoryMeter meter;
    const auto part = [saves](const at::Tensor& t) { return SavesForNothing::apply(t.sin(), saves).tanh(); };
    auto y = ga::checkpoint(part, x);
    x.register_hook([&](const at::Tensor&) { live = meter.live_bytes(); });
    y.sum().backward();
    return live;
  };
  CHECK(held_after(false) > 0);
  CHECK(held_after(true) == held_after(false));
}

TEST_CASE("checkpoint: a thousand steps leave nothing behind") {
  const auto parts = blocks(2);
  const auto parameters = parameters_of(parts);
  const auto x = leaf(randoms({8, 64}, at::kFloat));
  const auto token = std::make_shared<int>(0);
  const auto part = [token, net = parts[0]](const at::Tensor& t) mutable {
    return at::dropout(net->forward(t), 0.1, true);
  };
  const auto step = [&](int i) {
    const auto y = ga::checkpoint(parts[1], ga::checkpoint(part, x));
    if (i % 5 == 0) return;                                                                      // no backward at all
    if (i % 5 == 1) return (void)torch::autograd::grad({y.sum()}, {parts[1]->parameters()[0]});  // a part of backward
    y.sum().backward({}, /*retain_graph=*/i % 5 == 2);
    if (i % 5 == 2) y.sum().backward();
  };
  for (int i = 0; i < 10; ++i) step(i);
  take_gradients(parameters);
  take_gradients({x});
  const auto owners = token.use_count();
  ga::MemoryMeter meter;
  for (int i = 0; i < 1000; ++i) {
    step(i);
    take_gradients(parameters);
    take_gradients({x});
    REQUIRE(meter.live_bytes() == 0);
    REQUIRE(token.use_count() == owners);
  }
}

TEST_CASE("checkpoint: a backward that needs a part of the checkpoint leaves nothing behind") {
  const auto net = block();
  const auto w = leaf(randoms({64, 64}, at::kFloat)), x = leaf(randoms({256, 64}, at::kFloat));
  const auto two = [owner = net.ptr(), w](const at::Tensor& t) {
    auto& net = *owner;
    const auto h = net.forward(t);
    return std::pair(h.mm(w).tanh(), net.forward(t.exp()).exp());
  };
  ga::MemoryMeter meter;
  const auto [a, b] = ga::checkpoint(two, x);
  const auto held = meter.live_bytes();
  {
    const auto gradient = torch::autograd::grad({a.sum()}, {w}, {}, /*retain_graph=*/true)[0];
    CHECK(meter.live_bytes() == held + static_cast<std::int64_t>(gradient.nbytes()));
  }
  CHECK(meter.live_bytes() == held);
  const auto [first, second] = two(x);
  const auto expected = torch::autograd::grad({uneven_sum(first) + uneven_sum(second)}, {w, x});
  CHECK(same_bits(torch::autograd::grad({uneven_sum(a) + uneven_sum(b)}, {w, x}), expected));
}

TEST_CASE("checkpoint: a backward that fails elsewhere leaves nothing behind once its graph is gone") {
  const auto net = block();
  const auto x = leaf(randoms({256, 64}, at::kFloat));
  bool fails = true;
  ga::MemoryMeter meter;
  {
    auto y = ga::checkpoint(net, x);
    x.register_hook([&](const at::Tensor&) { TORCH_CHECK(!std::exchange(fails, false), "a hook broke"); });
    REQUIRE_ERROR("a hook broke", y.sum().backward({}, /*retain_graph=*/true));
    y.sum().backward();
  }
  take_gradients(net->parameters());
  take_gradients({x});
  CHECK(meter.live_bytes() == 0);
}

TEST_CASE("checkpoint: failed and repeated backward passes leave nothing behind") {
  const auto x = leaf(randoms({1000}));
  bool fails = true;
  x.register_hook([&](const at::Tensor&) { TORCH_CHECK(!fails, "a hook broke"); });
  ga::MemoryMeter meter;
  auto y = ga::checkpoint([](const at::Tensor& t) { return t.exp().sin().tanh(); }, x);
  // When the pass fails, it has recomputed all tensors of this checkpoint, and used some.
  y = y + ga::checkpoint([](const at::Tensor& t) { return t.exp() + t.sin(); }, x);
  const auto held = meter.live_bytes();
  for (int i = 0; i < 3; ++i) {
    REQUIRE_ERROR("a hook broke", y.sum().backward({}, /*retain_graph=*/true));
    CHECK(meter.live_bytes() == held);
  }
  fails = false;
  y.sum().backward();
  const auto ours = take_gradients({x});
  (x.exp().sin().tanh() + x.exp() + x.sin()).sum().backward();
  CHECK(at::allclose(ours[0], take_gradients({x})[0]));
}

TEST_CASE("checkpoint: threads with separate models do not affect each other") {
  constexpr int count = 4;
  std::array<std::vector<nn::Sequential>, count> models;  // made first: one thread at a time may draw
  for (int t = 0; t < count; ++t) models[t] = blocks(3, t + 1);
  const auto train = [&](int t, bool checkpointed) {
    const auto x = leaf(torch::arange(8 * 64, at::kFloat).mul(t + 1).sin().reshape({8, 64}));
    const auto call = [&](const at::Tensor& v) { return through(models[t], v, checkpointed); };
    std::vector<at::Tensor> gradients;
    for (int i = 0; i < 30; ++i) {
      uneven_sum(checkpointed ? ga::checkpoint(call, x) : call(x)).backward();
      for (auto& gradient : take_gradients(parameters_of(models[t]))) gradients.push_back(gradient);
    }
    return gradients;
  };
  std::array<std::vector<at::Tensor>, count> expected, results;
  std::array<std::string, count> errors;
  for (int t = 0; t < count; ++t) expected[t] = train(t, false);
  std::vector<std::thread> threads;
  for (int t = 0; t < count; ++t)
    threads.emplace_back([&, t] { errors[t] = testing::error_of([&] { results[t] = train(t, true); }); });
  for (auto& thread : threads) thread.join();
  for (int t = 0; t < count; ++t) {
    CHECK(errors[t] == "");
    CHECK(same_bits(results[t], expected[t]));
  }
}

TEST_CASE("checkpoint: two threads run backward of one model, and of one graph") {
  const auto parts = blocks(3);
  const auto parameters = parameters_of(parts);
  const auto x = leaf(randoms({8, 64}, at::kFloat));
  const auto gradients_of = [&](const at::Tensor& y, bool retain) {
    return torch::autograd::grad({uneven_sum(y)}, parameters, {}, retain);
  };
  const auto expected = gradients_of(through(parts, x, false), false);
  const auto nested = [&](const at::Tensor& t) { return through(parts, t, true); };
  for (int i = 0; i < 20; ++i) {
    const auto a = ga::checkpoint(nested, x), b = ga::checkpoint(nested, x);
    std::vector<at::Tensor> results[4];
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; ++t)
      threads.emplace_back([&, t] { results[t] = gradients_of(t < 2 ? a : b, /*retain=*/true); });
    for (auto& thread : threads) thread.join();
    for (auto& result : results) CHECK(same_bits(result, expected));
  }
}

TEST_CASE("checkpoint: backward on another thread than forward") {
  const auto parts = blocks(2);
  const auto x = leaf(randoms({8, 64}, at::kFloat));
  const auto run = [&](bool checkpointed) {
    torch::manual_seed(5);
    ga::Autocast autocast(at::kCPU, at::kBFloat16);
    const auto y = at::dropout(through(parts, x, checkpointed), 0.5, true);
    std::thread([&] { uneven_sum(y).backward(); }).join();
    return take_gradients(parameters_of(parts));
  };
  CHECK(same_bits(run(true), run(false)));
}

TEST_CASE("checkpoint: random numbers and memory of a CUDA device", "[cuda]") {
  if (!torch::cuda::is_available()) SKIP("needs a CUDA device");
  const auto run = [&](bool checkpointed) {
    torch::manual_seed(1);
    nn::Sequential net(nn::Linear(64, 64), nn::Dropout(0.5), nn::GELU(), nn::Linear(64, 64), nn::Dropout(0.3));
    net->to(at::kCUDA);
    const auto x = torch::arange(256 * 64, at::TensorOptions(at::kCUDA).dtype(at::kFloat))
                       .sin()
                       .reshape({256, 64})
                       .set_requires_grad(true);
    torch::manual_seed(2);
    const auto y = checkpointed ? ga::checkpoint(net, x) : net->forward(x);
    torch::rand({5}, at::kCUDA);
    y.sin().sum().backward();
    auto all = take_gradients(net->parameters());
    all.push_back(x.grad());
    all.push_back(torch::rand({5}, at::kCUDA));
    for (auto& each : all) each = each.cpu();
    return all;
  };
  CHECK(same_bits(run(true), run(false)));
}
