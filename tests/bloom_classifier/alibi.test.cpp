// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/autocast.hpp>
#include <gradaccum/memory_meter.hpp>

#include "bloom_classifier/model_cases.hpp"

#include <cmath>
#include <future>
#include <vector>

#include "support/models.hpp"

namespace ga = gradaccum;
using namespace testing;

namespace {

// Queries, keys and values [n_head, t, head_dim], and attention with them.
struct Case {
  std::int64_t n_head = 6, t = 700, head_dim = 24;
  at::Tensor query, key, value;

  explicit Case(at::ScalarType dtype) {
    torch::manual_seed(2);
    for (auto* tensor : {&query, &key, &value}) *tensor = torch::randn({n_head, t, head_dim}).to(dtype);
  }

  at::Tensor with(const at::Tensor& channels) const {
    const auto add = [&](const at::Tensor& tensor, std::int64_t part) {
      return at::cat({tensor, channels.select(2, part).transpose(0, 1).to(tensor.dtype())}, -1).unsqueeze(0);
    };
    const auto scale = 1 / std::sqrt(static_cast<double>(head_dim));
    return at::scaled_dot_product_attention(add(query, 0), add(key, 1), add(value, 2), {}, 0, true, scale)
        .squeeze(0)
        .narrow(-1, 0, head_dim);
  }
  at::Tensor with_alibi() const { return with(bloom::alibi_channels(n_head, head_dim, t)); }

  // Adds the bias to scores in their dtype, as transformers does.
  at::Tensor with_16_bit_bias() const {
    const auto scores = query.matmul(key.transpose(1, 2)) / std::sqrt(static_cast<double>(head_dim));
    return attention_of(scores + bias().to(query.dtype()), value);
  }

  // Computes the formula in float64.
  at::Tensor expected() const {
    const auto q = query.to(at::kDouble), k = key.to(at::kDouble);
    const auto scores = q.matmul(k.transpose(1, 2)) / std::sqrt(static_cast<double>(head_dim));
    return attention_of(scores + bias(), value);
  }

 private:
  at::Tensor bias() const {
    return torch::tensor(bloom::alibi_slopes(n_head)).to(at::kDouble).view({-1, 1, 1}) * torch::arange(t, at::kDouble);
  }
  static at::Tensor attention_of(const at::Tensor& scores, const at::Tensor& value) {
    const auto hidden = torch::ones(scores.sizes().slice(1), at::kBool).triu(1);
    return scores.to(at::kDouble).masked_fill(hidden, -INFINITY).softmax(-1).matmul(value.to(at::kDouble));
  }
};

// Returns the channels with fewer pieces of the slope.
at::Tensor channels_with_pieces(const Case& attention, int pieces) {
  auto channels = bloom::alibi_channels(attention.n_head, attention.head_dim, attention.t);
  channels.select(2, 0).narrow(-1, 2 * pieces, 6 - 2 * pieces).zero_();
  return channels;
}

// Returns the peak bytes of an attention's forward and backward.
std::int64_t peak_of_attention(std::int64_t t, bool flash) {
  const bloom::BloomConfig config{.hidden_size = 64, .n_head = 8};
  bloom::BloomAttention attention(config, std::make_shared<bloom::AlibiChannels>(config.n_head, config.head_dim()));
  const auto hidden = torch::randn({1, t, config.hidden_size});
  const auto before = at::globalContext().userEnabledFlashSDP();
  at::globalContext().setSDPUseFlash(flash);
  const ga::MemoryMeter meter;
  attention->forward(hidden).sum().backward();
  at::globalContext().setSDPUseFlash(before);
  return meter.peak_bytes();
}

}  // namespace

TEST_CASE("ALiBi: slopes are those of transformers") {
  for (auto* name : python_models) {
    const PythonModel python(name);
    const auto expected = python["slopes"];
    INFO(name);
    CHECK(difference(torch::tensor(bloom::alibi_slopes(expected.numel())), expected) <= 1e-8);
  }
  CHECK(bloom::alibi_slopes(1) == std::vector<float>{1.f / 256});
  const auto slopes = bloom::alibi_slopes(112);  // the largest BLOOM has 112 heads
  CHECK(slopes[0] == Approx(std::exp2(-0.125)));
  CHECK(slopes[63] == Approx(std::exp2(-8)));
  CHECK(slopes[64] == Approx(std::exp2(-0.0625)));
  CHECK(slopes[111] == Approx(std::exp2(-0.0625 * 95)));
}

TEST_CASE("ALiBi: the channels are exact in every dtype") {
  const std::int64_t length = bloom::alibi_max_length;
  const auto channels = bloom::alibi_channels(3, 10, length);
  for (auto dtype : {at::kBFloat16, at::kHalf}) {
    CHECK(torch::equal(channels.select(2, 1).to(dtype).to(at::kFloat), channels.select(2, 1)));
    // float16's exponents cannot represent the last bits of the smallest slopes.
    const auto query = channels.select(2, 0);
    CHECK(difference(query.to(dtype), query) <= (dtype == at::kHalf ? 3e-8 : 0));
  }
  const auto wide = channels.to(at::kDouble);
  const auto bias = (wide.select(2, 0) * wide.select(2, 1)).sum(-1);  // [length, 3]: each head's bias at its position
  const auto slopes = torch::tensor(bloom::alibi_slopes(3)).to(at::kDouble) * std::sqrt(10.0);
  const auto expected = torch::arange(length, at::kDouble).unsqueeze(1) * slopes;
  CHECK(((bias - expected).abs() <= expected * 1e-7).all().item<bool>());
  CHECK(channels.select(2, 2).eq(0).all().item<bool>());
}

TEST_CASE("ALiBi: attention with the channels equals attention with the bias") {
  CHECK(difference(Case(at::kDouble).with_alibi(), Case(at::kDouble).expected()) <= 1e-6);  // the slopes are float32
  const Case exact(at::kFloat);
  CHECK(difference(exact.with_alibi(), exact.expected()) <= 1e-4);
  CHECK(difference(exact.with(channels_with_pieces(exact, 1)), exact.expected()) > 1e-3);
  CHECK(difference(exact.with(channels_with_pieces(exact, 0)), exact.expected()) > 1);
  for (auto dtype : {at::kBFloat16, at::kHalf}) {
    const Case attention(dtype);
    const auto expected = attention.expected();
    INFO(dtype);
    CHECK(difference(attention.with_alibi(), expected) <= (dtype == at::kHalf ? 2e-3 : 2e-2));
    CHECK(difference(attention.with_16_bit_bias(), expected) > 0.1);
  }
}

TEST_CASE("ALiBi: channels are cached for the longest sequence, by dtype") {
  bloom::AlibiChannels channels(4, 8);
  const auto expected = bloom::alibi_channels(4, 8, 30);
  const auto long_ones = channels(30, torch::empty(0));
  CHECK(torch::equal(long_ones, expected));
  const auto short_ones = channels(10, torch::empty(0));
  CHECK(torch::equal(short_ones, expected.narrow(0, 0, 10)));
  CHECK(short_ones.is_alias_of(long_ones));
  CHECK(channels(10, torch::empty(0, at::kBFloat16)).scalar_type() == at::kBFloat16);
  CHECK(torch::equal(channels(31, torch::empty(0)).narrow(0, 0, 30), expected));
  REQUIRE_ERROR("at most 65536 tokens, whose positions are exact, got 65537", channels(65537, torch::empty(0)));
}

TEST_CASE("ALiBi: threads may share the channels") {
  bloom::AlibiChannels channels(4, 8);
  const auto expected = bloom::alibi_channels(4, 8, 64);
  std::vector<std::future<bool>> threads;
  for (std::int64_t thread = 0; thread < 4; ++thread)
    threads.push_back(std::async(std::launch::async, [&, thread] {
      bool all_equal = true;
      for (std::int64_t length = 1 + thread; length <= 64; ++length)
        all_equal &= torch::equal(channels(length, torch::empty(0)), expected.narrow(0, 0, length));
      return all_equal;
    }));
  for (auto& thread : threads) CHECK(thread.get());
}

TEST_CASE("ALiBi: channels made in inference mode can be used in training") {
  const bloom::BloomConfig config{.hidden_size = 8, .n_head = 2};
  bloom::BloomAttention attention(config, std::make_shared<bloom::AlibiChannels>(2, 4));
  const auto hidden = torch::randn({1, 5, 8});
  {
    const c10::InferenceMode inference;
    attention->forward(torch::randn({1, 5, 8}));
  }
  attention->forward(hidden).sum().backward();
  CHECK(attention->dense->weight.grad().defined());
}

TEST_CASE("ALiBi: attention needs memory for the tokens, not for their pairs, forward and backward") {
  const std::int64_t t = 1024, pairs = 8 * t * t * 4;
  CHECK(peak_of_attention(t, /*flash=*/true) < pairs / 4);
  CHECK(peak_of_attention(t, /*flash=*/false) > pairs);
  CHECK(peak_of_attention(2 * t, true) < 2.2 * peak_of_attention(t, true));
}

TEST_CASE("BLOOM: in 16 bits scores are close to float32's") {
  for (auto* name : python_models) {
    const PythonModel python(name);
    auto model = python.load();
    const auto expected = python.logits(model, "long");
    const auto scale = expected.abs().max().item<double>();
    const auto autocast_error = [&](at::ScalarType dtype) {
      const ga::Autocast autocast(at::kCPU, dtype);
      return difference(python.logits(model, "long"), expected) / scale;
    };
    INFO(name);
    CHECK(autocast_error(at::kBFloat16) <= 3e-2);
    CHECK(autocast_error(at::kHalf) <= 4e-3);
    for (auto dtype : {at::kBFloat16, at::kHalf}) {
      auto half = python.load();
      half->to(dtype);
      CHECK(difference(python.logits(half, "long"), expected) / scale <= (dtype == at::kHalf ? 8e-3 : 6e-2));
      // Control: padding used as tokens gives other scores.
      CHECK(difference(half->forward(python.ids("left_without_mask")), python["left.logits"]) / scale > 0.2);
    }
  }
}

TEST_CASE("BLOOM: gradients under autocast are close to float32's, and float32") {
  const PythonModel python("heads_4");
  auto model = python.load();
  const auto loss = [&] {
    const ga::Autocast autocast(at::kCPU, at::kBFloat16);
    return python.loss(model, "left");
  }();
  loss.backward();
  for (auto& item : model->named_parameters()) {
    INFO(item.key());
    CHECK(item.value().grad().scalar_type() == at::kFloat);
    CHECK(distance(item.value().grad(), python["left.gradients." + item.key()]) <= 0.1);
  }
}
