// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/window/late_tensors.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/types/recorded_inputs.hpp>

#include <ATen/core/grad_mode.h>
#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/Storage.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/Exception.h>

#include <cstdint>
#include <exception>
#include <map>
#include <mutex>
#include <set>
#include <thread>
#include <utility>

namespace gradaccum::detail {

/// Some tensors that are late together, each with a storage that has no address in the place of its own.
class LateArrivals : public std::enable_shared_from_this<LateArrivals> {
 public:
  LateArrivals(std::vector<at::Tensor> tensors, std::function<void(std::size_t)> arrive)
      : arrive_(std::move(arrive)), late_(tensors.size()) {
    for (std::size_t i = 0; i < tensors.size(); ++i) late_[i].tensor = std::move(tensors[i]);
  }

  void hide(const std::string& advice);
  /// Waits for one; what goes wrong is told to whoever reads it, as here nobody would hear of it.
  void see(std::size_t i) noexcept;
  void wait();
  /// Nobody waits for them any more.
  void forget();
  bool begun_here() const { return thread_ == std::this_thread::get_id(); }

 private:
  struct Late {
    at::Tensor tensor;
    c10::Storage own = {}, hidden = {};  // none when it has arrived
  };

  void show(Late& late);
  void fail();
  void watch_no_more();

  std::mutex mutex_;
  std::function<void(std::size_t)> arrive_;
  std::vector<Late> late_;
  std::exception_ptr failure_;
  const std::thread::id thread_ = std::this_thread::get_id();
  bool watched_ = false;
};

/// What is late in this process, by storages: those that are hidden, and those in their place.
class LateStorages {
 public:
  static LateStorages& of_process() {
    static LateStorages all;
    return all;
  }

  void add(const c10::Storage& storage, std::shared_ptr<LateArrivals> arrivals, std::size_t i) {
    const std::lock_guard lock(mutex_);
    late_.emplace(storage.unsafeGetStorageImpl(), Place{std::move(arrivals), i});
  }
  void remove(const c10::Storage& storage, const LateArrivals* arrivals, std::size_t i) {
    const std::lock_guard lock(mutex_);
    const auto [first, last] = late_.equal_range(storage.unsafeGetStorageImpl());
    for (auto place = first; place != last; ++place)
      if (place->second.arrivals.get() == arrivals && place->second.i == i) return void(late_.erase(place));
  }
  void see(const at::Tensor& tensor);
  void wait_for_all();

 private:
  struct Place {
    std::shared_ptr<LateArrivals> arrivals;
    std::size_t i;
  };

  std::mutex mutex_;
  std::multimap<const void*, Place> late_;
};

GRADACCUM_INLINE void LateStorages::see(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.unsafeGetTensorImpl()->has_storage()) return;
  std::vector<Place> places;
  {
    const std::lock_guard lock(mutex_);
    const auto [first, last] = late_.equal_range(tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl());
    for (auto place = first; place != last; ++place) places.push_back(place->second);
  }
  for (auto& place : places) place.arrivals->see(place.i);
}

GRADACCUM_INLINE void LateStorages::wait_for_all() {
  std::set<std::shared_ptr<LateArrivals>> here;
  {
    const std::lock_guard lock(mutex_);
    for (auto& late : late_)
      if (late.second.arrivals->begun_here()) here.insert(late.second.arrivals);
  }
  for (auto& arrivals : here) arrivals->wait();
}

GRADACCUM_INLINE void see_in(const c10::IValue& value) {
  if (value.isTensor())
    LateStorages::of_process().see(value.toTensor());
  else if (value.isList())
    for (auto& element : value.toListRef()) see_in(element);
}

GRADACCUM_INLINE std::unique_ptr<at::ObserverContext> before_operation(const at::RecordFunction& operation) {
  for (auto& input : recorded_inputs(operation)) see_in(input);
  return nullptr;
}

/// The callback of a thread, as long as there is something late that it has begun.
class OperationWatch {
 public:
  static OperationWatch& of_thread() {
    thread_local OperationWatch watch;
    return watch;
  }
  void begin() {
    if (late_++ > 0) return;
    handle_ = at::addThreadLocalCallback(
        at::RecordFunctionCallback(before_operation).needsInputs(true).scopes({at::RecordScope::FUNCTION}));
  }
  void end() {
    if (late_ > 0 && --late_ == 0) at::removeCallback(handle_);
  }

 private:
  std::int64_t late_ = 0;
  at::CallbackHandle handle_ = 0;
};

/// Of the same size, where there is nothing.
GRADACCUM_INLINE c10::Storage storage_without_address(const c10::Storage& like, const std::string& advice) {
  c10::Storage storage(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), like.nbytes(),
                                                             c10::DataPtr(nullptr, like.device()), nullptr,
                                                             /*resizable=*/false));
  storage.unsafeGetStorageImpl()->release_data_and_set_meta_custom_data_ptr_error_msg_(advice);
  return storage;
}

GRADACCUM_INLINE void LateArrivals::hide(const std::string& advice) {
  OperationWatch::of_thread().begin();
  watched_ = true;
  for (std::size_t i = 0; i < late_.size(); ++i) {
    auto& [tensor, own, hidden] = late_[i];
    own = tensor.storage();
    hidden = storage_without_address(own, advice);
    for (auto* const storage : {&own, &hidden}) LateStorages::of_process().add(*storage, shared_from_this(), i);
  }
  for (auto& late : late_) {  // nothing can fail from here on
    late.tensor.unsafeGetTensorImpl()->set_storage_keep_dtype(late.hidden);
    late.tensor.unsafeGetTensorImpl()->bump_version();  // now: who saves it for a backward pass has waited for it
  }
}

GRADACCUM_INLINE void LateArrivals::show(Late& late) {
  const auto i = static_cast<std::size_t>(&late - late_.data());
  if (late.tensor.storage().unsafeGetStorageImpl() == late.hidden.unsafeGetStorageImpl())
    late.tensor.unsafeGetTensorImpl()->set_storage_keep_dtype(late.own);
  for (auto* const storage : {&late.own, &late.hidden}) {
    LateStorages::of_process().remove(*storage, this, i);
    *storage = {};
  }
}

GRADACCUM_INLINE void LateArrivals::see(std::size_t i) noexcept {
  const std::lock_guard lock(mutex_);
  auto& late = late_[i];
  if (!late.own || failure_) return;
  const at::DisableRecordFunctionGuard unseen;  // what arrives is copied, and not as whoever reads it would do that
  const c10::InferenceMode normal(false);
  const at::NoGradGuard no_grad;
  try {
    arrive_(i);
    show(late);
  } catch (...) {
    failure_ = std::current_exception();
    fail();
  }
}

GRADACCUM_INLINE void LateArrivals::fail() {
  std::string why = "an exception of an unknown class";
  try {
    std::rethrow_exception(failure_);
  } catch (const c10::Error& error) {
    why = error.what_without_backtrace();
  } catch (const std::exception& error) {
    why = error.what();
  } catch (...) {
  }
  for (auto& late : late_)
    if (late.hidden) late.hidden.unsafeGetStorageImpl()->release_data_and_set_meta_custom_data_ptr_error_msg_(why);
}

GRADACCUM_INLINE void LateArrivals::wait() {
  for (std::size_t i = 0; i < late_.size(); ++i) see(i);
  const std::lock_guard lock(mutex_);
  if (failure_) std::rethrow_exception(failure_);
  watch_no_more();
}

GRADACCUM_INLINE void LateArrivals::forget() {
  const std::lock_guard lock(mutex_);
  for (std::size_t i = 0; i < late_.size(); ++i)
    for (auto* const storage : {&late_[i].own, &late_[i].hidden})
      if (*storage) LateStorages::of_process().remove(*storage, this, i);
  watch_no_more();
}

/// The callback is the thread's that has begun: another cannot take it away.
GRADACCUM_INLINE void LateArrivals::watch_no_more() {
  if (begun_here() && std::exchange(watched_, false)) OperationWatch::of_thread().end();
}

GRADACCUM_INLINE LateTensors::LateTensors(std::vector<at::Tensor> tensors, std::function<void(std::size_t)> arrive,
                                          const std::string& advice)
    : arrivals_(std::make_shared<LateArrivals>(std::move(tensors), std::move(arrive))) {
  try {
    arrivals_->hide(advice);
  } catch (...) {
    arrivals_->forget();
    throw;
  }
}

GRADACCUM_INLINE LateTensors::~LateTensors() { arrivals_->forget(); }

GRADACCUM_INLINE void LateTensors::wait() { arrivals_->wait(); }

GRADACCUM_INLINE void wait_for_late_tensors() { LateStorages::of_process().wait_for_all(); }

}  // namespace gradaccum::detail
