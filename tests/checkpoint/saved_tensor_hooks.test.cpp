// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/checkpoint.hpp>
#include <gradaccum/memory_meter.hpp>
#include <gradaccum/saved_tensor_hooks.hpp>

#include "support/leaves.hpp"
#include "support/outcome.hpp"

#include <torch/csrc/autograd/engine.h>

#include <array>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

namespace ga = gradaccum;
namespace nn = torch::nn;
namespace inner = gradaccum::detail;
using namespace testing;

namespace {

at::Tensor randoms(at::IntArrayRef shape, at::ScalarType dtype = at::kDouble, int seed = 3) {
  torch::manual_seed(seed);
  return torch::randn(shape, dtype);
}

const auto identity = [](const at::Tensor& t) { return t; };

// Stores tensors in 16 bits, except parameters.
const auto to_half = [](const at::Tensor& t) {
  const bool narrow = t.scalar_type() == torch::kFloat && !t.requires_grad();
  return std::pair(t.scalar_type(), narrow ? t.to(torch::kBFloat16) : t);
};
const auto from_half = [](const auto& packed) { return packed.second.to(packed.first); };

nn::Sequential net(int seed = 1) {
  torch::manual_seed(seed);
  return nn::Sequential(nn::Linear(6, 6), nn::Tanh(), nn::Dropout(0.3), nn::BatchNorm1d(6), nn::Linear(6, 6),
                        nn::GELU(), nn::LayerNorm(nn::LayerNormOptions({6})), nn::Linear(6, 6),
                        nn::ReLU(nn::ReLUOptions(true)));
}

// Runs a step whose forward pass is in the scope that `make_scope()` returns.
template <class MakeScope>
Outcome step_within(MakeScope&& make_scope, bool checkpointed = false) {
  auto model = net();
  const auto x = leaf(randoms({5, 6}, at::kFloat));
  auto leaves = model->parameters();
  leaves.push_back(x);
  const auto forward = [&] {
    [[maybe_unused]] const auto scope = make_scope();
    return checkpointed ? ga::checkpoint(model, x) : model->forward(x);
  };
  return outcome(forward, leaves, model->buffers());
}

const auto no_scope = [] { return 0; };

}  // namespace

TEST_CASE("SavedTensorHooks: hooks that return the same tensors do not change results") {
  const auto expected = step_within(no_scope);
  CHECK(difference(step_within([] { return std::optional<int>(); }), expected) == "");
  const auto within = [](auto pack, auto unpack) {
    auto model = net();
    const auto x = leaf(randoms({5, 6}, at::kFloat));
    auto leaves = model->parameters();
    leaves.push_back(x);
    return outcome(
        [&] {
          ga::SavedTensorHooks hooks(pack, unpack);
          return model->forward(x);
        },
        leaves, model->buffers());
  };
  CHECK(difference(within(identity, identity), expected) == "");
  CHECK(difference(within([](const at::Tensor& t) { return t.clone(); }, identity), expected) == "");
  CHECK(difference(within([](const at::Tensor& t) { return std::pair(t.scalar_type(), t.to(at::kDouble)); }, from_half),
                   expected) == "");
  CHECK(difference(within(to_half, from_half), expected) == "gradients ");
}

TEST_CASE("SavedTensorHooks: packs what operations save, unpacks what backward needs") {
  const auto x = leaf(randoms({3})), w = leaf(randoms({3}));
  int packed = 0, unpacked = 0;
  std::vector<bool> parameters, leaves;
  const auto pack = [&](const at::Tensor& t) {
    ++packed;
    CHECK_FALSE(at::GradMode::is_enabled());
    parameters.push_back(t.requires_grad());
    leaves.push_back(t.is_leaf());
    return t;
  };
  const auto unpack = [&](const at::Tensor& t) {
    ++unpacked;
    return t;
  };
  at::Tensor y, z;
  {
    ga::SavedTensorHooks hooks(pack, unpack);
    y = (x * w).exp();       // x, w, the result of exp
    z = (y + 1) * 2;         // nothing: wrapped numbers are not packed
    (x.detach() * 3).sin();  // nothing to save for
    at::NoGradGuard no_grad;
    x* w;
  }
  const auto after = y.sin();  // outside of the scope
  CHECK(packed == 3);
  CHECK(parameters == std::vector{true, true, false});
  CHECK(leaves == std::vector{true, true, true});  // the result is detached
  CHECK(unpacked == 0);
  (after.sum() + z.sum()).backward({}, /*retain_graph=*/true);
  CHECK(unpacked == 3);
  (after.sum() + z.sum()).backward();
  CHECK(unpacked == 6);
  CHECK(packed == 3);
  REQUIRE_ERROR("a second time", z.sum().backward());
  const auto ours = take_gradients({x, w});
  const auto plain = (x * w).exp();
  for (int i = 0; i < 2; ++i) (plain.sin().sum() + (2 * (plain + 1)).sum()).backward({}, true);
  const auto expected = take_gradients({x, w});
  CHECK(at::allclose(ours[0], expected[0]));
  CHECK(at::allclose(ours[1], expected[1]));
}

TEST_CASE("SavedTensorHooks: 16-bit storage changes gradients a little, while the scope lives") {
  const auto step = [](bool narrow) {
    torch::manual_seed(1);
    nn::Sequential model(nn::Linear(6, 6), nn::Tanh(), nn::Linear(6, 6));
    const auto x = leaf(randoms({5, 6}, at::kFloat));
    auto leaves = model->parameters();
    leaves.push_back(x);
    return outcome(
        [&] {
          if (!narrow) return model->forward(x);
          ga::SavedTensorHooks hooks(to_half, from_half);
          return model->forward(x);
        },
        leaves);
  };
  const auto exact = step(false), narrow = step(true);
  CHECK(difference(narrow, exact) == "gradients ");
  for (std::size_t i = 0; i < exact.gradients.size(); ++i)
    CHECK(at::allclose(narrow.gradients[i], exact.gradients[i], 0.05, 0.05));
  CHECK(difference(step(false), exact) == "");
}

TEST_CASE("SavedTensorHooks: only the innermost of nested scopes is called") {
  const auto x = leaf(randoms({3}));
  std::string asked;
  const auto scope = [&](char name) {
    return [&, name](const at::Tensor& t) {
      asked += name;
      return t;
    };
  };
  {
    ga::SavedTensorHooks outer(scope('a'), scope('A'));
    auto y = x.exp();
    {
      ga::SavedTensorHooks within(scope('b'), scope('B'));
      y = y.exp();
      {
        ga::SavedTensorHooks innermost(scope('c'), scope('C'));
        y = y.exp();
      }
      y = y.exp();
    }
    y = y.exp();
    CHECK(asked == "abcba");
    y.sum().backward();
  }
  CHECK(asked == "abcbaABCBA");
  x.exp().sum().backward();
  CHECK(asked.size() == 10);
  CHECK(inner::SavingScope::innermost() == nullptr);
}

TEST_CASE("SavedTensorHooks: scopes that end in another order") {
  const auto x = leaf(randoms({3}));
  std::string asked;
  const auto scope = [&](char name) {
    return [&, name](const at::Tensor& t) {
      asked += name;
      return t;
    };
  };
  using Scope = ga::SavedTensorHooks<decltype(scope('a')), decltype(scope('a'))>;
  std::optional<Scope> first, second;
  first.emplace(scope('a'), scope('a'));
  second.emplace(scope('b'), scope('b'));
  first.reset();
  x.exp();
  CHECK(asked == "b");
  second.reset();
  x.exp();
  CHECK(asked == "b");
}

TEST_CASE("SavedTensorHooks: exceptions of pack and unpack are passed on, and leave nothing behind") {
  const auto x = leaf(randoms({3}));
  bool fails = true;
  const auto broken = [&](const at::Tensor& t) {
    if (fails) throw std::runtime_error("a hook broke");
    return t;
  };
  REQUIRE_ERROR("a hook broke", [&] {
    ga::SavedTensorHooks hooks(broken, identity);
    return x.exp();
  }());
  CHECK(inner::SavingScope::innermost() == nullptr);
  CHECK(at::GradMode::is_enabled());
  fails = false;
  const auto y = [&] {
    ga::SavedTensorHooks hooks(broken, broken);
    return x.exp();
  }();
  fails = true;
  REQUIRE_ERROR("a hook broke", y.sum().backward());
  fails = false;
  y.sum().backward();
  CHECK(same_bits(take_gradients({x})[0], x.exp()));
}

TEST_CASE("SavedTensorHooks: pack must not change the tensor, which LibTorch detects") {
  const auto x = leaf(randoms({3}));
  ga::SavedTensorHooks hooks([](const at::Tensor& t) { return t.mul_(2); }, identity);
  REQUIRE_ERROR("modifying", (x * 1.5).exp());
}

TEST_CASE("SavedTensorHooks: a scope belongs to its thread") {
  int packed = 0;
  ga::SavedTensorHooks hooks(
      [&](const at::Tensor& t) {
        ++packed;
        return t;
      },
      identity);
  const auto x = torch::ones({3}).set_requires_grad(true);
  std::thread([x] { x.exp().sum().backward(); }).join();
  CHECK(x.grad().defined());
  CHECK(packed == 0);
  x.exp();
  CHECK(packed == 1);
}

TEST_CASE("SavedTensorHooks: a tensor that was changed in place after it was saved") {
  const std::string message =
      "SavedTensorHooks: a tensor that backward needs (Double [3] on cpu) must not change in place after it was saved";
  const auto w = leaf(randoms({3}));
  const auto check = [&](auto pack) {
    const auto run = [&](auto&& change) {
      auto x = leaf(randoms({3})) * 2;
      auto y = [&] {
        ga::SavedTensorHooks hooks(pack, identity);
        return (x * w).exp();
      }();
      change(x, y);
      return testing::error_of([&] { y.sum().backward(); });
    };
    CHECK(run([](at::Tensor&, at::Tensor&) {}) == "");
    CHECK(contains(run([](at::Tensor& x, at::Tensor&) { x.detach().mul_(2); }), message));
    CHECK(contains(run([](at::Tensor&, at::Tensor& y) { y.mul_(2); }), message));
    CHECK(contains(run([](at::Tensor&, at::Tensor& y) { y.detach()[0] = 2; }), message));
    CHECK(contains(run([&](at::Tensor&, at::Tensor&) { w.detach().add_(1); }), message));
  };
  check(identity);
  check([](const at::Tensor& t) { return t.clone(); });
}

TEST_CASE("SavedTensorHooks: unpack must return the packed tensor") {
  const auto x = leaf(randoms({2, 3}));
  const auto error = [&](std::function<at::Tensor(const at::Tensor&)> unpack) {
    const auto y = [&] {
      ga::SavedTensorHooks hooks(identity, unpack);
      return x.exp();
    }();
    return testing::error_of([&] { y.sum().backward(); });
  };
  const std::string message = "SavedTensorHooks: unpack must return what was packed, Double [2, 3] on cpu, got ";
  CHECK(error(identity) == "");
  CHECK(error([](const at::Tensor& t) { return t.t().contiguous().t(); }) == "");
  CHECK(error([](const at::Tensor& t) { return t.to(at::kFloat); }) == message + "Float [2, 3] on cpu");
  CHECK(error([](const at::Tensor& t) { return t.view({3, 2}); }) == message + "Double [3, 2] on cpu");
  CHECK(error([](const at::Tensor& t) { return t.to(at::kMeta); }) == message + "Double [2, 3] on meta");
  CHECK(error([](const at::Tensor&) { return at::Tensor(); }) == message + "an undefined tensor");
}

TEST_CASE("SavedTensorHooks: second derivatives") {
  const auto x = leaf(randoms({3})), w = leaf(randoms({3}));
  int unpacked = 0;
  const auto twice = [&](bool hooked) {
    const auto y = [&] {
      if (!hooked) return (x * w).exp() * x;
      ga::SavedTensorHooks hooks([](const at::Tensor& t) { return t.requires_grad() ? t : t.clone(); },
                                 [&](const at::Tensor& t) {
                                   ++unpacked;
                                   return t;
                                 });
      return (x * w).exp() * x;
    }();
    auto first = torch::autograd::grad({uneven_sum(y)}, {x, w}, {}, true, true);
    auto second = torch::autograd::grad({uneven_sum(first[0]) + uneven_sum(first[1])}, {x, w});
    return std::vector{first[0], first[1], second[0], second[1]};
  };
  CHECK(same_bits(twice(true), twice(false)));
  CHECK(unpacked > 5);
}

TEST_CASE("SavedTensorHooks: packed values and hooks are destroyed with the graph") {
  const auto x = leaf(randoms({1000}));
  const auto token = std::make_shared<int>(0);
  ga::MemoryMeter meter;
  const auto graph = [&] {
    ga::SavedTensorHooks hooks([token](const at::Tensor& t) { return t.to(at::kBFloat16); },
                               [](const at::Tensor& t) { return t.to(at::kDouble); });
    return x.exp().sin().sum();
  };
  {
    const auto y = graph();
    CHECK(meter.live_bytes() == 2 * 2 * 1000 + 8);  // instead of 8 bytes each
    CHECK(token.use_count() == 2);
    y.backward();
    take_gradients({x});
    CHECK(meter.live_bytes() == 8);
    CHECK(token.use_count() == 1);
  }
  graph();
  CHECK(meter.live_bytes() == 0);
  CHECK(token.use_count() == 1);
  const auto kept = graph();
  kept.backward({}, /*retain_graph=*/true);
  take_gradients({x});
  CHECK(meter.live_bytes() == 2 * 2 * 1000 + 8);
}

TEST_CASE("SavedTensorHooks: pack may return anything, move-only things too") {
  const auto x = leaf(randoms({3}));
  const auto y = [&] {
    ga::SavedTensorHooks hooks([](const at::Tensor& t) { return std::make_unique<at::Tensor>(t); },
                               [](const std::unique_ptr<at::Tensor>& t) { return *t; });
    return x.exp();
  }();
  y.sum().backward();
  CHECK(same_bits(take_gradients({x})[0], x.exp()));
  std::vector<at::Tensor> shelf;
  const auto z = [&] {
    ga::SavedTensorHooks hooks(
        [&](const at::Tensor& t) {
          shelf.push_back(t);
          return shelf.size() - 1;
        },
        [&](std::size_t place) { return shelf[place]; });
    return x.exp();
  }();
  z.sum().backward();
  CHECK(same_bits(take_gradients({x})[0], x.exp()));
}

TEST_CASE("SavedTensorHooks: operations within pack and unpack are not packed") {
  const auto x = leaf(randoms({3}));
  int packed = 0;
  {
    ga::SavedTensorHooks hooks(
        [&](const at::Tensor& t) {
          ++packed;
          return t.exp();
        },
        [](const at::Tensor& t) { return t.log(); });
    const auto y = (x * 2).exp();
    const auto first = torch::autograd::grad({y.sum()}, {x}, {}, true, /*create_graph=*/true)[0];
    CHECK(at::allclose(first, 2 * y));
  }
  CHECK(packed < 8);
}

TEST_CASE("SavedTensorHooks: around a checkpoint they receive its inputs and nothing inside of it") {
  const auto x = leaf(randoms({3})), w = leaf(randoms({3}));
  std::vector<at::Tensor> seen;
  int unpacked = 0, runs = 0;
  const auto function = [&](const at::Tensor& a, const at::Tensor& b, const at::Tensor& unused) {
    ++runs;
    (void)unused;
    return (a * b).exp().sin().tanh();
  };
  const auto expected = outcome([&] { return function(x * 2, w, x).exp(); }, {x, w});
  runs = 0;
  const auto ours = [&] {
    const auto h = x * 2;
    ga::SavedTensorHooks hooks(
        [&](const at::Tensor& t) {
          seen.push_back(t);
          return t.clone();
        },
        [&](const at::Tensor& t) {
          ++unpacked;
          return t;
        });
    const auto y = ga::checkpoint(function, h, w, torch::ones({3}).set_requires_grad(true));
    CHECK(seen.size() == 3);
    CHECK(same_bits(seen[0], h));
    CHECK(same_bits(seen[1], w));
    return y.exp();
  };
  CHECK(difference(outcome(ours, {x, w}), expected) == "");
  CHECK(seen.size() == 4);
  CHECK(unpacked == 4);
  CHECK(runs == 2);
}

TEST_CASE("SavedTensorHooks: around a checkpoint they also receive tensors within its inputs") {
  const auto packs = [](auto&& function, auto&&... inputs) {
    int packed = 0;
    ga::SavedTensorHooks hooks(
        [&](const at::Tensor& t) {
          ++packed;
          return t;
        },
        identity);
    ga::checkpoint(function, std::forward<decltype(inputs)>(inputs)...);
    return packed;
  };
  const auto nothing = [](const auto&...) {};
  const auto x = leaf(randoms({3}));
  using Tensors = std::vector<at::Tensor>;
  CHECK(packs(nothing, x, 1, "text", std::string("text"), nullptr) == 1);
  CHECK(packs(nothing, Tensors{x, x * 2}) == 2);
  CHECK(packs(nothing, at::Tensor(), std::optional<at::Tensor>(), std::vector<Tensors>{{}, {x}}) == 1);
  CHECK(packs(nothing, std::optional(x), std::optional(Tensors{x, x})) == 3);
  CHECK(packs(nothing, std::pair(x, 1), std::tuple(x, 2.5, std::array{x, x})) == 4);
  CHECK(packs(nothing, std::map<int, at::Tensor>{{1, x}, {2, x}}, std::list{x}) == 3);
  CHECK(packs([](at::TensorList) {}, at::TensorList({x, x})) == 2);
  CHECK(packs(nothing, at::ones({2}, at::kLong)) == 1);
}

TEST_CASE("SavedTensorHooks: hooks of a scope inside of a checkpoint are called") {
  const auto x = leaf(randoms({3}));
  int packed = 0, unpacked = 0;
  const auto function = [&](const at::Tensor& t) {
    auto y = t.exp();
    {
      ga::SavedTensorHooks hooks(
          [&](const at::Tensor& tensor) {
            ++packed;
            return tensor.clone();
          },
          [&](const at::Tensor& tensor) {
            ++unpacked;
            return tensor;
          });
      y = y.sin();
    }
    return y.tanh();
  };
  const auto expected = outcome([&] { return function(x); }, {x});
  CHECK(difference(outcome([&] { return ga::checkpoint(function, x); }, {x}), expected) == "");
  CHECK(unpacked == 2);
  CHECK(packed >= 2);
}

TEST_CASE("SavedTensorHooks: 16 bits around checkpoints change gradients a little, and hold half the memory") {
  torch::manual_seed(1);
  std::vector<nn::Sequential> parts;
  for (int i = 0; i < 4; ++i) parts.push_back(nn::Sequential(nn::Linear(64, 64), nn::GELU(), nn::Linear(64, 64)));
  const auto x = leaf(randoms({256, 64}, at::kFloat));
  const auto run = [&](bool narrow) {
    ga::MemoryMeter meter;
    at::Tensor y = x;
    const auto forward = [&] {
      for (auto& part : parts) y = ga::checkpoint(part, y);
    };
    if (narrow) {
      ga::SavedTensorHooks hooks(to_half, from_half);
      forward();
    } else {
      forward();
    }
    const auto held = meter.live_bytes();
    y.sum().backward();
    return std::pair(held, take_gradients({x})[0]);
  };
  const auto exact = run(false), narrow = run(true);
  const std::int64_t activations = 256 * 64 * 4;
  CHECK(exact.first == 4 * activations);
  CHECK(narrow.first == activations + 3 * activations / 2);
  CHECK_FALSE(same_bits(exact.second, narrow.second));
  CHECK(at::allclose(exact.second, narrow.second, 0.05, 0.05));
}

namespace {
class ForeignEngine final : public torch::autograd::Engine {
 public:
  ~ForeignEngine() override { stop(); }
  static torch::autograd::Engine& instance() {
    static ForeignEngine engine;
    return engine;
  }
};
}  // namespace

TEST_CASE("SavedTensorHooks: another engine than LibTorch's is an error") {
  torch::autograd::set_default_engine_stub(&ForeignEngine::instance);
  const auto x = leaf(randoms({3}));
  const auto hooks = testing::error_of([&] { ga::SavedTensorHooks hooks(identity, identity); });
  const auto checkpoint = testing::error_of([&] { ga::checkpoint([](const at::Tensor& t) { return t.exp(); }, x); });
  CHECK(inner::SavingScope::innermost() == nullptr);
  x.exp().sum().backward();
  torch::autograd::set_default_engine_stub(&torch::autograd::Engine::get_base_engine);
  CHECK(contains(hooks, "SavedTensorHooks: LibTorch's own autograd engine must be in use, got another one"));
  CHECK(contains(checkpoint, "checkpoint: LibTorch's own autograd engine must be in use, got another one"));
  CHECK(same_bits(take_gradients({x})[0], x.exp()));
  CHECK(testing::error_of([&] { ga::SavedTensorHooks hooks(identity, identity); }) == "");
}

TEST_CASE("SavedTensorHooks: a graph from before the first scope of the process") {
  torch::autograd::set_default_engine_stub(&torch::autograd::Engine::get_base_engine);
  const auto x = leaf(randoms({3}));
  const auto before = x.exp();
  ga::SavedTensorHooks hooks(identity, identity);
  before.sin().sum().backward();
  CHECK(at::allclose(take_gradients({x})[0], x.exp().cos() * x.exp()));
}

TEST_CASE("SavedTensorHooks: activations of a CUDA device are stored on the CPU", "[cuda]") {
  if (!torch::cuda::is_available()) SKIP("needs a CUDA device");
  const auto run = [](bool offload) {
    auto model = net();
    model->to(at::kCUDA);
    const auto x = torch::ones({5, 6}, at::kCUDA).set_requires_grad(true);
    torch::manual_seed(7);
    const auto y = [&] {
      if (!offload) return model->forward(x);
      ga::SavedTensorHooks hooks([](const at::Tensor& t) { return std::pair(t.device(), t.to(at::kCPU)); },
                                 [](const auto& packed) { return packed.second.to(packed.first); });
      return model->forward(x);
    }();
    y.sum().backward();
    auto all = take_gradients(model->parameters());
    for (auto& each : all) each = each.cpu();
    return all;
  };
  CHECK(same_bits(run(true), run(false)));
}
