// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/data/length_buckets.hpp>
#include <gradaccum/data/tensor_batches.hpp>

#include <algorithm>
#include <limits>
#include <map>
#include <random>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace ga = gradaccum;
using ga::data::LengthBuckets, ga::data::LengthBucketsOptions, ga::data::SequenceBatch;

namespace {

using Numbers = std::vector<std::int64_t>;

Numbers numbers_of(const at::Tensor& tensor) {
  const auto flat = tensor.to(at::kLong).contiguous();
  return {flat.data_ptr<std::int64_t>(), flat.data_ptr<std::int64_t>() + flat.numel()};
}

// Makes lengths as of texts: most are short, a few are long.
Numbers text_lengths(std::size_t count, std::uint32_t seed, std::int64_t longest = 200) {
  std::mt19937 numbers(seed);
  Numbers lengths;
  while (lengths.size() < count) {
    const auto octave = std::int64_t{1} << (numbers() % 8);
    lengths.push_back(std::min<std::int64_t>(octave + static_cast<std::int64_t>(numbers()) % octave, longest));
  }
  return lengths;
}

// Makes sequence i with the values i * 1000, i * 1000 + 1, …, so that each element identifies its position. No value is
// 0, the padding.
std::vector<at::Tensor> sequences_of(const Numbers& lengths) {
  std::vector<at::Tensor> sequences;
  for (std::size_t i = 0; i < lengths.size(); ++i)
    sequences.push_back(torch::arange(lengths[i]) + static_cast<std::int64_t>(i + 1) * 1000);
  return sequences;
}

LengthBuckets make(const Numbers& lengths, LengthBucketsOptions options) {
  return {sequences_of(lengths), torch::arange(static_cast<std::int64_t>(lengths.size())) * 10, options};
}

std::vector<Numbers> epoch_of(LengthBuckets& buckets) {
  std::vector<Numbers> batches;
  for (auto& batch : buckets) batches.push_back(numbers_of(batch.indices));
  return batches;
}

Numbers joined(const std::vector<Numbers>& batches) {
  Numbers all;
  for (auto& batch : batches) all.insert(all.end(), batch.begin(), batch.end());
  return all;
}

Numbers sorted(Numbers numbers) {
  std::sort(numbers.begin(), numbers.end());
  return numbers;
}

Numbers up_to(std::size_t count) { return numbers_of(torch::arange(static_cast<std::int64_t>(count))); }

// Compares a batch with one made by hand, element by element.
void check_batch(const SequenceBatch& batch, const Numbers& lengths, std::int64_t padding = 0,
                 std::int64_t multiple = 1) {
  std::int64_t tokens = 0, longest = 0;
  for (auto length : numbers_of(batch.lengths)) tokens += length, longest = std::max(longest, length);
  while (longest % multiple != 0) ++longest;
  CHECK(batch.tokens == tokens);
  REQUIRE(batch.data.sizes() == at::IntArrayRef({batch.rows(), longest}));
  const auto indices = numbers_of(batch.indices), elements = numbers_of(batch.data);
  std::size_t wrong = 0, at = 0;
  for (std::size_t i = 0; i < indices.size(); ++i) {
    const auto length = lengths[static_cast<std::size_t>(indices[i])];
    wrong += batch.lengths[static_cast<std::int64_t>(i)].item<std::int64_t>() != length;
    wrong += batch.target[static_cast<std::int64_t>(i)].item<std::int64_t>() != indices[i] * 10;
    for (std::int64_t j = 0; j < longest; ++j)
      wrong += elements[at++] != (j < length ? (indices[i] + 1) * 1000 + j : padding);
  }
  CHECK(wrong == 0);
  CHECK(batch.lengths.device().is_cpu());
}

using Shapes = std::set<std::pair<std::int64_t, std::int64_t>>;

// Compares `summary()` with counts, batch by batch.
void check_summary(const LengthBuckets& buckets, std::size_t batches, const Shapes& shapes, std::int64_t tokens,
                   std::int64_t elements) {
  const auto summary = buckets.summary();
  CHECK(summary.batches == static_cast<std::int64_t>(batches));
  CHECK(summary.shapes == static_cast<std::int64_t>(shapes.size()));
  const auto share = static_cast<double>(elements - tokens) / static_cast<double>(std::max<std::int64_t>(elements, 1));
  CHECK(summary.padding == Approx(share).margin(1e-12));
}

std::string text_of(const LengthBuckets& buckets) {
  std::ostringstream text;
  text << buckets.summary();
  return text.str();
}

// Counts the elements of an epoch's batches, including padding.
template <class Batches>
std::int64_t elements_of(Batches& batches) {
  std::int64_t elements = 0;
  for (auto& batch : batches) elements += batch.data.numel();
  return elements;
}

}  // namespace

TEST_CASE(
    "LengthBuckets: any lengths, sizes and budgets: every sequence occurs once, padded correctly, within the budget") {
  std::mt19937 numbers(1);
  for (int round = 0; round < 60; ++round) {
    const auto lengths = text_lengths(numbers() % 90, static_cast<std::uint32_t>(numbers()));
    LengthBucketsOptions options{.shuffle = round % 3 != 0, .seed = numbers(), .padding = -7};
    options.mega_batch = 1 + numbers() % 60;
    if (round % 2 == 0)
      options.batch_size = 1 + numbers() % 20;
    else
      options.tokens = 200 + numbers() % 1000;
    INFO("round " << round << ", " << lengths.size() << " sequences, batch_size " << options.batch_size << ", tokens "
                  << options.tokens << ", mega_batch " << options.mega_batch);
    auto buckets = make(lengths, options);
    for (int epoch = 0; epoch < 2; ++epoch) {
      Numbers seen;
      std::int64_t batches = 0, smaller = 0;
      const auto size = buckets.size();
      for (auto& batch : buckets) {
        check_batch(batch, lengths, -7);
        CHECK(buckets.size() == size);
        for (auto i : numbers_of(batch.indices)) seen.push_back(i);
        if (options.tokens > 0) CHECK(batch.data.numel() <= options.tokens);
        if (options.batch_size > 0) CHECK(batch.rows() <= options.batch_size);
        smaller += batch.rows() < options.batch_size;
        ++batches;
      }
      CHECK(sorted(seen) == up_to(lengths.size()));
      CHECK(batches == size);
      CHECK(smaller <= 1);
    }
  }
}

TEST_CASE("LengthBuckets: padding is a fraction of random batches' padding, and near the minimum") {
  const auto lengths = text_lengths(3000, 3);
  std::int64_t tokens = 0;
  for (auto length : lengths) tokens += length;
  auto shuffled = make(lengths, {.batch_size = 10, .shuffle = true, .seed = 5}),
       least = make(lengths, {.batch_size = 10});
  auto finer = make(lengths, {.batch_size = 10, .shuffle = true, .seed = 5, .mega_batch = 5});

  std::int64_t random = 0;  // batches of 10 in random order, padded to the longest
  const auto all = torch::tensor(lengths);
  ga::data::TensorBatches anyhow(all, all, {.batch_size = 10, .shuffle = true, .seed = 5});
  for (auto& batch : anyhow) random += batch.data.numel() * batch.data.max().item<std::int64_t>();

  const auto ours = elements_of(shuffled), sorted = elements_of(least);
  CHECK(random > 2 * tokens);
  CHECK(static_cast<double>(ours) < 1.06 * static_cast<double>(tokens));
  CHECK(static_cast<double>(ours) < 1.06 * static_cast<double>(sorted));
  CHECK(sorted <= ours);
  CHECK(ours < elements_of(finer));  // larger mega-batches need less padding
}

TEST_CASE("LengthBuckets: a budget gives fewer batches than random order, and hardly more than the minimum") {
  const auto lengths = text_lengths(3000, 4);
  std::int64_t tokens = 0, random = 1, longest = 0, rows = 0;
  for (auto length : lengths) {
    tokens += length;
    longest = std::max(longest, length);
    if (++rows * longest <= 1000) continue;
    ++random, longest = length, rows = 1;
  }
  const auto size = make(lengths, {.tokens = 1000, .shuffle = true}).size();
  CHECK(static_cast<double>(size) * 1000 < 1.15 * static_cast<double>(tokens));
  CHECK(random > 2 * size);
}

TEST_CASE("LengthBuckets: seed and epoch alone determine the order of batches and their content") {
  const auto lengths = text_lengths(200, 5);
  auto a = make(lengths, {.batch_size = 8, .shuffle = true, .seed = 7}), b = a;
  auto c = make(lengths, {.batch_size = 8, .shuffle = true, .seed = 8});
  const auto first = epoch_of(a), second = epoch_of(a);
  torch::manual_seed(0);  // the global generator has no influence
  const auto expected = torch::rand({2});
  torch::manual_seed(0);
  CHECK(epoch_of(b) == first);
  CHECK(epoch_of(b) == second);
  CHECK(torch::rand({2}).equal(expected));
  CHECK(first != second);
  CHECK(epoch_of(c) != first);

  // The batches differ, not only their order.
  std::set<Numbers> of_first, in_both;
  for (auto& batch : first) of_first.insert(sorted(batch));
  for (auto& batch : second)
    if (of_first.count(sorted(batch))) in_both.insert(batch);
  CHECK(in_both.size() < first.size() / 4);
  // Batches are not ordered by length: about every other is longer than the one before.
  std::size_t longer = 0;
  for (std::size_t i = 1; i < first.size(); ++i) {
    const auto longest = [&](auto& batch) { return lengths[static_cast<std::size_t>(batch.front())]; };
    longer += longest(first[i]) > longest(first[i - 1]);
  }
  CHECK(longer > first.size() / 4);
  CHECK(longer < first.size() * 3 / 4);
}

TEST_CASE("LengthBuckets: padded to a multiple, batches have few lengths, and fit into the budget with padding") {
  std::vector<at::Tensor> sequences;
  for (std::int64_t length = 1; length <= 40; ++length)
    sequences.push_back(torch::full({length}, length, torch::kLong));
  const auto rows = torch::arange(40);
  for (const bool by_tokens : {false, true}) {
    ga::data::LengthBuckets buckets(sequences, rows,
                                    {.batch_size = by_tokens ? 0 : 3,
                                     .tokens = by_tokens ? 96 : 0,
                                     .shuffle = true,
                                     .padding = -1,
                                     .pad_to_multiple_of = 16});
    std::int64_t seen = 0;
    for (auto& batch : buckets) {
      const auto longest = batch.lengths.max().item<std::int64_t>(), width = batch.data.size(1);
      CHECK(width == (longest + 15) / 16 * 16);
      if (by_tokens) CHECK(batch.data.numel() <= 96);
      CHECK(batch.data.eq(-1).sum().item<std::int64_t>() == batch.data.numel() - batch.tokens);
      CHECK(batch.lengths.equal(std::get<0>(batch.lengths.sort(0, /*descending=*/true))));
      seen += batch.rows();
    }
    CHECK(seen == 40);
  }
  CHECK(testing::error_of([&] {
          ga::data::LengthBuckets(sequences, rows, {.batch_size = 3, .pad_to_multiple_of = 0});
        }) == "LengthBuckets: pad_to_multiple_of must be >= 1, got 0");
  CHECK(testing::error_of([&] {
          ga::data::LengthBuckets(sequences, rows, {.tokens = 40, .pad_to_multiple_of = 16});
        }).find("number 32 has length 48") != std::string::npos);
}

TEST_CASE("LengthBuckets: padded to a multiple, any epoch has a shape for each padded length and one more") {
  std::mt19937 numbers(12);
  bool was_smaller = false;
  for (int round = 0; round < 120; ++round) {
    auto lengths = text_lengths(numbers() % 150, static_cast<std::uint32_t>(numbers()), 1 + numbers() % 100);
    if (round % 5 == 0) lengths.insert(lengths.end(), 20, 1);
    LengthBucketsOptions options{.shuffle = round % 4 != 0, .seed = numbers(), .padding = -7};
    options.pad_to_multiple_of = 2 + numbers() % 30;
    options.mega_batch = 1 + numbers() % 6;
    const bool by_tokens = round % 3 != 0;
    (by_tokens ? options.tokens : options.batch_size) = by_tokens ? 130 + numbers() % 500 : 1 + numbers() % 20;
    options.world_size = 1 + round % 2;
    INFO("round " << round << ", " << lengths.size() << " sequences, multiple " << options.pad_to_multiple_of
                  << ", batch_size " << options.batch_size << ", tokens " << options.tokens << ", mega_batch "
                  << options.mega_batch);
    std::set<std::int64_t> widths;
    for (auto length : lengths) widths.insert((length + options.pad_to_multiple_of - 1) / options.pad_to_multiple_of);
    for (std::int64_t epoch = 0; epoch < 2; ++epoch) {
      Numbers seen;
      Shapes all_shapes;
      int smaller = 0;
      for (options.rank = 0; options.rank < options.world_size; ++options.rank) {
        auto buckets = make(lengths, options);
        buckets.load_state({epoch, 0});
        const auto asked = buckets;  // in the same epoch
        std::size_t batches = 0;
        std::int64_t tokens = 0, elements = 0;
        Shapes shapes;
        for (auto& batch : buckets) {
          check_batch(batch, lengths, -7, options.pad_to_multiple_of);
          const auto width = batch.data.size(1), full = by_tokens ? options.tokens / width : options.batch_size;
          CHECK(batch.rows() <= full);
          smaller += batch.rows() < full;
          shapes.insert({batch.rows(), width});
          for (auto i : numbers_of(batch.indices)) seen.push_back(i);
          ++batches, tokens += batch.tokens, elements += batch.data.numel();
        }
        check_summary(asked, batches, shapes, tokens, elements);
        all_shapes.merge(shapes);
      }
      CHECK(sorted(seen) == up_to(lengths.size()));
      CHECK(smaller <= 1);
      CHECK(all_shapes.size() <= widths.size() + 1);
      was_smaller = was_smaller || smaller == 1;
    }
  }
  CHECK(was_smaller);
}

TEST_CASE("LengthBuckets: texts of reviews' lengths have few shapes if padded to a multiple, and many otherwise") {
  const auto most = GENERATE(std::int64_t{256}, std::int64_t{512});
  auto generator = at::make_generator<at::CPUGeneratorImpl>(std::uint64_t{1});
  const auto drawn = torch::randn({6000}, generator).mul(0.6465).add(5.495).exp().clamp(1, most).to(at::kLong);
  const auto longest = torch::ones({most}, at::kLong);
  std::vector<at::Tensor> reviews;
  for (auto length : numbers_of(drawn)) reviews.push_back(longest.narrow(0, 0, length));
  const auto labels = torch::zeros({6000});
  for (LengthBucketsOptions options : {LengthBucketsOptions{.batch_size = 8}, LengthBucketsOptions{.batch_size = 32},
                                       LengthBucketsOptions{.tokens = 2048}, LengthBucketsOptions{.tokens = 8192}}) {
    options.shuffle = true;
    const LengthBuckets many(reviews, labels, options);
    CHECK(many.summary().shapes > 32);
    options.pad_to_multiple_of = most / 16;
    LengthBuckets few(reviews, labels, options);
    for (std::int64_t epoch = 0; epoch < 3; ++epoch) {
      few.load_state({epoch, 0});
      const auto found = few.summary();
      CHECK(found.shapes <= 17);
      CHECK(found.batches == few.size());
      CHECK(found.padding < 0.15);
      CHECK(found.padding > many.summary().padding);
    }
  }
}

TEST_CASE("LengthBuckets: an epoch in numbers, by hand") {
  // [1, 8], [1, 8], [2, 4], [1, 4]: 28 elements, 16 of them tokens.
  CHECK(text_of(make({3, 5, 1, 5, 2}, {.tokens = 8, .pad_to_multiple_of = 4})) ==
        "4 batches in 3 shapes, 42.9 % padding");
  CHECK(text_of(make({3, 5, 1, 5, 2}, {.batch_size = 2})) == "3 batches in 3 shapes, 5.9 % padding");
  CHECK(text_of(make({}, {.tokens = 8, .pad_to_multiple_of = 4})) == "0 batches in 0 shapes, 0.0 % padding");
  CHECK(text_of(make(Numbers(20, 1), {.tokens = 64, .shuffle = true, .pad_to_multiple_of = 8})) ==
        "3 batches in 2 shapes, 87.5 % padding");
  // Two of each length in any order: 2 rows of 8, 4 rows of 4; only the last mega-batch may have a smaller batch.
  Numbers lengths;
  for (int i = 0; i < 64; ++i) lengths.push_back(1 + i % 8);
  auto mixed = make(lengths, {.tokens = 16, .shuffle = true, .pad_to_multiple_of = 4, .mega_batch = 1});
  std::map<std::pair<std::int64_t, std::int64_t>, int> batches;
  for (auto& batch : mixed) ++batches[{batch.rows(), batch.data.size(1)}];
  const auto of_eight = batches[{2, 8}], of_four = batches[{4, 4}];
  CHECK(of_eight >= 16);
  CHECK(2 * of_eight + 4 * of_four >= 61);
  CHECK(batches.size() <= 3);

  // A target of another length is another shape; a rank counts its own.
  const std::vector<at::Tensor> labels{torch::ones({3}), torch::ones({2}), torch::ones({0})};
  const auto sequences = sequences_of({4, 4, 4});
  const LengthBuckets tagged(sequences, labels, {.batch_size = 1}),
      even(sequences, labels, {.batch_size = 1, .pad_to_multiple_of = 4}),
      second(sequences, labels, {.batch_size = 1, .rank = 1, .world_size = 2});
  CHECK(tagged.summary().shapes == 3);
  CHECK(even.summary().shapes == 2);
  CHECK(second.summary().batches == 1);
}

TEST_CASE("LengthBuckets: a list of few batches is shuffled, too") {
  const auto lengths = text_lengths(32, 6);
  auto buckets = make(lengths, {.batch_size = 4, .shuffle = true});
  const auto first = epoch_of(buckets);
  std::set<Numbers> batches;
  for (auto& batch : first) batches.insert(sorted(batch));
  for (auto& batch : epoch_of(buckets)) batches.insert(sorted(batch));
  CHECK(batches.size() > first.size());
}

TEST_CASE(
    "LengthBuckets: without shuffling, the longest comes first, ties stay in order, and results can be reordered") {
  const Numbers lengths{3, 5, 1, 5, 2};
  auto buckets = make(lengths, {.batch_size = 2});
  CHECK(epoch_of(buckets) == std::vector<Numbers>{{1, 3}, {0, 4}, {2}});
  CHECK(epoch_of(buckets) == std::vector<Numbers>{{1, 3}, {0, 4}, {2}});
  auto results = torch::zeros({5}, at::kLong);
  for (auto& batch : buckets) results.index_copy_(0, batch.indices, std::get<0>(batch.data.max(1)));
  CHECK(numbers_of(results) == Numbers{1002, 2004, 3000, 4004, 5001});
  auto by_tokens = make(lengths, {.tokens = 6});
  CHECK(epoch_of(by_tokens) == std::vector<Numbers>{{1}, {3}, {0, 4}, {2}});
}

TEST_CASE("LengthBuckets: drop_last leaves out the smaller batch, and no other") {
  const auto lengths = text_lengths(43, 7);
  auto whole = make(lengths, {.batch_size = 4, .shuffle = true, .drop_last = true});
  CHECK(whole.size() == 10);
  for (int epoch = 0; epoch < 3; ++epoch)
    for (auto& batch : epoch_of(whole)) CHECK(batch.size() == 4);
  auto exact = make(text_lengths(40, 7), {.batch_size = 4, .drop_last = true});
  CHECK(exact.size() == 10);
  CHECK(make(text_lengths(3, 7), {.batch_size = 4, .drop_last = true}).size() == 0);
  CHECK(make(lengths, {.batch_size = 4, .shuffle = true}).size() == 11);
}

TEST_CASE("LengthBuckets: token targets are padded separately, with their own lengths") {
  const auto sequences = sequences_of({2, 4, 3});
  const std::vector<at::Tensor> labels{torch::tensor({7, 8, 9}), torch::tensor({5}), torch::empty({0}, at::kLong)};
  LengthBuckets buckets(sequences, labels, {.batch_size = 3});
  const auto batch = *buckets.begin();
  CHECK(numbers_of(batch.indices) == Numbers{1, 2, 0});
  CHECK(batch.target.equal(torch::tensor({{5, -100, -100}, {-100, -100, -100}, {7, 8, 9}})));
  CHECK(numbers_of(batch.target_lengths) == Numbers{1, 0, 3});
  CHECK(numbers_of(batch.lengths) == Numbers{4, 3, 2});
  CHECK(batch.tokens == 9);

  // cross_entropy ignores this padding.
  const auto scores = torch::randn({3, 3, 10}, at::kDouble);
  const auto loss = torch::cross_entropy_loss(scores.flatten(0, 1), batch.target.flatten());
  const auto log = scores.log_softmax(-1);
  const auto expected = -(log[0][0][5] + log[2][0][7] + log[2][1][8] + log[2][2][9]) / 4;
  CHECK((loss - expected).abs().item<double>() < 1e-12);

  LengthBuckets none(sequences, std::vector<at::Tensor>(3, torch::empty({0}, at::kLong)), {.batch_size = 2});
  CHECK(none.begin()->target.sizes() == at::IntArrayRef({2, 0}));
  LengthBuckets other(sequences, labels, {.batch_size = 3, .target_padding = 1});
  CHECK(other.begin()->target[0].equal(torch::tensor({5, 1, 1})));
}

TEST_CASE("LengthBuckets: sequences of features, of 16 bits, of bool, and of any strides") {
  const auto table = torch::randn({6, 10});
  const auto strided = table.t().slice(0, 1, 8, 3), expanded = torch::ones({1, 6}).expand({5, 6});  // 3 rows; 5 rows
  REQUIRE(!strided.is_contiguous());
  LengthBuckets buckets({strided, expanded}, torch::zeros({2}), {.batch_size = 2, .padding = 0.5});
  const auto batch = *buckets.begin();
  CHECK(batch.data.sizes() == at::IntArrayRef({2, 5, 6}));
  CHECK(batch.data[0].equal(torch::ones({5, 6})));
  CHECK(batch.data[1].slice(0, 0, 3).equal(strided));
  CHECK(batch.data[1].slice(0, 3).equal(torch::full({2, 6}, 0.5)));

  for (auto dtype : {at::kHalf, at::kBFloat16, at::kDouble, at::kInt, at::kByte, at::kBool}) {
    LengthBuckets typed({torch::ones({1}, dtype), torch::ones({2}, dtype)}, torch::zeros({2}), {.batch_size = 2});
    CHECK(typed.begin()->data.equal(torch::tensor({{1, 1}, {1, 0}}).to(dtype)));
    CHECK(typed.begin()->data.scalar_type() == dtype);
  }
}

TEST_CASE("LengthBuckets: a batch has its own memory; sequences are not copied") {
  auto sequences = sequences_of({3, 3});
  auto targets = torch::zeros({2}, at::kLong);
  LengthBuckets buckets(sequences, targets, {.batch_size = 2});
  const auto batch = *buckets.begin();
  batch.data.zero_(), batch.target.fill_(9);
  CHECK(sequences[0].equal(torch::tensor({1000, 1001, 1002})));
  CHECK(targets.equal(torch::zeros({2}, at::kLong)));
  sequences[1].fill_(4);        // takes effect: the memory is shared
  sequences[0] = at::Tensor();  // no effect: the list was copied
  CHECK(buckets.begin()->data.equal(torch::tensor({{1000, 1001, 1002}, {4, 4, 4}})));
}

TEST_CASE("LengthBuckets: resumes from a saved state after every batch of an epoch") {
  const auto lengths = text_lengths(60, 8);
  for (const LengthBucketsOptions& options :
       {LengthBucketsOptions{.batch_size = 7, .shuffle = true, .seed = 4},
        LengthBucketsOptions{.tokens = 400, .shuffle = true, .seed = 4, .pad_to_multiple_of = 16, .mega_batch = 2},
        LengthBucketsOptions{.tokens = 400, .shuffle = true, .seed = 4}, LengthBucketsOptions{.batch_size = 7}}) {
    auto straight = make(lengths, options);
    epoch_of(straight);
    const auto second = epoch_of(straight), third = epoch_of(straight);
    for (std::size_t done = 0; done <= second.size(); ++done) {
      auto stopped = make(lengths, options), resumed = stopped;
      epoch_of(stopped);
      auto state = stopped.state();
      std::size_t seen = 0;
      if (done > 0)
        for ([[maybe_unused]] auto& batch : stopped)
          if (state = stopped.state(); ++seen == done) break;
      resumed.load_state(state);
      CHECK(resumed.size() == static_cast<std::int64_t>(second.size()));
      CHECK(epoch_of(resumed) ==
            std::vector<Numbers>(second.begin() + static_cast<std::ptrdiff_t>(done), second.end()));
      CHECK(epoch_of(resumed) == third);
    }
  }
}

TEST_CASE("LengthBuckets: predicted sizes of later epochs are correct") {
  const auto options = GENERATE(LengthBucketsOptions{.batch_size = 7, .shuffle = true},
                                LengthBucketsOptions{.batch_size = 7, .shuffle = true, .drop_last = true},
                                LengthBucketsOptions{.tokens = 300, .shuffle = true, .mega_batch = 3},
                                LengthBucketsOptions{.tokens = 300, .shuffle = true, .pad_to_multiple_of = 16},
                                LengthBucketsOptions{.tokens = 300});
  auto buckets = make(text_lengths(60, 8), options);
  std::vector<std::int64_t> told, found;
  for (std::int64_t ahead = 0; ahead < 6; ++ahead) told.push_back(buckets.most_batches(ahead));
  for (std::int64_t epoch = 0; epoch < 6; ++epoch) {
    CHECK(buckets.most_batches(5 - epoch) == told[5]);
    found.push_back(static_cast<std::int64_t>(epoch_of(buckets).size()));
  }
  CHECK(told == found);
}

TEST_CASE("LengthBuckets: a state of other data is refused, and changes nothing") {
  const auto lengths = text_lengths(40, 9);
  auto buckets = make(lengths, {.tokens = 300, .shuffle = true}), copy = buckets;
  const auto size = buckets.size();
  constexpr auto most = std::numeric_limits<std::int64_t>::max();
  REQUIRE_ERROR("LengthBuckets: a state's batch must be in [0, " + std::to_string(size) + "], got " +
                    std::to_string(size + 1) + " in epoch 0",
                buckets.load_state({0, size + 1}));
  REQUIRE_ERROR("got -1 in epoch 0", buckets.load_state({0, -1}));
  REQUIRE_ERROR("LengthBuckets: a state's epoch must be >= 0 and have a next one, got -2", buckets.load_state({-2, 0}));
  REQUIRE_ERROR("must be >= 0 and have a next one", buckets.load_state({most, 0}));
  REQUIRE_ERROR("got " + std::to_string(most) + " in epoch 5", buckets.load_state({5, most}));
  gradaccum::Archive saved;
  buckets.state(saved);
  const auto load_from_two = [&](const gradaccum::Archive::Value& batch_of_rank_1) {
    gradaccum::Archive archive(saved.values());
    gradaccum::Archive::Ranks ranks{.saved = 2, .loading = 1, .values = saved.values()};
    ranks.values["rank_1.batch"] = batch_of_rank_1;
    archive.set_ranks(std::move(ranks));
    buckets.state(archive);
  };
  for (const std::int64_t batch : {std::int64_t{-1}, most / 2, most})
    REQUIRE_ERROR("LengthBuckets: a state's batch must be >= 0 and fit into an epoch, got " + std::to_string(batch),
                  load_from_two(batch));
  REQUIRE_ERROR("Archive: the value 'rank_1.batch' must be a whole number, got a text",
                load_from_two(std::string("1")));
  CHECK(buckets.size() == size);
  CHECK(epoch_of(buckets) == epoch_of(copy));

  // If a load is refused in the middle of a loop, the loop continues unchanged.
  auto half = make(lengths, {.tokens = 300, .shuffle = true}), other = half;
  std::vector<Numbers> batches;
  for (auto& batch : half) {
    batches.push_back(numbers_of(batch.indices));
    REQUIRE_ERROR("in epoch 3", half.load_state({3, most}));
  }
  CHECK(batches == epoch_of(other));
  buckets.load_state({most - 1, 0});
  CHECK(sorted(joined(epoch_of(buckets))) == up_to(40));
}

TEST_CASE("LengthBuckets: one loop runs at a time except over copies; after a break the next epoch follows") {
  const auto lengths = text_lengths(40, 10);
  auto buckets = make(lengths, {.batch_size = 4, .shuffle = true}), straight = buckets;
  const auto nested = [&](LengthBuckets& inner) {
    int bodies = 0;
    for ([[maybe_unused]] auto& outer : buckets)
      for ([[maybe_unused]] auto& batch : inner) ++bodies;
    return bodies;
  };
  REQUIRE_ERROR("LengthBuckets: a second loop began inside the first; give it a copy", nested(buckets));
  auto copy = buckets;
  CHECK(nested(copy) == 100);
  STATIC_REQUIRE(std::input_iterator<decltype(std::declval<LengthBuckets&>().begin())>);

  auto left = straight;
  epoch_of(straight);
  for ([[maybe_unused]] auto& batch : left) break;
  CHECK(epoch_of(left) == epoch_of(straight));
}

TEST_CASE("LengthBuckets: a part of a batch equals the batch of its sequences") {
  auto whole = make({6, 5, 3, 2}, {.batch_size = 4});
  const auto part = whole.begin()->narrow(2, 2);
  check_batch(part, {6, 5, 3, 2});
  CHECK(part.data.sizes() == at::IntArrayRef({2, 3}));
  const std::vector<at::Tensor> labels{torch::ones({4}), torch::ones({1}), torch::ones({2})};
  LengthBuckets tagged(sequences_of({3, 2, 1}), labels, {.batch_size = 3});
  const auto tail = tagged.begin()->narrow(1, 2);
  CHECK(tail.target.equal(torch::tensor({{1, -100}, {1, 1}}, at::kFloat)));
  CHECK(numbers_of(tail.target_lengths) == Numbers{1, 2});
  CHECK(tagged.begin()->narrow(1, 0).rows() == 0);

  // Parts are padded to the multiple, too, so that they have few shapes.
  auto padded = make({9, 5, 3, 2}, {.batch_size = 4, .pad_to_multiple_of = 4});
  check_batch(padded.begin()->narrow(2, 2), {9, 5, 3, 2}, 0, 4);
  check_batch(slice(*padded.begin(), 1, 3), {9, 5, 3, 2}, 0, 4);
  const LengthBucketsOptions of_labels{.batch_size = 3, .pad_to_multiple_of = 3};
  const auto last = LengthBuckets(sequences_of({3, 2, 1}), labels, of_labels).begin()->narrow(1, 2);
  CHECK(last.target.equal(torch::tensor({{1, -100, -100}, {1, 1, -100}}, at::kFloat)));
}

TEST_CASE("LengthBuckets: empty data, and refused arguments") {
  for (auto shuffle : {false, true}) {
    auto none = make({}, {.batch_size = 4, .shuffle = shuffle});
    CHECK(none.size() == 0);
    CHECK(epoch_of(none).empty());
  }
  const auto buckets = [](std::vector<at::Tensor> sequences, LengthBucketsOptions options = {.batch_size = 2}) {
    const auto rows = torch::zeros({static_cast<std::int64_t>(sequences.size())});
    return LengthBuckets(std::move(sequences), rows, options);
  };
  const auto one = torch::ones({3}, at::kLong);
  REQUIRE_ERROR("exactly one of batch_size and tokens must be given and >= 1, got 0 and 0", buckets({one}, {}));
  REQUIRE_ERROR("got 2 and 8", buckets({one}, {.batch_size = 2, .tokens = 8}));
  REQUIRE_ERROR("got -1 and 0", buckets({one}, {.batch_size = -1}));
  REQUIRE_ERROR("got -1 and 4", buckets({one}, {.batch_size = -1, .tokens = 4}));
  REQUIRE_ERROR("mega_batch must be >= 1, got 0", buckets({one}, {.batch_size = 1, .mega_batch = 0}));
  REQUIRE_ERROR("drop_last must come with batch_size", buckets({one}, {.tokens = 8, .drop_last = true}));
  REQUIRE_ERROR("must fit into tokens = 4, but number 1 has length 9; truncate it, remove it, or raise tokens",
                buckets({one, torch::ones({9}, at::kLong)}, {.tokens = 4}));
  REQUIRE_ERROR("must have an element, but number 1 has none; remove it", buckets({one, torch::ones({0}, at::kLong)}));
  REQUIRE_ERROR("sequences must be alike except for their length; number 0 is Long [3] on cpu, number 1 is Float [3]",
                buckets({one, torch::ones({3})}));
  REQUIRE_ERROR("number 1 is Long [3, 2]", buckets({one, torch::ones({3, 2}, at::kLong)}));
  REQUIRE_ERROR("must have a first dimension, their length; number 1 has none", buckets({one, torch::ones({})}));
  REQUIRE_ERROR("number 0 has none", buckets({at::Tensor()}));
  REQUIRE_ERROR("padding must fit the dtype that it pads, Long, got 0.5",
                buckets({one}, {.batch_size = 1, .padding = 0.5}));
  REQUIRE_ERROR("as many targets as sequences, 1, got 2", LengthBuckets({one}, torch::ones({2}), {.batch_size = 1}));
  REQUIRE_ERROR("targets must have a first dimension", LengthBuckets({one}, at::Tensor(), {.batch_size = 1}));
  REQUIRE_ERROR("targets must have a first dimension", LengthBuckets({one}, torch::ones({}), {.batch_size = 1}));
  const std::vector<at::Tensor> bytes{torch::ones({3}, at::kByte)}, both{one, one};
  REQUIRE_ERROR("target_padding must fit the dtype that it pads, Byte, got -100",
                LengthBuckets({one}, bytes, {.batch_size = 1}));
  REQUIRE_ERROR("as many targets as sequences, 1, got 2", LengthBuckets({one}, both, {.batch_size = 1}));
}

TEST_CASE("LengthBuckets: sequences on a device have their lengths on the CPU", "[cuda]") {
  if (!torch::cuda::is_available()) SKIP("needs a CUDA device");
  const auto lengths = text_lengths(40, 11);
  auto sequences = sequences_of(lengths);
  for (auto& sequence : sequences) sequence = sequence.cuda();
  const auto rows = torch::arange(40).mul(10).cuda();
  const LengthBucketsOptions options{.tokens = 400, .shuffle = true};
  LengthBuckets there(sequences, rows, options), tokens(sequences, sequences, options);
  auto here = make(lengths, options);
  auto expected = here.begin();
  auto padded = tokens.begin();
  for (auto& batch : there) {
    CHECK(batch.data.is_cuda());
    CHECK(batch.lengths.device().is_cpu());
    CHECK(batch.indices.equal(expected->indices));
    CHECK(batch.data.cpu().equal(expected->data));
    CHECK(batch.target.cpu().equal(expected->target));
    CHECK(padded->target.where(padded->target.ne(-100), 0).equal(batch.data));
    ++expected, ++padded;
  }
  CHECK(expected == here.end());
}
