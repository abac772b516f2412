// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/data/tensor_batches.hpp>
#include <gradaccum/gradaccum.hpp>

#include "support/failing_files.hpp"
#include "support/files.hpp"
#include "training_state/bits.hpp"

namespace ga = gradaccum;
using namespace testing;

namespace {

/// Convolutions in channels_last, a shared weight of more than 4096 numbers, and a sparse embedding on request.
struct NetImpl : torch::nn::Module {
  torch::nn::Conv2d conv{torch::nn::Conv2dOptions(2, 4, 3)};
  torch::nn::BatchNorm2d norm{4};
  torch::nn::Linear wide{64, 70};
  torch::nn::Dropout drop{0.2};
  torch::nn::Embedding table{nullptr};
  at::Tensor tied;

  explicit NetImpl(bool sparse = false) {
    register_module("conv", conv);
    register_module("norm", norm);
    register_module("wide", wide);
    register_module("drop", drop);
    tied = register_parameter("tied", wide->weight);
    if (sparse)
      table = register_module("table", torch::nn::Embedding(torch::nn::EmbeddingOptions(10, 64).sparse(true)));
    conv->bias.set_requires_grad(false);
    for (auto& parameter : conv->parameters())
      if (parameter.dim() == 4) parameter.set_data(parameter.contiguous(at::MemoryFormat::ChannelsLast));
  }
  at::Tensor forward(const at::Tensor& x) {
    auto hidden = torch::relu(norm(conv(x.contiguous(at::MemoryFormat::ChannelsLast)))).flatten(1);
    if (table) hidden = hidden + table((x.flatten(1) * 3).abs().clamp(0, 9).to(at::kLong)).mean(1);
    return torch::matmul(drop(torch::tanh(wide(hidden))), tied).mean(1);
  }
};
TORCH_MODULE(Net);

using Groups = std::vector<torch::optim::OptimizerParamGroup>;
using AnyOptimizer = std::unique_ptr<torch::optim::Optimizer>;
using MakeOptimizer = std::function<AnyOptimizer(const Groups&)>;

/// Puts the convolution's weight in a separate group; the frozen parameter is in the other.
Groups groups_of(const Net& net) {
  std::vector<at::Tensor> rest;
  for (auto& parameter : distinct_parameters(*net))
    if (!parameter.is_same(net->conv->weight)) rest.push_back(parameter);
  return {torch::optim::OptimizerParamGroup({net->conv->weight}), torch::optim::OptimizerParamGroup(rest)};
}

template <class Optimizer, class Options>
MakeOptimizer maker(Options options) {
  return [=](const Groups& groups) { return std::make_unique<Optimizer>(groups, options); };
}

std::vector<std::pair<std::string, MakeOptimizer>> optimizers() {
  using namespace torch::optim;
  const auto adafactor = [](ga::optim::AdafactorVariant variant, double beta1) {
    return maker<ga::optim::Adafactor>(ga::optim::AdafactorOptions(1e-2).beta1(beta1).variant(variant));
  };
  return {
      {"SGD", maker<SGD>(SGDOptions(1e-2).momentum(0.9).weight_decay(1e-2))},
      {"Adam", maker<Adam>(AdamOptions(1e-2).amsgrad(true).weight_decay(1e-2))},
      {"AdamW", maker<AdamW>(AdamWOptions(1e-2))},
      {"RMSprop", maker<RMSprop>(RMSpropOptions(1e-2).centered(true).momentum(0.5))},
      {"Adagrad", maker<Adagrad>(AdagradOptions(1e-2).lr_decay(0.1))},
      {"our SGD", maker<ga::optim::SGD>(ga::optim::SGDOptions(1e-2).momentum(0.9).nesterov(true))},
      {"our Adam", maker<ga::optim::Adam>(ga::optim::AdamOptions(1e-2))},
      {"our AdamW", maker<ga::optim::AdamW>(ga::optim::AdamWOptions(1e-2).amsgrad(true))},
      {"Adafactor", adafactor(ga::optim::AdafactorVariant::paper, 0.9)},
      {"Adafactor, as PyTorch's", adafactor(ga::optim::AdafactorVariant::pytorch, 0.5)},
      {"Adafactor without momentum", adafactor(ga::optim::AdafactorVariant::paper, 0)},
      {"Adam8bit", maker<ga::optim::Adam8bit>(ga::optim::Adam8bitOptions(1e-2).weight_decay(1e-2))},
      {"AdamW8bit", maker<ga::optim::AdamW8bit>(ga::optim::AdamW8bitOptions(1e-2))},
  };
}

at::Tensor numbers(at::IntArrayRef shape, std::uint64_t seed) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  return at::randn(shape, generator);
}

ga::data::TensorBatches data() {
  return {numbers({34, 2, 6, 6}, 1), numbers({34}, 2), {.batch_size = 3, .shuffle = true, .seed = 1}};
}

const auto objective = [](auto& net, auto& batch) {
  return ga::Loss{torch::mse_loss(net->forward(batch.data), batch.target), batch.data.size(0)};
};

/// A training in new objects; a second program begins with other random numbers and rates.
template <class... Policies>
Bits train(const std::filesystem::path& directory, bool first, std::int64_t stop_after, bool sparse,
           const auto& make_optimizer, Policies... policies) {
  const FailingFiles no_disk_to_wait_for;
  torch::manual_seed(first ? 1 : 77);
  Net net(sparse);
  auto optimizer = make_optimizer(net, first);
  auto batches = data();
  ga::Trainer trainer(net, *optimizer, objective, Stop{stop_after}, ga::Accumulate{.steps = 3}, policies...,
                      ga::SaveState{.directory = directory});
  trainer.fit(batches, {.epochs = 2, .resume = directory});
  Bits bits;
  bits.add_model(*net);
  bits.add_generator();
  if constexpr (std::derived_from<std::remove_reference_t<decltype(*optimizer)>, torch::optim::Optimizer>)
    bits.add_optimizer(*optimizer, *net);
  return bits;
}

template <class... Policies>
void check_resumes(bool sparse, const auto& make_optimizer, Policies... policies) {
  const Directory directory;
  const auto straight = train(directory / "straight", true, -1, sparse, make_optimizer, policies...);
  for (const std::int64_t at : {2, 3, 11, 12, 13, 14, 19}) {
    const auto path = directory / std::to_string(at);
    const auto stopped = train(path, true, at, sparse, make_optimizer, policies...);
    REQUIRE(difference(straight, stopped) != "");
    const auto resumed = train(path, false, -1, sparse, make_optimizer, policies...);
    INFO("stopped after boundary " << at);
    CHECK(difference(straight, resumed) == "");
  }
}

auto with_other_rates(const MakeOptimizer& make) {
  return [make](const Net& net, bool first) {
    auto optimizer = make(groups_of(net));
    optimizer->param_groups()[1].options().set_lr(first ? 3e-3 : 0.5);  // a resume restores the saved rate
    return optimizer;
  };
}

}  // namespace

TEST_CASE("resume: every optimizer through the interface of torch::optim::Optimizer") {
  for (auto& [name, make] : optimizers()) {
    INFO(name);
    check_resumes(false, with_other_rates(make), ga::ClipNorm{.max = 0.5});
  }
}

TEST_CASE("resume: sparse gradients in an open window") {
  for (auto& [name, make] : optimizers()) {
    if (name != "SGD" && name != "Adagrad" && name != "our SGD") continue;
    INFO(name);
    const auto plain = [] { return maker<torch::optim::SGD>(torch::optim::SGDOptions(1e-2)); };
    check_resumes(true, with_other_rates(name == "Adagrad" ? make : plain()), ga::ClipNorm{.max = 0.5});
  }
}

TEST_CASE("resume: an optimizer that steps inside of backward") {
  const auto adamw = [](const Net& net, bool) {
    return std::make_unique<ga::optim::AdamW>(distinct_parameters(*net), ga::optim::AdamWOptions(1e-2));
  };
  check_resumes(false, adamw, ga::OptimizerInBackward{});
}

namespace {

/// SGD with momentum, as a user might write it.
struct OwnOptimizer {
  std::vector<torch::optim::OptimizerParamGroup> groups;
  std::map<std::string, at::Tensor> velocity = {};

  auto& param_groups() { return groups; }
  void zero_grad() {
    for (auto& parameter : groups[0].params()) parameter.mutable_grad().reset();
  }
  void step() {
    const at::NoGradGuard no_grad;
    std::size_t i = 0;
    for (auto& parameter : groups[0].params()) {
      auto& moving = velocity[std::to_string(i++)];
      if (!parameter.grad().defined()) continue;
      moving = moving.defined() ? moving * 0.9 + parameter.grad() : parameter.grad().clone();
      parameter.add_(moving, -1e-2);
    }
  }
  void state(ga::Archive& archive) {
    auto tensors = velocity;
    std::erase_if(tensors, [](auto& item) { return !item.second.defined(); });
    archive.tensors(tensors);
    if (!archive.loading()) return;
    for (auto& [name, tensor] : tensors) tensor = tensor.clone();
    archive.when_all_fit([this, tensors] { velocity = tensors; });
  }
};

}  // namespace

TEST_CASE("resume: a user's optimizer") {
  check_resumes(false, [](const Net& net, bool) {
    return std::make_unique<OwnOptimizer>(OwnOptimizer{{torch::optim::OptimizerParamGroup(distinct_parameters(*net))}});
  });
}

namespace {

struct Loop {
  bool weighted = false, clipped = false, scaled = false, sparse = false;
  std::optional<at::ScalarType> accumulate_in = {};
};

/// The values that a user's loop saves.
struct Training {
  Net& net;
  ga::GradAccumulator<ga::optim::AdamW>& optimizer;
  ga::AmpScaler& scaler;
  ga::data::TensorBatches& batches;

  std::int64_t updates() const { return optimizer.updates(); }
  void state(ga::Archive& archive) {
    archive("model", ga::ModelState(net));
    archive("optimizer", ga::OptimizerState(optimizer, net));
    archive("random", ga::RandomState());
    archive("batches", batches);
    archive("scaler", scaler);
  }
};

/// Saves after this number of micro-batches and ends; the second program resumes.
Bits loop(const Loop& how, const std::filesystem::path& directory, bool first, std::int64_t stop_after) {
  const FailingFiles no_disk_to_wait_for;
  torch::manual_seed(first ? 1 : 77);
  Net net(how.sparse);
  if (how.accumulate_in) net->to(at::kBFloat16);
  ga::optim::AdamW adamw(groups_of(net), ga::optim::AdamWOptions(1e-2));
  ga::GradAccumulator<ga::optim::AdamW> optimizer(adamw, {.steps = 4, .accumulate_in = how.accumulate_in});
  ga::AmpScaler scaler({.init_scale = first ? 16384.0 : 2.0, .growth_interval = 2, .enabled = how.scaled});
  auto batches = data();
  Training training{net, optimizer, scaler, batches};
  Bits bits;
  const auto finish = [&] {
    bits.add_model(*net);
    bits.add_optimizer(adamw, *net);
    bits.add_generator();
    bits.add("updates", static_cast<double>(optimizer.updates()));
    bits.add("scale", scaler.get_scale());
    return bits;
  };
  if (!first) ga::load(directory, training);
  std::int64_t seen = 0;
  while (batches.state().epoch < 3)
    for (auto& batch : batches) {
      const auto mean = [&] {
        std::optional<ga::Autocast> autocast;
        if (how.scaled) autocast.emplace(at::kCPU, at::kHalf);
        const auto x = how.accumulate_in ? batch.data.to(at::kBFloat16) : batch.data;
        return torch::mse_loss(net->forward(x).to(at::kFloat), batch.target);
      }();
      if (how.clipped && optimizer.micro_steps() == 1) optimizer.clip_grad_norm_(0.1);
      if (how.weighted)
        optimizer.backward(scaler.scale(ga::Loss{mean, batch.data.size(0)}));
      else
        scaler.scale(mean).backward();
      if (how.clipped && optimizer.ready()) optimizer.clip_grad_value_(0.01);
      scaler.step(optimizer);
      scaler.update();
      optimizer.zero_grad();
      if (++seen == stop_after) {
        ga::save(directory, training);
        return finish();
      }
    }
  return finish();
}

}  // namespace

TEST_CASE("resume: users' loops") {
  const Directory directory;
  int number = 0;
  for (const auto& how :
       {Loop{}, Loop{.weighted = true}, Loop{.clipped = true}, Loop{.weighted = true, .clipped = true},
        Loop{.scaled = true}, Loop{.weighted = true, .clipped = true, .scaled = true},
        Loop{.weighted = true, .accumulate_in = at::kFloat}, Loop{.accumulate_in = at::kFloat}}) {
    const auto straight = loop(how, directory / "straight", true, -1);
    for (const std::int64_t at : {1, 2, 3, 4, 5, 11, 12, 13, 26}) {
      const auto path = directory / std::to_string(++number);
      loop(how, path, true, at);
      INFO("loop " << number << ", stopped after micro-batch " << at);
      CHECK(difference(straight, loop(how, path, false, -1)) == "");
    }
  }
}
