// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/data/length_buckets.hpp>
#include <gradaccum/data/prefetch.hpp>
#include <gradaccum/data/tensor_batches.hpp>
#include <gradaccum/memory_meter.hpp>
#include <gradaccum/optim/adamw.hpp>
#include <gradaccum/policies/save_state.hpp>
#include <gradaccum/trainer.hpp>

#include "support/device.hpp"
#include "support/files.hpp"
#include "support/no_threads.hpp"
#include "training_state/bits.hpp"

#include <ATen/Parallel.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <ATen/autocast_mode.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace ga = gradaccum;
using namespace testing;
using ga::data::Prefetch;

namespace {

constexpr std::int64_t all = 1000;

/// A user's range, whose batches are valid only until the next one. It calls `make` for each.
class Own {
 public:
  std::int64_t length = 6;
  std::function<void(std::int64_t)> make = [](std::int64_t) {};

  class Iterator {
   public:
    using value_type = at::Tensor;
    using difference_type = std::ptrdiff_t;
    using iterator_category = std::input_iterator_tag;

    explicit Iterator(Own& owner) : owner_(&owner) { ++*this; }
    at::Tensor& operator*() const { return owner_->batch_; }
    Iterator& operator++() {
      owner_->batch_ = at::Tensor();
      if (owner_->next_ == owner_->length) {
        owner_->epoch_ += 1, owner_->next_ = 0;
        owner_ = nullptr;
        return *this;
      }
      owner_->make(owner_->next_);
      owner_->batch_ = torch::full({2, 4}, static_cast<double>(100 * owner_->epoch_ + owner_->next_), at::kFloat);
      owner_->next_ += 1;
      return *this;
    }
    void operator++(int) { ++*this; }
    bool operator==(std::default_sentinel_t) const { return owner_ == nullptr; }

   private:
    Own* owner_;
  };

  Iterator begin() {
    if (next_ > 0 && !resumed_) epoch_ += 1, next_ = 0;
    resumed_ = false;
    return Iterator(*this);
  }
  std::default_sentinel_t end() const { return {}; }

 protected:
  std::int64_t epoch_ = 0, next_ = 0;
  bool resumed_ = false;
  at::Tensor batch_;
};

/// A range with a state, which can be made wrong.
class OwnWithState : public Own {
 public:
  std::int64_t lie = 0;

  void state(ga::Archive& archive) {
    auto epoch = epoch_, next = next_ + (archive.loading() ? 0 : lie);
    archive("epoch", epoch);
    archive("next", next);
    if (archive.loading()) archive.when_all_fit([this, epoch, next] { epoch_ = epoch, next_ = next, resumed_ = true; });
  }
};

class OwnWithSize : public Own {
 public:
  std::size_t size() const { return static_cast<std::size_t>(length); }
};

at::Tensor numbers(at::IntArrayRef shape, std::uint64_t seed) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  return at::randn(shape, generator);
}

auto tensor_batches() {
  return std::make_unique<ga::data::TensorBatches>(
      numbers({22, 4}, 1), numbers({22, 3}, 2),
      ga::data::TensorBatchesOptions{.batch_size = 4, .shuffle = true, .seed = 1});
}
auto views() {
  return std::make_unique<ga::data::TensorBatches>(numbers({9, 4}, 1), numbers({9, 3}, 2),
                                                   ga::data::TensorBatchesOptions{.batch_size = 2, .drop_last = true});
}
auto sequences() {
  std::vector<at::Tensor> data;
  for (std::int64_t i = 0; i < 20; ++i) data.push_back(numbers({2 + i % 7, 4}, 10 + static_cast<std::uint64_t>(i)));
  return std::make_unique<ga::data::LengthBuckets>(
      data, numbers({20, 3}, 3), ga::data::LengthBucketsOptions{.tokens = 20, .shuffle = true, .seed = 3});
}
auto list() {
  auto batches = std::make_unique<std::vector<ga::data::Batch>>();
  for (std::uint64_t i = 0; i < 7; ++i) batches->push_back({numbers({3, 4}, 50 + i), numbers({3, 3}, 80 + i)});
  return batches;
}
template <std::size_t workers>
auto loader() {
  using namespace torch::data;
  auto dataset = datasets::TensorDataset(numbers({23, 7}, 9)).map(transforms::Stack<TensorExample>());
  return make_data_loader<samplers::RandomSampler>(std::move(dataset), DataLoaderOptions(4).workers(workers));
}
template <class Range>
auto own() {
  return std::make_unique<Range>();
}

std::string text_of(const ga::Archive& archive) {
  std::string text;
  for (auto& [name, value] : archive.values()) {
    text += name + "=";
    if (auto* tensor = std::get_if<at::Tensor>(&value)) text += ga::detail::fingerprint_of(*tensor);
    if (auto* number = std::get_if<std::int64_t>(&value)) text += std::to_string(*number);
    if (auto* words = std::get_if<std::string>(&value)) text += *words;
    text += " ";
  }
  return text;
}

template <class Range>
ga::Archive state_of(Range& range) {
  ga::Archive archive;
  if constexpr (requires { range.state(archive); }) archive("range", range);
  return archive;
}

template <class Range>
void load(Range& range, const ga::Archive& saved) {
  ga::Archive archive(saved.values());
  archive("range", range);
}

/// Returns what a loop receives that breaks after `take` batches: each batch, its state, a random number.
template <class Range>
std::vector<std::string> seen(Range& range, std::int64_t take = all) {
  std::vector<std::string> lines;
  for (auto&& batch : range) {
    lines.push_back(ga::detail::fingerprint_of(batch) + " " + text_of(state_of(range)) +
                    std::to_string(torch::rand({}).template item<double>()));
    if (--take == 0) break;
  }
  lines.push_back("then " + text_of(state_of(range)));
  return lines;
}

template <class Range>
std::vector<std::string> seen(Range& range, const std::vector<std::int64_t>& takes) {
  std::vector<std::string> lines;
  for (auto take : takes)
    for (auto& line : seen(range, take)) lines.push_back(line);
  return lines;
}

template <class MakeRange>
void check_same(const MakeRange& make, const std::vector<std::int64_t>& takes = {all, 2, all, 1, 4, all}) {
  torch::manual_seed(3);
  auto bare = make();
  const auto expected = seen(*bare, takes);
  for (std::int64_t depth : {1, 2, 100}) {
    INFO("depth " << depth);
    torch::manual_seed(3);
    auto range = make();
    Prefetch ahead(*range, {.depth = depth});
    CHECK(seen(ahead, takes) == expected);
    if constexpr (ga::detail::goes_back_to_place<decltype(*range)>)
      CHECK(text_of(state_of(*range)) == text_of(state_of(*bare)));
  }
}

/// Throws if the condition does not become true in time.
void wait_until(const std::function<bool()>& done) {
  const auto begin = std::chrono::steady_clock::now();
  while (!done()) {
    if (std::chrono::steady_clock::now() - begin > std::chrono::minutes(2)) throw std::runtime_error("never came true");
    std::this_thread::yield();
  }
}

// Restores LibTorch's numbers of threads.
struct ThreadsAsBefore {
  int before = at::get_num_threads();
  ~ThreadsAsBefore() { at::set_num_threads(before); }
};

}  // namespace

TEST_CASE("Prefetch: has state and size exactly where the range has them") {
  const auto has_state = [](auto& range) {
    return requires(ga::Archive & archive) { range.state(archive); };
  };
  const auto has_size = [](auto& range) { return ga::detail::batches_of(range).has_value(); };
  const auto check = [&](auto range, bool state, bool size) {
    Prefetch ahead(*range);
    CHECK(has_state(ahead) == state);
    CHECK(has_size(ahead) == size);
    CHECK(ga::detail::batches_of(ahead) == ga::detail::batches_of(*range));
  };
  check(tensor_batches(), true, true);
  check(sequences(), true, true);
  check(list(), false, true);
  check(loader<0>(), false, false);
  check(own<Own>(), false, false);
  check(own<OwnWithState>(), true, false);
  check(own<OwnWithSize>(), false, true);
  STATIC_REQUIRE(std::ranges::input_range<Prefetch<ga::data::TensorBatches&>>);
}

TEST_CASE("Prefetch: a named range is held by reference, a temporary is moved") {
  auto batches = tensor_batches();
  Prefetch by_reference(*batches);
  Prefetch by_value(std::move(*tensor_batches()));
  STATIC_REQUIRE(std::is_same_v<decltype(by_reference), Prefetch<ga::data::TensorBatches&>>);
  STATIC_REQUIRE(std::is_same_v<decltype(by_value), Prefetch<ga::data::TensorBatches>>);
  const auto expected = seen(*tensor_batches());
  CHECK(seen(by_value).size() == expected.size());
  const std::vector<int> constant{4, 5, 6};
  std::vector<int> taken;
  for (auto& number : Prefetch(constant, {.depth = 3})) taken.push_back(number);
  CHECK(taken == constant);
}

TEST_CASE("Prefetch: batches, states and random numbers equal the range's at any depth") {
  check_same(tensor_batches);
  check_same(views);
  check_same(sequences);
  check_same(list);
  check_same(loader<0>);
  check_same(loader<2>, {all, all});  // it refuses a loop after a break
  check_same(own<Own>);
  check_same(own<OwnWithState>);
  check_same(own<OwnWithSize>);
}

TEST_CASE("Prefetch: empty ranges") {
  const auto nothing = [] { return std::make_unique<ga::data::TensorBatches>(torch::ones({0, 2}), torch::ones({0})); };
  const auto empty = [] {
    auto range = std::make_unique<OwnWithState>();
    range->length = 0;
    return range;
  };
  check_same(nothing, {all, all});
  check_same(empty, {all, all});
  check_same([] { return std::make_unique<std::vector<at::Tensor>>(); }, {all, all});
}

TEST_CASE("Prefetch: resumes from any state, and its states are the range's") {
  const auto check = [](const auto& make) {
    auto straight = make();
    seen(*straight);
    std::vector<std::string> batches;
    for (auto& batch : *straight) batches.push_back(ga::detail::fingerprint_of(batch));
    const auto rest = [](auto& range) {
      std::vector<std::string> lines;
      for (auto& batch : range) lines.push_back(ga::detail::fingerprint_of(batch));
      return lines;
    };
    for (std::int64_t done = 0; done <= static_cast<std::int64_t>(batches.size()); ++done) {
      INFO("after " << done);
      auto range = make();
      Prefetch stopped(*range, {.depth = 3});
      seen(stopped);
      auto saved = state_of(stopped);
      std::int64_t taken = 0;
      if (done > 0)
        for ([[maybe_unused]] auto& batch : stopped)
          if (saved = state_of(stopped); ++taken == done) break;
      const std::vector<std::string> expected(batches.begin() + done, batches.end());
      auto other = make(), plain = make();
      Prefetch resumed(*other);
      seen(resumed, 3);  // at another position, after a break
      load(resumed, saved);
      load(*plain, saved);
      CHECK(rest(*plain) == expected);
      CHECK(rest(resumed) == expected);
      CHECK(text_of(state_of(resumed)) == text_of(state_of(*plain)));
    }
  };
  check(tensor_batches);
  check(sequences);
  check(own<OwnWithState>);
}

TEST_CASE(
    "Prefetch: a state that is loaded inside a loop moves the loop there; one that does not fit changes nothing") {
  auto range = tensor_batches(), bare = tensor_batches();
  ga::Archive fourth, of_others;
  std::vector<std::string> batches;
  for (auto& batch : *bare) {
    batches.push_back(ga::detail::fingerprint_of(batch));
    if (batches.size() == 4) fourth = state_of(*bare);
  }
  ga::data::TensorBatches others(torch::ones({22, 4}), torch::ones({22, 3}), {.batch_size = 4});
  for ([[maybe_unused]] auto& batch : others) of_others = state_of(others);
  Prefetch ahead(*range, {.depth = 100});
  std::vector<std::string> taken;
  for (auto& batch : ahead) {
    taken.push_back(ga::detail::fingerprint_of(batch));
    const auto before = text_of(state_of(ahead));
    REQUIRE_ERROR("last_batch", load(ahead, of_others));
    CHECK(text_of(state_of(ahead)) == before);
    if (taken.size() == 2) load(ahead, fourth);
    if (taken.size() == 2) CHECK(text_of(state_of(ahead)) == text_of(fourth));
  }
  CHECK(taken == std::vector<std::string>{batches[0], batches[1], batches[4], batches[5]});
}

TEST_CASE("Prefetch: an exception of the range is thrown at its batch, and the range can be used again") {
  const auto run = [](auto& range, Own& own, std::int64_t at) {
    std::vector<std::string> lines;
    own.make = [at, thrown = std::make_shared<bool>(false)](std::int64_t number) {
      if (number == at && !std::exchange(*thrown, true)) throw std::invalid_argument("no batch " + std::to_string(at));
    };
    for (int loop = 0; loop < 3; ++loop) {
      try {
        for (auto& batch : range) lines.push_back(ga::detail::fingerprint_of(batch) + text_of(state_of(range)));
      } catch (const std::invalid_argument& error) {
        lines.push_back(error.what());
      }
      lines.push_back("then " + text_of(state_of(range)));
    }
    return lines;
  };
  for (std::int64_t at : {0, 1, 3, 5})
    for (std::int64_t depth : {1, 2, 100}) {
      INFO("at " << at << ", depth " << depth);
      OwnWithState bare, given;
      Prefetch ahead(given, {.depth = depth});
      CHECK(run(ahead, given, at) == run(bare, bare, at));
    }
}

TEST_CASE("Prefetch: a range whose begin() throws") {
  struct Broken {
    int* begin() { throw std::runtime_error("no beginning"); }
    int* end() { return nullptr; }
  };
  Broken broken;
  Prefetch ahead(broken);
  for (int i = 0; i < 2; ++i) REQUIRE_ERROR("no beginning", seen(ahead));
}

TEST_CASE("Prefetch: an exception in the loop ends the thread") {
  auto bare = tensor_batches(), range = tensor_batches();
  Prefetch ahead(*range);
  const auto fail = [](auto& batches) {
    for ([[maybe_unused]] auto& batch : batches) throw std::runtime_error("in the loop");
  };
  REQUIRE_ERROR("in the loop", fail(ahead));
  REQUIRE_ERROR("in the loop", fail(*bare));
  torch::manual_seed(0);
  const auto expected = seen(*bare);
  torch::manual_seed(0);
  CHECK(seen(ahead) == expected);
}

TEST_CASE("Prefetch: refused arguments and uses") {
  std::vector<at::Tensor> batches{torch::ones({1}), torch::ones({1})};
  REQUIRE_ERROR("Prefetch: depth must be >= 1, got 0", Prefetch(batches, {.depth = 0}));
  REQUIRE_ERROR("Prefetch: depth must be >= 1, got -1", Prefetch(batches, {.depth = -1}));
  Prefetch ahead(batches);
  const auto nested = [&] {
    for ([[maybe_unused]] auto& batch : ahead)
      for ([[maybe_unused]] auto& inner : ahead) break;
  };
  REQUIRE_ERROR("Prefetch: a second loop began inside the first", nested());
  CHECK(seen(ahead).size() == 3);  // usable afterwards
  struct Odd {
    int number = 0;
    at::Tensor tensor = {};
  };
  std::vector<Odd> odd(2);
  for ([[maybe_unused]] auto& batch : Prefetch(odd)) CHECK(batch.number == 0);
  REQUIRE_ERROR("give that class a member Batch to(at::Device) const", Prefetch(odd, {.device = at::kCPU}).begin());
}

TEST_CASE("Prefetch: batches that cannot be copied are moved out of an input range") {
  struct Single {
    std::unique_ptr<int> held = {};
    int count = 0;
    struct Iterator {
      Single* owner;
      std::unique_ptr<int>& operator*() const { return owner->held; }
      Iterator& operator++() {
        owner->held = std::make_unique<int>(++owner->count);
        return *this;
      }
      bool operator==(std::default_sentinel_t) const { return owner->count == 4; }
    };
    Iterator begin() { return ++Iterator{this}; }
    std::default_sentinel_t end() const { return {}; }
  };
  std::vector<int> taken;
  for (auto& number : Prefetch(Single(), {.depth = 2})) taken.push_back(*number);
  CHECK(taken == std::vector<int>{1, 2, 3});
}

TEST_CASE("Prefetch: prepares depth batches ahead, and no more") {
  for (std::int64_t depth : {1, 3}) {
    std::atomic<std::int64_t> made = 0;
    Own range;
    range.length = 8;
    range.make = [&made](std::int64_t) { ++made; };
    std::int64_t taken = 0;
    for ([[maybe_unused]] auto& batch : Prefetch(range, {.depth = depth})) {
      ++taken;
      wait_until([&] { return made == std::min<std::int64_t>(taken + depth, 8); });
      std::this_thread::sleep_for(std::chrono::milliseconds(2));  // enough time to prepare more
      CHECK(made == std::min<std::int64_t>(taken + depth, 8));
    }
    CHECK(taken == 8);
  }
}

TEST_CASE("Prefetch: the first batch is made by the loop's thread, the others by one thread, in the loop's modes") {
  const ThreadsAsBefore as_before;
  at::set_num_threads(2);
  struct Seen {
    std::thread::id thread;
    int threads;
    bool gradients, autocast;
  };
  std::vector<Seen> where;
  Own range;
  range.make = [&](std::int64_t) {
    where.push_back({std::this_thread::get_id(), at::get_num_threads(), at::GradMode::is_enabled(),
                     at::autocast::is_autocast_enabled(at::kCPU)});
    torch::ones({100000}).add_(1).sum();  // an operation that would be divided
  };
  Prefetch ahead(range, {.depth = 2});
  {
    const at::NoGradGuard no_gradients;
    for ([[maybe_unused]] auto& batch : ahead) CHECK(at::get_num_threads() == 2);
  }
  REQUIRE(where.size() == 6);
  CHECK(where[0].thread == std::this_thread::get_id());
  CHECK(where[0].threads == 2);
  for (std::size_t i = 1; i < where.size(); ++i) {
    CHECK(where[i].thread != where[0].thread);
    CHECK(where[i].thread == where[1].thread);
    CHECK(where[i].threads == 1);
  }
  for (auto& made : where) CHECK_FALSE(made.gradients);
  int of_another = 0;
  std::thread([&] { of_another = at::get_num_threads(); }).join();
  CHECK(of_another == 2);  // other threads are not affected
  where.clear();
  const ga::Autocast autocast(at::Device(at::kCPU), at::kBFloat16);
  for ([[maybe_unused]] auto& batch : ahead) CHECK(at::GradMode::is_enabled());
  for (auto& made : where) CHECK((made.gradients && made.autocast));
}

TEST_CASE("Prefetch: a meter around the loop counts what the thread allocates") {
  const auto inputs = torch::ones({64, 256}), targets = torch::ones({64});
  constexpr std::int64_t of_batch = 8 * 256 * 4;
  ga::data::TensorBatches batches(inputs, targets, {.batch_size = 8, .shuffle = true});
  const ga::MemoryMeter meter;
  {
    Prefetch ahead(batches, {.depth = 2});
    for (auto& batch : ahead) {
      CHECK(batch.data.nbytes() == of_batch);
      CHECK(meter.live_bytes() >= of_batch);
    }
    CHECK(meter.peak_bytes() >= 2 * of_batch);
    CHECK(meter.peak_bytes() < 3 * of_batch + of_batch / 2);  // targets, and the order
  }
  CHECK(meter.live_bytes() < of_batch);  // the order
}

TEST_CASE("Prefetch: a batch must not draw from the default generators ahead of the training") {
  const auto error_with = [](const std::function<void()>& draw, std::int64_t at, bool allow_draws = false) {
    Own range;
    range.make = [&](std::int64_t number) {
      if (number == at) draw();
    };
    std::int64_t taken = 0;
    const auto error = error_of([&] {
      for ([[maybe_unused]] auto& batch : Prefetch(range, {.depth = 2, .allow_draws = allow_draws})) ++taken;
    });
    CHECK(taken == (error.empty() ? 6 : at));  // thrown at its batch
    return error;
  };
  const auto x = torch::ones({10});
  auto generator = at::make_generator<at::CPUGeneratorImpl>(3);
  const std::vector<std::pair<std::string, std::function<void()>>> draws{
      {"aten::rand", [] { torch::rand({2}); }},
      {"aten::randn", [] { torch::randn({2}); }},
      {"aten::randint", [] { torch::randint(5, {2}); }},
      {"aten::randperm", [] { torch::randperm(5); }},
      {"aten::bernoulli", [&] { torch::bernoulli(x * 0.5); }},
      {"aten::uniform_", [&] { x.clone().uniform_(); }},
      {"aten::normal_", [&] { x.clone().normal_(); }},
      {"aten::", [&] { torch::dropout(x, 0.5, /*train=*/true); }},
      {"aten::multinomial", [&] { torch::multinomial(x, 2); }}};
  for (auto& [name, draw] : draws) {
    INFO(name);
    for (std::int64_t at : {1, 4}) {
      const auto error = error_with(draw, at);
      CHECK(contains(error, "must not draw from LibTorch's default generators"));
      CHECK(contains(error, name));
    }
    CHECK(error_with(draw, 0) == "");  // in the loop's thread, in order
    CHECK(error_with(draw, 3, /*allow_draws=*/true) == "");
  }
  const std::vector<std::function<void()>> others{[&] { torch::rand({2}, generator); },
                                                  [&] { torch::randperm(5, generator); },
                                                  [&] { torch::randint(5, {2}, generator); },
                                                  [&] { x.clone().uniform_(0, 1, generator); },
                                                  [&] { torch::dropout(x, 0.5, /*train=*/false); },
                                                  [&] { x.sum(); }};
  for (auto& draw : others) CHECK(error_with(draw, 2) == "");
}

TEST_CASE("Prefetch: loops can break anywhere, repeatedly") {
  auto bare = tensor_batches(), range = tensor_batches();
  for (std::int64_t depth : {1, 2, 5}) {
    Prefetch ahead(*range, {.depth = depth});
    for (std::int64_t i = 0; i < 60; ++i) {
      torch::manual_seed(i);
      const auto expected = seen(*bare, 1 + i % 7);
      torch::manual_seed(i);
      if (seen(ahead, 1 + i % 7) != expected) FAIL("loop " << i << " of depth " << depth);
    }
  }
  { Prefetch never_used(*range); }
  {
    Prefetch ahead(*range);
    auto first = ahead.begin();
    auto moved = std::move(first);
    CHECK((*moved).data.size(0) == 4);
    ++moved;
    CHECK(moved->data.size(0) == 4);
  }
}

namespace {

torch::nn::Sequential network() {
  return torch::nn::Sequential(torch::nn::Linear(4, 8), torch::nn::Dropout(0.3), torch::nn::Linear(8, 3));
}

/// Returns the loss of a batch of any type.
template <class Batch>
at::Tensor objective_of(torch::nn::Sequential& net, Batch& batch) {
  if constexpr (std::is_same_v<Batch, at::Tensor>)  // of Own
    return net->forward(batch / 100).square().mean();
  else if constexpr (requires { batch.lengths; })
    return torch::mse_loss(net->forward(batch.data).sum(1), batch.target);
  else if constexpr (requires { batch.target.sizes(); })
    return torch::mse_loss(net->forward(batch.data), batch.target);
  else  // from a DataLoader: data and target
    return torch::mse_loss(net->forward(batch.data.narrow(1, 0, 4)), batch.data.narrow(1, 4, 3));
}

struct Trained {
  Bits bits;
  std::int64_t boundaries = 0;
};

/// Trains in new objects, with other initial random numbers for each seed; resumes from the directory's state.
template <class MakeRange>
Trained train(const MakeRange& make, std::optional<ga::data::PrefetchOptions> options,
              const std::filesystem::path& directory, std::int64_t stop_after, std::uint64_t seed) {
  torch::manual_seed(seed);
  auto net = network();
  ga::optim::AdamW adamw(net->parameters(), ga::optim::AdamWOptions(1e-2));
  auto range = make();
  ga::Trainer trainer(
      net, adamw, [](auto& model, auto& batch) { return objective_of(model, batch); }, Stop{stop_after},
      ga::Accumulate{.steps = 2}, ga::SaveState{.directory = directory}, std::optional<ga::Progress>());
  const ga::FitOptions fit{.epochs = 2, .resume = directory};
  if (options)
    trainer.fit(Prefetch(*range, *options), fit);
  else
    trainer.fit(*range, fit);
  Trained trained;
  trained.bits.add_model(*net);
  trained.bits.add_optimizer(adamw, *net);
  trained.bits.add_generator();
  trained.boundaries = trainer.template policy<Stop>().seen;
  return trained;
}

template <class MakeRange>
void check_trains(const MakeRange& make, std::int64_t every) {
  const Directory directory;
  const auto bare = train(make, {}, directory / "bare", -1, 1);
  const auto straight = train(make, ga::data::PrefetchOptions(), directory / "straight", -1, 1);
  CHECK(difference(bare.bits, straight.bits) == "");
  CHECK(difference(bare.bits, train(make, {}, directory / "other", -1, 2).bits) != "");
  for (std::int64_t at = 1; at < straight.boundaries; at += every) {
    INFO("stopped after boundary " << at << " of " << straight.boundaries);
    for (const bool again : {true, false}) {  // resumes with and without Prefetch
      const auto path = directory / (std::to_string(at) + (again ? "a" : "b"));
      train(make, ga::data::PrefetchOptions{.depth = 1 + at % 4}, path, at, 1);
      const auto resumed =
          train(make, again ? std::optional(ga::data::PrefetchOptions{.depth = 3}) : std::nullopt, path, -1, 77);
      CHECK(difference(bare.bits, resumed.bits) == "");
    }
  }
}

}  // namespace

TEST_CASE("Prefetch: a training stopped anywhere and resumed is bitwise the same") {
  check_trains(tensor_batches, 1);
  check_trains(sequences, 3);
  check_trains(list, 4);
  check_trains(loader<0>, 2);
  check_trains(own<OwnWithState>, 2);
}

// The test above would not detect a wrong state that makes no difference, so a wrong one must make a difference.
TEST_CASE("Prefetch: a state that is one batch ahead changes the training") {
  const auto liar = [] {
    auto range = std::make_unique<OwnWithState>();
    range->lie = 1;
    return range;
  };
  const Directory directory;
  const ga::data::PrefetchOptions options;
  const auto straight = train(own<OwnWithState>, options, directory / "straight", -1, 1);
  train(liar, options, directory / "liar", 3, 1);
  const auto resumed = train(own<OwnWithState>, options, directory / "liar", -1, 77);
  CHECK(difference(straight.bits, resumed.bits) != "");
}

TEST_CASE("Prefetch: evaluation equals the range's") {
  auto range = sequences(), bare = sequences();
  torch::manual_seed(0);
  auto net = network();
  ga::optim::AdamW adamw(net->parameters(), ga::optim::AdamWOptions(1e-2));
  ga::Trainer trainer(
      net, adamw, [](auto& model, auto& batch) { return objective_of(model, batch); }, std::optional<ga::Progress>());
  Prefetch ahead(*range);
  CHECK(trainer.evaluate(ahead)["loss"] == trainer.evaluate(*bare)["loss"]);
}

TEST_CASE("Prefetch: copies batches to a device without waiting for it", "[cuda]") {
  if (!WaitCount::possible()) SKIP("needs the emulated device, which counts");
  const at::Device device(at::kCUDA, 0);
  const auto on_device = [&](const at::Tensor& tensor) { return tensor.device() == device; };
  auto bare = tensor_batches(), range = tensor_batches();
  std::vector<ga::data::Batch> taken;
  {
    Prefetch ahead(*range, {.device = device});
    for ([[maybe_unused]] auto& batch : ahead) break;  // initializes the device
    const WaitCount count;
    for (auto& batch : ahead) taken.push_back(batch);
    CHECK(count.waits() == 0);
  }
  for ([[maybe_unused]] auto& batch : *bare) break;
  std::size_t i = 0;
  for (auto& batch : *bare) {
    CHECK((on_device(taken.at(i).data) && on_device(taken[i].target)));
    CHECK(taken[i].data.cpu().equal(batch.data));
    CHECK(taken[i++].target.cpu().equal(batch.target));
  }
  CHECK(i == taken.size());
  auto texts = sequences();
  for (auto& batch : Prefetch(*texts, {.device = device})) {
    CHECK((on_device(batch.data) && on_device(batch.target)));
    CHECK((batch.lengths.is_cpu() && batch.indices.is_cpu()));
  }
  using Mixed = std::tuple<at::Tensor, std::vector<at::Tensor>, std::map<std::string, at::Tensor>, int, at::Tensor>;
  const std::vector<Mixed> mixed(3, {torch::ones({2}), {torch::ones({3})}, {{"a", torch::ones({4})}}, 7, {}});
  for (auto& [tensor, several, named, number, none] : Prefetch(mixed, {.device = device})) {
    CHECK((on_device(tensor) && on_device(several[0]) && on_device(named.at("a"))));
    CHECK(number == 7);
    CHECK_FALSE(none.defined());
  }
  CHECK(std::get<0>(mixed[0]).is_cpu());  // the range's batches are not moved
}

TEST_CASE("Prefetch: the thread works in the loop's stream and on its device", "[cuda]") {
  if (torch::cuda::device_count() < 2) SKIP("needs two CUDA devices");
  torch::ones({1}, at::Device(at::kCUDA, 1));  // initializes the device
  const c10::impl::VirtualGuardImpl devices(at::kCUDA);
  const at::Device device(at::kCUDA, 1);
  const c10::DeviceGuard current(device);
  const auto stream = devices.getNewStream(device);
  const auto before = devices.exchangeStream(stream);
  std::vector<bool> as_in_loop;
  Own range;
  range.make = [&](std::int64_t) {
    as_in_loop.push_back(devices.getDevice() == device && devices.getStream(device) == stream);
  };
  for ([[maybe_unused]] auto& batch : Prefetch(range)) continue;
  devices.exchangeStream(before);
  CHECK(as_in_loop == std::vector<bool>(6, true));
}

TEST_CASE("Prefetch: training on a device equals the range's", "[cuda]") {
  if (!torch::cuda::is_available()) SKIP("needs a CUDA device");
  const at::Device device(at::kCUDA, 0);
  const auto train_on_device = [&](auto&& batches) {
    torch::manual_seed(4);
    auto net = network();
    net->to(device);
    ga::optim::AdamW adamw(net->parameters(), ga::optim::AdamWOptions(1e-2));
    ga::Trainer trainer(
        net, adamw, [](auto& model, auto& batch) { return objective_of(model, batch); }, ga::Accumulate{.steps = 2},
        std::optional<ga::Progress>());
    trainer.fit(batches, {.epochs = 2});
    Bits bits;
    bits.add_model(*net);
    return bits;
  };
  const ga::data::TensorBatchesOptions options{.batch_size = 4, .shuffle = true, .seed = 1};
  ga::data::TensorBatches there(numbers({22, 4}, 1).to(device), numbers({22, 3}, 2).to(device), options);
  auto here = tensor_batches(), copy = tensor_batches();
  const auto expected = train_on_device(there);
  CHECK(difference(train_on_device(Prefetch(*here, {.device = device})), expected) == "");
  ga::data::TensorBatches again(numbers({22, 4}, 1).to(device), numbers({22, 3}, 2).to(device), options);
  CHECK(difference(train_on_device(Prefetch(again)), expected) == "");
}

TEST_CASE("Prefetch: failure to start a thread is an error that says so, and a later loop is complete") {
  ga::data::TensorBatches batches(torch::arange(12), torch::arange(12), {.batch_size = 2});
  Prefetch ahead(batches);
  std::int64_t seen = 0;
  const auto loop = [&] {
    for (auto& batch : ahead) seen += batch.data.size(0);
  };
  {
    const NoThreads none;
    REQUIRE_ERROR("Prefetch: must start a thread, but the system has none left (", loop());
  }
  seen = 0;
  loop();
  CHECK(seen == 12);
}
