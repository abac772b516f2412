// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/data/length_buckets.hpp>
#include <gradaccum/data/tensor_batches.hpp>
#include <gradaccum/learning_rates.hpp>
#include <gradaccum/optim/adamw.hpp>
#include <gradaccum/policies/save_state.hpp>
#include <gradaccum/trainer.hpp>

#include "support/failing_files.hpp"
#include "support/files.hpp"
#include "training_state/bits.hpp"

namespace ga = gradaccum;
using namespace testing;

namespace {

struct NetImpl : torch::nn::Module {
  torch::nn::Linear in{4, 8}, out{8, 3};
  torch::nn::BatchNorm1d norm{8};
  torch::nn::Dropout drop{0.3};
  NetImpl() {
    register_module("in", in);
    register_module("norm", norm);
    register_module("drop", drop);
    register_module("out", out);
    in->bias.set_requires_grad(false);  // frozen, but in the optimizer
  }
  at::Tensor forward(const at::Tensor& x) { return out(drop(torch::tanh(norm(in(x))))); }
};
TORCH_MODULE(Net);

struct Objective {
  template <class Batch>
  ga::Loss operator()(Net& net, Batch& batch) const {
    if constexpr (requires { batch.target_lengths; }) {  // token targets: their mean
      const auto output = net(batch.data.flatten(0, 1)).to(at::kFloat);
      const auto target = batch.target.flatten();
      return {torch::cross_entropy_loss(output, target, {}, at::Reduction::Mean, -100),
              (target != -100).sum().template item<std::int64_t>()};
    } else if constexpr (requires { batch.target.sizes(); }) {
      return {torch::mse_loss(net(batch.data).to(at::kFloat), batch.target), batch.data.size(0)};
    } else {  // from a DataLoader: data and target
      return {torch::mse_loss(net(batch.data.narrow(1, 0, 4)).to(at::kFloat), batch.data.narrow(1, 4, 3)),
              batch.data.size(0)};
    }
  }
};

/// A policy: records everything that callbacks receive.
struct Seen {
  std::vector<Bits>* windows = nullptr;
  void after_window(const ga::Step& step) {
    auto& bits = windows->emplace_back();
    bits.add("loss", step.loss);
    bits.add("norm", step.grad_norm);
    for (double number : {static_cast<double>(step.update), static_cast<double>(step.epoch), step.items, step.lr,
                          static_cast<double>(step.micro_batches), static_cast<double>(step.samples),
                          step.moved ? 1.0 : 0.0, step.overflowed ? 1.0 : 0.0})
      bits.add("numbers", number);
  }
};

struct Settings {
  ga::FitOptions fit = {.epochs = 3};
  ga::MixedPrecision precision = {.enabled = false};
  ga::Accumulate accumulate = {.steps = 3};
  bool sixteen_bits = false;
  std::uint64_t rounding_seed = 5;
};

struct Outcome {
  Bits bits;
  std::vector<Bits> windows;
  ga::FitReport report;
  std::int64_t boundaries = 0;
};

/// Trains in new objects, with other initial random numbers for each `seed`.
template <class MakeBatches>
Outcome train(const Settings& settings, const MakeBatches& make_batches, const std::filesystem::path& directory,
              std::int64_t stop_after, std::uint64_t seed) {
  const FailingFiles no_disk_to_wait_for;
  torch::manual_seed(seed);
  Outcome outcome;
  Net net;
  if (settings.sixteen_bits) net->to(at::kBFloat16);
  auto rest = std::vector<at::Tensor>{net->in->weight, net->in->bias, net->norm->weight, net->norm->bias};
  ga::optim::AdamW adamw({torch::optim::OptimizerParamGroup(net->out->parameters()),
                          torch::optim::OptimizerParamGroup(
                              rest, std::make_unique<torch::optim::AdamWOptions>(torch::optim::AdamWOptions(3e-3)))},
                         ga::optim::AdamWOptions(1e-2).amsgrad(true));
  if (settings.sixteen_bits) adamw.stochastic_rounding(settings.rounding_seed);
  auto batches = make_batches();
  ga::Trainer trainer(net, adamw, Objective{}, Stop{stop_after}, settings.accumulate,
                      ga::Ema{.decay = 0.9, .buffers = true}, ga::ClipNorm{.max = 0.7}, Seen{&outcome.windows},
                      ga::Schedule{ga::lr::Cosine{.peak = 1e-2, .warmup = 3, .total = 40}}, settings.precision,
                      ga::SaveState{.directory = directory});
  auto options = settings.fit;
  options.resume = directory;
  outcome.report = trainer.fit(*batches, options);
  auto& bits = outcome.bits;
  bits.add_model(*net);
  bits.add_optimizer(adamw, *net);
  for (auto& [key, value] : trainer.template policy<ga::MixedPrecision>().amp_scaler().state_dict())
    bits.add(key, value);
  auto& ema = trainer.template policy<ga::Ema>();
  if (ema.updates() > 0) ema.swap(net);
  bits.add("ema", static_cast<double>(ema.updates()));
  for (auto& item : net->named_parameters()) bits.add("ema." + item.key(), item.value());
  for (auto& item : net->named_buffers()) bits.add("ema." + item.key(), item.value());
  bits.add_generator();
  bits.add("next", torch::randn({3}));
  bits.add("window", static_cast<double>(trainer.window().micro_batches));
  const auto& report = outcome.report;
  for (auto number :
       {report.epochs, report.updates, report.skipped, report.samples, report.nan_batches, trainer.updates()})
    bits.add("report", static_cast<double>(number));
  bits.add("first_nan", report.first_nan);
  outcome.boundaries = trainer.template policy<Stop>().seen;
  return outcome;
}

/// Stops after the given boundaries, or after each, and resumes: the bits must equal an uninterrupted run's.
template <class MakeBatches>
Outcome check_resumes(const Settings& settings, const MakeBatches& make_batches, std::int64_t every = 1) {
  const Directory directory;
  const auto straight = train(settings, make_batches, directory / "straight", -1, 1);
  REQUIRE(straight.windows.size() > 5);
  for (std::int64_t at = 1; at < straight.boundaries; at += testing::sanitized ? 2 * every : every) {
    const auto path = directory / std::to_string(at);
    const auto stopped = train(settings, make_batches, path, at, 1);
    REQUIRE(stopped.report.signal == 15);
    const auto resumed = train(settings, make_batches, path, -1, 77);
    INFO("stopped after boundary " << at << " of " << straight.boundaries);
    REQUIRE_FALSE(resumed.report.resumed_from.empty());
    CHECK(difference(straight.bits, resumed.bits) == "");
    REQUIRE(stopped.windows.size() + resumed.windows.size() == straight.windows.size());
    for (std::size_t i = 0; i < resumed.windows.size(); ++i)
      CHECK(difference(straight.windows[stopped.windows.size() + i], resumed.windows[i]) == "");
  }
  return straight;
}

at::Tensor numbers(at::IntArrayRef shape, std::uint64_t seed) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  return at::randn(shape, generator);
}

auto tensor_batches() {
  return std::make_unique<ga::data::TensorBatches>(
      numbers({42, 4}, 1), numbers({42, 3}, 2),
      ga::data::TensorBatchesOptions{.batch_size = 4, .shuffle = true, .seed = 1});
}
auto sequences() {
  std::vector<at::Tensor> data, target;
  for (std::int64_t i = 0; i < 20; ++i) {
    data.push_back(numbers({2 + i % 7, 4}, 10 + static_cast<std::uint64_t>(i)));
    target.push_back(torch::full({1 + i % 3}, i % 3, at::kLong));
  }
  // Token targets that are as long as the data.
  for (std::size_t i = 0; i < target.size(); ++i)
    target[i] = torch::cat({target[i], torch::full({data[i].size(0)}, -100, at::kLong)}).narrow(0, 0, data[i].size(0));
  return std::make_unique<ga::data::LengthBuckets>(
      data, target, ga::data::LengthBucketsOptions{.tokens = 20, .shuffle = true, .seed = 3});
}
auto list_of_batches() {
  auto all = std::make_unique<std::vector<ga::data::Batch>>();
  for (std::uint64_t i = 0; i < 8; ++i)
    all->push_back({numbers({2 + static_cast<std::int64_t>(i % 3), 4}, 50 + i),
                    numbers({2 + static_cast<std::int64_t>(i % 3), 3}, 80 + i)});
  return all;
}
auto data_loader() {
  using namespace torch::data;
  auto dataset = datasets::TensorDataset(numbers({23, 7}, 9)).map(transforms::Stack<TensorExample>());
  return make_data_loader<samplers::RandomSampler>(std::move(dataset), DataLoaderOptions(3));
}

}  // namespace

TEST_CASE("resume: a training stopped after any micro-batch ends with the same bits") {
  const auto straight = check_resumes({}, tensor_batches);
  CHECK(straight.boundaries == 3 * (11 + 2));  // the micro-batches of an epoch, its tail and its end
  CHECK(straight.report.updates == 12);
}

TEST_CASE("resume: 40 updates, stopped after any micro-batch") {
  CHECK(check_resumes({.fit = {.updates = 40}}, tensor_batches, 9).report.updates == 40);
  CHECK(check_resumes({.fit = {.updates = 40}}, data_loader, 11).report.updates == 40);
}

TEST_CASE("resume: other tails") {
  for (const auto tail : {ga::Tail::drop, ga::Tail::carry})
    check_resumes({.fit = {.epochs = 3, .tail = tail}}, tensor_batches, 2);
  check_resumes({.fit = {.epochs = 3, .tail = ga::Tail::carry}}, list_of_batches, 2);
}

TEST_CASE("resume: accumulation by samples and by epochs") {
  check_resumes({.accumulate = {.batch_size = 10}}, tensor_batches, 5);
  check_resumes({.accumulate = {.schedule = {{0, 4}, {1, 2}, {2, 3}}}}, tensor_batches, 5);
}

TEST_CASE("resume: mixed precision") {
  check_resumes({.precision = {.dtype = at::kBFloat16}}, tensor_batches, 4);
  const auto half = check_resumes(
      {.precision = {.dtype = at::kHalf, .scaler = {.init_scale = 16384.0, .growth_interval = 2}}}, tensor_batches);
  CHECK(half.report.skipped > 0);  // the scale grows until it overflows
  CHECK(half.report.updates > 3);
}

TEST_CASE("resume: stochastically rounded 16-bit parameters, with gradients summed in float32") {
  const Settings settings{.accumulate = {.steps = 3, .accumulate_in = at::kFloat}, .sixteen_bits = true};
  const auto to_16_bits = [](auto batches) {
    for (auto& batch : *batches) batch.data = batch.data.to(at::kBFloat16);
    return batches;
  };
  check_resumes(
      settings, [&] { return to_16_bits(list_of_batches()); }, 3);
}

TEST_CASE("resume: sequences of unequal length") { check_resumes({.fit = {.epochs = 2}}, sequences, 2); }

TEST_CASE("resume: batches in a list") { check_resumes({}, list_of_batches); }

TEST_CASE("resume: LibTorch's loader") { check_resumes({}, data_loader); }

TEST_CASE("resume: up to a number of updates, and then up to a greater one") {
  const auto longer = [](std::int64_t updates) { return Settings{.fit = {.updates = updates}}; };
  check_resumes(longer(9), tensor_batches, 6);
  const auto goes_further = [&](const auto& make_batches, const Settings& first, const Settings& second) {
    const Directory directory;
    const auto straight = train(second, make_batches, directory / "straight", -1, 1);
    train(first, make_batches, directory / "stopped", -1, 1);
    const auto resumed = train(second, make_batches, directory / "stopped", -1, 77);
    CHECK(difference(straight.bits, resumed.bits) == "");
    // A fit that has already made all its updates makes none.
    const auto again = train(second, make_batches, directory / "stopped", -1, 78);
    CHECK(again.windows.empty());
    CHECK(difference(straight.bits.without("report"), again.bits.without("report")) == "");
  };
  for (std::int64_t updates : {1, 3, 4, 5, 8}) {
    goes_further(tensor_batches, longer(updates), longer(11));
    goes_further(data_loader, longer(updates), longer(11));
  }
  goes_further(tensor_batches, {.fit = {.epochs = 1}}, {.fit = {.epochs = 3}});
  goes_further(list_of_batches, {.fit = {.epochs = 1, .tail = ga::Tail::carry}},
               {.fit = {.epochs = 3, .tail = ga::Tail::carry}});
  goes_further(data_loader, {.fit = {.epochs = 2}}, {.fit = {.epochs = 3}});
}

TEST_CASE("resume: micro-batches that are skipped because of their loss") {
  const auto with_nan = [] {
    auto batches = list_of_batches();
    (*batches)[2].data[0][0] = NAN;
    return batches;
  };
  const auto straight = check_resumes({.fit = {.epochs = 3, .on_nan = ga::OnNan::skip}}, with_nan, 2);
  CHECK(straight.report.nan_batches == 3);
}

// Changes parts of a state one by one. If one made no difference, the tests above could not detect its loss.
TEST_CASE("resume: changing a part of a state changes the training or is an error") {
  const Directory directory;
  const auto straight = train({}, tensor_batches, directory / "straight", -1, 1);
  for (const std::string part : {"random.", "optimizer.exp_avg.", "optimizer.step.", "window.grad.", "ema.average.",
                                 "model.norm.running", "data.batches"}) {
    const auto path = directory / part;
    train({}, tensor_batches, path, 15, 1);  // an open window
    const auto folder = ga::detail::newest_state(path).value();
    auto values = ga::io::read_state(folder);
    const auto before = values;
    for (auto& [name, value] : values)
      if (name.starts_with(part)) {
        if (auto* tensor = std::get_if<at::Tensor>(&value))
          *tensor = part == "random." ? at::make_generator<at::CPUGeneratorImpl>(99).get_state() : *tensor * 0;
        if (name == "data.batches.epoch") value = std::int64_t{0};
      }
    ga::Archive changed;
    for (auto& [name, value] : values) std::visit([&, key = name](auto held) { changed(key, held); }, value);
    std::filesystem::remove_all(folder);
    std::filesystem::create_directory(folder);
    ga::io::write_state(changed, folder);
    Outcome resumed;
    const auto error = error_of([&] { resumed = train({}, tensor_batches, path, -1, 77); });
    INFO(part << " " << error);
    if (part == "data.batches")
      CHECK(contains(error, "last_batch"));
    else
      CHECK(difference(straight.bits, resumed.bits) != "");
  }
}
