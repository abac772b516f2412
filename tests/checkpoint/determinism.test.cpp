// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/checkpoint.hpp>
#include <gradaccum/detail/checkpoint/forward_state.hpp>
#include <gradaccum/detail/checkpoint/recomputation.hpp>

#include "support/leaves.hpp"
#include "support/outcome.hpp"

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>

namespace ga = gradaccum;
namespace nn = torch::nn;
namespace inner = gradaccum::detail;
using namespace testing;

// Functions whose second run differs, and the errors; and where the second run ends.
namespace {

at::Tensor randoms(at::IntArrayRef shape, at::ScalarType dtype = at::kDouble, int seed = 3) {
  torch::manual_seed(seed);
  return torch::randn(shape, dtype);
}

// Returns the error of a backward pass through `part(x, first run)`.
template <class Part>
std::string error_of_second_run(Part part, ga::CheckpointOptions options = {}) {
  const auto x = leaf(randoms({4, 3}));
  const auto runs = std::make_shared<int>(0);
  const auto y = ga::checkpoint(
      options, [=](const at::Tensor& t) { return part(t, ++*runs == 1); }, x);
  torch::manual_seed(11);
  const auto random = random_state();
  const auto error = testing::error_of([&] { uneven_sum(y).backward(); });
  if (options.preserve_rng) CHECK(same_bits(random_state(), random));
  CHECK(at::GradMode::is_enabled());
  CHECK(inner::SavingScope::innermost() == nullptr);
  return error;
}

std::string says(const std::string& what) {
  return "checkpoint: the function must do the same when it runs again, but " + what;
}

}  // namespace

TEST_CASE("checkpoint: a difference of the second run is named, with the operation") {
  using at::Tensor;
  CHECK(error_of_second_run([](const Tensor& t, bool) { return t.exp().sin().tanh(); }) == "");
  CHECK(error_of_second_run([](const Tensor& t, bool first) { return (first ? t : t.slice(0, 0, 2)).exp().sin(); }) ==
        says("at aten::exp: a saved tensor was Double [4, 3] on cpu and is Double [2, 3] on cpu"));
  CHECK(error_of_second_run([](const Tensor& t, bool first) {
          return t.exp().to(first ? at::kDouble : at::kFloat).sin();
        }) == says("at aten::sin: a saved tensor was Double [4, 3] on cpu and is Float [4, 3] on cpu"));
  CHECK(error_of_second_run([](const Tensor& t, bool first) { return first ? t.exp().sin().tanh() : t.exp().sin(); }) ==
        says("at aten::sin: it ended after saving 2 tensors of 3"));
  CHECK(error_of_second_run([](const Tensor& t, bool first) { return first ? t.exp() : t.neg(); }) ==
        says("at aten::neg: it ended after saving 0 tensors of 1"));
  const auto saves_more = [](const Tensor& t, bool first) { return first ? t.exp().sin() : t.exp().sin().tanh(); };
  CHECK(error_of_second_run(saves_more, {.early_stop = false}) == says("at aten::tanh: it saves more than 2 tensors"));
  CHECK(error_of_second_run(saves_more) == "");  // later saved tensors are not needed
}

TEST_CASE("checkpoint: check_content detects changed contents") {
  using at::Tensor;
  const auto doubles = [](const Tensor& t, bool first) { return (first ? t : t * 2).exp().sin(); };
  CHECK(error_of_second_run(doubles) == "");
  CHECK(error_of_second_run(doubles, {.check_content = true}) ==
        says("at aten::exp: the contents of a saved tensor (Double [4, 3] on cpu) are not the same"));
  const auto one_bit = [](const Tensor& t, bool first) {
    auto other = t.detach().clone();
    if (!first) other[3][2] = std::nextafter(other[3][2].item<double>(), 9.0);
    return t.exp() * other;
  };
  CHECK(error_of_second_run(one_bit) == "");
  CHECK(error_of_second_run(one_bit, {.check_content = true}) ==
        says("at aten::mul: the contents of a saved tensor (Double [4, 3] on cpu) are not the same"));
  const auto not_a_number = [](const Tensor& t, bool) { return (t / 0).sqrt().log() * t; };
  CHECK(error_of_second_run(not_a_number, {.check_content = true}) == "");
}

TEST_CASE("checkpoint: contents are compared by all their bytes") {
  const auto a = randoms({5, 7}, at::kFloat);
  const auto hash = inner::content_hash(a);
  CHECK(hash == inner::content_hash(a.t().contiguous().t()));  // by value, not by layout
  for (int i = 0; i < a.numel(); ++i) {
    auto b = a.clone();
    b.view(-1)[i] += 1;
    CHECK(inner::content_hash(b) != hash);
  }
  CHECK(inner::content_hash(torch::full({1}, 0.0)) != inner::content_hash(torch::full({1}, -0.0)));
  CHECK(inner::content_hash(a.to(at::kBFloat16)) != inner::content_hash(a.to(at::kHalf)));
  CHECK(inner::content_hash(torch::arange(3, at::kByte).to(at::kBool)) !=
        inner::content_hash(torch::ones({3}, at::kBool)));
  CHECK(inner::content_hash(torch::empty({0})) != 0);
  const auto z = at::complex(a, a);
  CHECK(inner::content_hash(z.conj()) == inner::content_hash(z.conj().resolve_conj()));
  CHECK(inner::content_hash(z.conj()) != inner::content_hash(z));
}

TEST_CASE("checkpoint: random numbers that other code draws in between are detected") {
  using at::Tensor;
  const std::string message = "random numbers were drawn elsewhere in between";
  const auto dropout = [](const Tensor& t) { return at::dropout(t.exp(), 0.5, true).sin(); };
  CHECK(error_of_second_run([&](const Tensor& t, bool) { return dropout(dropout(t)); }) == "");
  const auto another_thread = [&](const Tensor& t, bool first) {
    auto y = dropout(t);
    if (first) std::thread([] { torch::rand({5}); }).join();
    return dropout(y);
  };
  const auto error = error_of_second_run(another_thread);
  CHECK(contains(error, says("at aten::exp: " + message)));
  const auto a_round = [&](const Tensor& t, bool first) {  // as many as the generator makes in one call
    auto y = dropout(t);
    if (first) std::thread([] { torch::rand({624}, at::kFloat); }).join();
    return dropout(y);
  };
  CHECK(contains(error_of_second_run(a_round), message));
  const auto more = [&](const Tensor& t, bool first) {
    return dropout(first ? dropout(t) : dropout(t + torch::rand({1})));
  };
  CHECK(contains(error_of_second_run(more), message));
  const auto fewer = [&](const Tensor& t, bool first) { return dropout(first ? t + torch::rand({1}) : t); };
  CHECK(contains(error_of_second_run(fewer), message));
  CHECK(error_of_second_run(another_thread, {.preserve_rng = false}) == "");
  CHECK(contains(error_of_second_run(fewer, {.preserve_rng = false, .check_content = true}), "contents"));
}

TEST_CASE("checkpoint: a function that sets the seed") {
  const auto x = leaf(randoms({40}));
  const auto function = [](const at::Tensor& t) {
    auto y = at::dropout(t, 0.5, true).exp();
    torch::manual_seed(17);
    return at::dropout(y, 0.5, true).exp();
  };
  CHECK(difference(outcome([&] { return ga::checkpoint(function, x); }, {x}),
                   outcome([&] { return function(x); }, {x})) == "");
}

TEST_CASE("checkpoint: preserve_rng = false recomputes with other random numbers") {
  const auto x = leaf(randoms({1000}));
  torch::manual_seed(5);
  const auto y = ga::checkpoint(
      {.preserve_rng = false}, [](const at::Tensor& t) { return at::dropout(t, 0.5, true).exp(); }, x);
  y.sum().backward();
  const auto dropped = (take_gradients({x})[0] == 0), expected = (y == 1);
  const auto same = (dropped == expected).sum().item<std::int64_t>();
  CHECK(same > 300);
  CHECK(same < 700);
}

TEST_CASE("checkpoint: the second run ends with the last tensor that backward needs") {
  const auto runs_of = [](bool early_stop, bool backward_needs_all) {
    const auto w = leaf(randoms({3, 3})), x = leaf(randoms({3, 3}));
    int after = 0, between = 0;
    const auto function = [&](const at::Tensor& t) {
      const auto a = t.mm(w).tanh();
      ++between;
      auto b = a.mm(w).exp();
      ++after;
      return std::pair(a, b + 1);
    };
    const auto [a, b] = ga::checkpoint({.early_stop = early_stop}, function, x);
    (backward_needs_all ? uneven_sum(b) : uneven_sum(a)).backward();
    return std::pair(between - 1, after - 1);
  };
  CHECK(runs_of(false, true) == std::pair(1, 1));
  CHECK(runs_of(true, true) == std::pair(1, 0));
  CHECK(runs_of(false, false) == std::pair(1, 1));
}

TEST_CASE("checkpoint: the second run restores only the remaining part of a graph") {
  const auto x = leaf(randoms({3, 3}));
  int after = 0;
  const auto function = [&](const at::Tensor& t) {
    auto a = t.tanh();
    auto b = t.exp().sin();
    ++after;
    return std::pair(a, b.exp());
  };
  auto [a, b] = ga::checkpoint(function, x);
  b.reset();  // with the operations before it
  uneven_sum(a).backward();
  CHECK(after == 1);
  const auto ours = take_gradients({x});
  uneven_sum(x.tanh()).backward();
  CHECK(same_bits(ours, take_gradients({x})));
}

TEST_CASE("checkpoint: the second run ends with the last operation that saves") {
  const auto x = leaf(randoms({3, 3})), one = torch::ones({3, 3}, at::kDouble);
  const auto function = [one](const at::Tensor& t) { return (t.exp().sin() + one).clone(); };
  static std::vector<std::string> names;
  const auto count = [](const char* name) { return std::count(names.begin(), names.end(), name); };
  const auto note = [](const at::RecordFunction& operation) -> std::unique_ptr<at::ObserverContext> {
    names.push_back(operation.name());
    return nullptr;
  };
  for (bool early_stop : {false, true}) {
    const auto y = ga::checkpoint({.early_stop = early_stop}, function, x).sum();
    names.clear();
    const auto handle =
        at::addThreadLocalCallback(at::RecordFunctionCallback(note).scopes({at::RecordScope::FUNCTION}));
    y.backward();
    at::removeCallback(handle);
    CHECK(count("aten::exp") == 1);
    CHECK(count("aten::sin") == 1);  // ends when it saves
    CHECK(count("aten::add") == (early_stop ? 0 : 1));
    take_gradients({x});
  }
}

TEST_CASE("checkpoint: a function that catches everything does not stop the second run from ending") {
  const auto x = leaf(randoms({3, 3}));
  for (bool early_stop : {true, false}) {
    int caught = 0, finished = 0;
    const auto function = [&](const at::Tensor& t) {
      at::Tensor y = t.exp(), z = t;
      try {
        z = y.sin();
      } catch (...) {
        ++caught;
      }
      try {
        z = z.tanh();
      } catch (...) {
        ++caught;
      }
      ++finished;
      return z;
    };
    const auto expected = outcome([&] { return function(x); }, {x});
    CHECK(difference(outcome([&] { return ga::checkpoint({.early_stop = early_stop}, function, x); }, {x}), expected) ==
          "");
    CHECK(caught == (early_stop ? 1 : 0));
    CHECK(finished == 3);
  }
}

TEST_CASE("checkpoint: a function that catches std::exception does not catch the end of the second run") {
  const auto x = leaf(randoms({3, 3}));
  int caught = 0;
  const auto function = [&](const at::Tensor& t) {
    try {
      return t.exp().sin();
    } catch (const std::exception&) {
      ++caught;
      return t;
    }
  };
  uneven_sum(ga::checkpoint(function, x)).backward();
  CHECK(caught == 0);
}

TEST_CASE("checkpoint: a module in another mode, or with another parameter frozen, in the second run") {
  const auto x = leaf(randoms({4, 3}, at::kFloat));
  nn::Sequential net(nn::Linear(3, 3), nn::Dropout(0.5), nn::Linear(3, 3));
  auto y = ga::checkpoint(net, x);
  net->eval();
  CHECK(contains(testing::error_of([&] { y.sum().backward(); }), says("at aten::addmm: random numbers")));
  net->train();
  y = ga::checkpoint(net, x);
  for (auto& parameter : net->parameters()) parameter.set_requires_grad(false);
  CHECK(contains(testing::error_of([&] { y.sum().backward(); }), says("")));
}
