// SPDX-License-Identifier: Apache-2.0
//
// Measures where LibTorch's defaults make this machine slow, and prints the line of code that fixes each loss
// (`./bootstrap.sh doctor`; docs/machine.md has the reasons). The program itself keeps these defaults.

#include <gradaccum/autocast.hpp>
#include <gradaccum/detail/kernels/device_kernels.hpp>
#include <gradaccum/detail/memory/memory_ledger.hpp>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/headeronly/version.h>

#include <fmt/format.h>

#include <dlfcn.h>
#include <link.h>
#include <sched.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <iostream>
#include <numeric>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace {

namespace inner = gradaccum::detail;
using Work = std::function<void()>;

struct Finding {
  std::string seen = {};  ///< the measurement, with its figures
  std::string cure = {};  ///< the line of code to write; empty if there is nothing to fix
  double loss = 1;        ///< how many times slower than with the fix; 1 if not measured by time
};

/// Seconds that the same work takes with a program's defaults, and with the fix.
struct Times {
  double as_it_is = HUGE_VAL, at_best = HUGE_VAL;

  /// Smaller losses are not worth a line of code.
  bool noticeable() const { return as_it_is >= 1.25 * at_best; }
};

Finding judged(std::string seen, const Times& times, std::string cure) {
  if (!times.noticeable()) return {std::move(seen)};
  return {std::move(seen), std::move(cure), times.as_it_is / times.at_best};
}

/// CLOCK_THREAD_CPUTIME_ID excludes other programs; work of several threads or a GPU needs CLOCK_MONOTONIC.
double seconds_of(const Work& work, clockid_t clock) {
  timespec start{}, end{};
  clock_gettime(clock, &start);
  work();
  clock_gettime(clock, &end);
  return static_cast<double>(end.tv_sec - start.tv_sec) + 1e-9 * static_cast<double>(end.tv_nsec - start.tv_nsec);
}

/// Alternates both for about a tenth of a second and returns the least time of each, because other programs can only
/// add to a time. The first run of each is not counted, because it includes initialization.
Times compare(const Work& as_it_is, const Work& at_best, clockid_t clock = CLOCK_THREAD_CPUTIME_ID) {
  Times least;
  double spent = 0;
  as_it_is(), at_best();
  for (int round = 0; round < 100 && (round < 3 || spent < 0.1); ++round) {
    const Times now{seconds_of(as_it_is, clock), seconds_of(at_best, clock)};
    least = {std::min(least.as_it_is, now.as_it_is), std::min(least.at_best, now.at_best)};
    spent += now.as_it_is + now.at_best;
  }
  return least;
}

/// Formats both times, such as `{:.1f} ms by one, {:.1f} ms by the other`.
std::string in_words(const char* words, const Times& times, double unit = 1e3) {
  return fmt::format(fmt::runtime(words), unit * times.as_it_is, unit * times.at_best);
}

/// Formats both rates of a product of square matrices, in billions of operations per second.
std::string rates(const char* words, const Times& times, std::int64_t size) {
  const double operations = 2e-9 * static_cast<double>(size * size * size);
  return fmt::format(fmt::runtime(words), operations / times.as_it_is, operations / times.at_best);
}

at::Tensor halves(at::IntArrayRef shape, at::ScalarType dtype = at::kFloat) { return at::full(shape, 0.5, dtype); }

/// Fills more bytes than glibc keeps by default, in parts small enough to be kept one by one. The parts are not
/// tensors, because small objects between them could prevent that memory is returned to the kernel.
Finding freed_memory() {
  constexpr std::size_t parts = 18, bytes = (72 << 20) / parts;
  const auto allocated = [] {
    std::vector<c10::DataPtr> memory;
    for (std::size_t i = 0; i < parts; ++i) memory.push_back(c10::GetCPUAllocator()->allocate(bytes));
    return memory;
  };
  const auto fill = [](const std::vector<c10::DataPtr>& memory) {
    for (auto& part : memory) std::memset(part.get(), 1, bytes);
  };
  const auto kept = allocated();
  const auto times = compare([&] { fill(allocated()); }, [&] { fill(kept); });
  return judged(in_words("{:.1f} ms to fill 72 MiB of new tensors, {:.1f} ms of kept ones", times), times,
                "ga::keep_freed_memory(); first thing in main(): glibc hands freed memory back to the kernel");
}

/// Touches 32 MiB of new memory, in huge pages if requested; returns false if the kernel does not grant these.
bool touch_new_memory(bool in_huge_pages) {
  constexpr std::size_t page = 4096, huge_page = 2 << 20, bytes = 32 << 20;
  void* const mapped = mmap(nullptr, bytes + huge_page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) return false;
  auto* const memory = static_cast<char*>(mapped) + huge_page - reinterpret_cast<std::uintptr_t>(mapped) % huge_page;
  const bool granted = !in_huge_pages || madvise(memory, bytes, MADV_HUGEPAGE) == 0;
  for (std::size_t at = 0; at < bytes; at += page) static_cast<volatile char*>(memory)[at] = 1;
  munmap(mapped, bytes + huge_page);
  return granted;
}

bool asks_for_huge_pages() {
  const char *const libtorch = std::getenv("THP_MEM_ALLOC_ENABLE"), *const glibc = std::getenv("GLIBC_TUNABLES");
  return (libtorch && *libtorch == '1') ||
         (glibc && (std::strstr(glibc, "malloc.hugetlb=1") || std::strstr(glibc, "malloc.hugetlb=2")));
}

Finding huge_pages() {
  const auto modes = inner::text_of_system_file("/sys/kernel/mm/transparent_hugepage/enabled");
  const auto chosen = [&](const char* mode) { return modes.find(mode) != std::string::npos; };
  if (chosen("[always]")) return {"for all memory"};
  if (chosen("[never]")) return {"switched off", "as root: echo always > /sys/kernel/mm/transparent_hugepage/enabled"};
  if (asks_for_huge_pages()) return {"asked for by the environment"};
  if (!chosen("[madvise]") || !touch_new_memory(true)) return {"the kernel does not offer them"};
  const auto times = compare([] { touch_new_memory(false); }, [] { touch_new_memory(true); });
  return judged(in_words("{:.1f} ms for the first touch of 32 MiB, {:.1f} ms with them", times), times,
                "GLIBC_TUNABLES=glibc.malloc.hugetlb=1 in the environment, THP_MEM_ALLOC_ENABLE=1 before glibc 2.35");
}

/// MKL calls this function to decide whether to trust the processor. If it does, MKL runs its best code, and
/// mkl_on_amd.hpp cannot make it faster.
bool mkl_trusts_processor() {
  auto* const answer = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "mkl_serv_intel_cpu_true"));
  return answer == nullptr || answer() != 0;
}

Finding float32_products() {
  if (!at::hasMKL() || !at::hasMKLDNN()) return {"not by MKL, and nothing to ask for"};
  const auto x = halves({512, 512}), x_of_onednn = x.to_mkldnn();
  const auto times = compare([&] { at::linear(x, x); }, [&] { at::mkldnn_linear(x_of_onednn, x_of_onednn); });
  const auto seen = rates("{:.0f} GFLOP/s a thread by MKL, {:.0f} by oneDNN", times, 512);
  if (mkl_trusts_processor()) return {seen};
  return judged(seen, times,
                "#include <gradaccum/mkl_on_amd.hpp> in one file of the program: MKL's best code is for Intel's alone");
}

Finding bfloat16_products() {
  constexpr std::int64_t size = 256;  // small, because a CPU without the instructions takes 80 times as long
  const auto x = halves({size, size}), x16 = x.to(at::kBFloat16);
  const auto times = compare([&] { at::mm(x16, x16); }, [&] { at::mm(x, x); });
  return judged(rates("{:.1f} GFLOP/s a thread, {:.1f} in float32", times, size), times,
                gradaccum::is_bf16_fast(at::kCPU)
                    ? "train in float32: bfloat16 saves memory here, and no time"
                    : "ga::Autocast autocast(device, at::kBFloat16, /*enabled=*/ga::is_bf16_fast(device));");
}

/// Multiplies one tensor in place and within the cache, because the relative position of two tensors affects the time.
/// Multiplying by 1 keeps the numbers.
Finding denormal_numbers() {
  constexpr std::int64_t number = 1 << 16;
  const auto normal = halves({number}), denormal = at::full_like(normal, 1e-40);
  const auto times = compare([&] { denormal.mul_(1); }, [&] { normal.mul_(1); });
  return judged(in_words("{:.2f} ns to multiply one, {:.2f} ns any other", times, 1e9 / number), times,
                "at::globalContext().setFlushDenormal(true); first thing in main(): numbers below 1.2e-38 become 0");
}

/// Includes backward, where flash attention loses its time.
Finding attention() {
  const auto gradient = halves({4, 8, 64, 32}, at::kBFloat16), x = gradient.clone().requires_grad_();
  const auto attend = [&](bool flash) {
    at::globalContext().setSDPUseFlash(flash);
    at::scaled_dot_product_attention(x, x, x).backward(gradient);
    x.mutable_grad().reset();
  };
  const auto times = compare([&] { attend(true); }, [&] { attend(false); });
  return judged(in_words("training in bfloat16 {:.2f} ms by flash, {:.2f} ms without", times), times,
                "at::globalContext().setSDPUseFlash(false); where all sequences are that short");
}

/// Returns the least CPU limit of this process's control groups; infinite if none has a limit.
double cpus_granted() {
  double least = HUGE_VAL;
  for (auto& group : inner::control_groups(inner::text_of_system_file("/proc/self/cgroup"), "cpu")) {
    std::string text;
    for (const auto* file : {"cpu.max", "cpu.cfs_quota_us", "cpu.cfs_period_us"})
      text += inner::text_of_system_file("/sys/fs/cgroup" / group / file) + ' ';
    std::istringstream numbers(text);
    double quota = 0, period = 0;
    if (numbers >> quota >> period && quota > 0 && period > 0) least = std::min(least, quota / period);
  }
  return least;
}

std::string counted(int number, const char* noun) {
  return fmt::format("{} {}{}", number, noun, number == 1 ? "" : "s");
}

int cpus_of_machine() { return static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN)); }

/// Returns all CPUs if the machine has more than a cpu_set_t can hold.
int cpus_by_affinity() {
  cpu_set_t allowed;
  return sched_getaffinity(0, sizeof(allowed), &allowed) == 0 ? CPU_COUNT(&allowed) : cpus_of_machine();
}

/// Compares `threads` with one thread per CPU, in separate runs, because changing the number takes time. Too many
/// threads slow down small products most, too few slow down large ones.
Times compare_threads(int threads, int cpus) {
  const auto x = threads > cpus ? halves({128, 128}) : halves({1024, 1024});
  const auto seconds = [&](int number) {
    at::set_num_threads(number);
    return compare([&] { at::mm(x, x); }, [] {}, CLOCK_MONOTONIC).as_it_is;
  };
  const Times times{seconds(threads), seconds(cpus)};
  at::set_num_threads(1);
  return times;
}

/// Reports too many threads even if the machine is too busy to measure it. Half as many threads as CPUs is LibTorch's
/// default on machines with two CPUs per core. A limit of 1.5 CPUs allows two threads.
Finding threads(int number) {
  const double granted = std::ceil(cpus_granted());
  const int allowed = cpus_by_affinity(), cpus = granted < allowed ? static_cast<int>(granted) : allowed;
  auto seen = fmt::format("{} on {}", number, counted(cpus, "CPU"));
  if (cpus < allowed)
    seen += fmt::format(" (a control group grants {:.3g})", cpus_granted());
  else if (cpus < cpus_of_machine())
    seen += fmt::format(" (the affinity of this process, of {})", cpus_of_machine());
  if (number <= cpus && 2 * number >= cpus) return {seen};
  const auto times = compare_threads(number, cpus);
  const auto cure = fmt::format("at::set_num_threads({0}); or OMP_NUM_THREADS={0} in the environment", cpus);
  if (!times.noticeable()) return {seen, number > cpus ? cure : ""};
  return judged(seen + in_words(": a product in {:.2f} ms, with as many as CPUs in {:.2f} ms", times), times, cure);
}

/// Returns the busy jiffies of this process's CPUs, and all jiffies, since the machine was started.
std::pair<double, double> jiffies() {
  cpu_set_t allowed;
  const bool known = sched_getaffinity(0, sizeof(allowed), &allowed) == 0;
  std::pair<double, double> sum;
  std::istringstream lines(inner::text_of_system_file("/proc/stat"));
  for (std::string line; std::getline(lines, line);) {
    int cpu = 0;
    std::array<double, 8> spent{};  // user, nice, system, idle, iowait, irq, softirq, steal
    std::istringstream words(line);
    std::string name;
    words >> name;
    if (std::sscanf(name.c_str(), "cpu%d", &cpu) != 1 || (known && !CPU_ISSET(cpu, &allowed))) continue;
    for (auto& number : spent) words >> number;
    const double all = std::accumulate(spent.begin(), spent.end(), 0.0);
    sum = {sum.first + all - spent[3] - spent[4], sum.second + all};
  }
  return sum;
}

/// Threads that share an operation wait for the slowest, which other programs may delay.
Finding other_programs(int number) {
  const auto before = jiffies();
  std::this_thread::sleep_for(std::chrono::milliseconds(500));
  const auto after = jiffies();
  const int cpus = cpus_by_affinity();
  const double busy = cpus * (after.first - before.first) / std::max(after.second - before.second, 1.0);
  const auto seen = fmt::format("keep {:.1f} of {} busy", busy, counted(cpus, "CPU"));
  const int free = std::max(static_cast<int>(std::lround(cpus - busy)), 1);
  if (number <= free) return {seen};
  return {seen,
          fmt::format("OMP_NUM_THREADS={} in the environment while they run: threads that share an operation wait "
                      "for the slowest",
                      free)};
}

/// Counts files instead of names: two files of one name are two runtimes, and LibTorch brings its own libgomp.
Finding openmp() {
  std::string names;
  const auto add = [](dl_phdr_info* library, std::size_t, void* list) {
    const auto name = std::filesystem::path(library->dlpi_name).filename().string();
    auto& all = *static_cast<std::string*>(list);
    if (name.starts_with("libgomp") || name.starts_with("libiomp") || name.starts_with("libomp"))
      all += (all.empty() ? "" : " and ") + name;
    return 0;
  };
  dl_iterate_phdr(add, &names);
  if (names.find(" and ") == std::string::npos) return {names.empty() ? "none is loaded" : names};
  return {names + " in one process", "link the program with one of them: their threads take the CPUs from each other"};
}

Finding device_kernels() {
  if (inner::device_kernels()) return {"optimizers step by them"};
  return {"none in this program: on a CUDA device SGD, Adam and AdamW step by ATen's operations, others not at all",
          "link with gradaccum::compiled, and configure where there is nvcc, of the version of LibTorch's CUDA"};
}

/// Compares work on a number of rows that is new to the device each time with work on a repeated one.
Times compare_new_rows(const std::function<void(std::int64_t)>& work) {
  const c10::impl::VirtualGuardImpl device(at::kCUDA);
  const auto run = [&](std::int64_t rows) {
    work(rows);
    device.synchronizeDevice(device.getDevice().index());
  };
  return compare([&, rows = 256]() mutable { run(++rows); }, [&] { run(256); }, CLOCK_MONOTONIC);
}

Finding device_products() {
  const auto x = halves({1024, 1024}, at::kHalf).to(at::kCUDA);
  const auto times = compare_new_rows([&](std::int64_t rows) { at::mm(x.narrow(0, 0, rows), x); });
  return judged(in_words("{:.3f} ms for the first of a shape, {:.3f} ms for others", times), times,
                "where lengths change, pad them to a few: .pad_to_multiple_of = 64 in ga::data::LengthBucketsOptions");
}

Finding device_attention() {
  const auto x = halves({1, 8, 1024, 64}, at::kHalf).to(at::kCUDA);
  const auto times = compare_new_rows([&](std::int64_t rows) {
    const auto part = x.narrow(2, 0, rows);
    at::scaled_dot_product_attention(part, part, part);
  });
  return judged(in_words("{:.3f} ms for the first of a length, {:.3f} ms for others", times), times,
                "at::globalContext().setSDPUseCuDNN(false); where lengths change: cuDNN builds a plan for each");
}

std::string processor_name() {
  std::istringstream cpuinfo(inner::text_of_system_file("/proc/cpuinfo"));
  for (std::string line; std::getline(cpuinfo, line);)
    if (line.starts_with("model name\t: ")) return line.substr(std::strlen("model name\t: "));
  return "unknown processor";
}

std::string described_machine() {
  const double gib = std::ldexp(static_cast<double>(sysconf(_SC_PHYS_PAGES) * sysconf(_SC_PAGESIZE)), -30);
  return fmt::format("{}, {}: {}, {:.1f} GiB of memory; LibTorch {} with {}", processor_name(),
                     at::get_cpu_capability(), counted(cpus_of_machine(), "CPU"), gib, TORCH_VERSION,
                     counted(at::get_num_threads(), "thread"));
}

std::string verdict(const Finding& finding) {
  if (finding.cure.empty()) return "ok";
  if (finding.loss <= 1) return "to mend";
  return fmt::format("{:.1f} times slower", finding.loss);
}

/// Prints a finding as soon as it is measured, or "not measured" if this build of LibTorch lacks an operation.
void print(const std::string& what, const std::function<Finding()>& look) {
  Finding finding{"not measured"};
  try {
    finding = look();
  } catch (const c10::Error&) {  // some builds lack MKL or oneDNN, some devices an operation
  }
  std::cout << fmt::format("{:<17} {}: {}", verdict(finding), what, finding.seen) << std::endl;
  if (!finding.cure.empty()) std::cout << fmt::format("{:20}{}", "", finding.cure) << std::endl;
}

}  // namespace

/// Measures memory first, before other measurements have freed any.
int main() {
  std::cout << described_machine() << '\n' << std::endl;
  const int threads_by_default = at::get_num_threads();
  at::set_num_threads(1);
  print("freed memory", freed_memory);
  print("huge pages", huge_pages);
  print("float32 products", float32_products);
  print("bfloat16 products", bfloat16_products);
  print("threads", [&] { return threads(threads_by_default); });
  print("other programs", [&] { return other_programs(threads_by_default); });
  print("denormal numbers", denormal_numbers);
  print("attention, 64 tokens", attention);
  print("OpenMP", openmp);
  if (!at::hasCUDA()) return 0;
  print("CUDA kernels", device_kernels);
  print("CUDA products of new shapes", device_products);
  print("CUDA attention over new lengths", device_attention);
}
