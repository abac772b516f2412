// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/Device.h>
#include <c10/core/GeneratorImpl.h>

#include <cstdint>

namespace emulated_cuda {

/// A device's random numbers, drawn from a separate CPU generator.
///
/// The offset counts the operations that took numbers since the seed. CUDA's generator can be set to any offset; this
/// one begins a different sequence at each, and the seed's at 0.
class DeviceGenerator final : public c10::GeneratorImpl {
 public:
  explicit DeviceGenerator(c10::DeviceIndex device);

  /// Returns a device's default generator, which lives as long as the program.
  static const at::Generator& of(c10::DeviceIndex device);

  /// Returns the CPU generator for an operation that is about to take numbers.
  at::Generator numbers();

  void set_current_seed(std::uint64_t seed) override;
  std::uint64_t current_seed() const override;
  std::uint64_t seed() override;
  void set_offset(std::uint64_t offset) override;
  std::uint64_t get_offset() const override { return offset_; }
  void set_state(const c10::TensorImpl& state) override;
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override;

 private:
  DeviceGenerator* clone_impl() const override;

  at::Generator numbers_;
  std::uint64_t seed_, offset_ = 0;
};

}  // namespace emulated_cuda
