// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/memory_meter.hpp>

#include "bloom_classifier/model_cases.hpp"

#include <cmath>
#include <set>

#include "support/models.hpp"

namespace ga = gradaccum;
using namespace testing;
using bloom::BloomForSequenceClassification;

namespace {

constexpr auto all_paddings = {"none", "left", "right", "left_without_mask", "holes", "long"};

/// Returns the largest error of a gradient, relative to the tensor's largest number.
double gradient_error(BloomForSequenceClassification& model, const PythonModel& python, const std::string& padding) {
  model->zero_grad();
  python.loss(model, padding).backward();
  double error = 0;
  for (auto& item : model->named_parameters())
    error = std::max(error, distance(item.value().grad(), python[padding + ".gradients." + item.key()]));
  return error;
}

/// Changes rows of the first block's fused weight and bias, [n_head, 3, head_dim].
template <class Change>
void change_first_attention(BloomForSequenceClassification& model, Change&& change) {
  const at::NoGradGuard no_grad;
  auto& attention = model->transformer->h[0]->as<bloom::BloomBlock>()->self_attention;
  const auto n_head = model->config().n_head, head_dim = model->config().head_dim();
  for (auto parameter : {attention->query_key_value->weight, attention->query_key_value->bias})
    parameter.copy_(change(parameter.clone().unflatten(0, {n_head, 3, head_dim})).reshape(parameter.sizes()));
}

}  // namespace

TEST_CASE("BLOOM: scores and loss equal those of transformers") {
  for (auto* name : python_models) {
    const PythonModel python(name);
    auto model = python.load();
    for (auto* padding : all_paddings) {
      INFO(name << ", " << padding);
      CHECK(difference(python.logits(model, padding), python[std::string(padding) + ".logits"]) <= 1e-5);
      const auto loss = python[std::string(padding) + ".loss"];
      CHECK(distance(python.loss(model, padding).detach(), loss) <= 1e-5);
    }
  }
}

TEST_CASE("BLOOM: all gradients equal those of transformers") {
  for (auto* name : python_models) {
    const PythonModel python(name);
    auto model = python.load();
    for (auto* padding : {"none", "left", "right"}) {
      INFO(name << ", " << padding);
      CHECK(gradient_error(model, python, padding) <= 1e-4);
    }
  }
}

TEST_CASE("BLOOM: a model with one difference has other scores") {
  const auto change_queries = [](double factor) {
    return [factor](at::Tensor fused) {
      fused.select(1, 0).mul_(factor);
      return fused;
    };
  };
  for (auto* name : python_models) {
    const PythonModel python(name);
    const auto error_after = [&](auto&& change) {
      auto model = python.load();
      change_first_attention(model, change);
      return difference(python.logits(model, "left"), python["left.logits"]);
    };
    INFO(name);
    CHECK(error_after([](at::Tensor fused) { return fused; }) <= 1e-5);
    // Query, key and value as the outer dimension, heads as the inner.
    CHECK(error_after([](at::Tensor fused) { return fused.transpose(0, 1); }) > 0.05);
    // No scale.
    CHECK(error_after(change_queries(std::sqrt(python.load()->config().head_dim()))) > 0.05);
    // No attention except ALiBi's.
    CHECK(error_after(change_queries(0)) > 0.01);
  }
}

TEST_CASE("BLOOM: heads with swapped slopes have other scores") {
  for (auto* name : python_models) {
    const PythonModel python(name);
    auto model = python.load();
    // Reverses the heads in all weights that read and write them, so only their slopes differ.
    change_first_attention(model, [](at::Tensor fused) { return fused.flip(0); });
    const at::NoGradGuard no_grad;
    auto weight = model->transformer->h[0]->as<bloom::BloomBlock>()->self_attention->dense->weight;
    weight.copy_(weight.clone().unflatten(1, {model->config().n_head, -1}).flip(1).reshape(weight.sizes()));
    INFO(name);
    CHECK(difference(python.logits(model, "left"), python["left.logits"]) > 0.01);
  }
}

TEST_CASE("BLOOM: ten steps of AdamW equal Python's") {
  constexpr double learning_rate = 1e-3;
  for (auto* name : python_models) {
    const PythonModel python(name);
    auto model = python.load();
    torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(learning_rate).weight_decay(1e-2));
    std::vector<at::Tensor> losses;
    for (int step = 0; step < 10; ++step) {
      auto loss = python.loss(model, "left");
      optimizer.zero_grad();
      loss.backward();
      optimizer.step();
      losses.push_back(loss.detach());
    }
    INFO(name);
    CHECK(((torch::stack(losses) - python["losses"]) / python["losses"]).abs().max().item<double>() <= 1e-4);
    for (auto& item : model->named_parameters()) {
      INFO(item.key());
      const auto error = (item.value().detach() - python["trained." + item.key()]).abs() / item.value().abs().max();
      if (!item.key().ends_with("query_key_value.bias")) {
        CHECK(error.max().item<double>() <= 1e-4);
        continue;
      }
      // The keys' bias cancels in softmax. Its gradient is a rounding error, which AdamW turns into full steps.
      const auto parts = error.unflatten(0, {model->config().n_head, 3, -1});
      for (auto part : {0, 2}) CHECK(parts.select(1, part).max().item<double>() <= 1e-4);
      CHECK(parts.select(1, 1).max().item<double>() <= 20 * learning_rate / item.value().abs().max().item<double>());
    }
  }
}

TEST_CASE("BLOOM: dropout drops the same elements as Python's") {
  if (!at::hasMKL()) SKIP("LibTorch without MKL draws other random numbers");
  const PythonModel python("heads_3");
  auto model = python.load();
  model->train();
  auto& transformer = model->transformer;
  const auto hidden = transformer->word_embeddings_layernorm(transformer->word_embeddings(python.ids("none")));
  const auto& block = transformer->h[0]->as<bloom::BloomBlock>();
  torch::manual_seed(7);
  CHECK(difference(block->forward(hidden), python["dropout.hidden"]) <= 1e-5);
  CHECK(difference(block->forward(hidden), python["dropout.hidden"]) > 0.1);  // with other random numbers
}

TEST_CASE("BLOOM: the last block's dropout acts in training only") {
  const PythonModel python("heads_3");
  auto model = python.load();
  CHECK(torch::equal(python.logits(model, "right"), python.logits(model, "right")));
  model->train();
  auto& block = *model->transformer->h[1]->as<bloom::BloomBlock>();
  const auto hidden = torch::randn({2, 9, 12}), index = torch::tensor({3, 8});
  CHECK_FALSE(torch::equal(block.forward_at(hidden, index), block.forward_at(hidden, index)));
  block.eval();
  CHECK(torch::equal(block.forward_at(hidden, index), block.forward_at(hidden, index)));
}

TEST_CASE("BLOOM: computing one token of a block equals computing all") {
  for (auto* name : python_models) {
    const PythonModel python(name);
    auto model = python.load();
    auto& block = *model->transformer->h[1]->as<bloom::BloomBlock>();
    const auto hidden = torch::randn({3, 9, model->config().hidden_size}), index = torch::tensor({0, 8, 5});
    const auto all = block.forward(hidden), one = block.forward_at(hidden, index);
    INFO(name);
    for (int row = 0; row < 3; ++row) {
      const auto token = index[row].item<std::int64_t>();
      CHECK(difference(one[row][0], all[row][token]) <= 1e-5);
      CHECK(difference(one[row][0], all[row][(token + 1) % 9]) > 0.1);
    }
  }
}

TEST_CASE("BLOOM: a sequence has the same scores alone and with longer ones") {
  for (auto* name : python_models) {
    const PythonModel python(name);
    auto model = python.load();
    const auto together = python.logits(model, "left");
    const auto ids = python.ids("left"), mask = python.mask("left");
    for (std::int64_t row = 0; row < ids.size(0); ++row) {
      const auto alone = model->forward(ids[row].masked_select(mask[row].to(at::kBool)).unsqueeze(0));
      INFO(name << ", row " << row);
      CHECK(difference(alone[0], together[row]) <= 1e-5);
    }
    const auto other_padding = python.logits(model, "right");
    CHECK(torch::equal(other_padding, together));
  }
}

namespace {

/// Rows of different lengths, padded at the right and packed.
struct PackedRows {
  at::Tensor ids, mask, packed, lengths = torch::tensor({9, 1, 30, 12, 12});

  explicit PackedRows(std::int64_t words) {
    torch::manual_seed(5);
    mask = torch::arange(30) < lengths.unsqueeze(1);
    ids = torch::randint(words, {5, 30});
    packed = ids.masked_select(mask);
  }
};

/// Returns the scores and the gradients of the loss.
std::vector<at::Tensor> outcome_of(BloomForSequenceClassification& model, const at::Tensor& scores) {
  model->zero_grad();
  torch::cross_entropy_loss(scores, torch::tensor({0, 1, 1, 0, 1})).backward();
  std::vector<at::Tensor> all{scores.detach()};
  for (auto& parameter : model->parameters()) all.push_back(parameter.grad().clone());
  return all;
}

}  // namespace

TEST_CASE("BLOOM: packed rows have the scores and gradients of padded ones") {
  for (const bool post_norm : {false, true}) {
    torch::manual_seed(1);
    BloomForSequenceClassification model(bloom::BloomConfig{.vocab_size = 50,
                                                            .hidden_size = 24,
                                                            .n_layer = 3,
                                                            .n_head = 6,
                                                            .initializer_range = 0.3,
                                                            .apply_residual_connection_post_layernorm = post_norm});
    model->to(at::kDouble);
    const PackedRows rows(50);
    const auto padded = outcome_of(model, model->forward(rows.ids, rows.mask));
    const auto packed = outcome_of(model, model->forward_packed(rows.packed, rows.lengths));
    for (std::size_t i = 0; i < padded.size(); ++i) CHECK(torch::allclose(packed[i], padded[i], 1e-10, 1e-12));
    const auto others = outcome_of(model, model->forward_packed(rows.packed, torch::tensor({10, 1, 29, 12, 12})));
    CHECK_FALSE(torch::allclose(others[0], padded[0], 1e-4, 1e-4));
    for (const auto& options : {ga::CheckpointedSequentialOptions{.segments = 2},
                                ga::CheckpointedSequentialOptions{.memory_budget = ga::MiB}}) {
      model->checkpoint_blocks(options);
      const auto again = outcome_of(model, model->forward_packed(rows.packed, rows.lengths));
      for (std::size_t i = 0; i < packed.size(); ++i) CHECK(torch::equal(again[i], packed[i]));
    }
  }
}

TEST_CASE("BLOOM: packed rows are checked") {
  BloomForSequenceClassification model(
      bloom::BloomConfig{.vocab_size = 10, .hidden_size = 8, .n_layer = 1, .n_head = 2});
  const auto ids = torch::ones({5}, at::kLong);
  CHECK(model->forward_packed(ids, torch::tensor({2, 3})).sizes() == at::IntArrayRef({2, 2}));
  REQUIRE_ERROR("packed input_ids must be int64", model->forward_packed(ids.unsqueeze(0), torch::tensor({5})));
  REQUIRE_ERROR("packed input_ids must be int64", model->forward_packed(torch::ones({5}), torch::tensor({5})));
  REQUIRE_ERROR("that add up to the packed tokens, 5", model->forward_packed(ids, torch::tensor({2, 2})));
  REQUIRE_ERROR("that add up to the packed tokens, 5", model->forward_packed(ids, torch::tensor({5, 0})));
  REQUIRE_ERROR("that add up to the packed tokens, 5", model->forward_packed(ids, torch::tensor({5}, at::kInt)));
}

namespace {

const bloom::BloomConfig five_layers{
    .vocab_size = 50, .hidden_size = 32, .n_layer = 5, .n_head = 4, .hidden_dropout = 0.1, .attention_dropout = 0.1};

// Returns loss and gradients of a second step, because the first one plans if there is a budget.
std::vector<at::Tensor> checkpointed(const std::optional<ga::CheckpointedSequentialOptions>& options) {
  torch::manual_seed(1);
  BloomForSequenceClassification model(five_layers);
  if (options) model->checkpoint_blocks(*options);
  const auto ids = torch::randint(50, {2, 40}), labels = torch::tensor({0, 1});
  std::vector<at::Tensor> results;
  for (int step = 0; step < 2; ++step) {
    model->zero_grad();
    torch::manual_seed(3);
    const auto loss = torch::cross_entropy_loss(model->forward(ids), labels);
    loss.backward();
    results = {loss.detach()};
    for (auto& parameter : model->parameters()) results.push_back(parameter.grad().clone());
  }
  return results;
}

bool equal(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](const at::Tensor& x, const at::Tensor& y) { return torch::equal(x, y); });
}

std::int64_t peak_of_step(const std::optional<ga::CheckpointedSequentialOptions>& options) {
  auto config = five_layers;
  config.attention_dropout = 0;
  BloomForSequenceClassification model(config);
  if (options) model->checkpoint_blocks(*options);
  const auto ids = torch::randint(50, {2, 256}), labels = torch::tensor({0, 1});
  const auto step = [&] { torch::cross_entropy_loss(model->forward(ids), labels).backward(); };
  step();  // plans
  const ga::MemoryMeter meter;
  step();
  return meter.peak_bytes();
}

}  // namespace

TEST_CASE("BLOOM: a checkpointed model is bitwise the plain one") {
  const auto plain = checkpointed({});
  CHECK(equal(checkpointed({{.segments = 2}}), plain));
  CHECK(equal(checkpointed({{.segments = 4}}), plain));
  CHECK(equal(checkpointed({{.memory_budget = ga::MiB}}), plain));
  auto other = plain;
  other.back() = other.back() + 1e-7;
  CHECK_FALSE(equal(other, plain));
}

TEST_CASE("BLOOM: checkpointed blocks need less memory, and keep a budget") {
  const auto plain = peak_of_step({});
  CHECK(peak_of_step({{.segments = 4}}) < 0.6 * plain);
  CHECK(peak_of_step({{.memory_budget = 3 * ga::MiB}}) < 0.6 * plain);
}

TEST_CASE("BLOOM: a checkpointed model has the same parameters, once, and a plan") {
  BloomForSequenceClassification model(five_layers);
  const auto names = model->named_parameters().keys();
  REQUIRE_ERROR("checkpoint_blocks must be called before", model->checkpoint_plan());
  REQUIRE_ERROR("segments must be 1 to 4", model->checkpoint_blocks({.segments = 5}));
  model->checkpoint_blocks({.segments = 2});
  CHECK(model->named_parameters().keys() == names);
  CHECK(names.size() == std::set<std::string>(names.begin(), names.end()).size());
  CHECK_FALSE(model->checkpoint_plan().schedule.empty());
}

TEST_CASE("BLOOM: saved weights load, with the same scores") {
  const PythonModel python("heads_6");
  auto model = python.load();
  const auto path = std::filesystem::temp_directory_path() / ("bloom." + std::to_string(::getpid()) + ".safetensors");
  ga::io::save_weights(model, path);
  BloomForSequenceClassification loaded(model->config());
  loaded->eval();
  CHECK(difference(python.logits(loaded, "left"), python["left.logits"]) > 0.05);
  ga::io::load_weights(loaded, path);
  CHECK(torch::equal(python.logits(loaded, "left"), python.logits(model, "left")));
  CHECK(ga::io::SafetensorsFile(path).keys() == ga::io::SafetensorsFile(python.folder / "model.safetensors").keys());
  std::filesystem::remove(path);
}

TEST_CASE("BLOOM: new weights are normal, biases zero") {
  torch::manual_seed(1);
  const BloomForSequenceClassification model(
      bloom::BloomConfig{.vocab_size = 500, .hidden_size = 64, .n_layer = 1, .n_head = 4, .initializer_range = 0.05});
  CHECK(model->config().parameter_count() == flat(model).numel());
  for (auto& item : model->named_parameters()) {
    const auto name = item.key();
    const auto value = item.value().detach();
    const bool norm = contains(name, "layernorm") || contains(name, "ln_f");
    INFO(name);
    if (name.ends_with("bias"))
      CHECK(value.abs().max().item<double>() == 0);
    else if (norm)
      CHECK(value.eq(1).all().item<bool>());
    else
      CHECK(value.std().item<double>() == Approx(0.05).epsilon(0.2));
  }
}

TEST_CASE("BLOOM: inputs are checked") {
  BloomForSequenceClassification model(
      bloom::BloomConfig{.vocab_size = 10, .hidden_size = 8, .n_layer = 1, .n_head = 2});
  const auto ids = torch::ones({2, 3}, at::kLong);
  REQUIRE_ERROR("input_ids must be int64 [n, t]", model->forward(torch::ones({3}, at::kLong)));
  REQUIRE_ERROR("input_ids must be int64 [n, t]", model->forward(torch::ones({2, 3})));
  REQUIRE_ERROR("input_ids must be int64 [n, t]", model->forward(torch::ones({2, 0}, at::kLong)));
  REQUIRE_ERROR("attention_mask must have the shape of input_ids, [2, 3], got [2, 2]",
                model->forward(ids, ids.narrow(1, 0, 2)));
  REQUIRE_ERROR("index out of range", model->forward(ids + 9));
  REQUIRE_ERROR("n_head must be in [1, 8]",
                BloomForSequenceClassification(bloom::BloomConfig{.hidden_size = 8, .n_head = 9}));
  // With nothing but padding the score has no meaning, but is finite.
  CHECK(model->forward(ids, torch::zeros_like(ids)).isfinite().all().item<bool>());
}
