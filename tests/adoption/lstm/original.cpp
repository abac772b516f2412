// SPDX-License-Identifier: Apache-2.0
#include <torch/torch.h>

#include <cstdio>
#include <tuple>

#include "options.hpp"

namespace {

constexpr int64_t kVocabulary = 12;
constexpr int64_t kHidden = 24;
constexpr int64_t kSequence = 8;

using State = std::tuple<torch::Tensor, torch::Tensor>;

struct LanguageModelImpl : torch::nn::Module {
  torch::nn::Embedding embedding = register_module("embedding", torch::nn::Embedding(kVocabulary, 16));
  torch::nn::LSTM lstm =
      register_module("lstm", torch::nn::LSTM(torch::nn::LSTMOptions(16, kHidden).batch_first(true)));
  torch::nn::Linear linear = register_module("linear", torch::nn::Linear(kHidden, kVocabulary));

  std::tuple<torch::Tensor, State> forward(const torch::Tensor& input, const State& state) {
    auto [output, next_state] = lstm->forward(embedding->forward(input), state);
    return {linear->forward(output.reshape({-1, kHidden})), next_state};
  }
};
TORCH_MODULE(LanguageModel);

torch::Tensor make_tokens(int64_t count) {
  auto generator = at::detail::createCPUGenerator(5);
  return torch::randint(1, 4, {count}, generator, torch::kLong).cumsum(0).remainder(kVocabulary);
}

}  // namespace

int main(int argc, char* argv[]) {
  const auto options = adoption::parse(argc, argv);

  const int64_t count = 8 * 64;
  const auto tokens = make_tokens(count + 1);
  const auto inputs = tokens.narrow(0, 0, count).view({options.batch_size, -1});
  const auto targets = tokens.narrow(0, 1, count).view({options.batch_size, -1});

  LanguageModel model;
  torch::optim::Adam optimizer(model->parameters(), torch::optim::AdamOptions(0.01));

  for (int epoch = 1; epoch <= 2; ++epoch) {
    State state{torch::zeros({1, options.batch_size, kHidden}), torch::zeros({1, options.batch_size, kHidden})};
    double total = 0;
    int64_t pieces = 0;
    for (int64_t start = 0; start < inputs.size(1); start += kSequence) {
      const auto input = inputs.slice(1, start, start + kSequence);
      const auto target = targets.slice(1, start, start + kSequence).reshape({-1});

      state = State{std::get<0>(state).detach(), std::get<1>(state).detach()};
      torch::Tensor output;
      std::tie(output, state) = model->forward(input, state);
      auto loss = torch::nn::functional::cross_entropy(output, target);

      optimizer.zero_grad();
      loss.backward();
      torch::nn::utils::clip_grad_norm_(model->parameters(), 0.25);
      optimizer.step();
      total += loss.item<double>();
      ++pieces;
    }
    std::printf("Epoch [%d/2] Loss: %.4f\n", epoch, total / static_cast<double>(pieces));
  }
  adoption::save(options, model->parameters());
}
