// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/archive.hpp>
#include <gradaccum/concepts.hpp>
#include <gradaccum/detail/state/named_state.hpp>
#include <gradaccum/detail/types/type_name.hpp>

#include <c10/util/Exception.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>

namespace gradaccum::detail {

/// Saves or loads the options of a group, each by Python's name. False if they are of a class that nobody knows.
inline bool archive_options(Archive& archive, torch::optim::OptimizerOptions& options) {
  const auto adam = [&](auto& of) {
    archive("lr", of.lr());
    archive("beta1", std::get<0>(of.betas()));
    archive("beta2", std::get<1>(of.betas()));
    archive("eps", of.eps());
    archive("weight_decay", of.weight_decay());
    archive("amsgrad", of.amsgrad());
  };
  if (auto* itself = dynamic_cast<ArchivesItself*>(&options)) {
    itself->state(archive);
  } else if (auto* of_adam = dynamic_cast<torch::optim::AdamOptions*>(&options)) {
    adam(*of_adam);
  } else if (auto* of_adamw = dynamic_cast<torch::optim::AdamWOptions*>(&options)) {
    adam(*of_adamw);
  } else if (auto* sgd = dynamic_cast<torch::optim::SGDOptions*>(&options)) {
    archive("lr", sgd->lr());
    archive("momentum", sgd->momentum());
    archive("dampening", sgd->dampening());
    archive("weight_decay", sgd->weight_decay());
    archive("nesterov", sgd->nesterov());
  } else if (auto* rmsprop = dynamic_cast<torch::optim::RMSpropOptions*>(&options)) {
    archive("lr", rmsprop->lr());
    archive("alpha", rmsprop->alpha());
    archive("eps", rmsprop->eps());
    archive("weight_decay", rmsprop->weight_decay());
    archive("momentum", rmsprop->momentum());
    archive("centered", rmsprop->centered());
  } else if (auto* adagrad = dynamic_cast<torch::optim::AdagradOptions*>(&options)) {
    archive("lr", adagrad->lr());
    archive("lr_decay", adagrad->lr_decay());
    archive("weight_decay", adagrad->weight_decay());
    archive("initial_accumulator_value", adagrad->initial_accumulator_value());
    archive("eps", adagrad->eps());
  } else {
    return false;
  }
  return true;
}

/// A parameter group's options as a part.
struct GroupState {
  torch::optim::OptimizerParamGroup& group;

  void state(Archive& archive) {
    archive.setting("parameters", static_cast<std::int64_t>(group.params().size()));
    const std::shared_ptr<torch::optim::OptimizerOptions> options = group.options().clone();
    TORCH_CHECK(archive_options(archive, *options), "OptimizerState: nobody knows how to save ", type_name(*options),
                "; give the optimizer a member void state(ga::Archive&)");
    if (archive.loading()) archive.when_all_fit([&of = group, options] { of.set_options(options->clone()); });
  }
};

/// Calls `use` with the class that the optimizer keeps for each parameter; false if nobody knows it.
template <class Use>
bool with_param_state(torch::optim::Optimizer& optimizer, const Use& use) {
  using namespace torch::optim;
  if (dynamic_cast<Adam*>(&optimizer)) return use(std::type_identity<AdamParamState>()), true;
  if (dynamic_cast<AdamW*>(&optimizer)) return use(std::type_identity<AdamWParamState>()), true;
  if (dynamic_cast<SGD*>(&optimizer)) return use(std::type_identity<SGDParamState>()), true;
  if (dynamic_cast<RMSprop*>(&optimizer)) return use(std::type_identity<RMSpropParamState>()), true;
  if (dynamic_cast<Adagrad*>(&optimizer)) return use(std::type_identity<AdagradParamState>()), true;
  return false;
}

/// Throws for an optimizer whose state nobody could save, or has no names.
inline void check_has_named_state(torch::optim::Optimizer& optimizer, const NamedParameters& parameters) {
  TORCH_CHECK(dynamic_cast<NamesItsState*>(&optimizer) || with_param_state(optimizer, [](auto) {}),
              "OptimizerState: ", type_name(optimizer),
              " must be an optimizer of LibTorch or gradaccum (LBFGS has no steps to go on with),"
              " or have a member void state(ga::Archive&)");
  for_each_parameter(optimizer, [name_of = NameOf(parameters)](const at::Tensor& parameter) { name_of(parameter); });
}

/// The state of LibTorch's and our own optimizers by the parameters' names, and the options of their groups.
inline void archive_optimizer(Archive& archive, torch::optim::Optimizer& optimizer, const NamedParameters& parameters) {
  auto& groups = optimizer.param_groups();
  archive.setting("class", type_name(optimizer));
  archive.setting("groups", static_cast<std::int64_t>(groups.size()));
  for (std::size_t i = 0; i < groups.size(); ++i) archive("group" + std::to_string(i), GroupState{groups[i]});

  auto* const itself = dynamic_cast<NamesItsState*>(&optimizer);
  const NameOf name_of(parameters);
  NamedTensors tensors;
  if (!archive.loading()) {
    if (itself)
      tensors = itself->named_state(parameters);
    else
      with_param_state(optimizer, [&]<class State>(std::type_identity<State>) {
        tensors = named_state_of<State>(optimizer, name_of);
      });
    return archive.tensors(tensors);
  }
  archive.tensors(tensors);
  const bool lenient = archive.changes_allowed();
  std::function<void()> become;
  if (itself) {
    become = itself->take_named_state(parameters, std::move(tensors), lenient);
  } else {
    with_param_state(optimizer, [&]<class State>(std::type_identity<State>) {
      become = take_states<State>(optimizer, name_of, tensors, lenient);
    });
    TORCH_CHECK(lenient || tensors.empty(), "OptimizerState: ", type_name(optimizer), " has no parameter or no state ",
                tensors.empty() ? "" : tensors.begin()->first);
  }
  archive.when_all_fit(std::move(become));
}

}  // namespace gradaccum::detail
