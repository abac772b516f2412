// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/machine/machine_times.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/machine/undisturbed_scope.hpp>

#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mkldnn_linear.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/TensorOptions.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <cstddef>
#include <cstring>
#include <functional>
#include <vector>

namespace gradaccum::detail {

/// Numbers without a generator: whose random numbers come next is not changed.
GRADACCUM_INLINE at::Tensor numbers(at::IntArrayRef shape, at::ScalarType dtype, double value = 0.5) {
  return at::full(shape, value, at::TensorOptions().dtype(dtype).device(at::kCPU));
}

GRADACCUM_INLINE std::optional<Comparison> compare_products() {
  if (!at::hasMKL() || !at::hasMKLDNN()) return std::nullopt;
  const auto x = numbers({MachineTimes::product_size, MachineTimes::product_size}, at::kFloat);
  const auto x_of_onednn = x.to_mkldnn();
  return compare(
      thread_seconds, [&] { at::linear(x, x); }, [&] { at::mkldnn_linear(x_of_onednn, x_of_onednn); });
}

/// More than glibc ever keeps by itself, in parts of which it would keep each one.
GRADACCUM_INLINE std::vector<c10::DataPtr> new_memory() {
  constexpr std::size_t parts = 18;
  std::vector<c10::DataPtr> memory;
  memory.reserve(parts);
  for (std::size_t i = 0; i < parts; ++i)
    memory.push_back(c10::GetCPUAllocator()->allocate(MachineTimes::filled_bytes / parts));
  return memory;
}

GRADACCUM_INLINE void fill(const std::vector<c10::DataPtr>& memory) {
  for (auto& part : memory) std::memset(part.get(), 1, MachineTimes::filled_bytes / memory.size());
}

/// As tensors get it, but without tensors: small things that are allocated beside them may keep memory in place that is
/// handed back the next time.
GRADACCUM_INLINE std::optional<Comparison> compare_freed_memory() {
  const auto kept = new_memory();
  return compare(
      thread_seconds, [] { fill(new_memory()); }, [&] { fill(kept); });
}

/// On the wall: threads that wait for a CPU do not use it. Too many of them cost small products most, too few large
/// ones.
GRADACCUM_INLINE std::optional<Comparison> compare_threads(const MachineFacts& facts) {
  if (facts.threads == facts.usable_cpus()) return std::nullopt;
  const std::int64_t size = facts.threads > facts.usable_cpus() ? 128 : 1024;
  const auto x = numbers({size, size}, at::kFloat);
  const auto seconds = [&](int threads) {
    const ThreadsScope scope(threads);
    return least_seconds(wall_seconds, [&] { at::mm(x, x); });
  };
  return Comparison{seconds(facts.threads), seconds(facts.usable_cpus())};
}

GRADACCUM_INLINE std::optional<Comparison> compare_bfloat16() {
  const auto x = numbers({MachineTimes::bfloat16_size, MachineTimes::bfloat16_size}, at::kFloat);
  const auto x16 = x.to(at::kBFloat16);
  return compare(
      thread_seconds, [&] { at::mm(x16, x16); }, [&] { at::mm(x, x); });
}

/// In place, and within a cache: how two tensors lie to each other would make another difference. By one: they stay
/// what they are.
GRADACCUM_INLINE std::optional<Comparison> compare_denormals() {
  auto denormal = numbers({MachineTimes::denormal_numbers}, at::kFloat, 1e-40);
  auto normal = numbers({MachineTimes::denormal_numbers}, at::kFloat);
  return compare(
      thread_seconds, [&] { denormal.mul_(1); }, [&] { normal.mul_(1); });
}

/// With its backward pass, which is what takes long.
GRADACCUM_INLINE std::optional<Comparison> compare_attention(const MachineFacts& facts) {
  if (!facts.flash_attention) return std::nullopt;
  const at::AutoGradMode with_gradients(true);
  const auto gradient = numbers({4, 8, 64, 32}, at::kBFloat16);
  const auto x = numbers({4, 8, 64, 32}, at::kBFloat16).requires_grad_();
  const auto attend = [&](bool flash) {
    return [&, flash] {
      const FlashScope scope(flash);
      at::scaled_dot_product_attention(x, x, x).backward(gradient);
      x.mutable_grad().reset();
    };
  };
  return compare(thread_seconds, attend(true), attend(false));
}

/// Work on so many rows on a CUDA device, and the end of it: for a number that is new each time, and for one that was
/// met.
GRADACCUM_INLINE Comparison compare_new_rows(const std::function<void(std::int64_t)>& work) {
  const c10::impl::VirtualGuardImpl device(at::kCUDA);
  const auto run = [&](std::int64_t rows) {
    work(rows);
    device.synchronizeDevice(device.getDevice().index());
  };
  std::int64_t rows = MachineTimes::device_rows;
  return compare(
      wall_seconds, [&] { run(++rows); }, [&] { run(MachineTimes::device_rows); });
}

GRADACCUM_INLINE std::optional<Comparison> compare_device_products() {
  const auto x = numbers({1024, 1024}, at::kHalf).to(at::kCUDA);
  return compare_new_rows([&](std::int64_t rows) { at::mm(x.narrow(0, 0, rows), x); });
}

GRADACCUM_INLINE std::optional<Comparison> compare_device_attention() {
  const auto x = numbers({1, 8, 1024, 64}, at::kHalf).to(at::kCUDA);
  return compare_new_rows([&](std::int64_t rows) {
    const auto part = x.narrow(2, 0, rows);
    at::scaled_dot_product_attention(part, part, part);
  });
}

/// What this build of LibTorch lacks is not measured.
GRADACCUM_INLINE std::optional<Comparison> if_possible(const std::function<std::optional<Comparison>()>& measure) try {
  return measure();
} catch (const c10::Error&) {
  return std::nullopt;
}

/// Freed memory comes first, before others have freed any.
GRADACCUM_INLINE MachineTimes machine_times(const MachineFacts& facts) {
  const UndisturbedScope scope;
  MachineTimes times;
  times.freed_memory = if_possible(compare_freed_memory);
  times.huge_pages = first_touch();
  times.products = if_possible(compare_products);
  times.threads = if_possible([&] { return compare_threads(facts); });
  times.bfloat16 = if_possible(compare_bfloat16);
  times.denormals = if_possible(compare_denormals);
  times.attention = if_possible([&] { return compare_attention(facts); });
  if (!facts.has_cuda) return times;
  times.device_products = if_possible(compare_device_products);
  times.device_attention = if_possible(compare_device_attention);
  return times;
}

}  // namespace gradaccum::detail
