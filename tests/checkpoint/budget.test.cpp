// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/checkpoint.hpp>
#include <gradaccum/checkpointed_sequential.hpp>
#include <gradaccum/detail/checkpoint/chain.hpp>
#include <gradaccum/detail/checkpoint/forward_state.hpp>
#include <gradaccum/detail/checkpoint/recomputation.hpp>
#include <gradaccum/memory_meter.hpp>
#include <gradaccum/saved_tensor_hooks.hpp>

#include "support/chains.hpp"

#include <ATen/autocast_mode.h>

#include <chrono>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <thread>

namespace ga = gradaccum;
namespace nn = torch::nn;
namespace inner = gradaccum::detail;
using namespace testing;

namespace {

constexpr std::int64_t plenty = std::int64_t{1} << 40;

// A chain whose measurement is shared by many schedules.
struct Profiled {
  explicit Profiled(const Chain& chain) {
    std::optional<ga::Autocast> uncached;
    if (chain.autocast) uncached.emplace(at::kCPU, at::kBFloat16, /*enabled=*/true, /*cache_enabled=*/false);
    const auto modules = inner::Stages(chain.net->begin(), chain.net->end());
    const inner::FrozenBuffers frozen(inner::buffers_of(inner::modules_of(modules)));
    stages = std::make_shared<inner::Stages>(inner::merged(modules, chain.input));
    costs = inner::costs_of(*stages, chain.input, {});
  }

  struct Net {
    inner::Segment segment;
    const Net* operator->() const { return this; }
    at::Tensor forward(const at::Tensor& input) const {
      const bool autocast = at::autocast::is_autocast_enabled(at::kCPU);
      const ga::Autocast uncached(at::kCPU, at::kBFloat16, autocast, /*cache_enabled=*/false);
      return segment(input);
    }
  };
  Net net(const inner::Schedule& schedule) const {
    return {{stages, std::make_shared<const inner::Schedule>(schedule), {}}};
  }

  std::shared_ptr<inner::Stages> stages;
  inner::StageCosts costs;
};

struct Limits {
  std::int64_t least, plain;
};
Limits limits(const Chain& chain) {
  Rig rig(chain);
  ga::CheckpointedSequential net(chain.net, {.memory_budget = plenty});
  rig.step(net);
  return {net->plan().least_bytes, net->plan().plain.peak_bytes};
}

std::vector<Chain> all_chains() {
  return {homogeneous_chain(), varied_chain(), convolution_chain(), transformer_chain(), embedding_chain(),
          view_chain(),        frozen_chain(), frozen_view_chain(), autocast_chain(),    strided_chain(),
          in_place_chain(),    shared_chain(), rebuilt_chain()};
}

// Returns how deeply a schedule's segments are nested.
std::int64_t depth(const std::string& schedule) {
  std::int64_t open = 0, deepest = 0;
  for (auto c : schedule) deepest = std::max(deepest, open += (c == '[') - (c == ']'));
  return deepest;
}

// Returns how far a prediction may exceed the measurement; for stages that share memory there is no limit.
std::int64_t slack(const Chain& chain, const std::string& schedule = "") {
  for (auto name : {"views", "strided gradients", "frozen views"})
    if (chain.name == name) return plenty;
  std::int64_t statistics = 0;  // copied in each segment that recomputes a stage
  for (auto& buffer : chain.net->buffers()) statistics += buffer.nbytes();
  std::int64_t bias = 0;  // cast to bfloat16: a single stage may hold it at its peak, and a segment not
  for (auto& parameter : chain.net->parameters())
    if (chain.autocast && parameter.dim() == 1) bias = std::max(bias, 2 * parameter.numel());
  return std::max<std::int64_t>(depth(schedule), 1) * statistics + bias + 4;  // a loss
}

// Replaces the chain's input by a smaller or larger one.
Chain with_input(Chain chain, const at::Tensor& input) {
  chain.input = input;
  return chain;
}

// Returns a budget in the middle between least and plain.
ga::CheckpointedSequential tight(const Chain& chain) {
  const auto [least, plain] = limits(chain);
  return {chain.net, {.memory_budget = (least + plain) / 2}};
}

}  // namespace

TEST_CASE("Budget: every budget is kept, with bitwise the gradients of plain training") {
  for (const auto& chain : all_chains()) {
    const Profiled profiled(chain);
    const auto least = inner::least_memory(profiled.costs);
    const auto plain_bytes = inner::cost_of(inner::keep_everything(profiled.costs), profiled.costs).peak;
    Rig rig(chain);
    const auto plain = rig.step(chain.net);
    CHECK(plain.peak <= plain_bytes);
    for (int i = 0; i < 20; ++i) {
      const auto budget = least + (plain_bytes * 11 / 10 - least) * i / 19;
      const auto schedule = inner::fastest_schedule(profiled.costs, budget);
      const auto predicted = inner::cost_of(schedule, profiled.costs).peak;
      INFO(chain.name << ", budget " << budget << ", least " << least << ", predicted " << predicted << ": "
                      << inner::to_string(schedule));
      const auto step = rig.step(profiled.net(schedule));
      CHECK(difference(step.outcome, plain.outcome) == "");
      CHECK(predicted <= budget);
      CHECK(step.peak <= predicted);
      CHECK(step.peak >= predicted - slack(chain, inner::to_string(schedule)));
      CHECK(step.held <= plain.held);
      CHECK(step.left == 0);
      if (budget < plain.peak) CHECK(inner::to_string(schedule).find_first_of("[*") != std::string::npos);
    }
  }
}

TEST_CASE("Budget: planned in the first forward pass, and kept in all later ones") {
  for (const auto& chain : all_chains()) {
    const auto [least, plain_bytes] = limits(chain);
    Rig rig(chain);
    const auto plain = rig.step(chain.net);
    for (auto budget : {least, (least + plain_bytes) / 2, plain_bytes}) {
      ga::CheckpointedSequential net(chain.net, {.memory_budget = budget});
      const auto first = rig.step(net);
      const auto plan = net->plan();
      INFO(chain.name << ", budget " << budget << ", least " << least << ": " << plan.schedule);
      CHECK(difference(first.outcome, plain.outcome) == "");
      CHECK(plan.memory_budget == budget);
      CHECK(plan.least_bytes == least);
      CHECK(plan.plain.peak_bytes == plain_bytes);
      for (int step = 0; step < 2; ++step) {
        const auto next = rig.step(net);
        CHECK(difference(next.outcome, plain.outcome) == "");
        CHECK(next.peak <= plan.predicted.peak_bytes);
        CHECK(plan.predicted.peak_bytes <= budget);
      }
    }
  }
}

TEST_CASE("Budget: kept if gradients of parameters exist already") {
  for (const auto& chain : {varied_chain(), embedding_chain()}) {
    const auto [least, plain_bytes] = limits(chain);
    Rig rig(chain);
    rig.accumulate = true;
    const auto plain = rig.step(chain.net);
    for (auto budget : {least, (least + plain_bytes) / 2}) {
      ga::CheckpointedSequential net(chain.net, {.memory_budget = budget});
      for (int i = 0; i < 2; ++i) {
        const auto step = rig.step(net);
        CHECK(difference(step.outcome, plain.outcome) == "");
        if (i > 0) CHECK(step.peak <= budget);
      }
    }
  }
}

TEST_CASE("Budget: the least is enough, and less is refused with the least number") {
  for (const auto& chain : {varied_chain(), convolution_chain(), transformer_chain()}) {
    const auto least = limits(chain).least;
    ga::CheckpointedSequential net(chain.net, {.memory_budget = least - 1});
    Rig rig(chain);
    const auto before = random_state();
    REQUIRE_ERROR("CheckpointedSequential: memory_budget must be at least " + std::to_string(least) +
                      " bytes for an input that is Float",
                  net->forward(chain.input));
    CHECK(same_bits(random_state(), before));
    REQUIRE_ERROR("there is no plan yet; run a forward pass with gradients", net->plan());
    REQUIRE_ERROR(", got " + std::to_string(least - 1), net->forward(chain.input));
    const at::NoGradGuard no_gradients;
    CHECK(net->forward(chain.input).defined());
  }
}

TEST_CASE("Budget: kept if the gradient of the output is one expanded number") {
  for (const auto& chain : all_chains()) {
    const auto [least, plain_bytes] = limits(chain);
    Rig rig(chain);
    rig.loss = Rig::Loss::sum;
    const auto plain = rig.step(chain.net);
    for (auto budget : {least, (least + plain_bytes) / 2}) {
      INFO(chain.name << " " << budget);
      ga::CheckpointedSequential net(chain.net, {.memory_budget = budget});
      rig.step(net);
      const auto step = rig.step(net);
      CHECK(difference(step.outcome, plain.outcome) == "");
      CHECK(step.peak <= budget);
    }
  }
}

namespace {

// The identity, whose backward allocates permanent memory when it first runs.
struct WorkspaceFunction : torch::autograd::Function<WorkspaceFunction> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, at::Tensor* workspace) {
    context->saved_data["workspace"] = reinterpret_cast<std::int64_t>(workspace);
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    auto& workspace = *reinterpret_cast<at::Tensor*>(context->saved_data["workspace"].toInt());
    if (!workspace.defined()) workspace = torch::zeros({1 << 20});
    return {gradients[0].clone(), {}};
  }
};

}  // namespace

TEST_CASE("Budget: memory that an operation allocates once and keeps does not count for the stage") {
  at::Tensor workspace;
  const Chain chain{
      "workspace",
      nn::Sequential(nn::Linear(8, 8), function([&](at::Tensor x) { return WorkspaceFunction::apply(x, &workspace); }),
                     nn::Linear(8, 8)),
      randoms({6, 8})};
  CHECK(limits(chain).plain < 4 << 20);
  CHECK(workspace.defined());
}

TEST_CASE("Budget: a parameter's sparse gradient does not count for the stage, like a dense one") {
  const auto peak = [](bool sparse) {
    nn::Sequential net(nn::Embedding(nn::EmbeddingOptions(50, 16).sparse(sparse).padding_idx(0)));
    ga::CheckpointedSequential chain(net, {.memory_budget = plenty});
    chain->forward(torch::arange(48)).sum().backward();
    return chain->plan().plain.peak_bytes;
  };
  CHECK(peak(true) < peak(false) + 47 * 16 * 4);  // the sparse values exclude the padding
}

TEST_CASE("Budget: planning holds the memory of one stage at a time") {
  for (const auto& chain : all_chains()) {
    INFO(chain.name);
    const Profiled profiled(chain);
    std::int64_t largest = 0, input = 0, statistics = 0;
    for (auto& cost : profiled.costs) {
      for (auto& way : cost.ways) largest = std::max({largest, input + way.backward_peak, input + way.again_peak});
      input = cost.output;
    }
    for (auto& buffer : chain.net->buffers()) statistics += buffer.nbytes();  // copied
    std::int64_t gradients = 0;
    for (auto& stage : *profiled.stages) {
      std::int64_t of_stage = 0;
      for (auto* module : stage.modules())
        for (auto& parameter : module->parameters()) of_stage += parameter.nbytes();
      gradients = std::max(gradients, of_stage);
    }
    const auto least = inner::least_memory(profiled.costs);
    ga::CheckpointedSequential net(chain.net, {.memory_budget = least});
    CHECK(Rig(chain).step(net).peak <= std::max(least, largest + gradients) + statistics + 8);
  }
}

TEST_CASE("Budget: a smaller input follows the plan, and keeps the budget") {
  const auto chain = varied_chain();
  auto net = tight(chain);
  Rig(chain).step(net);
  const auto plan = net->plan();
  for (int rows : {31, 16, 1, 0}) {
    Rig rig(with_input(chain, randoms({rows, 16})));
    const auto plain = rig.step(chain.net);
    const auto step = rig.step(net);
    CHECK(difference(step.outcome, plain.outcome) == "");
    CHECK(step.peak <= *plan.memory_budget);
    CHECK(net->plan().predicted.seconds == plan.predicted.seconds);  // the same plan
  }
}

TEST_CASE("Budget: planned again for inputs that may need other bytes, and plans are reused") {
  auto chain = transformer_chain(3);
  const auto budget = 2 * limits(chain).plain;
  ga::CheckpointedSequential net(chain.net, {.memory_budget = budget});
  std::vector<double> seconds;  // identify plans
  const auto is_planned_anew = [&](const at::Tensor& input) {
    net->forward(input).sum().backward();
    const auto time = net->plan().predicted.seconds;
    const bool is_known = std::ranges::find(seconds, time) != seconds.end();
    seconds.push_back(time);
    return !is_known;
  };
  CHECK(is_planned_anew(chain.input));
  CHECK_FALSE(is_planned_anew(chain.input));
  CHECK_FALSE(is_planned_anew(chain.input.slice(0, 1)));
  CHECK(is_planned_anew(randoms({2, 9, 16})));
  CHECK_FALSE(is_planned_anew(chain.input));
  CHECK(is_planned_anew(randoms({3, 4, 16})));
  CHECK_FALSE(is_planned_anew(randoms({2, 9, 16})));
  CHECK_FALSE(is_planned_anew(randoms({3, 3, 16})));
  CHECK(is_planned_anew(randoms({2, 16, 9}).transpose(1, 2)));  // copied for operations that need contiguous rows
  CHECK_FALSE(is_planned_anew(chain.input));
  CHECK(is_planned_anew(chain.input.clone().requires_grad_()));
  net->eval();
  CHECK(is_planned_anew(chain.input));
  net->train();
  CHECK_FALSE(is_planned_anew(chain.input));
  for (auto& parameter : chain.net->ptr(0)->parameters()) parameter.set_requires_grad(false);
  CHECK(is_planned_anew(chain.input));
}

TEST_CASE("Budget: measured only a few times for many lengths") {
  struct CountsImpl : nn::Module {
    at::Tensor forward(const at::Tensor& x) {
      ++runs;
      return x.sin();
    }
    int runs = 0;
  };
  const auto counts = std::make_shared<CountsImpl>();
  auto chain = transformer_chain(2);
  chain.net->push_back(counts);
  const auto of_length = [&](std::int64_t length) { return with_input(chain, randoms({2, length, 16})); };
  const auto longest = limits(of_length(40));
  ga::CheckpointedSequential ample(chain.net, {.memory_budget = 4 * longest.plain});
  for (auto length : {39, 40}) Rig(of_length(length)).step(ample);
  CHECK(ample->plan().plain.peak_bytes == longest.plain);  // measured at this length
  for (auto budget : {longest.least + 1000, (longest.least + longest.plain) / 2, 2 * longest.plain}) {
    ga::CheckpointedSequential net(chain.net, {.memory_budget = budget});
    int measurements = 0;
    for (std::int64_t length = 4; length <= 40; ++length) {
      INFO(length << " tokens within " << budget << " bytes, " << measurements << " measurements");
      Rig rig(of_length(length));
      const auto plain = rig.step(chain.net);
      counts->runs = 0;
      auto step = rig.step(net);
      const bool is_measured = counts->runs > 2;
      measurements += is_measured;
      CHECK(difference(step.outcome, plain.outcome) == "");
      if (is_measured) step = rig.step(net);  // excludes the memory of measuring
      CHECK(difference(step.outcome, plain.outcome) == "");
      CHECK(step.peak <= budget);
      CHECK(net->plan().predicted.peak_bytes <= budget);
    }
    CHECK(measurements >= 2);
    CHECK((measurements <= 9 || budget < longest.least * 5 / 4));  // 4 to 7, then up to 40 by factors of 1.39
  }
}

TEST_CASE("Budget: kept after another autocast, dtype, mode or layout") {
  // After planning for other inputs, a step's peak is within the budget, and its gradients equal the plain step's.
  const auto check = [](ga::CheckpointedSequential& net, const Chain& chain) {
    Rig rig(chain);
    const auto plain = rig.step(chain.net);
    auto step = rig.step(net);  // may plan
    CHECK(difference(step.outcome, plain.outcome) == "");
    step = rig.step(net);
    CHECK(difference(step.outcome, plain.outcome) == "");
    CHECK(step.peak <= net->plan().predicted.peak_bytes);
    CHECK(step.peak <= *net->plan().memory_budget);
  };
  SECTION("autocast") {
    auto chain = varied_chain();
    auto net = tight(chain);
    for (bool autocast : {false, true, false}) {
      chain.autocast = autocast;
      check(net, chain);
    }
  }
  SECTION("the parameters' dtype, where the input's stays") {
    auto chain = embedding_chain();
    const auto single = limits(chain);
    chain.net->to(at::kDouble);
    const auto [least, plain] = limits(chain);
    chain.net->to(at::kFloat);
    ga::CheckpointedSequential net(chain.net, {.memory_budget = (least + single.plain) / 2});
    check(net, chain);
    chain.net->to(at::kDouble);
    check(net, chain);
  }
  SECTION("the input's layout") {
    torch::nn::Sequential net(torch::nn::Linear(16, 8), torch::nn::Tanh(), torch::nn::Linear(8, 8));
    const Chain rows{"rows", net, randoms({8, 32, 16})};
    const auto columns = with_input(rows, randoms({8, 16, 32}).transpose(1, 2));
    CHECK(limits(columns).plain > limits(rows).plain);
    for (auto* larger : {&rows, &columns}) {
      ga::CheckpointedSequential budgeted(net, {.memory_budget = limits(columns).plain});
      check(budgeted, rows);
      check(budgeted, columns);
      CHECK(budgeted->plan().plain.peak_bytes == limits(columns).plain);
      check(budgeted, *larger);
      CHECK(budgeted->plan().plain.peak_bytes == limits(*larger).plain);
    }
  }
  SECTION("frozen, and not") {
    auto chain = varied_chain();
    auto net = tight(chain);
    for (bool frozen : {true, false}) {
      for (auto& parameter : chain.net->ptr(0)->parameters()) parameter.set_requires_grad(!frozen);
      check(net, chain);
    }
  }
  SECTION("train and eval") {
    auto chain = varied_chain();
    auto net = tight(chain);
    for (bool training : {true, false, true}) {
      net->train(training);
      check(net, chain);
    }
  }
}

TEST_CASE("Budget: retain_graph, autograd::grad, a second use of the output") {
  for (const auto& chain : {varied_chain(), embedding_chain(), rebuilt_chain()}) {
    const auto parameters = chain.net->parameters();
    const auto results = [&](auto net) {
      std::vector<at::Tensor> all;
      torch::manual_seed(5);
      auto y = net->forward(chain.input);
      uneven_sum(y).backward({}, /*retain_graph=*/true);
      uneven_sum(y.square()).backward();
      for (auto& gradient : take_gradients(parameters)) all.push_back(gradient);
      y = net->forward(chain.input);
      for (auto& gradient : torch::autograd::grad({uneven_sum(y)}, {parameters.front(), parameters.back()}))
        all.push_back(gradient);
      y = net->forward(chain.input);
      const auto loss = (uneven_sum(y) * uneven_sum(y.exp())).square();
      const auto gradients = torch::autograd::grad({loss}, parameters, {}, true, /*create_graph=*/true);
      auto sum = torch::zeros({}, at::kDouble);
      for (auto& gradient : gradients) sum = sum + gradient.square().sum();
      sum.backward();
      for (auto& gradient : take_gradients(parameters)) all.push_back(gradient);
      all.push_back(random_state());
      return all;
    };
    const auto plain = results(chain.net);
    const auto [least, most] = limits(chain);
    for (auto budget : {least, (least + most) / 2}) {
      ga::CheckpointedSequential net(chain.net, {.memory_budget = budget});
      CHECK(same_bits(results(net), plain));
    }
  }
}

TEST_CASE("Budget: planning changes nothing") {
  auto chain = convolution_chain();
  chain.net->push_back(nn::Dropout(0.5));
  const auto budget = limits(chain).least + 1000;
  int hooked = 0;
  chain.net->parameters().front().register_hook([&](const at::Tensor&) { ++hooked; });
  for (auto& parameter : chain.net->parameters()) parameter.mutable_grad() = torch::ones_like(parameter);
  const auto buffers = copies(chain.net->buffers());
  std::vector<const void*> addresses;
  for (auto& buffer : chain.net->buffers()) addresses.push_back(buffer.data_ptr());

  const auto plain_output = [&] {
    torch::manual_seed(9);
    const inner::FrozenBuffers frozen(inner::buffers_of({chain.net.get()}));
    const auto output = chain.net->forward(chain.input);
    return std::pair(output, random_state());
  }();
  ga::CheckpointedSequential net(chain.net, {.memory_budget = budget});
  torch::manual_seed(9);
  {
    const inner::FrozenBuffers frozen(inner::buffers_of({chain.net.get()}));
    const auto output = net->forward(chain.input);
    CHECK(same_bits(output, plain_output.first));
    CHECK(same_bits(random_state(), plain_output.second));
  }
  CHECK(same_bits(copies(chain.net->buffers()), buffers));
  for (std::size_t i = 0; i < addresses.size(); ++i) CHECK(chain.net->buffers()[i].data_ptr() == addresses[i]);
  for (auto& parameter : chain.net->parameters()) CHECK(same_bits(parameter.grad(), torch::ones_like(parameter)));
  CHECK(hooked == 0);
  net->forward(chain.input).sum().backward();
  CHECK(hooked == 1);
}

TEST_CASE("Budget: planning changes nothing in a module that a lambda captures") {
  torch::manual_seed(3);
  nn::BatchNorm1d norm(8), registered(8);
  nn::Sequential stages(nn::Linear(8, 8), registered,
                        nn::Functional([norm](const at::Tensor& x) mutable { return norm->forward(x).tanh(); }),
                        nn::Linear(8, 8));
  const auto x = torch::randn({6, 8});
  const auto states = [&] {
    auto all = copies(norm->buffers());
    for (auto& buffer : copies(registered->buffers())) all.push_back(buffer);
    return all;
  };
  const auto before = states();
  stages->forward(x);
  const auto after = states();
  const at::NoGradGuard no_gradients;
  auto buffers = norm->buffers();
  for (auto& buffer : registered->buffers()) buffers.push_back(buffer);
  for (std::size_t i = 0; i < buffers.size(); ++i) buffers[i].copy_(before[i]);
  const at::AutoGradMode gradients(true);
  ga::CheckpointedSequential net(stages, {.memory_budget = plenty});
  const auto output = net->forward(x);
  CHECK(same_bits(states(), after));
  CHECK(norm->num_batches_tracked.item<std::int64_t>() == 1);
  output.sum().backward();
  CHECK(same_bits(states(), after));
}

TEST_CASE("Budget: in a meter, around a meter, and within LibTorch's profiler") {
  const auto chain = varied_chain();
  const auto limit = limits(chain);
  SECTION("a meter around it goes on counting") {
    ga::CheckpointedSequential net(chain.net, {.memory_budget = limit.least});
    ga::MemoryMeter meter;
    auto y = net->forward(chain.input);
    CHECK(meter.peak_bytes() >= limit.least - chain.input.size(0) * 16 * 4);
    const auto held = meter.live_bytes();
    CHECK(held > 0);
    CHECK(held < limit.least);
    y.reset();
    CHECK(meter.live_bytes() == 0);
  }
  SECTION("a meter in a stage") {
    std::vector<std::int64_t> peaks;
    nn::Sequential layers = chain.net;
    layers->push_back(function([&](at::Tensor x) {
      ga::MemoryMeter meter;
      auto y = x.exp();
      peaks.push_back(meter.peak_bytes());
      return y;
    }));
    ga::CheckpointedSequential net(layers, {.memory_budget = limits({"", layers, chain.input}).least});
    net->forward(chain.input).sum().backward();
    CHECK(peaks.size() > 2);
    for (auto peak : peaks) CHECK(peak == chain.input.size(0) * 16 * 4);
  }
  SECTION("a profiler") {
    struct Foreign : c10::MemoryReportingInfoBase {
      void reportMemoryUsage(void*, std::int64_t, std::size_t, std::size_t, c10::Device) override {}
      bool memoryProfilingEnabled() const override { return true; }
    };
    ga::CheckpointedSequential net(chain.net, {.memory_budget = limit.least});
    const auto within_profiler = [&] {
      c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, std::make_shared<Foreign>());
      return net->forward(chain.input);
    };
    const auto random = random_state();
    REQUIRE_ERROR("CheckpointedSequential: must not plan inside LibTorch's profiler", within_profiler());
    CHECK(same_bits(random_state(), random));
    net->forward(chain.input);
    within_profiler().sum().backward();
    take_gradients(chain.net->parameters());
  }
}

TEST_CASE("Budget: planned inside a checkpoint, and inside a user's hooks") {
  for (const auto& chain : {varied_chain(), rebuilt_chain()}) {
    Rig rig(chain);
    const auto plain = rig.step(chain.net);
    const auto [least, most] = limits(chain);
    for (auto budget : {least, (least + most) / 2, most}) {
      INFO(chain.name << " " << budget);
      struct Wrapped {
        ga::CheckpointedSequential net;
        bool checkpoint;
        Wrapped* operator->() { return this; }
        at::Tensor forward(const at::Tensor& x) {
          if (checkpoint) return ga::checkpoint(net, x);
          const auto pass = [](const at::Tensor& tensor) { return tensor; };
          const ga::SavedTensorHooks hooks(pass, pass);
          return net->forward(x);
        }
      };
      for (bool checkpoint : {true, false}) {
        const Wrapped wrapped{{chain.net, {.memory_budget = budget}}, checkpoint};
        for (int step = 0; step < 2; ++step) CHECK(difference(rig.step(wrapped).outcome, plain.outcome) == "");
        CHECK(wrapped.net->plan().least_bytes == least);
        CHECK(wrapped.net->plan().plain.peak_bytes == most);
      }
    }
  }
}

TEST_CASE("Budget: one CheckpointedSequential inside another") {
  const auto chain = transformer_chain(5);
  Rig rig(chain);
  const auto plain = rig.step(chain.net);
  const auto modules = std::vector<nn::AnyModule>(chain.net->begin(), chain.net->end());
  nn::Sequential middle, nested;
  for (int i = 1; i < 4; ++i) middle->push_back(modules[i]);
  nested->push_back(modules[0]);
  nested->push_back(
      ga::CheckpointedSequential(middle, {.memory_budget = limits({"middle", middle, chain.input}).least + 2048}));
  nested->push_back(modules[4]);
  const auto [least, most] = limits({"nested", nested, chain.input});
  CHECK(most < limits(chain).plain);
  for (auto budget : {least, (least + most) / 2, most}) {
    ga::CheckpointedSequential net(nested, {.memory_budget = budget});
    for (int i = 0; i < 2; ++i) {
      const auto step = rig.step(net);
      CHECK(difference(step.outcome, plain.outcome) == "");
      if (i > 0) CHECK(step.peak <= budget);
    }
  }
}

namespace {

// Throws in its `fatal`-th forward pass, counted from 0. It is so slow that planning measures it as seldom as possible,
// and plans recompute it as seldom as possible: otherwise the number of its runs would depend on the machine's load.
struct BombImpl : nn::Module {
  at::Tensor forward(const at::Tensor& x) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    if (runs++ == fatal) throw std::runtime_error("bang");
    return x.exp();
  }
  int runs = 0, fatal = -1;
};
TORCH_MODULE(Bomb);

}  // namespace

TEST_CASE("Budget: an exception of a stage in any run leaves everything unchanged") {
  torch::manual_seed(2);
  Bomb bomb;
  const Chain chain{"bomb",
                    nn::Sequential(nn::Linear(8, 16), nn::BatchNorm1d(16), nn::Dropout(0.2), nn::Linear(16, 8), bomb,
                                   nn::Linear(8, 16), nn::GELU(), nn::BatchNorm1d(16), nn::Linear(16, 4)),
                    randoms({6, 8})};
  Rig rig(chain);
  const auto plain = rig.step(chain.net);
  const auto least = limits(chain).least;
  ga::CheckpointedSequential counting(chain.net, {.memory_budget = least});
  bomb->runs = 0;
  rig.step(counting);
  const int with_plan = bomb->runs;
  bomb->runs = 0;
  rig.step(counting);
  const int step_runs = bomb->runs;
  REQUIRE(step_runs >= 2);  // forward and recomputation
  REQUIRE(with_plan > step_runs);

  const auto attempt = [&](ga::CheckpointedSequential& net, int fatal) {
    bomb->runs = 0;
    bomb->fatal = fatal;
    const auto handles = copies(chain.net->buffers());
    std::vector<const void*> addresses;
    for (auto& buffer : chain.net->buffers()) addresses.push_back(buffer.data_ptr());
    CHECK_THROWS_WITH(rig.step(net), "bang");
    bomb->fatal = -1;
    CHECK(at::GradMode::is_enabled());
    CHECK_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
    CHECK(at::autocast::is_autocast_cache_enabled());
    CHECK(inner::SavingScope::innermost() == nullptr);
    CHECK(c10::ThreadLocalDebugInfo::get(c10::DebugInfoKind::PROFILER_STATE) == nullptr);
    for (std::size_t i = 0; i < addresses.size(); ++i) CHECK(chain.net->buffers()[i].data_ptr() == addresses[i]);
  };
  const int planning = with_plan - step_runs;
  for (int fatal : {0, 1, 2, 3, 4, 5, planning / 2, planning - 1}) {
    INFO("planning, run " << fatal);
    ga::CheckpointedSequential net(chain.net, {.memory_budget = least});
    attempt(net, fatal);
    REQUIRE_ERROR("there is no plan", net->plan());
    CHECK(difference(rig.step(net).outcome, plain.outcome) == "");
  }
  ga::CheckpointedSequential net(chain.net, {.memory_budget = least});
  rig.step(net);
  for (int fatal = 0; fatal < step_runs; ++fatal) {
    INFO("run " << fatal);
    attempt(net, fatal);
    CHECK(difference(rig.step(net).outcome, plain.outcome) == "");
  }
  const auto random = random_state();
  ga::CheckpointedSequential other(chain.net, {.memory_budget = least});
  bomb->runs = 0;
  bomb->fatal = planning / 2;
  const auto buffers = copies(chain.net->buffers());
  CHECK_THROWS_WITH(other->forward(chain.input), "bang");
  CHECK(same_bits(random_state(), random));
  CHECK(same_bits(copies(chain.net->buffers()), buffers));
}

TEST_CASE("CheckpointedSequential: memory decreases with each segment of backward") {
  torch::manual_seed(2);
  nn::Sequential net;
  for (int i = 0; i < 8; ++i) {
    net->push_back(nn::Linear(16, 16));
    net->push_back(nn::Tanh());
  }
  const auto x = randoms({32, 16});
  for (int segments : {1, 2, 4, 8}) {
    ga::CheckpointedSequential checkpointed(net, {.segments = segments});
    ByteRecord record;
    std::vector<std::int64_t> live;
    std::vector<std::pair<at::Tensor, unsigned>> hooks;
    for (int i = 0; i < 16; i += 2)
      for (auto& parameter : net->ptr(i)->parameters()) {
        const bool ends_segment = i % (16 / segments) == 0 && parameter.dim() == 2;
        hooks.emplace_back(parameter,
                           parameter.register_hook([&record, &live, ends_segment](const at::Tensor& gradient) {
                             record.leave_out(gradient);
                             if (ends_segment) live.push_back(record.live());
                           }));
      }
    auto y = checkpointed->forward(x);
    y.sum().backward();
    for (auto& [parameter, hook] : hooks) parameter.remove_hook(hook);
    take_gradients(net->parameters());
    REQUIRE(live.size() == static_cast<std::size_t>(segments));
    for (std::size_t i = 1; i < live.size(); ++i) CHECK(live[i] < live[i - 1]);
  }
}

TEST_CASE("Budget: a thousand steps leak neither memory nor references to modules") {
  const auto chain = with_input(rebuilt_chain(), randoms({2, 8}));
  const auto modules = std::vector<nn::AnyModule>(chain.net->begin(), chain.net->end());
  const auto owners = [&] {
    long count = 0;
    for (auto& module : modules) count += module.ptr().use_count();
    return count;
  };
  const auto before = owners();
  {
    const auto budget = limits(chain).least;
    ga::CheckpointedSequential net(chain.net, {.memory_budget = budget});
    for (int i = 0; i < 3; ++i) net->forward(chain.input).sum().backward();
    const auto parameters = chain.net->parameters();
    const auto with_plan = owners();
    ByteRecord record;
    for (int i = 0; i < 1000; ++i) {
      auto y = net->forward(chain.input);
      if (i % 3 > 0) y.sum().backward({}, /*retain_graph=*/i % 3 == 2);
    }
    CHECK(record.live() == 0);  // gradients were allocated before
    CHECK(owners() == with_plan);
    auto y = net->forward(chain.input);
    net = nullptr;
    CHECK(owners() > before);  // the graph may still run the modules
    y.sum().backward();
    CHECK(owners() == before);
    take_gradients(parameters);
  }
  CHECK(owners() == before);
}

TEST_CASE("Budget: threads with separate models") {
  std::vector<Chain> chains;
  std::vector<Outcome> plain;
  for (int i = 0; i < 4; ++i) {
    torch::manual_seed(30 + i);
    nn::Sequential net(nn::Linear(16, 32), nn::GELU(), nn::Linear(32, 32), nn::BatchNorm1d(32), nn::Tanh(),
                       nn::Linear(32, 16), nn::SiLU(), nn::Linear(16, 8));
    chains.push_back({"thread", net, randoms({16 + i, 16})});
  }
  const auto step = [](auto net, const Chain& chain) {
    auto y = net->forward(chain.input);
    y.backward(torch::ones_like(y));
    return Outcome{{y.detach()}, take_gradients(chain.net->parameters()), {}, {}};
  };
  std::vector<std::int64_t> budgets;
  for (auto& chain : chains) {
    plain.push_back(step(chain.net, chain));
    budgets.push_back(limits(chain).least);
  }
  std::vector<std::string> differences(4, "none");
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i)
    threads.emplace_back([&, i] {
      differences[i] = error_of([&] {
        ga::CheckpointedSequential net(chains[i].net, {.memory_budget = budgets[i]});
        std::string all;
        for (int k = 0; k < 10; ++k) all += difference(step(net, chains[i]), plain[i]);
        if (!all.empty()) throw std::runtime_error(all);
      });
    });
  for (auto& thread : threads) thread.join();
  for (auto& each : differences) CHECK(each == "");
}

TEST_CASE("Budget: stages of all kinds") {
  const auto same = function([](at::Tensor x) { return x; });
  const auto plus = function([](at::Tensor x) { return x + 1; });
  const auto noisy = function([](at::Tensor x) { return x + torch::randn_like(x); });
  const auto halves = function([](at::Tensor x) { return x.chunk(2, 1)[0] * x.chunk(2, 1)[1]; });
  torch::manual_seed(2);
  std::vector<Chain> chains{
      {"one", nn::Sequential(nn::Linear(8, 8)), randoms({6, 8})},
      {"one, no rows", nn::Sequential(nn::Linear(8, 8)), randoms({0, 8})},
      {"no rows", layers_of({8, 16, 16, 8}), randoms({0, 8})},
      {"one row", layers_of({8, 16, 16, 8}), randoms({8})},
      {"identities",
       nn::Sequential(same, nn::Identity(), nn::Linear(8, 8), nn::Identity(), same, nn::Linear(8, 8), same),
       randoms({6, 8})},
      {"only identities", nn::Sequential(same, nn::Identity()), randoms({6, 8})},
      {"nothing saved", nn::Sequential(nn::Linear(8, 8), plus, plus, nn::Linear(8, 8), plus), randoms({6, 8})},
      {"noise", nn::Sequential(nn::Linear(8, 8), noisy, nn::Tanh(), noisy, nn::Linear(8, 8), noisy, nn::Linear(8, 8)),
       randoms({6, 8})},
      {"halves", nn::Sequential(nn::Linear(8, 32), halves, nn::Linear(16, 32), halves, nn::Linear(16, 8)),
       randoms({6, 8})},
      {"double", layers_of({8, 16, 16, 8}), randoms({6, 8}, at::kDouble)},
      {"sparse gradient",
       nn::Sequential(nn::Embedding(nn::EmbeddingOptions(50, 8).sparse(true)), nn::Linear(8, 16), nn::GELU(),
                      nn::Linear(16, 8)),
       torch::arange(12)},
      {"cut",
       nn::Sequential(nn::Linear(8, 8), nn::Tanh(), function([](at::Tensor x) { return x.detach(); }),
                      nn::Linear(8, 16), nn::Tanh(), nn::Linear(16, 8)),
       randoms({6, 8})},
      {"all frozen", layers_of({8, 16, 16, 8}), randoms({6, 8})},
      {"all frozen, but the input", layers_of({8, 16, 16, 8}), randoms({6, 8}).requires_grad_()},
      {"input with gradients", layers_of({8, 16, 16, 8}), randoms({6, 8}).requires_grad_()},
      {"output of token ids", nn::Sequential(nn::Linear(8, 8), function([](at::Tensor x) { return x.argmax(1); })),
       randoms({6, 8})},
  };
  for (auto& chain : chains) {
    if (chain.name == "double") chain.net->to(at::kDouble);
    if (chain.name.starts_with("all frozen"))
      for (auto& parameter : chain.net->parameters()) parameter.set_requires_grad(false);
  }
  for (auto& chain : chains) {
    INFO(chain.name);
    Rig rig(chain);
    const auto plain = rig.step(chain.net);
    const auto [least, most] = limits(chain);
    CHECK(plain.peak <= most);
    for (auto budget : {least, (least + most) / 2, most}) {
      if (budget == 0) continue;
      INFO(budget);
      ga::CheckpointedSequential net(chain.net, {.memory_budget = budget});
      for (int i = 0; i < 2; ++i) {
        const auto step = rig.step(net);
        CHECK(difference(step.outcome, plain.outcome) == "");
        if (i > 0) CHECK(step.peak <= budget);
      }
    }
  }
}

TEST_CASE("Budget: a module's forbidden actions are errors") {
  const auto x = randoms({6, 8});
  SECTION("write over the chain's input") {
    ga::CheckpointedSequential net(nn::Sequential(nn::ReLU(nn::ReLUOptions().inplace(true)), nn::Linear(8, 8)),
                                   {.memory_budget = plenty});
    REQUIRE_ERROR("CheckpointedSequential: the first module must not change its input in place", net->forward(x));
    ga::CheckpointedSequential viewed(
        nn::Sequential(nn::Flatten(), nn::ReLU(nn::ReLUOptions().inplace(true)), nn::Linear(8, 8)),
        {.memory_budget = plenty});
    REQUIRE_ERROR("CheckpointedSequential: the first module must not change its input in place",
                  viewed->forward(x.clone()));
    const at::NoGradGuard no_gradients;
    CHECK(net->forward(x.clone()).defined());
  }
  SECTION("take or return something else than a dense tensor") {
    ga::CheckpointedSequential net(nn::Sequential(function([](at::Tensor t) {
                                                    return at::mm(t, torch::ones({8, 8}));
                                                  }),
                                                  nn::Linear(8, 8)),
                                   {.memory_budget = plenty});
    REQUIRE_ERROR("the input and the outputs of modules must be dense tensors, got layout Sparse",
                  net->forward(x.to_sparse()));
    ga::CheckpointedSequential sparse(
        nn::Sequential(nn::Linear(8, 8), function([](at::Tensor t) { return t.to_sparse(); })),
        {.memory_budget = plenty});
    REQUIRE_ERROR("must be dense tensors, got layout Sparse", sparse->forward(x));
    ga::CheckpointedSequential nothing(
        nn::Sequential(nn::Linear(8, 8), function([](at::Tensor) { return at::Tensor(); })), {.memory_budget = plenty});
    REQUIRE_ERROR("must be dense tensors, got an undefined tensor", nothing->forward(x));
    ga::CheckpointedSequential two(nn::Sequential(nn::Bilinear(8, 8, 8), nn::Linear(8, 8)), {.memory_budget = plenty});
    REQUIRE_ERROR("expects 2 argument(s), but received 1", two->forward(x));
  }
}
