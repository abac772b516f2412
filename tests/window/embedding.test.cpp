// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/embedding.hpp>
#include <gradaccum/grad_accumulator.hpp>
#include <gradaccum/gradients.hpp>
#include <gradaccum/optim/adamw.hpp>

#include <functional>
#include <limits>
#include <thread>
#include <vector>

namespace ga = gradaccum;

namespace {

constexpr std::int64_t rows = 50, width = 5;

at::Tensor table(at::ScalarType dtype = at::kFloat) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(1);
  return torch::randn({rows, width}, generator).to(dtype).requires_grad_();
}
/// Makes tokens of one micro-batch, with repetitions.
at::Tensor tokens(int micro_batch, at::IntArrayRef shape = {2, 9}) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(100 + static_cast<std::uint64_t>(micro_batch));
  return torch::randint(0, 12, shape, generator, torch::kLong);
}
at::Tensor loss_of(const at::Tensor& looked_up, int micro_batch) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(200 + static_cast<std::uint64_t>(micro_batch));
  return (looked_up * torch::randn(looked_up.sizes(), generator).to(looked_up.dtype())).sum();
}

using LookUp = std::function<at::Tensor(const at::Tensor&, const at::Tensor&)>;
const LookUp theirs = [](auto& ids, auto& weight) { return torch::embedding(weight, ids); };
const LookUp ours = [](auto& ids, auto& weight) { return ga::embedding(ids, weight); };

/// Returns the sum of several micro-batches' gradients.
at::Tensor summed(const LookUp& look_up, at::Tensor weight, int micro_batches = 4, at::IntArrayRef shape = {2, 9}) {
  for (int i = 0; i < micro_batches; ++i) loss_of(look_up(tokens(i, shape), weight), i).backward();
  return weight.grad();
}

/// Returns whether all bits are equal, also those of NaN.
bool same(const at::Tensor& a, const at::Tensor& b) {
  const auto bits = [](const at::Tensor& t) { return t.detach().contiguous().view({-1}).view(at::kByte); };
  return a.defined() && b.defined() && a.dtype() == b.dtype() && a.sizes() == b.sizes() && bits(a).equal(bits(b));
}

}  // namespace

TEST_CASE("embedding: gradients of a window are LibTorch's, to the bit") {
  for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf})
    for (const auto& shape : std::vector<std::vector<std::int64_t>>{{2, 9}, {1}, {3, 1, 4}, {}, {0}, {200}}) {
      INFO(dtype << ", tokens " << at::IntArrayRef(shape));
      CHECK(same(summed(ours, table(dtype), 4, shape), summed(theirs, table(dtype), 4, shape)));
    }
  // A sparse gradient is summed occurrence by occurrence, with other rounding.
  const auto one_by_one = [](auto& ids, auto& weight) {
    return torch::embedding(weight, ids, -1, false, /*sparse=*/true);
  };
  auto weight = table();
  weight.mutable_grad() = torch::zeros_like(weight);
  CHECK_FALSE(same(summed(one_by_one, weight), summed(theirs, table())));
}

TEST_CASE("embedding: values, other kinds of indices, and the padding row") {
  const auto weight = table();
  CHECK(same(ga::embedding(tokens(0), weight).detach(), torch::embedding(weight, tokens(0)).detach()));
  const LookUp int32 = [](auto& ids, auto& weight) { return ga::embedding(ids.to(at::kInt), weight); };
  CHECK(same(summed(int32, table()), summed(theirs, table())));
  const LookUp strided = [](auto& ids, auto& weight) { return ga::embedding(ids.t().contiguous().t(), weight); };
  CHECK(same(summed(strided, table()), summed(theirs, table())));
  for (std::int64_t padding : {0, 3, 49}) {
    const LookUp our_padding = [&](auto& ids, auto& weight) { return ga::embedding(ids, weight, {padding}); };
    const LookUp their_padding = [&](auto& ids, auto& weight) { return torch::embedding(weight, ids, padding); };
    const auto gradient = summed(our_padding, table());
    CHECK(same(gradient, summed(their_padding, table())));
    CHECK(same(gradient[padding], torch::zeros({width})));
    CHECK(same(gradient, summed(theirs, table())) == (padding == 49));  // no token has this index
  }
  REQUIRE_ERROR("embedding: weight must be [rows, width], got [50]", ga::embedding(tokens(0), torch::zeros({50})));
  REQUIRE_ERROR("padding_idx must be less than the rows of weight, 50, got 50", ga::embedding(tokens(0), weight, {50}));
  REQUIRE_ERROR("index out of range", ga::embedding(torch::tensor({50}), weight));
}

TEST_CASE("embedding: rows are added in windows of an accumulator, which tracks changes") {
  auto weight = table();
  torch::optim::SGD sgd({weight}, 0.1);
  ga::GradAccumulator optimizer(sgd, {.steps = 3});
  for (int i = 0; i < 6; ++i) {
    if (i % 3 == 1) weight.grad().data()[48].fill_(std::numeric_limits<float>::quiet_NaN());  // undetected, unread
    ga::embedding(torch::tensor({7}), weight).sum().backward();
    if (i % 3 == 1) CHECK(weight.grad()[48].isnan().all().item<bool>());
    optimizer.step();
    if (i % 3 == 1) weight.grad().data()[48].fill_(0);
    optimizer.zero_grad();
  }
  CHECK(optimizer.updates() == 2);
}

TEST_CASE("embedding: only rows that were looked up are written, if there are no hooks") {
  auto weight = table();
  const auto lonely = torch::tensor({7});
  ga::embedding(tokens(0), weight).sum().backward();
  auto sum = weight.grad();
  const auto version = sum._version();
  ga::embedding(lonely, weight).sum().backward();
  CHECK(weight.grad().is_same(sum));
  CHECK(sum._version() > version);  // the change is visible, as with LibTorch's sum
  // Rows that were not looked up are not read; adding a whole gradient of zeros would be 0 + NaN.
  sum.index_put_({49}, std::numeric_limits<float>::quiet_NaN());
  ga::embedding(lonely, weight).sum().backward();
  CHECK(sum[49].isnan().all().item<bool>());
  CHECK_FALSE(sum.slice(0, 0, 49).isnan().any().item<bool>());
  ga::embedding(torch::tensor({49}), weight, {.padding_idx = 49}).sum().backward();
  CHECK(sum[49].isnan().all().item<bool>());
}

TEST_CASE("embedding: in an accumulator's window, with weights and every way to step") {
  const auto train = [](const LookUp& look_up, ga::GradAccumulatorOptions options, bool weighted) {
    auto weight = table(options.accumulate_in ? at::kBFloat16 : at::kFloat);
    ga::optim::AdamW adamw({weight}, ga::optim::AdamWOptions(0.1));
    ga::GradAccumulator optimizer(adamw, options);
    for (int i = 0; i < 9; ++i) {
      const auto loss = loss_of(look_up(tokens(i), weight), i);
      if (weighted)
        optimizer.backward(ga::Loss{loss, 1.0 + i % 3});
      else
        loss.backward();
      optimizer.step();
      optimizer.zero_grad();
    }
    return weight.detach();
  };
  for (const bool weighted : {false, true})
    for (const auto& options : {ga::GradAccumulatorOptions{.steps = 3},
                                {.steps = 1},
                                {.steps = 9},
                                {.steps = 3, .accumulate_in = at::kFloat}})
      CHECK(same(train(ours, options, weighted), train(theirs, options, weighted)));
  const ga::GradAccumulatorOptions in_backward{.steps = 3, .in_backward = true};
  CHECK(same(train(ours, in_backward, true), train(theirs, in_backward, true)));
  CHECK_FALSE(same(train(ours, {.steps = 3}, true), train(theirs, {.steps = 3}, false)));
}

TEST_CASE("embedding: hooks receive a whole gradient") {
  const auto hears = [](const auto& listen) {
    auto weight = table();
    ga::embedding(tokens(0), weight).sum().backward();
    int times = 0;
    listen(weight, times);
    ga::embedding(tokens(1), weight).sum().backward();
    return times;
  };
  CHECK(hears([](at::Tensor& weight, int& times) {
          weight.register_hook([&](const at::Tensor& gradient) { times += gradient.sizes() == weight.sizes(); });
        }) == 1);
  struct Hook : torch::autograd::PostAccumulateGradHook {
    int* times;
    explicit Hook(int* counter) : times(counter) {}
    void operator()(const at::Tensor&) override { ++*times; }
  };
  CHECK(hears([](at::Tensor& weight, int& times) {
          torch::autograd::impl::set_post_acc_grad_hooks(weight, std::make_unique<Hook>(&times));
        }) == 1);
}

TEST_CASE("embedding: other ways to compute gradients give LibTorch's") {
  auto weight = table(), peer = table();
  summed(ours, weight), summed(theirs, peer);
  const auto before = weight.grad().clone();

  const auto alone = torch::autograd::grad({loss_of(ga::embedding(tokens(7), weight), 7)}, {weight})[0];
  CHECK(same(alone, torch::autograd::grad({loss_of(torch::embedding(peer, tokens(7)), 7)}, {peer})[0]));
  CHECK(same(weight.grad(), before));  // unchanged

  auto other = torch::ones({}).requires_grad_();
  torch::autograd::backward({loss_of(ga::embedding(tokens(7), weight), 7) * other}, {}, {}, false, {other});
  CHECK(same(weight.grad(), before));

  const auto twice = [](const LookUp& look_up, at::Tensor table) {
    const auto loss = loss_of(look_up(tokens(1), table), 1);
    loss.backward({}, /*retain_graph=*/true);
    loss.backward();
    return table.grad();
  };
  CHECK(same(twice(ours, table()), twice(theirs, table())));

  const auto second = [](const LookUp& look_up, at::Tensor table) {
    const auto scale = torch::full({}, 3.0, torch::kFloat).requires_grad_();
    table.mutable_grad() = torch::ones_like(table);
    const auto loss = (look_up(tokens(1), table) * scale).pow(2).sum();
    loss.backward({}, /*retain_graph=*/true, /*create_graph=*/true);
    table.grad().pow(2).sum().backward();
    const auto gradient = scale.grad().clone();
    for (auto& leaf : {table, scale}) leaf.mutable_grad().reset();  // avoids a cycle of references
    return gradient;
  };
  CHECK(same(second(ours, table()), second(theirs, table())));

  const auto no_leaf = [](const LookUp& look_up, at::Tensor table) {
    for (int i = 0; i < 2; ++i) loss_of(look_up(tokens(i), table * 2), i).backward();
    return table.grad();
  };
  CHECK(same(no_leaf(ours, table()), no_leaf(theirs, table())));

  const auto frozen = table().detach();
  CHECK_FALSE(ga::embedding(tokens(0), frozen).requires_grad());
  const at::NoGradGuard no_grad;
  CHECK_FALSE(ga::embedding(tokens(0), weight).requires_grad());
}

TEST_CASE("embedding: gradients of another layout are added to as LibTorch does") {
  const auto after = [](const LookUp& look_up, const auto& prepare) {
    auto weight = table();
    weight.mutable_grad() = prepare(weight);
    return summed(look_up, weight).to_dense();
  };
  const auto check = [&](const auto& prepare) { CHECK(same(after(ours, prepare), after(theirs, prepare))); };
  check([](at::Tensor& weight) { return torch::ones_like(weight); });
  check([](at::Tensor& weight) { return torch::ones({width, rows}).t().expand_as(weight); });
  check([](at::Tensor&) { return torch::eye(rows, width).to_sparse(); });
}

TEST_CASE("embedding: a weight used twice, a model that changes before backward, and threads") {
  const auto tied = [](const LookUp& look_up) {
    auto weight = table(at::kDouble);
    for (int i = 0; i < 3; ++i) loss_of(torch::matmul(look_up(tokens(i), weight), weight.t()), i).backward();
    return weight.grad();
  };
  CHECK(torch::allclose(tied(ours), tied(theirs), 1e-13, 1e-13));

  const auto stepped = [](const LookUp& look_up) {
    auto weight = table();
    loss_of(look_up(tokens(0), weight), 0).backward();
    const auto loss = loss_of(look_up(tokens(1), weight), 1);
    {
      const at::NoGradGuard no_grad;
      weight.mul_(2);
    }
    loss.backward();
    return weight.grad();
  };
  CHECK(same(stepped(ours), stepped(theirs)));

  auto weight = table(at::kDouble);
  loss_of(ga::embedding(tokens(0), weight), 0).backward();
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 4; ++thread)
    threads.emplace_back([&] {
      for (int i = 0; i < 50; ++i) ga::embedding(tokens(1), weight).sum().backward();
    });
  for (auto& thread : threads) thread.join();
  auto expected = table(at::kDouble);
  loss_of(ga::embedding(tokens(0), expected), 0).backward();
  (200 * torch::embedding(expected, tokens(1)).sum()).backward();
  CHECK(torch::allclose(weight.grad(), expected.grad(), 1e-12, 1e-12));
}

TEST_CASE("embedding: on a device only the rows that were looked up are added, and no others", "[cuda]") {
  if (!torch::cuda::is_available()) SKIP("needs a CUDA device");
  const auto summed_there = [](const auto& look_up, std::int64_t padding) {
    auto weight = table().detach().to(at::kCUDA).requires_grad_();
    weight.mutable_grad() = torch::zeros_like(weight);
    for (int i = 0; i < 4; ++i) {
      const auto ids = tokens(i);
      const auto whole_numbers = (ids.unsqueeze(-1) + torch::arange(width)).to(at::kCUDA);  // exact in any order
      (look_up(ids.to(at::kCUDA), weight, padding) * whole_numbers).sum().backward();
    }
    return weight.grad().cpu();
  };
  const auto here = [](const auto& ids, const auto& weight, std::int64_t padding) {
    return ga::embedding(ids, weight, {padding});
  };
  const auto there = [](const auto& ids, const auto& weight, std::int64_t padding) {
    return torch::embedding(weight, ids, padding);
  };
  for (const std::int64_t padding : {-1, 0, 3}) CHECK(same(summed_there(here, padding), summed_there(there, padding)));
  CHECK_FALSE(same(summed_there(here, 3), summed_there(there, -1)));
}

TEST_CASE("embedding: on a device 16-bit sums equal LibTorch's, which are rounded once per backward pass", "[cuda]") {
  if (!torch::cuda::is_available()) SKIP("needs a CUDA device");
  const auto ids = torch::full({1000}, 7, torch::dtype(at::kLong).device(at::kCUDA));
  const auto summed = [&](const auto& look_up) {
    auto weight = torch::zeros({2000, 4}, torch::dtype(at::kBFloat16).device(at::kCUDA)).requires_grad_();
    weight.mutable_grad() = torch::zeros_like(weight);
    look_up(weight).sum().backward();
    return weight.grad()[7].cpu();
  };
  const auto ours = summed([&](const at::Tensor& weight) { return ga::embedding(ids, weight); });
  const auto theirs = summed([&](const at::Tensor& weight) { return torch::embedding(weight, ids); });
  CHECK(ours.equal(theirs));  // on a GPU 1000; rounded at each look-up it would stop at 256
}
