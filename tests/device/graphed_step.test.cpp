// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/gradaccum.hpp>

#include <gradaccum/detail/checkpoint/forward_state.hpp>

#include "support/device.hpp"
#include "support/files.hpp"
#include "support/kernels_on_device.hpp"
#include "support/models.hpp"
#include "support/ranks.hpp"
#include "support/warnings.hpp"

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <sstream>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

// A graphed step is bitwise the objective: losses, outputs, gradients, buffers, random numbers.

namespace ga = gradaccum;
using namespace testing;

namespace {

const at::Device device(at::kCUDA, 0);
constexpr const char* missing = "needs a CUDA device whose LibTorch has graphs";
constexpr const char* spoils = "an error in a capture spoils the device's random numbers before LibTorch 2.15";

bool has_graphs() { return torch::cuda::is_available() && testing::has_graphs(device); }

/// A network with buffers and random numbers.
torch::nn::Sequential make_network(at::ScalarType dtype = at::kFloat) {
  torch::manual_seed(1);
  torch::nn::Sequential model(torch::nn::Linear(4, 16), torch::nn::BatchNorm1d(16), torch::nn::ReLU(),
                              torch::nn::Dropout(0.3), torch::nn::Linear(16, 3));
  model->to(device, dtype);
  torch::manual_seed(2);
  return model;
}

std::vector<Example> batches_on_device(const std::vector<std::int64_t>& sizes, at::ScalarType dtype = at::kFloat) {
  std::vector<Example> batches;
  for (auto& batch : make_batches(sizes, dtype)) batches.emplace_back(batch.data.to(device), batch.target.to(device));
  return batches;
}

/// The objective of most tests: a mean over the target's elements, with output and target for metrics.
const auto objective = [](auto& model, auto& batch) {
  const auto output = model->forward(batch.data);
  return ga::Loss(torch::mse_loss(output.to(at::kFloat), batch.target.to(at::kFloat)), batch.target.numel())
      .with(output.detach(), batch.target);
};

/// The results of a training.
struct Trained {
  at::Tensor parameters, buffers, losses, outputs, next_random;
  bool operator==(const Trained& other) const {
    return at::equal(parameters, other.parameters) && at::equal(buffers, other.buffers) &&
           at::equal(losses, other.losses) && at::equal(outputs, other.outputs) &&
           at::equal(next_random, other.next_random);
  }
};

at::Tensor all_of(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> all;
  for (auto& tensor : tensors) all.push_back(tensor.detach().to(at::kCPU, at::kDouble).flatten());
  return torch::cat(all);
}

struct Training {
  std::vector<std::int64_t> sizes = {4, 4, 6, 4, 6, 6, 4, 4, 3, 4, 4};
  at::ScalarType dtype = at::kFloat;
  std::optional<at::ScalarType> accumulate_in = {}, autocast = {};
  double scale = 0;  ///< the loss scale that AmpScaler begins with; 0: none
  bool scale_on_device = false;
};

/// Trains with windows of three, the last of which is short, by the objective or a graphed step.
template <class Optimizer = ga::optim::AdamW>
Trained trained(bool graphed, const Training& how = {}, ga::GraphedStepReport* report = nullptr) {
  auto model = make_network(how.dtype);
  const auto batches = batches_on_device(how.sizes, how.dtype);
  const auto with_autocast = [&](auto& net, auto& batch) {
    const ga::Autocast scope(at::kCUDA, how.autocast.value_or(at::kHalf), how.autocast.has_value());
    return objective(net, batch);
  };
  ga::GraphedStep step(model, with_autocast);
  Optimizer wrapped(model->parameters(), 0.01);
  ga::GradAccumulator optimizer(wrapped, {.steps = 3, .accumulate_in = how.accumulate_in});
  ga::AmpScaler scaler({.init_scale = how.scale > 0 ? how.scale : 1,
                        .growth_interval = 2,
                        .enabled = how.scale > 0,
                        .on_device = how.scale_on_device});
  std::vector<at::Tensor> losses, outputs;
  for (auto& batch : batches) {
    const auto loss = graphed ? step(batch) : with_autocast(model, batch);
    losses.push_back(loss.mean);
    outputs.push_back(loss.output);
    CHECK(loss.target.is_same(batch.target));
    optimizer.backward(scaler.scale(loss));
    optimizer.clip_grad_norm_(0.3);
    scaler.step(optimizer);
    scaler.update();
    optimizer.zero_grad();
  }
  optimizer.flush();
  if (report) *report = step.report();
  return {all_of(model->parameters()), all_of(model->buffers()), all_of(losses), all_of(outputs),
          torch::rand({5}, device).cpu()};
}

/// Values that a step must not change except by its loss.
struct Traces {
  explicit Traces(const torch::nn::Sequential& model)
      : model_(model), buffers_(all_of(model->buffers())), parameters_(all_of(model->parameters())) {
    for (auto& parameter : model->parameters()) gradients_.push_back(parameter.grad());
  }
  bool none() const {
    const auto parameters = model_->parameters();
    for (std::size_t i = 0; i < parameters.size(); ++i)
      if (!parameters[i].grad().is_same(gradients_[i])) return false;
    return at::equal(buffers_, all_of(model_->buffers())) && at::equal(parameters_, all_of(parameters)) &&
           random_ == ga::detail::GeneratorStates();
  }

 private:
  torch::nn::Sequential model_;
  at::Tensor buffers_, parameters_;
  std::vector<at::Tensor> gradients_;
  ga::detail::GeneratorStates random_;
};

}  // namespace

TEMPLATE_TEST_CASE("GraphedStep: trains bitwise as the objective does", "[cuda]", torch::optim::SGD, ga::optim::AdamW,
                   ga::optim::Adafactor) {
  if (!has_graphs()) SKIP(missing);
  if (!steps_on_devices<TestType>()) return;
  ga::GraphedStepReport report;
  const auto graphed = trained<TestType>(true, {}, &report);
  CHECK(graphed == trained<TestType>(false));
  CHECK(report.replayed == 11);
  CHECK(report.captured == 3);
  CHECK(report.eager == 0);
  CHECK(report.bytes > 3 * 4 * 4 * 4);
  Training other;
  other.sizes.back() = 3;
  CHECK_FALSE(graphed == trained<TestType>(false, other));
}

TEST_CASE("GraphedStep: 16 bits, sums in float32, autocast and a loss scale that overflows", "[cuda]") {
  if (!has_graphs()) SKIP(missing);
  for (const auto& how : std::vector<Training>{{.dtype = at::kBFloat16},
                                               {.dtype = at::kBFloat16, .accumulate_in = at::kFloat},
                                               {.autocast = at::kBFloat16},
                                               {.autocast = at::kHalf, .scale = 1024},
                                               {.autocast = at::kHalf, .scale = 1e38},
                                               {.autocast = at::kHalf, .scale = 1e38, .scale_on_device = true}}) {
    CAPTURE(how.dtype, how.scale, how.scale_on_device);
    ga::GraphedStepReport report;
    CHECK(trained(true, how, &report) == trained(false, how));
    CHECK(report.replayed == 11);
  }
}

TEST_CASE("GraphedStep: replaces the objective of loss.backward() and of a Trainer", "[cuda]") {
  if (!has_graphs()) SKIP(missing);
  const auto batches = batches_on_device({4, 4, 4, 5, 5, 4});
  std::vector<at::Tensor> results;
  for (const bool graphed : {false, true}) {
    auto model = make_network();
    const auto mean = [](auto& net, auto& batch) { return torch::mse_loss(net->forward(batch.data), batch.target); };
    ga::GraphedStep step(model, mean);
    ga::GraphedStep of_losses(model, objective);
    for (auto& batch : batches) (graphed ? step(batch) : mean(model, batch)).backward();
    for (auto& batch : batches) (graphed ? of_losses(batch) : objective(model, batch)).backward();
    std::vector<at::Tensor> gradients;
    for (auto& parameter : model->parameters()) gradients.push_back(parameter.grad());
    results.push_back(all_of(gradients));
    ga::optim::AdamW wrapped(model->parameters(), 0.01);
    if (graphed)
      ga::Trainer(model, wrapped, step, ga::Accumulate{2}).fit(batches, {.epochs = 2});
    else
      ga::Trainer(model, wrapped, mean, ga::Accumulate{2}).fit(batches, {.epochs = 2});
    results.push_back(all_of(model->parameters()));
    CHECK(step.report().replayed == (graphed ? 18 : 0));
  }
  CHECK(at::equal(results[0], results[2]));
  CHECK(at::equal(results[1], results[3]));
}

TEST_CASE("GraphedStep: a FlopCounter counts each layout once, as the objective", "[cuda]") {
  if (!has_graphs()) SKIP(missing);
  const auto batches = batches_on_device({4, 4, 5, 4, 5, 4});
  std::vector<double> flops;
  for (const bool graphed : {false, true}) {
    auto model = make_network();
    ga::GraphedStep step(model, objective);
    ga::optim::AdamW adamw(model->parameters(), 0.01);
    const ga::FitOptions counted{.epochs = 2, .count_flops = true};
    const auto report = graphed ? ga::Trainer(model, adamw, step).fit(batches, counted)
                                : ga::Trainer(model, adamw, objective).fit(batches, counted);
    CHECK(step.report().captured == (graphed ? 2 : 0));
    flops.push_back(report.flops);
    const ga::FlopCounter counter;  // of steps that are all replayed
    for (auto& batch : batches) graphed ? step(batch).backward() : objective(model, batch).backward();
    CHECK(static_cast<double>(counter.get_total_flops()) * 2 == report.flops);
  }
  CHECK(flops[0] > 0);
  CHECK(flops[0] == flops[1]);
}

TEST_CASE("GraphedStep: replays have the backward_seed of their pass", "[cuda]") {
  if (!has_graphs()) SKIP(missing);
  struct Injects : torch::autograd::Function<Injects> {
    static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x, const at::Tensor& /*penalty*/) {
      return x.view_as(x);
    }
    static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                   torch::autograd::variable_list gradients) {
      return {gradients[0], ga::backward_seed().to(gradients[0].device(), at::kFloat)};
    }
  };
  const auto injecting = [](auto& net, auto& batch) {
    const auto output = net->forward(batch.data);
    return ga::Loss{torch::mse_loss(Injects::apply(output, output.square().mean()), batch.target), batch.data.size(0)};
  };
  const auto batches = batches_on_device({4, 6, 4, 6, 6, 4});
  std::vector<at::Tensor> results;
  for (const bool graphed : {false, true}) {
    auto model = make_network();
    ga::GraphedStep step(model, injecting);
    ga::optim::SGD sgd(model->parameters(), 0.01);
    ga::GradAccumulator optimizer(sgd, {.steps = 2});
    ga::AmpScaler scaler({.init_scale = 1024});
    for (auto& batch : batches) {
      optimizer.backward(scaler.scale(graphed ? step(batch) : injecting(model, batch)));
      scaler.step(optimizer);
      scaler.update();
      optimizer.zero_grad();
    }
    CHECK(step.report().replayed == (graphed ? 6 : 0));
    results.push_back(all_of(model->parameters()));
  }
  CHECK(at::equal(results[0], results[1]));
}

TEST_CASE("GraphedStep: a GuardNorm rejects windows of replayed steps", "[cuda]") {
  if (!has_graphs()) SKIP(missing);
  auto batches = batches_on_device({4, 4, 4, 4, 4, 4});
  batches[4].target *= 1e6;
  std::vector<at::Tensor> results;
  for (const bool graphed : {false, true}) {
    auto model = make_network();
    ga::GraphedStep step(model, objective);
    ga::optim::AdamW adamw(model->parameters(), 0.01);
    const ga::GuardNorm guard{.max_ratio = 20.0, .history = 4};
    const auto report = graphed ? ga::Trainer(model, adamw, step, guard).fit(batches, {.epochs = 2})
                                : ga::Trainer(model, adamw, objective, guard).fit(batches, {.epochs = 2});
    CHECK((report.rejected == 2 && report.updates == 10));
    CHECK(step.report().replayed == (graphed ? 12 : 0));
    results.push_back(all_of(model->parameters()));
  }
  CHECK(at::equal(results[0], results[1]));
}

TEST_CASE("GraphedStep: a capture changes nothing, and later steps do not wait", "[cuda]") {
  if (!has_graphs()) SKIP(missing);
  auto model = make_network();
  ga::GraphedStep step(model, objective);
  auto batches = batches_on_device({4, 4, 4, 4});
  const Traces traces(model);
  const ga::detail::GeneratorStates before;
  const c10::WarningUtils::WarnAlways always;
  const Warnings warnings;  // such as of a gradient on another stream than its accumulator's
  step(batches[0]);
  before.restore();
  auto other = make_network();
  objective(other, batches[0]);
  CHECK(at::equal(all_of(model->buffers()), all_of(other->buffers())));  // they changed once
  for (auto& parameter : model->parameters()) CHECK_FALSE(parameter.grad().defined());
  step(batches[1]).backward();
  CHECK(warnings.texts().empty());
  if (!WaitCount::possible()) return;
  for (int i = 2; i < 4; ++i) {
    const WaitCount count;
    const auto launches = emulated_cuda::counts().launches;
    step(batches[static_cast<std::size_t>(i)]).backward();
    CHECK(count.waits() == 0);
    CHECK(emulated_cuda::counts().launches - launches < 12);
  }
}

TEST_CASE("GraphedStep: frozen, unused and shared gradients; parameters that change their memory, and other modes",
          "[cuda]") {
  if (!has_graphs()) SKIP(missing);
  const auto sum = [](auto& net, auto& batch) {
    const auto named = net->named_parameters();
    const auto first = named["0.weight"], last = named["4.bias"];
    return (net->forward(batch.data) - batch.target).square().sum() + first.sum() + last.sum() * 0.5;
  };
  const auto batches = batches_on_device({4, 4, 4});
  std::vector<std::vector<at::Tensor>> results;
  for (const bool graphed : {false, true}) {
    auto model = make_network();
    auto unused = model->register_parameter("unused", torch::ones({3}, device));
    auto frozen = model->parameters()[1];
    frozen.requires_grad_(false);
    ga::GraphedStep step(model, sum);
    std::vector<at::Tensor> seen;
    const auto run = [&] {
      for (auto& batch : batches) (graphed ? step(batch) : sum(model, batch)).backward();
      for (auto& parameter : model->parameters())
        seen.push_back(parameter.grad().defined() ? parameter.grad().cpu() : at::zeros({1}));
      seen.push_back(all_of(model->buffers()));
    };
    run();
    CHECK_FALSE(unused.grad().defined());
    CHECK_FALSE(frozen.grad().defined());
    frozen.requires_grad_(true);
    auto weight = model->named_parameters()["0.weight"];
    const auto hook = weight.register_hook([](const at::Tensor& gradient) { return gradient * 2; });
    run();
    weight.remove_hook(hook);
    for (auto& parameter : model->parameters()) parameter.set_data(parameter.detach() * 2);  // new memory
    run();
    model->eval();
    run();
    model->train();
    run();
    if (graphed) CHECK(step.report().captured == 4);  // once for each change; earlier modes are still captured
    results.push_back(std::move(seen));
  }
  for (std::size_t i = 0; i < results[0].size(); ++i) {
    CAPTURE(i, results[0][i], results[1][i]);
    CHECK(at::equal(results[0][i], results[1][i]));
  }
}

TEST_CASE("GraphedStep: names objectives that cannot be captured, and changes nothing", "[cuda]") {
  if (!has_graphs()) SKIP(missing);
  if (!forgets_failed_captures()) SKIP(spoils);
  auto model = make_network();
  auto batches = batches_on_device({4, 4});
  auto expect = [&](const auto& wrong, const std::string& name) {
    ga::GraphedStep step(model, wrong);
    const Traces traces(model);
    for (int attempt = 0; attempt < 2; ++attempt) {
      const auto error = error_of([&] { step(batches[0]); });
      CAPTURE(error);
      CHECK(contains(error, "GraphedStep: aten::" + name + " cannot be captured: CUDA error: operation not permitted"));
      CHECK(traces.none());
    }
    ga::GraphedStep right(model, objective);  // the device is still usable
    right(batches[0]).backward();
    model->zero_grad();
  };
  expect([](auto& net,
            auto& batch) { return net->forward(batch.data).sum() * batch.target.sum().template item<double>(); },
         "_local_scalar_dense");
  expect([](auto& net, auto& batch) { return net->forward(batch.data).sum() * torch::ones({}).to(device); }, "copy_");
  expect([](auto& net, auto& batch) { return net->forward(batch.data).masked_select(batch.target > 0).sum(); },
         "masked_select");
}

TEST_CASE("GraphedStep: detects numbers of C++ that depend on the batch", "[cuda]") {
  if (!has_graphs()) SKIP(missing);
  auto model = make_network();
  auto batches = batches_on_device({4, 4, 4});
  double factor = 1;
  ga::GraphedStep step(model, [&](auto& net, auto& batch) { return (net->forward(batch.data) * factor).sum(); });
  step(batches[0]).backward();
  factor = 2;
  const Traces traces(model);
  const auto error = error_of([&] { step(batches[1]); });
  CHECK(contains(error, "GraphedStep: the captured step must do what the objective does"));
  CHECK(contains(error, "Float [4, 4]"));
  CHECK(traces.none());
  factor = 1;
  step(batches[1]).backward();
}

TEST_CASE("GraphedStep: batches of sequences, whose lengths are on the CPU", "[cuda]") {
  if (!has_graphs()) SKIP(missing);
  std::vector<at::Tensor> sequences;
  for (int i = 0; i < 24; ++i) sequences.push_back(torch::randn({1 + i % 8, 4}, device));
  const auto targets = torch::randn({24, 3}, device);
  std::vector<at::Tensor> results;
  for (const bool graphed : {false, true}) {
    ga::data::LengthBuckets buckets(sequences, targets, {.batch_size = 3, .shuffle = true, .pad_to_multiple_of = 4});
    auto model = make_network();
    int runs = 0;
    const auto of_sequences = [&runs](auto& net, const ga::data::SequenceBatch& batch) {
      ++runs;
      return ga::Loss{torch::mse_loss(net->forward(batch.data.sum(1)), batch.target), batch.rows()};
    };
    ga::GraphedStep step(model, of_sequences);
    for (int epoch = 0; epoch < 2; ++epoch)
      for (auto& batch : buckets) (graphed ? step(batch) : of_sequences(model, batch)).backward();
    for (auto& parameter : model->parameters()) results.push_back(parameter.grad().cpu());
    if (graphed) CHECK(step.report().replayed == 16);
    if (graphed) CHECK(step.report().captured == 2);
    if (graphed) CHECK(runs == 2 * 4);  // unread lengths are not compared
  }
  for (std::size_t i = 0; i < results.size() / 2; ++i) CHECK(at::equal(results[i], results[i + results.size() / 2]));
}

TEST_CASE("GraphedStep: an objective that reads values on the CPU runs again for all other values", "[cuda]") {
  if (!has_graphs()) SKIP(missing);
  using Batch = std::tuple<at::Tensor, at::Tensor, at::Tensor>;
  auto model = make_network();
  const auto scaled = [](auto& net, const Batch& batch) {
    return net->forward(std::get<0>(batch)).sum() * std::get<1>(batch).max().template item<double>();
  };
  ga::GraphedStep step(model, scaled);
  const auto data = torch::randn({4, 4}, device);
  const auto same = [&](std::int64_t longest, std::int64_t unread) {
    const Batch batch{data, torch::tensor({longest, std::int64_t{1}}), torch::tensor({unread})};
    std::vector<at::Tensor> gradients;
    for (const bool graphed : {false, true}) {
      torch::manual_seed(longest);
      model->zero_grad();
      (graphed ? step(batch) : scaled(model, batch)).backward();
      gradients.push_back(model->parameters()[0].grad().clone());
    }
    CHECK(at::equal(gradients[0], gradients[1]));
  };
  for (const std::int64_t longest : {3, 3, 3, 2, 3, 5}) same(longest, 1);
  CHECK(step.report().replayed == 4);
  CHECK(step.report().eager == 2);
  CHECK(step.report().why_eager.at("values on the CPU that are not those captured") == 2);
  same(3, 2);  // unread values are compared, too
  CHECK(step.report().eager == 3);
}

TEST_CASE("GraphedStep: data parallel training on two devices", "[cuda]") {
  if (!has_graphs() || torch::cuda::device_count() < 2) SKIP(missing);
  const auto batches = make_batches({4, 4, 4, 4, 3, 4, 4, 4, 4, 4}, at::kFloat);
  std::vector<at::Tensor> results;
  for (const bool graphed : {false, true}) {
    std::vector<at::Tensor> of_rank(2);
    std::vector<torch::nn::Sequential> models{make_network(), make_network()};
    std::mutex one_captures;  // ranks are normally processes with separate random numbers
    tests::as_ranks(2, [&](const ga::ProcessGroup& group) {
      const auto rank = static_cast<std::size_t>(group.rank());
      const at::Device own(at::kCUDA, static_cast<at::DeviceIndex>(rank));
      auto& model = models[rank];
      model[3]->eval();  // without dropout, because ranks share random numbers here
      model->to(own);
      ga::GraphedStep step(model, objective);
      ga::optim::AdamW wrapped(model->parameters(), 0.01);
      ga::GradAccumulator optimizer(wrapped, {.steps = 2});
      ga::Replicas replicas(group, model, optimizer, {.bucket_bytes = 200, .seed_by_rank = false});
      for (auto i = rank; i < batches.size(); i += 2) {
        Example batch{batches[i].data.to(own), batches[i].target.to(own)};
        auto loss = [&] {
          const std::lock_guard lock(one_captures);
          return graphed ? step(batch) : objective(model, batch);
        }();
        optimizer.backward(loss);
        optimizer.step();
        optimizer.zero_grad();
      }
      optimizer.flush();
      of_rank[rank] = all_of(model->parameters());
      CHECK(step.report().replayed == (graphed ? 5 : 0));
    });
    CHECK(at::equal(of_rank[0], of_rank[1]));
    results.push_back(of_rank[0]);
  }
  CHECK(at::equal(results[0], results[1]));
  CHECK_FALSE(at::equal(results[0], all_of(make_network()->parameters())));
}

TEST_CASE("GraphedStep: runs the objective without a graph, and reports why", "[cuda]") {
  if (!has_graphs()) SKIP(missing);
  const auto reasons = [](const auto& step) {
    std::ostringstream text;
    text << step.report();
    return text.str();
  };
  auto model = make_network();
  auto batches = batches_on_device({4, 4, 5, 6, 4});
  SECTION("a loss that waits for its backward") {
    ga::GraphedStep step(model, objective);
    auto other = make_network();
    const auto first = objective(other, batches[0]).mean, second = objective(other, batches[1]).mean;
    (first + second).backward();
    torch::manual_seed(2);
    const auto graphed = step(batches[0]).mean, eager = step(batches[1]).mean;
    (graphed + eager).backward();
    for (std::size_t i = 0; i < model->parameters().size(); ++i)
      CHECK(at::equal(model->parameters()[i].grad(), other->parameters()[i].grad()));
    CHECK(contains(reasons(step), "1: the loss before has not been backward yet"));
    step(batches[1]);  // its loss is destroyed
    step(batches[0]);
    CHECK(step.report().replayed == 3);
  }
  SECTION("more layouts than graphs") {
    ga::GraphedStep step(model, objective, {.graphs = 1});
    step(batches[0]);
    step(batches[1]);
    for (int use = 0; use < 4; ++use) step(batches[2]);
    CHECK(contains(reasons(step), "4: more layouts than .graphs = 1"));
    step(batches[2]);  // by now used much more often than the other
    CHECK(step.report().replayed == 3);
    CHECK(step.report().captured == 2);
    step(batches[0]);
    CHECK(contains(reasons(step), "5: more layouts than .graphs = 1"));
  }
  SECTION("batches and models elsewhere, evaluations") {
    ga::GraphedStep step(model, [](auto& net, auto& batch) { return net->forward(batch.data.to(device)).sum(); });
    auto on_host = make_batches({4}, at::kFloat)[0];
    step(on_host).backward();
    CHECK(contains(reasons(step), "1: the batch on cpu"));
    if (forgets_failed_captures()) {
      auto half = on_host;
      half.target = half.target.to(device);
      CHECK(contains(error_of([&] { step(half); }), "GraphedStep: aten::copy_ cannot be captured"));
    } else {
      WARN("a batch half on the CPU is left out: " << spoils);
    }
    const bool has_two = torch::cuda::device_count() > 1;
    if (has_two) {
      auto elsewhere_too = batches[0];
      elsewhere_too.target = elsewhere_too.target.to(at::Device(at::kCUDA, 1));
      step(elsewhere_too).backward();
      CHECK(contains(reasons(step), "1: a tensor of the batch on cuda:1"));
    } else {
      WARN("a batch on another device is left out: it needs two CUDA devices");
    }
    auto trained = batches[0];
    trained.data = trained.data.clone().requires_grad_();
    step(trained).backward();
    CHECK(trained.data.grad().defined());
    {
      const at::NoGradGuard no_grad;
      step(batches[0]);
    }
    CHECK(step.report().replayed == 0);
    CHECK(step.report().eager == (has_two ? 3 : 2));
    auto elsewhere = make_model(at::kFloat);
    ga::GraphedStep of_host(elsewhere, [](auto& net, auto& batch) { return loss_of(net, batch); });
    of_host(on_host).backward();
    CHECK(contains(reasons(of_host), "1: no graphs on cpu"));
  }
  SECTION("tensors and seeds from elsewhere") {
    auto other = torch::ones({3}, device).requires_grad_();
    ga::GraphedStep step(model, [&](auto& net, auto& batch) { return (net->forward(batch.data) * other).sum(); });
    CHECK(contains(
        error_of([&] { step(batches[0]); }),
        "GraphedStep: every tensor that requires grad must be a parameter of the model, got another one of shape [3]"));
    ga::AmpScaler scaler({.init_scale = 4});
    ga::GraphedStep scaled(model, [&](auto& net, auto& batch) { return scaler.scale(objective(net, batch)); });
    CHECK(contains(error_of([&] { scaled(batches[0]); }), "GraphedStep: a loss scale or weight must be applied to"));
    ga::GraphedStep with_host(model, [](auto& net, auto& batch) {
      return objective(net, batch).with(net->forward(batch.data).detach(), torch::tensor({3, 4}));
    });
    for (int i = 0; i < 2; ++i) CHECK(at::equal(with_host(batches[0]).target, torch::tensor({3, 4})));
  }
  SECTION("another stream") {
    ga::GraphedStep step(model, objective);
    torch::manual_seed(2);
    std::optional<ga::Loss> loss;
    {
      const c10::StreamGuard guard(c10::impl::VirtualGuardImpl(at::kCUDA).getStreamFromGlobalPool(device));
      loss = step(batches[0]);
    }
    loss->backward();
    auto other = make_network();
    objective(other, batches[0]).backward();
    for (std::size_t i = 0; i < model->parameters().size(); ++i)
      CHECK(at::equal(model->parameters()[i].grad(), other->parameters()[i].grad()));
  }
  SECTION("misuse") {
    CHECK(contains(error_of([&] { ga::GraphedStep(model, objective, {.graphs = 0}); }),
                   "GraphedStep: graphs must be >= 1, got 0"));
    ga::GraphedStep step(model, objective);
    CHECK(contains(error_of([&] { step(batches[0]).mean.backward({}, /*retain_graph=*/true); }),
                   "GraphedStep: retain_graph must be false"));
    CHECK(contains(error_of([&] { step(batches[0]).mean.backward({}, false, /*create_graph=*/true); }),
                   "GraphedStep: create_graph must be false"));
    const auto loss = step(batches[0]);
    loss.backward();
    CHECK_FALSE(error_of([&] { loss.backward(); }).empty());
    ga::GraphedStep without_gradient(model,
                                     [](auto& net, auto& batch) { return net->forward(batch.data).detach().sum(); });
    CHECK(contains(error_of([&] { without_gradient(batches[0]); }), "must require grad"));
  }
}

TEST_CASE("GraphedStep: running out of memory in a capture changes nothing", "[cuda]") {
  if (!has_graphs() || !FailingAllocation::possible()) SKIP(missing);
  auto batches = batches_on_device({4, 4});
  const auto expected = [&] {
    auto model = make_network();
    objective(model, batches[0]).backward();
    return all_of({model->parameters()[0].grad(), model->buffers()[0]});
  }();
  bool done = false;
  for (std::int64_t nth = 1; !done; nth += 3) {
    auto model = make_network();
    ga::GraphedStep step(model, objective);
    const Traces traces(model);
    try {
      const FailingAllocation failing(nth);
      step(batches[0]);
      done = true;
    } catch (const c10::Error&) {
      if (step.report().replayed > 0) continue;  // in the middle of a step, as in the objective
      CHECK(traces.none());
    }
    if (done) break;
    step(batches[0]).backward();
    CHECK(at::equal(all_of({model->parameters()[0].grad(), model->buffers()[0]}), expected));
  }
}
