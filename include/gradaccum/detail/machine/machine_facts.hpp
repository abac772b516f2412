// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/machine/huge_pages.hpp>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace gradaccum::detail {

/// What can be read of a machine and of this process, without measuring anything.
struct MachineFacts {
  std::string processor = {};              ///< its name
  std::string instructions = {};           ///< the best of which LibTorch has code: AVX512
  std::string libtorch = {};               ///< its version
  std::int64_t memory_bytes = 0;           ///< of the machine; 0 where nobody tells
  int cpus = 1;                            ///< of the machine
  int allowed_cpus = 1;                    ///< by the affinity of this thread
  std::optional<double> cpu_limit = {};    ///< by its control groups
  int threads = 1;                         ///< of LibTorch
  bool has_mkl = false;                    ///< which then multiplies float32 matrices
  std::optional<bool> mkl_trusts_it = {};  ///< MKL gives this processor its best code; none where it does not say
  bool has_glibc = false;                  ///< which `keep_freed_memory` knows
  bool bfloat16_fast = true;               ///< LibTorch has instructions for it
  bool flash_attention = false;            ///< is allowed
  HugePages huge_pages = HugePages::unknown;
  bool requests_huge_pages = false;
  std::vector<std::string> openmp_runtimes = {};  ///< files of them that are loaded
  bool has_cuda = false;                          ///< a device that LibTorch can use
  bool has_device_kernels = false;                ///< of gradaccum's own

  /// That can work for this process at the same time.
  int usable_cpus() const;
};

/// The processor that /proc/cpuinfo names first; empty where it names none, as on ARM.
std::string processor_name(const std::string& cpuinfo);

/// Of the libraries that are loaded, by their paths, those that are OpenMP's: libgomp, libiomp5, libomp.
std::vector<std::string> openmp_among(const std::vector<std::string>& libraries);

/// Of this machine and process.
MachineFacts machine_facts();

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/machine/machine_facts.ipp>
#endif
