// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/machine/machine_facts.hpp>

#include <gradaccum/autocast.hpp>
#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/kernels/device_kernels.hpp>
#include <gradaccum/detail/machine/cpu_limit.hpp>
#include <gradaccum/detail/machine/system_file.hpp>

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/Version.h>
#include <torch/headeronly/version.h>

#include <dlfcn.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <sstream>

#ifdef __linux__
#include <link.h>
#include <sched.h>
#endif

namespace gradaccum::detail {

/// A limit of 1.5 CPUs lets two threads work, for three quarters of the time.
GRADACCUM_INLINE int MachineFacts::usable_cpus() const {
  const double limit = std::ceil(cpu_limit.value_or(allowed_cpus));
  return std::max(1, limit < allowed_cpus ? static_cast<int>(limit) : allowed_cpus);
}

GRADACCUM_INLINE std::string processor_name(const std::string& cpuinfo) {
  std::istringstream lines(cpuinfo);
  for (std::string line; std::getline(lines, line);) {
    const auto colon = line.find(": ");
    if (line.starts_with("model name") && colon != std::string::npos) return line.substr(colon + 2);
  }
  return "";
}

/// Two files of one name are two runtimes as well: LibTorch brings a libgomp of its own.
GRADACCUM_INLINE std::vector<std::string> openmp_among(const std::vector<std::string>& libraries) {
  std::vector<std::string> runtimes;
  for (auto& path : libraries) {
    const auto name = std::filesystem::path(path).filename().string();
    if (name.starts_with("libgomp") || name.starts_with("libiomp") || name.starts_with("libomp"))
      runtimes.push_back(path);
  }
  return runtimes;
}

#ifdef __linux__
GRADACCUM_INLINE std::vector<std::string> loaded_libraries() {
  std::vector<std::string> paths;
  const auto add = [](dl_phdr_info* library, std::size_t, void* list) {
    static_cast<std::vector<std::string>*>(list)->emplace_back(library->dlpi_name);
    return 0;
  };
  dl_iterate_phdr(add, &paths);
  return paths;
}

/// The machine has more CPUs than the set has places: then none is said to be forbidden.
GRADACCUM_INLINE int cpus_by_affinity(int cpus) {
  cpu_set_t allowed;
  return sched_getaffinity(0, sizeof(allowed), &allowed) == 0 ? CPU_COUNT(&allowed) : cpus;
}
#else
GRADACCUM_INLINE std::vector<std::string> loaded_libraries() { return {}; }
GRADACCUM_INLINE int cpus_by_affinity(int cpus) { return cpus; }
#endif

/// MKL asks this function of its own; a program that has another of that name answers in its place.
GRADACCUM_INLINE std::optional<bool> mkl_trusts_processor() {
  auto* const answer = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "mkl_serv_intel_cpu_true"));
  if (!at::hasMKL() || answer == nullptr) return std::nullopt;
  return answer() != 0;
}

GRADACCUM_INLINE std::string architecture() {
  utsname system{};
  return uname(&system) == 0 ? system.machine : "unknown processor";
}

GRADACCUM_INLINE bool has_glibc() {
#ifdef __GLIBC__
  return true;
#else
  return false;
#endif
}

GRADACCUM_INLINE MachineFacts machine_facts() {
  MachineFacts facts;
  facts.processor = processor_name(text_of_system_file("/proc/cpuinfo"));
  if (facts.processor.empty()) facts.processor = architecture();
  facts.instructions = at::get_cpu_capability();
  facts.libtorch = TORCH_VERSION;
  facts.memory_bytes = std::max(0L, sysconf(_SC_PHYS_PAGES)) * std::max(0L, sysconf(_SC_PAGESIZE));
  facts.cpus = std::max(1, static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN)));
  facts.allowed_cpus = std::max(1, cpus_by_affinity(facts.cpus));
  facts.cpu_limit = cpu_limit();
  facts.threads = at::get_num_threads();
  facts.has_mkl = at::hasMKL();
  facts.mkl_trusts_it = mkl_trusts_processor();
  facts.has_glibc = has_glibc();
  facts.bfloat16_fast = is_bf16_fast(at::kCPU);
  facts.flash_attention = at::globalContext().userEnabledFlashSDP();
  facts.huge_pages = huge_pages_of(text_of_system_file("/sys/kernel/mm/transparent_hugepage/enabled"));
  facts.requests_huge_pages = requests_huge_pages(std::getenv("THP_MEM_ALLOC_ENABLE"), std::getenv("GLIBC_TUNABLES"));
  facts.openmp_runtimes = openmp_among(loaded_libraries());
  facts.has_cuda = at::hasCUDA();
  facts.has_device_kernels = device_kernels() != nullptr;
  return facts;
}

}  // namespace gradaccum::detail
