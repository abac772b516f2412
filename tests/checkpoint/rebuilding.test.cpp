// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/checkpoint.hpp>
#include <gradaccum/detail/checkpoint/recomputation.hpp>
#include <gradaccum/saved_tensor_hooks.hpp>

#include "support/chains.hpp"
#include "support/leaves.hpp"

#include <ATen/record_function.h>

#include <functional>
#include <limits>
#include <optional>

namespace ga = gradaccum;
namespace nn = torch::nn;
using gradaccum::detail::RebuildingScope;
using namespace testing;

namespace {

constexpr int rows = 6, width = 8;
constexpr std::int64_t activation = rows * width * 8;  // bytes

// Makes the input, three square matrices, and a row.
Parameters make_leaves(at::ScalarType dtype = at::kDouble, int count = rows) {
  torch::manual_seed(4);
  const auto leaf_of = [&](at::IntArrayRef shape) { return leaf(torch::randn(shape, at::kDouble).to(dtype)); };
  return {leaf_of({count, width}), leaf_of({width, width}), leaf_of({width, width}), leaf_of({width, width}),
          leaf_of({width})};
}

using Forward = std::function<at::Tensor(const Parameters&)>;
struct Case {
  std::string name;
  std::int64_t saved;  // bytes
  Forward forward;
};

at::Tensor hidden(const Parameters& p) { return at::mm(p[0], p[1]); }
at::Tensor other(const Parameters& p) { return at::mm(p[0], p[3]); }
at::Tensor complex(const Parameters& p, int i) {
  return at::complex(at::mm(p[0], p[i]), at::mm(p[0], p[i == 1 ? 3 : 1]));
}

// Makes a case whose second product needs its input in backward.
Case case_of(const std::string& name, std::int64_t saved, std::function<at::Tensor(const at::Tensor&)> activate) {
  return {name, saved, [activate](const Parameters& p) { return at::mm(activate(hidden(p)), p[2]); }};
}

Forward in_place(std::function<void(at::Tensor&)> change) {
  return [change](const Parameters& p) {
    auto h = hidden(p);
    change(h);
    return at::mm(h, p[2]);
  };
}

std::vector<Case> cases() {
  return {
      case_of("gelu", activation, [](auto& h) { return at::gelu(h); }),
      case_of("gelu, tanh", activation, [](auto& h) { return at::gelu(h, "tanh"); }),
      case_of("silu", activation, [](auto& h) { return at::silu(h); }),
      case_of("mish", activation, [](auto& h) { return at::mish(h); }),
      case_of("hardswish", activation, [](auto& h) { return at::hardswish(h); }),
      case_of("leaky_relu", activation, [](auto& h) { return at::leaky_relu(h, 0.3); }),
      case_of("leaky_relu, default slope", activation, [](auto& h) { return at::leaky_relu(h); }),
      case_of("layer_norm", activation, [](auto& h) { return at::layer_norm(h, {width}); }),
      case_of("layer_norm, its epsilon", activation, [](auto& h) { return at::layer_norm(h, {width}, {}, {}, 0.37); }),
      case_of("layer_norm over two dimensions", activation,
              [](auto& h) {
                return at::layer_norm(h, {rows, width});
              }),
      case_of("layer_norm twice", 2 * activation,
              [](auto& h) { return at::layer_norm(at::layer_norm(h, {width}, {}, {}, 0.1), {width}, {}, {}, 1e-9); }),
      case_of("square", activation, [](auto& h) { return h * h; }),
      case_of("gelu twice", 2 * activation, [](auto& h) { return at::gelu(at::gelu(h)); }),
      case_of("a product with gelu", 3 * activation, [](auto& h) { return at::gelu(h).square().mul(at::gelu(h)); }),
      case_of("views between", activation,
              [](auto& h) {
                return at::gelu(h).view({2, 3, width}).reshape({rows, width});
              }),
      case_of("relu and tanh keep their results anyway", 0, [](auto& h) { return at::tanh(at::relu(h)); }),
      case_of("times a number", 0, [](auto& h) { return h * 2.5; }),
      case_of("times a number tensor", 0, [](auto& h) { return h * torch::tensor(2.5, at::kDouble); }),
      case_of("times a mask", 0, [](auto& h) { return h * (h > 0); }),
      case_of("gelu, cloned", 0, [](auto& h) { return at::gelu(h).clone(); }),
      // Correct, but not cheaper.
      {"silu in place", -1, in_place([](at::Tensor& h) { at::silu_(h); })},
      {"hardswish in place", -1, in_place([](at::Tensor& h) { at::hardswish_(h); })},
      {"leaky_relu in place", -1, in_place([](at::Tensor& h) { at::leaky_relu_(h, 0.3); })},
      {"product in place", -1, [](auto& p) { return at::mm(hidden(p).mul_(other(p)), p[2]); }},
      {"in place behind", -1, [](auto& p) { return at::mm(at::gelu(hidden(p)).mul_(2).add_(1), p[2]); }},
      {"in place behind, a part", -1,
       [](auto& p) {
         auto y = at::gelu(hidden(p));
         y.slice(1, 0, 3).mul_(2);
         return at::mm(y, p[2]);
       }},
      {"in place behind, a view", -1,
       [](auto& p) {
         auto y = at::gelu(hidden(p));
         auto view = y.view({width, rows});
         view.mul_(3);
         return at::mm(y, p[2]) + at::mm(view.t(), p[2]);
       }},
      {"in place behind, without gradients", 0,
       [](auto& p) {
         auto y = at::gelu(hidden(p));
         {
           const at::NoGradGuard no_gradients;
           y.clamp_(-0.1, 0.4);
         }
         return at::mm(y, p[2]);
       }},
      {"layer_norm with weight and bias", activation,
       [](auto& p) { return at::mm(at::layer_norm(hidden(p), {width}, p[4], p[4], 0.2), p[2]); }},
      {"native_layer_norm, its mean and deviation as well", activation,
       [](auto& p) {
         const auto [y, mean, deviation] = at::native_layer_norm(hidden(p), {width}, p[4], {}, 0.2);
         return at::mm(y, p[2]) + mean * deviation;
       }},
      {"a LayerNorm of the other module's numbers", activation,
       [](auto& p) {
         const at::NoGradGuard no_gradients;  // this result has no node
         at::layer_norm(p[0], {width}, {}, {}, 0.9);
         const at::AutoGradMode gradients(true);
         return at::mm(at::layer_norm(hidden(p), {width}, {}, {}, 0.3), p[2]);
       }},
      {"SwiGLU", 2 * activation, [](auto& p) { return at::mm(at::silu(hidden(p)) * other(p), p[2]); }},
      {"a product with a row", activation, [](auto& p) { return at::mm(hidden(p) * p[4], p[2]); }},
      {"a product with a column", activation, [](auto& p) { return at::mm(hidden(p) * p[0].sum(1, true), p[2]); }},
      {"a product that promotes", activation,
       [](auto& p) { return at::mm(hidden(p).to(at::kFloat) * other(p), p[2]); }},
      {"a product of a transposed matrix", activation,
       [](auto& p) { return at::mm((at::mm(p[1], p[0].t()) * other(p).t()).t(), p[2]); }},
      {"used twice", activation,
       [](auto& p) {
         const auto y = at::gelu(hidden(p));
         return at::mm(y, p[2]) + at::mm(y, p[3]);
       }},
      {"transposed", activation, [](auto& p) { return at::mm(p[2], at::gelu(hidden(p)).t()).t(); }},
      {"a part", activation, [](auto& p) { return at::mm(at::gelu(hidden(p)).slice(1, 2, 6), p[2].slice(0, 1, 5)); }},
      {"3-D", activation,
       [](auto& p) {
         const auto h = at::linear(p[0].view({2, 3, width}), p[1], p[4]);
         return at::linear(at::gelu(h), p[2], p[4]).view({rows, width});
       }},
      {"seen as complex numbers", -1,
       [](auto& p) {
         const auto z = at::view_as_complex(at::gelu(hidden(p)).view({rows, width / 2, 2}));
         const auto w = at::view_as_complex(p[2].view({width, width / 2, 2}));
         return at::view_as_real(at::mm(z, w.t())).reshape({rows, -1});
       }},
      {"conjugated", -1,
       [](auto& p) {
         const auto z = (complex(p, 1) * complex(p, 3)).conj();
         return at::real(at::mm(z, complex(p, 1).t())) + at::real(z).sum();
       }},
      {"imaginary part of the conjugated", -1,
       [](auto& p) { return at::mm(at::imag((complex(p, 1) * complex(p, 3)).conj()), p[2]); }},
      {"negative view", -1, [](auto& p) { return at::mm(at::_neg_view(hidden(p) * other(p)), p[2]); }},
      {"detached", -1, [](auto& p) { return at::mm(at::gelu(hidden(p)).detach(), p[2]) + hidden(p); }},
      {"0-dim", -1, [](auto& p) { return at::gelu(p[4].sum()) * p[2].sum() * p[0]; }},
  };
}

struct Result {
  Outcome outcome;
  std::int64_t held = 0, left = 0;
};

template <class Scope>
Result run(const Forward& forward, const Parameters& leaves, bool retain = false) {
  Result result;
  ByteRecord record;
  at::Tensor output;
  {
    [[maybe_unused]] const std::optional<Scope> scope(std::in_place);
    output = forward(leaves);
  }
  record.leave_out(output);
  result.held = record.live();
  const auto seed = torch::randn(output.sizes(), at::detail::createCPUGenerator(5), output.options());
  output.backward(seed, retain);
  if (retain) output.backward(seed);
  result.outcome = {copies({output}), take_gradients(leaves), {}, random_state()};
  return result;
}
struct Nothing {};

// Counts the runs of an operation.
class Count {
 public:
  explicit Count(std::string name) {
    wanted() = std::move(name);
    number() = 0;
  }
  ~Count() { at::removeCallback(handle_); }
  operator int() const { return number(); }

 private:
  static std::string& wanted() {
    static std::string name;
    return name;
  }
  static int& number() {
    static int number;
    return number;
  }
  static std::unique_ptr<at::ObserverContext> note(const at::RecordFunction& operation) {
    number() += operation.name() == wanted();
    return nullptr;
  }
  at::CallbackHandle handle_ = at::addThreadLocalCallback(at::RecordFunctionCallback(&note));
};

}  // namespace

TEST_CASE("RebuildingScope: bitwise equal gradients, and exactly the expected memory") {
  const auto leaves = make_leaves();
  for (auto& each : cases()) {
    INFO(each.name);
    const auto plain = run<Nothing>(each.forward, leaves);
    const auto rebuilt = run<RebuildingScope>(each.forward, leaves);
    CHECK(difference(rebuilt.outcome, plain.outcome) == "");
    CHECK(difference(run<RebuildingScope>(each.forward, leaves, /*retain=*/true).outcome,
                     run<Nothing>(each.forward, leaves, true).outcome) == "");
    if (each.saved >= 0)
      CHECK(plain.held - rebuilt.held == each.saved);
    else
      CHECK(plain.held >= rebuilt.held);
  }
}

TEST_CASE("RebuildingScope: in and around checkpoints, and both") {
  const auto leaves = make_leaves();
  for (auto& each : cases()) {
    INFO(each.name);
    const auto plain = run<Nothing>(each.forward, leaves);
    int runs = 0;
    const auto counted = [&](const Parameters& p) {
      ++runs;
      return each.forward(p);
    };
    const auto inside = [&](const Parameters& p) {
      const RebuildingScope scope;
      return counted(p);
    };
    const auto checkpointed = [&](auto& f) {
      return [&f](const Parameters& p) { return ga::checkpoint([&f](const Parameters& q) { return f(q); }, p); };
    };
    CHECK(difference(run<Nothing>(checkpointed(inside), leaves).outcome, plain.outcome) == "");
    CHECK(runs == 2);
    CHECK(difference(run<Nothing>(checkpointed(inside), leaves, true).outcome,
                     run<Nothing>(each.forward, leaves, true).outcome) == "");
    CHECK(runs == 5);
    CHECK(difference(run<RebuildingScope>(checkpointed(counted), leaves).outcome, plain.outcome) == "");
    CHECK(difference(run<RebuildingScope>(checkpointed(inside), leaves).outcome, plain.outcome) == "");
    CHECK(runs == 9);
  }
}

TEST_CASE("RebuildingScope: second derivatives") {
  for (auto& each : cases()) {
    INFO(each.name);
    const auto leaves = make_leaves();
    const auto second = [&](bool rebuilding) {
      std::optional<RebuildingScope> scope;
      if (rebuilding) scope.emplace();
      const auto output = each.forward(leaves);
      scope.reset();
      const auto gradients =
          torch::autograd::grad({output.square().sum()}, leaves, {}, true, /*create_graph=*/true, true);
      auto sum = torch::zeros({}, at::kDouble);
      for (auto& gradient : gradients)
        if (gradient.defined() && gradient.requires_grad()) sum = sum + gradient.square().sum();
      if (sum.requires_grad()) sum.backward();
      auto all = copies(gradients);
      for (auto& gradient : take_gradients(leaves)) all.push_back(gradient);
      return all;
    };
    CHECK(same_bits(second(true), second(false)));
  }
}

TEST_CASE("RebuildingScope: other dtypes, NaN, infinity, no rows") {
  const Forward forward = [](const Parameters& p) { return at::mm(at::silu(hidden(p)) * at::gelu(other(p)), p[2]); };
  for (auto dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
    const auto leaves = make_leaves(dtype);
    const auto plain = run<Nothing>(forward, leaves), rebuilt = run<RebuildingScope>(forward, leaves);
    CHECK(difference(rebuilt.outcome, plain.outcome) == "");
    CHECK(plain.held - rebuilt.held == 3 * rows * width * static_cast<std::int64_t>(at::elementSize(dtype)));
  }
  auto special = make_leaves();
  special[0].detach()[0][0] = std::numeric_limits<double>::quiet_NaN();
  special[0].detach()[1][0] = std::numeric_limits<double>::infinity();
  CHECK(difference(run<RebuildingScope>(forward, special).outcome, run<Nothing>(forward, special).outcome) == "");
  const auto empty = make_leaves(at::kDouble, 0);
  CHECK(difference(run<RebuildingScope>(forward, empty).outcome, run<Nothing>(forward, empty).outcome) == "");
}

TEST_CASE("RebuildingScope: recomputes only the cheap operation, once for each use of its result") {
  const auto leaves = make_leaves();
  const auto runs = [&](const std::string& operation, auto&& step) {
    const Count count(operation);
    step();
    return int(count);
  };
  const Forward forward = [](const Parameters& p) { return at::mm(at::gelu(hidden(p)), p[2]); };
  const auto plain = [&] { run<Nothing>(forward, leaves); };
  const auto rebuilding = [&] { run<RebuildingScope>(forward, leaves); };
  CHECK(runs("aten::gelu", plain) == 1);
  CHECK(runs("aten::gelu", rebuilding) == 2);
  CHECK(runs("aten::mm", rebuilding) == runs("aten::mm", plain));
}

TEST_CASE("RebuildingScope: operations before the scope are not recomputed") {
  const auto leaves = make_leaves();
  const auto held = [&](bool inside) {
    ByteRecord record;
    std::optional<RebuildingScope> scope;
    if (inside) scope.emplace();
    const auto y = at::gelu(hidden(leaves));
    if (!inside) scope.emplace();
    auto z = at::mm(y, leaves[2]);
    scope.reset();
    record.leave_out(z);
    const auto bytes = [&] { return record.live(); };
    return std::pair(bytes(), z);
  };
  // The function holds `y` itself until it ends, so this compares the memory that backward adds.
  for (bool inside : {false, true}) {
    auto [bytes, z] = held(inside);
    const Count count("aten::gelu");
    z.sum().backward();
    CHECK(count == (inside ? 1 : 0));
    take_gradients(leaves);
  }
}

TEST_CASE("RebuildingScope: outer hooks receive the tensors that are not recomputed") {
  const auto leaves = make_leaves();
  int packed = 0, unpacked = 0;
  const auto pack = [&](const at::Tensor& tensor) { return ++packed, tensor; };
  const auto unpack = [&](const at::Tensor& tensor) { return ++unpacked, tensor; };
  const auto step = [&](bool rebuilding) {
    packed = unpacked = 0;
    at::Tensor z;
    {
      ga::SavedTensorHooks hooks(pack, unpack);
      std::optional<RebuildingScope> scope;
      if (rebuilding) scope.emplace();
      z = at::mm(at::gelu(hidden(leaves)), leaves[2]);
    }
    z.backward(torch::ones_like(z));
    return take_gradients(leaves);
  };
  const auto plain = step(false);
  CHECK(packed == 5);  // input and weights of both products, and gelu's input
  CHECK(same_bits(step(true), plain));
  CHECK(packed == 4);
  CHECK(unpacked == 4);
}

TEST_CASE("RebuildingScope: a tensor that changes in place after it was saved") {
  const auto leaves = make_leaves();
  const auto attempt = [&](bool source) {
    at::Tensor h, y, z;
    {
      const RebuildingScope scope;
      h = hidden(leaves);
      y = at::gelu(h);
      z = at::mm(y, leaves[2]);
    }
    const at::NoGradGuard no_gradients;
    (source ? h : y).add_(1);
    return z;
  };
  for (bool source : {true, false})
    REQUIRE_ERROR("must not change in place; change a clone() of it", attempt(source).sum().backward());
  take_gradients(leaves);
}

TEST_CASE("RebuildingScope: memory is freed with the graph, used or not, and finished operations hold nothing") {
  const auto leaves = make_leaves();
  for (auto& each : cases()) {
    INFO(each.name);
    for (int use = 0; use < 4; ++use) {
      ByteRecord record;
      {
        at::Tensor output;
        {
          const RebuildingScope scope;
          output = use == 3 ? ga::checkpoint(
                                  [&](const Parameters& p) {
                                    const RebuildingScope inside;
                                    return each.forward(p);
                                  },
                                  leaves)
                            : each.forward(leaves);
        }
        const auto seed = torch::ones_like(output);
        if (use > 0) output.backward(seed, /*retain_graph=*/use == 1);
        if (use > 1) {
          take_gradients(leaves);
          record.leave_out(output);
          CHECK(record.live() - static_cast<std::int64_t>(seed.nbytes()) <= 64);  // numbers
        }
      }
      take_gradients(leaves);
      CHECK(record.live() == 0);
    }
  }
}
