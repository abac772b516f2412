// SPDX-License-Identifier: Apache-2.0
// Recomputes activations in backward, with the random numbers and autocast of the forward pass.
#pragma once

#include <gradaccum/checkpoint.hpp>

#include <gradaccum/detail/types/recorded_inputs.hpp>
#include <gradaccum/detail/types/uncounted.hpp>

#include <ATen/SequenceNumber.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/hardswish.h>
#include <ATen/ops/leaky_relu.h>
#include <ATen/ops/mish.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/native_layer_norm.h>
#include <ATen/ops/silu.h>
#include <ATen/record_function.h>
#include <c10/util/DimVector.h>
#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/generated/Functions.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <mutex>
#include <string>
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
                ": LibTorch's own autograd engine must be in use, got another one (Python's, if this process has "
                "loaded its torch); use Python's torch.autograd.graph there");
    torch::autograd::set_default_engine_stub(&HookEngine::instance);
  }

 private:
  static torch::autograd::Engine& instance() {
    static HookEngine engine;
    return engine;
  }
};

GRADACCUM_INLINE SavingScope::SavingScope(const char* owner, std::function<Hooks()> hooks)
    : hooks_(std::move(hooks)), outer_(innermost_) {
  HookEngine::install(owner);
  innermost_ = this;
}

GRADACCUM_INLINE SavingScope::~SavingScope() {
  for (auto* scope = &innermost_; *scope; scope = &(*scope)->outer_)  // usually the first
    if (*scope == this) {
      *scope = outer_;
      break;
    }
}

/// The epsilons of the LayerNorms that ran on this thread in a RebuildingScope, by their nodes' sequence numbers. A
/// node has all else that is needed to rerun it.
struct LayerNormEpsilons {
  std::unordered_map<std::uint64_t, double> by_number;
  int scopes = 0;

  static LayerNormEpsilons& of_thread() {
    static thread_local LayerNormEpsilons epsilons;
    return epsilons;
  }

  static std::unique_ptr<at::ObserverContext> record(const at::RecordFunction& operation) {
    if (std::string_view(operation.name()) != "aten::native_layer_norm" || operation.seqNr() < 0) return nullptr;
    const auto inputs = recorded_inputs(operation);
    if (inputs.size() == 5 && inputs[4].isDouble())
      of_thread().by_number[static_cast<std::uint64_t>(operation.seqNr())] = inputs[4].toDouble();
    return nullptr;
  }
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
    const auto& epsilons = LayerNormEpsilons::of_thread().by_number;
    if (const auto found = epsilons.find(result.operation_->sequence_nr()); found != epsilons.end())
      result.epsilon_ = found->second;
    if (!result.remake()) return {};
    return result;
  }

  /// Returns whether this thread unpacks an operation's saved tensors ahead of that operation's backward.
  static bool remaking() { return depth_ > 0; }

  at::Tensor tensor() const {
    const at::NoGradGuard no_gradients;
    ++depth_;
    const auto leave = c10::make_scope_exit([]() noexcept { --depth_; });
    const at::Tensor whole = remake()();
    TORCH_CHECK(whole.strides() == at::IntArrayRef(source_strides_), "CheckpointedSequential: ", operation_->name(),
                " must give the same strides again");
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

  template <class Operation>
  const Operation* as() const {
    return dynamic_cast<const Operation*>(operation_.get());
  }

  /// Returns a function that recomputes the result; empty if there is none.
  std::function<at::Tensor()> remake() const {
    using namespace torch::autograd::generated;
    if (auto* gelu = as<GeluBackward0>()) return [gelu] { return at::gelu(gelu->self_.unpack(), gelu->approximate); };
    if (auto* silu = as<SiluBackward0>()) return [silu] { return at::silu(silu->self_.unpack()); };
    if (auto* mish = as<MishBackward0>()) return [mish] { return at::mish(mish->self_.unpack()); };
    if (auto* swish = as<HardswishBackward0>()) return [swish] { return at::hardswish(swish->self_.unpack()); };
    if (auto* leaky = as<LeakyReluBackward0>())
      return [leaky] { return at::leaky_relu(leaky->self_.unpack(), leaky->negative_slope); };
    if (auto* product = as<MulBackward0>(); product && product->self_.has_hooks() && product->other_.has_hooks())
      return [product] { return at::mul(product->self_.unpack(), product->other_.unpack()); };
    if (auto* norm = as<NativeLayerNormBackward0>(); norm && epsilon_)
      return [norm, epsilon = *epsilon_] {
        return std::get<0>(at::native_layer_norm_symint(norm->input_.unpack(), norm->normalized_shape,
                                                        norm->weight_.unpack(), norm->bias_.unpack(), epsilon));
      };
    return {};
  }

  inline static thread_local int depth_ = 0;

  Node operation_;
  at::DimVector source_strides_, sizes_, strides_;
  std::int64_t offset_;
  std::optional<double> epsilon_;  // only for LayerNorm
};

class RebuildingHooks final : public torch::autograd::SavedVariableHooks {
 public:
  RebuildingHooks(SavingScope::Hooks around, std::uint64_t from) : around_(std::move(around)), from_(from) {}
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
                "CheckpointedSequential: a tensor saved for backward must not change in place; change a clone() of it");
    if (result_) return result_->tensor();
    if (!around_) return kept_;
    const std::lock_guard lock(mutex_);
    if (!kept_.defined()) kept_ = around_->call_unpack_hook();  // an outer checkpoint gives it once per backward
    return CheapResult::remaking() ? kept_ : std::exchange(kept_, {});
  }

 private:
  SavingScope::Hooks around_;
  std::uint64_t from_;
  std::optional<CheapResult> result_;
  TensorVersion version_;
  std::mutex mutex_;  // backward passes may run on several threads
  at::Tensor kept_;
};

GRADACCUM_INLINE RebuildingScope::RebuildingScope()
    : SavingScope("CheckpointedSequential",
                  [this] { return std::make_unique<RebuildingHooks>(outer() ? outer()->hooks() : nullptr, from_); }),
      from_(at::sequence_number::peek()),
      callback_(at::addThreadLocalCallback(at::RecordFunctionCallback(&LayerNormEpsilons::record)
                                               .needsInputs(true)
                                               .scopes({at::RecordScope::FUNCTION}))) {
  ++LayerNormEpsilons::of_thread().scopes;
}

GRADACCUM_INLINE RebuildingScope::~RebuildingScope() {
  at::removeCallback(callback_);
  auto& epsilons = LayerNormEpsilons::of_thread();
  if (--epsilons.scopes == 0) epsilons.by_number.clear();
}

/// The properties of a saved and dropped tensor by which its recomputation is verified.
struct SavedSlot {
  SavedSlot(const at::Tensor& tensor, const CheckpointOptions& options)
      : traits(tensor),
        position(options.preserve_rng ? GeneratorStates::position() : 0),
        content(options.check_content ? content_hash(tensor) : 0) {}

  /// Describes how the recomputed tensor differs from the saved one; empty if they match.
  std::string difference(const SavedSlot& again) const {
    if (again.traits != traits) return c10::str("a saved tensor was ", traits, " and is ", again.traits);
    if (again.position != 0 && again.position != position)
      return "random numbers were drawn elsewhere in between (is a module in another mode? did another thread draw? "
             "One at a time may; where this part draws none, preserve_rng = false)";
    if (again.content != 0 && again.content != content)
      return c10::str("the contents of a saved tensor (", traits, ") are not the same");
    return "";
  }

  TensorTraits traits;
  std::uint64_t position;   // in the stream of random numbers, never 0; 0 unless requested
  std::uint64_t content;    // 0 unless requested
  bool needed = true;       // the operation that saved it may still unpack it
  bool draws_next = false;  // random numbers are drawn next, which that operation may fill the tensor with (RReLU)
};

/// Reruns a part of the forward pass, and captures the tensors that it saves.
class Recomputation {
 public:
  /// Stops at the operation that saves the tensor of slot `stop_at`.
  Recomputation(const std::vector<SavedSlot>& slots, std::vector<bool> wanted, const CheckpointOptions& options,
                std::size_t stop_at = std::size_t(-1))
      : slots_(slots),
        wanted_(std::move(wanted)),
        options_(options),
        stop_at_(stop_at),
        tensors_(slots.size()),
        missing_(std::ranges::count(wanted_, true)),
        pass_(torch::autograd::get_current_graph_task_id()) {}

  void run(const std::function<void()>& part) {
    const SavingScope scope("checkpoint", [this] { return std::make_unique<Hooks>(*this); });
    const RecordingScope unrecorded(nullptr);
    try {
      part();
    } catch (const Stop&) {
    }
  }

  /// Describes how the part differed from its forward pass; empty if it did not.
  std::string difference() const {
    if (!difference_.empty() || missing_ == 0) return difference_;
    return c10::str("it ended after saving ", saved_, " tensors of ", slots_.size());
  }
  std::size_t saved() const { return saved_; }
  std::vector<at::Tensor> tensors() && { return std::move(tensors_); }

 private:
  struct Stop {};  // not a std::exception, which user code may catch

  class Hooks final : public torch::autograd::SavedVariableHooks {
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

  void add(const at::Tensor& tensor) {
    if (!done_) compare(tensor);
    // Does not throw within a backward pass that the part itself runs: LibTorch's engine would not survive it.
    if (done_ && torch::autograd::get_current_graph_task_id() == pass_) throw Stop();
  }

  void compare(const at::Tensor& tensor) {
    const std::size_t slot = saved_++;
    if (slot >= slots_.size()) {
      difference_ = c10::str("it saves more than ", slots_.size(), " tensors");
    } else if (slot < stop_at_) {
      difference_ = slots_[slot].difference(SavedSlot(tensor, options_));
    }
    done_ = slot >= stop_at_ || !difference_.empty();
    if (done_) return;
    if (wanted_[slot]) {
      tensors_[slot] = tensor;
      found_all_ = --missing_ == 0;
    }
    done_ = found_all_ && options_.early_stop && !slots_[slot].draws_next;
  }

  const std::vector<SavedSlot>& slots_;
  std::vector<bool> wanted_;
  CheckpointOptions options_;
  std::size_t stop_at_;
  std::vector<at::Tensor> tensors_;
  std::ptrdiff_t missing_;
  std::size_t saved_ = 0;
  bool done_ = false, found_all_ = false;
  int pass_;
  std::string difference_;
};

GRADACCUM_INLINE at::Tensor SavedInputs::unpack(std::size_t i) const {
  at::Tensor tensor = saved_[i].tensor.unpack();
  // Returns an alias: a hook that the function registers on its input is on the original already.
  if (tensor.requires_grad() && tensor.layout() == at::kStrided) return tensor.alias();
  return tensor;
}

GRADACCUM_INLINE void SavedInputs::check_unchanged() {
  const auto changed = std::ranges::find_if(saved_, [](auto& saved) { return saved.version.changed(); });
  if (changed == saved_.end()) return;
  for (auto& saved : saved_) saved.tensor.reset_data();  // breaks a reference cycle with the changing operation
  TORCH_CHECK(false, "checkpoint: the function must not change its inputs in place, but changes tensor ",
              changed - saved_.begin(),
              " of them, so running it again would start from other values; let it clone() that input first, or "
              "construct an activation at its beginning without inplace");
}

/// A checkpointed part of the forward pass: the function that reruns it, and the properties of the tensors that it
/// saved. The operations of the autograd graph share ownership of it.
class CheckpointFrame {
 public:
  CheckpointFrame(const CheckpointOptions& options, std::function<void()> again)
      : buffers{.with_statistics = options.check_content},  // saved by operations, so compared
        options_(options),
        again_(std::move(again)),
        state_(options.preserve_rng) {}

  /// Ends the forward pass.
  void complete() {
    if (options_.preserve_rng) note_position(GeneratorStates::position());
    draws_ = state_.finish();
    complete_ = true;
  }

  /// Records the properties of a tensor that an operation saves, and drops the tensor. Returns its slot.
  std::size_t add(const at::Tensor& tensor) {
    const std::lock_guard lock(mutex_);
    SavedSlot slot(tensor, options_);
    note_position(slot.position);
    slots_.push_back(slot);
    return slots_.size() - 1;
  }

  /// Returns the tensor of a slot. The first call of a backward pass recomputes all tensors that are still needed.
  at::Tensor unpack(std::size_t slot) {
    const std::lock_guard lock(mutex_);
    const int pass = torch::autograd::get_current_graph_task_id();
    auto tensors = passes_[pass].lock();
    if (!tensors && pass != not_in_backward) tensors = begin(pass);
    if (tensors && (*tensors)[slot].defined()) return std::exchange((*tensors)[slot], {});
    std::vector<bool> only(slots_.size());
    only[slot] = true;
    return std::move(recompute(only)[slot]);
  }

  /// Releases a slot whose operation is done or destroyed.
  void release(std::size_t slot) {
    const std::lock_guard lock(mutex_);
    slots_[slot].needed = false;
    for (auto& [id, pass] : passes_)
      if (auto tensors = pass.lock(); tensors && slot < tensors->size()) (*tensors)[slot].reset();
  }

  const SavedSlot& slot(std::size_t i) const { return slots_[i]; }

  BufferRecord buffers;

 private:
  static constexpr int not_in_backward = -1;
  using Tensors = std::vector<at::Tensor>;

  void note_position(std::uint64_t position) {
    if (!slots_.empty()) slots_.back().draws_next = slots_.back().position != position;
  }

  std::shared_ptr<Tensors> begin(int pass) {
    std::vector<bool> needed;
    for (auto& slot : slots_) needed.push_back(slot.needed);
    auto tensors = std::make_shared<Tensors>(recompute(needed));
    // The callback owns the tensors, and is destroyed with the pass even if that fails: so all of them are freed.
    torch::autograd::Engine::get_default_engine().queue_callback([tensors] {});
    std::erase_if(passes_, [](auto& each) { return each.second.expired(); });
    passes_[pass] = tensors;
    return tensors;
  }

  std::vector<at::Tensor> recompute(const std::vector<bool>& wanted) {
    auto options = options_;
    options.early_stop |= !complete_;  // inside the function, which computes gradients itself
    options.preserve_rng = draws_;     // else numbers that others draw do not matter
    Recomputation recomputation(slots_, wanted, options);
    rerun(recomputation);
    const auto difference = recomputation.difference();
    TORCH_CHECK(difference.empty(), "checkpoint: the function must do the same when it runs again, but ",
                operation_that_saves(recomputation.saved() - 1), difference);
    return std::move(recomputation).tensors();
  }

  void rerun(Recomputation& recomputation) {
    const UncountedScope uncounted;
    const ForwardState::Scope state(state_);
    const FrozenBuffers frozen(buffers.changed);
    recomputation.run(again_);
  }

  /// Reruns the function to name the operation that saves the tensor of a slot, as "at aten::mul: ".
  std::string operation_that_saves(std::size_t slot) {
    static thread_local std::string last;
    last.clear();
    const auto record = [](const at::RecordFunction& operation) -> std::unique_ptr<at::ObserverContext> {
      last = operation.name();
      return nullptr;
    };
    const auto callback =
        at::addThreadLocalCallback(at::RecordFunctionCallback(record).scopes({at::RecordScope::FUNCTION}));
    try {
      Recomputation recomputation(slots_, std::vector<bool>(slots_.size()), {.preserve_rng = false}, slot);
      rerun(recomputation);
    } catch (...) {  // the name of the last operation is enough
    }
    at::removeCallback(callback);
    return last.empty() ? "" : "at " + last + ": ";
  }

  CheckpointOptions options_;
  std::function<void()> again_;
  ForwardState state_;
  bool complete_ = false;
  bool draws_ = false;          // uses random generators, whose state is restored
  std::recursive_mutex mutex_;  // backward passes may run on several threads
  std::vector<SavedSlot> slots_;
  std::unordered_map<int, std::weak_ptr<Tensors>> passes_;  // by id
};

/// Keeps a slot of a frame in place of a tensor that an operation saves.
class SlotHooks final : public torch::autograd::SavedVariableHooks {
 public:
  explicit SlotHooks(std::shared_ptr<CheckpointFrame> frame) : frame_(std::move(frame)) {}
  SlotHooks& operator=(SlotHooks&&) = delete;
  ~SlotHooks() override {
    if (slot_) frame_->release(*slot_);
  }

  void call_pack_hook(const at::Tensor& tensor) override {
    version_ = TensorVersion(tensor);
    slot_ = frame_->add(tensor);
  }
  at::Tensor call_unpack_hook() override {
    TORCH_CHECK(!version_.changed(), "checkpoint: a tensor that backward needs (", frame_->slot(*slot_).traits,
                ") must not change in place after it was saved; change a clone() of it");
    return frame_->unpack(*slot_);
  }

 private:
  std::shared_ptr<CheckpointFrame> frame_;
  TensorVersion version_;
  std::optional<std::size_t> slot_;
};

GRADACCUM_INLINE void run_in_frame(const CheckpointOptions& options, const std::vector<torch::nn::Module*>& modules,
                                   bool calls_others, SavedInputs& inputs, std::function<void()> again,
                                   c10::function_ref<void()> forward) {
  const auto frame = std::make_shared<CheckpointFrame>(options, std::move(again));
  {
    const RecordingScope recording(&frame->buffers);
    const SavingScope scope("checkpoint", [&frame] { return std::make_unique<SlotHooks>(frame); });
    run_watched(modules, calls_others, forward);
  }
  frame->buffers.storages = {};
  inputs.check_unchanged();
  frame->complete();
}

}  // namespace gradaccum::detail

#undef GRADACCUM_INLINE
