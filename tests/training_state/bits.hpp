// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/optimizers/param_states.hpp>

#include <torch/torch.h>

#include <cstdint>
#include <cstring>
#include <map>
#include <set>
#include <string>
#include <vector>

/// The content of a training, compared bit by bit.
namespace testing {

class Bits {
 public:
  void add(const std::string& name, const at::Tensor& tensor) {
    if (!tensor.defined()) return add(name, std::string("undefined"));
    if (tensor.is_sparse()) {
      add(name + ".indices", tensor._indices());
      return add(name + ".values", tensor._values());
    }
    const auto numbers = tensor.detach().cpu().contiguous();
    add(name, c10::str(tensor.scalar_type(), tensor.sizes()) +
                  std::string(static_cast<const char*>(numbers.const_data_ptr()), numbers.nbytes()));
  }
  void add(const std::string& name, double number) {
    std::string bytes(sizeof number, '\0');
    std::memcpy(bytes.data(), &number, sizeof number);
    add(name, bytes);
  }
  void add(const std::string& name, const std::string& bytes) { all_[name] += bytes; }

  template <class Named>
  void add_all(const std::string& name, const Named& named) {
    for (auto& [key, tensor] : named) add(name + "." + key, tensor);
  }
  void add_model(const torch::nn::Module& model) {
    for (auto& item : model.named_parameters()) add("model." + item.key(), item.value());
    for (auto& item : model.named_parameters()) add("grad." + item.key(), item.value().grad());
    for (auto& item : model.named_buffers()) add("model." + item.key(), item.value());
  }
  void add_optimizer(torch::optim::Optimizer& optimizer, const torch::nn::Module& model) {
    namespace inner = gradaccum::detail;
    for (auto& group : optimizer.param_groups()) add("lr", group.options().get_lr());
    if (auto* itself = dynamic_cast<gradaccum::optim::OnePass*>(&optimizer))
      return add_all("optimizer", itself->named_state(model.named_parameters()));
    add_all("optimizer", inner::named_state_of(optimizer, inner::NameOf(model.named_parameters())));
  }
  void add_generator() { add("generator", at::detail::getDefaultCPUGenerator().get_state()); }

  /// Returns the names of differing values; empty if there are none.
  friend std::string difference(const Bits& a, const Bits& b) {
    std::set<std::string> names;
    for (auto& [name, bytes] : a.all_) names.insert(name);
    for (auto& [name, bytes] : b.all_) names.insert(name);
    std::string text;
    for (auto& name : names)
      if (!a.all_.contains(name) || !b.all_.contains(name) || a.all_.at(name) != b.all_.at(name)) text += name + " ";
    return text;
  }
  Bits without(const std::string& name) const {
    auto rest = *this;
    rest.all_.erase(name);
    return rest;
  }

 private:
  std::map<std::string, std::string> all_;
};

/// Returns each parameter once, though a module may list a shared one twice.
inline std::vector<at::Tensor> distinct_parameters(const torch::nn::Module& module) {
  std::vector<at::Tensor> all;
  std::set<const void*> known;
  for (auto& parameter : module.parameters())
    if (known.insert(parameter.unsafeGetTensorImpl()).second) all.push_back(parameter);
  return all;
}

/// A policy: ends a fit after a number of boundaries where it could be saved, as a signal would.
struct Stop {
  std::int64_t after = 0, seen = 0;
  std::function<void()> stop = {};
  void attach(auto& trainer) {
    stop = [&trainer] { trainer.interrupt(15); };
  }
  void at_boundary() {
    if (++seen == after) stop();
  }
};

}  // namespace testing
