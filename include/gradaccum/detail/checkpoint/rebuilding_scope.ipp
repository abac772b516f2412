// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/checkpoint/rebuilding_scope.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/checkpoint/tensor_traits.hpp>
#include <gradaccum/detail/types/recorded_inputs.hpp>

#include <ATen/SequenceNumber.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/hardswish.h>
#include <ATen/ops/leaky_relu.h>
#include <ATen/ops/mish.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/native_layer_norm.h>
#include <ATen/ops/silu.h>
#include <ATen/record_function.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/DimVector.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/generated/Functions.h>

#include <mutex>
#include <optional>
#include <string_view>
#include <type_traits>
#include <unordered_map>
#include <utility>

namespace gradaccum::detail {

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

}  // namespace gradaccum::detail
