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

at::Tensor numbers(at::IntArrayRef shape, std::uint64_t seed) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  return at::randn(shape, generator);
}

/// A policy with a number; loading can be made to fail.
struct Counter {
  static constexpr std::string_view name = "counter";
  std::int64_t windows = 0;
  bool fails = false, in_half = false;
  void after_window(const ga::Step&) { ++windows; }
  void state(ga::Archive& archive) {
    if (archive.loading() && fails && !in_half) throw std::runtime_error("Counter: not today");
    archive("windows", windows);
    if (archive.loading() && fails) throw std::runtime_error("Counter: not today");
  }
};

struct Last {
  static constexpr std::string_view name = "last";
  double loss = 0;
  void after_window(const ga::Step& step) { loss = step.loss.item<double>(); }
  void state(ga::Archive& archive) { archive("loss", loss); }
};

/// A policy without state.
struct Nothing {
  void at_boundary() {}
};

/// A policy with a number.
struct More {
  static constexpr std::string_view name = "more";
  double number = 1;
  void at_boundary() {}
  void state(ga::Archive& archive) { archive("number", number); }
};

/// A policy: saves an interrupted fit.
struct SaveAtEnd {
  std::filesystem::path directory = {};
  std::function<void()> save = {};
  void attach(auto& trainer) {
    save = [this, &trainer] {
      if (trainer.progress().signal() != 0) ga::save(directory, trainer);
    };
  }
  void at_boundary() { save(); }
};

/// Trainings that differ in a number's type.
template <class Number>
struct TrainingOf {
  Number number = 0;
  std::int64_t updates() const { return 0; }
  void state(ga::Archive& archive) { archive("number", number); }
};
using Whole = TrainingOf<std::int64_t>;
using Real = TrainingOf<double>;

const auto objective = [](auto& net, auto& batch) { return torch::mse_loss(net->forward(batch.data), batch.target); };

struct Settings {
  std::vector<std::int64_t> widths = {4, 8, 3};
  bool bias = true;
  at::ScalarType dtype = at::kFloat;
  int groups = 1;
  ga::Accumulate accumulate = {.steps = 3};
  Counter counter = {};
  ga::MixedPrecision precision = {.enabled = false};
};

torch::nn::Sequential make_model(const Settings& settings) {
  torch::nn::Sequential net;
  for (std::size_t i = 1; i < settings.widths.size(); ++i)
    net->push_back(
        torch::nn::Linear(torch::nn::LinearOptions(settings.widths[i - 1], settings.widths[i]).bias(settings.bias)));
  net->to(settings.dtype);
  return net;
}

template <class Optimizer>
Optimizer make_optimizer(const torch::nn::Sequential& net, int groups) {
  std::vector<torch::optim::OptimizerParamGroup> all;
  const auto parameters = net->parameters();
  const auto count = static_cast<std::ptrdiff_t>(parameters.size());
  for (int i = 0; i < groups; ++i)
    all.emplace_back(std::vector<at::Tensor>(parameters.begin() + count * i / groups,
                                             parameters.begin() + count * (i + 1) / groups));
  return Optimizer(all, {1e-2});
}

auto batches_of(ga::data::TensorBatchesOptions options = {.batch_size = 4, .shuffle = true, .seed = 1},
                std::int64_t rows = 42, std::uint64_t seed = 1) {
  return ga::data::TensorBatches(numbers({rows, 4}, seed), numbers({rows, 3}, 2), options);
}

/// A separate training that has made some steps.
template <class Optimizer, class Extra>
struct Scene {
  torch::nn::Sequential net;
  Optimizer optimizer;
  ga::Trainer<torch::nn::Sequential, Optimizer, decltype(objective), Stop, ga::Accumulate, ga::Ema, Last, Counter,
              ga::Schedule<ga::lr::Cosine>, ga::MixedPrecision, Extra>
      trainer;

  explicit Scene(const Settings& settings, std::int64_t stop_after)
      : net(make_model(settings)),
        optimizer(make_optimizer<Optimizer>(net, settings.groups)),
        trainer(net, optimizer, objective, Stop{stop_after}, settings.accumulate, ga::Ema{.decay = 0.9}, Last{},
                settings.counter, ga::Schedule{ga::lr::Cosine{.peak = 1e-2, .warmup = 5, .total = 30}},
                settings.precision, Extra{}) {}

  Bits bits() {
    Bits bits;
    bits.add_model(*net);
    bits.add_optimizer(optimizer, *net);
    bits.add_generator();
    ga::Archive archive;
    trainer.state(archive);
    for (auto& [name, value] : archive.values())
      std::visit(
          [&, key = name](const auto& held) {
            if constexpr (std::is_arithmetic_v<std::decay_t<decltype(held)>>)
              bits.add("state." + key, static_cast<double>(held));
            else
              bits.add("state." + key, held);
          },
          value);
    bits.add("counted", static_cast<double>(trainer.template policy<Counter>().windows));
    return bits;
  }
};

using AdamW = ga::optim::AdamW;

/// Saves a fit in the middle of its second epoch, with an open window.
template <class Optimizer = AdamW>
std::filesystem::path saved(const std::filesystem::path& directory, const Settings& settings = {}) {
  const FailingFiles no_disk_to_wait_for;
  torch::manual_seed(1);
  Scene<Optimizer, SaveAtEnd> scene(settings, 15);
  scene.trainer.template policy<SaveAtEnd>().directory = directory;
  auto batches = batches_of();
  scene.trainer.fit(batches, {.epochs = 3});
  return ga::detail::newest_state(directory).value();
}

/// Checks that loading is refused with these words and changes nothing, also by `fit`.
template <class Optimizer = AdamW, class Extra = Nothing>
void check_refused(const std::filesystem::path& state, const Settings& settings,
                   const std::vector<std::string>& words) {
  torch::manual_seed(9);
  Scene<Optimizer, Extra> scene(settings, -1);
  auto batches = batches_of();
  scene.trainer.fit(batches, {.updates = 2});
  auto before = scene.bits();
  const auto refused = [&](const auto& load) {
    const auto message = error_of(load);
    INFO("message: '" << message << "'");
    CHECK(message != "");
    for (const auto& word : words) CHECK(contains(message, word));
    CHECK(difference(before, scene.bits()) == "");
  };
  refused([&] { ga::load(state, scene.trainer); });
  auto fresh = batches_of();
  refused([&] { scene.trainer.fit(fresh, {.epochs = 3, .resume = state}); });
}

/// Loads the values that fit, and trains. Returns the number of updates.
template <class Optimizer = AdamW, class Extra = Nothing>
std::int64_t goes_on(const std::filesystem::path& state, const Settings& settings) {
  Scene<Optimizer, Extra> scene(settings, -1);
  auto batches = batches_of();
  const auto report = scene.trainer.fit(batches, {.epochs = 3, .resume = state, .allow_changes = true});
  CHECK_FALSE(report.resumed_from.empty());
  for (auto& parameter : scene.net->parameters()) CHECK(at::isfinite(parameter).all().template item<bool>());
  return report.updates;
}

}  // namespace

TEST_CASE("refused: another number of micro-batches") {
  const Directory directory;
  const auto state = saved(directory / "states");
  check_refused(state, {.accumulate = {.steps = 4}}, {"accumulate.steps = 3", "here it is 4", "allow_changes"});
  check_refused(state, {.accumulate = {.steps = 3, .schedule = {{1, 2}}}}, {"accumulate.schedule = ", "1:2"});
  check_refused(state, {.accumulate = {.batch_size = 12}}, {"accumulate."});
  CHECK(goes_on(state, {.accumulate = {.steps = 2}}) > 12);
  CHECK(goes_on(state, {.accumulate = {.batch_size = 20}}) > 2);
}

TEST_CASE("refused: another model") {
  const Directory directory;
  const auto state = saved(directory / "states");
  check_refused(state, {.widths = {4, 8, 8, 3}},
                {"ModelState", "the model alone has 2.weight, Float [3, 8]",
                 "the state has 1.weight, Float [3, 8], the model 1.weight, Float [8, 8]"});
  check_refused(state, {.bias = false}, {"the state alone has 0.bias, Float [8]", "the state alone has 1.bias"});
  check_refused(saved(directory / "large", {.widths = {4, 8, 8, 3}}), {},
                {"the state alone has 2.weight, Float [3, 8]"});
  Scene<AdamW, Nothing> sixteen_bits({.dtype = at::kBFloat16}, -1);
  const auto before = sixteen_bits.bits();
  REQUIRE_ERROR("the state has 0.weight, Float [8, 4], the model 0.weight, BFloat16 [8, 4]",
                ga::load(state, sixteen_bits.trainer));
  CHECK(difference(before, sixteen_bits.bits()) == "");
}

TEST_CASE("refused: another model, whose matching parameters are loaded with allow_changes") {
  const Directory directory;
  const auto state = saved(directory / "states");
  auto values = ga::io::read_state(state);
  Scene<AdamW, Nothing> scene({.widths = {4, 8, 8, 3}}, -1);
  const auto before = scene.net->named_parameters()["2.weight"].clone();
  ga::load(state, scene.trainer, {.allow_changes = true});
  CHECK(at::equal(scene.net->named_parameters()["0.weight"], std::get<at::Tensor>(values["model.0.weight"])));
  CHECK(at::equal(scene.net->named_parameters()["2.weight"], before));
  goes_on(state, {.widths = {4, 8, 8, 3}});
  // Adagrad has a state for each parameter from the beginning.
  goes_on<torch::optim::Adagrad>(saved<torch::optim::Adagrad>(directory / "adagrad"), {.widths = {4, 8, 8, 3}});
  goes_on<torch::optim::Adagrad>(state, {});
}

TEST_CASE("refused: another optimizer, other groups") {
  const Directory directory;
  const auto state = saved(directory / "states");
  check_refused<ga::optim::SGD>(state, {}, {"SGD"});
  check_refused<ga::optim::Adafactor>(state, {}, {"Adafactor"});
  check_refused<ga::optim::Adam>(state, {}, {"Adam", "AdamW"});
  check_refused<ga::optim::AdamW8bit>(state, {}, {"AdamW8bit"});
  goes_on<ga::optim::SGD>(state, {});
  goes_on<ga::optim::AdamW8bit>(state, {});
  goes_on(state, {.groups = 2});
  check_refused<torch::optim::Adagrad>(state, {}, {"Adagrad"});
  check_refused(state, {.groups = 2}, {"optimizer.groups = 1", "here it is 2"});
  check_refused(saved(directory / "of_two", {.groups = 2}), {}, {"optimizer.groups = 2", "here it is 1"});
}

TEST_CASE("refused: other policies") {
  const Directory directory;
  const auto state = saved(directory / "states");
  check_refused<AdamW, More>(state, {}, {"more.number"});
  goes_on<AdamW, More>(state, {});
  const Settings half{.precision = {.dtype = at::kHalf, .scaler = {.init_scale = 4.0}}};
  check_refused(state, half, {"mixed_precision"});
  check_refused(saved(directory / "half", half), {}, {"mixed_precision"});
  goes_on(state, half);
}

TEST_CASE("refused: a policy that cannot load leaves all as it was") {
  const Directory directory;
  const auto state = saved(directory / "states");
  check_refused(state, {.counter = {.fails = true}}, {"not today"});
  check_refused(state, {.counter = {.fails = true, .in_half = true}}, {"not today"});
}

TEST_CASE("refused: other data") {
  const Directory directory;
  const auto state = saved(directory / "states");
  torch::manual_seed(9);
  const auto refused = [&](auto batches, const std::string& words) {
    Scene<AdamW, Nothing> scene({}, -1);
    const auto before = scene.bits();
    REQUIRE_ERROR(words, scene.trainer.fit(batches, {.epochs = 3, .resume = state}));
    CHECK(difference(before, scene.bits()) == "");
    CHECK_FALSE(scene.trainer.fit(batches, {.epochs = 3, .resume = state, .allow_changes = true}).resumed_from.empty());
  };
  refused(batches_of({.batch_size = 4, .shuffle = true, .seed = 2}), "data.batches.last_batch");
  refused(batches_of({.batch_size = 4}), "data.batches.last_batch");
  refused(batches_of({.batch_size = 5, .shuffle = true, .seed = 1}), "data.batches.batches = 11, but here it is 9");
  refused(batches_of({.batch_size = 4, .shuffle = true, .seed = 1}, 38),
          "data.batches.batches = 11, but here it is 10");
  refused(batches_of({.batch_size = 4, .shuffle = true, .seed = 1}, 42, 3), "data.batches.last_batch");
}

TEST_CASE("refused: other batches in a list") {
  const Directory directory;
  const auto path = directory / "states";
  torch::manual_seed(1);
  std::vector<ga::data::Batch> list;
  for (std::uint64_t i = 0; i < 8; ++i) list.push_back({numbers({2, 4}, i), numbers({2, 3}, 30 + i)});
  auto net = make_model({});
  auto sgd = make_optimizer<torch::optim::SGD>(net, 1);
  const auto fit = [&](std::vector<ga::data::Batch>& batches, std::int64_t stop_after, bool allow) {
    const FailingFiles no_disk_to_wait_for;
    ga::Trainer trainer(net, sgd, objective, Stop{stop_after}, ga::SaveState{.directory = path});
    return trainer.fit(batches, {.epochs = 2, .resume = path, .allow_changes = allow});
  };
  fit(list, 5, false);
  auto other = list;
  other[4].target = other[4].target.clone();
  other[4].target[1][2] += 1;
  Bits before;
  before.add_model(*net);
  REQUIRE_ERROR("the data has changed: batch 4 (counted from 0)", fit(other, -1, false));
  other = list;
  other.resize(3);
  REQUIRE_ERROR("saved after batch 5 of an epoch, which now has only 3", fit(other, -1, false));
  Bits after;
  after.add_model(*net);
  CHECK(difference(before, after) == "");
}

TEST_CASE("refused: paths without a state, and saves into the directory of another run") {
  const Directory directory;
  const auto state = saved(directory / "states");
  Scene<AdamW, Nothing> scene({}, -1);
  REQUIRE_ERROR("none must be a state or contain one", ga::load(directory / "none", scene.trainer));
  REQUIRE_ERROR("must be a state or contain one", ga::load("", scene.trainer));
  CHECK(ga::load(directory / "none", scene.trainer, {.if_any = true}).empty());
  CHECK(ga::load("", scene.trainer, {.if_any = true}).empty());
  std::filesystem::create_directory(directory / "empty");
  REQUIRE_ERROR("empty must be a state or contain one", ga::load(directory / "empty", scene.trainer));
  CHECK(ga::load(directory / "empty", scene.trainer, {.if_any = true}).empty());
  write_text(directory / "file", "text");
  REQUIRE_ERROR("file", ga::load(directory / "file", scene.trainer));
  CHECK(ga::load(state, scene.trainer) == state);
  CHECK(ga::load(directory / "states", scene.trainer) == state);
  CHECK(scene.trainer.updates() == 4);

  Scene<AdamW, Nothing> fresh({}, -1);
  REQUIRE_ERROR("step-000004, but this training is at update 0: the state is from another run",
                ga::save(directory / "states", fresh.trainer));
  REQUIRE_ERROR("save: keep_last must be >= 0, got -1", ga::save(directory / "new", fresh.trainer, {.keep_last = -1}));
  CHECK_FALSE(std::filesystem::exists(directory / "new"));
  auto batches = batches_of();
  CHECK(fresh.trainer.fit(batches, {.epochs = 1, .resume = directory / "empty"}).resumed_from.empty());
  CHECK(fresh.trainer.fit(batches, {.epochs = 1, .resume = directory / "none"}).resumed_from.empty());
}

TEST_CASE("refused: a value of another type or name is reported with the state that has it") {
  const Directory directory;
  Whole whole;
  const auto state = ga::save(directory / "states", whole);
  Real real;
  REQUIRE_ERROR("Archive: the value 'number' must be a floating-point number, got a whole number (while loading " +
                    state.string() + ")",
                ga::load(directory / "states", real));
  Scene<AdamW, Nothing> scene({}, -1);
  REQUIRE_ERROR(" (while loading " + state.string() + ")", ga::load(directory / "states", scene.trainer));
}

TEST_CASE("refused: SaveState with an object that cannot be saved") {
  struct Stateless {
    std::vector<torch::optim::OptimizerParamGroup> groups;
    auto& param_groups() { return groups; }
    void zero_grad() {}
    void step() {}
  };
  auto net = make_model({}), other = make_model({});
  Stateless stateless{{torch::optim::OptimizerParamGroup(net->parameters())}};
  const auto with = [&](auto& model, auto& optimizer, ga::SaveState save) {
    ga::Trainer trainer(model, optimizer, objective, std::move(save));
  };
  REQUIRE_ERROR("OptimizerState: an optimizer of your own", with(net, stateless, {.directory = "states"}));
  auto sgd = make_optimizer<torch::optim::SGD>(net, 1);
  REQUIRE_ERROR("of shape [8, 4] has no name", with(other, sgd, {.directory = "states"}));
  REQUIRE_ERROR("SaveState: directory must be given", with(net, sgd, {}));
  REQUIRE_ERROR("every_updates must be >= 1, got 0", with(net, sgd, {.directory = "states", .every_updates = 0}));
  REQUIRE_ERROR("keep_last must be >= 0, got -1", with(net, sgd, {.directory = "states", .keep_last = -1}));
  CHECK_FALSE(std::filesystem::exists("states"));
}

namespace {

/// A policy: tensors under a name that other policies may have, too.
struct Named {
  std::string name;
  at::Tensor tensor = torch::zeros({1});
  void at_boundary() {}
  void state(ga::Archive& archive) { archive("tensor", tensor); }
};

/// A policy: calls a function in each hook.
struct InEachHook {
  std::function<void(const char*)> call;
  void before_backward(ga::Loss&) { call("before_backward"); }
  void after_backward(ga::Gradients&) { call("after_backward"); }
  void before_step(ga::Gradients&) { call("before_step"); }
  void after_window(const ga::Step&) { call("after_window"); }
  void after_step(const ga::Step&) { call("after_step"); }
  void at_boundary() { call("at_boundary"); }
};

}  // namespace

TEST_CASE("refused: duplicate names, or invalid file names, at the beginning of the fit") {
  const Directory directory;
  const auto fit = [&](const std::string& first, const std::string& second) {
    auto net = make_model({});
    auto sgd = make_optimizer<torch::optim::SGD>(net, 1);
    ga::Trainer trainer(net, sgd, objective, Named{first}, Named{second},
                        ga::SaveState{.directory = directory / "states", .every_updates = 1000});
    auto batches = batches_of();
    trainer.fit(batches, {.updates = 2});
  };
  REQUIRE_ERROR("two values are named 'same'", fit("same", "same"));
  REQUIRE_ERROR("a valid file name (A-Z a-z 0-9 _ -), got 'a/b'", fit("first", "a/b"));
  REQUIRE_ERROR("got ''", fit("", "second"));
  CHECK(std::filesystem::is_empty(directory / "states"));
  fit("first", "second");
  CHECK(std::filesystem::exists(directory / "states" / "step-000002"));
}

TEST_CASE("refused: saving or loading inside a micro-batch, which some policies have not processed") {
  const Directory directory;
  for (const bool loads : {false, true}) {
    auto net = make_model({});
    auto sgd = make_optimizer<torch::optim::SGD>(net, 1);
    std::function<void(const char*)> call = [](const char*) {};
    ga::Trainer trainer(net, sgd, objective, ga::Accumulate{.steps = 2},
                        InEachHook{[&](const char* hook) { call(hook); }});
    ga::save(directory / "begin", trainer);
    std::map<std::string, std::string> messages;
    call = [&](const std::string& hook) {
      if (loads && hook == "at_boundary") return;  // allowed, but it would repeat forever
      messages[hook] = error_of([&] {
        if (loads)
          ga::load(directory / "begin", trainer);
        else
          ga::save(directory / "states", trainer);
      });
    };
    auto batches = batches_of();
    trainer.fit(batches, {.updates = 1});
    CHECK(messages.size() == (loads ? 5 : 6));
    for (auto& [hook, message] : messages) {
      INFO(hook << ": " << message);
      const bool refused = contains(message, "between micro-batches, got a call inside one");
      CHECK(refused == (hook != "at_boundary"));
      CHECK((refused || message.empty()));
    }
    CHECK(trainer.updates() == 1);
  }
}
