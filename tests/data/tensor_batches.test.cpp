// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/data/tensor_batches.hpp>

namespace ga = gradaccum;

namespace {

std::vector<std::int64_t> rows_of(const at::Tensor& tensor) {
  const auto flat = tensor.to(at::kLong).contiguous();
  return {flat.data_ptr<std::int64_t>(), flat.data_ptr<std::int64_t>() + flat.numel()};
}

// Returns an epoch's rows in order; checks that inputs and targets match.
std::vector<std::int64_t> epoch_of(ga::data::TensorBatches& batches) {
  std::vector<std::int64_t> rows;
  for (auto& batch : batches) {
    CHECK(batch.target.equal(batch.data.select(1, 0) * 10));
    for (auto row : rows_of(batch.data.select(1, 0))) rows.push_back(row);
  }
  return rows;
}

ga::data::TensorBatches make(std::int64_t rows, ga::data::TensorBatchesOptions options) {
  const auto ids = torch::arange(rows, at::kFloat);
  return {torch::stack({ids, -ids}, 1), ids * 10, options};
}

std::vector<std::int64_t> sorted(std::vector<std::int64_t> rows) {
  std::sort(rows.begin(), rows.end());
  return rows;
}

const std::vector<std::int64_t> ten{0, 1, 2, 3, 4, 5, 6, 7, 8, 9};

}  // namespace

TEST_CASE("TensorBatches: in order, every row occurs once; the last batch is smaller or dropped") {
  auto batches = make(10, {.batch_size = 4});
  CHECK(batches.size() == 3);
  CHECK(epoch_of(batches) == ten);
  CHECK(epoch_of(batches) == ten);
  std::vector<std::int64_t> sizes;
  for (auto& batch : batches) sizes.push_back(batch.data.size(0));
  CHECK(sizes == std::vector<std::int64_t>{4, 4, 2});
  auto whole = make(10, {.batch_size = 4, .drop_last = true});
  CHECK(whole.size() == 2);
  CHECK(epoch_of(whole).size() == 8);
}

TEST_CASE("TensorBatches: shuffled, every row occurs once, in a new order every epoch, which depends on the seed") {
  auto a = make(10, {.batch_size = 3, .shuffle = true, .seed = 7}),
       b = make(10, {.batch_size = 5, .shuffle = true, .seed = 7});
  auto c = make(10, {.batch_size = 3, .shuffle = true, .seed = 8});
  const auto first = epoch_of(a), second = epoch_of(a);
  CHECK(sorted(first) == ten);
  CHECK(first != ten);
  CHECK(first != second);
  torch::manual_seed(0);        // the global generator has no influence
  CHECK(epoch_of(b) == first);  // nor has the batch size, so windows of small batches equal large batches
  CHECK(epoch_of(b) == second);
  const auto other = epoch_of(c);
  CHECK(other != first);
  CHECK(other != second);
}

TEST_CASE("TensorBatches: every bit of the seed matters") {
  auto a = make(10, {.shuffle = true, .seed = 5}),
       b = make(10, {.shuffle = true, .seed = 5 + (std::uint64_t{1} << 32)});
  CHECK(epoch_of(a) != epoch_of(b));
}

TEST_CASE("TensorBatches: a nested loop is refused; over a copy it is allowed") {
  auto batches = make(4, {.batch_size = 2});
  const auto nested = [&](ga::data::TensorBatches& inner) {
    int bodies = 0;
    for ([[maybe_unused]] auto& outer : batches)
      for ([[maybe_unused]] auto& batch : inner) ++bodies;
    return bodies;
  };
  REQUIRE_ERROR("TensorBatches: a second loop began inside the first", nested(batches));
  auto copy = batches;
  CHECK(nested(copy) == 4);
  STATIC_REQUIRE(std::input_iterator<decltype(std::declval<ga::data::TensorBatches&>().begin())>);
}

TEST_CASE("TensorBatches: does not disturb the global generator") {
  torch::manual_seed(3);
  const auto expected = torch::rand({2});
  torch::manual_seed(3);
  auto batches = make(10, {.shuffle = true});
  epoch_of(batches);
  CHECK(torch::rand({2}).equal(expected));
}

TEST_CASE("TensorBatches: after a break the next loop is the next epoch") {
  auto straight = make(10, {.batch_size = 2, .shuffle = true}), left = make(10, {.batch_size = 2, .shuffle = true});
  epoch_of(straight);
  for (auto& batch : left) {
    CHECK(batch.data.size(0) == 2);
    break;
  }
  CHECK(epoch_of(left) == epoch_of(straight));
}

TEST_CASE("TensorBatches: resumes from a saved state") {
  auto straight = make(10, {.batch_size = 2, .shuffle = true, .seed = 4});
  epoch_of(straight);
  const auto second = epoch_of(straight), third = epoch_of(straight);
  for (std::int64_t done = 0; done <= 5; ++done) {
    auto stopped = make(10, {.batch_size = 2, .shuffle = true, .seed = 4}), resumed = stopped;
    epoch_of(stopped);
    ga::data::TensorBatches::State state = stopped.state();
    std::int64_t seen = 0;
    if (done > 0)
      for ([[maybe_unused]] auto& batch : stopped)
        if (state = stopped.state(); ++seen == done) break;
    resumed.load_state(state);
    CHECK(epoch_of(resumed) == std::vector<std::int64_t>(second.begin() + 2 * done, second.end()));
    CHECK(epoch_of(resumed) == third);
  }
  REQUIRE_ERROR("a state's batch must be in [0, 5], got 6 in epoch 0", straight.load_state({0, 6}));
}

TEST_CASE("NamedTensorBatches: each named tensor has the same rows in the same order") {
  const ga::data::TensorBatchesOptions options{.batch_size = 4, .shuffle = true, .seed = 3};
  const auto x = torch::arange(10).reshape({10, 1}), y = torch::arange(10) * 2;
  ga::data::TensorBatches pairs(x, y, options);
  ga::data::NamedTensorBatches named({{"a", x}, {"b", y}, {"c", y + 1}}, options);
  CHECK(named.size() == 3);
  for (int epoch = 0; epoch < 2; ++epoch) {
    std::vector<std::map<std::string, at::Tensor>> got;
    for (auto& batch : named) got.push_back(batch);
    std::size_t next = 0;
    for (auto& batch : pairs) {
      REQUIRE(next < got.size());
      CHECK(at::equal(got[next].at("a"), batch.data));
      CHECK(at::equal(got[next].at("b"), batch.target));
      CHECK(at::equal(got[next++].at("c"), batch.target + 1));
    }
    CHECK(next == 3);
  }
  REQUIRE_ERROR("NamedTensorBatches: at least one tensor must be given, got none", ga::data::NamedTensorBatches({}));
  REQUIRE_ERROR("the same number of rows, got 10 and 9",
                ga::data::NamedTensorBatches({{"a", x}, {"b", y.narrow(0, 0, 9)}}));
}

TEST_CASE("TensorBatches: empty data, and refused arguments") {
  auto none = make(0, {.shuffle = true});
  CHECK(none.size() == 0);
  CHECK(epoch_of(none).empty());
  using ga::data::TensorBatches;
  REQUIRE_ERROR("the same number of rows, got 2 and 3", TensorBatches(torch::ones({2, 1}), torch::ones({3})));
  REQUIRE_ERROR("must have a first dimension", TensorBatches(torch::ones({}), torch::ones({1})));
  REQUIRE_ERROR("must have a first dimension", TensorBatches(at::Tensor(), torch::ones({1})));
  REQUIRE_ERROR("batch_size must be >= 1, got 0", TensorBatches(torch::ones({2}), torch::ones({2}), {.batch_size = 0}));
}

TEST_CASE("TensorBatches: without shuffling, a batch shares the memory of its tensors") {
  const auto inputs = torch::zeros({4, 2});
  ga::data::TensorBatches batches(inputs, torch::zeros({4}), {.batch_size = 2});
  CHECK(batches.begin()->data.data_ptr() == inputs.data_ptr());
}
