// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Storage.h>

#include <vector>

namespace emulated_cuda {

/// Returns a tensor of the same shape in another storage, on that storage's device.
at::Tensor with_storage(const at::Tensor& tensor, c10::Storage storage);

/// The tensors of one operation on a device as a CPU kernel sees them: the same bytes at other addresses. Changes that
/// the kernel makes to a tensor itself (its size or storage) are applied to the device's tensor afterwards.
class HostViews {
 public:
  explicit HostViews(c10::DeviceIndex device) : device_(device) {}

  /// Returns a view of a device's tensor; returns a CPU tensor unchanged.
  at::Tensor host(const at::Tensor& tensor);
  c10::Storage host(const c10::Storage& storage);

  void write_back();

  /// Returns the device's tensor for a result: the tensor it views, another with its storage, or a copy.
  at::Tensor device(const at::Tensor& result);
  c10::Storage device(const c10::Storage& storage);

 private:
  struct Tensors {
    at::Tensor device, host;
  };
  struct Storages {
    c10::Storage device, host;
    void* host_data;
  };

  at::Tensor dense_host(const at::Tensor& tensor);
  at::Tensor sparse_host(const at::Tensor& tensor);
  at::Tensor dense_device(const at::Tensor& result);
  at::Tensor sparse_device(const at::Tensor& result);
  void write_back_dense(const at::Tensor& device, const at::Tensor& host);
  void write_back_sparse(const at::Tensor& device, const at::Tensor& host);
  void write_back(Storages& storages);
  c10::Storage copied(const c10::Storage& host);

  c10::DeviceIndex device_;
  std::vector<Tensors> tensors_;
  std::vector<at::Tensor> unchanged_;  // CPU tensors among the arguments
  std::vector<Storages> storages_;
};

}  // namespace emulated_cuda
