// SPDX-License-Identifier: Apache-2.0
//
// Trains a small network on FashionMNIST with gradient accumulation. Read train.hpp first: the rest is around it.

#include <fmt/format.h>
#include <torch/torch.h>

#include <exception>

#include "compare.hpp"
#include "dataset.hpp"
#include "options.hpp"
#include "train.hpp"

#ifdef __GLIBC__
#include <malloc.h>
#endif

namespace {

/// Training frees and allocates the same buffers for every batch. By default glibc hands the large ones back to the
/// kernel each time, which then has to clear the pages anew: that can cost a third of the time of a small model.
void keep_freed_memory() {
#ifdef __GLIBC__
  mallopt(M_MMAP_THRESHOLD, 1 << 30);
  mallopt(M_TRIM_THRESHOLD, 1 << 30);
  mallopt(M_TOP_PAD, 64 << 20);
#endif
}

void run(const fashion_mnist::Options& options) {
  if (options.threads > 0) torch::set_num_threads(options.threads);
  const auto dataset = fashion_mnist::load_dataset(options.data, options.device, options.scalar_type());
  if (options.compare)
    fashion_mnist::compare(options, dataset);
  else
    fashion_mnist::print_summary(fashion_mnist::train(options, dataset));
}

}  // namespace

int main(int argc, char** argv) {
  keep_freed_memory();
  const auto options = fashion_mnist::parse_options(argc, argv);
  try {
    run(options);
    return 0;
  } catch (const c10::Error& error) {
    fmt::print(stderr, "fashion_mnist: {}\n", error.what_without_backtrace());
  } catch (const std::exception& error) {
    fmt::print(stderr, "fashion_mnist: {}\n", error.what());
  }
  return 1;
}
