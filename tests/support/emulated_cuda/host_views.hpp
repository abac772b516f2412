// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Storage.h>

#include <vector>

namespace emulated_cuda {

/// A tensor of the same shape in another storage, which is of the device of that.
at::Tensor with_storage(const at::Tensor& tensor, c10::Storage storage);

/// The tensors of one operation on a device, as the CPU's kernel sees them: the same bytes at other addresses. What the
/// kernel does to a tensor itself (resizes it, sets another storage) is done to the device's tensor afterwards.
class HostViews {
 public:
  explicit HostViews(c10::DeviceIndex device) : device_(device) {}

  /// A view of a device's tensor; a tensor of the CPU as it is.
  at::Tensor host(const at::Tensor& tensor);
  c10::Storage host(const c10::Storage& storage);

  void write_back();

  /// The device's tensor for a result: that of which it is the view, or another with its storage, or one with a copy.
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
  std::vector<at::Tensor> unchanged_;  // of the CPU, from the beginning
  std::vector<Storages> storages_;
};

}  // namespace emulated_cuda
