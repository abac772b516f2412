// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/checkpointed_sequential.hpp>
#include <gradaccum/grad_accumulator.hpp>
#include <gradaccum/optim/adamw.hpp>
#include <gradaccum/trainer.hpp>

#include "support/chains.hpp"
#include "support/models.hpp"

#include <memory>
#include <random>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace ga = gradaccum;
namespace nn = torch::nn;
using namespace testing;

namespace {

constexpr std::int64_t plenty = std::int64_t{1} << 40;

// Counts its runs.
struct CountedImpl : nn::Module {
  at::Tensor forward(const at::Tensor& x) {
    ++runs;
    return x.sin();
  }
  int runs = 0;
};
TORCH_MODULE(Counted);

// Makes a random chain, of matrices or of images, which depends only on the seed.
Chain random_chain(int seed) {
  std::mt19937 lot(seed);
  torch::manual_seed(seed);
  const bool images = lot() % 3 == 0;
  const auto dtype = lot() % 2 ? at::kDouble : at::kFloat;
  nn::Sequential net;
  Chain chain{"seed " + std::to_string(seed), net, randoms({4, 8}, dtype), dtype == at::kFloat && lot() % 3 == 0};
  if (images) {
    chain.input = randoms({3, 2, 6, 6}, dtype);
    net->push_back(convolution(2, 4));
    for (int i = 0; i < 5; ++i) switch (lot() % 4) {
        case 0:
          net->push_back(convolution(4, 4));
          break;
        case 1:
          net->push_back(nn::BatchNorm2d(4));
          break;
        case 2:
          net->push_back(nn::Dropout2d(0.3));
          break;
        default:
          push_activation(net, static_cast<int>(lot() % 6));
      }
    net->push_back(nn::Flatten());
    net->push_back(nn::Linear(144, 8));
  } else if (lot() % 3 == 0) {
    chain.input = torch::randint(0, 12, {4});
    net->push_back(nn::Embedding(12, 8));
  }
  for (int i = 0; i < 8; ++i) switch (lot() % 9) {
      case 0:
      case 1:
        net->push_back(nn::Linear(8, 8));
        break;
      case 2:
        net->push_back(nn::BatchNorm1d(8));
        break;
      case 3:
        net->push_back(nn::LayerNorm(nn::LayerNormOptions({8})));
        break;
      case 4:
        net->push_back(Residual(nn::Sequential(nn::Linear(8, 16), nn::GELU(), nn::Dropout(0.2), nn::Linear(16, 8))));
        break;
      case 5:
        net->push_back(nn::Unflatten(nn::UnflattenOptions(1, {2, 4})));
        net->push_back(nn::Flatten());
        break;
      case 6:
        net->push_back(function([](at::Tensor x) { return x * torch::rand_like(x); }));
        break;
      default:
        push_activation(net, static_cast<int>(lot() % 6));
    }
  net->push_back(nn::Linear(8, 3));
  net->to(dtype);
  return chain;
}

std::vector<std::string> names(const torch::OrderedDict<std::string, at::Tensor>& tensors) {
  std::vector<std::string> result;
  for (auto& tensor : tensors) result.push_back(tensor.key());
  return result;
}

}  // namespace

TEST_CASE("CheckpointedSequential: a step of a random chain is bitwise the Sequential's, with any segments") {
  for (int seed = 0; seed < 30; ++seed) {
    const auto chain = random_chain(seed);
    INFO(chain.name);
    Rig rig(chain);
    const auto plain = rig.step(chain.net);
    const auto size = static_cast<std::int64_t>(chain.net->size());
    for (std::int64_t segments = 1; segments <= size; ++segments) {
      INFO("segments " << segments);
      ga::CheckpointedSequential net(chain.net, {.segments = segments});
      const auto step = rig.step(net);
      CHECK(difference(step.outcome, plain.outcome) == "");
      CHECK(step.left == 0);
      if (segments == 1) CHECK(step.held == plain.held);
    }
  }
}

TEST_CASE("CheckpointedSequential: a step of a random chain is bitwise the Sequential's, with any budget") {
  for (int seed = 0; seed < 30; seed += 3) {
    const auto chain = random_chain(seed);
    INFO(chain.name);
    Rig rig(chain);
    const auto plain = rig.step(chain.net);
    ga::CheckpointedSequential ample(chain.net, {.memory_budget = plenty});
    CHECK(difference(rig.step(ample).outcome, plain.outcome) == "");
    const auto least = ample->plan().least_bytes, most = ample->plan().plain.peak_bytes;
    for (auto budget : {least, (least + most) / 2}) {
      ga::CheckpointedSequential net(chain.net, {.memory_budget = budget});
      for (int i = 0; i < 2; ++i) {
        const auto step = rig.step(net);
        CHECK(difference(step.outcome, plain.outcome) == "");
        if (i > 0) CHECK(step.peak <= budget);
      }
    }
  }
}

TEST_CASE("CheckpointedSequential: the comparison detects one more random number") {
  auto chain = varied_chain();
  Rig rig(chain);
  const auto plain = rig.step(chain.net);
  ga::CheckpointedSequential net(chain.net, {.segments = 4, .checkpoint = {.preserve_rng = false}});
  CHECK(difference(rig.step(net).outcome, plain.outcome) == "gradients random");
}

TEST_CASE("CheckpointedSequential: options of checkpoint") {
  auto chain = convolution_chain();
  Rig rig(chain);
  const auto plain = rig.step(chain.net);
  for (bool early_stop : {true, false})
    for (bool check_content : {true, false})
      for (std::int64_t segments : {0, 3, 15}) {
        ga::CheckpointedSequential net(chain.net,
                                       {.segments = segments,
                                        .memory_budget = segments > 0 ? 0 : 125'000,
                                        .checkpoint = {.early_stop = early_stop, .check_content = check_content}});
        CHECK(difference(rig.step(net).outcome, plain.outcome) == "");
      }
  // A module's own generator is not restored, which check_content detects.
  nn::Sequential noisy(nn::Linear(4, 4), function([generator = at::detail::createCPUGenerator(3)](at::Tensor x) {
                         return x * torch::rand(x.sizes(), generator);
                       }),
                       nn::Linear(4, 4), nn::Linear(4, 4));
  ga::CheckpointedSequential net(noisy, {.segments = 2, .checkpoint = {.check_content = true}});
  REQUIRE_ERROR("contents of a saved tensor", net->forward(torch::ones({2, 4})).sum().backward());
}

TEST_CASE("CheckpointedSequential: segments are as even as possible, and all but the last are recomputed") {
  nn::Sequential sequential;
  std::vector<Counted> counted;
  for (int i = 0; i < 7; ++i) sequential->push_back(counted.emplace_back());
  const auto runs = [&](std::int64_t segments, bool early_stop) {
    ga::CheckpointedSequential net(sequential, {.segments = segments, .checkpoint = {.early_stop = early_stop}});
    auto y = net->forward(torch::ones({2}).requires_grad_());
    for (auto& each : counted) CHECK(std::exchange(each->runs, 0) == 1);
    y.sum().backward();
    std::string result;
    for (auto& each : counted) result += std::to_string(std::exchange(each->runs, 0));
    return net->plan().schedule + ": " + result;
  };
  CHECK(runs(1, true) == "0-6: 0000000");
  CHECK(runs(2, true) == "[0-2] 3-6: 1110000");
  CHECK(runs(3, true) == "[0-1] [2-3] 4-6: 1111000");
  CHECK(runs(4, true) == "[0] [1-2] [3-4] 5-6: 1111100");
  CHECK(runs(7, false) == "[0] [1] [2] [3] [4] [5] 6: 1111110");
}

TEST_CASE("CheckpointedSequential: runs as the plan says") {
  // Each stage is a layer and a counter.
  torch::manual_seed(1);
  nn::Sequential sequential;
  std::vector<Counted> counted;
  for (int i = 0; i < 6; ++i) {
    sequential->push_back(nn::Linear(8, 8));
    sequential->push_back(counted.emplace_back());
  }
  const auto x = randoms({16, 8});
  ga::CheckpointedSequential ample(sequential, {.memory_budget = plenty});
  ample->forward(x);
  CHECK(ample->plan().schedule == "0-11");
  ga::CheckpointedSequential net(sequential, {.memory_budget = ample->plan().least_bytes});
  net->forward(x);
  for (auto& each : counted) each->runs = 0;
  net->forward(x).sum().backward();
  const auto schedule = net->plan().schedule;
  INFO(schedule);
  int depth = 0, stage = -1;
  std::vector<int> expected;
  for (std::size_t i = 0; i < schedule.size(); ++i) {
    if (schedule[i] == '[') ++depth;
    if (schedule[i] == ']') --depth;
    if (!std::isdigit(schedule[i])) continue;
    std::size_t digits = 0;
    const int last = std::stoi(schedule.substr(i), &digits);
    const bool is_end_of_range = i > 0 && schedule[i - 1] == '-';
    for (stage = is_end_of_range ? stage + 1 : last; stage <= last; ++stage)
      if (stage % 2 == 1) expected.push_back(1 + depth);
    stage = last;
    i += digits - 1;
  }
  std::vector<int> runs;
  for (auto& each : counted) runs.push_back(each->runs);
  CHECK(runs == expected);
  CHECK(depth == 0);
  CHECK(std::ranges::max(runs) > 1);
}

TEST_CASE("CheckpointedSequential: without gradients it is a plain call") {
  nn::Sequential sequential;
  std::vector<Counted> counted;
  for (int i = 0; i < 3; ++i) sequential->push_back(counted.emplace_back());
  for (const auto& options : {ga::CheckpointedSequentialOptions{.segments = 3}, {.memory_budget = 1}}) {
    ga::CheckpointedSequential net(sequential, options);
    {
      const at::NoGradGuard no_gradients;
      net->forward(torch::ones({2}));
    }
    {
      const c10::InferenceMode inference;
      net->forward(torch::ones({2}));
    }
    for (auto& each : counted) CHECK(std::exchange(each->runs, 0) == 2);
  }
}

namespace {

/// Takes a second tensor, which masks rows of the first.
struct MaskedImpl : nn::Module {
  MaskedImpl()
      : inner(register_module("inner", nn::Linear(8, 8))), dropout(register_module("dropout", nn::Dropout(0.2))) {}
  at::Tensor forward(const at::Tensor& x, const at::Tensor& mask) {
    return x + dropout(inner(x)).sin().masked_fill(mask.unsqueeze(1), 0);
  }
  nn::Linear inner;
  nn::Dropout dropout;
};
TORCH_MODULE(Masked);

/// Runs two forward passes with different masks, and then both backward passes.
std::vector<at::Tensor> outcome_of_two_masks(nn::Sequential blocks, const at::Tensor& x, const at::Tensor& second_mask,
                                             const std::function<at::Tensor(at::Tensor, at::Tensor)>& run) {
  blocks->zero_grad();
  torch::manual_seed(2);
  const auto input = x.clone().requires_grad_();
  const auto mask = torch::arange(x.size(0)) < 2;
  const auto first = run(input, mask), second = run(input, second_mask);
  (first.sum() + second.square().sum()).backward();
  auto all = take_gradients(blocks->parameters());
  all.insert(all.end(), {first.detach(), second.detach(), input.grad(), torch::rand({2})});
  return all;
}

}  // namespace

TEST_CASE("CheckpointedSequential: a context reaches every module, and each recomputation gets its own") {
  torch::manual_seed(1);
  nn::Sequential blocks(Masked{}, Masked{}, Masked{}, Masked{});
  const auto x = torch::randn({6, 8}), mask = torch::arange(6) > 3;
  const auto plain = outcome_of_two_masks(blocks, x, mask, [&](at::Tensor h, const at::Tensor& m) {
    for (auto& block : *blocks) h = block.forward(h, m);
    return h;
  });
  for (const auto& options :
       {ga::CheckpointedSequentialOptions{.segments = 1}, ga::CheckpointedSequentialOptions{.segments = 3},
        ga::CheckpointedSequentialOptions{.segments = 4}, ga::CheckpointedSequentialOptions{.memory_budget = plenty},
        ga::CheckpointedSequentialOptions{.memory_budget = 4096}}) {
    ga::CheckpointedSequential net(blocks, options);
    const auto run = [&](const at::Tensor& h, const at::Tensor& m) { return net->forward(h, m); };
    CHECK(same_bits(outcome_of_two_masks(blocks, x, mask, run), plain));
    CHECK_FALSE(same_bits(outcome_of_two_masks(blocks, x, mask.logical_not(), run), plain));
    REQUIRE_ERROR("the context must not require grad", net->forward(x, torch::ones({6}).requires_grad_()));
  }
  ga::CheckpointedSequential net(blocks, {.segments = 2});
  REQUIRE_THROWS(net->forward(x));  // each block requires a mask
}

TEST_CASE("CheckpointedSequential: within a Sequential, and planned again for a larger context") {
  nn::Sequential inner(nn::Linear(4, 4), nn::Tanh()), masked(Masked{}, Masked{});
  nn::Sequential outer(ga::CheckpointedSequential(inner, ga::CheckpointedSequentialOptions{.segments = 2}), nn::Tanh());
  CHECK(outer->forward(torch::ones({2, 4})).equal(inner->forward(torch::ones({2, 4})).tanh()));
  ga::CheckpointedSequential net(masked, {.memory_budget = plenty});
  const auto x = torch::randn({6, 8}).requires_grad_(), mask = torch::ones({6}, at::kBool);
  const auto time_of_plan = [&](const at::Tensor& context) {
    net->forward(x, context).sum().backward();
    return net->plan().predicted.seconds;
  };
  const auto first = time_of_plan(mask.narrow(0, 0, 1));
  CHECK(time_of_plan(mask.narrow(0, 0, 1)) == first);
  const auto second = time_of_plan(mask);
  CHECK(second != first);
  CHECK(time_of_plan(mask.narrow(0, 0, 1)) == first);
  for (const auto& of_another_rank : {mask.unsqueeze(1), torch::ones({6, 8}, at::kBool)}) {
    const auto time = time_of_plan(of_another_rank);
    CHECK(time != first);
    CHECK(time != second);
    CHECK(time_of_plan(of_another_rank) == time);
    CHECK(time_of_plan(mask) == second);
  }
}

TEST_CASE("CheckpointedSequential: has the names, parameters and buffers of the Sequential") {
  nn::Sequential numbered(nn::Linear(4, 6), nn::BatchNorm1d(6), nn::Tanh(),
                          Residual(nn::Sequential(nn::Linear(6, 6), nn::Tanh())), nn::Linear(6, 2));
  nn::Sequential named({{"in", nn::AnyModule(nn::Linear(4, 6))},
                        {"norm", nn::AnyModule(nn::BatchNorm1d(6))},
                        {"out", nn::AnyModule(nn::Linear(6, 2))}});
  for (auto& sequential : {numbered, named}) {
    ga::CheckpointedSequential net(sequential, {.segments = 2});
    CHECK(names(net->named_parameters()) == names(sequential->named_parameters()));
    CHECK(names(net->named_buffers()) == names(sequential->named_buffers()));
    for (auto& parameter : net->named_parameters())
      CHECK(parameter.value().is_same(sequential->named_parameters()[parameter.key()]));
    CHECK(net->children().size() == sequential->size());
    std::ostringstream text;
    text << net;
    CHECK(contains(text.str(), "gradaccum::CheckpointedSequential("));
    CHECK(contains(text.str(), "torch::nn::Linear(in_features=6, out_features=2, bias=true)"));

    const auto x = randoms({5, 4});
    net->forward(x).sum().backward();
    CHECK(sequential->parameters()[0].grad().defined());
    net->zero_grad();
    CHECK_FALSE(sequential->parameters()[0].grad().defined());
    net->eval();
    CHECK_FALSE(sequential->ptr(1)->is_training());
    net->train();
    CHECK(sequential->ptr(1)->is_training());
    net->to(at::kDouble);
    CHECK(sequential->parameters()[0].scalar_type() == at::kDouble);
    CHECK(net->forward(x.to(at::kDouble)).scalar_type() == at::kDouble);
  }
}

TEST_CASE("CheckpointedSequential: saved, it loads into the Sequential, and the other way round") {
  const auto make = [](int seed) {
    torch::manual_seed(seed);
    return nn::Sequential(nn::Linear(4, 6), nn::BatchNorm1d(6), nn::Tanh(), nn::Linear(6, 2));
  };
  const auto x = randoms({5, 4});
  auto one = make(1), other = make(2);
  one->forward(x);  // changes statistics
  ga::CheckpointedSequential net(one, {.segments = 2});
  std::stringstream file;
  torch::save(net, file);
  torch::load(other, file);
  CHECK(same_bits(copies(other->parameters()), copies(one->parameters())));
  CHECK(same_bits(copies(other->buffers()), copies(one->buffers())));
  auto third = make(3);
  ga::CheckpointedSequential loaded(third, {.memory_budget = plenty});
  std::stringstream back;
  torch::save(other, back);
  torch::load(loaded, back);
  CHECK(same_bits(copies(third->parameters()), copies(one->parameters())));
  CHECK(same_bits(copies(third->buffers()), copies(one->buffers())));
}

TEST_CASE("CheckpointedSequential: a clone is independent, and does the same") {
  const auto chain = convolution_chain();
  for (const auto& options : {ga::CheckpointedSequentialOptions{.segments = 4}, {.memory_budget = 125'000}}) {
    ga::CheckpointedSequential net(chain.net, options);
    net->eval();
    net->forward(chain.input);
    auto copy = ga::CheckpointedSequential(std::dynamic_pointer_cast<ga::CheckpointedSequentialImpl>(net->clone()));
    REQUIRE(copy);
    CHECK(names(copy->named_parameters()) == names(net->named_parameters()));
    CHECK(same_bits(copies(copy->parameters()), copies(net->parameters())));
    for (std::size_t i = 0; i < copy->parameters().size(); ++i)
      CHECK_FALSE(copy->parameters()[i].is_same(net->parameters()[i]));
    CHECK(copy->children()[1]->is_training() == net->children()[1]->is_training());
    CHECK(same_bits(copy->forward(chain.input), net->forward(chain.input)));
    CHECK(copy->plan().memory_budget == net->plan().memory_budget);
    copy->forward(chain.input).sum().backward();
    CHECK(copy->parameters()[0].grad().defined());
    if (options.memory_budget > 0) {
      copy->set_memory_budget(0);  // keeps everything, which options cannot express
      const auto again = std::dynamic_pointer_cast<ga::CheckpointedSequentialImpl>(copy->clone());
      CHECK(again->options().memory_budget == 0);
      CHECK(same_bits(again->forward(chain.input), net->forward(chain.input)));
      copy->set_memory_budget(1, /*or_least=*/true);
      const auto least = std::dynamic_pointer_cast<ga::CheckpointedSequentialImpl>(copy->clone());
      CHECK(same_bits(least->forward(chain.input), net->forward(chain.input)));
    }
    CHECK_FALSE(net->parameters()[0].grad().defined());
    const auto before = copies(net->parameters());
    {
      const at::NoGradGuard no_gradients;
      for (auto& parameter : copy->parameters()) parameter.add_(1);
    }
    CHECK(same_bits(copies(net->parameters()), before));
    CHECK_FALSE(same_bits(copy->forward(chain.input), net->forward(chain.input)));
    net->train();
  }
}

TEST_CASE("CheckpointedSequential: under its own name in a larger module") {
  struct NetImpl : nn::Module {
    explicit NetImpl(const ga::CheckpointedSequentialOptions& options)
        : blocks(register_module(
              "blocks",
              ga::CheckpointedSequential(nn::Sequential(nn::Linear(4, 8), nn::Tanh(), nn::Linear(8, 8)), options))),
          head(register_module("head", nn::Linear(8, 3))) {}
    at::Tensor forward(const at::Tensor& x) { return head(blocks->forward(x)); }
    ga::CheckpointedSequential blocks;
    nn::Linear head;
  };
  NetImpl net({.segments = 2});
  CHECK(names(net.named_parameters()) == std::vector<std::string>{"blocks.0.weight", "blocks.0.bias", "blocks.2.weight",
                                                                  "blocks.2.bias", "head.weight", "head.bias"});
  net.forward(randoms({2, 4})).sum().backward();
  for (auto& parameter : net.parameters()) CHECK(parameter.grad().defined());
}

TEST_CASE("CheckpointedSequential: trains as the Sequential does, with accumulation and in a Trainer") {
  const auto batches = make_batches({5, 5, 3, 5, 5}, at::kFloat);
  const auto sequential = [] {
    torch::manual_seed(1);
    return nn::Sequential(nn::Linear(4, 16), nn::BatchNorm1d(16), nn::GELU(), nn::Dropout(0.2), nn::Linear(16, 16),
                          nn::SiLU(), nn::Linear(16, 3));
  };
  const auto trained = [&](auto model, auto&& run) {
    ga::optim::AdamW adamw(model->parameters(), ga::optim::AdamWOptions(0.01));
    torch::manual_seed(8);
    run(model, adamw);
    auto all = copies(model->parameters());
    for (auto& buffer : copies(model->buffers())) all.push_back(buffer);
    all.push_back(random_state());
    return all;
  };
  const auto by_hand = [&](auto& model, auto& adamw) {
    ga::GradAccumulator optimizer(adamw, {.steps = 2});
    for (int epoch = 0; epoch < 3; ++epoch) {
      for (auto& batch : batches) {
        loss_of(model, batch).backward();
        optimizer.step();
        optimizer.zero_grad();
      }
      optimizer.flush();
    }
  };
  const auto by_trainer = [&](auto& model, auto& adamw) {
    ga::Trainer trainer(
        model, adamw, [](auto& net, auto& batch) { return loss_of(net, batch); }, ga::Accumulate{.steps = 2});
    trainer.fit(batches, {.epochs = 3});
  };
  ga::CheckpointedSequential ample(sequential(), {.memory_budget = plenty});
  loss_of(ample, batches[0]);
  const auto budget = (ample->plan().least_bytes + ample->plan().plain.peak_bytes) / 2;
  const auto compare = [&](auto&& run) {
    const auto plain = trained(sequential(), run);
    CHECK(same_bits(trained(ga::CheckpointedSequential(sequential(), {.segments = 3}), run), plain));
    CHECK(same_bits(trained(ga::CheckpointedSequential(sequential(), {.memory_budget = budget}), run), plain));
    auto other = sequential();
    other->parameters()[0].detach()[0][0] += 1e-5;
    CHECK_FALSE(same_bits(trained(other, run), plain));
  };
  compare(by_hand);
  compare(by_trainer);
}

TEST_CASE("CheckpointedSequential: invalid options") {
  const nn::Sequential three(nn::Linear(4, 4), nn::Tanh(), nn::Linear(4, 4));
  using Net = ga::CheckpointedSequential;
  REQUIRE_ERROR("exactly one of segments and memory_budget must be given, got segments = 0 and memory_budget = 0",
                Net(three, ga::CheckpointedSequentialOptions{}));
  REQUIRE_ERROR("exactly one of segments and memory_budget must be given, got segments = 2 and memory_budget = 100",
                Net(three, {.segments = 2, .memory_budget = 100}));
  REQUIRE_ERROR("segments must be 1 to 3, the number of modules, got 4", Net(three, {.segments = 4}));
  REQUIRE_ERROR("segments must be 1 to 3, the number of modules, got -1", Net(three, {.segments = -1}));
  REQUIRE_ERROR("memory_budget must be > 0 bytes, got -5", Net(three, {.memory_budget = -5}));
  REQUIRE_ERROR("the Sequential must have modules, got none", Net(nn::Sequential(), {.segments = 1}));
  REQUIRE_ERROR("empty ModuleHolder", Net(nn::Sequential(nullptr), {.segments = 1}));
  CHECK(Net(three, {.segments = 3})->forward(torch::ones({1, 4})).defined());
}

TEST_CASE("CheckpointedSequential: the plan and its text") {
  const auto chain = varied_chain();
  ga::CheckpointedSequential segments(chain.net, {.segments = 2});
  CHECK(segments->plan().schedule == "[0-8] 9-18");
  CHECK_FALSE(segments->plan().memory_budget);
  std::ostringstream by_segments;
  by_segments << segments->plan();
  CHECK(by_segments.str() == "schedule: [0-8] 9-18\n");

  ga::CheckpointedSequential net(chain.net, {.memory_budget = plenty});
  REQUIRE_ERROR("CheckpointedSequential: there is no plan yet; run a forward pass with gradients first", net->plan());
  {
    const at::NoGradGuard no_gradients;
    net->forward(chain.input);
  }
  REQUIRE_ERROR("there is no plan", net->plan());
  net->forward(chain.input);
  const auto ample = net->plan();
  CHECK(ample.schedule == "0-18");
  CHECK(ample.predicted.peak_bytes == ample.plain.peak_bytes);
  CHECK(ample.predicted.seconds == ample.plain.seconds);
  CHECK(ample.least_bytes < ample.plain.peak_bytes);

  const auto budget = (ample.least_bytes + ample.plain.peak_bytes) / 2;
  ga::CheckpointedSequential tight(chain.net, {.memory_budget = budget});
  tight->forward(chain.input);
  const auto plan = tight->plan();
  CHECK(plan.memory_budget == budget);
  CHECK(plan.predicted.peak_bytes <= budget);
  CHECK(plan.predicted.seconds > plan.plain.seconds);
  CHECK(plan.plain.seconds > 0);
  CHECK(plan.plain.peak_bytes == ample.plain.peak_bytes);
  std::ostringstream text;
  text << plan;
  CHECK(text.str().starts_with("budget 0.05 MiB: peak 0.0"));
  CHECK(contains(text.str(), " MiB (plain 0.07, least 0.02), +"));
  CHECK(contains(text.str(), "schedule: " + plan.schedule));
}

TEST_CASE("CheckpointedSequential: an activation that overwrites its input, at the beginning of a segment") {
  const auto x = randoms({3, 4});
  nn::Sequential relu(nn::Linear(4, 4), nn::ReLU(nn::ReLUOptions().inplace(true)), nn::Linear(4, 4), nn::Linear(4, 4));
  ga::CheckpointedSequential beginning(relu, {.segments = 3});  // [0] [1] 2-3
  REQUIRE_ERROR("must not change its inputs in place", beginning->forward(x));
  Rig rig({"relu", relu, x});
  const auto plain = rig.step(relu);
  ga::CheckpointedSequential behind(relu, {.segments = 2});  // [0-1] 2-3
  CHECK(difference(rig.step(behind).outcome, plain.outcome) == "");
}
