// SPDX-License-Identifier: Apache-2.0
#pragma once

// See ../context.h.

#include <chrono>
#include <string>
#include <vector>

namespace gloo::rendezvous {

class Store {
 public:
  virtual ~Store();
  virtual void set(const std::string& key, const std::vector<char>& value);
  virtual std::vector<char> get(const std::string& key);
  virtual void wait(const std::vector<std::string>& keys);
  virtual void wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout);
};

}  // namespace gloo::rendezvous
