// SPDX-License-Identifier: Apache-2.0

// Gloo sums tensors of a device on the host. LibTorch's CPU library implements this for all operations except
// allreduce, which the CUDA library adds.

#ifdef USE_C10D_GLOO

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <c10/util/Registry.h>
#include <torch/version.h>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include <chrono>
#include <memory>
#include <utility>
#include <vector>

// From 2.9 on a timeout is the last argument.
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 9
#define GLOO_TIMEOUT , std::chrono::milliseconds
#else
#define GLOO_TIMEOUT
#endif

namespace c10d {
// Repeats LibTorch's declaration from a header that needs Gloo's headers.
C10_DECLARE_TYPED_REGISTRY(GlooAllreduceRegistry, c10::DeviceType, ProcessGroupGloo::AsyncWork, c10::intrusive_ptr,
                           std::shared_ptr<gloo::Context>, std::vector<at::Tensor>&, ReduceOp, std::uint32_t,
                           std::uint64_t GLOO_TIMEOUT);
}  // namespace c10d

namespace emulated_cuda {
namespace {

using Tensors = std::vector<at::Tensor>;

Tensors pinned_copies(const Tensors& tensors) {
  Tensors copies;
  for (auto& tensor : tensors) {
    copies.push_back(at::empty_like(tensor, tensor.options().device(at::kCPU).pinned_memory(true)));
    copies.back().copy_(tensor, /*non_blocking=*/true);
  }
  return copies;
}

class Allreduce final : public c10d::ProcessGroupGloo::AsyncWork {
 public:
  template <class... Timeout>
  Allreduce(const std::shared_ptr<gloo::Context>& context, Tensors& tensors, const c10d::ReduceOp& operation,
            std::uint32_t tag, std::uint64_t sequence, Timeout... timeout)
      : AsyncWork(context, {tensors}, c10d::OpType::ALLREDUCE, sequence, timeout..., "gloo:all_reduce", tensors),
        tensors_(tensors),
        copies_(pinned_copies(tensors)),
        of_copies_(
            c10d::GlooAllreduceRegistry()->Create(c10::kCPU, context, copies_, operation, tag, sequence, timeout...)) {}

  void run() override {
    of_copies_->run();
    for (std::size_t i = 0; i < tensors_.size(); ++i) tensors_[i].copy_(copies_[i], /*non_blocking=*/true);
  }
  const Tensors getInputTensors() override { return tensors_; }
  const Tensors getOutputTensors() override { return tensors_; }

 private:
  Tensors tensors_, copies_;
  c10::intrusive_ptr<AsyncWork> of_copies_;
};

template <class... Timeout>
c10::intrusive_ptr<c10d::ProcessGroupGloo::AsyncWork> make_allreduce(std::shared_ptr<gloo::Context> context,
                                                                     Tensors& tensors, c10d::ReduceOp operation,
                                                                     std::uint32_t tag, std::uint64_t sequence,
                                                                     Timeout... timeout) {
  return c10::make_intrusive<Allreduce>(context, tensors, operation, tag, sequence, timeout...);
}

[[maybe_unused]] const bool allreduce_registered =
    (c10d::GlooAllreduceRegistry()->Register(
         c10::kCUDA,
         static_cast<c10::intrusive_ptr<c10d::ProcessGroupGloo::AsyncWork> (*)(
             std::shared_ptr<gloo::Context>, Tensors&, c10d::ReduceOp, std::uint32_t, std::uint64_t GLOO_TIMEOUT)>(
             &make_allreduce)),
     true);

}  // namespace
}  // namespace emulated_cuda

#endif
