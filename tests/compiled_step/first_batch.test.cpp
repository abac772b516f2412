// SPDX-License-Identifier: Apache-2.0
//
// The first batch of a layout, where a step is compared with its objective. A double precision copy of the network,
// which rounds differently, or another program simulates compiled code.
#include "support/catch.hpp"

#include <gradaccum/compiled_step.hpp>
#include <gradaccum/detail/checkpoint/forward_state.hpp>
#include <gradaccum/detail/compilation/step_description.hpp>
#include <gradaccum/detail/io/formats.hpp>

#include <algorithm>
#include <functional>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include "compiled_step/networks.hpp"
#include "support/files.hpp"
#include "support/outcome.hpp"
#include "support/warnings.hpp"

namespace ga = gradaccum;
namespace nn = torch::nn;
using testing::error_of;
using namespace testing::compiled;

namespace {

/// Code of a step with the interface of gradaccum-compile-step.
struct Code {
  std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)> run;
  std::size_t inputs = 0, outputs = 0;
  inline static Code* next = nullptr;
};
const char* create(void** container, const char* /*device*/) {
  *container = Code::next;
  return nullptr;
}
void destroy(void*) {}
const char* run(void* container, void** inputs, void** outputs) {
  const auto& code = *static_cast<Code*>(container);
  std::vector<at::Tensor> given;
  for (std::size_t i = 0; i < code.inputs; ++i) {
    const std::unique_ptr<at::Tensor> input(static_cast<at::Tensor*>(inputs[i]));
    given.push_back(*input);
  }
  for (auto& tensor : code.run(given)) *outputs++ = new at::Tensor(tensor);
  return nullptr;
}
std::size_t inputs(void* container) { return static_cast<Code*>(container)->inputs; }
std::size_t outputs(void* container) { return static_cast<Code*>(container)->outputs; }
void* const functions[] = {reinterpret_cast<void*>(&create), reinterpret_cast<void*>(&destroy),
                           reinterpret_cast<void*>(&run), reinterpret_cast<void*>(&inputs),
                           reinterpret_cast<void*>(&outputs)};

/// A step of `net`, recorded for a batch, whose code is a double precision copy with a separate objective.
template <class Net, class Objective>
class Simulated {
 public:
  template <class Copied>
  Simulated(Net& net, Objective objective, const Batch& batch, Copied copied) : net_(net), objective_(objective) {
    const testing::Directory directory;
    ga::save_step(net, objective, batch, directory / "step", {.any_rows = false});
    auto step =
        ga::detail::step_description(ga::detail::read_manifest(directory / "step", ga::detail::step_format), "");
    auto& graph = step.graphs.front();
    graph.code = "0", graph.capability = "DEFAULT";
    for (auto& parameter : net->parameters()) graph.gradients += parameter.requires_grad() ? 'y' : 'n';
    graph.moved.assign(net->buffers().size(), 'y');
    ga::detail::steps_in_program()["simulated"] = {ga::detail::text_of(ga::detail::manifest_of(step)),
                                                   {{"0", functions}}};
    copy_->to(torch::kDouble);
    code_.inputs = graph.gradients.size() + graph.moved.size() + 3;
    code_.outputs = 1 + static_cast<std::size_t>(std::ranges::count(graph.gradients, 'y'));
    for (std::size_t i = 0; i < graph.gradients.size(); ++i)
      copy_->parameters()[i].requires_grad_(graph.gradients[i] == 'y');
    code_.run = [this, copied](const std::vector<at::Tensor>& given) {
      std::vector<at::Tensor> results;
      std::thread([&] { results = computed(given, copied); }).join();  // compiled code runs without autograd
      return results;
    };
  }
  Simulated(const Simulated&) = delete;
  Simulated& operator=(const Simulated&) = delete;
  ~Simulated() { ga::detail::steps_in_program().erase("simulated"); }

  auto step() {
    Code::next = &code_;
    return ga::CompiledStep(net_, objective_, ga::InProgram{"simulated"});
  }

 private:
  std::vector<at::Tensor> computed(const std::vector<at::Tensor>& given, auto& copied) {
    const auto parameters = copy_->parameters(), buffers = copy_->buffers();
    const auto n = parameters.size();
    {
      const torch::NoGradGuard no_grad;
      for (std::size_t i = 0; i < n; ++i) parameters[i].copy_(given[i]);
      for (std::size_t i = 0; i < buffers.size(); ++i) buffers[i].copy_(given[n + i]);
    }
    const auto in_double = [](const at::Tensor& x) { return x.is_floating_point() ? x.to(torch::kDouble) : x; };
    const Batch batch{in_double(given[n + buffers.size()]), in_double(given[n + buffers.size() + 1])};
    const at::Tensor loss = copied(copy_, batch);
    std::vector<at::Tensor> trained, results{loss.detach().to(given[n - 1].scalar_type())};
    for (std::size_t i = 0; i < n; ++i)
      if (parameters[i].requires_grad()) trained.push_back(parameters[i]);
    for (auto& gradient : torch::autograd::grad({loss}, trained))
      results.push_back(gradient.to(given[n - 1].scalar_type()));
    for (std::size_t i = 0; i < buffers.size(); ++i) given[n + i].copy_(buffers[i]);
    return results;
  }

  Net& net_;
  Objective objective_;
  Net copy_;
  Code code_;
};

/// A U-Net of one level.
struct SegmenterImpl : nn::Module {
  nn::Conv2d down = convolution("down", 1, 4), middle = convolution("middle", 4, 8), up = convolution("up", 12, 4),
             last = convolution("last", 4, 1);
  nn::BatchNorm2d down_norm = register_module("down_norm", nn::BatchNorm2d(4)),
                  middle_norm = register_module("middle_norm", nn::BatchNorm2d(8)),
                  up_norm = register_module("up_norm", nn::BatchNorm2d(4));

  at::Tensor forward(const at::Tensor& x) {
    const auto a = torch::relu(down_norm(down(x)));
    const auto b = torch::relu(middle_norm(middle(torch::max_pool2d(a, 2))));
    return last(torch::relu(up_norm(up(torch::cat({a, torch::upsample_nearest2d(b, {16, 16})}, 1)))));
  }

 private:
  nn::Conv2d convolution(const char* name, std::int64_t in, std::int64_t out) {
    return register_module(name, nn::Conv2d(nn::Conv2dOptions(in, out, 3).padding(1)));
  }
};
TORCH_MODULE(Segmenter);

/// BatchNorm, a layer without bias, BatchNorm: the mean of the second and of its output is 0 up to rounding.
struct NormalisedImpl : nn::Module {
  nn::BatchNorm1d first = register_module("first", nn::BatchNorm1d(6)),
                  second = register_module("second", nn::BatchNorm1d(5));
  nn::Linear linear = register_module("linear", nn::Linear(nn::LinearOptions(6, 5).bias(false)));

  at::Tensor forward(const at::Tensor& x) { return second(linear(first(x))); }
};
TORCH_MODULE(Normalised);

/// LayerNorm, a mean over tokens, a layer.
struct TokensImpl : nn::Module {
  nn::LayerNorm norm = register_module("norm", nn::LayerNorm(nn::LayerNormOptions({64})));
  nn::Linear last = register_module("last", nn::Linear(64, 1));

  at::Tensor forward(const at::Tensor& x) { return last(norm(x).mean(1)).squeeze(1); }
};
TORCH_MODULE(Tokens);

/// A frozen layer in bfloat16, which autograd does not record, and a layer in float32.
struct FrozenImpl : nn::Module {
  nn::Linear frozen = register_module("frozen", nn::Linear(6, 5)), last = register_module("last", nn::Linear(5, 3));

  FrozenImpl() {
    frozen->to(torch::kBFloat16);
    for (auto& parameter : frozen->parameters()) parameter.requires_grad_(false);
  }
  at::Tensor forward(const at::Tensor& x) {
    return last(torch::relu(frozen(x.to(frozen->weight.scalar_type()))).to(last->weight.scalar_type()));
  }
};
TORCH_MODULE(Frozen);

/// A running mean, a constant bound and table, and a parameter whose gradient is infinite.
struct BoundedImpl : nn::Module {
  nn::Linear last = register_module("last", nn::Linear(6, 3));
  at::Tensor edge = register_parameter("edge", torch::zeros({1})), mean = register_buffer("mean", torch::zeros({6})),
             bound = register_buffer("bound", torch::full({6}, -std::numeric_limits<float>::infinity())),
             table = register_buffer("table", torch::full({6, 6}, 1e6));

  at::Tensor forward(const at::Tensor& x) {
    mean.lerp_(x.detach().mean(0), 0.1);
    return last(torch::max(x, bound)) + edge.sqrt();
  }
};
TORCH_MODULE(Bounded);

at::Tensor mask_loss(Segmenter& net, const Batch& batch) {
  return torch::binary_cross_entropy_with_logits(net->forward(batch.first), batch.second);
}
at::Tensor squared_loss(auto& net, const Batch& batch) {
  return torch::mse_loss(net->forward(batch.first), batch.second);
}

Batch masks(std::uint64_t seed) {
  torch::manual_seed(seed);
  const auto images = torch::randn({4, 1, 16, 16});
  return {images, (images > 0).to(torch::kFloat)};
}

/// A hidden unit is exactly 0 for the first row, in any order of summation, and slightly positive in the code.
Perceptron with_a_tie() {
  auto net = perceptron();
  const torch::NoGradGuard no_grad;
  net->hidden->weight[0].copy_(torch::tensor({1.f, -1.f, 0.f, 0.f, 0.f, 0.f}));
  net->hidden->bias.zero_();
  return net;
}
Batch batch_with_a_tie() {
  auto batch = rows_of_six(8);
  batch.first[0].fill_(1);
  return batch;
}
at::Tensor just_above(Perceptron& net, const Batch& batch) {
  return torch::cross_entropy_loss(net->last(torch::relu(net->hidden(batch.first) + 1e-7)), batch.second);
}

/// Returns the same loss with gradients that are larger by `part`.
at::Tensor with_larger_gradients(const at::Tensor& loss, double part) { return loss + part * (loss - loss.detach()); }

}  // namespace

TEST_CASE("An element that rounding moves across a ReLU's bound does not count as another program", "[compiled_step]") {
  auto net = with_a_tie();
  const auto batch = batch_with_a_tie();
  Simulated simulated(net, plain_loss<Perceptron>, batch, just_above);
  const testing::Warnings warnings;
  const auto parameters = testing::copies(net->parameters());
  const auto data = net->hidden->weight.data_ptr();
  const auto rows = batch.first.clone();
  const ga::detail::GeneratorStates random;
  auto step = simulated.step();
  step(batch).backward();
  CHECK(step.report().compiled == 1);
  CHECK(warnings.texts().empty());
  const auto got = net->hidden->weight.grad().clone();
  net->zero_grad();
  plain_loss(net, batch).backward();
  CHECK((got - net->hidden->weight.grad()).norm().item<double>() > 0.005);  // large enough for the comparison

  CHECK(testing::same_bits(testing::copies(net->parameters()), parameters));
  CHECK(net->hidden->weight.data_ptr() == data);
  CHECK(testing::same_bits(batch.first, rows));
  CHECK(random == ga::detail::GeneratorStates());
}

TEST_CASE("Another program is found even if rounding has moved an element", "[compiled_step]") {
  auto net = with_a_tie();
  const auto batch = batch_with_a_tie();
  const auto refused = [&](auto objective) {
    Simulated simulated(net, plain_loss<Perceptron>, batch, objective);
    return error_of([&] { simulated.step()(batch); });
  };
  const std::string begins =
      "CompiledStep: simulated: the compiled step must do what the objective does, but for Float [8, 6], Long [8] ";
  CHECK(refused([](auto& of, auto& b) {
          return just_above(of, b) + 1e-3 * of->last->weight.square().sum();
        }).starts_with(begins + "the loss differs by "));
  CHECK(refused([](auto& of, auto& b) {
          return with_larger_gradients(just_above(of, b), 0.003);
        }).starts_with(begins + "the gradient of "));
  CHECK(refused([](auto& of, auto& b) {
          return with_larger_gradients(just_above(of, b), 0) +
                 0.01 * (of->last->bias.sum() - of->last->bias.sum().detach());
        }).starts_with(begins + "the gradient of last.bias differs by "));
}

TEST_CASE("First batches of networks that are sensitive to rounding are compiled", "[compiled_step]") {
  const auto compiled = [](auto net, auto objective, auto batch_of, std::uint64_t batches) {
    Simulated simulated(net, objective, batch_of(0), objective);
    std::int64_t count = 0;
    for (std::uint64_t i = 0; i < batches; ++i) {
      auto step = simulated.step();
      step(batch_of(i));
      count += step.report().compiled;
    }
    return count;
  };
  torch::manual_seed(0);
  const auto plain = [](auto& net, const Batch& batch) { return plain_loss(net, batch); };
  const auto squared = [](auto& net, const Batch& batch) { return squared_loss(net, batch); };
  CHECK(compiled(Segmenter(), mask_loss, masks, 30) == 30);
  CHECK(compiled(
            Normalised(), plain, [](std::uint64_t seed) { return rows_of_six(32, seed); }, 3) == 3);
  const auto mean = [](auto& net, const Batch& batch) { return net->forward(batch.first).mean(); };
  CHECK(compiled(
            Normalised(), mean, [](std::uint64_t seed) { return rows_of_six(32, seed); }, 3) == 3);
  Tokens tokens;
  tokens->to(torch::kBFloat16);  // the errors of its sums over tokens are tens of percent
  const auto sentences_of = [](std::uint64_t seed) {
    torch::manual_seed(seed);
    return Batch{torch::randn({8, 128, 64}).to(torch::kBFloat16), torch::randn({8}).to(torch::kBFloat16)};
  };
  CHECK(compiled(tokens, squared, sentences_of, 40) == 40);
}

TEST_CASE("Other programs of a network that is sensitive to rounding are found", "[compiled_step]") {
  torch::manual_seed(0);
  Segmenter net;
  const auto refused = [&](auto objective, std::uint64_t seed) {
    Simulated simulated(net, mask_loss, masks(0), objective);
    return error_of([&] { simulated.step()(masks(seed)); });
  };
  const auto seed = static_cast<std::uint64_t>(GENERATE(1, 2, 3));
  CHECK(refused([](auto& of, auto& b) { return mask_loss(of, b) + 1e-2 * of->down->weight.square().sum(); }, seed)
            .find(" differs by ") != std::string::npos);
  CHECK(refused(  // if the batch gives an exact number
            [](auto& of, auto& b) {
              return mask_loss(of, b) + 1e-2 * (b.second == 1).any() * of->down->weight.square().sum();
            },
            seed)
            .find(" differs by ") != std::string::npos);
  CHECK(refused([](auto& of, auto& b) { return with_larger_gradients(mask_loss(of, b), 0.005); }, seed)
            .find(" the gradient of ") != std::string::npos);
  CHECK(refused(
            [](auto& of, auto& b) {
              const auto loss = mask_loss(of, b);
              of->up_norm->running_mean.data().add_(0.01);
              return loss;
            },
            seed)
            .find(" the buffer up_norm.running_mean differs by ") != std::string::npos);
}

TEST_CASE("A frozen layer in 16 bits counts among the used dtypes", "[compiled_step]") {
  torch::manual_seed(0);
  Frozen frozen;
  const auto plain = [](auto& of, const Batch& b) { return plain_loss(of, b); };
  Simulated in_bfloat16(frozen, plain, rows_of_six(32), plain);
  auto step = in_bfloat16.step();
  step(rows_of_six(32));
  CHECK(step.report().compiled == 1);
}

TEST_CASE("A function that differs in float32 does not excuse a difference in 16 bits", "[compiled_step]") {
  auto net = perceptron();
  net->to(torch::kBFloat16);
  auto batch = rows_of_six(8);
  batch.first = batch.first.to(torch::kBFloat16);
  const auto by_dtype = [](auto& of, const Batch& b) {
    return (b.first.scalar_type() == torch::kBFloat16 ? 1 : 3) * plain_loss(of, b);
  };
  Simulated simulated(net, by_dtype, batch, [](auto& of, auto& b) { return 0.5 * plain_loss(of, b); });
  CHECK(error_of([&] { simulated.step()(batch); }).find("the loss differs by ") != std::string::npos);
}

TEST_CASE("Infinite values or other sizes do not hide another tensor's difference", "[compiled_step]") {
  torch::manual_seed(0);
  Bounded net;
  const auto batch = rows_of_six(8);
  const auto plain = [](auto& of, const Batch& b) { return plain_loss(of, b); };
  const auto refused = [&](auto objective) {
    Simulated simulated(net, plain, batch, objective);
    return error_of([&] { simulated.step()(batch); });
  };
  CHECK(refused(plain).empty());
  CHECK(refused([](auto& of, auto& b) {
          const auto loss = plain_loss(of, b);
          of->mean.data().add_(0.5);
          return loss;
        }).find("the buffer mean differs by ") != std::string::npos);
  CHECK(refused([](auto& of, auto& b) {
          return plain_loss(of, b) + 0.1 * (of->last->bias.sum() - of->last->bias.sum().detach());
        }).find("the gradient of last.bias differs by ") != std::string::npos);
}

TEST_CASE("A doubt prints a warning, and the layout runs by the objective", "[compiled_step]") {
  auto net = perceptron();
  const auto batch = rows_of_six(8);
  double size = 0.2;
  int runs = 0;
  const auto noisy = [&](auto& of, auto& b) {
    return with_larger_gradients(plain_loss(of, b), size * (++runs % 2 ? 1 : -1));
  };
  Simulated simulated(net, plain_loss<Perceptron>, batch, noisy);
  const testing::Warnings warnings;
  auto step = simulated.step();
  step(batch).backward();
  step(batch).backward();
  CHECK(step.report().compiled == 0);
  REQUIRE(step.report().why_eager.size() == 1);
  const auto [why, count] = *step.report().why_eager.begin();
  CHECK(why.starts_with("a doubt about the step for Float [8, 6], Long [8]: the gradient of "));
  CHECK(count == 2);
  REQUIRE(warnings.texts().size() == 1);
  CHECK(warnings.texts()[0].starts_with(
      "CompiledStep: simulated: the objective runs instead of the compiled step: a doubt about "));
  const auto twice = testing::take_gradients(net->parameters());
  plain_loss(net, batch).backward();
  plain_loss(net, batch).backward();
  CHECK(testing::same_bits(twice, testing::take_gradients(net->parameters())));

  size = 0.01;  // within the effect of rounding across thresholds
  auto other = simulated.step();
  other(batch);
  CHECK(other.report().compiled == 1);

  size = 0.2;  // in 16 bits it cannot be distinguished from rounding
  net->to(torch::kBFloat16);
  const Batch coarse{batch.first.to(torch::kBFloat16), batch.second};
  Simulated in_bfloat16(net, plain_loss<Perceptron>, coarse, noisy);
  auto last = in_bfloat16.step();
  last(coarse);
  CHECK(last.report().compiled == 0);
  CHECK(last.report().why_eager.size() == 1);
}

TEST_CASE("An objective that gives two results for a batch is an error that says so", "[compiled_step]") {
  auto net = perceptron();
  const auto batch = rows_of_six(8);
  double factor = 1;
  const auto moody = [&](auto& of, const Batch& b) { return (factor *= 1.1) * plain_loss(of, b); };
  factor = 0;  // so that it can be recorded
  Simulated simulated(net, moody, batch, plain_loss<Perceptron>);
  factor = 1;
  CHECK(error_of([&] { simulated.step()(batch); }).find(" from one run of the objective to the next") !=
        std::string::npos);
}

TEST_CASE("Changed inputs that an objective rejects leave a doubt", "[compiled_step]") {
  auto net = with_a_tie();
  const auto batch = batch_with_a_tie();
  const auto strict = [](auto& of, const Batch& b) {
    TORCH_CHECK(at::equal(b.first[0], torch::ones({6})), "the first row must be 1");
    return plain_loss(of, b);
  };
  const auto recorded = [](auto& of, const Batch& b) { return plain_loss(of, b); };
  Simulated simulated(net, recorded, batch, just_above);
  simulated.step();
  ga::CompiledStep step(net, strict, ga::InProgram{"simulated"});
  const testing::Warnings warnings;
  step(batch);
  REQUIRE(step.report().why_eager.size() == 1);
  CHECK(step.report().why_eager.begin()->first.find(", and other inputs fail: the first row must be 1") !=
        std::string::npos);
  CHECK(warnings.texts().size() == 1);
}

TEST_CASE("Inputs that cannot be changed leave all tensors unchanged", "[compiled_step]") {
  auto net = with_a_tie();
  auto batch = batch_with_a_tie();
  batch.second = torch::randn({8, 3}).to(torch::kFloat8_e4m3fn);  // LibTorch has no random numbers in this dtype
  const auto objective = [](auto& of, const Batch& b) {
    return torch::mse_loss(of->forward(b.first), b.second.to(b.first.scalar_type()));
  };
  Simulated simulated(net, objective, batch, [](auto& of, auto& b) {
    return torch::mse_loss(of->last(torch::relu(of->hidden(b.first) + 1e-7)), b.second);
  });
  const auto parameters = testing::copies(net->parameters());
  const auto rows = batch.first.clone();
  const auto data = net->hidden->weight.data_ptr();
  const testing::Warnings warnings;
  auto step = simulated.step();
  step(batch);
  REQUIRE(step.report().why_eager.size() == 1);
  CHECK(step.report().why_eager.begin()->first.find(", and other inputs fail: ") != std::string::npos);
  CHECK(testing::same_bits(testing::copies(net->parameters()), parameters));
  CHECK(testing::same_bits(batch.first, rows));
  CHECK(net->hidden->weight.data_ptr() == data);
}
