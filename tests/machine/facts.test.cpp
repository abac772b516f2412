// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/detail/machine/huge_pages.hpp>
#include <gradaccum/detail/machine/machine_facts.hpp>

#include <ATen/Parallel.h>

namespace inner = gradaccum::detail;
using inner::HugePages;

TEST_CASE("huge_pages_of: the mode in brackets") {
  CHECK(inner::huge_pages_of("[always] madvise never\n") == HugePages::always);
  CHECK(inner::huge_pages_of("always [madvise] never\n") == HugePages::on_request);
  CHECK(inner::huge_pages_of("always madvise [never]\n") == HugePages::never);
}

TEST_CASE("huge_pages_of: what is no such file") {
  for (const std::string text : {"", "always madvise never", "[", "[]", "[ always]", "[defer]", "\xff[alwaysnever]"})
    CHECK(inner::huge_pages_of(text) == HugePages::unknown);
  CHECK(inner::huge_pages_of(std::string(1 << 16, '[')) == HugePages::unknown);
}

TEST_CASE("requests_huge_pages: by either variable") {
  CHECK_FALSE(inner::requests_huge_pages(nullptr, nullptr));
  CHECK_FALSE(inner::requests_huge_pages("", ""));
  CHECK_FALSE(inner::requests_huge_pages("0", "glibc.malloc.hugetlb=0"));
  CHECK(inner::requests_huge_pages("1", nullptr));
  CHECK(inner::requests_huge_pages(nullptr, "glibc.malloc.hugetlb=1"));
  CHECK(inner::requests_huge_pages("0", "glibc.malloc.top_pad=1:glibc.malloc.hugetlb=2"));
}

TEST_CASE("processor_name: the first of them") {
  CHECK(inner::processor_name(
            "processor\t: 0\nmodel\t\t: 2\nmodel name\t: Some CPU @ 2: 3 GHz\n\nmodel name\t: Other\n") ==
        "Some CPU @ 2: 3 GHz");
  for (const std::string text : {"", "model name", "model name\t:", "processor\t: 0\nBogoMIPS\t: 50\n"})
    CHECK(inner::processor_name(text).empty());
}

TEST_CASE("openmp_among: by the names of files") {
  using Names = std::vector<std::string>;
  CHECK(inner::openmp_among({"", "/usr/lib/libc.so.6", "/libgomp/libtorch.so", "linux-vdso.so.1"}) == Names{});
  CHECK(inner::openmp_among({"/a/libgomp-a34b.so.1", "/b/libiomp5.so", "libomp.so", "/b/libgomp.so.1"}) ==
        Names{"/a/libgomp-a34b.so.1", "/b/libiomp5.so", "libomp.so", "/b/libgomp.so.1"});
}

TEST_CASE("usable_cpus: as affinity and control groups allow, and never none") {
  inner::MachineFacts facts;
  facts.cpus = 64;
  facts.allowed_cpus = 8;
  CHECK(facts.usable_cpus() == 8);
  facts.cpu_limit = 16;
  CHECK(facts.usable_cpus() == 8);
  facts.cpu_limit = 1e300;
  CHECK(facts.usable_cpus() == 8);
  facts.cpu_limit = 2.5;
  CHECK(facts.usable_cpus() == 3);
  facts.cpu_limit = 1e-6;
  CHECK(facts.usable_cpus() == 1);
}

TEST_CASE("machine_facts: of this machine") {
  const auto facts = inner::machine_facts();
  CHECK_FALSE(facts.processor.empty());
  CHECK_FALSE(facts.instructions.empty());
  CHECK(facts.libtorch == TORCH_VERSION);
  CHECK(facts.cpus >= 1);
  CHECK(facts.usable_cpus() >= 1);
  CHECK(facts.memory_bytes > 0);
  CHECK(facts.threads == at::get_num_threads());
  CHECK(facts.has_mkl == at::hasMKL());
}
