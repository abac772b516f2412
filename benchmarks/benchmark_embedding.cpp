// SPDX-License-Identifier: Apache-2.0
//
// Eight micro-batches of one sequence of 32 tokens, as in fine-tuning a classifier: ga::embedding, whose backward sums
// only the rows that were looked up, compared to LibTorch's, which sums the whole table; alone, and below the blocks of
// a transformer. Bound: the same with a table of 32 rows.

#include <gradaccum/embedding.hpp>

#include "chains.hpp"
#include "harness.hpp"

namespace ga = gradaccum;

namespace {

constexpr int micro_batches = 8;
constexpr std::int64_t tokens = 32, width = 256;

/// A table of embeddings, and transformer blocks above it.
struct Classifier {
  at::Tensor table;
  torch::nn::Sequential blocks;

  Classifier(std::int64_t vocabulary, int depth) {
    torch::manual_seed(0);
    table = (torch::randn({vocabulary, width}) * 0.02).requires_grad_();
    for (int i = 0; i < depth; ++i) blocks->push_back(harness::TransformerBlock(width, 8));
  }

  template <class LookUp>
  void window(const std::vector<at::Tensor>& texts, const LookUp& look_up) {
    for (auto& text : texts) {
      auto hidden = look_up(text, table);
      if (!blocks->is_empty()) hidden = blocks->forward(hidden);
      hidden.mean().backward();
    }
    kept = table.grad();
    table.mutable_grad().reset();
    blocks->zero_grad();
  }

  at::Tensor kept;
};

std::vector<at::Tensor> texts_of(std::int64_t vocabulary) {
  torch::manual_seed(1);
  std::vector<at::Tensor> texts;
  for (int i = 0; i < micro_batches; ++i) texts.push_back(torch::randint(vocabulary, {1, tokens}));
  return texts;
}

void compare(std::int64_t vocabulary, int depth, const harness::Options& options) {
  const auto texts = texts_of(vocabulary), few = texts_of(tokens);
  Classifier ours(vocabulary, depth), theirs(vocabulary, depth), small(tokens, depth);
  const auto by_rows = [](auto& text, auto& table) { return ga::embedding(text, table); };
  const auto whole = [](auto& text, auto& table) { return torch::embedding(table, text); };
  ours.window(texts, by_rows);
  theirs.window(texts, whole);
  TORCH_CHECK(ours.kept.equal(theirs.kept), "the gradients must be equal to the bit");
  const auto below = depth == 0 ? std::string("alone") : fmt::format("below {} blocks", depth);
  harness::contest(fmt::format("A window of {} micro-batches of {} tokens, embedding of {} x {}, {}", micro_batches,
                               tokens, vocabulary, width, below),
                   {{.name = "ga::embedding", .run = [&] { ours.window(texts, by_rows); }},
                    {.name = "torch::embedding", .run = [&] { theirs.window(texts, whole); }},
                    {.name = "bound: a table of 32 rows", .run = [&] { small.window(few, whole); }, .bound = true}},
                   1, "windows", options);
}

}  // namespace

int main(int argc, char** argv) {
  const auto options = harness::parse(argc, argv, "An embedding's gradient by rows against LibTorch's");
  compare(32'000, 0, options);
  compare(32'000, 4, options);
  compare(250'880, 4, options);
}
