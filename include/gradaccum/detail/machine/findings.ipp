// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/machine/findings.hpp>

#include <gradaccum/detail/build/inline.hpp>

#include <fmt/format.h>

#include <filesystem>
#include <optional>
#include <utility>

namespace gradaccum::detail {

/// The two times in words, such as `{:.1f} ms by one, {:.1f} ms by the other`, each multiplied by `unit`.
GRADACCUM_INLINE std::string seen(const std::optional<Comparison>& times, const std::string& words, double unit) {
  if (!times) return "not measured";
  return fmt::format(fmt::runtime(words), times->as_it_is * unit, times->at_best * unit);
}

/// In billions of operations a second, of which a product of square matrices has so many.
GRADACCUM_INLINE std::string seen_rates(const std::optional<Comparison>& times, const std::string& words,
                                        std::int64_t size) {
  const auto operations = 2e-9 * static_cast<double>(size * size * size);
  if (!times) return "not measured";
  return fmt::format(fmt::runtime(words), operations / times->as_it_is, operations / times->at_best);
}

/// A loss that nobody notices is none, and needs no cure.
GRADACCUM_INLINE MachineFinding judged(std::string what, std::string seen, const std::optional<Comparison>& times,
                                       std::string cure) {
  const double loss = times ? times->loss() : 1;
  if (loss < noticeable_loss) return {std::move(what), std::move(seen), 1, ""};
  return {std::move(what), std::move(seen), loss, std::move(cure)};
}

/// Where MKL gives its best, a loss to oneDNN is not for this line of code to mend.
GRADACCUM_INLINE MachineFinding products_finding(const MachineFacts& facts, const MachineTimes& times) {
  const auto* what = "float32 products";
  if (!facts.has_mkl) return {what, "not by MKL, and nothing to ask for"};
  const auto rates =
      seen_rates(times.products, "{:.0f} GFLOP/s a thread by MKL, {:.0f} by oneDNN", MachineTimes::product_size);
  if (facts.mkl_trusts_it.value_or(true)) return {what, rates};
  return judged(what, rates, times.products,
                "#include <gradaccum/mkl_on_amd.hpp> in one file of the program: MKL keeps its best code from "
                "processors that are not Intel's");
}

GRADACCUM_INLINE MachineFinding freed_memory_finding(const MachineFacts& facts, const MachineTimes& times) {
  return judged("freed memory",
                seen(times.freed_memory, "{:.1f} ms to fill 72 MiB of new tensors, {:.1f} ms of kept ones", 1e3),
                times.freed_memory,
                facts.has_glibc ? "ga::keep_freed_memory(); first thing in main(): the C library hands freed memory "
                                  "back to the kernel"
                                : "a malloc that keeps freed memory, such as jemalloc: this C library's hands it back");
}

GRADACCUM_INLINE std::string threads_cure(const MachineFacts& facts) {
  const int cpus = facts.usable_cpus();
  if (facts.threads > cpus)
    return fmt::format(
        "at::set_num_threads({0}); or OMP_NUM_THREADS={0} in the environment: threads wait for a CPU, "
        "and the others for them",
        cpus);
  return fmt::format("at::set_num_threads({}); where no other process is to have these CPUs", cpus);
}

GRADACCUM_INLINE std::string threads_seen(const MachineFacts& facts) {
  const int cpus = facts.usable_cpus();
  const auto seen = fmt::format("{} on {} CPU{}", facts.threads, cpus, cpus == 1 ? "" : "s");
  if (cpus < facts.allowed_cpus) return seen + fmt::format(" (a control group grants {:.3g})", *facts.cpu_limit);
  if (cpus < facts.cpus) return seen + fmt::format(" (the affinity of this process, of {})", facts.cpus);
  return seen;
}

/// As many threads as half the CPUs is LibTorch's own choice where each core is two CPUs. Too many are too many where
/// others keep the CPUs so busy that no time tells it.
GRADACCUM_INLINE MachineFinding threads_finding(const MachineFacts& facts, const MachineTimes& times) {
  const int cpus = facts.usable_cpus();
  const auto seen = threads_seen(facts);
  const double loss = times.threads ? times.threads->loss() : 1;
  if (facts.threads <= cpus && (2 * facts.threads >= cpus || loss < noticeable_loss)) return {"threads", seen};
  if (loss < noticeable_loss) return {"threads", seen, 1, threads_cure(facts)};
  return {"threads",
          seen + fmt::format(": a product in {:.2f} ms, with {} in {:.2f} ms", 1e3 * times.threads->as_it_is, cpus,
                             1e3 * times.threads->at_best),
          loss, threads_cure(facts)};
}

GRADACCUM_INLINE MachineFinding bfloat16_finding(const MachineFacts& facts, const MachineTimes& times) {
  return judged("bfloat16 products",
                seen_rates(times.bfloat16, "{:.3g} GFLOP/s a thread, {:.3g} in float32", MachineTimes::bfloat16_size),
                times.bfloat16,
                facts.bfloat16_fast
                    ? "train in float32: bfloat16 saves memory here, and no time"
                    : "train in float32, as ga::Autocast does by /*enabled=*/ga::is_bf16_fast(device): this processor "
                      "has no instructions for bfloat16");
}

GRADACCUM_INLINE MachineFinding denormals_finding(const MachineTimes& times) {
  return judged("denormal numbers",
                seen(times.denormals, "{:.2f} ns to multiply one, {:.2f} ns any other",
                     1e9 / static_cast<double>(MachineTimes::denormal_numbers)),
                times.denormals,
                "at::globalContext().setFlushDenormal(true); first thing in main(): numbers below 1.2e-38 become 0, in "
                "this thread and in those that it starts");
}

GRADACCUM_INLINE std::string huge_pages_cure(HugePages huge_pages) {
  if (huge_pages == HugePages::on_request)
    return "GLIBC_TUNABLES=glibc.malloc.hugetlb=1 in the environment; before glibc 2.35 THP_MEM_ALLOC_ENABLE=1, by "
           "which "
           "LibTorch asks for them for large tensors";
  return "as root: echo always > /sys/kernel/mm/transparent_hugepage/enabled";
}

/// The kernel says that nobody gets any: then there was nothing to measure, and yet something may be lost.
GRADACCUM_INLINE MachineFinding huge_pages_finding(const MachineFacts& facts, const MachineTimes& times) {
  const auto* what = "huge pages";
  if (facts.huge_pages == HugePages::never) return {what, "switched off", 1, huge_pages_cure(facts.huge_pages)};
  if (facts.huge_pages == HugePages::always) return {what, "for all memory"};
  if (facts.huge_pages == HugePages::unknown) return {what, "nothing is known of them"};
  if (facts.requests_huge_pages) return {what, "asked for by the environment"};
  return judged(what, seen(times.huge_pages, "{:.1f} ms for the first touch of 32 MiB, {:.1f} ms with them", 1e3),
                times.huge_pages, huge_pages_cure(facts.huge_pages));
}

GRADACCUM_INLINE MachineFinding attention_finding(const MachineFacts& facts, const MachineTimes& times) {
  const auto* what = "attention, 64 tokens";
  if (!facts.flash_attention) return {what, "flash is off, which long sequences want"};
  return judged(what, seen(times.attention, "training in bfloat16 {:.2f} ms by flash, {:.2f} ms without", 1e3),
                times.attention,
                "at::globalContext().setSDPUseFlash(false); where sequences are that short: long ones are faster with "
                "it, and take less memory");
}

GRADACCUM_INLINE MachineFinding openmp_finding(const MachineFacts& facts) {
  std::string names;
  for (auto& path : facts.openmp_runtimes)
    names += (names.empty() ? "" : " and ") + std::filesystem::path(path).filename().string();
  if (facts.openmp_runtimes.size() < 2) return {"OpenMP", names.empty() ? "none is loaded" : names};
  return {"OpenMP", names + " in one process", 1,
          "link the program with one of them: their threads take the CPUs from each other"};
}

/// What optimizers step parameters on devices with.
GRADACCUM_INLINE MachineFinding device_kernels_finding(const MachineFacts& facts) {
  const char* const what = "CUDA kernels";
  if (!facts.has_device_kernels)
    return {what, "none in this program: optimizers step by ATen's operations on a CUDA device", 1,
            "link with gradaccum::compiled, and configure where there is nvcc, of the version of LibTorch's CUDA"};
  return {what, "optimizers step by them"};
}

GRADACCUM_INLINE MachineFinding device_products_finding(const MachineTimes& times) {
  return judged("CUDA products of new shapes",
                seen(times.device_products, "{:.3f} ms for the first of a shape, {:.3f} ms for others", 1e3),
                times.device_products,
                "where lengths change, pad them to a few: .pad_to_multiple_of = 64 in ga::data::LengthBucketsOptions");
}

GRADACCUM_INLINE MachineFinding device_attention_finding(const MachineTimes& times) {
  return judged(
      "CUDA attention over new lengths",
      seen(times.device_attention, "{:.3f} ms for the first of a length, {:.3f} ms for others", 1e3),
      times.device_attention,
      "at::globalContext().setSDPUseCuDNN(false); where lengths change: cuDNN builds a plan for each of them");
}

GRADACCUM_INLINE std::vector<MachineFinding> findings_of(const MachineFacts& facts, const MachineTimes& times) {
  std::vector<MachineFinding> all{products_finding(facts, times),  freed_memory_finding(facts, times),
                                  threads_finding(facts, times),   bfloat16_finding(facts, times),
                                  denormals_finding(times),        huge_pages_finding(facts, times),
                                  attention_finding(facts, times), openmp_finding(facts)};
  if (facts.has_cuda)
    for (auto& finding :
         {device_kernels_finding(facts), device_products_finding(times), device_attention_finding(times)})
      all.push_back(finding);
  return all;
}

GRADACCUM_INLINE std::string described(const MachineFacts& facts) {
  const auto plural = [](int number) { return number == 1 ? "" : "s"; };
  const auto gib = static_cast<double>(facts.memory_bytes) / static_cast<double>(std::int64_t{1} << 30);
  return fmt::format("{}, {}: {} CPU{}, {:.1f} GiB of memory; LibTorch {} with {} thread{}", facts.processor,
                     facts.instructions, facts.cpus, plural(facts.cpus), gib, facts.libtorch, facts.threads,
                     plural(facts.threads));
}

}  // namespace gradaccum::detail
