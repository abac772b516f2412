// SPDX-License-Identifier: Apache-2.0
#pragma once

// LibTorch's ProcessGroupGloo.hpp names these headers of Gloo, and LibTorch has Gloo inside of it but ships none of them.
// What that header needs is declared here, and nothing of it is ever called by a program: it is all behind pointers.

#include <chrono>
#include <memory>

namespace gloo {

class Context {
 public:
  void setTimeout(std::chrono::milliseconds timeout);
};

}  // namespace gloo
