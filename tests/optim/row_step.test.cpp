// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/amp_scaler.hpp>
#include <gradaccum/embedding.hpp>
#include <gradaccum/grad_accumulator.hpp>
#include <gradaccum/memory_meter.hpp>
#include <gradaccum/optim/adafactor.hpp>
#include <gradaccum/optim/adam.hpp>
#include <gradaccum/optim/adam8bit.hpp>
#include <gradaccum/optim/adamw.hpp>
#include <gradaccum/optim/adamw8bit.hpp>
#include <gradaccum/optim/sgd.hpp>

#include "fitting/failing_allocator.hpp"
#include "support/outcome.hpp"

#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

// A step by sparse gradients is bitwise the dense step, but its moments cover only the rows that were looked up.

namespace ga = gradaccum;
using namespace testing;

namespace {

using namespace ga::optim;
using MakeOptimizer = std::function<std::unique_ptr<torch::optim::Optimizer>(const at::Tensor&)>;

constexpr std::int64_t number = 60;  // number of rows

/// A training of an embedding.
struct Training {
  at::Tensor table;
  std::unique_ptr<torch::optim::Optimizer> wrapped;
  std::unique_ptr<ga::GradAccumulator<torch::optim::Optimizer>> optimizer;

  Training(const MakeOptimizer& make, at::ScalarType dtype, std::int64_t width) {
    torch::manual_seed(1);
    table = torch::randn({number, width}).to(dtype).requires_grad_();
    wrapped = make(table);
    optimizer = std::make_unique<ga::GradAccumulator<torch::optim::Optimizer>>(*wrapped,
                                                                               ga::GradAccumulatorOptions{.steps = 3});
  }

  ga::optim::OnePass& one_pass() { return dynamic_cast<ga::optim::OnePass&>(*wrapped); }
  auto named() { return one_pass().named_state({{"table", table}}); }
};

bool same_states(Training& a, Training& b) {
  const auto of_a = a.named(), of_b = b.named();
  if (of_a.size() != of_b.size()) return false;
  for (auto& [name, tensor] : of_a)
    if (!of_b.contains(name) || !same_bits(tensor, of_b.at(name))) return false;
  return same_bits(a.table, b.table);
}

/// Windows of three micro-batches, sparse and dense, with the same operations.
struct Twins {
  Training sparse, dense;
  int micro_batch = 0;

  Twins(const MakeOptimizer& make, at::ScalarType dtype = at::kFloat, std::int64_t width = 512)
      : sparse(make, dtype, width), dense(make, dtype, width) {}

  void both(const std::function<void(Training&)>& run) { run(sparse), run(dense); }

  at::Tensor loss(Training& of, const at::Tensor& ids, const at::Tensor& weights) {
    const bool is_sparse = &of == &sparse;
    return (ga::embedding(ids, of.table, {.sparse = is_sparse}) * weights).sum();
  }
  /// Looks up more and more rows, and some old ones no more.
  void window(
      const std::function<void(Training&)>& before_step = [](Training&) {}, bool is_tied = false) {
    for (int i = 0; i < 3; ++i, ++micro_batch) {
      const auto ids = torch::randint(micro_batch / 2, micro_batch + 5, {2, 4}).clamp_max(number - 1);
      const auto weights = torch::randn({2, 4, sparse.table.size(1)}).to(sparse.table.dtype());
      both([&](Training& of) {
        of.optimizer->backward(is_tied && i == 1 ? of.table.square().sum() : loss(of, ids, weights));
        if (i == 2) before_step(of);
        of.optimizer->step();
        of.optimizer->zero_grad();
      });
    }
  }
  void flushed() {
    both([&](Training& of) {
      of.optimizer->backward(loss(of, torch::tensor({1, 2}), torch::tensor(0.5)));
      of.optimizer->flush();
      of.optimizer->zero_grad();
    });
  }
  bool same() { return same_states(sparse, dense); }
};

template <class Optimizer, class Options>
MakeOptimizer maker(Options options, bool rounds = false) {
  return [=](const at::Tensor& table) {
    auto optimizer = std::make_unique<Optimizer>(std::vector<at::Tensor>{table}, options);
    if (rounds) optimizer->stochastic_rounding(7);
    return optimizer;
  };
}

struct Named {
  std::string name;
  MakeOptimizer make;
};
std::vector<Named> optimizers() {
  return {{"SGD", maker<SGD>(SGDOptions(0.01))},
          {"SGD, momentum", maker<SGD>(SGDOptions(0.01).momentum(0.9).dampening(0.3))},
          {"SGD, Nesterov", maker<SGD>(SGDOptions(0.01).momentum(0.9).nesterov(true))},
          {"SGD, decay", maker<SGD>(SGDOptions(0.01).weight_decay(0.1).momentum(0.9))},
          {"Adam", maker<Adam>(AdamOptions(0.01))},
          {"Adam, decay", maker<Adam>(AdamOptions(0.01).weight_decay(0.1))},
          {"AdamW", maker<AdamW>(AdamWOptions(0.01))},
          {"AdamW, amsgrad", maker<AdamW>(AdamWOptions(0.01).amsgrad(true).weight_decay(0))},
          {"AdamW, eps 0", maker<AdamW>(AdamWOptions(0.01).eps(0))},
          {"AdamW, eps 0 in float32", maker<AdamW>(AdamWOptions(0.01).eps(1e-50).weight_decay(0))},
          {"Adam8bit", maker<Adam8bit>(Adam8bitOptions(0.01))},
          {"AdamW8bit", maker<AdamW8bit>(AdamW8bitOptions(0.01))}};
}

/// Returns the number of rows in the optimizer's state.
std::int64_t rows_of_state(Training& training) {
  auto& state = *training.wrapped->state().at(training.table.unsafeGetTensorImpl());
  const auto rows = [](const at::Tensor& moments) { return moments.is_sparse() ? moments._values().size(0) : number; };
  if (auto* const adamw = dynamic_cast<torch::optim::AdamWParamState*>(&state)) return rows(adamw->exp_avg());
  if (auto* const adam = dynamic_cast<torch::optim::AdamParamState*>(&state)) return rows(adam->exp_avg_sq());
  if (auto* const sgd = dynamic_cast<torch::optim::SGDParamState*>(&state)) return rows(sgd->momentum_buffer());
  return rows(dynamic_cast<Adam8bitParamState&>(state).exp_avg_scale);
}

}  // namespace

TEST_CASE("sparse gradients: every step is bitwise the dense one") {
  for (auto& [name, make] : optimizers())
    for (auto dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf})
      for (std::int64_t width : {512, 100}) {
        CAPTURE(name, dtype, width);
        Twins twins(make, dtype, width);
        for (int i = 0; i < 8; ++i) {
          twins.window([&](Training& of) {
            if (i % 3 == 1) of.optimizer->clip_grad_norm_(0.5);
          });
          if (i == 4) twins.flushed();
          REQUIRE(twins.same());
        }
      }
}

TEST_CASE("sparse gradients: stochastic rounding draws the same numbers as the dense step") {
  for (auto& make : {maker<AdamW>(AdamWOptions(0.01), true), maker<AdamW8bit>(AdamW8bitOptions(0.01), true),
                     maker<SGD>(SGDOptions(0.01), true), maker<SGD>(SGDOptions(0.01).momentum(0.5), true)}) {
    Twins twins(make, at::kBFloat16);
    for (int i = 0; i < 5; ++i) twins.window();
    CHECK(twins.same());
  }
}

TEST_CASE("sparse gradients: moments cover the rows that were looked up, and decay without a gradient") {
  for (auto& [name, make] : optimizers()) {
    CAPTURE(name);
    if (name == "SGD" || name.ends_with(", decay")) continue;
    Twins twins(make);
    twins.window();
    const auto first = rows_of_state(twins.sparse);
    CHECK(first < number / 4);
    const auto before = twins.sparse.table.detach().clone();
    twins.micro_batch = 50;  // other rows
    twins.window();
    CHECK(rows_of_state(twins.sparse) > first);
    CHECK(rows_of_state(twins.sparse) < number);
    if (!name.starts_with("AdamW, eps 0"))  // its first rows have no gradient, so a decay would not show
      CHECK_FALSE(same_bits(before[2] * (1 - 0.01 * 0.01), twins.sparse.table[2].detach()));
    CHECK(twins.same());
  }
}

TEST_CASE("sparse gradients: options that change every row need moments for every row") {
  for (auto& make : {maker<Adam>(AdamOptions(0.01).weight_decay(0.1)),
                     maker<SGD>(SGDOptions(0.01).weight_decay(0.1).momentum(0.9))}) {
    Twins twins(make);
    twins.window();
    CHECK(rows_of_state(twins.sparse) == number);
  }
  for (auto& [name, make] : optimizers()) {
    CAPTURE(name);
    Twins twins(make);
    twins.window();
    twins.window(
        [](Training& of) { of.optimizer->gradients().factor().multiply(std::numeric_limits<double>::infinity()); });
    CHECK(twins.same());
    CHECK(twins.sparse.table.isnan().any().item<bool>());
  }
}

TEST_CASE("sparse gradients: any factor of a window") {
  for (auto& [name, make] : optimizers())
    for (auto dtype : {at::kFloat, at::kDouble})
      for (double factor : {1e-30, 0.0, -0.0, -1.0, 1e30, 1e39, 1e300}) {
        CAPTURE(name, dtype, factor);
        Twins twins(make, dtype);
        twins.both([](Training& of) { of.table.detach()[number - 1].fill_(-0.0); });  // adding zero would change it
        for (int i = 0; i < 2; ++i)
          twins.window([&](Training& of) { of.optimizer->gradients().factor().multiply(factor); });
        CHECK(twins.same());
      }
}

TEST_CASE("sparse gradients: no row, a single row, one number per row, and rows of matrices") {
  using Sizes = std::vector<std::int64_t>;
  for (auto& [name, make] : optimizers())
    for (auto& sizes :
         {Sizes{1, 256}, Sizes{9}, Sizes{300, 1}, Sizes{9, 16, 16}, Sizes{9, 2, 3}, Sizes{5, 0}, Sizes{0, 4}}) {
      CAPTURE(name, sizes);
      torch::manual_seed(2);
      const auto start = torch::randn(sizes);
      const at::Tensor tables[] = {start.clone().requires_grad_(), start.clone().requires_grad_()};
      const std::unique_ptr<torch::optim::Optimizer> of[] = {make(tables[0]), make(tables[1])};
      for (std::int64_t rows : {1, 3, 0, 5}) {
        const auto numbers = torch::randperm(sizes[0]).slice(0, 0, rows);
        const auto sparse = at::sparse_coo_tensor(numbers.unsqueeze(0), start.cos().index_select(0, numbers), sizes);
        tables[0].mutable_grad() = sparse;
        tables[1].mutable_grad() = sparse.to_dense();
        for (auto& optimizer : of) optimizer->step();
        REQUIRE(same_bits(tables[0], tables[1]));
      }
    }
}

TEST_CASE("sparse gradients: a table that is also used in another way is stepped densely, and later by rows again") {
  for (auto& [name, make] : optimizers()) {
    CAPTURE(name);
    Twins twins(make);
    for (int i = 0; i < 6; ++i) twins.window([](Training&) {}, /*is_tied=*/i % 3 == 2);
    CHECK(twins.same());
  }
}

TEST_CASE("sparse gradients: saved states equal the dense optimizer's, and can be loaded by it") {
  for (auto& [name, make] : optimizers()) {
    CAPTURE(name);
    Twins twins(make);
    for (int i = 0; i < 3; ++i) twins.window();
    twins.both([&](Training& of) {
      const auto state = of.named();
      of.one_pass().load_named_state({{"table", of.table}}, state);
    });
    twins.window();
    REQUIRE(twins.same());
    twins.both([&](Training& of) {
      std::stringstream file;
      torch::save(*of.wrapped, file);
      torch::load(*of.wrapped, file);
    });
    twins.window();
    CHECK(twins.same());
    if (name == "AdamW") CHECK(rows_of_state(twins.sparse) < number);  // the rows of a dense state that are not zero
  }
}

TEST_CASE("sparse gradients: the momentum of LibTorch's SGD, a sum of sparse tensors, can be loaded") {
  const auto trained = torch::ones({20, 4}).requires_grad_();
  torch::optim::SGD theirs({trained}, SGDOptions(0.1).momentum(0.9));
  for (int i = 0; i < 3; ++i) {
    torch::embedding(trained, torch::tensor({1, 1, 3, 5 + i}), -1, false, /*sparse=*/true).square().sum().backward();
    theirs.step();
    theirs.zero_grad();
  }
  const auto after_a_step = [&](auto&& optimizer, const at::Tensor& table, bool sparse) {
    std::stringstream file;
    torch::save(theirs, file);
    torch::load(optimizer, file);
    for (int i = 0; i < 3; ++i) {
      ga::embedding(torch::tensor({1, 7}), table, {.sparse = sparse}).square().sum().backward();
      optimizer.step();
      optimizer.zero_grad();
    }
    return table.detach();
  };
  const auto copy = [&] { return trained.detach().clone().requires_grad_(); };
  const auto ours = copy(), dense = copy();
  const auto got = after_a_step(SGD({ours}, SGDOptions(0.1).momentum(0.9)), ours, true);
  CHECK(same_bits(got, after_a_step(SGD({dense}, SGDOptions(0.1).momentum(0.9)), dense, false)));

  const auto expected = copy();  // the momentum from which LibTorch continues
  torch::optim::SGD more({expected}, SGDOptions(0.1).momentum(0.9));
  CHECK(at::allclose(got, after_a_step(more, expected, true), 1e-6));
}

TEST_CASE("sparse gradients: with a loss scale, and windows that overflow") {
  for (auto& [name, make] : optimizers()) {
    CAPTURE(name);
    Twins twins(make);
    ga::AmpScaler scalers[] = {ga::AmpScaler({.init_scale = 8}), ga::AmpScaler({.init_scale = 8})};
    for (int i = 0; i < 6; ++i) {
      const auto ids = torch::randint(number, {3});
      auto weights = torch::randn({3, 512});
      if (i == 2) weights[0][0] = std::numeric_limits<float>::infinity();
      twins.both([&](Training& of) {
        auto& scaler = scalers[&of == &twins.dense];
        for (int j = 0; j < 3; ++j) {
          scaler.scale(twins.loss(of, ids, weights)).backward();
          scaler.step(*of.optimizer);
          scaler.update();
          of.optimizer->zero_grad();
        }
      });
    }
    CHECK(scalers[0].get_scale() < 8);
    CHECK(twins.same());
  }
}

TEST_CASE("sparse gradients: after a step that ran out of memory, new rows have no moments yet") {
  const auto make = [] { return torch::ones({number, 256}).requires_grad_(); };
  const auto look_up = [](const at::Tensor& table, std::int64_t from, std::int64_t to) {
    (ga::embedding(torch::arange(from, to), table, {.sparse = true}) * 0.5).sum().backward();
  };
  const auto moments = [](auto& adamw, const at::Tensor& table) {
    return adamw.named_state({{"table", table}, {"other", adamw.parameters().back()}}).at("exp_avg.table")[50];
  };
  const auto fresh = make();
  AdamW expected({fresh, make()});
  look_up(fresh, 50, 51);
  expected.step();
  for (std::int64_t at = 0; at >= 0; ++at) {
    CAPTURE(at);
    const auto table = make(), other = make();
    AdamW adamw({table, other});
    for (auto& of : {table, other}) look_up(of, 0, 40);
    adamw.step();
    adamw.zero_grad();
    for (auto& of : {table, other}) look_up(of, 40, 44);
    bool failed = false;
    try {
      const FailingAllocatorScope allocator(at);
      adamw.step();
    } catch (const c10::Error&) {
      failed = true;
    }
    if (!failed) at = -2;
    adamw.zero_grad();
    look_up(table, 50, 51);
    adamw.step();
    REQUIRE(same_bits(moments(adamw, table), moments(expected, fresh)));
  }
}

TEST_CASE("sparse gradients: LibTorch's sparse embedding, and tables of another form") {
  const auto step = [](at::Tensor table, bool sparse) {
    AdamW adamw({table}, AdamWOptions(0.01));
    for (int i = 0; i < 3; ++i) {
      const auto ids = torch::tensor({1 + i, 3, 5});  // no duplicates, whose sums are rounded in another order
      torch::embedding(table, ids, -1, false, sparse).square().sum().backward();
      adamw.step();
      adamw.zero_grad();
    }
    return table.detach().contiguous();
  };
  const auto with_gaps = [] { return torch::ones({10, 8}).slice(1, 0, 4); };
  const auto transposed = [] { return torch::ones({4, 10}).t(); };
  for (auto& make : std::vector<std::function<at::Tensor()>>{[] {
                                                               return torch::ones({10, 4});
                                                             },
                                                             with_gaps, transposed})
    CHECK(same_bits(step(make().detach().requires_grad_(), true), step(make().detach().requires_grad_(), false)));
}

TEST_CASE("sparse gradients: gradients and moments of a large table are never dense") {
  const auto table = torch::ones({20'000, 256}).requires_grad_();
  for (const bool coded : {false, true}) {
    std::unique_ptr<torch::optim::Optimizer> adamw;
    if (coded)
      adamw = std::make_unique<AdamW8bit>(std::vector<at::Tensor>{table}, AdamW8bitOptions(0.01));
    else
      adamw = std::make_unique<AdamW>(std::vector<at::Tensor>{table}, AdamWOptions(0.01));
    ga::GradAccumulator optimizer(*adamw, {.steps = 4});
    const ga::MemoryMeter meter;
    for (int i = 0; i < 12; ++i) {
      optimizer.backward(ga::embedding(torch::randint(20'000, {32}), table, {.sparse = true}).square().sum());
      optimizer.clip_grad_norm_(1);
      optimizer.step();
      optimizer.zero_grad();
    }
    CHECK(meter.peak_bytes() < static_cast<std::int64_t>(table.nbytes()) / 4);
  }
}

TEST_CASE("sparse gradients: Adafactor, whose means are over all rows, refuses them") {
  const auto table = torch::ones({10, 4}).requires_grad_();
  ga::embedding(torch::tensor({1}), table, {.sparse = true}).sum().backward();
  Adafactor adafactor({table});
  REQUIRE_ERROR("Adafactor: a gradient must be dense, got a sparse one", adafactor.step());
}
