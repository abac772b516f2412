// SPDX-License-Identifier: Apache-2.0
#include <gradaccum/gradients.hpp>

namespace ga = gradaccum;

int main() {
  const at::Tensor mean, count;
  ga::Loss plain = mean;
  ga::Loss weighted{mean, 3};
  ga::Loss wait{mean, count};    // error: a Tensor count would synchronize
  ga::Loss text{mean, "seven"};  // error: items must be an arithmetic count
  static_cast<void>(count);
  ga::Factor factor;
  factor.multiply(2.0);
  double read = factor;  // error: (cannot convert|no viable conversion)
}
