// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/checkpointed_sequential.hpp>
#include <gradaccum/detail/fitting/memory_fitter.hpp>
#include <gradaccum/grad_accumulator.hpp>
#include <gradaccum/memory_meter.hpp>
#include <gradaccum/policies/fit_memory.hpp>

#include "support/outcome.hpp"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace ga = gradaccum;
namespace inner = gradaccum::detail;
using namespace testing;

namespace {

torch::nn::Sequential stages(std::int64_t width = 16) {
  torch::manual_seed(1);
  torch::nn::Sequential all;
  for (int i = 0; i < 6; ++i) {
    all->push_back(torch::nn::Linear(width, width));
    all->push_back(torch::nn::GELU());
  }
  return all;
}

/// A search of a model with one checkpointed part.
struct Search {
  ga::CheckpointedSequential part{stages(), ga::CheckpointedSequentialOptions{.memory_budget = 1}};
  torch::nn::Sequential model{torch::nn::Linear(16, 16)};
  inner::CheckpointSearch search;

  Search() { search.find_parts(*model, {part}); }
  /// Reports three micro-batches. Returns whether the search changed its way.
  bool took(std::int64_t elements, double seconds_each, bool left = true) {
    const auto before = search.way();
    for (const double slower : {1.5, 1.0, 1.2}) {
      CHECK(search.way().most == before.most);
      search.took(elements, seconds_each * slower * static_cast<double>(elements), left);
    }
    return search.way().checkpointed != before.checkpointed || search.way().most != before.most;
  }
};

/// A small U-Net of three parts with different needs.
struct UNet : torch::nn::Module {
  UNet()
      : down(register_module("down", part(1, 8))),
        deep(register_module("deep", part(8, 16))),
        up(register_module("up", part(24, 8))),
        last(register_module("last", torch::nn::Conv2d(8, 1, 1))) {}
  static ga::CheckpointedSequential part(std::int64_t in, std::int64_t out) {
    torch::nn::Sequential block;
    for (auto from : {in, out}) {
      block->push_back(torch::nn::Conv2d(torch::nn::Conv2dOptions(from, out, 3).padding(1)));
      block->push_back(torch::nn::GroupNorm(2, out));
      block->push_back(torch::nn::ReLU());
    }
    return ga::CheckpointedSequential(block, ga::CheckpointedSequentialOptions{.memory_budget = ga::GiB});
  }
  at::Tensor forward(const at::Tensor& x) {
    const auto kept = down->forward(x);
    const auto below = torch::upsample_nearest2d(deep->forward(torch::max_pool2d(kept, 2)), {x.size(2), x.size(3)});
    return last->forward(up->forward(torch::cat({below, kept}, 1)));
  }
  ga::CheckpointedSequential down, deep, up;
  torch::nn::Conv2d last;
};

/// A chain of twelve stages in one part.
struct Stack : torch::nn::Module {
  Stack()
      : all(register_module(
            "all", ga::CheckpointedSequential(stages(), ga::CheckpointedSequentialOptions{.memory_budget = ga::GiB}))) {
  }
  at::Tensor forward(const at::Tensor& x) { return all->forward(x); }
  ga::CheckpointedSequential all;
};

/// Returns the peak of each of four updates of such a network.
template <class Network>
std::vector<std::int64_t> peaks_of_updates(const ga::FitMemory& memory, const at::Tensor& x) {
  torch::manual_seed(1);
  auto model = std::make_shared<Network>();
  torch::optim::SGD sgd(model->parameters(), 1e-3);
  ga::GradAccumulator optimizer(sgd);
  ga::FitMemory::Running fitted(memory);
  std::vector<std::int64_t> peaks;
  for (int update = 0; update < 4; ++update) {
    auto batch = x;
    const ga::MemoryMeter meter;
    fitted.backward(optimizer, model, batch, [](auto& m, auto& rows) { return m->forward(rows).square().mean(); });
    peaks.push_back(meter.peak_bytes());
    optimizer.step();
    optimizer.zero_grad();
  }
  return peaks;
}

/// Returns the bytes that a refusal names.
std::int64_t asked_for(const std::string& text) {
  const std::string before = "FitMemory: the budget must be at least ";
  REQUIRE(text.starts_with(before));
  CHECK_FALSE(contains(text, "memory_budget"));  // a part's budget is not the user's
  return std::stoll(text.substr(before.size()));
}

}  // namespace

TEST_CASE("CheckpointSearch: chooses larger micro-batches as long as they are faster") {
  Search s;
  CHECK(s.part->options().memory_budget == 0);  // everything is kept
  CHECK_FALSE(s.search.way().checkpointed);
  CHECK(s.took(4, 1.0));
  CHECK(s.search.way().checkpointed);
  CHECK(s.search.way().most == 8);
  s.search.share(4000);
  CHECK(s.part->options().memory_budget == 3000);
  CHECK(s.took(8, 0.5));
  CHECK(s.search.way().most == 16);
  s.search.share(8000);
  CHECK(s.search.budget() == 3000);  // the plan's budget
  CHECK(s.took(16, 0.6));
  CHECK(s.search.way().most == 8);  // the best
  CHECK_FALSE(s.search.searches());
  CHECK_FALSE(s.took(8, 9.0));
}

TEST_CASE("CheckpointSearch: everything is kept if that is faster, or if the whole batch fits") {
  Search s;
  CHECK_FALSE(s.took(4, 1.0, /*left=*/false));
  CHECK(s.search.searches());
  CHECK(s.took(4, 1.0));
  s.search.share(4000);
  CHECK(s.took(8, 0.99));
  CHECK_FALSE(s.search.way().checkpointed);
  CHECK(s.part->options().memory_budget == 0);
  CHECK_FALSE(s.search.searches());
}

TEST_CASE("CheckpointSearch: after a failure the other way remains, if there is one") {
  Search s;
  CHECK(s.search.fails());
  CHECK(s.search.way().checkpointed);
  CHECK_FALSE(s.search.fails());
  Search t;
  t.took(4, 1.0);
  CHECK(t.search.fails());
  CHECK_FALSE(t.search.way().checkpointed);
  CHECK(t.search.fails());
  inner::CheckpointSearch none;
  CHECK_FALSE(none.fails());
  none.took(1, 1, true);
  CHECK_FALSE(none.searches());
}

TEST_CASE("CheckpointSearch: each failure lowers the budget, until fails() returns false") {
  Search s;
  CHECK(s.search.fails());
  s.search.share(4000);
  int times = 0;
  while (s.search.fails(4)) ++times;
  CHECK(times > 20);
  CHECK(times <= 100);  // also if only a byte is missing
  CHECK_FALSE(s.search.fails());
}

TEST_CASE("CheckpointSearch: the model itself, and each part once") {
  ga::CheckpointedSequential part(stages(), ga::CheckpointedSequentialOptions{.memory_budget = 100});
  inner::CheckpointSearch search;
  search.find_parts(*part, {part});
  CHECK(search.fails());
  search.share(4000);
  CHECK(search.budget() == 3000);
  ga::CheckpointedSequential segmented(stages(), ga::CheckpointedSequentialOptions{.segments = 2});
  inner::CheckpointSearch none;
  REQUIRE_ERROR("must have memory_budget", none.find_parts(*part, {segmented}));
  CHECK(part->options().memory_budget == 3000);
}

TEST_CASE("FitMemory: checkpoints make room if not even a row fits, with the same bits") {
  const auto x = torch::randn({24, 40, 16});
  const auto train = [&](const ga::FitMemory& limits, bool checkpointed) {
    ga::FitMemory::Running memory(limits);
    auto blocks = stages();
    ga::CheckpointedSequential net(blocks, ga::CheckpointedSequentialOptions{.memory_budget = ga::GiB});
    torch::nn::Sequential model(net);
    auto plain = torch::nn::Sequential(blocks);
    torch::optim::SGD sgd(model->parameters(), 0.1);
    ga::GradAccumulator optimizer(sgd);
    for (int update = 0; update < 4; ++update) {
      auto batch = x;
      const ga::MemoryMeter meter;
      memory.backward(optimizer, model, batch, [](auto& m, auto& rows) { return m->forward(rows).square().mean(); });
      if (update > 0) CHECK(meter.peak_bytes() <= memory.budget + 256);
      optimizer.step();
      optimizer.zero_grad();
    }
    CHECK((memory.plan().checkpoint_budget > 0) == checkpointed);
    return std::pair(copies(model->parameters()), memory.plan());
  };
  // One row needs 12 activations of 2,560 bytes, and the gradients need 6,528.
  const auto [parameters, plan] = train({.budget = 30 * 1024}, true);
  CHECK(plan.layouts.front().rows >= 1);
  CHECK(plan.replays > 0);
  auto blocks = stages();
  torch::optim::SGD sgd(blocks->parameters(), 0.1);
  ga::GradAccumulator optimizer(sgd);
  for (int update = 0; update < 4; ++update) {
    blocks->forward(x).square().mean().backward();
    optimizer.step();
    optimizer.zero_grad();
  }
  for (std::size_t i = 0; i < parameters.size(); ++i)
    CHECK((parameters[i] - blocks->parameters()[i]).abs().max().item<float>() < 1e-5);
  CHECK(contains(error_of([&] { train({.budget = 12 * 1024}, true); }), "FitMemory: "));
  train({.budget = ga::GiB}, false);
}

TEST_CASE("FitMemory: every budget from the minimum of checkpoints on trains, and a refusal names the minimum") {
  const auto check = [](auto train, std::int64_t row) {
    const auto least = asked_for(error_of([&] { train(ga::FitMemory{.budget = row / 8}); }));
    CHECK(least < row);
    CHECK(asked_for(error_of([&] { train(ga::FitMemory{.budget = least - 1}); })) == least);
    for (auto percent : {100, 101, 105, 110, 125, 150, 175, 200, 300, 500}) {
      const ga::FitMemory memory{.budget = least * percent / 100};
      INFO("a budget of " << memory.budget << ", of which the least is " << least << ", and a row's " << row);
      const auto peaks = train(memory);
      // The first update measures stages in addition, or tries one row more.
      CHECK(peaks.front() <= memory.budget + std::max(row, memory.budget / 8));
      if (memory.budget < row) CHECK(peaks.front() <= memory.budget + memory.budget / 6);
      for (std::size_t i = 1; i < peaks.size(); ++i)
        CHECK(peaks[i] <= memory.budget + std::max(row, memory.budget / 8));
      CHECK(peaks.back() <= memory.budget);
    }
  };
  torch::manual_seed(2);
  const auto images = torch::randn({6, 1, 32, 32}), rows = torch::randn({6, 40, 16});
  check([&](const ga::FitMemory& memory) { return peaks_of_updates<UNet>(memory, images); }, 804'756);
  check([&](const ga::FitMemory& memory) { return peaks_of_updates<Stack>(memory, rows); }, 47'500);
}

TEST_CASE("FitMemory: the memory of measuring stages does not count afterwards") {
  auto model = std::make_shared<Stack>();
  torch::optim::SGD sgd(model->parameters(), 1e-3);
  ga::GradAccumulator optimizer(sgd);
  const auto least = asked_for(error_of([&] { peaks_of_updates<Stack>({.budget = 4096}, torch::randn({6, 40, 16})); }));
  ga::FitMemory::Running memory({.budget = least * 11 / 10});
  bool measures = false;
  const auto update = [&](std::int64_t length) {
    auto batch = torch::randn({6, length, 16});
    memory.backward(optimizer, model, batch, [&](auto& m, auto& rows) {
      if (std::exchange(measures, false)) torch::empty({memory.budget});
      return m->forward(rows).square().mean();
    });
    optimizer.step();
    optimizer.zero_grad();
    return memory.plan().checkpoint_budget;
  };
  measures = true;
  const auto budget = update(40);
  CHECK(budget > 0);
  CHECK(update(40) == budget);
  measures = true;
  update(36);
  CHECK(update(40) == budget);
}

TEST_CASE("FitMemory: running out of memory with everything recomputed is refused soon") {
  auto model = std::make_shared<Stack>();
  torch::optim::SGD sgd(model->parameters(), 1e-3);
  ga::GradAccumulator optimizer(sgd);
  const auto x = torch::randn({6, 40, 16});
  ga::FitMemory::Running memory(
      {.budget = asked_for(error_of([&] { peaks_of_updates<Stack>({.budget = 4096}, x); })) * 2});
  const auto update = [&](bool fails) {
    auto batch = x;
    int calls = 0;
    const auto objective = [&](auto& m, auto& rows) {
      ++calls;
      const auto loss = m->forward(rows).square().mean();
      TORCH_CHECK_WITH(OutOfMemoryError, !fails, "out of memory");
      return loss;
    };
    const auto text = error_of([&] { memory.backward(optimizer, model, batch, objective); });
    if (!fails) optimizer.step();
    optimizer.zero_grad();
    INFO(text);
    CHECK(contains(text, "ran out of memory twice and cannot be divided further") == fails);
    return calls;
  };
  for (int i = 0; i < 4; ++i) update(false);
  CHECK(memory.plan().checkpoint_budget > 0);
  CHECK(update(true) < 40);
}

TEST_CASE("CheckpointedSequential: a budget can be changed, and removed") {
  ga::CheckpointedSequential net(stages(), ga::CheckpointedSequentialOptions{.memory_budget = 20'000});
  const auto x = torch::randn({20, 16});
  net->forward(x).sum().backward();
  CHECK(net->plan().memory_budget == 20'000);
  net->set_memory_budget(12'000);
  net->forward(x).sum().backward();
  CHECK(net->plan().memory_budget == 12'000);
  CHECK(net->plan().predicted.peak_bytes <= 12'000);
  net->set_memory_budget(0);
  net->forward(x).sum().backward();
  CHECK_FALSE(net->plan().memory_budget);
  CHECK_THROWS_AS(
      [&] {
        net->set_memory_budget(1);
        net->forward(x);
      }(),
      c10::OutOfMemoryError);
  REQUIRE_ERROR("memory_budget must be >= 0", net->set_memory_budget(-1));
  ga::CheckpointedSequential segmented(stages(), ga::CheckpointedSequentialOptions{.segments = 2});
  REQUIRE_ERROR("it has segments", segmented->set_memory_budget(1));
}
