// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/checkpoint.hpp>
#include <gradaccum/checkpointed_sequential.hpp>
#include <gradaccum/detail/checkpoint/forward_state.hpp>
#include <gradaccum/memory_meter.hpp>

#include "support/leaves.hpp"
#include "support/outcome.hpp"

#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace ga = gradaccum;
namespace nn = torch::nn;
using namespace testing;

// Buffers of user-defined modules that affect results: each forward pass begins with the values of the one before, and
// a recomputation must not count as a forward pass.
namespace {

constexpr std::int64_t width = 8;

// Counts its forward passes, and subtracts a running mean.
struct CenterImpl : nn::Module {
  at::Tensor forward(const at::Tensor& x) {
    {
      const at::NoGradGuard no_grad;
      count += 1;
      mean.lerp_(x.mean(0), 0.25);
    }
    return linear->forward((x - mean) * (1 + mean)) / count.clone();
  }
  nn::Linear linear = register_module("linear", nn::Linear(width, width));
  at::Tensor count = register_buffer("count", torch::zeros({}, at::kLong));
  at::Tensor mean = register_buffer("mean", torch::zeros({width}));
};
TORCH_MODULE(Center);

// Divides a weight by its largest singular value, with one power iteration per forward pass.
struct SpectralImpl : nn::Module {
  at::Tensor forward(const at::Tensor& x) {
    {
      const at::NoGradGuard no_grad;
      const auto v = weight.t().mv(u);
      u.copy_(weight.mv(v / v.norm()));
      u /= u.norm();
    }
    const auto v = weight.t().mv(u.clone());
    return x.mm(weight / v.norm()).tanh();
  }
  at::Tensor weight = register_parameter("weight", torch::randn({width, width}));
  at::Tensor u = register_buffer("u", torch::ones({width}));
};
TORCH_MODULE(Spectral);

// A codebook by moving averages, written through `.data`, which bypasses the version counter.
struct CodebookImpl : nn::Module {
  at::Tensor forward(const at::Tensor& x) {
    const auto codes = torch::cdist(x.detach(), book).argmin(1);
    const auto hits = torch::one_hot(codes, book.size(0)).to(x.scalar_type());
    book.data().lerp_((hits.t().mm(x.detach()) + book) / (1 + hits.sum(0).unsqueeze(1)), 0.3);
    return scale * x + book.index_select(0, codes) * x.sin();
  }
  at::Tensor book = register_buffer("book", torch::randn({3, width}));
  at::Tensor scale = register_parameter("scale", torch::ones({width}));
};
TORCH_MODULE(Codebook);

// Writes to its buffer through a pointer.
struct PointersImpl : nn::Module {
  at::Tensor forward(const at::Tensor& x) {
    number.data_ptr<float>()[0] += 0.5F;
    return (x * scale).sin() * number.clone();
  }
  at::Tensor number = register_buffer("number", torch::ones({1}));
  at::Tensor scale = register_parameter("scale", torch::ones({width}));
};
TORCH_MODULE(Pointers);

// Running statistics of a LibTorch kernel that does not count versions, used before they are updated.
struct LaggingNormImpl : nn::Module {
  at::Tensor forward(const at::Tensor& x) {
    const auto lagged = (x - mean) * scale;
    return torch::batch_norm(lagged, {}, {}, mean, variance, /*training=*/true, 0.2, 1e-5, false).sigmoid() * lagged;
  }
  at::Tensor mean = register_buffer("mean", torch::zeros({width}));
  at::Tensor variance = register_buffer("variance", torch::ones({width}));
  at::Tensor scale = register_parameter("scale", torch::ones({width}));
};
TORCH_MODULE(LaggingNorm);

// Replaces its buffer by another tensor.
struct ReplacesImpl : nn::Module {
  at::Tensor forward(const at::Tensor& t) {
    mean = mean * 0.9 + t.detach().mean() * 0.1;
    return (t - mean).sin();
  }
  at::Tensor mean = register_buffer("mean", torch::zeros({}));
};

nn::Sequential net_of_all() {
  torch::manual_seed(4);
  nn::BatchNorm1d norm(width);
  return nn::Sequential(Center(), nn::GELU(), Spectral(), nn::Dropout(0.1), Codebook(), norm, nn::Linear(width, width),
                        Pointers(), LaggingNorm(), nn::Linear(width, width), Center(), nn::Linear(width, width));
}

using Step = std::function<at::Tensor(nn::Sequential&, const at::Tensor&)>;

// Runs two forward passes before their backward passes, three times.
Outcome train(const Step& step, bool again = false) {
  auto net = net_of_all();
  torch::manual_seed(5);
  const auto x = leaf(torch::randn({6, width}));
  Outcome all;
  for (int i = 0; i < 3; ++i) {
    const auto first = step(net, x), second = step(net, first.tanh());
    all.outputs.push_back(second.detach());
    if (again) uneven_sum(second).backward({}, /*retain_graph=*/true), take_gradients(net->parameters());
    if (again) take_gradients({x});
    uneven_sum(second).backward();
    for (auto& gradient : take_gradients(net->parameters())) all.gradients.push_back(gradient);
    for (auto& gradient : take_gradients({x})) all.gradients.push_back(gradient);
  }
  all.buffers = copies(net->buffers());
  all.random = random_state();
  return all;
}

at::Tensor plain(nn::Sequential& net, const at::Tensor& x) { return net->forward(x); }

Step in(const ga::CheckpointedSequentialOptions& options) {
  auto chain = std::make_shared<ga::CheckpointedSequential>(nullptr);
  return [=](nn::Sequential& net, const at::Tensor& x) {
    if (chain->is_empty() || !(*chain)->children().front()->buffers().front().is_same(net->buffers().front()))
      *chain = ga::CheckpointedSequential(net, options);
    return (*chain)->forward(x);
  };
}

}  // namespace

TEST_CASE("checkpoint: buffers of a user's module change once, and a recomputation begins with forward's values") {
  const auto expected = train(plain);
  CHECK(expected.buffers[0].item<std::int64_t>() == 6);
  const ga::CheckpointOptions defaults, content{.check_content = true}, whole{.early_stop = false};
  for (const auto& options : {defaults, content, whole}) {
    INFO("check_content " << options.check_content << ", early_stop " << options.early_stop);
    CHECK(difference(train([&](auto& net, auto& x) { return ga::checkpoint(options, net, x); }), expected) == "");
    CHECK(difference(train([&](auto& net, auto& x) { return ga::checkpoint(options, net, x); }, true), expected) == "");
  }
  SECTION("a module in a lambda in a checkpoint, and one among the inputs") {
    const auto nested = [](auto& net, auto& x) {
      return ga::checkpoint([net](at::Tensor t) { return ga::checkpoint(net, t.clone()); }, x);
    };
    const auto given = [](auto& net, auto& x) {
      return ga::checkpoint([](auto module, const at::Tensor& t) { return module->forward(t); }, net, x);
    };
    CHECK(difference(train(nested), expected) == "");
    CHECK(difference(train(nested, true), expected) == "");
    CHECK(difference(train(given), expected) == "");
  }
}

TEST_CASE("checkpoint: buffers of modules that a lambda captures change once, by any operation") {
  const auto make = [] {
    torch::manual_seed(4);
    nn::Functional channels(torch::unsqueeze, -1), rows([](const at::Tensor&x) { return x.squeeze(-1) * 2; });
    return nn::Sequential(Center(), nn::BatchNorm1d(width), nn::Dropout(0.2), Spectral(), LaggingNorm(), channels,
                          nn::Conv1d(nn::Conv1dOptions(width, width, 1)), nn::BatchNorm1d(width), rows,
                          nn::BatchNorm1d(nn::BatchNorm1dOptions(width).momentum(std::nullopt)));
  };
  std::vector<at::Tensor> ring;  // tensors outside of modules, written row by row
  const auto run = [&](auto&& step, int passes = 1) {
    auto net = make();
    ring = {torch::zeros({4, width})};
    torch::manual_seed(5);
    const auto x = leaf(torch::randn({6, width}));
    Outcome all;
    for (int i = 0; i < 3; ++i) {
      const auto whole = [net, &ring, i](const at::Tensor& t) {
        RECORD_FUNCTION("a label for the profiler", {});
        auto y = nn::Sequential(net)->forward(t);
        const at::NoGradGuard no_grad;
        ring[0][i].add_(y.mean(0) + ring[0].sum());
        return std::pair(y, ring[0].clone());
      };
      const auto [y, sums] = step(whole, x);
      const auto loss = uneven_sum(y * sums.sum().exp());
      for (int pass = 1; pass <= passes; ++pass) loss.backward({}, /*retain_graph=*/true);
      all.outputs.push_back(y.detach());
      for (auto& gradient : take_gradients(net->parameters())) all.gradients.push_back(gradient / passes);
    }
    all.buffers = copies(net->buffers());
    all.buffers.push_back(ring[0].clone());
    all.random = random_state();
    return all;
  };
  const auto plain = [](auto& whole, auto& x) { return whole(x); };
  const auto expected = run(plain);
  const ga::CheckpointOptions defaults, content{.check_content = true}, whole{.early_stop = false};
  for (const auto& options : {defaults, content, whole}) {
    INFO("check_content " << options.check_content << ", early_stop " << options.early_stop);
    const auto once = [&](auto& part, const at::Tensor& x) { return ga::checkpoint(options, part, x); };
    CHECK(difference(run(once), expected) == "");
    CHECK(difference(run(once, 2), expected) == "");
    const auto nested = [&](auto& part, auto& x) {
      return ga::checkpoint(
          options, [&](const at::Tensor& t) { return once(part, t.clone()); }, x);
    };
    CHECK(difference(run(nested), expected) == "");
  }
}

TEST_CASE("checkpoint: tensors that a lambda creates are not saved, also in a Functional") {
  ga::detail::BufferRecord record;
  const auto outside = torch::ones({3});
  at::Tensor made;
  {
    const ga::detail::RecordingScope recording(&record);
    ga::detail::run_watched({}, /*calls_others=*/true, [&] {
      made = torch::rand({3}).add_(1);
      made.slice(0, 0, 1).mul_(2);
      outside.view({3, 1}).narrow(0, 1, 1).mul_(2);
    });
  }
  REQUIRE(record.changed.size() == 1);
  CHECK(record.changed[0]->buffer.is_same(outside));
  CHECK(record.changed[0]->before.eq(1).all().item<bool>());

  const auto train = [](bool checkpointed) {
    torch::manual_seed(3);
    nn::BatchNorm1d norm(width);
    nn::Sequential net(nn::Functional([norm](const at::Tensor& x) mutable { return norm->forward(x).tanh(); }),
                       nn::Linear(width, width));
    const auto x = torch::randn({6, width});
    auto chain = ga::CheckpointedSequential(net, {.segments = 2});
    for (int i = 0; i < 3; ++i) {
      const auto y = !checkpointed ? net->forward(x) : i == 1 ? ga::checkpoint(net, x) : chain->forward(x);
      uneven_sum(y).backward();
    }
    return copies(norm->buffers());
  };
  const auto expected = train(false), found = train(true);
  for (std::size_t i = 0; i < expected.size(); ++i) CHECK(found[i].equal(expected[i]));
}

TEST_CASE("CheckpointedSequential: buffers of a user's module change once") {
  const auto expected = train(plain);
  for (std::int64_t segments : {1, 2, 3, 5, 12}) {
    INFO(segments << " segments");
    CHECK(difference(train(in({.segments = segments})), expected) == "");
    CHECK(difference(train(in({.segments = segments, .checkpoint = {.check_content = true}}), true), expected) == "");
  }
  for (std::int64_t budget : {1 << 20, 9000, 7000, 6000, 5000}) {
    INFO(budget << " bytes");
    CHECK(difference(train(in({.memory_budget = budget})), expected) == "");
  }
  const auto around = in({.segments = 3}), within = in({.memory_budget = 7000});
  CHECK(difference(train([&](auto& net, auto& x) {
                     return ga::checkpoint([&](const at::Tensor& t) { return around(net, t); }, x);
                   }),
                   expected) == "");
  CHECK(difference(train([&](auto& net, auto& x) {
                     return ga::checkpoint([&](const at::Tensor& t) { return within(net, t); }, x);
                   }),
                   expected) == "");
}

TEST_CASE("CheckpointedSequential: a budget is kept if buffers change") {
  struct LargeImpl : nn::Module {
    at::Tensor forward(const at::Tensor& x) {
      const at::Tensor y = x.sin() * (1 + table[3]);
      table.data().add_(0.01);
      return y.exp().cos().tanh() * gain;
    }
    at::Tensor table = register_buffer("table", torch::zeros({16, 256}));
    at::Tensor gain = register_parameter("gain", torch::ones({256}));
  };
  nn::Sequential net;
  for (int i = 0; i < 8; ++i) net->push_back(std::make_shared<LargeImpl>());
  const auto x = leaf(torch::randn({64, 256}));
  const auto peak_with = [&](std::int64_t budget) {
    ga::CheckpointedSequential chain(net, {.memory_budget = budget});
    chain->forward(x).sum().backward();
    take_gradients(chain->parameters());
    ga::MemoryMeter meter;
    chain->forward(x).sum().backward();
    return std::pair(meter.peak_bytes(), chain->plan());
  };
  const auto [most, plan] = peak_with(1 << 30);
  CHECK(plan.schedule == "0-7");
  CHECK(plan.least_bytes < plan.plain.peak_bytes);
  CHECK(plan.plain.peak_bytes <= most);  // a kept stage copies nothing
  for (auto budget : {plan.least_bytes, (plan.least_bytes + plan.plain.peak_bytes) / 2}) {
    const auto [bytes, planned] = peak_with(budget);
    CHECK(contains(planned.schedule, "["));
    CHECK(bytes <= budget + 64 * 256 * 4 + 8 * 256 * 4 + 4);  // the output, gradients of parameters, a loss
  }
}

TEST_CASE("checkpoint: a copy of a buffer that only others read is freed, and a replaced buffer is an error") {
  struct MaskedImpl : nn::Module {
    at::Tensor forward(const at::Tensor& x) { return (x * mask).sin() * scale; }
    at::Tensor mask = register_buffer("mask", torch::ones({1 << 20}));
    at::Tensor scale = register_parameter("scale", torch::ones({1}));
  };
  const auto masked = std::make_shared<MaskedImpl>();
  const auto x = leaf(torch::randn({1}));
  const auto* const address = masked->mask.const_data_ptr();
  ga::MemoryMeter meter;
  const auto y = ga::checkpoint(masked, x);
  CHECK(meter.live_bytes() < std::int64_t{5} << 20);  // the output
  y.sum().backward();
  masked->mask.mul_(2);
  CHECK(masked->mask.const_data_ptr() == address);

  REQUIRE_ERROR("copy_", ga::checkpoint(std::make_shared<ReplacesImpl>(), x));
  nn::Sequential replaces(std::make_shared<ReplacesImpl>(), nn::Linear(1, 1));
  ga::CheckpointedSequential chain(replaces, {.segments = 2});
  REQUIRE_ERROR("copy_", chain->forward(x));
  nn::Sequential measured(std::make_shared<ReplacesImpl>(), nn::Linear(1, 1));
  REQUIRE_ERROR("copy_", ga::CheckpointedSequential(measured, {.memory_budget = 1 << 20})->forward(x));

  // Refers to the tensor in the module's list of buffers.
  struct RefersImpl : nn::Module {
    at::Tensor forward(const at::Tensor& t) {
      mean = mean * 0.9 + t.detach().mean() * 0.1;
      return (t - mean).sin();
    }
    at::Tensor& mean = register_buffer("mean", torch::zeros({}));
  };
  REQUIRE_ERROR("copy_", ga::checkpoint(std::make_shared<RefersImpl>(), x));
  nn::Sequential refers(std::make_shared<RefersImpl>(), nn::Linear(1, 1));
  REQUIRE_ERROR("copy_", ga::CheckpointedSequential(refers, {.memory_budget = 1 << 20})->forward(x));
}

TEST_CASE("checkpoint: buffers of a module that occurs twice are saved once") {
  const auto replaces = std::make_shared<ReplacesImpl>();
  const auto x = leaf(torch::randn({3}));
  REQUIRE_ERROR("copy_", ga::checkpoint(nn::Sequential(replaces, replaces), x));

  nn::BatchNorm1d norm(3);
  const auto other = std::make_shared<nn::Module>();
  other->register_buffer("mean", norm->running_mean);
  const auto states = ga::detail::buffers_of({norm.get(), other.get(), norm.get()});
  REQUIRE(states.size() == 3);
  CHECK_FALSE(states[0]->is_statistics);  // other kinds of modules may read it
  CHECK(states[1]->is_statistics);
}

TEST_CASE("checkpoint: an input may be an empty holder or pointer, and the function may not") {
  const auto x = leaf(torch::randn({3}));
  const nn::Linear none = nullptr;
  const std::shared_ptr<nn::LinearImpl> null;
  const auto block = [](const at::Tensor& t, const nn::Linear& shortcut, const std::shared_ptr<nn::LinearImpl>& gate) {
    return shortcut.is_empty() && !gate ? t.sin() : t;
  };
  ga::checkpoint(block, x, none, null).sum().backward();
  CHECK(x.grad().equal(x.detach().cos()));
  REQUIRE_ERROR("must not be null", ga::checkpoint(null, x));
  REQUIRE_ERROR("empty ModuleHolder", ga::checkpoint(none, x));
}
