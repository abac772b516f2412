// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/amp_scaler.hpp>
#include <gradaccum/detail/parallel/replica_communicator.hpp>
#include <gradaccum/grad_accumulator.hpp>
#include <gradaccum/optim/sgd.hpp>
#include <gradaccum/replicas.hpp>
#include <gradaccum/training_state.hpp>

#include "support/files.hpp"
#include "support/models.hpp"
#include "support/ranks.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

namespace ga = gradaccum;
using namespace testing;

namespace {

/// Models and optimizers for each rank, made before the threads begin, because they share random numbers.
struct Rank {
  torch::nn::Sequential model = make_model();
  std::unique_ptr<torch::optim::Adam> adam;
  std::unique_ptr<ga::GradAccumulator<torch::optim::Adam>> optimizer;

  explicit Rank(std::int64_t steps, bool differs = false) {
    if (differs) {
      const torch::NoGradGuard no_grad;
      for (auto& parameter : model->parameters()) parameter.mul_(-2);
    }
    adam = std::make_unique<torch::optim::Adam>(model->parameters(), torch::optim::AdamOptions(0.1));
    optimizer =
        std::make_unique<ga::GradAccumulator<torch::optim::Adam>>(*adam, ga::GradAccumulatorOptions{.steps = steps});
  }

  void backward(const Example& batch) {
    const auto device = model->parameters()[0].device();
    const Example here(batch.data.to(device), batch.target.to(device));
    optimizer->backward(ga::Loss{loss_of(model, here), static_cast<double>(batch.data.size(0))});
    optimizer->step();
    optimizer->zero_grad();
  }
};

std::vector<Rank> make_ranks(std::size_t number, std::int64_t steps) {
  std::vector<Rank> ranks;
  for (std::size_t i = 0; i < number; ++i) ranks.emplace_back(steps, i > 0);
  return ranks;
}

/// Rank i % ranks trains on the i-th batch; a rank with fewer batches takes part in the others' windows.
void train(std::vector<Rank>& ranks, const std::vector<Example>& batches, ga::ReplicasOptions options) {
  tests::as_ranks(static_cast<int>(ranks.size()), [&](const ga::ProcessGroup& group) {
    const auto number = static_cast<std::size_t>(group.rank());
    auto& rank = ranks[number];
    ga::Replicas replicas(group, rank.model, *rank.optimizer, options);
    for (std::size_t i = number; i < batches.size(); i += ranks.size()) rank.backward(batches[i]);
    rank.optimizer->flush();
    while (replicas.others_continue()) {
      rank.optimizer->step();
      rank.optimizer->zero_grad();
    }
    replicas.check_equal();
  });
}

}  // namespace

TEST_CASE("Replicas: any number of ranks trains like one process, also with uneven batches") {
  const std::size_t number = GENERATE(2, 4);
  const std::int64_t steps = GENERATE(1, 3);
  const bool overlap = GENERATE(true, false);
  const std::int64_t bucket_bytes = GENERATE(1, 200);
  for (std::size_t count : {15, 3}) {
    std::vector<std::int64_t> sizes;
    for (std::size_t i = 0; i < count; ++i) sizes.push_back(1 + static_cast<std::int64_t>(i * i % 7));
    const auto batches = make_batches(sizes);

    Rank one(steps * static_cast<std::int64_t>(number));
    for (auto& batch : batches) one.backward(batch);
    one.optimizer->flush();

    auto ranks = make_ranks(number, steps);
    train(ranks, batches, {.bucket_bytes = bucket_bytes, .overlap = overlap, .seed_by_rank = false});
    for (auto& rank : ranks) {
      CHECK(distance(rank.model, one.model) < 1e-12);
      CHECK(torch::equal(flat(rank.model), flat(ranks[0].model)));
      CHECK(rank.optimizer->updates() == one.optimizer->updates());
    }
    // The mean of means differs.
    Rank other(steps * static_cast<std::int64_t>(number));
    for (auto& batch : batches) {
      other.optimizer->backward(loss_of(other.model, batch));
      other.optimizer->step();
      other.optimizer->zero_grad();
    }
    other.optimizer->flush();
    CHECK(distance(other.model, one.model) > 1e-4);
  }
}

TEST_CASE("Replicas: buckets are sent in the order of their completion in backward") {
  std::vector<at::Tensor> parameters;  // of four layers with a bias
  for (int layer = 0; layer < 4; ++layer)
    for (auto size : {std::int64_t{1} << 18, std::int64_t{1000}})
      parameters.push_back(torch::zeros({size}).requires_grad_());
  std::vector<std::vector<std::size_t>> places;
  for (auto& bucket : ga::detail::buckets_of(parameters, {}, std::int64_t{25} << 20)) places.push_back(bucket.indices);
  // The first bias shares a bucket with all others, so no weight is sent after them, except the first.
  CHECK(places == std::vector<std::vector<std::size_t>>{{6}, {4}, {2}, {7, 5, 3, 1}, {0}});
}

namespace {

/// Runs `body(rank)` on both ranks with separate models and accumulators.
template <class Body>
void with_two(std::int64_t steps, const Body& body, ga::ReplicasOptions options = {.seed_by_rank = false}) {
  auto ranks = make_ranks(2, steps);
  tests::as_ranks(2, [&](const ga::ProcessGroup& group) {
    auto& rank = ranks[static_cast<std::size_t>(group.rank())];
    ga::Replicas replicas(group, rank.model, *rank.optimizer, options);
    body(rank, replicas);
    replicas.check_equal();
  });
}

}  // namespace

TEST_CASE(
    "Replicas: a parameter that one rank did not use gets the others' gradients; one that no rank used gets none") {
  struct Two : torch::nn::Module {
    torch::nn::Linear first{4, 3}, second{4, 3}, third{4, 3};
    Two() {
      register_module("first", first), register_module("second", second), register_module("third", third);
      to(at::kDouble);
    }
  };
  const auto batches = make_batches({5, 5});
  const bool overlap = GENERATE(true, false);
  std::vector<std::shared_ptr<Two>> models{std::make_shared<Two>(), std::make_shared<Two>()};
  auto one = std::make_shared<Two>();
  {
    const torch::NoGradGuard no_grad;
    for (std::size_t i = 0; i < 6; ++i) one->parameters()[i].copy_(models[0]->parameters()[i]);
  }
  const auto loss_of = [&](Two& model, std::size_t rank) {
    return torch::mse_loss((rank == 0 ? model.first : model.second)->forward(batches[rank].data), batches[rank].target);
  };
  const torch::optim::AdamWOptions options = torch::optim::AdamWOptions(0.1).weight_decay(0.5);
  tests::as_ranks(2, [&](const ga::ProcessGroup& group) {
    const auto rank = static_cast<std::size_t>(group.rank());
    torch::optim::AdamW adamw(models[rank]->parameters(), options);
    ga::GradAccumulator optimizer(adamw, {.steps = 1});
    ga::Replicas replicas(group, *models[rank], optimizer, {.overlap = overlap, .seed_by_rank = false});
    optimizer.backward(loss_of(*models[rank], rank));
    TORCH_CHECK(optimizer.step());
  });
  torch::optim::AdamW adamw(one->parameters(), options);
  ga::GradAccumulator optimizer(adamw, {.steps = 2});
  for (std::size_t rank : {0, 1}) {
    optimizer.backward(loss_of(*one, rank));
    optimizer.step();
  }
  for (auto& model : models)
    for (std::size_t i = 0; i < 6; ++i) {
      CHECK(distance(model->parameters()[i].detach(), one->parameters()[i].detach()) < 1e-12);
      CHECK(model->parameters()[i].grad().defined() == (i < 4));  // unused parameters do not decay
    }
}

TEST_CASE("Replicas: an overflow on one rank counts on all, and no parameter changes") {
  std::vector<double> scales(2);
  with_two(2, [&](Rank& rank, ga::Replicas& replicas) {
    const auto number = replicas.group().rank();
    ga::AmpScaler scaler({.init_scale = 1024, .growth_interval = 100});
    const auto before = flat(rank.model);
    const auto x = torch::ones({2, 4}, at::kDouble);
    const auto window = [&](bool overflows) {
      for (int i = 0; i < 2; ++i) {
        auto loss = rank.model->forward(x * (number + 1 + i)).square().mean();
        if (overflows && number == 1 && i == 0) loss = loss * std::numeric_limits<double>::infinity();
        rank.optimizer->backward(scaler.scale(ga::Loss{loss, 1.0 + number}));
        scaler.step(*rank.optimizer);
        scaler.update();
        rank.optimizer->zero_grad();
      }
    };
    window(true);
    TORCH_CHECK(torch::equal(flat(rank.model), before));
    TORCH_CHECK(scaler.get_scale() == 512);
    window(false);
    TORCH_CHECK(!torch::equal(flat(rank.model), before));
    TORCH_CHECK(scaler.get_scale() == 512);
    scales[static_cast<std::size_t>(number)] = scaler.get_scale();
    // One rank takes part without a batch, its scaler included.
    if (number == 0) {
      window(false);
    }
    while (replicas.others_continue()) {
      bool refused = false;
      try {
        replicas.others_continue();
      } catch (const c10::Error&) {
        refused = true;  // the error came before
      }
      TORCH_CHECK(refused && number == 1);
      TORCH_CHECK(scaler.step(*rank.optimizer));
      scaler.update();
      rank.optimizer->zero_grad();
    }
  });
  CHECK(scales[0] == scales[1]);
}

TEST_CASE("Replicas: a rank without a batch decides like the others, with a window of several micro-batches") {
  auto ranks = make_ranks(2, 2);
  std::vector<std::int64_t> rejected(2);
  tests::as_ranks(2, [&](const ga::ProcessGroup& group) {
    const auto number = static_cast<std::size_t>(group.rank());
    auto& rank = ranks[number];
    auto& optimizer = *rank.optimizer;
    ga::Replicas replicas(group, rank.model, optimizer);
    ga::AmpScaler scaler({.init_scale = 8});
    const auto close = [&] {
      if (optimizer.ready()) {
        scaler.unscale_(optimizer);
        if (optimizer.updates() == 2) optimizer.gradients().reject();
      }
      rejected[number] += scaler.step(optimizer) == ga::StepResult::rejected;
      scaler.update();
      optimizer.zero_grad();
    };
    for (int i = 0; i < (number == 0 ? 6 : 4); ++i) {
      const auto x = torch::ones({2, 4}, at::kDouble);
      optimizer.backward(scaler.scale(ga::Loss{rank.model->forward(x).square().mean(), 2}));
      close();
    }
    while (replicas.others_continue()) {
      TORCH_CHECK(optimizer.ready());
      close();
      TORCH_CHECK(!optimizer.ready());
    }
    replicas.check_equal();
  });
  CHECK(rejected == std::vector<std::int64_t>{1, 1});
}

TEST_CASE("Replicas: a parameter that is frozen on some ranks only is an error with its number") {
  for (const bool idle : {false, true}) {
    auto ranks = make_ranks(2, 1);
    std::vector<std::string> errors(2);
    tests::as_ranks(2, [&](const ga::ProcessGroup& group) {
      const auto number = static_cast<std::size_t>(group.rank());
      auto& rank = ranks[number];
      ga::Replicas replicas(group, rank.model, *rank.optimizer, {.overlap = idle});
      try {
        rank.backward(make_batches({2})[0]);
        if (number == 0) rank.model->parameters()[0].set_requires_grad(false);
        if (!idle || number == 0) rank.backward(make_batches({2})[0]);
        while (replicas.others_continue()) rank.optimizer->step();
      } catch (const c10::Error& error) {
        errors[number] = error.what_without_backtrace();
      }
    });
    for (auto& error : errors) CHECK(testing::contains(error, ") is frozen on 1 of 2 ranks"));
    CHECK(testing::contains(errors[1], "parameter 0 (shape "));
  }
}

TEST_CASE("Replicas: a state inside a window is as many ranks' if all their values are equal") {
  struct Training {
    Rank& rank;
    ga::Replicas& replicas;
    auto peers() const { return replicas.peers(); }
    std::int64_t updates() const { return rank.optimizer->updates(); }
    void state(ga::Archive& archive) { archive("optimizer", ga::OptimizerState(*rank.optimizer, rank.model)); }
  };
  auto ranks = make_ranks(3, 2);
  const Directory directory;
  const auto with_training = [&](int world_size, const auto& body) {
    tests::as_ranks(world_size, [&](const ga::ProcessGroup& group) {
      auto& rank = ranks[static_cast<std::size_t>(group.rank())];
      ga::Replicas replicas(group, rank.model, *rank.optimizer, {.seed_by_rank = false});
      Training training{rank, replicas};
      body(rank, training);
      rank.optimizer->discard();
    });
  };
  with_training(2, [&](Rank& rank, Training& training) {
    rank.backward(make_batches({2})[0]);
    ga::save(directory / "states", training);
  });
  with_training(2, [&](Rank& rank, Training& training) {
    ga::load(directory / "states", training);
    TORCH_CHECK(rank.optimizer->micro_steps() == 1);
  });
  REQUIRE_ERROR("was saved by 2 rank(s) in the middle of a window",
                with_training(3, [&](Rank&, Training& training) { ga::load(directory / "states", training); }));
}

TEST_CASE("Replicas: sums in float32 of 16-bit gradients, frozen, shared, empty and 0-dim parameters") {
  struct Odd : torch::nn::Module {
    at::Tensor wide, narrow, frozen, empty, scalar;
    explicit Odd(at::ScalarType dtype) {
      wide = register_parameter("wide", torch::full({3, 2}, 0.5, dtype).t());
      narrow = register_parameter("narrow", torch::full({2}, 0.25, torch::kBFloat16));
      frozen = register_parameter("frozen", torch::ones({2}), /*requires_grad=*/false);
      empty = register_parameter("empty", torch::ones({0, 2}));
      scalar = register_parameter("scalar", torch::tensor(2.0));
    }
    at::Tensor loss(double x) {
      return (wide.to(at::kFloat).sum() + narrow.to(at::kFloat).sum() + empty.sum() + scalar * frozen.sum()) * x;
    }
  };
  const auto dtype = GENERATE(torch::kFloat, torch::kHalf, torch::kBFloat16);
  const bool apart = GENERATE(true, false);
  std::vector<std::unique_ptr<Odd>> models;
  for (int i = 0; i < 2; ++i) models.push_back(std::make_unique<Odd>(dtype));
  tests::as_ranks(2, [&](const ga::ProcessGroup& group) {
    auto& model = *models[static_cast<std::size_t>(group.rank())];
    torch::optim::SGD sgd(model.parameters(), 1.0);
    ga::GradAccumulator optimizer(sgd, {.steps = 2, .accumulate_in = apart ? std::optional(at::kFloat) : std::nullopt});
    ga::Replicas replicas(group, model, optimizer, {.bucket_bytes = 8, .seed_by_rank = false});
    for (double x : {1.0, 2.0}) {
      optimizer.backward(ga::Loss{model.loss(x * (group.rank() + 1) / 16), group.rank() == 0 ? 1.0 : 3.0});
      optimizer.step();
    }
    replicas.check_equal();
  });
  // (1 · (1 + 2) + 3 · (2 + 4)) / 16 divided by 2 · 1 + 2 · 3 items
  const double slope = (3.0 + 18.0) / 16 / 8;
  for (auto& model : models) {
    CHECK(model->wide[0][0].item<double>() == Approx(0.5 - slope).epsilon(4e-3));
    CHECK(model->narrow[0].item<double>() == Approx(0.25 - slope).epsilon(2e-2));
    CHECK(model->scalar.item<double>() == Approx(2 - 2 * slope));
    CHECK(model->frozen[0].item<double>() == 1);
  }
}

TEST_CASE("Replicas: sparse gradients become dense ones with the same sum") {
  std::vector<torch::nn::Embedding> tables;
  for (int i = 0; i < 3; ++i) {
    torch::manual_seed(2);
    tables.emplace_back(torch::nn::EmbeddingOptions(6, 2).sparse(true));
  }
  const auto loss = [](torch::nn::Embedding& table, int rank) {
    return table->forward(torch::tensor({rank, rank, 4})).square().mean();
  };
  tests::as_ranks(2, [&](const ga::ProcessGroup& group) {
    auto& table = tables[static_cast<std::size_t>(group.rank())];
    torch::optim::SGD sgd(table->parameters(), 1.0);
    ga::GradAccumulator optimizer(sgd);
    ga::Replicas replicas(group, table, optimizer, {.seed_by_rank = false});
    optimizer.backward(loss(table, group.rank()));
    optimizer.step();
  });
  torch::optim::SGD sgd(tables[2]->parameters(), 1.0);
  ga::GradAccumulator optimizer(sgd, {.steps = 2});
  for (int rank : {0, 1}) {
    optimizer.backward(loss(tables[2], rank));
    optimizer.step();
  }
  CHECK(distance(tables[0], tables[2]) < 1e-6);
  CHECK(torch::equal(tables[0]->weight, tables[1]->weight));
}

TEST_CASE("Replicas: differences between ranks are refused by name") {
  std::vector<std::string> errors(2);
  tests::as_ranks(2, [&](const ga::ProcessGroup& group) {
    torch::nn::Sequential model(torch::nn::Linear(4, group.rank() == 0 ? 8 : 9));
    torch::optim::SGD sgd(model->parameters(), 0.1);
    ga::GradAccumulator optimizer(sgd);
    try {
      ga::Replicas replicas(group, model, optimizer);
    } catch (const c10::Error& error) {
      errors[static_cast<std::size_t>(group.rank())] = error.what_without_backtrace();
    }
  });
  for (auto& error : errors)
    CHECK(testing::contains(error, "rank 0 has '0.weight: Float [8, 4]', and rank 1 has '0.weight: Float [9, 4]'"));

  errors.assign(2, "");
  auto ranks = make_ranks(2, 1);
  tests::as_ranks(2, [&](const ga::ProcessGroup& group) {
    const auto number = static_cast<std::size_t>(group.rank());
    auto parameters = ranks[number].model->parameters();
    if (number == 1) std::reverse(parameters.begin(), parameters.end());
    torch::optim::SGD sgd(parameters, 0.1);
    ga::GradAccumulator optimizer(sgd);
    try {
      ga::Replicas replicas(group, ranks[number].model, optimizer);
    } catch (const c10::Error& error) {
      errors[number] = error.what_without_backtrace();
    }
  });
  for (auto& error : errors)
    CHECK(testing::contains(error, "'in the optimizer: Double [8, 4]', and rank 1 has 'in the optimizer: Double [3]'"));

  errors.assign(2, "");
  with_two(1, [&](Rank& rank, ga::Replicas& replicas) {
    const auto number = static_cast<std::size_t>(replicas.group().rank());
    const torch::NoGradGuard no_grad;
    auto& changed = rank.model->named_parameters()["2.weight"];
    if (number == 1) changed[0][0] += 1e-9;
    try {
      replicas.check_equal();
    } catch (const c10::Error& error) {
      errors[number] = error.what_without_backtrace();
    }
    if (number == 1) changed[0][0] -= 1e-9;
    changed.round_();
  });
  for (auto& error : errors) CHECK(testing::contains(error, "rank 0 has '2.weight: Double [3, 8] #"));
}

TEST_CASE("Replicas: token-weighted sums of float16 gradients do not overflow in between") {
  std::vector<torch::nn::Linear> models;
  for (int i = 0; i < 2; ++i) models.emplace_back(torch::nn::LinearOptions(1, 1).bias(false));
  tests::as_ranks(2, [&](const ga::ProcessGroup& group) {
    auto& model = models[static_cast<std::size_t>(group.rank())];
    model->to(torch::kHalf);
    torch::optim::SGD sgd(model->parameters(), 1.0);
    ga::GradAccumulator optimizer(sgd);
    ga::Replicas replicas(group, model, optimizer, {.seed_by_rank = false});
    const auto before = model->weight.item<double>();
    optimizer.backward(ga::Loss{(model->weight.to(at::kFloat) * 8).sum(), 8192});
    optimizer.step();
    TORCH_CHECK(std::abs(before - model->weight.item<double>() - 8) < 0.05, model->weight);
  });
  CHECK(torch::equal(models[0]->weight, models[1]->weight));
}

TEST_CASE("Replicas: two accumulators of one group close their windows in turn") {
  std::vector<std::string> errors(2);
  std::vector<std::vector<Rank>> ranks;
  for (int i = 0; i < 2; ++i) ranks.push_back(make_ranks(2, 1));
  const auto batch = make_batches({3})[0];
  tests::as_ranks(2, [&](const ga::ProcessGroup& group) {
    auto &first = ranks[0][static_cast<std::size_t>(group.rank())],
         &second = ranks[1][static_cast<std::size_t>(group.rank())];
    const ga::ReplicasOptions options{.bucket_bytes = 1, .seed_by_rank = false};
    ga::Replicas one(group, first.model, *first.optimizer, options),
        two(group, second.model, *second.optimizer, options);
    first.backward(batch);
    second.backward(batch);
    one.check_equal();
    try {
      first.optimizer->backward(loss_of(first.model, batch));
      second.optimizer->backward(loss_of(second.model, batch));
    } catch (const c10::Error& error) {
      errors[static_cast<std::size_t>(group.rank())] = error.what_without_backtrace();
    }
  });
  for (auto& error : errors) CHECK(testing::contains(error, "another accumulator with the same ProcessGroup"));
}

TEST_CASE("Replicas: synchronizes buffers of any dtype and frozen parameters") {
  struct Buffers : torch::nn::Module {
    at::Tensor flag, half, complex, scalar;
    explicit Buffers(double value) {
      flag = register_buffer("flag", torch::full({3}, value > 0, torch::kBool));
      half = register_buffer("half", torch::full({2, 3}, value, torch::kHalf).t());
      complex = register_buffer("complex", torch::full({2}, value, torch::kComplexDouble));
      scalar = register_buffer("scalar", torch::tensor(value, torch::kDouble));
      register_parameter("weight", torch::full({2}, value), /*requires_grad=*/value > 1);
    }
  };
  std::vector<std::string> errors(2);
  std::vector<std::unique_ptr<Buffers>> models;
  for (double value : {1.0, 0.0}) models.push_back(std::make_unique<Buffers>(value));
  tests::as_ranks(2, [&](const ga::ProcessGroup& group) {
    auto& model = *models[static_cast<std::size_t>(group.rank())];
    torch::optim::SGD sgd(model.parameters(), 1.0);
    ga::GradAccumulator optimizer(sgd);
    ga::Replicas replicas(group, model, optimizer, {.seed_by_rank = false});
    try {
      model.parameters()[0].set_requires_grad(group.rank() == 0);
      ga::Replicas other(group, model, optimizer);
    } catch (const c10::Error& error) {
      errors[static_cast<std::size_t>(group.rank())] = error.what_without_backtrace();
    }
  });
  for (auto& buffer : models[1]->named_buffers())
    CHECK(torch::equal(buffer.value(), models[0]->named_buffers()[buffer.key()]));
  CHECK(models[1]->half[0][0].item<double>() == 1);
  for (auto& error : errors)
    CHECK(testing::contains(error, "rank 0 has 'weight: Float [2]', and rank 1 has 'weight: Float [2] frozen'"));
}

TEST_CASE("Replicas: an accumulator whose Replicas are destroyed does not continue alone") {
  auto ranks = make_ranks(2, 1);
  tests::as_ranks(2, [&](const ga::ProcessGroup& group) {
    auto& rank = ranks[static_cast<std::size_t>(group.rank())];
    ga::Replicas replicas(group, rank.model, *rank.optimizer, {.seed_by_rank = false});
  });
  REQUIRE_ERROR("Replicas: must outlive", ranks[0].backward(make_batches({2})[0]));
  REQUIRE_ERROR("in_backward frees each gradient", [&] {
    torch::nn::Linear model(2, 2);
    ga::optim::SGD sgd(model->parameters(), 0.1);
    ga::GradAccumulator optimizer(sgd, {.in_backward = true});
    tests::as_ranks(2, [&](const ga::ProcessGroup& group) {
      if (group.rank() == 0) ga::Replicas(group, model, optimizer);
    });
  }());
}

TEST_CASE("Replicas: an exception in a backward that has sent gradients also ends the other ranks") {
  struct Bad : torch::autograd::Function<Bad> {
    static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) { return x.clone(); }
    static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                   const torch::autograd::variable_list&) {
      throw std::runtime_error("out of luck");
    }
  };
  std::vector<std::string> errors(2);
  auto ranks = make_ranks(2, 1);
  tests::as_ranks(2, [&](const ga::ProcessGroup& group) {
    const auto number = static_cast<std::size_t>(group.rank());
    auto& rank = ranks[number];
    ga::Replicas replicas(group, rank.model, *rank.optimizer, {.bucket_bytes = 1, .seed_by_rank = false});
    try {
      auto x = rank.model[0]->as<torch::nn::Linear>()->forward(torch::ones({2, 4}, at::kDouble));
      if (number == 1) x = Bad::apply(x);
      rank.optimizer->backward(rank.model[2]->as<torch::nn::Linear>()->forward(x).sum());
      rank.optimizer->step();
    } catch (const std::exception& error) {
      errors[number] = error.what();
    }
  });
  CHECK(testing::contains(errors[0], "rank 1 has given up: a window was discarded, or met an exception"));
  CHECK(testing::contains(errors[1], "out of luck"));
}

namespace {

/// Trains windows of 2 x `steps` by two ranks on these devices, and compares with one process on the CPU.
void check_devices(const std::vector<at::Device>& devices) {
  const std::int64_t steps = GENERATE(3, 4, 10);  // with 4, one rank's first window is full, and the other's is not
  const auto batches = make_batches({2, 5, 1, 4, 7, 3, 6});
  Rank one(2 * steps);
  for (auto& batch : batches) one.backward(batch);
  one.optimizer->flush();

  auto ranks = make_ranks(2, steps);
  for (std::size_t i = 0; i < 2; ++i) ranks[i].model->to(devices[i]);
  train(ranks, batches, {.bucket_bytes = 200, .seed_by_rank = false});
  for (auto& rank : ranks) {
    rank.model->to(torch::kCPU);
    CHECK(distance(rank.model, one.model) < 1e-10);
    CHECK(torch::equal(flat(rank.model), flat(ranks[0].model)));
  }
}

}  // namespace

TEST_CASE("Replicas: two ranks that share a device, by Gloo", "[cuda]") {
  if (!torch::cuda::is_available()) SKIP("needs a CUDA device");
  check_devices({torch::Device("cuda:0"), torch::Device("cuda:0")});
}

TEST_CASE("Replicas: two ranks with a device each, by NCCL if available", "[cuda]") {
  if (torch::cuda::device_count() < 2) SKIP("needs two CUDA devices");
  check_devices({torch::Device("cuda:0"), torch::Device("cuda:1")});
}
