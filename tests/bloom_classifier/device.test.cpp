// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include "demo.hpp"
#include "support/device.hpp"
#include "support/files.hpp"
#include "support/models.hpp"

#include <cstdint>
#include <set>
#include <string>
#include <vector>

namespace ga = gradaccum;

namespace {

/// A small model and its reviews, on a device.
struct OnDevice {
  testing::Directory directory;
  bloom::Options options;
  bloom::ModelFolder folder;
  bloom::EncodedReviews reviews;

  explicit OnDevice(const std::string& device)
      : options(options_for(device)),
        folder(bloom::open_model_folder(options.model, 2, device)),
        reviews(bloom::encode(folder.tokenizer, bloom::read_reviews(options).rows.train, 1024, device)) {}

  ga::data::LengthBuckets batches() const {
    return reviews.training_batches(4, folder.padding(), options.seed, options.length_multiple());
  }
  /// Runs a window's micro-batches.
  void backward(const bloom::Objective& objective = bloom::objective) {
    for (auto& batch : batches()) objective(folder.model, batch).mean.backward();
  }

 private:
  bloom::Options options_for(const std::string& device) const {
    bloom::make_demo_files(directory / "files", 40, 1);
    bloom::Options made;
    made.model = directory / "files";
    made.train = directory / "files/reviews.csv";
    made.device = device;
    return made;
  }
};

/// Counts the waits of a window with new lengths and gradients.
std::int64_t waits_of(bool sparse, const bloom::Objective& objective = bloom::objective) {
  OnDevice there("cuda");
  there.folder.model->transformer->sparse_embedding_gradient(sparse);
  const ga::Autocast autocast(at::kCUDA, at::kBFloat16);
  const testing::WaitCount count;
  there.backward(objective);
  return count.waits();
}

}  // namespace

TEST_CASE("bloom: defaults of lengths and of sparse gradients depend on the device, unless the user sets them") {
  bloom::Options options;
  options.device = "cpu";
  CHECK(options.length_multiple() == 1);
  CHECK(options.steps_by_rows());
  options.device = "cuda:1";
  CHECK(options.length_multiple() == 64);
  CHECK_FALSE(options.steps_by_rows());
  for (const std::int64_t given : {1, 16}) {
    options.pad_to_multiple_of = given;
    CHECK(options.length_multiple() == given);
  }
}

TEST_CASE("bloom: batches for scoring fit into memory for any padded length") {
  const bloom::EncodedReviews reviews{
      {torch::ones({90}, torch::kLong), torch::ones({70}, torch::kLong), torch::ones({5}, torch::kLong)},
      torch::zeros({3}, torch::kLong),
      165,
      90};
  std::multiset<std::int64_t> lengths;
  for (auto& batch : reviews.test_batches(/*most_tokens=*/100, /*padding=*/3, /*multiple=*/64))
    lengths.insert(batch.data.size(1));
  CHECK(lengths == std::multiset<std::int64_t>{64, 128, 128});
}

TEST_CASE("bloom: a window on a device has the CPU's gradients", "[cuda]") {
  if (!torch::cuda::is_available()) SKIP("needs a CUDA device");
  OnDevice here("cpu"), there("cuda");
  here.folder.model->transformer->sparse_embedding_gradient(true);
  for (auto* each : {&here, &there}) each->backward();
  const auto expected = here.folder.model->parameters(), found = there.folder.model->parameters();
  for (std::size_t i = 0; i < found.size(); ++i)
    CHECK(testing::distance(found[i].grad().cpu(), expected[i].grad().to_dense()) < 1e-4);
}

TEST_CASE("bloom: a device replays all steps as graphs without changing gradients", "[cuda]") {
  if (!torch::cuda::is_available() || !testing::has_graphs(at::kCUDA)) SKIP("needs a CUDA device with graphs");
  OnDevice plain("cuda"), graphed("cuda");
  const auto learned = bloom::training_objective(graphed.folder.model, graphed.options);
  for (int window = 0; window < 2; ++window) {
    plain.backward();
    graphed.backward(learned);
  }
  const auto expected = plain.folder.model->parameters(), found = graphed.folder.model->parameters();
  CHECK(testing::distance(found[0].grad(), expected[0].grad()) < 1e-5);  // summed by row
  for (std::size_t i = 1; i < found.size(); ++i) CHECK(at::equal(found[i].grad(), expected[i].grad()));
  const auto& report = learned.target<bloom::GraphedObjective>()->report();
  CHECK(report.replayed == 2 * graphed.batches().size());
  CHECK(report.eager == 0);
}

TEST_CASE("bloom: the host does not wait in a window on a device", "[cuda]") {
  if (!testing::WaitCount::possible()) SKIP("needs the emulated device, which counts");
  CHECK(waits_of(/*sparse=*/false) == 0);
  CHECK(waits_of(/*sparse=*/true) > 0);
  const bloom::Objective with_mask = [](auto& model, auto& batch) {
    const auto lengths = batch.lengths.to(at::kCUDA).unsqueeze(1);
    const auto scores = model->forward(batch.data, torch::arange(batch.data.size(1), lengths.options()) < lengths);
    return bloom::loss_of(scores, batch);
  };
  CHECK(waits_of(/*sparse=*/false, with_mask) > 0);
}
