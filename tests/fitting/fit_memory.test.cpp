// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/amp_scaler.hpp>
#include <gradaccum/autocast.hpp>
#include <gradaccum/data/length_buckets.hpp>
#include <gradaccum/data/tensor_batches.hpp>
#include <gradaccum/detail/checkpoint/forward_state.hpp>
#include <gradaccum/grad_accumulator.hpp>
#include <gradaccum/memory_meter.hpp>
#include <gradaccum/optim/adamw.hpp>
#include <gradaccum/policies/data_parallel.hpp>
#include <gradaccum/policies/fit_memory.hpp>
#include <gradaccum/policies/save_state.hpp>
#include <gradaccum/trainer.hpp>
#include <gradaccum/training_state.hpp>

#include <c10/util/ScopeExit.h>

#include "fitting/failing_allocator.hpp"
#include "support/files.hpp"
#include "support/outcome.hpp"
#include "support/ranks.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace ga = gradaccum;
using namespace testing;

namespace {

using ga::data::Batch;
using Rows = std::vector<std::int64_t>;

/// Networks whose forward pass changes random numbers or statistics; all but one in float64.
torch::nn::Sequential network(const std::string& kind) {
  torch::manual_seed(1);
  torch::nn::Sequential net(torch::nn::Linear(6, 32), torch::nn::Tanh());
  if (kind == "dropout") net->push_back(torch::nn::Dropout(0.4));
  if (kind == "norm") net->push_back(torch::nn::BatchNorm1d(32));
  net->push_back(torch::nn::Linear(32, 3));
  net->to(kind == "float" ? torch::kFloat : torch::kDouble);
  return net;
}

std::vector<Batch> batches_of(const Rows& sizes, at::ScalarType dtype = torch::kDouble) {
  torch::manual_seed(2);
  std::vector<Batch> all;
  for (const auto rows : sizes) all.push_back({torch::randn({rows, 6}, dtype), torch::randn({rows, 3}, dtype)});
  return all;
}

at::Tensor objective(torch::nn::Sequential& net, const Batch& batch) {
  return torch::mse_loss(net->forward(batch.data), batch.target);
}

/// Cuts the batch into these rows.
std::vector<Batch> cut(const Batch& batch, const Rows& rows) {
  std::vector<Batch> parts;
  std::int64_t from = 0;
  for (const auto count : rows) {
    parts.push_back({batch.data.narrow(0, from, count), batch.target.narrow(0, from, count)});
    from += count;
  }
  REQUIRE(from == batch.data.size(0));
  return parts;
}

/// The results of a training.
struct Trained {
  std::vector<at::Tensor> tensors;
  std::vector<Rows> rows;  // of each micro-batch, by update
};
std::vector<at::Tensor> left_by(torch::nn::Sequential& net) {
  auto all = copies(net->parameters());
  for (auto& buffer : net->buffers()) all.push_back(buffer.clone());
  all.push_back(random_state());
  return all;
}

/// Trains in a user's loop.
Trained fitted(
    const std::string& kind, const std::vector<Batch>& batches, const ga::FitMemory& limits,
    const std::function<void(std::size_t)>& before = [](std::size_t) {}) {
  auto net = network(kind);
  torch::optim::Adam adam(net->parameters(), 0.01);
  ga::GradAccumulator optimizer(adam);
  ga::FitMemory::Running memory(limits);
  Trained trained;
  torch::manual_seed(3);
  for (std::size_t i = 0; i < batches.size(); ++i) {
    before(i);
    auto batch = batches[i];
    memory.backward(optimizer, net, batch, objective);
    optimizer.clip_grad_norm_(0.5);
    CHECK(optimizer.step());
    optimizer.zero_grad();
    trained.rows.push_back(memory.plan().last_rows);
  }
  trained.tensors = left_by(net);
  return trained;
}

/// Trains the same with micro-batches of these sizes.
std::vector<at::Tensor> by_hand(const std::string& kind, const std::vector<Batch>& batches,
                                const std::vector<Rows>& rows) {
  auto net = network(kind);
  torch::optim::Adam adam(net->parameters(), 0.01);
  ga::GradAccumulator optimizer(adam);
  torch::manual_seed(3);
  for (std::size_t i = 0; i < batches.size(); ++i) {
    const auto parts = cut(batches[i], rows[i]);
    optimizer.set_steps(static_cast<std::int64_t>(parts.size()));
    for (auto& part : parts) {
      optimizer.backward(ga::Loss{objective(net, part), part.data.size(0)});
      optimizer.clip_grad_norm_(0.5);
      optimizer.step();
      optimizer.zero_grad();
    }
  }
  return left_by(net);
}

std::vector<Rows> whole(const std::vector<Batch>& batches) {
  std::vector<Rows> rows;
  for (auto& batch : batches) rows.push_back({batch.data.size(0)});
  return rows;
}

double off(const std::vector<at::Tensor>& got, const std::vector<at::Tensor>& wanted) {
  double most = 0;
  for (std::size_t i = 0; i + 1 < got.size(); ++i)  // the last tensor has random numbers
    most = std::max(most, (got[i] - wanted[i]).abs().max().to(torch::kDouble).item<double>());
  return most;
}

}  // namespace

TEST_CASE("FitMemory: an update is bitwise that of its micro-batches, and equals the batch's up to rounding") {
  const std::string kind = GENERATE("plain", "dropout", "norm", "float");
  const std::int64_t kilobytes = GENERATE(8, 16, 64, 10'000);
  CAPTURE(kind, kilobytes);
  const auto batches = batches_of({64, 40, 64, 7, 100}, kind == "float" ? torch::kFloat : torch::kDouble);
  const auto trained = fitted(kind, batches, {.budget = 1024 * kilobytes, .min_rows = 2});
  CHECK(same_bits(trained.tensors, by_hand(kind, batches, trained.rows)));
  if (kilobytes < 64) CHECK(trained.rows[4].size() > 2);
  const auto at_once = by_hand(kind, batches, whole(batches));
  const bool divided = trained.rows != whole(batches);
  if (kind == "plain") CHECK(off(trained.tensors, at_once) < 1e-12);
  if (kind == "norm" && divided) CHECK(off(trained.tensors, at_once) > 1e-6);  // statistics are over micro-batches
}

TEST_CASE("FitMemory: the peak stays within the budget, and uses it") {
  auto net = network("plain");
  torch::optim::Adam adam(net->parameters(), 0.01);
  ga::GradAccumulator optimizer(adam);
  auto batch = batches_of({200}).front();
  std::int64_t least = 0;
  for (std::int64_t budget = 7 * 1024; budget < 90 * 1024; budget += 4096) {
    CAPTURE(budget);
    ga::FitMemory::Running memory({.budget = budget});
    for (int update = 0; update < 3; ++update) {
      const ga::MemoryMeter meter;
      memory.backward(optimizer, net, batch, objective);
      CHECK(meter.peak_bytes() <= budget + 256);  // plus the numbers that the loop keeps
      if (update == 2 && memory.plan().layouts.front().rows < 200) CHECK(meter.peak_bytes() >= budget * 9 / 10);
      optimizer.step();
      optimizer.zero_grad();
    }
    const auto& layout = memory.plan().layouts.front();
    CHECK(layout.rows >= least);
    CHECK(layout.measured_bytes <= budget);
    CHECK(std::abs(layout.predicted_bytes - layout.measured_bytes) < budget / 10);
    CHECK(memory.plan().replays <= 1);
    least = layout.rows;
  }
  CHECK(least > 100);
}

TEST_CASE("FitMemory: with rows of several lengths, the peak exceeds the budget by less than one row") {
  auto net = network("plain");
  torch::optim::Adam adam(net->parameters(), 0.01);
  ga::GradAccumulator optimizer(adam);
  const auto of_lengths = [](auto& model, auto& batch) {
    return torch::mse_loss(model->forward(batch.data).mean(1), batch.target);
  };
  const auto peak_of = [&](ga::FitMemory::Running& memory, std::int64_t rows, std::int64_t length) {
    Batch batch{torch::randn({rows, length, 6}, torch::kDouble), torch::randn({rows, 3}, torch::kDouble)};
    const ga::MemoryMeter meter;
    memory.backward(optimizer, net, batch, of_lengths);
    const auto peak = meter.peak_bytes();
    optimizer.step();
    optimizer.zero_grad();
    return peak;
  };
  const auto of_a_row = [&](std::int64_t length) {  // plus the gradients
    ga::FitMemory::Running memory({.budget = ga::GiB});
    return peak_of(memory, 1, length);
  };
  for (std::int64_t budget = 24 * 1024; budget < 104 * 1024; budget += 4096) {
    ga::FitMemory::Running memory({.budget = budget});
    for (const std::int64_t length : {5, 9, 3, 12, 5, 12, 7, 9, 3}) {
      CAPTURE(budget, length);
      CHECK(peak_of(memory, 100, length) < budget + of_a_row(length));
      CHECK(memory.plan().last_rows.size() > 1);
      for (auto& layout : memory.plan().layouts) CHECK(layout.measured_bytes <= budget);
    }
  }
}

TEST_CASE("FitMemory: a failure at any allocation of a window is undone") {
  const std::string kind = GENERATE("dropout", "norm");
  CAPTURE(kind);
  const auto batches = batches_of({16, 16});
  int failures = 0;
  for (std::int64_t at = 0;; ++at) {
    CAPTURE(at);
    ga::FitMemory::Running memory({.budget = ga::GiB, .min_rows = 2});
    auto net = network(kind);
    torch::optim::Adam adam(net->parameters(), 0.01);
    ga::GradAccumulator optimizer(adam);
    torch::manual_seed(3);
    std::vector<Rows> rows;
    double loss = 0;
    bool failed = false;
    for (std::size_t i = 0; i < batches.size(); ++i) {
      auto batch = batches[i];
      {
        FailingAllocatorScope allocator(i == 1 ? at : -1);
        loss = memory.backward(optimizer, net, batch, objective).mean.item<double>();
        failed = allocator.failed();
      }
      optimizer.clip_grad_norm_(0.5);
      optimizer.step();
      optimizer.zero_grad();
      rows.push_back(memory.plan().last_rows);
    }
    REQUIRE(same_bits(left_by(net), by_hand(kind, batches, rows)));
    REQUIRE(memory.plan().replays <= failed);  // fewer if copies were tried again
    REQUIRE(loss > 0);
    if (!failed) break;
    failures += memory.plan().replays > 0;
  }
  CHECK(failures > 15);
}

namespace {

/// Makes two updates, the second with a failing allocation; `undo` decides what is undone.
std::vector<at::Tensor> begun_again(const std::vector<Batch>& batches, std::int64_t fails_at, bool undoes,
                                    std::vector<Rows>& rows) {
  auto net = network("dropout");
  torch::optim::Adam adam(net->parameters(), 0.01);
  ga::GradAccumulator optimizer(adam, {.steps = 1000});
  ga::detail::MemoryFitter fitter;
  fitter.find_parts(*net, {});
  torch::manual_seed(3);
  for (std::size_t i = 0; i < batches.size(); ++i) {
    const auto& batch = batches[i];
    const ga::detail::ForwardUndo forward(net->buffers());
    const auto run = [&](std::int64_t from, std::int64_t to) {
      const Batch part{batch.data.slice(0, from, to), batch.target.slice(0, from, to)};
      optimizer.backward(ga::Loss{objective(net, part), part.data.size(0)});
      optimizer.clip_grad_norm_(0.5);
      optimizer.step();
      return true;
    };
    const auto undo = [&] {
      if (!undoes) return;
      forward.put_back();
      optimizer.discard();
    };
    const auto is_scaled = [] { return false; };
    {
      const FailingAllocatorScope allocator(i == 1 ? fails_at : -1);
      fitter.run({ga::GiB, 2},
                 {ga::detail::kind_of_rows(batch), batch.data.size(0), torch::kCPU, 0, run, undo, is_scaled});
    }
    optimizer.flush();
    rows.push_back(fitter.plan().last_rows);
  }
  return left_by(net);
}

}  // namespace

TEST_CASE("FitMemory: restarting with fewer rows without undoing would give other results") {
  const auto batches = batches_of({16, 16});
  int seen = 0;
  for (std::int64_t at = 0; at < 40; ++at) {
    CAPTURE(at);
    std::vector<Rows> rows, not_undone_rows;
    const auto undone = begun_again(batches, at, true, rows);
    CHECK(same_bits(undone, by_hand("dropout", batches, rows)));
    const auto error = error_of([&] {
      const auto left = begun_again(batches, at, false, not_undone_rows);
      seen += off(left, by_hand("dropout", batches, not_undone_rows)) > 1e-6;
    });
    if (!error.empty()) CHECK(contains(error, "GradAccumulator: "));  // detected by GradAccumulator
  }
  CHECK(seen > 5);
}

TEST_CASE("FitMemory: if the memory is unknown, running out of it determines how many rows fit") {
  auto net = network("plain");
  torch::optim::SGD sgd(net->parameters(), 0.01);
  ga::GradAccumulator optimizer(sgd);
  auto batch = batches_of({300}).front();
  ga::FitMemory::Running memory({});  // the whole machine
  const FailingAllocatorScope allocator(-1, /*most=*/32 * 8 * 100);
  for (int update = 0; update < 4; ++update) {
    memory.backward(optimizer, net, batch, objective);
    optimizer.step();
    optimizer.zero_grad();
  }
  CHECK(memory.plan().layouts.front().rows <= 100);
  CHECK(memory.plan().layouts.front().rows >= 50);
  CHECK(memory.plan().replays > 0);
  CHECK(memory.plan().budget > 0);
}

TEST_CASE("FitMemory: a budget below the smallest micro-batch is refused, and nothing changes") {
  auto net = network("dropout");
  torch::optim::SGD sgd(net->parameters(), 0.01);
  ga::GradAccumulator optimizer(sgd);
  auto batch = batches_of({10}).front();
  const auto before = left_by(net);
  const auto run = [&](const ga::FitMemory& limits) {
    ga::FitMemory::Running memory(limits);
    memory.backward(optimizer, net, batch, objective);
    optimizer.discard();
  };
  const auto error = error_of([&] { run({.budget = 1000}); });
  CAPTURE(error);
  CHECK(contains(error, "FitMemory: the budget must be at least "));
  CHECK(contains(error, "which 1 row(s) of Double [*, 6], Double [*, 3] and the gradients took, got 1000"));
  CHECK(same_bits(left_by(net), before));
  CHECK(optimizer.micro_steps() == 0);
  const auto least = std::stoll(error.substr(std::string("FitMemory: the budget must be at least ").size()));
  CHECK(contains(error_of([&] { run({.budget = least - 1}); }), "must be at least " + std::to_string(least)));
  CHECK(error_of([&] { run({.budget = least}); }).empty());

  const FailingAllocatorScope allocator(-1, /*most=*/100);
  const auto out = error_of([&] { run({.budget = ga::GiB}); });
  CAPTURE(out);
  CHECK(contains(out, "FitMemory: 1 row(s) of Double [*, 6], Double [*, 3] ran out of memory twice"));
  CHECK(contains(out, "can't allocate memory"));
  CHECK_THROWS_AS(run({.budget = ga::GiB}), c10::OutOfMemoryError);
}

TEST_CASE("FitMemory: other exceptions are passed on") {
  auto net = network("plain");
  torch::optim::SGD sgd(net->parameters(), 0.01);
  ga::GradAccumulator optimizer(sgd);
  auto batch = batches_of({10}).front();
  ga::FitMemory::Running memory({.budget = ga::GiB});
  CHECK(error_of([&] {
          memory.backward(optimizer, net, batch, [](auto&, auto&) -> at::Tensor { throw std::runtime_error("mine"); });
        }) == "mine");
  for (auto& parameter : net->parameters()) CHECK_FALSE(parameter.grad().defined());
  int runs = 0;
  const auto generator = random_state();
  CHECK(error_of([&] {
          memory.backward(optimizer, net, batch, [&](auto& m, auto& b) {
            static_cast<void>(torch::rand({3}));
            if (++runs == 2) throw std::runtime_error("the second");
            return objective(m, b);
          });
        }) == "the second");
  CHECK(same_bits(random_state(), generator));
  CHECK(optimizer.micro_steps() == 0);
  memory.backward(optimizer, net, batch, objective);
  CHECK(contains(error_of([&] { memory.backward(optimizer, net, batch, objective); }), "must begin a window"));
  optimizer.discard();
  ga::GradAccumulator four(sgd, {.steps = 4});
  CHECK(contains(error_of([&] { memory.backward(four, net, batch, objective); }),
                 "steps must be 1, since a window is one batch, got 4"));
  Batch empty{torch::zeros({0, 6}), torch::zeros({0, 3})};
  CHECK(contains(error_of([&] { memory.backward(optimizer, net, empty, objective); }), "the batch must have rows"));
  Batch uneven{torch::zeros({4, 6}), torch::zeros({3, 3})};
  CHECK(contains(error_of([&] { memory.backward(optimizer, net, uneven, objective); }),
                 "must have the same number of rows, got 4 and 3"));
  CHECK(contains(error_of([&] {
                   ga::FitMemory::Running wrong({.budget = -1});
                   wrong.backward(optimizer, net, batch, objective);
                 }),
                 "budget must be >= 0, got -1"));
  ga::optim::AdamW adamw(net->parameters(), 0.1);
  ga::GradAccumulator inside(adamw, {.in_backward = true});
  CHECK(contains(error_of([&] { memory.backward(inside, net, batch, objective); }),
                 "must not be combined with the accumulator's in_backward"));
  CHECK(contains(error_of([&] { ga::Trainer(net, adamw, objective, ga::FitMemory{}, ga::OptimizerInBackward{}); }),
                 "must not be combined with OptimizerInBackward"));
}

TEST_CASE("FitMemory: a thousand replays keep no memory") {
  auto net = network("norm");
  torch::optim::SGD sgd(net->parameters(), 0.001);
  ga::GradAccumulator optimizer(sgd);
  auto batch = batches_of({16}).front();
  ga::FitMemory::Running memory({.budget = ga::GiB, .min_rows = 2});
  std::int64_t kept = 0;
  const ga::MemoryMeter meter;
  for (int i = 0; i < 1000; ++i) {
    {
      const FailingAllocatorScope allocator(i % 40);
      memory.backward(optimizer, net, batch, objective);
    }
    optimizer.step();
    optimizer.zero_grad();
    if (i == 99) kept = meter.live_bytes();
  }
  CHECK(memory.plan().replays > 700);
  CHECK(meter.live_bytes() == kept);
  CHECK(memory.plan().layouts.size() == 1);
}

namespace {

/// A policy: records the rows of each micro-batch, without those that were taken back.
struct RowsSeen {
  static constexpr std::string_view name = "rows_seen";
  Rows rows = {};
  void attach(ga::TrainerBase&) {}
  void before_backward(ga::Loss& loss) { rows.push_back(static_cast<std::int64_t>(loss.items)); }
  void state(ga::Archive& archive) {
    auto text = c10::Join(" ", rows);
    archive("rows", text);
    rows.clear();
    std::istringstream numbers(text);
    for (std::int64_t number = 0; numbers >> number;) rows.push_back(number);
  }
};

/// Trains with these policies, on whole batches, or on batches cut by hand.
template <class... Policies>
Trained by_trainer(const std::string& kind, const std::vector<Batch>& batches, const ga::FitOptions& options,
                   Policies... policies) {
  auto net = network(kind);
  ga::optim::AdamW adamw(net->parameters(), 0.01);
  Trained trained;
  Rows* rows = nullptr;
  torch::manual_seed(3);
  ga::Trainer trainer(net, adamw, objective, std::move(policies)..., RowsSeen{}, ga::ClipNorm{.max = 0.5},
                      [&](const ga::Step& step) {
                        trained.rows.push_back(*rows);
                        rows->clear();
                        trained.tensors.push_back(step.loss);
                        trained.tensors.push_back(step.grad_norm);
                        CHECK(step.micro_batches == static_cast<std::int64_t>(trained.rows.back().size()));
                      });
  rows = &trainer.template policy<RowsSeen>().rows;
  trainer.fit(batches, options);
  for (auto& tensor : left_by(net)) trained.tensors.push_back(tensor);
  return trained;
}

}  // namespace

TEST_CASE("FitMemory: a Trainer makes the updates of Accumulate, in parts of any size") {
  const std::string kind = GENERATE("plain", "dropout");
  const std::int64_t budget = GENERATE(8, 14, 40) * 1024;
  CAPTURE(kind, budget);
  const auto batches = batches_of({48, 48, 20, 48, 30});
  const auto check = [&](ga::Accumulate accumulate, const std::vector<Rows>& updates) {
    const auto trained = by_trainer(kind, batches, {.epochs = 2}, accumulate, ga::FitMemory{.budget = budget});
    std::vector<Batch> parts;
    std::vector<std::int64_t> sums;
    std::vector<std::int64_t> counts;
    for (auto& rows : trained.rows) {
      std::int64_t sum = 0;
      for (const auto count : rows) sum += count;
      sums.push_back(sum);
      counts.push_back(static_cast<std::int64_t>(rows.size()));
    }
    std::vector<std::int64_t> wanted;
    for (int epoch = 0; epoch < 2; ++epoch)
      for (auto& update : updates) {
        std::int64_t sum = 0;
        for (const auto rows : update) sum += rows;
        wanted.push_back(sum);
      }
    CHECK(sums == wanted);

    // Trains on the same rows in order, cut in the same way; windows by samples.
    const auto all = Batch{
        torch::cat({batches[0].data, batches[1].data, batches[2].data, batches[3].data, batches[4].data}),
        torch::cat({batches[0].target, batches[1].target, batches[2].target, batches[3].target, batches[4].target})};
    Rows flat;
    for (auto& rows : trained.rows) flat.insert(flat.end(), rows.begin(), rows.end());
    const Batch twice{torch::cat({all.data, all.data}), torch::cat({all.target, all.target})};
    const auto pieces = cut(twice, flat);
    auto net = network(kind);
    ga::optim::AdamW adamw(net->parameters(), 0.01);
    ga::GradAccumulator optimizer(adamw);
    torch::manual_seed(3);
    std::size_t piece = 0;
    for (const auto count : counts) {
      optimizer.set_steps(count);
      for (std::int64_t i = 0; i < count; ++i, ++piece) {
        optimizer.clip_grad_norm_(0.5);
        optimizer.backward(ga::Loss{objective(net, pieces[piece]), pieces[piece].data.size(0)});
        optimizer.step();
        optimizer.zero_grad();
      }
    }
    const auto left = left_by(net);
    const std::vector<at::Tensor> last(trained.tensors.end() - static_cast<std::ptrdiff_t>(left.size()),
                                       trained.tensors.end());
    CHECK(same_bits(last, left));
    if (kind == "plain") {
      const auto at_once = by_trainer(kind, batches, {.epochs = 2}, accumulate, ga::FitMemory{.budget = ga::GiB});
      CHECK(off(last, {at_once.tensors.end() - static_cast<std::ptrdiff_t>(left.size()), at_once.tensors.end()}) <
            1e-12);
    }
  };
  check({}, {{48}, {48}, {20}, {48}, {30}});
  check({.steps = 2}, {{48, 48}, {20, 48}, {30}});
  check({.batch_size = 32}, {{32}, {16, 16}, {32}, {20, 12}, {32}, {4, 28}, {2}});
}

TEST_CASE("FitMemory: a Trainer takes back only a part of an open window") {
  const auto batches = batches_of({16, 16});
  const auto run = [&](std::int64_t fails_at, bool& failed) {
    auto net = network("dropout");
    torch::optim::SGD sgd(net->parameters(), 0.01);
    std::vector<Rows> rows;
    ga::Trainer trainer(net, sgd, objective, ga::Accumulate{.steps = 2},
                        ga::FitMemory{.budget = ga::GiB, .min_rows = 2});
    torch::manual_seed(3);
    trainer.step(batches[0]);
    rows.push_back(trainer.policy<ga::FitMemory>().plan().last_rows);
    {
      const FailingAllocatorScope allocator(fails_at);
      trainer.step(batches[1]);
      failed = allocator.failed();
    }
    rows.push_back(trainer.policy<ga::FitMemory>().plan().last_rows);
    CHECK(trainer.updates() == 1);

    auto other = network("dropout");
    torch::optim::SGD other_sgd(other->parameters(), 0.01);
    ga::GradAccumulator optimizer(other_sgd, {.steps = static_cast<std::int64_t>(rows[0].size() + rows[1].size())});
    torch::manual_seed(3);
    for (std::size_t i = 0; i < 2; ++i)
      for (auto& part : cut(batches[i], rows[i])) {
        optimizer.backward(ga::Loss{objective(other, part), part.data.size(0)});
        optimizer.step();
        optimizer.zero_grad();
      }
    return same_bits(left_by(net), left_by(other));
  };
  bool failed = true;
  int failures = 0;
  for (std::int64_t at = 0; failed && at < 60; ++at) {
    CAPTURE(at);
    bool same = true;
    const auto error = error_of([&] { same = run(at, failed); });
    CHECK(same);
    failures += failed && error.empty();
    if (error.empty()) continue;
    CHECK(contains(error, "can't allocate"));  // in the optimizer's step
    failed = true;
  }
  CHECK(failures > 15);
}

namespace {

/// Returns whether a training in float16, with a failing allocation in its second batch, has the bits of one whose
/// batches were cut in this way from the start.
bool same_in_float16(const std::vector<Batch>& batches, std::int64_t fails_at, bool& failed) {
  std::vector<Rows> rows;
  const auto train = [](const auto& run, auto... policies) {
    auto net = network("float");
    net->push_back(torch::nn::Dropout(0.2));
    ga::optim::AdamW adamw(net->parameters(), 0.01);
    ga::Trainer trainer(net, adamw, objective, ga::Accumulate{.batch_size = 32}, ga::ClipNorm{.max = 0.1},
                        ga::MixedPrecision{.dtype = torch::kHalf, .scaler = {.init_scale = 8}}, ga::Ema{.decay = 0.5},
                        std::move(policies)...);
    torch::manual_seed(3);
    run(trainer);
    CHECK(trainer.updates() == 2);
    auto left = left_by(net);
    trainer.template policy<ga::Ema>().swap(net);
    for (auto& average : copies(net->parameters())) left.push_back(average);
    return left;
  };
  const auto divided = train(
      [&](auto& trainer) {
        for (std::size_t i = 0; i < batches.size(); ++i) {
          const FailingAllocatorScope allocator(i == 1 ? fails_at : -1);
          trainer.step(batches[i]);
          failed = failed || allocator.failed();
          rows.push_back(trainer.template policy<ga::FitMemory>().plan().last_rows);
        }
      },
      ga::FitMemory{.budget = ga::GiB, .min_rows = 2});
  const auto by_parts = train([&](auto& trainer) {
    for (std::size_t i = 0; i < batches.size(); ++i)
      for (auto& part : cut(batches[i], rows[i])) trainer.step(part);
  });
  return same_bits(divided, by_parts);
}

}  // namespace

TEST_CASE("FitMemory: in float16, with an average of weights, a failure at any allocation is undone") {
  const auto batches = batches_of({16, 16, 16, 16}, torch::kFloat);
  int undone = 0;
  bool failed = true;
  for (std::int64_t at = 0; failed && at < 200; ++at) {
    CAPTURE(at);
    failed = false;
    bool same = true;
    const auto error = error_of([&] { same = same_in_float16(batches, at, failed); });
    CHECK(same);
    undone += failed && error.empty();
    if (!error.empty()) CHECK(contains(error, "can't allocate"));  // in the optimizer's step
    failed = failed || !error.empty();
  }
  CHECK(undone > 15);
}

TEST_CASE("FitMemory: in float16 the first update has a scale that does not overflow, with any number of rows") {
  at::globalContext().setUserEnabledMkldnn(false);  // oneDNN takes memory for float16 on some CPUs
  const auto as_before = c10::make_scope_exit([] { at::globalContext().setUserEnabledMkldnn(true); });
  for (const std::int64_t budget : {std::int64_t{7} * 1024, std::int64_t{20} * 1024, ga::GiB}) {
    CAPTURE(budget);
    auto net = network("float");
    ga::optim::AdamW adamw(net->parameters(), 0.01);
    ga::Trainer trainer(net, adamw, objective,
                        ga::MixedPrecision{.dtype = torch::kHalf, .scaler = {.init_scale = 16384}},
                        ga::FitMemory{.budget = budget});
    CHECK(trainer.step(batches_of({96}, torch::kFloat).front()));
    const auto& plan = trainer.policy<ga::FitMemory>().plan();
    CHECK(plan.replays == 0);  // everything fitted
    for (const auto rows : plan.last_rows) CHECK(rows <= 2 * plan.last_rows.front());
    CHECK((plan.last_rows.size() == 1) == (budget == ga::GiB));
  }
}

TEST_CASE("FitMemory: with float16, its loss scale and an average of weights") {
  const auto batches = batches_of({48, 48, 48}, torch::kFloat);
  std::size_t parts = 0;
  const auto train = [&](std::int64_t budget) {
    auto net = network("float");
    ga::optim::AdamW adamw(net->parameters(), 0.01);
    ga::Trainer trainer(net, adamw, objective, ga::MixedPrecision{torch::kHalf}, ga::Ema{.decay = 0.5},
                        ga::FitMemory{.budget = budget});
    trainer.fit(batches, {.epochs = 2});
    trainer.policy<ga::Ema>().swap(net);
    parts = trainer.policy<ga::FitMemory>().plan().last_rows.size();
    return copies(net->parameters());
  };
  const auto divided = train(7 * 1024);
  CHECK(parts > 1);
  const auto at_once = train(ga::GiB);
  CHECK(off(divided, at_once) < 2e-2);
  CHECK_FALSE(same_bits(divided, at_once));
}

namespace {

/// A policy that counts every micro-batch.
struct Counted {
  static constexpr std::string_view name = "counted";
  std::int64_t samples = 0;
  const ga::Step* window = nullptr;
  void attach(ga::TrainerBase& trainer) { window = &trainer.window(); }
  void before_backward(ga::Loss& loss) { samples += static_cast<std::int64_t>(loss.items); }
  void state(ga::Archive& archive) { archive("samples", samples); }
};

}  // namespace

TEST_CASE("FitMemory: policies forget a micro-batch that is taken back") {
  const auto batches = batches_of({16, 16, 16}, torch::kFloat);
  for (std::int64_t at = 0; at < 30; ++at) {
    CAPTURE(at);
    auto net = network("float");
    torch::optim::SGD sgd(net->parameters(), 0.01);
    ga::Trainer trainer(net, sgd, objective, ga::Accumulate{.steps = 3},
                        ga::MixedPrecision{.dtype = torch::kHalf, .scaler = {.init_scale = 8}}, Counted{},
                        ga::FitMemory{.budget = ga::GiB, .min_rows = 2});
    trainer.step(batches[0]);
    {
      const FailingAllocatorScope allocator(at);
      trainer.step(batches[1]);
      CHECK(allocator.failed());
    }
    CHECK(trainer.policy<Counted>().samples == 32);
    CHECK(trainer.window().samples == 32);
    CHECK(trainer.window().items == 32);
    CHECK(trainer.window().batches == 2);
    CHECK(trainer.step(batches[2]));
    CHECK(trainer.policy<Counted>().samples == 48);
  }
}

TEST_CASE("FitMemory: evaluation uses the number of rows of training") {
  const auto batches = batches_of({64, 64});
  auto net = network("plain");
  torch::optim::SGD sgd(net->parameters(), 0.01);
  std::int64_t most = 0;
  const auto counted = [&](auto& model, auto& batch) {
    most = std::max(most, batch.data.size(0));
    return objective(model, batch);
  };
  ga::Trainer trainer(net, sgd, counted, ga::FitMemory{.budget = 10 * 1024});
  trainer.fit(batches);
  const auto limit = trainer.policy<ga::FitMemory>().plan().layouts.front().rows;
  most = 0;
  const auto loss = trainer.evaluate(batches)["loss"];
  CHECK(most <= limit);
  const torch::NoGradGuard no_grad;
  const auto wanted = (objective(net, batches[0]) + objective(net, batches[1])) / 2;
  CHECK(loss == Approx(wanted.item<double>()));
}

TEST_CASE("FitMemory: ranks may divide their batches differently") {
  const auto batches = batches_of({48, 48, 48, 48});
  auto one = network("plain");
  torch::optim::SGD sgd(one->parameters(), 0.1);
  ga::Trainer(one, sgd, objective, ga::Accumulate{.steps = 2}).fit(batches);

  std::vector<torch::nn::Sequential> nets{network("plain"), network("plain")};
  std::vector<std::size_t> parts(2);
  tests::as_ranks(2, [&](const ga::ProcessGroup& group) {
    const auto rank = static_cast<std::size_t>(group.rank());
    torch::optim::SGD of_rank(nets[rank]->parameters(), 0.1);
    ga::Trainer trainer(nets[rank], of_rank, objective, ga::DataParallel{.group = group},
                        ga::FitMemory{.budget = (rank == 0 ? 9 : 20) * 1024});
    trainer.fit(std::vector<Batch>{batches[rank], batches[rank + 2]});
    parts[rank] = trainer.policy<ga::FitMemory>().plan().last_rows.size();
  });
  CHECK(parts[0] > parts[1]);
  for (auto& net : nets) CHECK(off(copies(net->parameters()), copies(one->parameters())) < 1e-12);
}

TEST_CASE("FitMemory: a resumed training has its plan, to the bit") {
  const testing::Directory directory;
  const auto batches = batches_of({48, 20, 48, 48});
  const auto train = [&](std::int64_t budget, std::int64_t ends_at, bool resumes) {
    auto net = network("dropout");
    ga::optim::AdamW adamw(net->parameters(), 0.01);
    ga::Trainer trainer(net, adamw, objective, ga::FitMemory{.budget = budget},
                        ga::SaveState{.directory = directory / "states", .every_updates = 2},
                        [&](const ga::Step& step) {
                          if (step.update == ends_at) throw std::runtime_error("the end");
                        });
    torch::manual_seed(3);
    trainer.fit(batches, {.epochs = 2, .resume = resumes ? (directory / "states").string() : ""});
    return std::pair(left_by(net), trainer.policy<ga::FitMemory>().plan().last_rows);
  };
  const auto whole = train(10 * 1024, 0, false);
  std::filesystem::remove_all(directory / "states");
  CHECK(error_of([&] { train(10 * 1024, 3, false); }) == "the end");
  CHECK(contains(error_of([&] { train(11 * 1024, 0, true); }), "fit_memory.budget"));
  const auto resumed = train(10 * 1024, 0, true);
  CHECK(same_bits(resumed.first, whole.first));
  CHECK(resumed.second == whole.second);
}

namespace mine {

/// A batch that only a user's function can divide.
struct Points {
  at::Tensor points;
  std::string name;
};
Points slice(const Points& batch, std::int64_t from, std::int64_t to) {
  return {batch.points.slice(0, from, to), batch.name};
}
std::int64_t batch_size(const Points& batch) { return batch.points.size(0); }

struct Whole {
  at::Tensor points;
};

}  // namespace mine

TEST_CASE("FitMemory: batches of any kind") {
  auto net = network("plain");
  torch::optim::SGD sgd(net->parameters(), 0.01);
  ga::GradAccumulator optimizer(sgd);
  const auto x = torch::randn({60, 6}, torch::kDouble);
  const auto parts_of = [&](auto batch, auto loss) {
    ga::FitMemory::Running memory({.budget = 9 * 1024});
    const auto total = memory.backward(optimizer, net, batch, loss);
    CHECK(total.items == 60);
    optimizer.discard();
    return memory.plan().last_rows.size();
  };
  const auto of = [](auto& model, const at::Tensor& rows) { return model->forward(rows).square().mean(); };
  CHECK(parts_of(x, of) > 2);
  CHECK(parts_of(std::tuple(x, x), [&](auto& m, auto& b) { return of(m, std::get<1>(b)); }) > 2);
  CHECK(parts_of(std::pair(x, x), [&](auto& m, auto& b) { return of(m, b.second); }) > 2);
  CHECK(parts_of(torch::data::Example<>(x, x), [&](auto& m, auto& b) { return of(m, b.data); }) > 2);
  CHECK(parts_of(mine::Points{x, "p"}, [&](auto& m, auto& b) { return of(m, b.points); }) > 2);
  std::vector<mine::Whole> samples;
  for (auto& row : x.unbind(0)) samples.push_back({row});
  CHECK(parts_of(samples, [&](auto& m, auto& b) {
          std::vector<at::Tensor> rows;
          for (auto& sample : b) rows.push_back(sample.points);
          return of(m, torch::stack(rows));
        }) > 2);
  CHECK(contains(error_of([&] { parts_of(x.unbind(0), [&](auto& m, auto& b) { return of(m, b[0]); }); }),
                 "FitMemory: a batch must be divisible: a Tensor"));
  CHECK(contains(error_of([&] { parts_of(mine::Whole{x}, [&](auto& m, auto& b) { return of(m, b.points); }); }),
                 "FitMemory: a batch must be divisible: a Tensor"));

  std::vector<at::Tensor> sequences;
  for (std::int64_t i = 0; i < 60; ++i) sequences.push_back(torch::randint(9, {1 + i % 13}));
  ga::data::LengthBuckets buckets(sequences, torch::randn({60, 3}, torch::kDouble), {.batch_size = 60});
  auto embedding = torch::nn::Embedding(9, 6);
  embedding->to(torch::kDouble);
  for (auto& batch : buckets)
    CHECK(parts_of(batch, [&](auto& m, auto& b) {
            return torch::mse_loss(m->forward(embedding(b.data).mean(1)), b.target);
          }) > 2);
}

TEST_CASE("FitMemory: min_rows are kept, and are refused only if they need too much memory") {
  for (const std::int64_t min_rows : {2, 3, 4})
    for (std::int64_t budget = 5 * 1024; budget < 12 * 1024; budget += 700) {
      CAPTURE(min_rows, budget);
      auto net = network("norm");
      torch::optim::SGD sgd(net->parameters(), 0.01);
      ga::GradAccumulator optimizer(sgd);
      ga::FitMemory::Running memory({.budget = budget, .min_rows = min_rows});
      std::int64_t peak = 0;
      for (const std::int64_t rows : {12, 13, 17}) {
        auto batch = batches_of({rows}).front();
        const auto error = error_of([&] {
          const ga::MemoryMeter meter;
          memory.backward(optimizer, net, batch, objective);
          peak = meter.peak_bytes();
        });
        if (!error.empty()) {  // min_rows alone need more than the budget
          CHECK(contains(error, "the budget must be at least "));
          ga::FitMemory::Running enough({.budget = ga::GiB, .min_rows = min_rows});
          const ga::MemoryMeter meter;
          auto one = batches_of({2 * min_rows}).front();
          const auto parts = cut(one, {min_rows, min_rows});
          for (auto& part : parts) (objective(net, part) * 0.5).backward();
          CHECK(meter.peak_bytes() * (rows % min_rows == 0 ? 1.0 : 1.6) > budget);
          net->zero_grad();
          break;
        }
        CHECK(peak <= budget + 1200);  // one more row may have been tried
        for (const auto count : memory.plan().last_rows) CHECK(count >= min_rows);
        optimizer.discard();
      }
    }
}

TEST_CASE("FitMemory: a Trainer continues batch by batch after a fit, and a batch is trained to its end") {
  const auto batches = batches_of({64, 64});
  auto net = network("plain");
  torch::optim::SGD sgd(net->parameters(), 0.01);
  std::int64_t rows = 0;
  const auto counted = [&](auto& model, auto& batch) {
    rows += batch.data.size(0);
    return objective(model, batch);
  };
  ga::Trainer trainer(net, sgd, counted, ga::Accumulate{.batch_size = 32}, ga::FitMemory{.budget = ga::GiB});
  trainer.fit(batches);
  CHECK(rows == 128);
  CHECK(trainer.step(batches[0]));
  CHECK(rows == 192);
  CHECK(trainer.updates() == 6);
}

TEST_CASE("FitMemory: parameters outside of the model take part") {
  const auto batches = batches_of({16, 16});
  auto net = network("plain");
  auto weight = torch::ones({}, at::TensorOptions(torch::kDouble).requires_grad(true));
  auto parameters = net->parameters();
  parameters.push_back(weight);
  torch::optim::SGD sgd(parameters, 0.01);
  ga::Trainer trainer(
      net, sgd, [&](auto& model, auto& batch) { return objective(model, batch) * weight; }, ga::Accumulate{.steps = 2},
      ga::FitMemory{.budget = ga::GiB});
  trainer.fit(batches);
  CHECK(trainer.updates() == 1);
  CHECK(weight.item<double>() != 1);
}

TEST_CASE("FitMemory: parts with shorter padding do not count for longer rows") {
  auto net = network("plain");
  torch::optim::SGD sgd(net->parameters(), 0.01);
  ga::GradAccumulator optimizer(sgd);
  auto embedding = torch::nn::Embedding(9, 6);
  embedding->to(torch::kDouble);
  ga::FitMemory::Running memory({.budget = 60 * 1024});
  for (const bool all_long : {false, true, true}) {
    std::vector<at::Tensor> sequences;
    for (std::int64_t i = 0; i < 60; ++i) sequences.push_back(torch::randint(9, {all_long || i == 0 ? 50 : 2}));
    ga::data::LengthBuckets buckets(sequences, torch::randn({60, 3}, torch::kDouble), {.batch_size = 60});
    for (auto& batch : buckets) {
      const ga::MemoryMeter meter;
      memory.backward(optimizer, net, batch, [&](auto& m, auto& b) {
        return torch::mse_loss(m->forward(embedding(b.data)).mean(1), b.target);
      });
      CHECK(meter.peak_bytes() <= 61 * 1024);
      optimizer.discard();
      for (auto& parameter : embedding->parameters()) parameter.mutable_grad().reset();
    }
  }
}

TEST_CASE("FitMemory: rows with fewer elements begin with the number of larger ones") {
  auto net = network("plain");
  torch::optim::SGD sgd(net->parameters(), 0.01);
  ga::GradAccumulator optimizer(sgd);
  ga::FitMemory::Running memory({.budget = 40 * 1024});
  const auto rows_of = [&](std::int64_t length) {
    auto x = torch::randn({200, length, 6}, torch::kDouble);
    memory.backward(optimizer, net, x, [](auto& m, auto& b) { return m->forward(b).square().mean(); });
    optimizer.discard();
    return memory.plan().last_rows;
  };
  const auto eight = rows_of(8);
  CHECK(eight.front() == 1);
  const auto four = rows_of(4);
  CHECK(four.front() == eight[eight.size() - 2]);
  CHECK(four[four.size() - 2] > four.front());
  CHECK(rows_of(9).front() == 1);
  CHECK(rows_of(8).front() == eight[eight.size() - 2]);
  CHECK(memory.plan().layouts.size() == 3);
}
