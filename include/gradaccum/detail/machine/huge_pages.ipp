// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/machine/huge_pages.hpp>

#include <gradaccum/detail/build/inline.hpp>

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace gradaccum::detail {

GRADACCUM_INLINE HugePages huge_pages_of(const std::string& enabled) {
  const auto chosen = [&](const char* mode) { return enabled.find(mode) != std::string::npos; };
  if (chosen("[always]")) return HugePages::always;
  if (chosen("[madvise]")) return HugePages::on_request;
  return chosen("[never]") ? HugePages::never : HugePages::unknown;
}

GRADACCUM_INLINE bool requests_huge_pages(const char* libtorch, const char* glibc) {
  const std::string_view tunables = glibc ? glibc : "";
  return (libtorch && std::string_view(libtorch) == "1") ||
         tunables.find("glibc.malloc.hugetlb=1") != std::string_view::npos ||
         tunables.find("glibc.malloc.hugetlb=2") != std::string_view::npos;
}

#ifdef MADV_HUGEPAGE
/// New memory that nobody has touched.
class Mapping {
 public:
  static constexpr std::size_t huge_page = std::size_t{2} << 20, bytes = std::size_t{32} << 20;

  Mapping() : memory_(mmap(nullptr, bytes + huge_page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)) {}
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  ~Mapping() {
    if (valid()) munmap(memory_, bytes + huge_page);
  }

  bool valid() const { return memory_ != MAP_FAILED; }
  bool ask_for_huge_pages() { return valid() && madvise(aligned(), bytes, MADV_HUGEPAGE) == 0; }

  void touch() {
    constexpr std::size_t page = 4096;
    volatile char* const memory = aligned();  // what nobody reads is written all the same
    for (std::size_t at = 0; valid() && at < bytes; at += page) memory[at] = 1;
  }

 private:
  char* aligned() const {
    const auto start = reinterpret_cast<std::uintptr_t>(memory_);
    return static_cast<char*>(memory_) + (huge_page - start % huge_page) % huge_page;
  }

  void* memory_;
};

GRADACCUM_INLINE std::optional<Comparison> first_touch() {
  if (!Mapping().ask_for_huge_pages()) return std::nullopt;
  return compare(
      thread_seconds, [] { Mapping().touch(); },
      [] {
        Mapping memory;
        memory.ask_for_huge_pages();
        memory.touch();
      });
}
#else
GRADACCUM_INLINE std::optional<Comparison> first_touch() { return std::nullopt; }
#endif

}  // namespace gradaccum::detail
