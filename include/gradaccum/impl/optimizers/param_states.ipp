// SPDX-License-Identifier: Apache-2.0
// Saves, loads and shards states of optimizers by the parameters' names.
#pragma once

#include <gradaccum/detail/optimizers/param_states.hpp>

#include <gradaccum/detail/kernels/dynamic_map.hpp>
#include <gradaccum/detail/types/types.hpp>

#include <ATen/core/ivalue.h>
#include <ATen/ops/_unique2.h>
#include <ATen/ops/full.h>
#include <ATen/ops/scalar_tensor.h>
#include <c10/util/Exception.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>
#include <torch/serialize/archive.h>

#include <cmath>
#include <tuple>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum::optim {

GRADACCUM_INLINE void OwnParamState::serialize(torch::serialize::OutputArchive& archive) const {
  archive.write("step", c10::IValue(step()));
  for (auto& [name, tensor] : const_cast<OwnParamState&>(*this).tensors())  // only read
    if (tensor->defined()) archive.write(name, *tensor, /*is_buffer=*/true);
}

GRADACCUM_INLINE void OwnParamState::serialize(torch::serialize::InputArchive& archive) {
  c10::IValue count;
  archive.read("step", count);
  step(count.toInt());
  for (auto& [name, tensor] : tensors()) archive.try_read(name, *tensor, /*is_buffer=*/true);
}

}  // namespace gradaccum::optim

namespace gradaccum::detail {

/// Points to the parts of a parameter's state.
struct ParamStateParts {
  std::vector<std::pair<std::string, at::Tensor*>> tensors;
  std::int64_t* step = nullptr;               // nullptr if the class does not count
  const optim::OwnParamState* own = nullptr;  // our own class, which checks itself
};

GRADACCUM_INLINE ParamStateParts parts_of(torch::optim::OptimizerParamState& state) {
  using namespace torch::optim;
  const auto adam = [](auto& of) -> ParamStateParts {
    return {{{"exp_avg", &of.exp_avg()}, {"exp_avg_sq", &of.exp_avg_sq()}, {"max_exp_avg_sq", &of.max_exp_avg_sq()}},
            &of.step()};
  };
  if (auto* const own = dynamic_cast<optim::OwnParamState*>(&state))
    return {own->tensors(), own->counts() ? &own->step() : nullptr, own};
  if (auto* const of_adam = dynamic_cast<AdamParamState*>(&state)) return adam(*of_adam);
  if (auto* const of_adamw = dynamic_cast<AdamWParamState*>(&state)) return adam(*of_adamw);
  if (auto* const sgd = dynamic_cast<SGDParamState*>(&state)) return {{{"momentum_buffer", &sgd->momentum_buffer()}}};
  if (auto* const of = dynamic_cast<RMSpropParamState*>(&state))
    return {
        {{"square_avg", &of->square_avg()}, {"momentum_buffer", &of->momentum_buffer()}, {"grad_avg", &of->grad_avg()}},
        &of->step()};
  if (auto* const of = dynamic_cast<AdagradParamState*>(&state)) return {{{"sum", &of->sum()}}, &of->step()};
  return {};
}

GRADACCUM_INLINE std::unique_ptr<torch::optim::OptimizerParamState> new_state_of(
    const torch::optim::Optimizer& optimizer) {
  using namespace torch::optim;
  if (dynamic_cast<const Adam*>(&optimizer)) return std::make_unique<AdamParamState>();
  if (dynamic_cast<const AdamW*>(&optimizer)) return std::make_unique<AdamWParamState>();
  if (dynamic_cast<const SGD*>(&optimizer)) return std::make_unique<SGDParamState>();
  if (dynamic_cast<const RMSprop*>(&optimizer)) return std::make_unique<RMSpropParamState>();
  if (dynamic_cast<const Adagrad*>(&optimizer)) return std::make_unique<AdagradParamState>();
  return nullptr;
}

GRADACCUM_INLINE std::int64_t* step_count_of(torch::optim::OptimizerParamState& state) { return parts_of(state).step; }

/// Returns a dense tensor. Missing rows of 8-bit codes get the code of zero, which differs for the signed codes of
/// exp_avg; dense scales are 1-D.
GRADACCUM_INLINE at::Tensor whole(const std::string& slot, const at::Tensor& tensor) {
  if (!tensor.is_sparse()) return tensor;
  const bool is_signed = tensor.scalar_type() == at::kByte && slot == "exp_avg";
  const auto dense = dense_of(tensor, is_signed ? zero_code : 0);
  return slot.ends_with("_scale") ? dense.flatten() : dense;
}

GRADACCUM_INLINE void make_dense(const torch::optim::Optimizer& optimizer) {
  for (auto& [parameter, state] : optimizer.state())
    for (auto& [slot, tensor] : parts_of(*state).tensors)
      if (tensor->defined()) *tensor = whole(slot, *tensor);
}

GRADACCUM_INLINE void for_each_state_tensor(const torch::optim::Optimizer& optimizer,
                                            c10::function_ref<void(const at::Tensor&)> see) {
  for (auto& [parameter, state] : optimizer.state())
    for (auto& [slot, tensor] : parts_of(*state).tensors)
      if (tensor->defined()) see(*tensor);
}

GRADACCUM_INLINE NamedTensors named_state_of(const torch::optim::Optimizer& optimizer, const NameOf& name_of) {
  NamedTensors all;
  for_each_parameter(optimizer, [&](const at::Tensor& parameter) {
    const auto known = optimizer.state().find(parameter.unsafeGetTensorImpl());
    if (known == optimizer.state().end()) return;
    const auto parts = parts_of(*known->second);
    const auto& name = name_of(parameter);
    for (auto& [slot, tensor] : parts.tensors)
      if (tensor->defined()) all.emplace(slot + "." + name, whole(slot, *tensor));
    if (parts.step) all.emplace("step." + name, at::scalar_tensor(static_cast<double>(*parts.step), at::kDouble));
  });
  return all;
}

GRADACCUM_INLINE std::optional<std::int64_t> extract_count(NamedTensors& tensors, const std::string& name) {
  const auto node = tensors.extract(name);
  if (!node) return {};
  TORCH_CHECK(node.mapped().defined() && node.mapped().numel() == 1, "load_named_state: ", name, " must be one number");
  const auto count = node.mapped().item<double>();
  TORCH_CHECK(count >= 0 && count < 1e15 && count == std::floor(count), "load_named_state: ", name,
              " must be a whole number >= 0, got ", count);
  return static_cast<std::int64_t>(count);
}

/// Moves a parameter's tensors from `tensors` into `state`. Returns false if it has none there, and throws if they do
/// not fit.
GRADACCUM_INLINE bool load_state(torch::optim::OptimizerParamState& state, NamedTensors& tensors,
                                 const std::string& name, const at::Tensor& parameter) {
  const auto parts = parts_of(state);
  const auto may_be_missing = [&](const std::string& slot) {  // depends on the optimizer's settings
    return parts.own || slot == "max_exp_avg_sq" || slot == "momentum_buffer" || slot == "grad_avg";
  };
  bool any = false, complete = true;
  for (auto& [slot, tensor] : parts.tensors) {
    auto node = tensors.extract(slot + "." + name);
    any = any || node;
    complete = complete && (node || may_be_missing(slot));
    if (!node) continue;
    const auto& given = node.mapped();
    TORCH_CHECK(given.defined() && given.layout() == at::kStrided &&
                    (parts.own || given.sizes() == parameter.sizes()) && given.is_complex() == parameter.is_complex(),
                "load_named_state: ", node.key(), " must be dense, of the shape of its parameter, ", parameter.sizes(),
                ", got ",
                given.defined() ? c10::str(given.sizes(), " (", given.scalar_type(), ", ", given.layout(), ")")
                                : "an undefined tensor");
    *tensor = given.device() == parameter.device() ? owned(std::move(node.mapped())) : given.to(parameter.device());
  }
  if (parts.step) {
    const auto step = extract_count(tensors, "step." + name);
    *parts.step = step.value_or(0);
    any = any || step;
    complete = complete && step;
  }
  if (!any) return false;
  TORCH_CHECK(complete, "load_named_state: the state of ", name, " is incomplete");
  if (parts.own) parts.own->check(parameter);
  return true;
}

GRADACCUM_INLINE std::function<void()> prepare_states(torch::optim::Optimizer& optimizer,
                                                      const torch::optim::OptimizerParamState& fresh,
                                                      const NameOf& name_of, NamedTensors& tensors, bool lenient) {
  using States = std::vector<std::pair<void*, std::unique_ptr<torch::optim::OptimizerParamState>>>;
  const auto loaded = std::make_shared<States>();
  for_each_parameter(optimizer, [&](const at::Tensor& parameter) {
    try {
      if (auto state = fresh.clone(); load_state(*state, tensors, name_of(parameter), parameter))
        loaded->emplace_back(parameter.unsafeGetTensorImpl(), std::move(state));
    } catch (const c10::Error&) {
      if (!lenient) throw;
    }
  });
  return [&optimizer, loaded, lenient] {
    if (!lenient) optimizer.state().clear();
    for (auto& [parameter, state] : *loaded) optimizer.state()[parameter] = std::move(state);
  };
}

GRADACCUM_INLINE at::Tensor dense_of(const at::Tensor& moments, std::int64_t zero) {
  if (!moments.defined() || !moments.is_sparse()) return moments;
  const auto rows = moments._indices()[0], values = moments._values();
  const bool is_of_another = moments.sparse_dim() != 1 || std::get<0>(at::_unique2(rows)).numel() < rows.numel();
  if (is_of_another) return moments.to_dense();  // another optimizer's: sums rows
  return at::full(moments.sizes(), zero, values.options()).index_copy_(0, rows, values);  // a sum would lose -0
}

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

/// Archives a parameter group's options.
struct GroupState {
  torch::optim::OptimizerParamGroup& group;

  void state(Archive& archive) {
    archive.setting("parameters", static_cast<std::int64_t>(group.params().size()));
    const std::shared_ptr<torch::optim::OptimizerOptions> options = group.options().clone();
    TORCH_CHECK(archive_options(archive, *options), "OptimizerState: ", type_name(*options),
                " cannot be saved; give the optimizer a member void state(ga::Archive&)");
    if (archive.loading()) archive.when_all_fit([&of = group, options] { of.set_options(options->clone()); });
  }
};

GRADACCUM_INLINE void archive_groups(Archive& archive, torch::optim::Optimizer& optimizer) {
  auto& groups = optimizer.param_groups();
  for (std::size_t i = 0; i < groups.size(); ++i) archive("group" + std::to_string(i), GroupState{groups[i]});
}

GRADACCUM_INLINE Archive::Values options_of(const std::vector<optim::NamedOptimizer>& optimizers) {
  Archive::Values all;
  for (auto& [name, optimizer] : optimizers) try {
      Archive archive;
      archive_groups(archive, optimizer);
      for (auto& [option, value] : archive.values()) all.emplace(name.empty() ? option : name + "." + option, value);
    } catch (const c10::Error&) {  // options of a user's class
    }
  return all;
}

GRADACCUM_INLINE void set_options(const std::vector<optim::NamedOptimizer>& optimizers,
                                  const Archive::Values& options) {
  for (auto& [name, optimizer] : optimizers) {
    const auto prefix = name.empty() ? name : name + ".";
    Archive::Values own;
    for (auto& [option, value] : options)
      if (option.starts_with(prefix)) own.emplace(option.substr(prefix.size()), value);
    if (own.empty()) continue;  // of a user's class
    Archive archive(std::move(own));
    archive_groups(archive, optimizer);
  }
}

}  // namespace gradaccum::detail

#undef GRADACCUM_INLINE
