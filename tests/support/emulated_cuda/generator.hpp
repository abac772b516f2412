// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/Device.h>
#include <c10/core/GeneratorImpl.h>

#include <cstdint>

namespace emulated_cuda {

/// A device's random numbers: those of a generator of the CPU's, of its own.
///
/// The offset tells how many operations took numbers since the seed. CUDA's generator can be set to any offset;
/// this one begins another sequence for each, of which that at 0 is the seed's.
class DeviceGenerator final : public c10::GeneratorImpl {
 public:
  explicit DeviceGenerator(c10::DeviceIndex device);

  /// The default one of a device, which lives as long as the program.
  static const at::Generator& of(c10::DeviceIndex device);

  /// The CPU's generator, for an operation that is about to take numbers.
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
