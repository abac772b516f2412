// SPDX-License-Identifier: Apache-2.0
#include "host_views.hpp"

#include "address_range.hpp"
#include "allocators.hpp"
#include "streams.hpp"

#include <ATen/SparseTensorImpl.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/UniqueVoidPtr.h>

#include <cstring>
#include <utility>

namespace emulated_cuda {
namespace {

bool is_sparse(const at::Tensor& tensor) { return tensor.layout() == at::kSparse; }

at::SparseTensorImpl* get_sparse_impl(const at::Tensor& tensor) {
  return static_cast<at::SparseTensorImpl*>(tensor.unsafeGetTensorImpl());
}

bool same_shape(const at::Tensor& a, const at::Tensor& b) {
  return a.sizes() == b.sizes() && a.strides() == b.strides() && a.storage_offset() == b.storage_offset();
}

void set_shape(const at::Tensor& tensor, const at::Tensor& like) {
  auto* const impl = tensor.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
}

at::Tensor dense(c10::Storage storage, c10::DispatchKey key, caffe2::TypeMeta dtype) {
  return at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), dtype);
}

at::Tensor view(const at::Tensor& base, caffe2::TypeMeta dtype) {
  return at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(base.storage()), base.key_set(),
                                                  dtype);
}

at::Tensor with_shape(at::Tensor tensor, const at::Tensor& like) {
  set_shape(tensor, like);
  if (like.is_conj() != tensor.is_conj()) tensor._set_conj(like.is_conj());
  if (like.is_neg() != tensor.is_neg()) tensor._set_neg(like.is_neg());
  if (like.unsafeGetTensorImpl()->is_wrapped_number()) tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
  return tensor;
}

void set_sparse(const at::Tensor& tensor, const at::Tensor& like, const at::Tensor& indices, const at::Tensor& values) {
  auto *const impl = get_sparse_impl(tensor), *const other = get_sparse_impl(like);
  impl->raw_resize_(other->sparse_dim(), other->dense_dim(), like.sizes());
  impl->set_indices_and_values_unsafe(indices, values);
  impl->set_coalesced(other->coalesced());
}

at::Tensor sparse(c10::DispatchKey key, const at::Tensor& like, const at::Tensor& indices, const at::Tensor& values) {
  auto tensor = at::detail::make_tensor<at::SparseTensorImpl>(c10::DispatchKeySet(key), like.dtype());
  set_sparse(tensor, like, indices, values);
  return tensor;
}

}  // namespace

at::Tensor with_storage(const at::Tensor& tensor, c10::Storage storage) {
  const auto key = storage.device().is_cuda() ? c10::DispatchKey::CUDA : c10::DispatchKey::CPU;
  return with_shape(dense(std::move(storage), key, tensor.dtype()), tensor);
}

at::Tensor HostViews::host(const at::Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  if (!tensor.is_cuda()) return unchanged_.emplace_back(tensor);
  TORCH_CHECK(tensor.layout() == at::kStrided || is_sparse(tensor), "emulated CUDA: tensors of layout ",
              tensor.layout(), " are not supported");
  for (auto& known : tensors_)
    if (known.device.is_same(tensor)) return known.host;
  const auto view = is_sparse(tensor) ? sparse_host(tensor) : dense_host(tensor);
  tensors_.push_back({tensor, view});
  return view;
}

at::Tensor HostViews::dense_host(const at::Tensor& tensor) { return with_storage(tensor, host(tensor.storage())); }

at::Tensor HostViews::sparse_host(const at::Tensor& tensor) {
  const auto* const impl = get_sparse_impl(tensor);
  return sparse(c10::DispatchKey::SparseCPU, tensor, host(impl->indices()), host(impl->values()));
}

c10::Storage HostViews::host(const c10::Storage& storage) {
  if (!storage.device().is_cuda()) return storage;
  for (auto& known : storages_)
    if (known.device.is_alias_of(storage)) return known.host;
  auto* const data = AddressRange::get().host(storage.data());
  const auto host = c10::Storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), storage.nbytes(),
      c10::DataPtr(data, nullptr, &c10::detail::deleteNothing, c10::Device(c10::kCPU)),
      &host_view_allocator(storage.device().index()), storage.resizable()));
  storages_.push_back({storage, host, data});
  return host;
}

void HostViews::write_back() {
  for (auto& storages : storages_) write_back(storages);
  for (std::size_t i = 0; i < tensors_.size(); ++i) {  // a sparse tensor's new values are appended
    const auto [device, host] = tensors_[i];
    is_sparse(device) ? write_back_sparse(device, host) : write_back_dense(device, host);
  }
}

/// Writes changes of a storage back; a resized one already has memory of the device.
void HostViews::write_back(Storages& storages) {
  auto& host = *storages.host.unsafeGetStorageImpl();
  auto& device = *storages.device.unsafeGetStorageImpl();
  if (std::as_const(host).data() == storages.host_data && host.nbytes() == device.nbytes()) return;
  storages.host_data = host.mutable_data();
  auto pointer = as_device_pointer(host.set_data_ptr(c10::DataPtr(storages.host_data, c10::Device(c10::kCPU))));
  device.set_data_ptr_noswap(std::move(pointer));
  device.set_nbytes(host.nbytes());
}

void HostViews::write_back_dense(const at::Tensor& device_tensor, const at::Tensor& host_tensor) {
  const auto storage = device(host_tensor.storage());
  if (!storage.is_alias_of(device_tensor.storage()))
    device_tensor.unsafeGetTensorImpl()->set_storage_keep_dtype(storage);
  if (!same_shape(device_tensor, host_tensor)) set_shape(device_tensor, host_tensor);
}

void HostViews::write_back_sparse(const at::Tensor& device_tensor, const at::Tensor& host_tensor) {
  const auto* const impl = get_sparse_impl(host_tensor);
  set_sparse(device_tensor, host_tensor, device(impl->indices()), device(impl->values()));
}

at::Tensor HostViews::device(const at::Tensor& result) {
  if (!result.defined() || !result.is_cpu()) return result;
  for (auto& known : tensors_)
    if (known.host.is_same(result)) return known.device;
  for (auto& known : unchanged_)
    if (known.is_same(result)) return result;
  const auto tensor = is_sparse(result) ? sparse_device(result) : dense_device(result);
  tensors_.push_back({tensor, result});
  return tensor;
}

/// A view inherits inference mode from its base; any other result takes the current mode.
at::Tensor HostViews::dense_device(const at::Tensor& result) {
  const auto storage = device(result.storage());
  for (auto& known : tensors_)
    if (known.device.has_storage() && known.device.storage().is_alias_of(storage))
      return with_shape(view(known.device, result.dtype()), result);
  return with_shape(dense(storage, c10::DispatchKey::CUDA, result.dtype()), result);
}

at::Tensor HostViews::sparse_device(const at::Tensor& result) {
  const DeviceScope scope(device_);
  const auto* const impl = get_sparse_impl(result);
  return sparse(c10::DispatchKey::SparseCUDA, result, device(impl->indices()), device(impl->values()));
}

c10::Storage HostViews::device(const c10::Storage& storage) {
  for (auto& known : storages_)
    if (known.host.is_alias_of(storage)) return known.device;
  for (auto& known : unchanged_)
    if (known.has_storage() && known.storage().is_alias_of(storage)) return storage;
  return copied(storage);
}

/// Copies the whole storage, so that results that share it still do, and keep their strides.
c10::Storage HostViews::copied(const c10::Storage& host) {
  const DeviceScope scope(device_);
  auto storage = c10::Storage(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), host.nbytes(),
                                                                    &device_allocator(), /*resizable=*/true));
  if (host.nbytes() > 0) std::memcpy(AddressRange::get().host(storage.data()), host.data(), host.nbytes());
  storages_.push_back({storage, host, const_cast<void*>(host.data())});
  return storage;
}

}  // namespace emulated_cuda
