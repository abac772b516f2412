// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/detail/machine/findings.hpp>

#include <algorithm>
#include <cmath>
#include <limits>

namespace ga = gradaccum;
namespace inner = gradaccum::detail;
using inner::Comparison, inner::HugePages, inner::MachineFacts, inner::MachineTimes;

namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();
constexpr Comparison lost{3e-3, 1e-3}, kept{1.1e-3, 1e-3};

/// On which all can be lost.
MachineFacts worst_machine() {
  MachineFacts facts;
  facts.processor = "Some CPU";
  facts.instructions = "AVX512";
  facts.libtorch = "2.15.0";
  facts.memory_bytes = std::int64_t{3} << 29;
  facts.cpus = facts.allowed_cpus = 4;
  facts.threads = 16;
  facts.has_mkl = facts.has_glibc = facts.flash_attention = true;
  facts.mkl_trusts_it = false;
  facts.bfloat16_fast = false;
  facts.huge_pages = HugePages::on_request;
  facts.openmp_runtimes = {"/a/libgomp.so.1", "/b/libiomp5.so"};
  return facts;
}

MachineTimes all(const Comparison& times) { return {times, times, times, times, times, times, times}; }

ga::MachineFinding finding(const std::string& what, const MachineFacts& facts, const MachineTimes& times) {
  const auto findings = inner::findings_of(facts, times);
  const auto found = std::ranges::find(findings, what, &ga::MachineFinding::what);
  REQUIRE(found != findings.end());
  return *found;
}

}  // namespace

TEST_CASE("Comparison: how many times slower") {
  CHECK(Comparison{3, 2}.loss() == 1.5);
  CHECK(Comparison{1, 2}.loss() == 1);
  for (const auto& none : {Comparison{}, Comparison{1, 0}, Comparison{infinity, 1}, Comparison{infinity, infinity},
                           Comparison{std::nan(""), 1}, Comparison{1, std::nan("")}, Comparison{1, -1}})
    CHECK(none.loss() == 1);
}

TEST_CASE("findings_of: all is lost") {
  const auto findings = inner::findings_of(worst_machine(), all(lost));
  REQUIRE(findings.size() == 8);
  for (auto& [what, seen, loss, cure] : findings) {
    INFO(what);
    CHECK_FALSE(seen.empty());
    CHECK_FALSE(cure.empty());
    CHECK(loss == Approx(what == "OpenMP" ? 1 : 3));
  }
}

TEST_CASE("findings_of: what nobody notices is well") {
  auto facts = worst_machine();
  facts.openmp_runtimes.pop_back();
  facts.threads = 1;
  for (auto& [what, seen, loss, cure] : inner::findings_of(facts, all(kept))) {
    INFO(what);
    CHECK(cure.empty());
    CHECK(loss == 1);
  }
}

TEST_CASE("findings_of: where nothing could be measured, nothing is lost") {
  auto facts = worst_machine();
  facts.openmp_runtimes.clear();
  facts.threads = 1;
  for (auto& finding : inner::findings_of(facts, {})) CHECK(finding.ok());
  for (auto& finding : inner::findings_of({}, {})) CHECK(finding.ok());
}

TEST_CASE("findings_of: MKL, as it takes the processor") {
  auto facts = worst_machine();
  const auto of = [&] { return finding("float32 products", facts, all({4e-3, 2e-3})); };
  CHECK(of().seen == "67 GFLOP/s a thread by MKL, 134 by oneDNN");  // 2 x 512 x 512 x 512
  CHECK(of().loss == 2);
  CHECK(testing::contains(of().cure, "#include <gradaccum/mkl_on_amd.hpp>"));
  facts.mkl_trusts_it = true;
  CHECK(of().ok());
  facts.mkl_trusts_it.reset();  // there is nothing to answer in place of
  CHECK(of().ok());
  facts.mkl_trusts_it = false;
  facts.has_mkl = false;
  CHECK(of().ok());
}

TEST_CASE("findings_of: freed memory, by the C library") {
  auto facts = worst_machine();
  CHECK(testing::contains(finding("freed memory", facts, all(lost)).cure, "ga::keep_freed_memory();"));
  facts.has_glibc = false;
  CHECK(testing::contains(finding("freed memory", facts, all(lost)).cure, "jemalloc"));
}

TEST_CASE("findings_of: threads and CPUs") {
  auto facts = worst_machine();
  const auto of = [&] { return finding("threads", facts, all(lost)); };
  CHECK(testing::contains(of().seen, "16 on 4 CPUs: a product in 3.00 ms, with 4 in 1.00 ms"));
  CHECK(testing::contains(of().cure, "at::set_num_threads(4);"));
  facts.threads = 1;
  CHECK(testing::contains(of().cure, "at::set_num_threads(4); where no other process"));
  for (const int well : {2, 3, 4}) {  // two CPUs may be one core
    facts.threads = well;
    CHECK(of().ok());
  }
  facts.threads = 5;
  CHECK_FALSE(of().ok());
}

TEST_CASE("findings_of: threads that no time tells of") {
  auto facts = worst_machine();
  for (auto& times : {all(kept), all({1e-3, 9e-3}), MachineTimes{}}) {
    facts.threads = 5;  // too many, all the same
    const auto found = finding("threads", facts, times);
    CHECK(found.seen == "5 on 4 CPUs");
    CHECK(found.loss == 1);
    CHECK_FALSE(found.ok());
    facts.threads = 1;  // somebody's choice, and no loss
    CHECK(finding("threads", facts, times).ok());
  }
}

TEST_CASE("findings_of: what withholds CPUs") {
  auto facts = worst_machine();
  facts.cpu_limit = 1.5;
  facts.threads = 2;
  CHECK(finding("threads", facts, {}).seen == "2 on 2 CPUs (a control group grants 1.5)");
  facts.cpu_limit.reset();
  facts.allowed_cpus = facts.threads = 1;
  CHECK(finding("threads", facts, {}).seen == "1 on 1 CPU (the affinity of this process, of 4)");
}

TEST_CASE("findings_of: bfloat16, with instructions and without") {
  auto facts = worst_machine();
  CHECK(testing::contains(finding("bfloat16 products", facts, all(lost)).cure, "ga::is_bf16_fast(device)"));
  facts.bfloat16_fast = true;
  CHECK(testing::contains(finding("bfloat16 products", facts, all(lost)).cure, "train in float32"));
}

TEST_CASE("findings_of: huge pages, as the kernel gives them") {
  auto facts = worst_machine();
  const auto of = [&] { return finding("huge pages", facts, all(lost)); };
  CHECK(testing::contains(of().cure, "GLIBC_TUNABLES=glibc.malloc.hugetlb=1"));
  facts.requests_huge_pages = true;
  CHECK(of().ok());
  for (const auto well : {HugePages::always, HugePages::unknown}) {
    facts.huge_pages = well;
    CHECK(of().ok());
  }
  facts.huge_pages = HugePages::never;  // whatever the environment asks for
  CHECK(testing::contains(of().cure, "/sys/kernel/mm/transparent_hugepage/enabled"));
  CHECK(of().loss == 1);
}

TEST_CASE("findings_of: attention, as it is allowed") {
  auto facts = worst_machine();
  CHECK(testing::contains(finding("attention, 64 tokens", facts, all(lost)).cure, "setSDPUseFlash(false);"));
  facts.flash_attention = false;
  CHECK(finding("attention, 64 tokens", facts, all(lost)).ok());
}

TEST_CASE("findings_of: OpenMP twice") {
  auto facts = worst_machine();
  CHECK(finding("OpenMP", facts, {}).seen == "libgomp.so.1 and libiomp5.so in one process");
  CHECK_FALSE(finding("OpenMP", facts, {}).ok());
  facts.openmp_runtimes.pop_back();
  CHECK(finding("OpenMP", facts, {}).seen == "libgomp.so.1");
  CHECK(finding("OpenMP", facts, {}).ok());
}

TEST_CASE("described: a machine in a line") {
  CHECK(inner::described(worst_machine()) ==
        "Some CPU, AVX512: 4 CPUs, 1.5 GiB of memory; LibTorch 2.15.0 with 16 threads");
}

TEST_CASE("findings_of: what is new to a CUDA device, where there is one") {
  MachineFacts facts;
  facts.has_cuda = true;
  MachineTimes times;
  const auto products = [&] { return finding("CUDA products of new shapes", facts, times); };
  const auto attention = [&] { return finding("CUDA attention over new lengths", facts, times); };
  CHECK(products().ok());
  times.device_products = times.device_attention = kept;
  CHECK(products().ok());
  CHECK(attention().ok());
  times.device_products = lost;
  CHECK(testing::contains(products().cure, ".pad_to_multiple_of = 64"));
  CHECK(products().seen == "3.000 ms for the first of a shape, 1.000 ms for others");
  CHECK(attention().ok());
  times.device_attention = lost;
  CHECK(testing::contains(attention().cure, "setSDPUseCuDNN(false);"));
}

TEST_CASE("findings_of: kernels for devices, where there is one") {
  MachineFacts facts;
  CHECK(inner::findings_of(facts, {}).size() == 8);
  facts.has_cuda = true;
  const auto of = [&] { return finding("CUDA kernels", facts, {}); };
  CHECK(testing::contains(of().cure, "link with gradaccum::compiled"));
  facts.has_device_kernels = true;
  CHECK(of().ok());
}
