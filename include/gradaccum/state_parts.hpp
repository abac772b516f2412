// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/archive.hpp>
#include <gradaccum/concepts.hpp>
#include <gradaccum/detail/optimizers/optimizer_state.hpp>
#include <gradaccum/detail/types/module_of.hpp>
#include <gradaccum/detail/types/type_name.hpp>

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <concepts>
#include <memory>
#include <string>
#include <utility>

namespace gradaccum {

/// Parts of a training state for a custom training loop: LibTorch's objects, which have no `state(Archive&)`.
///
///     struct Training {
///       decltype(model)& net;
///       decltype(optimizer)& sgd_of_4;
///       std::int64_t updates() const { return sgd_of_4.updates(); }
///       void state(ga::Archive& archive) {
///         archive("model", ga::ModelState(net));
///         archive("optimizer", ga::OptimizerState(sgd_of_4, net));
///         archive("random", ga::RandomState());
///       }
///     } training{model, optimizer};
///     ga::save("runs/by_hand", training);
///     ga::load("runs/by_hand", training);
///
/// A model's parameters and buffers, by name. Loading keeps the tensors, but those on the CPU may get other memory,
/// together with all their views. Different names or shapes throw an error that lists them, unless changes are allowed;
/// then what fits is loaded.
class ModelState {
 public:
  template <detail::model Model>
  explicit ModelState(Model& model) : module_(detail::module_of(model)) {}
  void state(Archive& archive);

 private:
  torch::nn::Module& module_;
};

namespace detail {
[[noreturn]] void refuse_optimizer(const std::string& type);
void check_is_not_divided(bool is_divided, const std::string& type);
}  // namespace detail

/// An optimizer's state by `model`'s parameter names, the options of its parameter groups, and an accumulator's window,
/// even if incomplete. Supports LibTorch's optimizers except LBFGS, ours, and any with its own `state(Archive&)`.
template <class Optimizer>
class OptimizerState {
 public:
  template <detail::model Model>
  OptimizerState(Optimizer& optimizer, Model& model) : optimizer_(optimizer), module_(detail::module_of(model)) {}
  /// The state of a sharded optimizer: this rank's shard, which `Replicas` provides.
  OptimizerState(Optimizer& optimizer, torch::nn::Module& module, std::shared_ptr<detail::Shards> shards)
      : optimizer_(optimizer), module_(module), shards_(std::move(shards)) {}

  void state(Archive& archive) {
    check();
    if constexpr (has_state) {
      detail::check_is_not_divided(shards_ != nullptr, detail::type_name(optimizer_));
      optimizer_.state(archive);
    } else if constexpr (accumulating<Optimizer>) {
      archive("window", optimizer_.named_window(module_));
      gradaccum::OptimizerState(optimizer_.optimizer(), module_, optimizer_.shards()).state(archive);
    } else if constexpr (is_torch) {
      detail::archive_optimizer(archive, optimizer_, module_.named_parameters(), shards_.get());
    }
  }

  /// Throws if the optimizer's state cannot be saved, or if a parameter is not the model's.
  void check() {
    if constexpr (is_torch && !has_state)
      detail::check_has_named_state(optimizer_, module_.named_parameters());
    else if constexpr (!has_state && !accumulating<Optimizer>)
      detail::refuse_optimizer(detail::type_name(optimizer_));
  }

 private:
  static constexpr bool is_torch = std::derived_from<Optimizer, torch::optim::Optimizer>;
  static constexpr bool has_state = requires(Optimizer & optimizer, Archive& archive) { optimizer.state(archive); };

  Optimizer& optimizer_;
  torch::nn::Module& module_;
  std::shared_ptr<detail::Shards> shards_;
};
template <class Optimizer, class Model>
OptimizerState(Optimizer&, Model&) -> OptimizerState<Optimizer>;

/// The states of the default generators of the CPU and all devices in use. Loading throws for other devices.
///
/// @note Waits for the devices in use.
class RandomState {
 public:
  void state(Archive& archive);
};

}  // namespace gradaccum

#ifndef GRADACCUM_COMPILED
#include <gradaccum/state_parts.ipp>
#endif
