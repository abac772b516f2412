// SPDX-License-Identifier: Apache-2.0
// Saves and restores random state and buffers, the side effects of a forward pass.
#pragma once

#include <gradaccum/detail/checkpoint/forward_state.hpp>
#include <gradaccum/detail/types/recorded_inputs.hpp>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/core/Generator.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>
#include <c10/core/impl/COW.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/functional.h>
#include <torch/nn/modules/instancenorm.h>

#include <algorithm>
#include <cstddef>
#include <functional>
#include <mutex>
#include <ostream>
#include <string_view>
#include <typeindex>
#include <typeinfo>
#include <unordered_map>
#include <unordered_set>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum::detail {

GRADACCUM_INLINE std::uint64_t position_of(const at::mt19937_data_pod& engine) {
  return std::uint64_t{engine.state_[0]} << 32 | static_cast<std::uint32_t>(engine.left_);
}

void with_cpu_generator(auto&& use) {
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  const std::lock_guard lock(generator.mutex());
  use(static_cast<at::CPUGeneratorImpl&>(*generator.unsafeGetGeneratorImpl()));
}

/// Calls `use` for each CUDA device in use: requesting the generator of another would initialise that device.
void for_each_cuda_generator(auto&& use) {
  if (!at::globalContext().hasCUDA()) return;
  auto& cuda = at::detail::getCUDAHooks();
  for (c10::DeviceIndex device = 0; device < cuda.getNumGPUs(); ++device) {
    if (!cuda.hasPrimaryContext(device)) continue;
    at::Generator generator = at::globalContext().defaultGenerator(at::Device(at::kCUDA, device));
    const std::lock_guard lock(generator.mutex());
    use(device, generator);
  }
}

GRADACCUM_INLINE GeneratorStates::GeneratorStates() {
  with_cpu_generator([&](at::CPUGeneratorImpl& generator) {
    engine_ = generator.engine().data();
    next_float_ = generator.next_float_normal_sample();
    next_double_ = generator.next_double_normal_sample();
  });
  for_each_cuda_generator(
      [&](c10::DeviceIndex device, at::Generator& generator) { devices_.emplace_back(device, generator.get_state()); });
}

GRADACCUM_INLINE void GeneratorStates::restore() const {
  with_cpu_generator([&](at::CPUGeneratorImpl& generator) {
    at::mt19937 engine;
    engine.set_data(engine_);
    generator.set_engine(engine);
    generator.set_next_float_normal_sample(next_float_);
    generator.set_next_double_normal_sample(next_double_);
  });
  for_each_cuda_generator([&](c10::DeviceIndex device, at::Generator& generator) {
    for (auto& [known, state] : devices_)
      if (known == device) generator.set_state(state);
  });
}

GRADACCUM_INLINE bool GeneratorStates::operator==(const GeneratorStates& other) const {
  const auto same_device = [](auto& a, auto& b) { return a.first == b.first && a.second.equal(b.second); };
  return position_of(engine_) == position_of(other.engine_) && engine_.state_ == other.engine_.state_ &&
         next_float_ == other.next_float_ && next_double_ == other.next_double_ &&
         std::ranges::equal(devices_, other.devices_, same_device);
}

GRADACCUM_INLINE std::uint64_t GeneratorStates::position() {
  std::uint64_t position = 0;
  with_cpu_generator([&](at::CPUGeneratorImpl& generator) { position = position_of(generator.engine().data()); });
  return position;
}

GRADACCUM_INLINE ForwardState::ForwardState(bool with_random_generators) {
  if (at::globalContext().hasCUDA()) device_ = c10::impl::VirtualGuardImpl(at::kCUDA).getDevice();
  if (with_random_generators) random_ = std::make_unique<GeneratorStates>();
}

GRADACCUM_INLINE bool ForwardState::finish() {
  if (random_ && *random_ == GeneratorStates()) random_.reset();
  return random_ != nullptr;
}

GRADACCUM_INLINE ForwardState::Scope::Scope(const ForwardState& state)
    : cpu_(at::kCPU, state.cpu_.dtype, state.cpu_.enabled, state.autocast_caches_),
      cuda_(at::kCUDA, state.cuda_.dtype, state.cuda_.enabled, state.autocast_caches_),
      device_(state.device_) {
  if (state.random_) random_.emplace(*state.random_);
}

GRADACCUM_INLINE std::vector<at::Tensor> copies_of(const std::vector<at::Tensor>& tensors) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> copies;
  for (auto& tensor : tensors) copies.push_back(tensor.defined() ? tensor.clone() : at::Tensor());
  return copies;
}

GRADACCUM_INLINE void ForwardUndo::put_back() const {
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < buffers_.size(); ++i)
    if (buffers_[i].defined()) buffers_[i].copy_(values_[i]);
  random_.restore();
}

GRADACCUM_INLINE TensorTraits::TensorTraits(const at::Tensor& tensor)
    : dtype_(tensor.scalar_type()), device_(tensor.device()) {
  if (tensor.layout() == at::kStrided) shape_ = tensor.sizes();  // other layouts may lack plain integer sizes
}

GRADACCUM_INLINE std::ostream& operator<<(std::ostream& out, const TensorTraits& traits) {
  return out << traits.dtype_ << ' ' << at::IntArrayRef(traits.shape_) << " on " << traits.device_;
}

GRADACCUM_INLINE TensorVersion::TensorVersion(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.is_inference()) return;
  counter_ = tensor.unsafeGetTensorImpl()->version_counter();
  version_ = counter_.current_version();
}

GRADACCUM_INLINE void BufferState::watch() {
  const at::NoGradGuard no_grad;
  before = buffer.clone();
  version_ = TensorVersion(buffer);
  static std::mutex marking;  // threads may share a model
  const std::lock_guard lock(marking);
  marked_ =
      buffer.has_storage() && c10::impl::cow::lazy_clone_storage(*buffer.storage().unsafeGetStorageImpl()) != nullptr;
  written = false;
}

GRADACCUM_INLINE void BufferState::note_writes() {
  written |= version_.changed();
  if (buffer.has_storage()) written |= !marked_ || !c10::impl::cow::is_cow_data_ptr(buffer.storage().data_ptr());
}

GRADACCUM_INLINE std::vector<std::shared_ptr<BufferState>> buffers_of(const std::vector<torch::nn::Module*>& modules) {
  static const std::unordered_set<std::type_index> normalisations{
      typeid(torch::nn::BatchNorm1dImpl),    typeid(torch::nn::BatchNorm2dImpl),
      typeid(torch::nn::BatchNorm3dImpl),    typeid(torch::nn::InstanceNorm1dImpl),
      typeid(torch::nn::InstanceNorm2dImpl), typeid(torch::nn::InstanceNorm3dImpl)};
  std::vector<std::shared_ptr<BufferState>> states;
  std::unordered_map<const c10::TensorImpl*, BufferState*> known;
  const auto visit = [&](const torch::nn::Module& part) {
    const bool is_statistics = part.is_training() && normalisations.contains(typeid(part));
    for (auto& buffer : part.buffers(/*recurse=*/false)) {
      if (!buffer.defined() || buffer.is_inference()) continue;
      auto& state = known[buffer.unsafeGetTensorImpl()];
      if (!state) state = states.emplace_back(std::make_shared<BufferState>(buffer, is_statistics)).get();
      state->is_statistics &= is_statistics;
    }
  };
  for (auto* module : modules) std::as_const(*module).apply(visit);
  for (auto& state : states) state->owners = state->buffer.use_count();
  return states;
}

GRADACCUM_INLINE void check_not_replaced(const std::vector<std::shared_ptr<BufferState>>& buffers) {
  for (auto& state : buffers) {
    const auto now = state->buffer.use_count();
    // A replaced buffer has lost its owner, the module's member, and also the module's list if the member refers to it.
    const bool replaced = now == 1 || (state->owners > 2 && now == 2);
    TORCH_CHECK(!replaced, "checkpoint: a module must update its buffers in place, but its forward replaced one (",
                TensorTraits(state->buffer),
                ") by another tensor, which cannot be undone before forward runs again; write buffer.copy_(value) "
                "instead of buffer = value");
  }
}

GRADACCUM_INLINE RecordingScope::RecordingScope(BufferRecord* record) {
  if (record) record->outer = innermost_;
  innermost_ = record;
}

void for_each_record(auto&& use) {
  for (auto* record = RecordingScope::innermost(); record; record = record->outer) use(*record);
}

GRADACCUM_INLINE bool is_known(const BufferRecord& record, const at::Tensor& buffer) {
  return std::ranges::any_of(record.changed, [&](auto& known) { return known->buffer.is_same(buffer); });
}

/// Records whether the part made storages that are new to it. Calls `use` for tensors that it did not make.
void for_each_storage(const c10::IValue& value, bool made, auto&& use) {
  const auto see = [&](const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.has_storage()) return;
    bool all_made = true;
    for_each_record([&, storage = tensor.storage().unsafeGetStorageImpl()](auto& record) {
      all_made &= record.storages.try_emplace(storage, made).first->second;
    });
    if (!all_made) use(tensor);
  };
  if (value.isTensor()) see(value.toTensor());
  if (value.isTensorList()) std::ranges::for_each(value.toTensorVector(), see);
}

/// Records a tensor that an operation is about to write to, unless the part made it, or it requires grad.
GRADACCUM_INLINE void note_write(const at::Tensor& tensor) {
  if (tensor.requires_grad()) return;
  const auto state = std::make_shared<BufferState>(tensor, /*of_normalisation=*/false);
  for_each_record([&](auto& record) {
    if (record.storages[tensor.storage().unsafeGetStorageImpl()] || is_known(record, tensor)) return;
    if (!state->before.defined()) state->before = copies_of({tensor}).front();
    record.changed.push_back(state);
  });
}

/// Records tensors that operations of a part write to and that belong to no known module, such as buffers that a lambda
/// captures. Does not see writes through a pointer, or through `data()` and `detach()`, which are other tensors.
GRADACCUM_INLINE void run_and_find_writes(c10::function_ref<void()> forward) {
  static thread_local std::optional<int> depth;  // of nested operations; empty: not recording
  if (depth) return forward();
  const auto see_inputs = [](const at::RecordFunction& operation) -> std::unique_ptr<at::ObserverContext> {
    if (!depth || !operation.operator_name()) return nullptr;  // a label for the profiler is no operation
    if ((*depth)++ > 0) return nullptr;                        // called by another operation to fill its result
    const at::DisableRecordFunctionGuard unseen;
    const auto inputs = recorded_inputs(operation);
    std::optional<c10::OperatorHandle> known;
    for (std::size_t i = 0; i < inputs.size(); ++i)
      for_each_storage(inputs[i], /*made=*/false, [&](const at::Tensor& tensor) {
        if (tensor.requires_grad() || tensor.is_inference()) return;
        if (!known) known = c10::Dispatcher::singleton().findSchema(*operation.operator_name());
        if (!known) return;
        const auto& argument = known->schema().arguments()[i];
        const auto* const alias = argument.alias_info();  // normalisations lack it for statistics
        if ((alias && alias->isWrite()) || argument.name().starts_with("running_"))
          note_write(tensor.is_view() ? at::Tensor(tensor._base()) : tensor);
      });
    return nullptr;
  };
  const auto see_outputs = [](const at::RecordFunction& operation, at::ObserverContext*) {
    if (!depth || !operation.operator_name() || --*depth > 0) return;
    for (auto& output : operation.outputs()) for_each_storage(output, /*made=*/true, [](auto&) {});
  };
  const auto handle = at::addThreadLocalCallback(at::RecordFunctionCallback(see_inputs, see_outputs)
                                                     .needsInputs(true)
                                                     .needsOutputs(true)
                                                     .scopes({at::RecordScope::FUNCTION}));
  const auto end = c10::make_scope_exit([handle] { at::removeCallback(handle), depth.reset(); });
  depth = 0;
  forward();
}

GRADACCUM_INLINE bool calls_functions(const std::vector<torch::nn::Module*>& modules) {
  bool found = false;
  for (auto* module : modules)
    std::as_const(*module).apply(
        [&](const torch::nn::Module& part) { found |= typeid(part) == typeid(torch::nn::FunctionalImpl); });
  return found;
}

GRADACCUM_INLINE void run_watched(const std::vector<torch::nn::Module*>& modules, bool calls_others,
                                  c10::function_ref<void()> forward) {
  if (!RecordingScope::innermost() || (modules.empty() && !calls_others)) return forward();
  bool with_statistics = false;
  const auto note_writes = [] {
    for_each_record([](auto& record) {
      for (auto& state : record.changed) state->note_writes();
    });
  };
  for_each_record([&](auto& record) { with_statistics |= record.with_statistics; });
  note_writes();  // before marking, which hides earlier writes to shared memory
  const auto states = buffers_of(modules);
  for (auto& state : states) {
    if (with_statistics || !state->is_statistics) state->watch();
    for_each_record([&](auto& record) {
      if (!is_known(record, state->buffer)) record.changed.push_back(state);
    });
  }
  calls_others || calls_functions(modules) ? run_and_find_writes(forward) : forward();
  note_writes();
  check_not_replaced(states);
  for (auto& state : states)
    if (!state->written) state->buffer.reset();
  for_each_record([](auto& record) {
    std::erase_if(record.changed, [](auto& state) { return state->buffer.use_count() <= 1; });  // no other owner left
  });
}

GRADACCUM_INLINE FrozenBuffers::FrozenBuffers(const std::vector<std::shared_ptr<BufferState>>& buffers)
    : FrozenBuffers() {
  const at::NoGradGuard no_grad;
  for (auto& state : buffers) {
    auto* const impl = state->buffer.unsafeGetTensorImpl();
    const auto copy = (state->before.defined() ? state->before : state->buffer).clone();
    exchanged_.push_back({state->buffer, state->buffer.tensor_data(), impl->version_counter()});
    impl->shallow_copy_from(copy.getIntrusivePtr());
    impl->set_version_counter(c10::VariableVersion(0));
  }
}

GRADACCUM_INLINE FrozenBuffers::~FrozenBuffers() {
  for (auto& [buffer, content, version] : exchanged_) {
    buffer.unsafeGetTensorImpl()->shallow_copy_from(content.getIntrusivePtr());
    buffer.unsafeGetTensorImpl()->set_version_counter(version);
  }
}

GRADACCUM_INLINE std::uint64_t content_hash(const at::Tensor& tensor) {
  if (tensor.layout() != at::kStrided || tensor.scalar_type() == at::kByte) return 0;
  const auto bytes = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous();
  return std::hash<std::string_view>()({static_cast<const char*>(bytes.const_data_ptr()), bytes.nbytes()});
}

}  // namespace gradaccum::detail

#undef GRADACCUM_INLINE
