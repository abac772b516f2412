// SPDX-License-Identifier: Apache-2.0
//
// Computes results; a program that answers MKL like LibTorch saves them, and one that does not compares them:
//   products save FILE | products compare FILE | products compare-bits FILE
// Linked twice, with answer.cpp and without.

#include <gradaccum/io/safetensors.hpp>
#include <gradaccum/optim/adamw.hpp>

#include <torch/torch.h>

#include <cstdio>
#include <exception>
#include <map>
#include <stdexcept>
#include <string>

#ifdef __unix__
#include <dlfcn.h>
#endif

namespace {

namespace ga = gradaccum;
using Results = std::map<std::string, at::Tensor>;

/// Returns results. Names that begin with "mkl" are MKL's; all others must keep their bits.
Results results() {
  torch::manual_seed(1);
  at::set_num_threads(1);
  const auto a = torch::randn({64, 2000}), b = torch::randn({2000, 48}), image = torch::randn({2, 3, 16, 16}),
             kernel = torch::randn({4, 3, 3, 3});
  auto parameter = torch::randn({1000}).requires_grad_();
  parameter.mutable_grad() = torch::randn({1000});
  ga::optim::AdamW adamw({parameter}, ga::optim::AdamWOptions(0.1));
  adamw.step();
  return {{"mkl float32", a.mm(b)},
          {"mkl float64", a.to(at::kDouble).mm(b.to(at::kDouble))},
          {"mkl batched", torch::bmm(a.expand({3, 64, 2000}), b.expand({3, 2000, 48}))},
          {"bfloat16", a.to(at::kBFloat16).mm(b.to(at::kBFloat16)).to(at::kFloat)},
          {"convolution", torch::conv2d(image, kernel)},
          {"sum", a.sum(1)},
          {"softmax", a.softmax(1)},
          {"AdamW", parameter.detach()}};
}

void compare(const Results& ours, const Results& theirs, bool bits) {
  for (auto& [name, tensor] : ours) {
    const auto& other = theirs.at(name);
    const double tolerance = tensor.scalar_type() == at::kDouble ? 1e-12 : 1e-4;
    const bool may_round = name.starts_with("mkl") && !bits;
    const bool same = may_round ? torch::allclose(tensor, other, tolerance, 10 * tolerance) : tensor.equal(other);
    std::printf("%s: %s\n", name.c_str(),
                tensor.equal(other) ? "the same bits"
                : same              ? "equal to rounding"
                                    : "NOT EQUAL");
    if (!same) throw std::runtime_error(name + " differs");
  }
}

/// Returns the answer that MKL gets: 1, 0, or -1 without MKL.
int answer() {
#ifdef __unix__
  const auto asked = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "mkl_serv_intel_cpu_true"));
  if (asked != nullptr) return asked();
#endif
  return -1;
}

}  // namespace

int main(int argc, char** argv) try {
  if (argc != 3) throw std::runtime_error("usage: products save|compare|compare-bits FILE");
  const std::string command = argv[1], file = argv[2];
  std::printf("MKL hears %d\n", answer());
  if (command == "save")
    ga::io::save_file(results(), file);
  else
    compare(results(), ga::io::load_file(file), command == "compare-bits");
} catch (const std::exception& error) {
  std::fprintf(stderr, "products: %s\n", error.what());
  return 1;
}
