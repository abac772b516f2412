// SPDX-License-Identifier: Apache-2.0
//
// save_steps FOLDER: records the steps whose compiled code the tests use, each in a separate folder.

#include <gradaccum/autocast.hpp>
#include <gradaccum/compiled_step.hpp>

#include <filesystem>
#include <iostream>

#include "networks.hpp"

int main(int argc, char** argv) {
  namespace ga = gradaccum;
  using namespace testing::compiled;
  if (argc != 2) {
    std::cerr << "usage: save_steps FOLDER\n";
    return 2;
  }
  const std::filesystem::path folder = argv[1];
  auto mlp = perceptron();
  std::cout << ga::save_step(mlp, counted_loss, rows_of_six(8), folder / "perceptron");
  auto cnn = convolutional();
  std::cout << ga::save_step(cnn, plain_loss<Convolutional>, images(6), folder / "convolutional", {.any_rows = false});
  auto block = transformer();
  std::cout << ga::save_step(block, plain_loss<Transformer>, sentences(4), folder / "transformer");
  auto lstm = recurrent();
  std::cout << ga::save_step(lstm, plain_loss<Recurrent>, sentences(4), folder / "recurrent");
  auto encoder = encoded();
  std::cout << ga::save_step(encoder, plain_loss<Encoded>, sentences(4), folder / "encoded");
  auto next_word = words();
  std::cout << ga::save_step(next_word, loss_by_parts, sentences(4), folder / "words");
  {
    const ga::Autocast autocast(torch::kCPU, torch::kHalf);
    std::cout << ga::save_step(mlp, plain_loss<Perceptron>, rows_of_six(8), folder / "float16", {.any_rows = false});
  }
  // For this number of rows attention is compiled as products and a softmax; for any number it is LibTorch's.
  const ga::Autocast autocast(torch::kCPU, torch::kBFloat16);
  std::cout << ga::save_step(block, plain_loss<Transformer>, sentences(4), folder / "bfloat16", {.any_rows = false});
}
