// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/parallel/nccl.hpp>

#include <gradaccum/detail/build/inline.hpp>

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

// ATen/cuda needs the headers of CUDA's libraries, too.
#if defined(USE_C10D_NCCL) && __has_include(<nccl.h>) && __has_include(<cuda_runtime_api.h>) && \
    __has_include(<cusparse.h>) && __has_include(<cublas_v2.h>) && __has_include(<cusolverDn.h>)
#define GRADACCUM_HAS_NCCL
#include <ATen/cuda/CUDAContext.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAGuard.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>
#endif

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <memory>
#include <set>
#include <thread>
#include <utility>

namespace gradaccum::detail {

GRADACCUM_INLINE bool each_has_its_own(const std::vector<std::string>& places) {
  const std::set<std::string> different(places.begin(), places.end());
  return different.size() == places.size() && !different.contains("");
}

#ifdef GRADACCUM_HAS_NCCL
/// True if nccl.h has LibTorch's version of NCCL: the layout of NCCL's options differs between versions.
GRADACCUM_INLINE bool nccl_is_as_built() {
  constexpr auto header = std::uint64_t{NCCL_MAJOR} << 32 | std::uint64_t{NCCL_MINOR} << 16;
  const auto present = torch::cuda::nccl::version() & ~std::uint64_t{0xffff};
  if (header != present) {
    TORCH_WARN_ONCE("gradaccum: gradients go by Gloo, not by NCCL: this program was built with the nccl.h of NCCL ",
                    NCCL_MAJOR, ".", NCCL_MINOR, ", and LibTorch has ", present >> 32, ".", (present >> 16) & 0xffff,
                    "; build it with the header of that version (CMake: -DNCCL_ROOT=...)");
  }
  return header == present;
}

GRADACCUM_INLINE std::string device_place(const std::vector<at::Tensor>& tensors) {
  const auto elsewhere = [&](auto& tensor) { return !tensor.is_cuda() || tensor.device() != tensors[0].device(); };
  if (tensors.empty() || std::ranges::any_of(tensors, elsewhere) || !nccl_is_as_built()) return "";
  std::array<char, 256> machine{};
  gethostname(machine.data(), machine.size() - 1);
  const auto& uuid = at::cuda::getDeviceProperties(tensors[0].device().index())->uuid.bytes;
  return machine.data() + ("/" + std::string(std::begin(uuid), std::end(uuid)));
}

GRADACCUM_INLINE c10::intrusive_ptr<c10d::Backend> make_nccl(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                                             int world_size, std::chrono::milliseconds timeout) {
  // By default LibTorch ends the process a minute after an error, and later attempts that find the error in the store.
  setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0", /*overwrite=*/0);
  setenv("TORCH_NCCL_DUMP_ON_TIMEOUT", "0", /*overwrite=*/0);
  auto options = c10d::ProcessGroupNCCL::Options::create();
  options->timeout = timeout;
  return c10::make_intrusive<c10d::ProcessGroupNCCL>(c10::make_intrusive<c10d::PrefixStore>("devices", store), rank,
                                                     world_size, options);
}

/// Sums a number over all ranks, which connects them. Waits for the device.
GRADACCUM_INLINE void sum_by_device(c10d::Backend& nccl, at::Device device) {
  const c10::cuda::CUDAGuard guard(device);
  std::vector<at::Tensor> tensors{at::zeros({1}, device)};
  nccl.allreduce(tensors)->wait();
  tensors[0].item();
}
#undef GRADACCUM_HAS_NCCL
#else
GRADACCUM_INLINE std::string device_place(const std::vector<at::Tensor>&) { return ""; }
GRADACCUM_INLINE c10::intrusive_ptr<c10d::Backend> make_nccl(const c10::intrusive_ptr<c10d::Store>&, int, int,
                                                             std::chrono::milliseconds) {
  TORCH_CHECK(false, "ProcessGroup: this program was built without NCCL");
}
GRADACCUM_INLINE void sum_by_device(c10d::Backend&, at::Device) {}
#endif

GRADACCUM_INLINE NcclLink::NcclLink(const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size,
                                    at::Device device, std::chrono::milliseconds timeout)
    : nccl_(make_nccl(store, rank, world_size, timeout)) {
  std::packaged_task<void()> connect([nccl = nccl_, device] { sum_by_device(*nccl, device); });
  connected_ = connect.get_future();
  std::thread(std::move(connect)).detach();
}

GRADACCUM_INLINE NcclLink::~NcclLink() { abort(); }

GRADACCUM_INLINE bool NcclLink::answers() const {
  return connected_.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
}

GRADACCUM_INLINE void NcclLink::abort() noexcept {
  if (std::exchange(aborted_, true)) return;
  try {
    std::packaged_task<void()> task([nccl = nccl_] { nccl->abort(); });
    const auto done = task.get_future();
    std::thread(std::move(task)).detach();
    done.wait_for(std::chrono::seconds(10));
  } catch (const std::exception&) {  // no thread could be started
  }
}

}  // namespace gradaccum::detail
