// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/autocast.hpp>
#include <gradaccum/checkpoint.hpp>

#include "support/leaves.hpp"
#include "support/outcome.hpp"

#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/engine.h>

#include <array>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <span>
#include <tuple>

namespace ga = gradaccum;
namespace nn = torch::nn;
using namespace testing;

namespace {

at::Tensor randoms(at::IntArrayRef shape, at::ScalarType dtype = at::kDouble, int seed = 3) {
  torch::manual_seed(seed);
  return torch::randn(shape, dtype);
}

// x + branch(x), with an optional checkpoint around the branch.
struct ResidualImpl : nn::Module {
  ResidualImpl(nn::Sequential layers, bool with_checkpoint)
      : branch(register_module("branch", layers)), checkpointed(with_checkpoint) {}
  at::Tensor forward(at::Tensor x) { return x + (checkpointed ? ga::checkpoint(branch, x) : branch->forward(x)); }
  nn::Sequential branch;
  bool checkpointed;
};
TORCH_MODULE(Residual);

constexpr int width = 6;

// Makes random layers, which depend only on the seed. With `nested`, each residual branch is also checkpointed.
nn::Sequential random_net(int seed, bool nested, int layers = 8) {
  std::mt19937 lot(seed);
  torch::manual_seed(seed);
  nn::Sequential net(nn::Linear(width, width));
  for (int i = 0; i < layers; ++i) switch (lot() % 10) {
      case 0:
        net->push_back(nn::Linear(width, width));
        break;
      case 1:
        net->push_back(nn::Linear(nn::LinearOptions(width, width).bias(false)));
        break;
      case 2:
        net->push_back(nn::Tanh());
        break;
      case 3:
        net->push_back(nn::GELU());
        break;
      case 4:
        net->push_back(nn::Dropout(0.3));
        break;
      case 5:
        net->push_back(nn::AlphaDropout(0.3));
        break;
      case 6:
        net->push_back(nn::BatchNorm1d(width));
        break;
      case 7:
        net->push_back(nn::LayerNorm(nn::LayerNormOptions({width})));
        break;
      case 8:
        net->push_back(nn::Linear(width, width));
        net->push_back(nn::ReLU(nn::ReLUOptions(/*inplace=*/true)));
        break;
      default:
        if (layers > 3) net->push_back(Residual(random_net(seed + i + 1, nested, 3), nested));
    }
  return net;
}

std::vector<at::Tensor> with(std::vector<at::Tensor> tensors, const at::Tensor& one_more) {
  tensors.push_back(one_more);
  return tensors;
}

// Runs a step of `module`, checkpointed if `options` are given.
template <class Module>
Outcome step_of(Module module, at::Tensor x, std::optional<ga::CheckpointOptions> options) {
  if (x.is_floating_point()) x = leaf(x);
  const auto forward = [&] { return options ? ga::checkpoint(*options, module, x) : module->forward(x); };
  return outcome(forward, with(module->parameters(), x), module->buffers());
}

// A model whose first layer is an embedding, so its input has integers.
struct LanguageModelImpl : nn::Module {
  LanguageModelImpl() {
    register_module("embedding", embedding);
    register_module("attention", attention);
    register_module("norm", norm);
    register_module("recurrent", recurrent);
  }
  at::Tensor forward(const at::Tensor& ids) {
    const auto embedded = embedding->forward(ids);  // [sequence, batch, features]
    const auto attended = std::get<0>(attention->forward(embedded, embedded, embedded));
    return std::get<0>(recurrent->forward(norm->forward(embedded + attended)));
  }
  nn::Embedding embedding{nn::EmbeddingOptions(11, 8).padding_idx(0)};
  nn::MultiheadAttention attention{nn::MultiheadAttentionOptions(8, 2).dropout(0.2)};
  nn::LayerNorm norm{nn::LayerNormOptions({8})};
  nn::LSTM recurrent{nn::LSTMOptions(8, 5).num_layers(2).dropout(0.1)};
};
TORCH_MODULE(LanguageModel);

nn::Sequential image_net() {
  return nn::Sequential(nn::Conv2d(nn::Conv2dOptions(2, 4, 3).padding(1)), nn::BatchNorm2d(4), nn::ReLU(),
                        nn::Dropout2d(0.4), nn::Conv2d(nn::Conv2dOptions(4, 4, 3)),
                        nn::InstanceNorm2d(nn::InstanceNorm2dOptions(4).affine(true).track_running_stats(true)),
                        nn::MaxPool2d(2), nn::Flatten());
}

struct AttentionImpl : nn::Module {
  explicit AttentionImpl(double p) : dropout(p) { register_module("in", in); }
  at::Tensor forward(const at::Tensor& x) {
    const auto parts = in->forward(x).chunk(3, -1);
    return at::scaled_dot_product_attention(parts[0], parts[1], parts[2], {}, dropout, /*is_causal=*/true);
  }
  nn::Linear in{8, 24};
  double dropout;
};
TORCH_MODULE(Attention);

const auto default_options = std::optional(ga::CheckpointOptions());
const auto plain = std::optional<ga::CheckpointOptions>();

// Counts its calls, over all copies.
template <class Function>
struct Counted {
  auto operator()(auto&&... inputs) const {
    ++*calls;
    return function(std::forward<decltype(inputs)>(inputs)...);
  }
  Function function;
  std::shared_ptr<int> calls = std::make_shared<int>(0);
};
template <class Function>
Counted(Function) -> Counted<Function>;

}  // namespace

TEST_CASE("checkpoint: a step of a random net is bitwise that of the plain call") {
  for (int seed = 0; seed < 40; ++seed)
    for (auto dtype : {at::kDouble, at::kFloat})
      for (bool nested : {false, true}) {
        INFO("seed " << seed << ", " << dtype << ", nested " << nested);
        const auto make = [&](bool with_nested) {
          auto net = random_net(seed, with_nested);
          net->to(dtype);
          return net;
        };
        const auto x = randoms({5, width}, dtype);
        const auto expected = step_of(make(false), x, plain);
        CHECK(difference(step_of(make(nested), x, default_options), expected) == "");
        CHECK(difference(step_of(make(nested), x, {{.early_stop = false}}), expected) == "");
        CHECK(difference(step_of(make(nested), x, {{.check_content = true}}), expected) == "");
      }
}

TEST_CASE("checkpoint: the comparison detects a different random number, bit and statistic") {
  const auto make = [] {
    torch::manual_seed(1);
    return nn::Sequential(nn::Linear(width, width), nn::Dropout(0.3), nn::BatchNorm1d(width));
  };
  const auto x = randoms({5, width}, at::kFloat);
  const auto expected = step_of(make(), x, plain);
  CHECK(difference(step_of(make(), x, {{.preserve_rng = false}}), expected) == "gradients random");
  CHECK(difference(step_of(make(), x + 1e-6, plain), expected) == "outputs gradients buffers ");
  auto net = make();
  const auto by_pointer = [&](const at::Tensor& t) {
    net[2]->as<nn::BatchNorm1d>()->running_mean.data_ptr<float>()[0] += 1;
    return net->forward(t);
  };
  const auto lambda =
      outcome([&] { return ga::checkpoint(by_pointer, x); }, with(net->parameters(), at::empty({})), net->buffers());
  CHECK(contains(difference(lambda, expected), "buffers"));
}

TEST_CASE("checkpoint: embedding, attention, recurrent, convolution") {
  const auto ids = randoms({7, 3}).abs().mul(4).to(at::kLong).clamp_max(10);
  const auto check = [](auto make, const at::Tensor& x) {
    const auto seeded = [&] {
      torch::manual_seed(1);
      return make();
    };
    const auto expected = step_of(seeded(), x, plain);
    REQUIRE(expected.gradients.front().defined());
    CHECK(difference(step_of(seeded(), x, default_options), expected) == "");
    CHECK(difference(step_of(seeded(), x, {{.early_stop = false, .check_content = true}}), expected) == "");
  };
  check([] { return LanguageModel(); }, ids);
  check(image_net, randoms({3, 2, 8, 8}, at::kFloat));
  check([] { return Attention(0.0); }, randoms({2, 2, 5, 8}, at::kFloat));
  check([] { return Attention(0.5); }, randoms({2, 2, 5, 8}, at::kFloat));
}

TEST_CASE("checkpoint: an operation that writes to a tensor it saved runs to its end") {
  const auto make = [](bool more) {
    torch::manual_seed(1);
    nn::Sequential net(nn::Linear(width, width), nn::RReLU());
    if (more) net->push_back(nn::Linear(width, width));
    return net;
  };
  const auto x = randoms({5, width}, at::kFloat);
  for (const bool more : {false, true}) {
    const auto expected = step_of(make(more), x, plain);
    CHECK(difference(step_of(make(more), x, default_options), expected) == "");
    CHECK(difference(step_of(make(more), x, {{.early_stop = false}}), expected) == "");
  }
}

TEST_CASE("checkpoint: within autocast") {
  for (bool cached : {true, false})
    for (bool backward_within : {false, true})
      for (int seed = 0; seed < 12; ++seed) {
        INFO("cached " << cached << ", backward within " << backward_within << ", seed " << seed);
        const auto x = randoms({5, width}, at::kFloat);
        const auto step = [&](bool checkpointed) {
          auto net = random_net(seed, false);
          auto input = leaf(x);
          const auto forward = [&] {
            ga::Autocast autocast(at::kCPU, at::kBFloat16, true, cached);
            auto y = net->forward(input);  // casts of the parameters are cached from here on
            return checkpointed ? ga::checkpoint(net, y) : net->forward(y);
          };
          std::optional<ga::Autocast> around;
          if (backward_within) around.emplace(at::kCPU, at::kBFloat16, true, cached);
          return outcome(forward, with(net->parameters(), input), net->buffers());
        };
        CHECK(difference(step(true), step(false)) == "");
        CHECK_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
        CHECK(at::autocast::is_autocast_cache_enabled());
      }
}

TEST_CASE("checkpoint: autocast is restored to its state in forward, whatever it is in backward") {
  auto w = leaf(randoms({4, 4}, at::kFloat)), x = leaf(randoms({4, 4}, at::kFloat));
  std::vector<std::pair<at::ScalarType, bool>> seen;
  const auto function = [&](const at::Tensor& t) {
    const auto product = t.mm(w);
    seen.emplace_back(product.scalar_type(), at::autocast::is_autocast_cache_enabled());
    return product.tanh();
  };
  at::Tensor half, full;
  {
    ga::Autocast autocast(at::kCPU, at::kHalf, true, /*cache_enabled=*/false);
    half = ga::checkpoint(function, x);
    ga::Autocast disabled(at::kCPU, {}, false, true);
    full = ga::checkpoint(function, x);
  }
  half.sum().backward();
  ga::Autocast autocast(at::kCPU, at::kBFloat16, true, false);
  full.sum().backward();
  const std::pair first(at::kHalf, false), second(at::kFloat, true);
  CHECK(seen == std::vector{first, second, first, second});
}

TEST_CASE("checkpoint: runs once forward, and once more in each backward") {
  auto w = leaf(randoms({4, 4})), x = leaf(randoms({4, 4}));
  const Counted function{[w](const at::Tensor& t) { return t.mm(w).tanh().mm(w); }};
  auto y = ga::checkpoint(function, x);
  CHECK(*function.calls == 1);
  y.sum().backward();
  CHECK(*function.calls == 2);
  y = ga::checkpoint(function, x);
  take_gradients({w, x});
  y.sum().backward({}, /*retain_graph=*/true);
  CHECK(*function.calls == 4);
  const auto first = take_gradients({w, x});
  y.sum().backward({}, /*retain_graph=*/true);
  CHECK(*function.calls == 5);
  CHECK(same_bits(take_gradients({w, x}), first));
  y.sum().backward();
  CHECK(*function.calls == 6);
  const auto plain_again = [&] {
    auto z = function.function(x);
    z.sum().backward();
    return testing::error_of([&] { z.sum().backward(); });
  }();
  REQUIRE(contains(plain_again, "a second time"));
  CHECK(testing::error_of([&] { y.sum().backward(); }) == plain_again);
  CHECK(*function.calls == 6);
}

TEST_CASE("checkpoint: without gradients it is a plain call") {
  auto w = leaf(randoms({4, 4})), x = leaf(randoms({4, 4}));
  const Counted function{[w](const at::Tensor& t) { return t.mm(w).tanh(); }};
  const auto expected = function.function(x).detach();
  {
    at::NoGradGuard no_grad;
    const auto y = ga::checkpoint(function, x);
    CHECK_FALSE(y.requires_grad());
    CHECK(same_bits(y, expected));
  }
  {
    c10::InferenceMode inference;
    const auto y = ga::checkpoint(function, x);
    CHECK(y.is_inference());
    CHECK(same_bits(y, expected));
    CHECK(same_bits(ga::checkpoint([](const at::Tensor& t) { return t * 2; }, y), expected * 2));
  }
  CHECK(*function.calls == 2);
  at::NoGradGuard no_grad;  // the rule about inputs does not apply
  auto changed = torch::zeros({2});
  ga::checkpoint([](at::Tensor t) { t.add_(1); }, changed);
  CHECK(changed.sum().item<double>() == 2);
}

TEST_CASE("checkpoint: the function disables, or enables, gradients for a part") {
  auto w = leaf(randoms({4, 4}));
  const auto function = [w](const at::Tensor& x) {
    at::Tensor target;
    {
      at::NoGradGuard no_grad;
      target = x.mm(w).tanh();
    }
    return (x.mm(w).sin() - target).pow(2) + ga::checkpoint([w](const at::Tensor& t) { return (t * w).exp(); }, x);
  };
  const auto x = leaf(randoms({4, 4}));
  CHECK(difference(outcome([&] { return ga::checkpoint(function, x); }, {w, x}),
                   outcome([&] { return function(x); }, {w, x})) == "");
}

TEST_CASE("checkpoint: modules in all their forms, and callables") {
  const auto x = randoms({5, width});
  const auto step = [&](auto call) {
    auto net = random_net(7, false);
    net->to(at::kDouble);
    auto input = leaf(x);
    return outcome([&] { return call(net, input); }, with(net->parameters(), input), net->buffers());
  };
  using Net = nn::Sequential;
  const auto expected = step([](Net net, at::Tensor t) { return net->forward(t); });
  CHECK(difference(step([](Net net, at::Tensor t) { return ga::checkpoint(net, t); }), expected) == "");
  CHECK(difference(step([](Net net, at::Tensor t) { return ga::checkpoint(std::as_const(net), t); }), expected) == "");
  CHECK(difference(step([](Net net, at::Tensor t) { return ga::checkpoint(std::move(net), t); }), expected) == "");
  CHECK(difference(step([](Net net, at::Tensor t) { return ga::checkpoint(net.ptr(), t); }), expected) == "");
  CHECK(difference(step([](Net net, at::Tensor t) { return ga::checkpoint(net.get(), t); }), expected) == "");
  CHECK(difference(step([](Net net, at::Tensor t) { return ga::checkpoint(*net, t); }), expected) == "");
  CHECK(difference(step([](Net net, at::Tensor t) { return ga::checkpoint({}, net, t); }), expected) == "");
  CHECK(difference(step([](Net net, at::Tensor t) { return ga::checkpoint(ga::CheckpointOptions(), net, t); }),
                   expected) == "");
}

namespace {
at::Tensor free_function(const at::Tensor& x) { return x.tanh().exp(); }
}  // namespace

TEST_CASE("checkpoint: lambdas, function pointers, std::function, functors") {
  const auto x = leaf(randoms({4}));
  const auto expected = outcome([&] { return free_function(x); }, {x});
  const auto check = [&](auto&& function) {
    CHECK(difference(outcome([&] { return ga::checkpoint(function, x); }, {x}), expected) == "");
    CHECK(difference(outcome([&] { return ga::checkpoint({.early_stop = false}, function, x); }, {x}), expected) == "");
  };
  check(free_function);
  check(&free_function);
  check(std::function<at::Tensor(at::Tensor)>(free_function));
  check([](at::Tensor t) { return t.tanh().exp(); });
}

TEST_CASE("checkpoint: a function with a counter begins each run with its original value") {
  const auto x = leaf(randoms({4}));
  auto function = [power = 1](const at::Tensor& t) mutable {
    ++power;
    return t.pow(power).exp();
  };
  x.pow(2).exp().sum().backward();
  const auto expected = take_gradients({x});
  for (int i = 0; i < 3; ++i) {
    const auto y = ga::checkpoint(function, x);
    CHECK(same_bits(y, x.pow(2).exp()));
    for (bool retain_graph : {true, false}) {
      y.sum().backward({}, retain_graph);
      CHECK(same_bits(take_gradients({x}), expected));
    }
  }
}

TEST_CASE("checkpoint: a temporary module and temporary inputs live on in the graph") {
  at::Tensor weight, y;
  {
    nn::Linear net(nn::LinearOptions(4, 4).bias(false));
    weight = net->weight;
    y = ga::checkpoint(nn::Sequential(net, nn::Tanh(), net), randoms({2, 4}, at::kFloat));
  }
  y.sum().backward();
  const auto ours = take_gradients({weight});
  const auto x = randoms({2, 4}, at::kFloat);
  at::linear(at::linear(x, weight).tanh(), weight).sum().backward();
  CHECK(same_bits(ours, take_gradients({weight})));
}

TEST_CASE("checkpoint: tensors of all shapes") {
  const auto function = [](const at::Tensor& x) { return (x.tanh() * x).exp() + x.sum().sin(); };
  const auto base = randoms({6, 4});
  for (const auto& values :
       {base, base.t(), base.slice(0, 0, 6, 2), base.select(1, 2), base.flip(0), base[0][0],
        torch::empty({0}, at::kDouble), torch::empty({3, 0, 2}, at::kDouble), base.as_strided({3, 3}, {1, 1}),
        torch::full({2}, NAN, at::kDouble), torch::full({2}, INFINITY, at::kDouble), base.to(at::kBFloat16),
        base.to(at::kHalf), at::complex(base, base)}) {
    INFO(values.sizes() << ' ' << values.strides() << ' ' << values.dtype());
    const auto step = [&](bool checkpointed) {
      const auto x = values.detach().set_requires_grad(true);
      const auto real = [&](const at::Tensor& y) { return y.is_complex() ? at::view_as_real(y) : y; };
      return outcome([&] { return real(checkpointed ? ga::checkpoint(function, x) : function(x)); }, {x});
    };
    CHECK(difference(step(true), step(false)) == "");
  }
}

TEST_CASE("checkpoint: frozen and shared parameters") {
  for (int frozen = 0; frozen < 8; ++frozen) {
    const auto step = [&](bool checkpointed) {
      torch::manual_seed(1);
      nn::Linear a(4, 4), b(4, 4), c(4, 4);
      c->weight = a->weight;  // shared
      const std::vector<at::Tensor> parameters{a->weight, b->weight, b->bias};
      for (int i = 0; i < 3; ++i) parameters[i].set_requires_grad(!(frozen >> i & 1));
      const auto x = leaf(randoms({2, 4}, at::kFloat));
      const nn::Sequential net(a, nn::Tanh(), b, nn::Tanh(), c, nn::Tanh(), a);
      return outcome([&] { return checkpointed ? ga::checkpoint(net, x) : nn::Sequential(net)->forward(x); },
                     with(parameters, x));
    };
    CHECK(difference(step(true), step(false)) == "");
  }
}

TEST_CASE("checkpoint: inputs of any kind arrive unchanged in both runs") {
  struct Settings {
    double scale;
    std::string name;
    at::Tensor bias;
  };
  const auto a = leaf(randoms({3})), b = leaf(randoms({3})), c = leaf(randoms({3})), d = leaf(randoms({3})),
             e = leaf(randoms({3})), f = leaf(randoms({3})), g = leaf(randoms({3})), h = leaf(randoms({3}));
  int calls = 0;
  const auto function = [&calls](const at::Tensor& one, std::vector<at::Tensor> many, std::optional<at::Tensor> maybe,
                                 std::optional<at::Tensor> nothing, std::pair<at::Tensor, int> pair,
                                 const std::tuple<double, std::array<at::Tensor, 1>>& nested,
                                 std::map<std::string, std::vector<at::Tensor>>& map, const Settings& settings, int n,
                                 const char* text, std::unordered_map<int, at::Tensor> other, at::Tensor undefined) {
    ++calls;
    TORCH_CHECK(!nothing && text == std::string("text") && settings.name == "name" && !undefined.defined());
    auto y = one.exp() * many[0].sin() * maybe->cos() * pair.first.exp() * pair.second;
    y = y + std::get<1>(nested)[0].exp() * std::get<0>(nested) + map.at("key").at(0).exp() * settings.scale;
    return (y + settings.bias.exp() + other.at(5).exp()).pow(n);
  };
  std::map<std::string, std::vector<at::Tensor>> map{{"key", {f}}};
  const auto call = [&](auto&& run) {
    return run(a, std::vector<at::Tensor>{b, b}, std::optional(c), std::optional<at::Tensor>(), std::pair(d, 3),
               std::tuple(2.5, std::array<at::Tensor, 1>{e}), map, Settings{1.5, "name", g}, 2, "text",
               std::unordered_map<int, at::Tensor>{{5, h}}, at::Tensor());
  };
  const std::vector<at::Tensor> leaves{a, b, c, d, e, f, g, h};
  const auto expected = outcome([&] { return call(function); }, leaves);
  for (auto& gradient : expected.gradients) REQUIRE(gradient.defined());
  const auto ours = [&] {
    return call([&](auto&&... inputs) { return ga::checkpoint(function, std::forward<decltype(inputs)>(inputs)...); });
  };
  CHECK(difference(outcome(ours, leaves), expected) == "");
  CHECK(calls == 3);
  CHECK(map.at("key").at(0).is_same(f));
}

TEST_CASE("checkpoint: functions take tensors by value, by reference, by rvalue reference, and as lists") {
  const auto x = leaf(randoms({3})), w = leaf(randoms({3}));
  const auto expected = outcome([&] { return x.exp() * w.exp(); }, {x, w});
  const auto check = [&](auto&& ours) { CHECK(difference(outcome(ours, {x, w}), expected) == ""); };
  check([&] { return ga::checkpoint([](at::Tensor a, at::Tensor b) { return a.exp() * b.exp(); }, x, w); });
  check([&] { return ga::checkpoint([](const at::Tensor& a, auto&& b) { return a.exp() * b.exp(); }, x, w); });
  check(
      [&] { return ga::checkpoint([](at::Tensor&& a, at::Tensor b) { return a.exp() * b.exp(); }, at::Tensor(x), w); });
  check([&] {
    auto reassigned = x;
    return ga::checkpoint([](at::Tensor& a, at::Tensor b) { return (a = a.exp()) * b.exp(); }, reassigned, w);
  });
  check([&] {
    return ga::checkpoint([](at::TensorList l) { return l[0].exp() * l[1].exp(); }, std::vector<at::Tensor>{x, w});
  });
  check([&] {
    const auto both = std::vector<at::Tensor>{x, w};  // destroyed before backward
    return ga::checkpoint([](at::TensorList l) { return l[0].exp() * l[1].exp(); }, at::TensorList(both));
  });
  check([&] {
    auto both = std::vector<at::Tensor>{x, w};
    const auto y =
        ga::checkpoint([](std::span<at::Tensor> l) { return l[0].exp() * l[1].exp(); }, std::span<at::Tensor>(both));
    CHECK(both[0].is_same(x));
    both.clear();
    return y;
  });
}

TEST_CASE("checkpoint: outputs of any kind") {
  const auto x = leaf(randoms({3}));
  const auto gradient_of = [&](const at::Tensor& y) {
    uneven_sum(y).backward();
    return take_gradients({x});
  };
  const auto expected = gradient_of(x.exp().tanh());
  struct Outputs {
    at::Tensor value;
    std::string name;
  };
  CHECK(same_bits(gradient_of(ga::checkpoint(
                                  [](at::Tensor t) {
                                    return Outputs{t.exp().tanh(), "a"};
                                  },
                                  x)
                                  .value),
                  expected));
  CHECK(
      same_bits(gradient_of(ga::checkpoint([](at::Tensor t) { return std::vector{t.exp().tanh()}; }, x)[0]), expected));
  CHECK(
      same_bits(gradient_of(std::get<1>(ga::checkpoint([](at::Tensor t) { return std::tuple(1, t.exp().tanh()); }, x))),
                expected));
  CHECK(same_bits(gradient_of(ga::checkpoint([](at::Tensor t) { return std::optional(t.exp().tanh()); }, x).value()),
                  expected));
  CHECK(same_bits(gradient_of(ga::checkpoint(
                                  [](at::Tensor t) {
                                    return std::map<int, at::Tensor>{{1, t.exp().tanh()}};
                                  },
                                  x)
                                  .at(1)),
                  expected));
  CHECK(same_bits(
      gradient_of(*ga::checkpoint([](at::Tensor t) { return std::make_unique<at::Tensor>(t.exp().tanh()); }, x)),
      expected));
  at::Tensor left;  // not returned
  static_assert(std::is_void_v<decltype(ga::checkpoint([&](at::Tensor t) { left = t; }, x))>);
  auto out = std::make_shared<at::Tensor>();
  ga::checkpoint(
      [out, first = true](at::Tensor t) mutable {
        if (std::exchange(first, false) && !out->defined())
          *out = t.exp().tanh();
        else
          t.exp().tanh();
      },
      x);
  CHECK(same_bits(gradient_of(*out), expected));
  CHECK(ga::checkpoint([](int a, const std::string& b) { return a + b.size(); }, 2, "abc") == 5);  // no tensors at all
}

TEST_CASE("checkpoint: several outputs, some without gradients, some not used") {
  const auto w = leaf(randoms({3, 3})), x = leaf(randoms({3, 3}));
  const auto function = [w](const at::Tensor& t) {
    auto a = t.mm(w).tanh();
    auto b = (t * w).exp();
    return std::vector<at::Tensor>{a, a.argmax(1), b, a.detach().exp(), t, (a * b).sum()};
  };
  for (unsigned used = 0; used < 16; ++used) {
    const auto step = [&](bool checkpointed) {
      const auto forward = [&] {
        auto outputs = checkpointed ? ga::checkpoint(function, x) : function(x);
        REQUIRE(outputs.size() == 6);
        std::vector<at::Tensor> chosen{outputs[1], outputs[3]};
        const int with_gradients[] = {0, 2, 4, 5};
        for (int i = 0; i < 4; ++i)
          if (used >> i & 1) chosen.push_back(outputs[with_gradients[i]]);
        chosen.push_back(x * w);
        return at::cat([&] {
          std::vector<at::Tensor> flat;
          for (auto& t : chosen) flat.push_back(t.reshape(-1).to(at::kDouble));
          return flat;
        }());
      };
      return outcome(forward, {w, x});
    };
    CHECK(difference(step(true), step(false)) == "");
  }
}

TEST_CASE("checkpoint: an output that is an input, or a view of one") {
  const auto x = leaf(randoms({3, 4})), w = leaf(randoms({3, 4}));
  const auto function = [w](const at::Tensor& t) { return std::vector<at::Tensor>{t, t.t(), (t * w).exp().t(), w}; };
  const auto step = [&](bool checkpointed) {
    return outcome(
        [&] {
          const auto y = checkpointed ? ga::checkpoint(function, x) : function(x);
          return (y[0] * y[1].t() * y[2].t()).exp() * y[3];
        },
        {x, w});
  };
  CHECK(difference(step(true), step(false)) == "");
}

TEST_CASE("checkpoint: autograd::grad and second derivatives") {
  const auto w = leaf(randoms({4, 4})), x = leaf(randoms({4, 4}));
  const auto function = [w](const at::Tensor& t) { return t.mm(w).tanh().mm(w).exp(); };
  const auto twice = [&](auto&& call, bool nested) {
    const auto y = nested ? call([&](const at::Tensor& t) { return call(function, t).sin(); }, x) : call(function, x);
    auto first = torch::autograd::grad({uneven_sum(y)}, {x, w}, {}, true, /*create_graph=*/true);
    auto second = torch::autograd::grad({uneven_sum(first[0]) + uneven_sum(first[1])}, {x, w}, {}, true, true);
    auto third = torch::autograd::grad({uneven_sum(second[0])}, {x, w}, {}, /*retain_graph=*/true);
    uneven_sum(y).backward();  // the graph still exists
    auto all = first;
    all.insert(all.end(), second.begin(), second.end());
    all.insert(all.end(), third.begin(), third.end());
    for (auto& gradient : take_gradients({x, w})) all.push_back(gradient);
    return all;
  };
  const auto direct = [](auto&& f, const at::Tensor& t) { return f(t); };
  for (bool nested : {false, true}) {
    const auto expected = twice(direct, nested);
    CHECK(same_bits(twice([](auto f, const at::Tensor& t) { return ga::checkpoint(f, t); }, nested), expected));
    CHECK(same_bits(
        twice([](auto f, const at::Tensor& t) { return ga::checkpoint({.early_stop = false}, f, t); }, nested),
        expected));
  }
  CHECK_FALSE(w.grad().defined());
  const auto only = torch::autograd::grad({uneven_sum(ga::checkpoint(function, x))}, {w});
  CHECK(same_bits(only[0], torch::autograd::grad({uneven_sum(function(x))}, {w})[0]));
}

TEST_CASE("checkpoint: nested ones run as often as their depth implies") {
  const auto x = leaf(randoms({3}));
  std::array<int, 3> runs{};
  const auto third = [&](const at::Tensor& t) {
    ++runs[2];
    return t.tanh().tanh();
  };
  const auto second = [&](const at::Tensor& t) {
    ++runs[1];
    return ga::checkpoint(third, t.tanh()).tanh();
  };
  const auto first = [&](const at::Tensor& t) {
    ++runs[0];
    return ga::checkpoint(second, t.tanh()).tanh();
  };
  const auto y = ga::checkpoint(first, x);
  CHECK(runs == std::array{1, 1, 1});
  uneven_sum(y).backward();
  CHECK(runs == std::array{2, 3, 4});  // once more for each enclosing checkpoint and for its own
  const auto ours = take_gradients({x});
  auto chain = x;
  for (int i = 0; i < 6; ++i) chain = chain.tanh();
  uneven_sum(chain).backward();
  CHECK(same_bits(ours, take_gradients({x})));
}

TEST_CASE("checkpoint: one output used twice, one module in two checkpoints") {
  const auto step = [&](bool checkpointed) {
    auto net = random_net(3, checkpointed);
    net->to(at::kDouble);
    const auto x = leaf(randoms({5, width}));
    const auto call = [&](const at::Tensor& t) { return checkpointed ? ga::checkpoint(net, t) : net->forward(t); };
    return outcome(
        [&] {
          const auto y = call(x), z = call(y), u = call(y);
          return y * z + (u * y).sin();
        },
        with(net->parameters(), x), net->buffers());
  };
  CHECK(difference(step(true), step(false)) == "");
}

TEST_CASE("checkpoint: a function that computes gradients itself") {
  const auto w = leaf(randoms({4, 4})), x = leaf(randoms({4, 4}));
  for (bool create_graph : {true, false})
    for (bool early_stop : {true, false}) {
      const auto penalty = [w, create_graph](const at::Tensor& t) {
        const auto z = t.tanh();
        const auto y = z.mm(w).tanh().pow(3).sum();
        const auto slope = torch::autograd::grad({y}, {z}, {}, true, create_graph)[0];
        return slope.pow(2).sum() + y;
      };
      INFO("create_graph " << create_graph << ", early_stop " << early_stop);
      const auto expected = outcome([&] { return penalty(x); }, {w, x});
      for (int i = 0; i < 100; ++i)  // more than the engine's limit of recursion
        REQUIRE(difference(outcome([&] { return ga::checkpoint({.early_stop = early_stop}, penalty, x); }, {w, x}),
                           expected) == "");
      const auto nested = [&](const at::Tensor& t) { return ga::checkpoint({.early_stop = early_stop}, penalty, t); };
      CHECK(difference(outcome([&] { return ga::checkpoint({.early_stop = early_stop}, nested, x); }, {w, x}),
                       expected) == "");
    }
}

TEST_CASE("checkpoint: a function that ends with a user-defined gradient") {
  const auto w = leaf(randoms({4, 4})), x = leaf(randoms({4, 4}));
  const auto slope = [w](const at::Tensor& t) {
    const auto z = t.tanh();
    return torch::autograd::grad({z.mm(w).tanh().pow(3).sum()}, {z}, {}, true, /*create_graph=*/true)[0];
  };
  const auto expected = outcome([&] { return slope(x); }, {w, x});
  for (int i = 0; i < 100; ++i)  // more than the engine's limit of recursion
    REQUIRE(difference(outcome([&] { return ga::checkpoint(slope, x); }, {w, x}), expected) == "");
  CHECK(torch::autograd::Engine::get_default_engine().is_checkpoint_valid());
}

TEST_CASE("checkpoint: a function whose user-defined gradient saves a discarded tensor") {
  const auto w = leaf(randoms({4, 4})), x = leaf(randoms({4, 4}));
  const auto penalty = [w](const at::Tensor& t) {
    const auto z = t.tanh();
    z.register_hook([](const at::Tensor& gradient) { (gradient * gradient).exp().sum(); });
    const auto y = z.mm(w).tanh().pow(3).sum();
    return torch::autograd::grad({y}, {z}, {}, true, true)[0].pow(2).sum() + y;
  };
  const auto expected = outcome([&] { return penalty(x); }, {w, x});
  CHECK(difference(outcome([&] { return ga::checkpoint(penalty, x); }, {w, x}), expected) == "");
}

namespace {
// exp(x) * w, whose backward unpacks its saved tensors twice.
struct AsksTwice : torch::autograd::Function<AsksTwice> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, const at::Tensor& w) {
    const auto y = x.exp();
    context->save_for_backward({x, w, y * w});
    return y * w;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    const auto first = context->get_saved_variables(), second = context->get_saved_variables();
    return {gradients[0] * first[0].exp() * second[1], gradients[0] * second[0].exp() + 0 * first[2]};
  }
};
}  // namespace

TEST_CASE("checkpoint: a user's autograd::Function that unpacks twice") {
  const auto w = leaf(randoms({4})), x = leaf(randoms({4}));
  const Counted function{[w](const at::Tensor& t) { return AsksTwice::apply(t.sin(), w).cos(); }};
  const auto expected = outcome([&] { return function.function(x); }, {w, x});
  CHECK(difference(outcome([&] { return ga::checkpoint(function, x); }, {w, x}), expected) == "");
}

TEST_CASE("checkpoint: a hook that the function registers on its input acts once") {
  const auto w = leaf(randoms({4})), x = leaf(randoms({4}));
  const auto function = [w](const at::Tensor& t) {
    t.register_hook([](const at::Tensor& gradient) { return gradient * 2; });
    return (t * w).exp();
  };
  const auto expected = outcome([&] { return function(x * 3); }, {w, x});
  CHECK(difference(outcome([&] { return ga::checkpoint(function, x * 3); }, {w, x}), expected) == "");
}

TEST_CASE("checkpoint: long chains and deep nests") {
  const auto x = leaf(randoms({3}));
  const auto part = [](const at::Tensor& t) { return t.sin(); };
  const auto chain = [&](int length) {
    auto y = x;
    for (int i = 0; i < length; ++i) y = ga::checkpoint(part, y);
    return y;
  };
  chain(20'000);  // destroyed without backward
  auto ours = outcome([&] { return chain(100); }, {x});
  const auto expected = outcome(
      [&] {
        auto y = x;
        for (int i = 0; i < 100; ++i) y = y.sin();
        return y;
      },
      {x});
  CHECK(difference(ours, expected) == "");
  std::function<at::Tensor(at::Tensor, int)> nest = [&](at::Tensor t, int depth) {
    return depth == 0 ? t : ga::checkpoint(nest, t.sin(), depth - 1).sin();
  };
  ours = outcome([&] { return ga::checkpoint(nest, x, 50); }, {x});  // 50 on the way in, 50 on the way out
  CHECK(difference(ours, expected) == "");
}

TEST_CASE("checkpoint: sparse inputs, TorchScript, LibTorch's search for anomalies") {
  const auto x = leaf(randoms({3, 2})), w = leaf(randoms({3, 2}));
  const auto sparse = torch::eye(3, at::kDouble).to_sparse();
  const auto product = [](const at::Tensor& a, const at::Tensor& b) { return at::mm(a, b).tanh(); };
  CHECK(difference(outcome([&] { return ga::checkpoint({.check_content = true}, product, sparse, x); }, {x}),
                   outcome([&] { return product(sparse, x); }, {x})) == "");
  const auto unit = torch::jit::compile(R"(
    def f(x, w):
      a = torch.tanh(x * w)
      b = torch.exp(a) * x
      return torch.sin(b) + a
  )");
  const auto script = [unit](const at::Tensor& a, const at::Tensor& b) {
    return unit->run_method("f", a, b).toTensor();
  };
  // TorchScript compiles on the way, so the second run saves other tensors than the first.
  REQUIRE_ERROR("contents", uneven_sum(ga::checkpoint({.check_content = true}, script, x, w)).backward());
  for (int i = 0; i < 3; ++i) {
    const auto expected = outcome([&] { return script(x, w); }, {x, w});
    CHECK(difference(outcome([&] { return ga::checkpoint(script, x, w); }, {x, w}), expected) == "");
  }
  const torch::autograd::DetectAnomalyGuard anomalies(/*check_nan=*/true);
  CHECK(difference(outcome([&] { return ga::checkpoint(product, x.t(), w); }, {x, w}),
                   outcome([&] { return product(x.t(), w); }, {x, w})) == "");
}
