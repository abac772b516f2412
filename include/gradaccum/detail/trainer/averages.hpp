// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <string>
#include <vector>

namespace gradaccum {

class Archive;

namespace detail {

struct NamedTensor;

/// The averages of a model's parameters, and of its buffers where asked for; of a shared one once.
///
/// Those of 16-bit tensors are float32. Integers are not averaged: the last ones are kept.
class Averages {
 public:
  Averages() = default;
  Averages(Averages&&) = default;
  Averages& operator=(Averages&&) = default;  // no copies: two would average into the same tensors

  /// average = decay * average + (1 - decay) * value; the first update copies.
  void update(torch::nn::Module& module, bool buffers, double decay);
  /// Writes the averages into the model; the second time what was there before.
  void swap(torch::nn::Module& module, bool buffers);
  void save(Archive& archive);
  void load(Archive& archive, torch::nn::Module& module, bool buffers);
  std::int64_t updates() const { return updates_; }

 private:
  struct Average {
    std::string name;
    at::ScalarType dtype;  // of the model's tensor
    at::Tensor value;
  };

  void check_not_swapped(const char* call) const;
  std::vector<NamedTensor> known_tensors(torch::nn::Module& module, bool buffers) const;
  void move_towards(const std::vector<NamedTensor>& tensors, double weight) const;

  std::vector<Average> averages_;
  std::vector<at::Tensor> originals_;  // of the model, while the averages are in it
  std::int64_t updates_ = 0;
  bool swapped_ = false;
};

}  // namespace detail
}  // namespace gradaccum
