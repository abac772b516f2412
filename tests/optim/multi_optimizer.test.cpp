// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/gradaccum.hpp>

#include "support/breaks.hpp"
#include "support/device.hpp"
#include "support/files.hpp"
#include "support/leaves.hpp"
#include "support/models.hpp"
#include "support/ranks.hpp"
#include "support/warnings.hpp"
#include "training_state/bits.hpp"

#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

// Several optimizers as one: against the same optimizers by hand, with the norm of all their gradients.

namespace ga = gradaccum;
using ga::optim::MultiOptimizer;
using namespace testing;

namespace {

/// The tests' model, whose matrices Muon steps, and whose biases another optimizer steps.
struct Training {
  torch::nn::Sequential model = make_model(at::kFloat);
  std::vector<at::Tensor> matrices, biases;
  std::unique_ptr<ga::optim::Muon> muon;
  std::unique_ptr<torch::optim::Optimizer> other;
  std::unique_ptr<MultiOptimizer> both;

  explicit Training(bool torchs_own = false, at::Device device = at::kCPU) {
    model->to(device);
    for (auto& p : model->parameters()) (p.dim() == 2 ? matrices : biases).push_back(p);
    muon = std::make_unique<ga::optim::Muon>(matrices, ga::optim::MuonOptions(0.02).ns_dtype(at::kFloat));
    if (torchs_own)
      other = std::make_unique<torch::optim::SGD>(biases, torch::optim::SGDOptions(0.1).momentum(0.9));
    else
      other = std::make_unique<ga::optim::AdamW>(biases, ga::optim::AdamWOptions(0.01));
    both = std::make_unique<MultiOptimizer>(*muon, *other);
  }

  Bits bits() const {
    Bits all;
    all.add_model(*model);
    all.add_optimizer(*muon, *model);
    all.add_optimizer(*other, *model);
    return all;
  }
};

const std::vector<Example>& batches() {
  static const auto all = make_batches({3, 5, 4, 4, 3, 5, 4, 4}, at::kFloat);
  return all;
}

/// Runs two windows of four micro-batches, and clips them to a small norm.
void train(Training& by, ga::GradAccumulatorOptions options = {.steps = 4}, bool clips = true) {
  ga::GradAccumulator optimizer(*by.both, options);
  for (auto& batch : batches()) {
    optimizer.backward(loss_of(by.model, batch));
    if (clips) optimizer.clip_grad_norm_(0.05);
    optimizer.step();
    optimizer.zero_grad();
  }
}

enum class Norm { common, each };

/// The same by hand: one norm over all gradients, and a step of each optimizer.
void train_by_hand(Training& by, Norm norm, int steps_of_muon = 1) {
  for (std::size_t i = 0; i < batches().size(); ++i) {
    loss_of(by.model, batches()[i]).backward();
    if (i % 4 != 3) continue;
    ga::Gradients all(by.model->parameters()), of_matrices(by.matrices), of_biases(by.biases);
    if (norm == Norm::common) of_matrices = of_biases = all;
    for (auto& gradients : norm == Norm::common ? std::vector{all} : std::vector{of_matrices, of_biases}) {
      auto window = gradients;
      window.factor().divide(4);
      ga::clip_grad_norm_(window, 0.05);
    }
    auto* const takes = dynamic_cast<ga::TakesGradients*>(by.other.get());
    if (!takes) of_biases.apply();
    for (int step = 0; step < steps_of_muon; ++step) by.muon->step(of_matrices);
    if (takes)
      takes->step(of_biases);
    else
      by.other->step();
    by.both->zero_grad();
  }
}

auto objective = [](auto& net, auto& batch) { return loss_of(net, batch); };

}  // namespace

TEST_CASE("MultiOptimizer: a window is stepped as by both optimizers by hand, with the norm of all gradients") {
  const bool torchs_own = GENERATE(false, true);
  Training as_one(torchs_own), by_hand(torchs_own), with_two_norms(torchs_own), muon_twice(torchs_own);
  train(as_one);
  train_by_hand(by_hand, Norm::common);
  train_by_hand(with_two_norms, Norm::each);
  train_by_hand(muon_twice, Norm::common, 2);
  CHECK(difference(as_one.bits(), by_hand.bits()) == "");
  CHECK(difference(as_one.bits(), with_two_norms.bits()) != "");
  CHECK(difference(as_one.bits(), muon_twice.bits()) != "");
}

TEST_CASE("MultiOptimizer: a plain step, without a window") {
  Training as_one, by_hand;
  for (auto* by : {&as_one, &by_hand}) loss_of(by->model, batches()[0]).backward();
  as_one.both->step();
  by_hand.muon->step();
  by_hand.other->step();
  CHECK(difference(as_one.bits(), by_hand.bits()) == "");
  as_one.both->zero_grad();
  for (auto& p : as_one.model->parameters()) CHECK_FALSE(p.grad().defined());
}

TEST_CASE("MultiOptimizer: steps in backward with the same bits") {
  Training after, during;
  train(after, {.steps = 4}, /*clips=*/false);
  train(during, {.steps = 4, .in_backward = true}, /*clips=*/false);
  CHECK(difference(after.bits(), during.bits()) == "");
  ga::GradAccumulator optimizer(*during.both, {.steps = 1, .in_backward = true});
  optimizer.backward(loss_of(during.model, batches()[0]));
  for (auto& p : during.model->parameters()) CHECK_FALSE(p.grad().defined());  // stepped, and freed
  optimizer.step();
  Training with_torchs(/*torchs_own=*/true);
  REQUIRE_ERROR("all members of a MultiOptimizer",
                (ga::GradAccumulator(*with_torchs.both, {.steps = 4, .in_backward = true})));
}

TEST_CASE("MultiOptimizer: NaN or inf in one optimizer's gradients skips both") {
  const bool torchs_own = GENERATE(false, true);
  const double bad = GENERATE(std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity());
  const bool in_matrix = GENERATE(false, true);
  Training by(torchs_own);
  ga::GradAccumulator optimizer(*by.both, {.steps = 2});
  ga::AmpScaler scaler({.init_scale = 1024});
  double times = 1;
  (in_matrix ? by.matrices : by.biases)[1].register_hook([&](const at::Tensor& gradient) { return gradient * times; });
  const auto micro_batch = [&](std::size_t i) {
    times = i == 2 ? bad : 1;
    optimizer.backward(scaler.scale(loss_of(by.model, batches()[i])));
    const auto result = scaler.step(optimizer);
    scaler.update();
    optimizer.zero_grad();
    return result;
  };
  micro_batch(0);
  CHECK(micro_batch(1) == ga::StepResult::stepped);
  const auto before = by.bits();
  micro_batch(2);
  CHECK(micro_batch(3) == ga::StepResult::skipped);
  CHECK(difference(by.bits(), before) == "");
  CHECK(scaler.get_scale() == 512);
  micro_batch(4);
  CHECK(micro_batch(5) == ga::StepResult::stepped);
  CHECK(difference(by.bits(), before) != "");
}

TEST_CASE("MultiOptimizer: with a loss scaler, as by hand with the unscaled gradients") {
  Training scaled, plain;
  ga::AmpScaler scaler({.init_scale = 4096});
  for (auto* by : {&scaled, &plain}) {
    for (auto& batch : batches()) {
      auto loss = loss_of(by->model, batch);
      (by == &scaled ? scaler.scale(loss) : loss).backward();
      by == &scaled ? static_cast<void>(scaler.step(*by->both)) : by->both->step();
      if (by == &scaled) scaler.update();
      by->both->zero_grad();
    }
  }
  CHECK(difference(scaled.bits(), plain.bits()) == "");
}

TEST_CASE("MultiOptimizer: if one cannot step, none does") {
  Training by;
  loss_of(by.model, batches()[0]).backward();
  by.both->step();
  for (const bool muon_first : {true, false}) {
    MultiOptimizer in_order(muon_first ? std::vector<ga::optim::NamedOptimizer>{{"a", *by.muon}, {"b", *by.other}}
                                       : std::vector<ga::optim::NamedOptimizer>{{"a", *by.other}, {"b", *by.muon}});
    loss_of(by.model, batches()[1]).backward();
    by.matrices[0].mutable_grad() = by.matrices[0].grad().to_sparse();
    const auto before = by.bits();
    REQUIRE_ERROR("Muon: a gradient must be dense", in_order.step());
    CHECK(difference(by.bits(), before) == "");
    in_order.zero_grad();
  }
}

namespace {

/// An optimizer of a program, whose step does more than its base's, and may throw.
struct Projecting : ga::optim::SGD {
  using SGD::SGD;
  using SGD::step;
  bool breaks = false;
  int steps = 0;
  void step(ga::Gradients gradients) override {
    TORCH_CHECK(!breaks, "projection broke");
    SGD::step(gradients);
    ++steps;
  }
};

}  // namespace

TEST_CASE("MultiOptimizer: those that check in their step come first, also classes that derive from the library's") {
  Training by;
  loss_of(by.model, batches()[0]).backward();
  const auto before = by.bits();
  Breaks torchs({by.biases[0]}, 0.1);
  Projecting projecting({by.biases[1]}, ga::optim::SGDOptions(0.1));
  MultiOptimizer three({{"muon", *by.muon}, {"projecting", projecting}, {"torchs", torchs}});
  projecting.breaks = true;
  REQUIRE_ERROR("projection broke", three.step());
  CHECK(difference(by.bits(), before) == "");
  projecting.breaks = false;
  REQUIRE_ERROR("step broke", three.step());
  CHECK(projecting.steps == 1);
  CHECK(by.muon->state().empty());
  torchs.breaks = false;
  three.step();
  CHECK(projecting.steps == 2);
  CHECK(by.muon->state().size() == 2);
}

TEST_CASE("MultiOptimizer: an optimizer without gradients in a window is not stepped") {
  Training by;
  ga::GradAccumulator optimizer(*by.both, {.steps = 1});
  for (auto& bias : by.biases) bias.set_requires_grad(false);
  const auto before = by.bits();
  optimizer.backward(loss_of(by.model, batches()[0]));
  CHECK(optimizer.step());
  optimizer.zero_grad();
  const auto changed = difference(by.bits(), before);
  CHECK(contains(changed, "model.0.weight"));
  CHECK_FALSE(contains(changed, "model.0.bias"));
}

TEST_CASE("MultiOptimizer: what it refuses") {
  Training by;
  auto& muon = *by.muon;
  auto& other = *by.other;
  REQUIRE_ERROR("there must be an optimizer, got none", MultiOptimizer({}));
  REQUIRE_ERROR("must not be empty, have a dot", MultiOptimizer({{"", muon}}));
  REQUIRE_ERROR("got 'window'", MultiOptimizer({{"window", muon}}));
  REQUIRE_ERROR("got 'a.b'", MultiOptimizer({{"a.b", muon}}));
  torch::optim::SGD first({by.matrices[0]}, 0.1), second({by.matrices[1]}, 0.1);
  REQUIRE_ERROR("got two of SGD; name them", MultiOptimizer(first, second));
  REQUIRE_ERROR("one of shape [3, 8] is parameter 1 of Muon and parameter 0 of SGD", MultiOptimizer(muon, second));
  torch::optim::LBFGS lbfgs(by.biases);
  REQUIRE_ERROR("must not be LBFGS", MultiOptimizer(muon, lbfgs));
  ga::GradAccumulator accumulator(other, {.steps = 2});
  torch::optim::Optimizer& behind = accumulator;
  REQUIRE_ERROR("must not be another accumulator", MultiOptimizer({{"muon", muon}, {"other", behind}}));
  REQUIRE_ERROR("no optimizer is named Adam, only Muon, AdamW", (*by.both)["Adam"]);
  CHECK(&(*by.both)["Muon"] == &muon);
  MultiOptimizer named({{"one", first}, {"two", second}});
  second.add_param_group({{by.matrices[0]}});  // found at the next step
  by.matrices[0].mutable_grad() = torch::ones_like(by.matrices[0]);
  REQUIRE_ERROR("is parameter 0 of one and parameter 1 of two", named.step());
}

TEST_CASE("MultiOptimizer: a parameter of the model in no optimizer is an error, unless it is frozen") {
  Training by;
  ga::optim::AdamW first_bias({by.biases[0]}, ga::optim::AdamWOptions(0.01));
  MultiOptimizer forgets(*by.muon, first_bias);
  REQUIRE_ERROR("in none are\n  2.bias", forgets.check(*by.model));
  REQUIRE_ERROR("2.bias", ga::Trainer(by.model, forgets, objective));
  ga::Archive archive;  // of a part of the model, such as one of two networks
  ga::OptimizerState(forgets, by.model).state(archive);
  by.biases[1].set_requires_grad(false);
  forgets.check(*by.model);
  ga::Trainer(by.model, forgets, objective).fit(batches());
}

TEST_CASE("MultiOptimizer: learning rates of all in proportion, or of each by its name") {
  Training by;
  ga::LearningRates rates(*by.both);
  rates.set(0.04);
  CHECK((*by.both)["Muon"].param_groups()[0].options().get_lr() == 0.04);
  CHECK((*by.both)["AdamW"].param_groups()[0].options().get_lr() == 0.02);

  torch::optim::OptimizerParamGroup added({torch::zeros({2, 2}).requires_grad_()},
                                          std::make_unique<ga::optim::MuonOptions>(0.04));
  by.muon->add_param_group(added);  // later than all others, though it is the first member's
  rates.set(0.02);
  CHECK(by.muon->param_groups()[0].options().get_lr() == 0.02);
  CHECK(by.muon->param_groups()[1].options().get_lr() == Approx(0.04));
  CHECK(by.other->param_groups()[0].options().get_lr() == Approx(0.01));

  Training named;
  std::vector<double> seen;
  const ga::lr::ByName rates_by_name{{"AdamW", [](std::int64_t update) { return 1.0 + static_cast<double>(update); }}};
  ga::Trainer trainer(named.model, *named.both, objective, ga::Schedule{rates_by_name},
                      [&](const ga::Step&) { seen.push_back(named.other->param_groups()[0].options().get_lr()); });
  trainer.fit(batches(), {.updates = 2});
  CHECK(seen == std::vector{2.0, 3.0});  // of the next update
  CHECK(trainer.learning_rate() == 0.02);
  REQUIRE_ERROR("must name an optimizer",
                ga::Trainer(named.model, *named.both, objective, ga::Schedule{ga::lr::ByName{}}));
  REQUIRE_ERROR("the rate of Muon must be a function",
                ga::Trainer(named.model, *named.both, objective, ga::Schedule{ga::lr::ByName{{"Muon", nullptr}}}));
  const ga::lr::ByName unknown{{"Adam", ga::lr::Constant{.peak = 1}}};
  REQUIRE_ERROR("needs a MultiOptimizer with an optimizer of this name",
                ga::Trainer(named.model, *named.both, objective, ga::Schedule{unknown}));
}

TEST_CASE("MultiOptimizer: a training resumes with the same bits, in a window, too; options by name") {
  const bool torchs_own = GENERATE(false, true);
  const Directory folder;
  const auto trainer_of = [](Training& by) {
    return std::make_unique<ga::Trainer<torch::nn::Sequential, MultiOptimizer, decltype(objective), ga::Accumulate,
                                        ga::ClipNorm, ga::MixedPrecision>>(
        by.model, *by.both, objective, ga::Accumulate{.steps = 3}, ga::ClipNorm{.max = 0.1}, ga::MixedPrecision{});
  };
  Training whole(torchs_own), stopped(torchs_own), resumed(torchs_own), other_rate(torchs_own);
  const auto to_the_end = trainer_of(whole);
  for (auto& batch : batches()) to_the_end->step(batch);
  const auto to_the_middle = trainer_of(stopped);
  for (std::size_t i = 0; i < 5; ++i) to_the_middle->step(batches()[i]);
  ga::save(folder / "state", *to_the_middle);

  const auto from_the_middle = trainer_of(resumed);
  ga::load(folder / "state", *from_the_middle);
  for (std::size_t i = 5; i < batches().size(); ++i) from_the_middle->step(batches()[i]);
  CHECK(difference(whole.bits(), resumed.bits()) == "");
  CHECK(difference(whole.bits(), stopped.bits()) != "");

  const auto options = [&]() -> auto& { return other_rate.other->param_groups()[0].options(); };
  options().set_lr(0.5);
  const auto with_other_rate = trainer_of(other_rate);
  Warnings warnings;
  ga::load(folder / "state", *with_other_rate);
  REQUIRE(warnings.texts().size() == 1);
  CHECK(contains(warnings.texts()[0], torchs_own ? "SGD.group0.lr (0.5" : "AdamW.group0.lr (0.5"));
  CHECK(options().get_lr() == whole.other->param_groups()[0].options().get_lr());
  options().set_lr(0.5);
  ga::load(folder / "state", *trainer_of(other_rate), {.allow_changes = true});
  CHECK(options().get_lr() == 0.5);
  CHECK(other_rate.muon->param_groups()[0].options().get_lr() == 0.02);
}

TEST_CASE("MultiOptimizer: rates by name resume, and hide no change of the others") {
  const Directory folder;
  const auto trainer_of = [](Training& by) {
    const ga::lr::ByName rates{{"AdamW", ga::lr::Linear{.peak = 1, .warmup = 2, .total = 10}}};
    using Policy = ga::Schedule<ga::lr::ByName>;
    return std::make_unique<ga::Trainer<torch::nn::Sequential, MultiOptimizer, decltype(objective), Policy>>(
        by.model, *by.both, objective, Policy{rates});
  };
  Training whole, stopped, resumed;
  const auto to_the_end = trainer_of(whole), to_the_middle = trainer_of(stopped);
  for (auto& batch : batches()) to_the_end->step(batch);
  for (std::size_t i = 0; i < 5; ++i) to_the_middle->step(batches()[i]);
  ga::save(folder / "state", *to_the_middle);
  resumed.muon->param_groups()[0].options().set_lr(0.5);
  const auto from_the_middle = trainer_of(resumed);
  {
    Warnings warnings;
    ga::load(folder / "state", *from_the_middle);
    REQUIRE(warnings.texts().size() == 1);
    CHECK(contains(warnings.texts()[0], "Muon.group0.lr (0.5, was 0.02)"));
    CHECK_FALSE(contains(warnings.texts()[0], "AdamW"));
  }
  for (std::size_t i = 5; i < batches().size(); ++i) from_the_middle->step(batches()[i]);
  CHECK(difference(whole.bits(), resumed.bits()) == "");
}

TEST_CASE("MultiOptimizer: sharded ranks end with the bits of those that are not") {
  const auto shard = GENERATE(ga::Shard::optimizer, ga::Shard::gradients);
  /// A table that is cut among ranks, and matrices that are not.
  struct Rank {
    torch::nn::Sequential model{torch::nn::Linear(64, 200), torch::nn::Tanh(), torch::nn::Linear(200, 8)};
    at::Tensor table = model->register_parameter("table", torch::zeros({20000}));
    std::optional<ga::optim::Muon> muon;
    std::optional<ga::optim::AdamW> adamw;
    std::optional<MultiOptimizer> both;
    std::optional<ga::GradAccumulator<MultiOptimizer>> optimizer;
    std::shared_ptr<const ga::detail::Communicator> of_all = {};

    Rank() {
      const at::NoGradGuard no_grad;
      std::vector<at::Tensor> matrices, others;
      for (auto& p : model->parameters()) {
        p.copy_(torch::sin(torch::arange(p.numel())).reshape(p.sizes()) * 0.1);
        (p.dim() == 2 ? matrices : others).push_back(p);
      }
      muon.emplace(matrices, ga::optim::MuonOptions(0.02).ns_dtype(at::kFloat));
      adamw.emplace(others, ga::optim::AdamWOptions(0.01));
      both.emplace(*muon, *adamw);
      optimizer.emplace(*both, ga::GradAccumulatorOptions{.steps = 2});
    }
    void train(int rank, int from, int to, bool clips) {
      for (int i = from; i < to; ++i) {
        const auto x = torch::sin(torch::arange(128).reshape({2, 64}) * (0.1 * i + rank + 1));
        optimizer->backward(ga::Loss{model->forward(x).pow(2).mean() + (table - 0.1 * i).pow(2).mean(), 2});
        if (clips) optimizer->clip_grad_norm_(0.05);
        optimizer->step();
        optimizer->zero_grad();
      }
    }
    std::int64_t updates() const { return optimizer->updates(); }
    auto peers() const { return of_all; }
    void state(ga::Archive& archive) {
      archive("model", ga::ModelState(model));
      archive("optimizer", ga::OptimizerState(*optimizer, model));
    }
    Bits bits() const {
      Bits all;
      all.add_model(*model);
      return all;
    }
  };
  const Directory folder;
  const auto run = [&](ga::Shard how, int from, int to, bool loads) {
    std::vector<Rank> ranks(2);
    tests::as_ranks(2, [&](const ga::ProcessGroup& group) {
      auto& rank = ranks[static_cast<std::size_t>(group.rank())];
      ga::Replicas replicas(group, rank.model, *rank.optimizer, {.seed_by_rank = false, .shard = how});
      rank.of_all = replicas.peers();
      if (loads) ga::load(folder / "state", rank);
      rank.train(group.rank(), from, to, shard == ga::Shard::optimizer);  // shards' norms have other last bits
      if (how != ga::Shard::none && !loads) ga::save(folder / "state", rank);
      replicas.check_equal();
      rank.of_all = nullptr;
    });
    return ranks;
  };
  const auto plain = run(ga::Shard::none, 0, 8, false), sharded = run(shard, 0, 4, false),
             resumed = run(shard, 4, 8, true);
  if (shard == ga::Shard::optimizer) CHECK(difference(plain[0].bits(), resumed[0].bits()) == "");
  CHECK(distance(flat(resumed[0].model), flat(plain[0].model)) < 1e-5);  // sums in another order, with Shard::gradients
  CHECK(difference(plain[0].bits(), sharded[0].bits()) != "");
  std::int64_t of_table = 0, of_matrices = 0;
  for (auto& rank : sharded) {
    for (auto& [parameter, state] : rank.adamw->state()) {
      const auto elements = static_cast<torch::optim::AdamWParamState&>(*state).exp_avg().numel();
      if (elements > 200) of_table += elements < 20000;
    }
    of_matrices += static_cast<std::int64_t>(rank.muon->state().size());
  }
  CHECK(of_table == 2);     // cut
  CHECK(of_matrices == 2);  // each on one rank
}

TEST_CASE("MultiOptimizer: on a device as on the processor, also when the device skips a step", "[cuda]") {
  const auto device = at::Device(at::kCUDA, 0);
  Training here, there(/*torchs_own=*/false, device), host_judges(/*torchs_own=*/true, device);
  const auto trained = [&](Training& by) {
    std::vector<ga::StepResult> results;
    ga::GradAccumulator optimizer(*by.both, {.steps = 1});
    ga::AmpScaler scaler({.init_scale = 1024, .on_device = true});
    bool overflows = false;
    by.biases[0].register_hook([&](const at::Tensor& gradient) {
      return overflows ? gradient * std::numeric_limits<double>::infinity() : gradient;
    });
    for (std::size_t i = 0; i < 4; ++i) {
      overflows = i == 1;
      const Example batch{batches()[i].data.to(by.biases[0].device()), batches()[i].target.to(by.biases[0].device())};
      optimizer.backward(scaler.scale(loss_of(by.model, batch)));
      results.push_back(scaler.step(optimizer));
      scaler.update();
      optimizer.zero_grad();
    }
    return results;
  };
  trained(here);
  for (auto& result : trained(there)) CHECK(result == ga::StepResult::left_to_device);
  CHECK(trained(host_judges)[1] == ga::StepResult::skipped);
  CHECK(distance(flat(there.model).cpu(), flat(here.model)) < 1e-5);
  CHECK(static_cast<ga::optim::AdamW&>(*there.other).state().size() == 2);
  for (auto& [parameter, state] : static_cast<ga::optim::AdamW&>(*there.other).state())
    CHECK(static_cast<torch::optim::AdamWParamState&>(*state).step() == 3);

  if (!FailingAllocation::possible() || !ga::detail::device_kernels()) return;  // ATen takes memory in a step
  loss_of(there.model, Example{batches()[0].data.to(device), batches()[0].target.to(device)}).backward();
  const auto before = there.bits();
  for (int nth = 1; nth < 30; ++nth) {
    bool failed = false;
    try {
      const FailingAllocation failing(nth);
      there.both->step();
    } catch (const c10::Error&) {
      failed = true;
    }
    if (!failed) {
      CHECK(nth > 1);
      CHECK(difference(there.bits(), before) != "");
      return;
    }
    CHECK(difference(there.bits(), before) == "");
  }
  FAIL("every allocation failed");
}

TEST_CASE("MultiOptimizer: steps with the gradients of a captured graph, and averages follow", "[cuda]") {
  const auto device = at::Device(at::kCUDA, 0);
  if (!has_graphs(device)) SKIP("needs a device whose work can be captured");
  Training eager(/*torchs_own=*/false, device), graphed(/*torchs_own=*/false, device);
  const Example batch{batches()[0].data.to(device), batches()[0].target.to(device)};
  const auto train = [&](Training& by, auto& step) {
    ga::GradAccumulator optimizer(*by.both, {.steps = 2});
    ga::Ema::Running ema({.decay = 0.9});
    for (int i = 0; i < 12; ++i) {
      optimizer.backward(step(batch));
      optimizer.clip_grad_norm_(0.05);
      if (optimizer.step()) ema.update(by.model);
      optimizer.zero_grad();
    }
    ema.swap(by.model);
  };
  const auto without_graph = [&](const Example& of) { return objective(eager.model, of); };
  ga::GraphedStep with_graph(graphed.model, objective);
  train(eager, without_graph);
  train(graphed, with_graph);
  CHECK(with_graph.report().replayed > 0);
  CHECK(distance(flat(graphed.model).cpu(), flat(eager.model).cpu()) < 1e-6);
}
