// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/amp_scaler.hpp>
#include <gradaccum/autocast.hpp>
#include <gradaccum/compiled_step.hpp>
#include <gradaccum/detail/checkpoint/forward_state.hpp>
#include <gradaccum/detail/compilation/step_description.hpp>
#include <gradaccum/detail/compilation/step_memory.hpp>
#include <gradaccum/detail/io/formats.hpp>
#include <gradaccum/detail/kernels/crc32.hpp>
#include <gradaccum/detail/memory/memory_ledger.hpp>
#include <gradaccum/grad_accumulator.hpp>
#include <gradaccum/memory_meter.hpp>
#include <gradaccum/metrics.hpp>
#include <gradaccum/optim/adamw.hpp>
#include <gradaccum/policies/accumulate.hpp>
#include <gradaccum/policies/data_parallel.hpp>
#include <gradaccum/trainer.hpp>

#include <algorithm>
#include <filesystem>
#include <limits>
#include <memory>
#include <sstream>
#include <utility>
#include <vector>

#include "compiled_step/networks.hpp"
#include "support/files.hpp"
#include "support/outcome.hpp"
#include "support/ranks.hpp"

namespace ga = gradaccum;
using testing::error_of;
using namespace testing::compiled;

namespace {

const ga::InProgram in_perceptron{"perceptron"}, in_convolutional{"convolutional"}, in_float16{"float16"},
    in_transformer{"transformer"}, in_bfloat16{"bfloat16"}, in_recurrent{"recurrent"}, in_encoded{"encoded"};

double off(const at::Tensor& got, const at::Tensor& wanted) {
  return ((got - wanted).norm() / wanted.norm().clamp_min(1e-30)).template item<double>();
}
double worst(const std::vector<at::Tensor>& got, const std::vector<at::Tensor>& wanted) {
  double most = 0;
  for (std::size_t i = 0; i < got.size(); ++i) most = std::max(most, off(got[i], wanted[i]));
  return most;
}
std::vector<at::Tensor> gradients(torch::nn::Module& net) {
  std::vector<at::Tensor> all;
  for (auto& parameter : net.parameters())
    if (parameter.grad().defined()) all.push_back(parameter.grad().clone());
  net.zero_grad();
  return all;
}
std::vector<at::Tensor> copies(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> all;
  for (auto& tensor : tensors) all.push_back(tensor.detach().clone());
  return all;
}

/// Returns the results of six batches of training: losses, gradients of each window, buffers, random numbers.
testing::Outcome after_six_batches(Transformer& net, auto&& loss_of, int steps, bool bfloat16) {
  torch::optim::SGD sgd(net->parameters(), 0.1);
  ga::GradAccumulator optimizer(sgd, {.steps = steps});
  testing::Outcome all;
  std::vector<at::Tensor> random;
  for (std::int64_t i = 0; i < 6; ++i) {
    // The seed also determines dropout. The graph in float32 is for any number of rows.
    const auto batch = sentences(bfloat16 ? 4 : 4 + i % 2, static_cast<std::uint64_t>(i));
    const at::Tensor loss = [&] {
      const ga::Autocast autocast(torch::kCPU, torch::kBFloat16, bfloat16);
      return loss_of(batch);
    }();
    all.outputs.push_back(loss.detach());
    random.push_back(torch::rand({1}));  // shows how many numbers were drawn before
    all.buffers.push_back(net->mean.clone());
    optimizer.backward(loss);
    if ((i + 1) % steps == 0)
      for (auto& parameter : net->parameters()) all.gradients.push_back(parameter.grad().clone());
    optimizer.step();
    optimizer.zero_grad();
  }
  all.random = torch::cat(random);
  return all;
}

/// The blocks of 128 KiB and more that LibTorch allocates in a scope.
class LargeBlocks {
 public:
  const std::vector<std::uintptr_t>& addresses() const { return seen_->addresses; }

 private:
  struct Seen final : c10::MemoryReportingInfoBase {
    void reportMemoryUsage(void* block, std::int64_t bytes, std::size_t, std::size_t, c10::Device) override {
      if (bytes >= 1 << 17) addresses.push_back(reinterpret_cast<std::uintptr_t>(block));
    }
    bool memoryProfilingEnabled() const override { return true; }
    std::vector<std::uintptr_t> addresses;
  };

  std::shared_ptr<Seen> seen_ = std::make_shared<Seen>();
  c10::DebugInfoGuard guard_{c10::DebugInfoKind::PROFILER_STATE, seen_};
};

/// A folder with the perceptron's step, whose manifest can be changed.
class Folder {
 public:
  Folder()
      : manifest(ga::detail::manifest_of(ga::detail::steps_in_program().at("perceptron").manifest, "test",
                                         ga::detail::step_format)) {
    library_ = "graph-0." + std::get<std::string>(manifest.values.at("graph-0.code")) + ".so";
    const auto bytes = testing::text_of(STEP_LIBRARY);
    testing::write_text(directory_ / library_, bytes);
    manifest.files = {{library_, {bytes.size(), ga::detail::crc32(bytes.data(), bytes.size())}}};
  }

  std::filesystem::path write() const {
    testing::write_text(directory_ / "manifest.json", ga::detail::text_of(manifest));
    return directory_ / "";
  }
  std::filesystem::path library() const { return directory_ / library_; }

  ga::detail::Manifest manifest;

 private:
  testing::Directory directory_;
  std::string library_;
};

}  // namespace

TEST_CASE("A compiled step matches the objective up to rounding, in windows of any length", "[compiled_step]") {
  const auto steps = GENERATE(1, 2, 3);
  const bool in_backward = GENERATE(false, true);
  CAPTURE(steps, in_backward);
  const auto trained = [&](bool compiled, double lr) {
    auto net = perceptron();
    torch::optim::SGD plain(net->parameters(), torch::optim::SGDOptions(lr).momentum(0.9));
    ga::optim::AdamW adamw(net->parameters(), lr);
    ga::GradAccumulator<torch::optim::SGD> sgd_window(plain, {.steps = steps});
    ga::GradAccumulator<ga::optim::AdamW> adamw_window(adamw, {.steps = steps, .in_backward = true});
    ga::CompiledStep step(net, counted_loss, in_perceptron);
    std::vector<at::Tensor> losses;
    const auto train = [&](auto& optimizer) {
      for (std::uint64_t i = 0; i < 7; ++i) {
        const auto batch = rows_of_six(8, i);
        auto loss = compiled ? step(batch) : counted_loss(net, batch);
        losses.push_back(loss.mean.detach());
        optimizer.backward(loss);
        optimizer.step();
        optimizer.zero_grad();
      }
      optimizer.flush();
    };
    if (in_backward)
      train(adamw_window);
    else
      train(sgd_window);
    CHECK(step.report().compiled == (compiled ? 7 : 0));
    CHECK(step.report().eager == 0);
    auto all = copies(net->parameters());
    all.insert(all.end(), losses.begin(), losses.end());
    return all;
  };
  const auto wanted = trained(false, 0.01);
  CHECK(worst(trained(true, 0.01), wanted) < 1e-5);
  CHECK(worst(trained(true, 0.011), wanted) > 1e-4);
}

TEST_CASE("Tensors of compiled code are in memory that the step keeps", "[compiled_step]") {
  auto net = perceptron();
  ga::CompiledStep step(net, counted_loss, in_perceptron);
  const auto run = [&](std::int64_t rows) {
    const auto batch = rows_of_six(rows);
    step(batch).mean.backward();  // its first run compares it with the objective
    const LargeBlocks blocks;
    step(batch).mean.backward();
    return blocks.addresses();
  };
  const auto of_few = run(8), of_many = run(1 << 16), again = run(1 << 16), of_fewer = run(1 << 15);
  CHECK(of_few.empty());
  REQUIRE(of_many.size() > 2);
  CHECK(again == of_many);
  REQUIRE_FALSE(of_fewer.empty());
  for (const auto& blocks : {of_many, of_fewer})
    for (const auto block : blocks) CHECK(block % (1 << 16) == 0);  // glibc's begin with its own data
  CHECK(*std::max_element(of_fewer.begin(), of_fewer.end()) <= *std::max_element(of_many.begin(), of_many.end()));
}

TEST_CASE("StepMemory: tensors outlive it, are counted and can grow; what is kept is freed with it",
          "[compiled_step]") {
  using Sizes = std::vector<std::int64_t>;
  auto memory = std::make_unique<ga::detail::StepMemory>();
  const auto empty = [&](const Sizes& sizes, const Sizes& strides, at::ScalarType dtype) {
    const std::unique_ptr<at::Tensor> made(static_cast<at::Tensor*>(
        ga::detail::StepMemory::empty_strided(memory.get(), static_cast<std::int64_t>(sizes.size()), sizes.data(),
                                              strides.data(), static_cast<std::int32_t>(dtype))));
    return made ? *made : at::Tensor();
  };
  const Sizes sizes{1 << 10, 1 << 13}, strides{1, 1 << 10};
  const ga::MemoryMeter meter;
  CHECK_FALSE(empty({100}, {1}, at::kFloat).defined());
  auto tensor = empty(sizes, strides, at::kFloat);
  CHECK((tensor.sizes() == at::IntArrayRef(sizes) && tensor.strides() == at::IntArrayRef(strides)));
  CHECK(tensor.scalar_type() == at::kFloat);
  CHECK(meter.live_bytes() == 32 << 20);
  const void* const address = std::exchange(tensor, {}).const_data_ptr();
  CHECK(meter.live_bytes() == 0);
  tensor = empty(sizes, strides, at::kFloat);
  CHECK(tensor.const_data_ptr() == address);
  auto other = empty(sizes, strides, at::kDouble);
  CHECK_FALSE(empty({1LL << 40, 1LL << 40}, strides, at::kFloat).defined());  // there is not so much memory
  REQUIRE_ERROR("overflow", empty({1LL << 40, 1LL << 40}, {1, 1LL << 40}, at::kFloat));
  tensor.fill_(2);
  other.fill_(1);
  other.reset();  // 64 MiB are kept
  const auto before = *ga::detail::occupied_memory(at::kCPU);
  memory.reset();
  CHECK(*ga::detail::occupied_memory(at::kCPU) <= before - (60 << 20));
  CHECK(tensor.sum().item<double>() == 2.0 * (8 << 20));
  tensor.resize_({9 << 20});
  CHECK(tensor.narrow(0, 0, 8 << 20).sum().item<double>() == 2.0 * (8 << 20));
}

TEST_CASE("Metrics receive the output, and gradients accumulate", "[compiled_step]") {
  auto net = perceptron();
  const auto batch = rows_of_six(8);
  ga::CompiledStep step(net, counted_loss, in_perceptron);
  const auto loss = step(batch);
  CHECK(loss.items == 8);
  CHECK(off(loss.output, net->forward(batch.first)) < 1e-6);
  CHECK_FALSE(loss.output.requires_grad());
  CHECK(loss.target.equal(batch.second));
  loss.backward();
  step(batch).backward();
  const auto twice = gradients(*net);
  counted_loss(net, batch).backward();
  counted_loss(net, batch).backward();
  CHECK(worst(twice, gradients(*net)) < 1e-6);
}

TEST_CASE("Backward of a loss computed from a compiled one uses autograd", "[compiled_step]") {
  auto net = perceptron();
  const auto batch = rows_of_six(8);
  ga::CompiledStep step(net, counted_loss, in_perceptron);
  auto loss = step(batch);
  loss.mean = 2 * loss.mean + net->last->bias.sum();  // the compiled loss is only a part of it
  loss.backward();
  const auto got = gradients(*net);
  (2 * counted_loss(net, batch).mean + net->last->bias.sum()).backward();
  CHECK(worst(got, gradients(*net)) < 1e-6);

  int heard = 0;
  const auto hook =
      net->hidden->weight.register_hook([&](const at::Tensor& gradient) { return ++heard, 3 * gradient; });
  step(batch).backward();
  CHECK(heard == 1);
  const auto times_three = gradients(*net);
  net->hidden->weight.remove_hook(hook);
  step(batch).backward();
  const auto once = gradients(*net);
  CHECK(off(times_three[0], 3 * once[0]) < 1e-6);
  CHECK(testing::same_bits(times_three[1], once[1]));

  loss = step(batch);
  loss.backward({.inputs = {net->last->bias}});
  CHECK(gradients(*net).size() == 1);
}

TEST_CASE("A compiled step updates buffers once and draws the objective's random numbers", "[compiled_step]") {
  auto net = convolutional(), other = convolutional();
  ga::CompiledStep step(net, plain_loss<Convolutional>, in_convolutional);
  torch::manual_seed(5);
  std::vector<at::Tensor> wanted, got;
  for (std::uint64_t i = 0; i < 4; ++i) {
    const auto batch = images(6, i);
    torch::manual_seed(100 + i);
    plain_loss(other, batch).backward();
    const ga::detail::GeneratorStates after;
    torch::manual_seed(100 + i);
    const at::Tensor loss = step(batch);  // a Tensor, as from the objective
    CHECK(after == ga::detail::GeneratorStates());
    loss.backward();
    const auto buffers = net->named_buffers(), others = other->named_buffers();
    for (auto& item : buffers) CHECK(off(item.value().to(at::kDouble), others[item.key()].to(at::kDouble)) < 1e-12);
    CHECK(buffers["norm.num_batches_tracked"].item<std::int64_t>() == static_cast<std::int64_t>(i + 1));
  }
  CHECK_FALSE(net->convolution->bias.grad().defined());
  CHECK_FALSE(net->unused.grad().defined());
  wanted = gradients(*other), got = gradients(*net);
  CHECK(got.size() == 5);
  CHECK(worst(got, wanted) < 1e-12);

  const auto version = net->norm->running_mean._version();
  step(images(6));
  CHECK(net->norm->running_mean._version() > version);  // so autograd detects the change if it was saved
}

TEMPLATE_TEST_CASE("LSTM, EmbeddingBag, TransformerEncoder and MultiheadAttention match LibTorch's up to rounding",
                   "[compiled_step]", Recurrent, Encoded) {
  constexpr bool is_recurrent = std::same_as<TestType, Recurrent>;
  torch::manual_seed(0);
  TestType net, other;
  {
    const torch::NoGradGuard no_grad;
    for (std::size_t i = 0; i < net->parameters().size(); ++i) other->parameters()[i].copy_(net->parameters()[i]);
  }
  ga::CompiledStep step(net, plain_loss<TestType>, is_recurrent ? in_recurrent : in_encoded);
  torch::optim::SGD one(net->parameters(), 0.1), two(other->parameters(), 0.1);
  for (std::uint64_t i = 0; i < 4; ++i) {
    const auto batch = sentences(4, i);
    torch::manual_seed(100 + i);
    const at::Tensor loss = step(batch);
    torch::manual_seed(100 + i);
    const at::Tensor wanted = plain_loss(other, batch);
    CHECK(off(loss, wanted) < 1e-5);
    const auto seed = torch::full({}, 3.0);  // separate, because gradients are multiplied in place
    loss.backward(seed);
    wanted.backward(seed);
    for (const auto& item : net->named_parameters()) {
      INFO(item.key());
      CHECK(off(item.value().grad(), other->named_parameters()[item.key()].grad()) < 1e-4);
    }
    one.step(), two.step();
    one.zero_grad(), two.zero_grad();
  }
  CHECK(step.report().compiled == 4);
}

TEST_CASE("Seeds of backward multiply the gradients", "[compiled_step]") {
  auto net = perceptron();
  const auto batch = rows_of_six(8);
  ga::CompiledStep step(net, counted_loss, in_perceptron);
  const auto with_seed = [&](auto&& loss_of, double seed) {
    const auto loss = loss_of();
    loss.mean.backward(torch::full_like(loss.mean, seed));
    return gradients(*net);
  };
  const auto eager = [&] { return counted_loss(net, batch); };
  const auto compiled = [&] { return step(batch); };
  for (const double seed : {1.0, 60.0, -3.0, 65536.0, 1e-30, 1.0})
    CHECK(worst(with_seed(compiled, seed), with_seed(eager, seed)) < 1e-6);
  const auto after_60 = (with_seed(compiled, 60.0), with_seed(compiled, 60.0));
  with_seed(compiled, 1.0);
  CHECK(testing::same_bits(with_seed(compiled, 60.0), after_60));  // independent of earlier seeds
  CHECK(with_seed(compiled, 0.0).front().abs().sum().item<double>() == 0);
  CHECK(with_seed(compiled, std::numeric_limits<double>::quiet_NaN()).front().isnan().all().item<bool>());
  CHECK(with_seed(compiled, std::numeric_limits<double>::infinity()).back().isinf().any().item<bool>());
  CHECK(testing::same_bits(with_seed(compiled, 60.0), after_60));
}

TEST_CASE("Backward runs once, unless its graph is kept", "[compiled_step]") {
  auto net = perceptron();
  const auto batch = rows_of_six(8);
  ga::CompiledStep step(net, counted_loss, in_perceptron);
  auto loss = step(batch);
  loss.backward({.retain_graph = true});
  loss.mean.backward(torch::full({}, 3.0));
  const auto four_times = gradients(*net);
  loss = step(batch);
  loss.mean.backward(torch::full({}, 4.0));
  CHECK(worst(four_times, gradients(*net)) < 1e-6);
  CHECK(error_of([&] { loss.mean.backward(); }).find("backward must run only once, unless .retain_graph is true") !=
        std::string::npos);
  loss = step(batch);
  CHECK(error_of([&] { loss.backward({.create_graph = true}); }).find("create_graph must be false") !=
        std::string::npos);
}

TEST_CASE("A float16 step applies the loss scale inside", "[compiled_step]") {
  auto net = perceptron(), other = perceptron();
  ga::CompiledStep compiled_step(net, plain_loss<Perceptron>, in_float16);
  const auto step = [&](const Batch& of) {
    const ga::Autocast autocast(torch::kCPU, torch::kHalf);
    return compiled_step(of);
  };
  const auto eager_step = [&](const Batch& of) {
    const ga::Autocast autocast(torch::kCPU, torch::kHalf);
    return plain_loss(other, of);
  };
  // Scales the weights down, so that gradients without a scale underflow in float16.
  const auto tiny = [](Perceptron& of) {
    torch::NoGradGuard no_grad;
    of->last->weight.mul_(1e-6);
  };
  tiny(net), tiny(other);
  const auto scaled = [](auto& of, auto&& loss_of, double scale) {
    at::Tensor loss = loss_of();
    loss.backward(torch::full_like(loss, scale));
    auto all = gradients(*of);
    for (auto& gradient : all) gradient.div_(scale);
    return all;
  };
  const auto batch = rows_of_six(8);
  const auto eager = [&] { return eager_step(batch); };
  const auto compiled = [&] { return step(batch); };
  for (const double scale : {65536.0, 1024.0, 1.0, 65536.0}) {  // a new scale runs the step again
    const ga::detail::GeneratorStates before;
    CHECK(worst(scaled(net, compiled, scale), scaled(other, eager, scale)) < 5e-3);
    CHECK(before == ga::detail::GeneratorStates());
  }
  CHECK(worst(scaled(other, eager, 1.0), scaled(other, eager, 65536.0)) > 0.02);  // the scale does matter

  torch::optim::SGD one(net->parameters(), 0.1), two(other->parameters(), 0.1);
  ga::AmpScaler scaler, other_scaler;
  for (std::uint64_t i = 0; i < 3; ++i) {
    const auto another = rows_of_six(8, i);
    scaler.scale(step(another)).backward();
    scaler.step(one);
    scaler.update();
    one.zero_grad();
    other_scaler.scale(eager_step(another)).backward();
    other_scaler.step(two);
    other_scaler.update();
    two.zero_grad();
  }
  CHECK(worst(net->parameters(), other->parameters()) < 1e-2);
  CHECK(compiled_step.report().eager == 0);

  auto late = step(batch);
  one.param_groups()[0].params()[0].data().add_(0);
  late.backward(torch::full({}, 8.0));  // autograd cannot see the change, which is harmless
  gradients(*net);
  late = step(batch);
  {
    torch::NoGradGuard no_grad;
    net->hidden->weight.add_(1);
  }
  CHECK(error_of([&] {
          late.backward(torch::full({}, 2.0));
        }).find("parameters must not change between a float16 loss and its backward") != std::string::npos);
}

TEST_CASE("Attention, compiled, matches the objective up to rounding: float32, bfloat16, windows of any length",
          "[compiled_step]") {
  const auto steps = GENERATE(1, 3);
  const bool bfloat16 = GENERATE(false, true);
  const auto threads = GENERATE(1, 3);
  const auto before = at::get_num_threads();
  CAPTURE(steps, bfloat16, threads);
  const auto eager = [&](Transformer net) {
    return after_six_batches(
        net, [&](const Batch& batch) { return plain_loss(net, batch); }, steps, bfloat16);
  };
  auto net = transformer();
  ga::CompiledStep step(net, plain_loss<Transformer>, bfloat16 ? in_bfloat16 : in_transformer);
  at::set_num_threads(threads);
  const auto got = after_six_batches(net, step, steps, bfloat16);
  at::set_num_threads(before);
  const auto wanted = eager(transformer());
  CHECK(step.report().compiled == 6);

  // The worst of all gradients is about 3e-7 and, because fused operations round to bfloat16 less often, 8e-3.
  const double tolerance = bfloat16 ? 2e-2 : 1e-5;
  CHECK(got.gradients.size() == wanted.gradients.size());
  CHECK(worst(got.gradients, wanted.gradients) < tolerance);
  CHECK(worst(got.outputs, wanted.outputs) < tolerance / 10);
  CHECK(worst(got.buffers, wanted.buffers) < tolerance / 10);
  CHECK(testing::same_bits(got.random, wanted.random));

  auto heavier = transformer(), unmasked = transformer(), without_dropout = transformer();
  heavier->dense->weight.data().mul_(1.1);
  unmasked->causal = false;
  without_dropout->dropout->options.p(0);
  const auto other = eager(unmasked), still = eager(without_dropout);
  CHECK(worst(other.gradients, wanted.gradients) > 0.5);
  CHECK(worst(other.outputs, wanted.outputs) > 0.01);
  CHECK(worst(still.gradients, wanted.gradients) > 0.25);
  CHECK_FALSE(testing::same_bits(still.random, wanted.random));
  CHECK(worst(eager(heavier).gradients, wanted.gradients) > 0.08);
  CHECK(off(wanted.buffers[4], wanted.buffers[5]) > 0.05);  // each batch changes it

  if (bfloat16) return;  // whose check of a CompiledStep allows a tenth
  auto refused = transformer();
  refused->causal = false;
  ga::CompiledStep unlike(refused, plain_loss<Transformer>, in_transformer);
  CHECK(error_of([&] { unlike(sentences(4)); }).find("the loss differs by ") != std::string::npos);
}

TEST_CASE("An index out of range is an error that names it", "[compiled_step]") {
  const bool bfloat16 = GENERATE(false, true);
  auto net = transformer();
  ga::CompiledStep step(net, plain_loss<Transformer>, bfloat16 ? in_bfloat16 : in_transformer);
  const ga::Autocast autocast(torch::kCPU, torch::kBFloat16, bfloat16);
  step(sentences(4));
  auto words = sentences(4), labels = sentences(4);
  words.first[0][0] = 11, labels.second[3] = -2;
  CHECK(error_of([&] { step(words); }).find("index 11 must be in [0, 11); tensor 0 of the batch has it at [0, 0]") !=
        std::string::npos);
  CHECK(error_of([&] { step(labels); }).find("index -2 must be in [0, 3); tensor 1 of the batch has it at [3]") !=
        std::string::npos);
  step(sentences(4));
  CHECK(step.report().compiled == 2);
}

TEST_CASE("A trainer trains with a compiled step", "[compiled_step]") {
  std::vector<Batch> batches;
  for (std::uint64_t i = 0; i < 5; ++i) batches.push_back(rows_of_six(i == 4 ? 3 : 8, i));
  auto net = perceptron(), other = perceptron();
  torch::optim::SGD sgd(net->parameters(), 0.1), other_sgd(other->parameters(), 0.1);
  ga::CompiledStep step(net, plain_loss<Perceptron>, in_perceptron);
  CHECK(error_of([&] { step(rows_of_six(8)); }).find("the loss is of 8 items, not 1") != std::string::npos);

  ga::CompiledStep counted(net, counted_loss, in_perceptron);
  ga::Trainer trainer(net, sgd, counted, ga::Accumulate{.steps = 2});
  ga::Trainer other_trainer(other, other_sgd, counted_loss, ga::Accumulate{.steps = 2});
  const auto report = trainer.fit(batches, {.epochs = 2, .count_flops = true});
  const auto other_report = other_trainer.fit(batches, {.epochs = 2, .count_flops = true});
  CHECK(worst(net->parameters(), other->parameters()) < 1e-5);
  CHECK(report.flops == other_report.flops);  // by the objective's run on the first batch of each layout
  CHECK(trainer.fit(batches, {.count_flops = true}).flops * 2 == report.flops);  // without such runs
  other_trainer.fit(batches);
  const auto evaluated = trainer.evaluate(batches, ga::Accuracy{});
  CHECK(evaluated.metrics.at("accuracy") == other_trainer.evaluate(batches, ga::Accuracy{}).metrics.at("accuracy"));
  const bool any_rows = counted.report().eager == 0;  // LibTorch 2.11 compiles only for this number of rows
  CHECK(counted.report().compiled == (any_rows ? 15 : 12));
  CHECK(counted.report().compiled + counted.report().eager == 15);

  auto third = perceptron();
  CHECK(error_of([&] { counted(third, batches.front()); }).find("must get the model that the step was made for") !=
        std::string::npos);
}

TEST_CASE("Ranks with compiled steps match one process with the objective", "[compiled_step]") {
  std::vector<Batch> all;
  for (std::uint64_t i = 0; i < 8; ++i) all.push_back(rows_of_six(8, i));
  auto one = perceptron();
  torch::optim::SGD sgd(one->parameters(), 0.1);
  ga::Trainer(one, sgd, counted_loss, ga::Accumulate{.steps = 4}).fit(all);

  std::vector<Perceptron> nets{perceptron(), perceptron()};
  std::vector<std::int64_t> compiled(2);
  tests::as_ranks(2, [&](const ga::ProcessGroup& group) {
    const auto rank = static_cast<std::size_t>(group.rank());
    std::vector<Batch> own;
    for (auto i = rank; i < all.size(); i += 2) own.push_back(all[i]);
    torch::optim::SGD of_rank(nets[rank]->parameters(), 0.1);
    ga::CompiledStep step(nets[rank], counted_loss, in_perceptron);
    ga::Trainer(nets[rank], of_rank, step, ga::Accumulate{.steps = 2}, ga::DataParallel{.group = group}).fit(own);
    compiled[rank] = step.report().compiled;
  });
  for (auto& net : nets) CHECK(worst(net->parameters(), one->parameters()) < 1e-5);
  CHECK(worst(perceptron()->parameters(), one->parameters()) > 1e-3);
  CHECK(compiled == std::vector<std::int64_t>{4, 4});
}

TEST_CASE("Without a graph the objective runs, and is counted", "[compiled_step]") {
  auto net = perceptron();
  ga::CompiledStep step(net, counted_loss, in_perceptron);
  const auto batch = rows_of_six(8);
  const auto same_as_eager = [&](const Batch& of) {
    step(of).backward();
    const auto got = gradients(*net);
    counted_loss(net, of).backward();
    return testing::same_bits(got, gradients(*net));
  };
  CHECK(same_as_eager(
      {batch.first.to(at::kDouble).to(at::kFloat).unsqueeze(0).expand({1, 8, 6}).squeeze(0).narrow(0, 0, 1),
       batch.second.narrow(0, 0, 1)}));  // one row
  net->last->eval();
  CHECK(same_as_eager(batch));
  net->train();
  net->hidden->weight.requires_grad_(false);
  CHECK(same_as_eager(batch));
  net->hidden->weight.requires_grad_(true);
  {
    const ga::Autocast autocast(torch::kCPU, torch::kBFloat16);
    CHECK(same_as_eager(batch));
  }
  {
    const torch::NoGradGuard no_grad;  // an evaluation, not a training step
    CHECK_FALSE(step(batch).mean.requires_grad());
  }
  CHECK_FALSE(same_as_eager(batch));
  CHECK(step.report().compiled == 1);
  std::ostringstream text;
  text << step.report();
  CHECK(text.str() ==
        "1 of 5 steps compiled\n"
        "1 not: no graph for Float [1, 6], Long [1]\n"
        "1 not: other modes: training but last; no autocast\n"
        "1 not: other modes: training; BFloat16 autocast\n"
        "1 not: the model had 'hidden.weight Float [5, 6] parameter', now 'hidden.weight Float [5, 6] frozen "
        "parameter'\n");

  const auto transposed = Batch{batch.first.t().contiguous().t(), batch.second};  // the same values with other strides
  step(transposed).backward();
  const auto got = gradients(*net);
  counted_loss(net, batch).backward();
  CHECK(worst(got, gradients(*net)) < 1e-6);
  CHECK(step.report().compiled == 2);
}

TEST_CASE("Wrong results of a compiled step are found in its first run", "[compiled_step]") {
  auto net = perceptron();
  const auto batch = rows_of_six(8);
  const auto wrong = [&](auto objective) {
    ga::CompiledStep step(net, objective, in_perceptron);
    const auto error = error_of([&] { step(batch); });
    CHECK(error_of([&] { step(batch); }) == error);  // also if the program catches the error and continues
    CHECK(step.report().compiled == 0);
    return error;
  };
  const std::string begins =
      "CompiledStep: perceptron: the compiled step must do what the objective does, but for "
      "Float [8, 6], Long [8] ";
  const auto smoothed = wrong([](auto& model, auto& of) {
    const auto output = model->forward(of.first);
    return ga::Loss{torch::cross_entropy_loss(output, of.second, {}, at::Reduction::Mean, -100, 0.1), 8}.with(
        output, of.second);
  });
  INFO(smoothed);
  CHECK(smoothed.starts_with(begins + "the loss differs by "));
  CHECK(wrong([](auto& model, auto& of) {  // as if under a NoGradGuard
          auto loss = counted_loss(model, of);
          const auto output = model->last(torch::relu(model->hidden(of.first)).detach());
          return ga::Loss{torch::cross_entropy_loss(output, of.second), 8}.with(output, of.second);
        })
            .starts_with(begins + "the gradient of hidden.weight should not be there"));
  CHECK(wrong([](auto& model, auto& of) {
          auto loss = counted_loss(model, of);
          loss.mean = loss.mean + 0.05 * (model->last->bias.sum() - model->last->bias.sum().detach());
          return loss;
        }).starts_with(begins + "the gradient of last.bias differs by "));
  CHECK(wrong([](auto& model, auto& of) {
          torch::rand({1});
          return counted_loss(model, of);
        }).starts_with(begins + "random numbers were drawn otherwise"));

  auto moving = convolutional();
  ga::CompiledStep step(
      moving,
      [](auto& model, const Batch& of) {
        torch::NoGradGuard no_grad;
        model->norm->running_mean.add_(1);
        at::AutoGradMode gradients(true);
        return plain_loss(model, of);
      },
      in_convolutional);
  const auto before = copies(moving->buffers());
  CHECK(error_of([&] { step(images(6)); }).find("the buffer norm.running_mean differs by ") != std::string::npos);
  CHECK(testing::same_bits(copies(moving->buffers()), before));
  CHECK_FALSE(moving->last->weight.grad().defined());

  // An exception of the objective in the check leaves everything unchanged.
  auto throwing = perceptron();
  ga::CompiledStep thrown(
      throwing, [](auto&, const Batch&) -> ga::Loss { throw std::logic_error("of the user"); }, in_perceptron);
  const ga::detail::GeneratorStates random;
  CHECK_THROWS_AS(thrown(batch), std::logic_error);
  CHECK(random == ga::detail::GeneratorStates());
}

TEST_CASE("A model that differs from the saved one is refused", "[compiled_step]") {
  struct OtherImpl : torch::nn::Module {
    torch::nn::Linear hidden = register_module("hidden", torch::nn::Linear(6, 4)),
                      last = register_module("last", torch::nn::Linear(4, 3));
  };
  const auto refused = [](auto net) {
    const auto error = error_of([&] {
      ga::CompiledStep step(
          net, [](auto& model, const Batch&) { return model->parameters()[0].sum(); }, in_perceptron);
    });
    return error;
  };
  CHECK(refused(std::make_shared<OtherImpl>()) ==
        "CompiledStep: perceptron: the model must be as it was saved; it had 'hidden.weight Float [5, 6] parameter', "
        "now 'hidden.weight Float [4, 6] parameter': make and compile it again");
  CHECK(refused(convolutional())
            .find("it had 'hidden.weight Float [5, 6] parameter', now 'unused Double [2] "
                  "parameter'") != std::string::npos);
  auto doubles = perceptron();
  doubles->to(torch::kDouble);
  CHECK(refused(doubles).find(", now 'hidden.weight Double [5, 6] parameter'") != std::string::npos);
  auto transposed = perceptron();
  const auto weight = transposed->hidden->weight;
  weight.set_data(weight.detach().t().contiguous().t());
  CHECK(refused(transposed).find(", now 'hidden.weight Float [5, 6] strides 1 5 parameter'") != std::string::npos);
  auto net = perceptron();
  CHECK(error_of([&] { ga::CompiledStep(net, counted_loss, ga::InProgram{"no"}); }) ==
        "CompiledStep: InProgram{\"no\"} must be a step that gradaccum_compile_step built into this program, which has "
        "bfloat16 convolutional encoded float16 perceptron recurrent transformer words");
}

TEST_CASE("A step of a folder runs, and is loaded only if its files are unchanged", "[compiled_step]") {
  auto net = perceptron();
  const auto batch = rows_of_six(8);
  const auto error_with = [&](auto&& change) {
    Folder folder;
    change(folder);
    return error_of([&] { ga::CompiledStep(net, counted_loss, folder.write())(batch); });
  };
  const auto error_of_value = [&](const std::string& name, const ga::detail::Manifest::Value& value) {
    return error_with([&](Folder& folder) { folder.manifest.values[name] = value; });
  };
  const auto has = [](const std::string& text, const std::string& part) {
    INFO(text);
    return text.find(part) != std::string::npos;
  };
  CHECK(error_with([](Folder&) {}).empty());
  CHECK(has(error_with([](Folder& folder) {
              auto bytes = testing::text_of(folder.library());
              bytes[bytes.size() / 2] ^= 1;
              testing::write_text(folder.library(), bytes);
            }),
            "the CRC-32 "));
  CHECK(has(error_with([](Folder& folder) { testing::write_text(folder.library(), "short"); }), "got 5"));
  CHECK(has(error_with([](Folder& folder) { std::filesystem::remove(folder.library()); }), "No such file"));
  CHECK(has(error_with([](Folder& folder) { folder.manifest.files.clear(); }), "must list the file graph-0."));
  CHECK(has(error_with([](Folder& folder) { folder.manifest.libtorch = "2.3.0"; }), "must be made with LibTorch"));
  CHECK(has(error_of_value("graph-0.capability", std::string("AVX9")), "compiled for processors with AVX9"));
  CHECK(has(error_of_value("graph-0.code", std::string()), "must be compiled first: run gradaccum-compile-step"));
  CHECK(has(error_of_value("graph-0.gradients", std::string("yyy")), "must describe every parameter and buffer"));
  CHECK(has(error_of_value("graph-0.gradients", std::string("yyyn")), "must take 7 tensors and give 5, got 7 and 6"));
  CHECK(has(error_of_value("graph-0.output", false), "must take 7 tensors and give 5, got 7 and 6"));
  CHECK(has(error_of_value("graph-0.target", std::int64_t{2}), "the target must be one of 2 tensors, got 2"));
  CHECK(has(error_of_value("graph-0.target", std::int64_t{-9}), "the target must be one of 2 tensors, got -9"));
  CHECK(
      has(error_of_value("graph-0.batch", std::string("Float [8, 6]")), "must take 6 tensors and give 6, got 7 and 6"));
  CHECK(has(error_of([&] { ga::CompiledStep(net, counted_loss, "/nowhere"); }), "No such file"));

  // Any other value in a manifest is refused with the name of the folder, or has the same meaning.
  const std::vector<ga::detail::Manifest::Value> values{true,
                                                        std::int64_t{-1},
                                                        std::numeric_limits<std::int64_t>::max(),
                                                        std::numeric_limits<double>::quiet_NaN(),
                                                        -1e300,
                                                        std::string(),
                                                        std::string("[[[["),
                                                        std::string(3'000, 'y')};
  const Folder unchanged;
  for (const auto& item : unchanged.manifest.values) {
    const auto& name = item.first;
    CAPTURE(name);
    const bool may_be_missing = name == "flags" || name == "settings" || name.ends_with(".operations");
    CHECK(has(error_with([&](Folder& folder) { folder.manifest.values.erase(name); }), "must have a value") !=
          may_be_missing);
    for (const auto& value : values) {
      const auto error = error_of_value(name, value);
      CHECK((error.empty() || has(error, std::filesystem::temp_directory_path().string())));
    }
  }

  Folder folder;
  const auto path = folder.write();
  ga::CompiledStep one(net, counted_loss, path), other(net, counted_loss, path);
  auto copy = one;
  copy(batch).backward();
  other(batch).backward();
  CHECK(one.report().compiled == 1);  // copies are the same step
  CHECK(other.report().compiled == 1);
}

TEST_CASE("linear_cross_entropy in a compiled step: its loss and gradients, without all logits", "[compiled_step]") {
  auto net = words();
  ga::CompiledStep step(net, loss_by_parts, ga::InProgram{"words"});
  const auto loss_of = [&](const auto& objective, const Batch& batch) {
    torch::manual_seed(3);  // of dropout
    ga::Loss loss = objective(net, batch);
    loss.backward();
    return loss;
  };
  const auto by_all_logits = [](Words& model, const Batch& batch) {
    const auto logits = torch::linear(model->forward(batch.first), model->embedding->weight, model->bias);
    return torch::cross_entropy_loss(logits.flatten(0, 1), batch.first.roll(-1, 1).flatten());
  };
  for (const std::int64_t rows : {4, 7, 500}) {
    const auto batch = sentences(rows);
    const auto wanted = loss_of(loss_by_parts, batch);
    const auto of_objective = gradients(*net);
    const auto got = loss_of([&](auto&, auto& of) { return step(of); }, batch);
    CHECK(off(got.mean.detach(), wanted.mean.detach()) < 1e-5);
    CHECK(off(got.output, wanted.output) < 1e-6);
    CHECK(got.output.count_nonzero().item<std::int64_t>() == batch.first.ne(3).sum().item<std::int64_t>());
    CHECK(worst(gradients(*net), of_objective) < 1e-4);
    loss_of(by_all_logits, batch);
    CHECK(worst(gradients(*net), of_objective) > 1e-3);
  }
  const auto batch = sentences(4096);
  const auto peak_of = [&](const auto& objective) {
    const ga::MemoryMeter meter;
    loss_of(objective, batch);
    net->zero_grad();
    return meter.peak_bytes();
  };
  const auto run = [&](auto&, auto& of) { return step(of); };
  peak_of(run);  // with the objective, for comparison
  const std::int64_t all_logits = 4096 * 8 * 200 * 4;
  CHECK(peak_of(run) < all_logits);
  CHECK(peak_of(by_all_logits) > all_logits);
  CHECK(step.report().eager == 0);
}

TEST_CASE("A changed number of the objective is noticed where results are still equal", "[compiled_step]") {
  auto net = perceptron();
  const auto batch = rows_of_six(8);
  const auto report_of = [&](auto&& objective) {
    const testing::Warnings warnings;
    ga::CompiledStep step(net, objective, in_perceptron);
    for (int i = 0; i < 2; ++i) step(batch).backward();
    CHECK(warnings.texts().size() == (step.report().eager > 0));
    return step.report();
  };
  CHECK(report_of(counted_loss).compiled == 2);
  const auto clamped = report_of([](auto& model, const Batch& of) {
    auto loss = counted_loss(model, of);
    loss.mean = loss.mean.clamp_max(1e6);
    return loss;
  });
  CHECK(clamped.eager == 2);
  CHECK(clamped.why_eager.begin()->first.find("has other operations or numbers") != std::string::npos);
  const auto reads = report_of([](auto& model, const Batch& of) {
    auto loss = counted_loss(model, of);
    static_cast<void>(loss.mean.template item<float>());
    return loss;
  });
  CHECK(reads.why_eager.begin()->first.find("cannot be recorded any more") != std::string::npos);
}

TEST_CASE("Settings of cuDNN and strides are no change of the objective", "[compiled_step]") {
  const auto before = at::globalContext().benchmarkCuDNN();
  at::globalContext().setBenchmarkCuDNN(!before);
  const auto as_before = c10::make_scope_exit([&] { at::globalContext().setBenchmarkCuDNN(before); });
  auto convolutions = convolutional();
  ga::CompiledStep of_images(convolutions, plain_loss<Convolutional>, in_convolutional);
  of_images(images(6)).backward();
  CHECK(of_images.report().eager == 0);

  auto net = perceptron();
  const auto loss = [](auto& model, const Batch& batch) {
    return counted_loss(model, Batch(batch.first.contiguous(), batch.second));
  };
  ga::CompiledStep step(net, loss, in_perceptron);
  const auto wide = torch::randn({8, 12});
  step(Batch(wide.slice(1, 0, 12, 2), rows_of_six(8).second)).backward();
  CHECK(step.report().eager == 0);
}

TEST_CASE("A step runs for any number of rows, each checked once", "[compiled_step]") {
  auto net = perceptron();
  int runs = 0;
  ga::CompiledStep step(
      net, [&](auto& model, const Batch& batch) { return ++runs, counted_loss(model, batch); }, in_perceptron);
  step(rows_of_six(8)).backward();
  step(rows_of_six(8)).backward();
  CHECK(runs == 2);  // for its results, and for its operations
  net->zero_grad();
  step(rows_of_six(13)).backward();
  CHECK(step.report().eager == 0);
  CHECK(runs == 4);
  const auto got = gradients(*net);
  counted_loss(net, rows_of_six(13)).backward();
  CHECK(worst(got, gradients(*net)) < 1e-6);
  CHECK(step(rows_of_six(13)).items == 13);
}
