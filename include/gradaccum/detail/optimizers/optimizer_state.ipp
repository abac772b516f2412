// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/optimizers/optimizer_state.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/optimizers/param_states.hpp>
#include <gradaccum/detail/optimizers/shard_state.hpp>
#include <gradaccum/detail/types/type_name.hpp>

#include <c10/util/Exception.h>
#include <c10/util/FunctionRef.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <tuple>
#include <utility>

namespace gradaccum::detail {

/// Saves or loads a group's options under Python's names. Returns false if their class is unknown.
GRADACCUM_INLINE bool archive_options(Archive& archive, torch::optim::OptimizerOptions& options) {
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

/// A parameter group's options as a part of an archive.
struct GroupState {
  torch::optim::OptimizerParamGroup& group;
  void state(Archive& archive);
};

GRADACCUM_INLINE void GroupState::state(Archive& archive) {
  archive.setting("parameters", static_cast<std::int64_t>(group.params().size()));
  const std::shared_ptr<torch::optim::OptimizerOptions> options = group.options().clone();
  TORCH_CHECK(archive_options(archive, *options), "OptimizerState: nobody knows how to save ", type_name(*options),
              "; give the optimizer a member void state(ga::Archive&)");
  if (archive.loading()) archive.when_all_fit([&of = group, options] { of.set_options(options->clone()); });
}

GRADACCUM_INLINE void check_has_named_state(torch::optim::Optimizer& optimizer, const NamedParameters& parameters) {
  TORCH_CHECK(dynamic_cast<NamesItsState*>(&optimizer) || new_state_of(optimizer),
              "OptimizerState: ", type_name(optimizer),
              " must be an optimizer of LibTorch or gradaccum (LBFGS has no steps to go on with),"
              " or have a member void state(ga::Archive&)");
  for_each_parameter(optimizer, [name_of = NameOf(parameters)](const at::Tensor& parameter) { name_of(parameter); });
}

/// Returns the state to save. With shards, `parameters` and the optimizer's groups are this process's pieces.
GRADACCUM_INLINE NamedTensors state_to_save(torch::optim::Optimizer& optimizer, const NamedParameters& parameters) {
  auto* const itself = dynamic_cast<NamesItsState*>(&optimizer);
  return itself ? itself->named_state(parameters) : named_state_of(optimizer, NameOf(parameters));
}

/// Checks a loaded state. Returns a function that makes it the optimizer's.
GRADACCUM_INLINE std::function<void()> take_state_of(torch::optim::Optimizer& optimizer,
                                                     const NamedParameters& parameters, NamedTensors tensors,
                                                     bool lenient) {
  if (auto* const itself = dynamic_cast<NamesItsState*>(&optimizer))
    return itself->take_named_state(parameters, std::move(tensors), lenient);
  const auto fresh = new_state_of(optimizer);
  if (!fresh) return {};
  auto become = take_states(optimizer, *fresh, NameOf(parameters), tensors, lenient);
  TORCH_CHECK(lenient || tensors.empty(), "OptimizerState: ", type_name(optimizer), " has no parameter or no state ",
              tensors.empty() ? "" : tensors.begin()->first);
  return become;
}

/// Calls `work` with the parameters that the optimizer steps: whole ones, or this process's pieces.
GRADACCUM_INLINE void with_stepped(torch::optim::Optimizer& optimizer, const NamedParameters& parameters,
                                   Shards* shards, c10::function_ref<void(const NamedParameters&)> work) {
  if (shards == nullptr) return work(parameters);
  shards->check(optimizer);
  shards->with_own(optimizer, [&, pieces = named_pieces(*shards, parameters)] { work(pieces); });
}

GRADACCUM_INLINE void archive_optimizer(Archive& archive, torch::optim::Optimizer& optimizer,
                                        const NamedParameters& parameters, Shards* shards) {
  auto& groups = optimizer.param_groups();
  archive.setting("class", type_name(optimizer));
  archive.setting("groups", static_cast<std::int64_t>(groups.size()));
  for (std::size_t i = 0; i < groups.size(); ++i) archive("group" + std::to_string(i), GroupState{groups[i]});

  NamedTensors tensors;
  if (!archive.loading()) {
    with_stepped(optimizer, parameters, shards, [&](auto& stepped) { tensors = state_to_save(optimizer, stepped); });
    return archive.tensors(tensors);
  }
  archive.tensors(tensors);
  const bool lenient = archive.changes_allowed();
  tensors =
      shards != nullptr ? own_part(std::move(tensors), *shards, parameters, lenient) : whole_state(std::move(tensors));
  std::function<void()> become;
  with_stepped(optimizer, parameters, shards,
               [&](auto& stepped) { become = take_state_of(optimizer, stepped, std::move(tensors), lenient); });
  archive.when_all_fit(std::move(become));
}

}  // namespace gradaccum::detail
