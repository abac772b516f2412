// SPDX-License-Identifier: Apache-2.0
#include "generator.hpp"

#include "address_range.hpp"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <array>
#include <cstring>
#include <mutex>

namespace emulated_cuda {
namespace {

constexpr std::uint64_t offset_of_an_operation = 4;  // the numbers that a GPU's thread takes together
constexpr std::uint64_t odd_constant = 0x9E3779B97F4A7C15;

}  // namespace

DeviceGenerator::DeviceGenerator(c10::DeviceIndex device)
    : c10::GeneratorImpl(c10::Device(c10::kCUDA, device), c10::DispatchKeySet(c10::DispatchKey::CUDA)),
      numbers_(at::make_generator<at::CPUGeneratorImpl>(c10::default_rng_seed_val)),
      seed_(c10::default_rng_seed_val) {}

const at::Generator& DeviceGenerator::of(c10::DeviceIndex device) {
  static auto& all = *new std::array{at::make_generator<DeviceGenerator>(c10::DeviceIndex{0}),
                                     at::make_generator<DeviceGenerator>(c10::DeviceIndex{1})};
  TORCH_CHECK(device >= 0 && device < number_of_devices, "CUDA error: invalid device ordinal ",
              static_cast<int>(device));
  return all[static_cast<std::size_t>(device)];
}

at::Generator DeviceGenerator::numbers() {
  offset_ += offset_of_an_operation;
  return numbers_;
}

void DeviceGenerator::set_current_seed(std::uint64_t seed) {
  seed_ = seed;
  set_offset(0);
}

std::uint64_t DeviceGenerator::current_seed() const { return seed_; }

std::uint64_t DeviceGenerator::seed() {
  set_current_seed(c10::detail::getNonDeterministicRandom());
  return seed_;
}

void DeviceGenerator::set_offset(std::uint64_t offset) {
  TORCH_CHECK(offset % offset_of_an_operation == 0, "offset must be a multiple of 4");
  offset_ = offset;
  const std::lock_guard lock(numbers_.mutex());
  numbers_.set_current_seed(seed_ ^ (offset * odd_constant));
}

/// Returns the state of the CPU's generator, the seed, and the offset.
c10::intrusive_ptr<c10::TensorImpl> DeviceGenerator::get_state() const {
  auto numbers = numbers_;
  const std::lock_guard lock(numbers.mutex());
  const auto inner = numbers.get_state();
  const auto size = static_cast<std::size_t>(inner.numel());
  auto state = at::empty({inner.numel() + 16}, at::kByte);
  auto* const bytes = state.mutable_data_ptr<std::uint8_t>();
  std::memcpy(bytes, inner.const_data_ptr(), size);
  std::memcpy(bytes + size, &seed_, sizeof seed_);
  std::memcpy(bytes + size + sizeof seed_, &offset_, sizeof offset_);
  return state.getIntrusivePtr();
}

void DeviceGenerator::set_state(const c10::TensorImpl& state) {
  const std::lock_guard lock(numbers_.mutex());
  const auto size = static_cast<std::size_t>(numbers_.get_state().numel());
  TORCH_CHECK(state.device().is_cpu() && state.dtype() == caffe2::TypeMeta::Make<std::uint8_t>() &&
                  state.is_contiguous() && static_cast<std::size_t>(state.numel()) == size + 16,
              "RNG state is wrong size, or no byte tensor of the CPU");
  const auto* const bytes = static_cast<const std::uint8_t*>(state.data());
  auto inner = at::empty({static_cast<std::int64_t>(size)}, at::kByte);
  std::memcpy(inner.mutable_data_ptr(), bytes, size);
  numbers_.set_state(inner);
  std::memcpy(&seed_, bytes + size, sizeof seed_);
  std::memcpy(&offset_, bytes + size + sizeof seed_, sizeof offset_);
}

DeviceGenerator* DeviceGenerator::clone_impl() const {
  auto* const copy = new DeviceGenerator(device().index());
  copy->set_state(*get_state());
  return copy;
}

}  // namespace emulated_cuda
