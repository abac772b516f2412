// SPDX-License-Identifier: Apache-2.0
#include <gradaccum/gradients.hpp>

int main() {
  gradaccum::Factor factor;
  factor.multiply(2.0);
  double read = factor;  // error: (cannot convert|no viable conversion)
}
