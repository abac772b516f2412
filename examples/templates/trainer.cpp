// SPDX-License-Identifier: Apache-2.0
// A language model of single characters, trained by a Trainer.
//
//     ./trainer TEXT [EPOCHS [FOLDER]]     TEXT is a file. With a folder, saves there, and resumes from its newest
//     state
//
// For a task of your own, change Model and the batches. docs/trainer.md has the other policies.
#include <torch/torch.h>
#include <gradaccum/gradaccum.hpp>

#include <cstdint>
#include <fstream>
#include <iostream>
#include <iterator>
#include <optional>
#include <string>
#include <vector>

namespace ga = gradaccum;

constexpr std::int64_t length = 64;  // characters of a row

struct ModelImpl : torch::nn::Module {
  torch::nn::Embedding table = register_module("table", torch::nn::Embedding(256, 64));
  torch::nn::GRU memory = register_module("memory", torch::nn::GRU(torch::nn::GRUOptions(64, 192).batch_first(true)));
  torch::nn::Linear head = register_module("head", torch::nn::Linear(192, 256));

  /// Returns a score for each byte that may come next: [rows, length, 256].
  at::Tensor forward(const at::Tensor& bytes) { return head(std::get<0>(memory(table(bytes)))); }
};
TORCH_MODULE(Model);

/// Reads rows of a text, and the same rows a character later.
ga::data::TensorBatches read(const std::vector<char>& text, std::size_t from, std::size_t to, bool shuffle) {
  TORCH_CHECK(to - from > length, "the text must have more than ", 20 * length, " characters, got ", text.size());
  const auto rows = static_cast<std::int64_t>(to - from - 1) / length;
  const auto bytes =
      torch::from_blob(const_cast<char*>(text.data()) + from, {static_cast<std::int64_t>(to - from)}, torch::kUInt8)
          .to(torch::kLong);
  const auto part = [&](std::int64_t shift) { return bytes.narrow(0, shift, rows * length).view({rows, length}); };
  return {part(0), part(1), {.batch_size = 16, .shuffle = shuffle, .seed = 1}};
}

/// Writes a text, character by character.
std::string continued(Model& model, std::string text, int characters) {
  const torch::NoGradGuard no_grad;
  model->eval();
  for (int i = 0; i < characters; ++i) {
    const auto seen = text.substr(text.size() - std::min<std::size_t>(text.size(), length));
    const auto bytes = torch::tensor(std::vector<std::int64_t>(seen.begin(), seen.end())).unsqueeze(0);
    const auto probabilities = (model->forward(bytes).select(1, -1) / 0.7).softmax(1);
    text += static_cast<char>(probabilities.multinomial(1).item<std::int64_t>());
  }
  return text;
}

int main(int argc, char** argv) try {
  if (argc < 2 || argv[1] == std::string("--help")) {
    std::cout << "usage: trainer TEXT [EPOCHS [FOLDER]]\n";
    return argc < 2 ? 1 : 0;
  }
  const std::string folder = argc > 3 ? argv[3] : "";
  const std::int64_t epochs = argc > 2 ? std::stoll(argv[2]) : 3;
  torch::manual_seed(1);
  std::ifstream file(argv[1], std::ios::binary);
  const std::vector<char> text{std::istreambuf_iterator<char>(file), {}};
  const auto border = text.size() * 19 / 20;
  auto batches = read(text, 0, border, /*shuffle=*/true), unseen = read(text, border, text.size(), /*shuffle=*/false);

  Model model;
  ga::optim::AdamW adamw(model->parameters(), ga::optim::AdamWOptions(4e-3));
  const auto objective = [](Model& net, const ga::data::Batch& batch) {
    const auto scores = net->forward(batch.data).flatten(0, 1), next = batch.target.flatten();
    return ga::Loss{torch::cross_entropy_loss(scores, next), next.numel()}.with(scores, next);
  };
  const auto saves =
      folder.empty() ? std::nullopt : std::optional(ga::SaveState{.directory = folder, .every_updates = 100});
  ga::Trainer trainer(model, adamw, objective, ga::Accumulate{.steps = 2},  // 2 x 16: an effective batch of 32
                      ga::ClipNorm{.max = 1.0}, ga::Schedule{ga::lr::Cosine{.peak = 4e-3, .warmup = 10}},
                      ga::Validate(unseen, ga::Accuracy()), saves);
  std::cout << trainer.fit(batches, {.epochs = epochs, .resume = folder, .unit = "characters"});
  std::cout << continued(model, std::string(text.begin(), text.begin() + 20), 300) << '\n';
} catch (const std::exception& error) {
  const auto* const torch = dynamic_cast<const c10::Error*>(&error);
  std::cerr << "trainer: " << (torch ? torch->what_without_backtrace() : error.what())
            << "; --help shows the arguments\n";
  return 1;
}
