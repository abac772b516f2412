// SPDX-License-Identifier: Apache-2.0
#include <gradaccum/gradaccum.hpp>
#include <gradaccum/version.hpp>
#include <torch/torch.h>

#include <iostream>

int main() {
  const bool works = torch::ones({2, 3}).sum().item<float>() == 6.0F;
  std::cout << "gradaccum " << GRADACCUM_VERSION_MAJOR << "." << GRADACCUM_VERSION_MINOR << ", LibTorch "
            << TORCH_VERSION << ": " << (works ? "OK" : "wrong") << "\n";
  return works ? 0 : 1;
}
