// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/checkpoint/recomputation.hpp>

#include <ATen/SequenceNumber.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/hardswish.h>
#include <ATen/ops/leaky_relu.h>
#include <ATen/ops/mish.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/native_layer_norm.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/zeros.h>
#include <ATen/record_function.h>
#include <c10/util/DimVector.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/generated/Functions.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <algorithm>
#include <mutex>
#include <string_view>
#include <unordered_map>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum::detail {

/// An autograd engine that takes saved-tensor hooks from the scopes. An operation requests hooks from the engine for
/// each tensor that it saves. LibTorch's base engine returns none; Python's engine returns Python's hooks.
///
/// Runs backward on the base engine, since LibTorch starts device threads once per process, for the engine that first
/// uses a device.
class C10_EXPORT HookEngine final : public torch::autograd::Engine {
 public:
  ~HookEngine() override { stop(); }  // the base class requires that its threads have ended

  std::unique_ptr<torch::autograd::SavedVariableHooks> get_default_saved_variable_hooks() override {
    auto* const scope = SavingScope::innermost();
    return scope ? scope->hooks() : nullptr;
  }

  torch::autograd::variable_list execute(const torch::autograd::edge_list& roots,
                                         const torch::autograd::variable_list& inputs, bool keep_graph,
                                         bool create_graph, bool accumulate_grad,
                                         const torch::autograd::edge_list& outputs) override {
    return get_base_engine().execute(roots, inputs, keep_graph, create_graph, accumulate_grad, outputs);
  }

  static void install(const char* owner) {
    auto& engine = get_default_engine();
    if (&engine == &instance()) return;
    TORCH_CHECK(&engine == &get_base_engine(), owner,
                ": LibTorch's own engine of autograd must be at work, got another one (Python's, where its torch is "
                "loaded in this process); use Python's torch.autograd.graph there");
    torch::autograd::set_default_engine_stub(&HookEngine::instance);
  }

 private:
  static torch::autograd::Engine& instance() {
    static HookEngine engine;
    return engine;
  }
};

GRADACCUM_INLINE SavingScope::SavingScope(const char* owner) : outer_(top()) {
  HookEngine::install(owner);
  top() = this;
}

GRADACCUM_INLINE SavingScope::~SavingScope() {
  for (auto* scope = &top(); *scope; scope = &(*scope)->outer_)  // usually the first
    if (*scope == this) {
      *scope = outer_;
      break;
    }
}

GRADACCUM_INLINE SavingScope*& SavingScope::top() {
  static thread_local SavingScope* scope = nullptr;
  return scope;
}

/// Records the epsilon of each LayerNorm that runs on this thread, by its node's sequence number. The node has all else
/// that is needed to rerun it.
class LayerNormEpsilons {
 public:
  LayerNormEpsilons()
      : handle_(at::addThreadLocalCallback(
            at::RecordFunctionCallback(&note).needsInputs(true).scopes({at::RecordScope::FUNCTION}))) {
    ++noted().scopes;
  }
  LayerNormEpsilons(const LayerNormEpsilons&) = delete;
  LayerNormEpsilons& operator=(const LayerNormEpsilons&) = delete;
  ~LayerNormEpsilons() {
    at::removeCallback(handle_);
    if (--noted().scopes == 0) noted().epsilons.clear();
  }

  static std::optional<double> of(std::uint64_t sequence_number) {
    const auto found = noted().epsilons.find(sequence_number);
    return found == noted().epsilons.end() ? std::nullopt : std::optional(found->second);
  }

 private:
  struct Noted {
    std::unordered_map<std::uint64_t, double> epsilons;
    int scopes = 0;
  };
  static Noted& noted() {
    static thread_local Noted noted;
    return noted;
  }

  static std::unique_ptr<at::ObserverContext> note(const at::RecordFunction& operation) {
    if (std::string_view(operation.name()) != "aten::native_layer_norm" || operation.seqNr() < 0) return nullptr;
    const auto inputs = recorded_inputs(operation);
    if (inputs.size() == 5 && inputs[4].isDouble())
      noted().epsilons[static_cast<std::uint64_t>(operation.seqNr())] = inputs[4].toDouble();
    return nullptr;
  }

  at::CallbackHandle handle_;
};

/// The result of a cheap operation, saved by another one, that is recomputed from the tensors its own operation saves.
///
/// GELU saves its input, and the matrix product after it saves GELU's result: recomputing GELU halves that memory.
/// Recomputing LayerNorm does, too.
class CheapResult {
 public:
  /// Returns nothing unless the tensor is the result of a cheap operation with sequence number `from` or later.
  static std::optional<CheapResult> of(const at::Tensor& tensor, std::uint64_t from) {
    if (tensor.layout() != at::kStrided || !tensor.grad_fn()) return {};
    const at::Tensor source = tensor.is_view() ? at::Tensor(tensor._base()) : tensor;
    const bool same_numbers = tensor.scalar_type() == source.scalar_type() && !tensor.is_conj() && !tensor.is_neg();
    if (!same_numbers || source._version() > 0) return {};  // it may have changed in place without a trace in the graph
    CheapResult result(source, tensor);
    if (!result.operation_ || result.operation_->sequence_nr() < from) return {};
    result.epsilon_ = LayerNormEpsilons::of(result.operation_->sequence_nr());
    if (!result.remake(/*for_real=*/false)) return {};
    return result;
  }

  /// Returns whether this thread unpacks an operation's saved tensors ahead of that operation's backward.
  static bool remaking() { return depth() > 0; }

  at::Tensor tensor() const {
    const at::NoGradGuard no_gradients;
    const Remaking remaking;
    const at::Tensor whole = *remake(true);
    TORCH_CHECK(whole.strides() == at::IntArrayRef(source_strides_), "CheckpointedSequential: ", operation_->name(),
                " must give the same layout again");
    return whole.as_strided(sizes_, strides_, offset_);
  }

 private:
  using Node = std::remove_cvref_t<decltype(std::declval<at::Tensor>().grad_fn())>;  // shared_ptr or intrusive_ptr

  CheapResult(const at::Tensor& source, const at::Tensor& tensor)
      : operation_(source.grad_fn()),
        source_strides_(source.strides()),
        sizes_(tensor.sizes()),
        strides_(tensor.strides()),
        offset_(tensor.storage_offset()) {}

  static int& depth() {
    static thread_local int depth = 0;
    return depth;
  }
  struct Remaking {
    Remaking() { ++depth(); }
    ~Remaking() { --depth(); }
  };

  template <class Operation>
  const Operation* as() const {
    return dynamic_cast<const Operation*>(operation_.get());
  }

  /// Recomputes the result, or only checks whether it can (`for_real` = false). Returns nothing if it cannot.
  std::optional<at::Tensor> remake(bool for_real) const {
    using namespace torch::autograd::generated;
    const auto made = [for_real](auto&& make) { return for_real ? make() : at::Tensor(); };
    if (auto* gelu = as<GeluBackward0>())
      return made([&] { return at::gelu(gelu->self_.unpack(), gelu->approximate); });
    if (auto* silu = as<SiluBackward0>()) return made([&] { return at::silu(silu->self_.unpack()); });
    if (auto* mish = as<MishBackward0>()) return made([&] { return at::mish(mish->self_.unpack()); });
    if (auto* swish = as<HardswishBackward0>()) return made([&] { return at::hardswish(swish->self_.unpack()); });
    if (auto* leaky = as<LeakyReluBackward0>())
      return made([&] { return at::leaky_relu(leaky->self_.unpack(), leaky->negative_slope); });
    if (auto* product = as<MulBackward0>(); product && product->self_.has_hooks() && product->other_.has_hooks())
      return made([&] { return at::mul(product->self_.unpack(), product->other_.unpack()); });
    if (auto* norm = as<NativeLayerNormBackward0>(); norm && epsilon_)
      return made([&] {
        return std::get<0>(at::native_layer_norm_symint(norm->input_.unpack(), norm->normalized_shape,
                                                        norm->weight_.unpack(), norm->bias_.unpack(), *epsilon_));
      });
    return {};
  }

  Node operation_;
  at::DimVector source_strides_, sizes_, strides_;
  std::int64_t offset_;
  std::optional<double> epsilon_;  // only for LayerNorm
};

class RebuildingScope::Hooks final : public torch::autograd::SavedVariableHooks {
 public:
  Hooks(std::unique_ptr<SavedVariableHooks> around, std::uint64_t from) : around_(std::move(around)), from_(from) {}
  void call_pack_hook(const at::Tensor& tensor) override {
    result_ = CheapResult::of(tensor, from_);
    version_ = TensorVersion(tensor);
    if (result_) return;
    if (around_)
      around_->call_pack_hook(tensor);
    else
      kept_ = tensor.is_leaf() ? tensor : tensor.tensor_data();
  }
  at::Tensor call_unpack_hook() override {
    TORCH_CHECK(!version_.changed(),
                "CheckpointedSequential: a tensor that backward needs must not change in place after it was saved");
    if (result_) return result_->tensor();
    return around_ ? unpack_around() : kept_;
  }

 private:
  /// Unpacks by the outer scope. An outer checkpoint recomputes a tensor only once per backward, so it is kept.
  at::Tensor unpack_around() {
    const std::lock_guard lock(mutex_);
    if (!kept_.defined()) kept_ = around_->call_unpack_hook();
    return CheapResult::remaking() ? kept_ : std::exchange(kept_, {});
  }

  std::unique_ptr<SavedVariableHooks> around_;
  std::uint64_t from_;
  std::optional<CheapResult> result_;
  TensorVersion version_;
  std::mutex mutex_;  // backward passes may run on several threads
  at::Tensor kept_;
};

GRADACCUM_INLINE RebuildingScope::RebuildingScope()
    : SavingScope("CheckpointedSequential"),
      from_(at::sequence_number::peek()),
      epsilons_(std::make_shared<LayerNormEpsilons>()) {}

GRADACCUM_INLINE std::unique_ptr<torch::autograd::SavedVariableHooks> RebuildingScope::hooks() {
  return std::make_unique<Hooks>(outer() ? outer()->hooks() : nullptr, from_);
}

GRADACCUM_INLINE SavedSlot::SavedSlot(const at::Tensor& tensor, const CheckpointOptions& options)
    : traits(tensor),
      place(options.preserve_rng ? RandomState::place() : 0),
      content(options.check_content ? content_hash(tensor) : 0) {}

GRADACCUM_INLINE std::string SavedSlot::difference(const SavedSlot& again, bool compare_places) const {
  if (again.traits != traits) return c10::str("a saved tensor was ", traits, " and is ", again.traits);
  if (compare_places && again.place != place)
    return "random numbers were drawn elsewhere in between (is a module in another mode? did another thread draw? One "
           "at a time may; where this part draws none, preserve_rng = false)";
  if (again.content != 0 && again.content != content)
    return c10::str("the contents of a saved tensor (", traits, ") are not the same");
  return "";
}

/// Records the name of LibTorch's operation that ran last on this thread.
class [[nodiscard]] OperationNames {
 public:
  OperationNames()
      : handle_(at::addThreadLocalCallback(at::RecordFunctionCallback(&note).scopes({at::RecordScope::FUNCTION}))) {
    last().clear();
  }
  OperationNames(const OperationNames&) = delete;
  OperationNames& operator=(const OperationNames&) = delete;
  ~OperationNames() { at::removeCallback(handle_); }

  static std::string& last() {
    static thread_local std::string name;
    return name;
  }

 private:
  static std::unique_ptr<at::ObserverContext> note(const at::RecordFunction& operation) {
    last() = operation.name();
    return nullptr;
  }

  at::CallbackHandle handle_;
};

class Recomputation::Hooks final : public torch::autograd::SavedVariableHooks {
 public:
  explicit Hooks(Recomputation& recomputation) : recomputation_(recomputation) {}
  void call_pack_hook(const at::Tensor& tensor) override {
    tensor_ = tensor.tensor_data();  // for gradients that the part computes itself
    recomputation_.add(tensor_);
  }
  at::Tensor call_unpack_hook() override { return tensor_; }

 private:
  Recomputation& recomputation_;
  at::Tensor tensor_;
};

class Recomputation::Scope final : SavingScope {
 public:
  explicit Scope(Recomputation& recomputation) : SavingScope("checkpoint"), recomputation_(recomputation) { ++depth(); }
  ~Scope() override { --depth(); }

 private:
  std::unique_ptr<torch::autograd::SavedVariableHooks> hooks() override {
    return std::make_unique<Hooks>(recomputation_);
  }
  Recomputation& recomputation_;
};

GRADACCUM_INLINE Recomputation::Recomputation(const std::vector<SavedSlot>& slots, std::vector<bool> wanted,
                                              const Rules& rules)
    : slots_(slots),
      wanted_(std::move(wanted)),
      rules_(rules),
      tensors_(slots.size()),
      missing_(std::ranges::count(wanted_, true)),
      pass_(torch::autograd::get_current_graph_task_id()) {}

GRADACCUM_INLINE void Recomputation::run(const std::function<void()>& part) {
  const Scope scope(*this);
  try {
    part();
  } catch (const Stop&) {
  }
}

GRADACCUM_INLINE std::vector<at::Tensor> Recomputation::tensors(const std::function<void(Recomputation&)>& run) {
  if (difference_.empty() && missing_ > 0)
    difference_ = c10::str("it ended after saving ", next_, " tensors of ", slots_.size());
  TORCH_CHECK(difference_.empty(), "checkpoint: the function must do the same when it runs again, but ",
              operation_at(next_, run), difference_);
  return std::move(tensors_);
}

GRADACCUM_INLINE void Recomputation::add(const at::Tensor& tensor) {
  if (!done_) look_at(tensor);
  // Does not throw within a backward pass that the part itself runs: LibTorch's engine would not survive it.
  if (done_ && torch::autograd::get_current_graph_task_id() == pass_) throw Stop();
}

GRADACCUM_INLINE void Recomputation::look_at(const at::Tensor& tensor) {
  const std::size_t slot = next_++;
  if (slot >= slots_.size()) {
    difference_ = c10::str("it saves more than ", slots_.size(), " tensors");
  } else if (slot < stop_at_) {
    difference_ = slots_[slot].difference(SavedSlot(tensor, rules_.options), rules_.compare_places);
  }
  done_ = slot >= stop_at_ || !difference_.empty();
  if (done_ || !wanted_[slot]) return;
  tensors_[slot] = tensor;
  done_ = --missing_ == 0 && rules_.options.early_stop;
}

/// Names the operation that saves tensor number `count`, counted from 1, as "at aten::mul: ".
GRADACCUM_INLINE std::string Recomputation::operation_at(std::size_t count,
                                                         const std::function<void(Recomputation&)>& run) const {
  const OperationNames names;
  Recomputation again(slots_, std::vector<bool>(slots_.size()), {});
  again.stop_at_ = count - 1;
  try {
    run(again);
  } catch (...) {  // the name of the last operation is enough
  }
  return names.last().empty() ? "" : "at " + names.last() + ": ";
}

GRADACCUM_INLINE int& Recomputation::depth() {
  static thread_local int depth = 0;
  return depth;
}

struct KeptTensors::Kept {
  explicit Kept(at::Tensor& handle)
      : version(handle), tensor(std::exchange(handle, at::Tensor()), /*is_output=*/false) {}

  TensorVersion version;
  torch::autograd::SavedVariable tensor;
};

GRADACCUM_INLINE KeptTensors::KeptTensors() = default;
GRADACCUM_INLINE KeptTensors::~KeptTensors() = default;

GRADACCUM_INLINE void KeptTensors::keep(at::Tensor& tensor) { kept_.emplace_back(tensor); }

GRADACCUM_INLINE at::Tensor KeptTensors::bring_back(std::size_t i) const {
  at::Tensor tensor = kept_[i].tensor.unpack();
  // Returns an alias: a hook that the function registers on its input is on the original already.
  if (tensor.requires_grad() && tensor.layout() == at::kStrided) return tensor.alias();
  return tensor;
}

GRADACCUM_INLINE void KeptTensors::check_unchanged() {
  const auto changed = std::ranges::find_if(kept_, [](auto& kept) { return kept.version.changed(); });
  if (changed == kept_.end()) return;
  for (auto& kept : kept_) kept.tensor.reset_data();  // breaks a reference cycle with the changing operation
  TORCH_CHECK(false, "checkpoint: the function must leave its inputs as they are, and changes tensor ",
              changed - kept_.begin(),
              " of them in place, so that running it again would start from something else; let it clone that "
              "input first (an inplace activation at its beginning: without inplace)");
}

/// A checkpointed part of the forward pass: the function that reruns it, and the properties of the tensors that it
/// saved. The operations of the autograd graph share ownership of it.
class CheckpointFrame {
 public:
  CheckpointFrame(const CheckpointOptions& options, std::vector<torch::nn::Module*> modules,
                  std::function<void()> again)
      : rules_{options}, modules_(std::move(modules)), again_(std::move(again)), state_(options.preserve_rng) {
    if (options.check_content) statistics_ = copied_statistics(modules_);  // saved by operations, so compared
  }

  /// Ends the forward pass.
  void complete() {
    rules_.compare_places = state_.finish();
    complete_ = true;
  }

  /// Records the properties of a tensor that an operation saves, and drops the tensor. Returns its slot.
  std::size_t add(const at::Tensor& tensor) {
    const std::lock_guard lock(mutex_);
    slots_.emplace_back(tensor, rules_.options);
    return slots_.size() - 1;
  }

  /// Returns the tensor of a slot. The first call of a backward pass recomputes all tensors that are still needed.
  at::Tensor take(std::size_t slot) {
    const std::lock_guard lock(mutex_);
    const int pass = torch::autograd::get_current_graph_task_id();
    const auto found = std::ranges::find(passes_, pass, &Pass::id);
    auto tensors = found == passes_.end() ? nullptr : found->tensors.lock();
    if (!tensors && pass != not_in_backward) tensors = begin(pass);
    if (tensors && (*tensors)[slot].defined()) return std::exchange((*tensors)[slot], {});
    std::vector<bool> only(slots_.size());
    only[slot] = true;
    return std::move(recompute(only)[slot]);
  }

  /// Releases a slot whose operation is done or destroyed.
  void drop(std::size_t slot) {
    const std::lock_guard lock(mutex_);
    slots_[slot].needed = false;
    for (auto& pass : passes_)
      if (auto tensors = pass.tensors.lock(); tensors && slot < tensors->size()) (*tensors)[slot].reset();
  }

  const SavedSlot& slot(std::size_t i) const { return slots_[i]; }

 private:
  static constexpr int not_in_backward = -1;
  using Tensors = std::vector<at::Tensor>;
  struct Pass {
    int id;
    std::weak_ptr<Tensors> tensors;
  };

  std::shared_ptr<Tensors> begin(int pass) {
    std::vector<bool> needed;
    for (auto& slot : slots_) needed.push_back(slot.needed);
    auto tensors = std::make_shared<Tensors>(recompute(needed));
    // The callback owns the tensors, and is destroyed with the pass even if that fails: tensors never taken are freed.
    torch::autograd::Engine::get_default_engine().queue_callback([tensors] {});
    std::erase_if(passes_, [](auto& each) { return each.tensors.expired(); });
    passes_.push_back({pass, tensors});
    return tensors;
  }

  std::vector<at::Tensor> recompute(const std::vector<bool>& wanted) {
    const auto run = [this](Recomputation& recomputation) {
      const ForwardState::Scope state(state_);
      const FrozenStatistics frozen(modules_, statistics_);
      recomputation.run(again_);
    };
    auto rules = rules_;
    rules.options.early_stop |= !complete_;  // inside the function, which computes gradients itself
    Recomputation recomputation(slots_, wanted, rules);
    run(recomputation);
    return recomputation.tensors(run);
  }

  Recomputation::Rules rules_;
  std::vector<torch::nn::Module*> modules_;
  std::vector<at::Tensor> statistics_;
  std::function<void()> again_;
  ForwardState state_;
  bool complete_ = false;
  std::recursive_mutex mutex_;  // backward passes may run on several threads
  std::vector<SavedSlot> slots_;
  std::vector<Pass> passes_;
};

/// Replaces the tensors that operations save by slots of a frame, for a scope.
class [[nodiscard]] CheckpointScope final : SavingScope {
 public:
  explicit CheckpointScope(std::shared_ptr<CheckpointFrame> frame)
      : SavingScope("checkpoint"), frame_(std::move(frame)) {}

 private:
  class Hooks final : public torch::autograd::SavedVariableHooks {
   public:
    explicit Hooks(std::shared_ptr<CheckpointFrame> frame) : frame_(std::move(frame)) {}
    Hooks(const Hooks&) = delete;
    Hooks& operator=(const Hooks&) = delete;
    ~Hooks() override {
      if (slot_ != none) frame_->drop(slot_);
    }
    void call_pack_hook(const at::Tensor& tensor) override {
      version_ = TensorVersion(tensor);
      slot_ = frame_->add(tensor);
    }
    at::Tensor call_unpack_hook() override {
      TORCH_CHECK(!version_.changed(), "checkpoint: a tensor that backward needs (", frame_->slot(slot_).traits,
                  ") must not change in place after it was saved; clone it before");
      return frame_->take(slot_);
    }

   private:
    static constexpr std::size_t none = std::size_t(-1);
    std::shared_ptr<CheckpointFrame> frame_;
    TensorVersion version_;
    std::size_t slot_ = none;
  };

  std::unique_ptr<torch::autograd::SavedVariableHooks> hooks() override { return std::make_unique<Hooks>(frame_); }

  std::shared_ptr<CheckpointFrame> frame_;
};

GRADACCUM_INLINE void run_in_frame(const CheckpointOptions& options, const std::vector<torch::nn::Module*>& modules,
                                   KeptTensors& inputs, std::function<void()> again,
                                   c10::function_ref<void()> forward) {
  const auto frame = std::make_shared<CheckpointFrame>(options, modules, std::move(again));
  {
    const FrozenStatistics frozen(Recomputation::active() ? modules : std::vector<torch::nn::Module*>());
    const CheckpointScope scope(frame);
    forward();
  }
  inputs.check_unchanged();
  frame->complete();
}

GRADACCUM_INLINE at::Tensor layout_of(const at::Tensor& tensor) {
  const auto elements = storage_bytes(tensor) / static_cast<std::int64_t>(tensor.element_size());
  return at::empty({elements}, tensor.options().device(at::kMeta).requires_grad(false))
      .as_strided(tensor.sizes(), tensor.strides(), tensor.storage_offset());
}

GRADACCUM_INLINE bool same_layout(const at::Tensor& a, const at::Tensor& b) {
  return a.sizes() == b.sizes() && a.strides() == b.strides() && storage_bytes(a) == storage_bytes(b);
}

GRADACCUM_INLINE at::Tensor GradientSink::forward(torch::autograd::AutogradContext*, const at::Tensor& input) {
  return input.detach();
}
GRADACCUM_INLINE torch::autograd::variable_list GradientSink::backward(torch::autograd::AutogradContext*,
                                                                       torch::autograd::variable_list gradients) {
  return gradients;
}

GRADACCUM_INLINE at::Tensor GradientSource::forward(torch::autograd::AutogradContext* context, const at::Tensor& output,
                                                    const at::Tensor& layout, WeakStorage* memory) {
  context->saved_data["layout"] = layout;
  context->saved_data["device"] = output.device();
  context->saved_data["memory"] = reinterpret_cast<std::int64_t>(memory);
  return at::zeros({}, output.options());
}

GRADACCUM_INLINE torch::autograd::variable_list GradientSource::backward(torch::autograd::AutogradContext* context,
                                                                         const torch::autograd::variable_list&) {
  auto& saved = context->saved_data;
  const auto layout = saved["layout"].toTensor();
  const auto elements = storage_bytes(layout) / static_cast<std::int64_t>(layout.element_size());
  const auto gradient = at::zeros({elements}, layout.options().device(saved["device"].toDevice()));
  *reinterpret_cast<WeakStorage*>(saved["memory"].toInt()) = gradient.storage().getWeakStorageImpl();
  return {gradient.as_strided(layout.sizes(), layout.strides(), layout.storage_offset()), {}, {}};
}

}  // namespace gradaccum::detail

#undef GRADACCUM_INLINE
