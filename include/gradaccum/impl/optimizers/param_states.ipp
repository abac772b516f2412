// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/optimizers/param_states.hpp>

#include <gradaccum/detail/kernels/dynamic_map.hpp>
#include <gradaccum/detail/state/owned_tensor.hpp>
#include <gradaccum/detail/types/types.hpp>

#include <ATen/core/ivalue.h>
#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <ATen/ops/_unique2.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/tensor.h>
#include <c10/util/Exception.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>
#include <torch/serialize/archive.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <tuple>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum::detail {

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

/// The parts of a parameter's state.
struct ParamStateParts {
  std::vector<std::pair<std::string, at::Tensor*>> tensors;
  std::int64_t* step = nullptr;        // nullptr if the class does not count
  const OwnParamState* own = nullptr;  // our own class, which checks itself
};

GRADACCUM_INLINE ParamStateParts parts_of(torch::optim::OptimizerParamState& state) {
  using namespace torch::optim;
  const auto adam = [](auto& of) -> ParamStateParts {
    return {{{"exp_avg", &of.exp_avg()}, {"exp_avg_sq", &of.exp_avg_sq()}, {"max_exp_avg_sq", &of.max_exp_avg_sq()}},
            &of.step()};
  };
  if (auto* const own = dynamic_cast<OwnParamState*>(&state)) return {own->tensors(), &own->step(), own};
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

/// Returns a dense tensor. 8-bit codes of exp_avg are signed, which changes their zero; dense scales are 1-D.
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

GRADACCUM_INLINE std::optional<std::int64_t> taken_count(NamedTensors& tensors, const std::string& name) {
  const auto node = tensors.extract(name);
  if (!node) return {};
  TORCH_CHECK(node.mapped().defined() && node.mapped().numel() == 1, "load_named_state: ", name, " must be one number");
  const auto count = node.mapped().item<double>();
  TORCH_CHECK(count >= 0 && count < 1e15 && count == std::floor(count), "load_named_state: ", name,
              " must be a whole number >= 0, got ", count);
  return static_cast<std::int64_t>(count);
}

/// Moves a parameter's tensors from `tensors` into `state`, and checks them. Returns false if there are none.
GRADACCUM_INLINE bool take_state(torch::optim::OptimizerParamState& state, NamedTensors& tensors,
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
    const auto step = taken_count(tensors, "step." + name);
    *parts.step = step.value_or(0);
    any = any || step;
    complete = complete && step;
  }
  if (!any) return false;
  TORCH_CHECK(complete, "load_named_state: the state of ", name, " is incomplete");
  if (parts.own) parts.own->check(parameter);
  return true;
}

GRADACCUM_INLINE std::function<void()> take_states(torch::optim::Optimizer& optimizer,
                                                   const torch::optim::OptimizerParamState& fresh,
                                                   const NameOf& name_of, NamedTensors& tensors, bool lenient) {
  using States = std::vector<std::pair<void*, std::unique_ptr<torch::optim::OptimizerParamState>>>;
  const auto loaded = std::make_shared<States>();
  for_each_parameter(optimizer, [&](const at::Tensor& parameter) {
    try {
      if (auto state = fresh.clone(); take_state(*state, tensors, name_of(parameter), parameter))
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

GRADACCUM_INLINE bool steps_by_rows(const at::Tensor& parameter, const at::Tensor& gradient,
                                    const Multiplier& multiplier) {
  if (!gradient.is_sparse() || gradient.sparse_dim() != 1 || !parameter.is_cpu() || parameter.numel() == 0)
    return false;
  if (!is_plain(parameter) || !parameter.is_contiguous() || parameter.is_complex() || gradient.is_complex())
    return false;
  if (parameter.size(0) > std::numeric_limits<std::int32_t>::max()) return false;
  const double by = multiplier.on_host() ? multiplier.host() : multiplier.on(at::kCPU).item<double>();
  const double most =
      state_type(parameter) == at::kDouble ? std::numeric_limits<double>::max() : std::numeric_limits<float>::max();
  return by <= most && !std::signbit(by);
}

GRADACCUM_INLINE bool has_duplicates(const at::Tensor& rows) {
  return std::get<0>(at::_unique2(rows)).numel() < rows.numel();
}

GRADACCUM_INLINE at::Tensor dense_of(const at::Tensor& moments, std::int64_t zero) {
  if (!moments.defined() || !moments.is_sparse()) return moments;
  const auto rows = moments._indices()[0], values = moments._values();
  if (moments.sparse_dim() != 1 || has_duplicates(rows)) return moments.to_dense();       // from another optimizer
  return at::full(moments.sizes(), zero, values.options()).index_copy_(0, rows, values);  // a sum would lose -0
}

/// Returns the rows in which the bits of a moment differ from zero.
GRADACCUM_INLINE at::Tensor rows_in_use(std::int64_t number, const std::vector<Moments>& all) {
  constexpr std::int64_t at_once = 4096;
  std::vector<at::Tensor> found;
  for (std::int64_t from = 0; from < number; from += at_once) {
    const auto rows = std::min(at_once, number - from);
    auto used = at::full({rows}, false, at::TensorOptions(at::kBool));
    for (auto& moments : all) {
      if (!moments.tensor.defined()) continue;
      const auto size = moments.tensor.element_size();
      const auto bits = moments.tensor.contiguous().view({number, moments.per_row}).narrow(0, from, rows);
      used.logical_or_(bits.view(size == 8 ? at::kLong : size == 4 ? at::kInt : at::kByte).ne(moments.zero).any(1));
    }
    found.push_back(used.nonzero().flatten().add_(from));
  }
  return at::cat(found);
}

GRADACCUM_INLINE StepRows::StepRows(const at::Tensor& parameter, const at::Tensor& gradient,
                                    const std::vector<Moments>& moments)
    : moments_(static_cast<std::size_t>(parameter.size(0)), -1), values_(moments_.size(), -1) {
  const auto summed = gradient.coalesce();
  gradient_ = summed._values();
  const auto known = std::ranges::find_if(moments, [](const Moments& of) { return of.tensor.defined(); });
  if (known == moments.end())
    rows_ = at::empty({0}, at::kLong);
  else
    rows_ = known->tensor.is_sparse() ? known->tensor._indices()[0] : rows_in_use(parameter.size(0), moments);
  had_ = rows_.size(0);
  const auto* const had = rows_.contiguous().const_data_ptr<std::int64_t>();
  std::int32_t place = 0;
  for (std::int64_t i = 0; i < had_; ++i) moments_[static_cast<std::size_t>(had[i])] = place++;
  const auto of_gradient = summed._indices()[0].contiguous();
  const auto* const numbers = of_gradient.const_data_ptr<std::int64_t>();
  std::vector<std::int64_t> added;
  for (std::int64_t i = 0; i < of_gradient.size(0); ++i) {
    const auto row = static_cast<std::size_t>(numbers[i]);
    values_[row] = static_cast<std::int32_t>(i);
    if (moments_[row] >= 0) continue;
    moments_[row] = place++;
    added.push_back(numbers[i]);
  }
  if (!added.empty()) rows_ = at::cat({rows_, at::tensor(added, at::kLong)});
}

/// Appends a scratch row for each task. Grows the memory by an eighth, not row by row.
GRADACCUM_INLINE at::Tensor StepRows::values_of(const Moments& moments) const {
  const auto needed = count() + tasks;
  at::Tensor values;
  if (moments.tensor.defined())
    values = moments.tensor.is_sparse()
                 ? moments.tensor._values().reshape({-1, moments.per_row})
                 : moments.tensor.reshape({-1, moments.per_row}).index_select(0, rows_.narrow(0, 0, had_));
  if (values.defined()) {
    const auto room = static_cast<std::int64_t>(values.storage().nbytes()) / values.element_size() / moments.per_row;
    if (values.storage_offset() == 0 && values.is_contiguous() && room >= needed) {
      auto all = values.as_strided({needed, moments.per_row}, {moments.per_row, 1});
      all.narrow(0, had_, needed - had_).fill_(moments.zero);  // a step that failed may have written there
      return all;
    }
  }
  auto grown = at::full({needed + count() / 8, moments.per_row}, moments.zero, at::TensorOptions(moments.type));
  if (values.defined()) grown.narrow(0, 0, had_).copy_(values);
  return grown.narrow(0, 0, needed);
}

GRADACCUM_INLINE at::Tensor StepRows::state_of(const at::Tensor& values, const at::Tensor& parameter) const {
  const auto per_row = values.size(1);
  std::vector<std::int64_t> sizes{parameter.size(0), per_row}, of_values{count(), per_row};
  if (per_row == parameter.numel() / parameter.size(0)) {
    sizes = parameter.sizes().vec();
    of_values = sizes;
    of_values[0] = count();
  }
  return at::_sparse_coo_tensor_unsafe(rows_.unsqueeze(0), values.narrow(0, 0, count()).view(of_values), sizes,
                                       values.options().layout(at::kSparse));
}

/// Makes all moments dense if one is, since all must have the same rows.
GRADACCUM_INLINE std::shared_ptr<const StepRows> rows_of(const at::Tensor& parameter, const at::Tensor& gradient,
                                                         std::vector<Moments>& moments) {
  const bool mixed =
      std::ranges::any_of(moments, [](const Moments& of) { return of.tensor.defined() && !of.tensor.is_sparse(); });
  if (mixed)
    for (auto& of : moments) of.tensor = dense_of(of.tensor, of.zero);
  auto rows = std::make_shared<const StepRows>(parameter, gradient, moments);
  for (auto& of : moments) of.tensor = rows->values_of(of);
  return rows;
}

GRADACCUM_INLINE std::shared_ptr<const StepRows> prepare_moments(const at::Tensor& parameter, at::Tensor& gradient,
                                                                 const std::vector<FloatMoments>& moments,
                                                                 bool by_rows) {
  if (!by_rows) {
    if (gradient.is_sparse()) gradient = gradient.to_dense();
    for (auto& [tensor, name] : moments) tensor = checked_state(dense_of(tensor), parameter, name);
    return nullptr;
  }
  std::vector<Moments> all;
  for (auto& [tensor, name] : moments) {
    TORCH_CHECK(!tensor.defined() || !tensor.is_sparse() ||
                    (tensor.sparse_dim() == 1 && tensor.sizes() == parameter.sizes() && tensor.is_cpu()),
                "optimizer state: ", name, " must have the shape and device of its parameter, ", parameter.sizes(),
                ", got rows of ", tensor.sizes());
    const bool is_dense = tensor.defined() && !tensor.is_sparse();
    all.push_back({is_dense ? checked_state(tensor, parameter, name) : tensor, state_type(parameter),
                   parameter.numel() / parameter.size(0)});
  }
  auto rows = rows_of(parameter, gradient, all);
  for (std::size_t i = 0; i < all.size(); ++i) moments[i].tensor = all[i].tensor;
  return rows;
}

GRADACCUM_INLINE void StepRows::run(bool all, c10::function_ref<void(const Row&)> body) const {
  const auto number = static_cast<std::int64_t>(moments_.size()), share = (number + tasks - 1) / tasks;
  parallel_for(tasks, [&](std::int64_t task) {
    for (auto row = task * share; row < std::min(number, (task + 1) * share); ++row) {
      const auto place = moments_[static_cast<std::size_t>(row)];
      if (place >= 0 || all) body({row, place >= 0 ? place : count() + task, values_[static_cast<std::size_t>(row)]});
    }
  });
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

GRADACCUM_INLINE std::string name_of_piece(const Shards& shards, std::size_t place, const std::string& parameter) {
  const auto piece = shards.own_piece(place);
  return PieceName{parameter, piece.begin, piece.end, at::DimVector(shards.parameters()[place].sizes())}.text();
}

GRADACCUM_INLINE NamedParameters named_pieces(const Shards& shards, const NamedParameters& parameters) {
  const NameOf name_of(parameters);
  NamedParameters pieces;
  for (std::size_t place = 0; place < shards.size(); ++place)
    pieces.insert(name_of_piece(shards, place, name_of(shards.parameters()[place])), shards.own(place));
  return pieces;
}

GRADACCUM_INLINE at::Tensor own_part(const Pieces& state, const Shards& shards, std::size_t place,
                                     const std::string& name) {
  if (!shards.is_cut(place) || state.is_number()) return state.whole();
  const auto& parameter = shards.parameters()[place];
  TORCH_CHECK(state.sizes() == parameter.sizes() && state.elements_of_number() > 0, "load_named_state: ", name,
              " must be of the shape of its parameter, ", parameter.sizes(),
              ", or have a number for each block of it, got pieces of ", state.sizes());
  const auto piece = shards.own_piece(place);
  return state.part(piece.begin, piece.end);
}

/// Returns this rank's part of a tensor that was saved whole.
GRADACCUM_INLINE at::Tensor own_part(const at::Tensor& whole, const Shards& shards, std::size_t place,
                                     const std::string& name) {
  if (!shards.is_cut(place) || !whole.defined() || whole.dim() == 0) return whole;
  const auto& parameter = shards.parameters()[place];
  const auto blocks = eight_bit_blocks(parameter.numel());
  TORCH_CHECK(whole.layout() == at::kStrided &&
                  (whole.sizes() == parameter.sizes() || whole.sizes() == at::IntArrayRef{blocks}),
              "load_named_state: ", name, " must be dense, of the shape of its parameter, ", parameter.sizes(),
              ", or have a number for each block of it, got ", whole.sizes());
  Pieces one(name);
  one.add({name, 0, parameter.numel(), at::DimVector(parameter.sizes())}, whole);
  return own_part(one, shards, place, name);
}

/// Returns the parameters' indices by name.
GRADACCUM_INLINE std::map<std::string, std::size_t> places_by_name(const Shards& shards,
                                                                   const NamedParameters& parameters) {
  const NameOf name_of(parameters);
  std::map<std::string, std::size_t> places;
  for (std::size_t place = 0; place < shards.size(); ++place) places[name_of(shards.parameters()[place])] = place;
  return places;
}

GRADACCUM_INLINE NamedTensors own_part(NamedTensors state, const Shards& shards, const NamedParameters& parameters,
                                       bool lenient) {
  const auto places = places_by_name(shards, parameters);
  const auto pieces = take_pieces(state);
  NamedTensors own;
  const auto take = [&](const std::string& full, const auto& saved) {
    const auto dot = full.find('.');  // exp_avg.0.weight
    const auto found = dot == full.npos ? places.end() : places.find(full.substr(dot + 1));
    TORCH_CHECK(lenient || found != places.end(), "OptimizerState: there is no parameter, or no such state, for ",
                full);
    if (found == places.end() || shards.own_piece(found->second).size() == 0) return;
    try {
      own.emplace(full.substr(0, dot + 1) + name_of_piece(shards, found->second, found->first),
                  own_part(saved, shards, found->second, full));
    } catch (const c10::Error&) {  // has another shape
      if (!lenient) throw;
    }
  };
  for (auto& [full, tensor] : state) take(full, tensor);
  for (auto& [full, saved] : pieces) take(full, saved);
  return own;
}

GRADACCUM_INLINE NamedTensors whole_state(NamedTensors state) {
  for (auto& [full, pieces] : take_pieces(state)) state.emplace(full, pieces.whole());
  return state;
}

GRADACCUM_INLINE void DistinctParameters::check(const char* optimizer,
                                                const std::vector<torch::optim::OptimizerParamGroup>& groups) {
  std::size_t i = 0;
  bool same = true;
  for (auto& group : groups)
    for (auto& parameter : group.params()) {
      same = same && i < known_.size() && known_[i] == parameter.unsafeGetTensorImpl();
      ++i;
    }
  if (same && i == known_.size()) return;
  std::unordered_map<const void*, std::size_t> places;
  std::vector<const void*> all;
  for (auto& group : groups)
    for (auto& parameter : group.params()) {
      all.push_back(parameter.unsafeGetTensorImpl());
      TORCH_CHECK(places.emplace(all.back(), places.size()).second, optimizer, ": a parameter of shape ",
                  parameter.sizes(), " is listed twice; list it once, in one group");
    }
  known_ = std::move(all);
  places_ = std::move(places);
}

/// Mixes a number's bits into all 64, as the SplitMix64 generator does.
GRADACCUM_INLINE std::uint64_t scattered(std::uint64_t x) {
  x += 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

GRADACCUM_INLINE std::uint64_t StochasticRounding::next_key(std::size_t place) {
  if (steps_.size() <= place) steps_.resize(place + 1);
  return scattered(scattered(scattered(*seed_) + place) + static_cast<std::uint64_t>(steps_[place]++));
}

GRADACCUM_INLINE void StochasticRounding::set_steps(std::vector<std::int64_t> steps) {
  for (auto count : steps) TORCH_CHECK(count >= 0, "stochastic_rounding: a step count must be >= 0, got ", count);
  steps_ = std::move(steps);
}

}  // namespace gradaccum::detail

#undef GRADACCUM_INLINE
