// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/torch.h>

#include "idx.hpp"

namespace fashion_mnist {

/// A multilayer perceptron, 784-512-512-10, from images [N, 28, 28] to logits [N, 10].
inline torch::nn::Sequential make_model() {
  return torch::nn::Sequential(torch::nn::Flatten(),                             //
                               torch::nn::Linear(image_side * image_side, 512),  //
                               torch::nn::ReLU(),                                //
                               torch::nn::Linear(512, 512),                      //
                               torch::nn::ReLU(),                                //
                               torch::nn::Linear(512, class_count));
}

}  // namespace fashion_mnist
