// SPDX-License-Identifier: Apache-2.0
// The results of fixed steps on fixed gradients, to the bit. They must be equal on all processors of one column.
#include "support/catch.hpp"

#include <gradaccum/amp_scaler.hpp>
#include <gradaccum/detail/kernels/crc32.hpp>
#include <gradaccum/detail/kernels/kernel_loop.hpp>
#include <gradaccum/grad_accumulator.hpp>
#include <gradaccum/gradients.hpp>
#include <gradaccum/optim/adafactor.hpp>
#include <gradaccum/optim/adam.hpp>
#include <gradaccum/optim/adam8bit.hpp>
#include <gradaccum/optim/adamw.hpp>
#include <gradaccum/optim/adamw8bit.hpp>
#include <gradaccum/optim/lion.hpp>
#include <gradaccum/optim/sgd.hpp>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

namespace ga = gradaccum;
namespace inner = gradaccum::detail;
using inner::InstructionSet;

namespace {

/// Numbers in [-1, 1), by integers and one exact division: no function of the C library, whose last bit may differ.
at::Tensor numbers(at::IntArrayRef shape, std::uint32_t seed) {
  auto result = at::empty(shape, at::kFloat);
  auto* const data = result.mutable_data_ptr<float>();
  for (std::int64_t i = 0; i < result.numel(); ++i) {
    seed = seed * 1664525 + 1013904223;
    data[i] = static_cast<float>(static_cast<std::int32_t>(seed) >> 8) / (1 << 23);
  }
  return result;
}

std::vector<at::Tensor> parameters(at::ScalarType dtype) {
  std::vector<at::Tensor> all;
  for (std::uint32_t i = 0; i < 3; ++i)
    all.push_back(numbers(std::vector<at::IntArrayRef>{{67, 129}, {300}, {1}}[i], i).to(dtype).requires_grad_());
  return all;
}

std::uint32_t checksum(const std::vector<at::Tensor>& tensors) {
  std::uint32_t crc = 0;
  for (auto& tensor : tensors) {
    const auto bytes = tensor.detach().contiguous();
    crc = inner::crc32(bytes.const_data_ptr(), bytes.nbytes(), crc);
  }
  return crc;
}

template <class Optimizer, class Options>
std::uint32_t stepped(at::ScalarType dtype, const Options& options) {
  const auto all = parameters(dtype);
  Optimizer optimizer(all, options);
  for (std::uint32_t step = 0; step < 5; ++step) {
    for (auto& p : all) p.mutable_grad() = numbers(p.sizes(), 100 + step).mul(0.0625).to(dtype);
    optimizer.step();
  }
  return checksum(all);
}

/// Windows of two micro-batches, with a loss scale, a mean over items and clipping, all of which the step applies.
std::uint32_t scaled_windows() {
  const auto all = parameters(at::kFloat);
  ga::optim::AdamW adamw(all, ga::optim::AdamWOptions(0.01));
  ga::GradAccumulator optimizer(adamw, {.steps = 2});
  ga::AmpScaler scaler;
  for (std::uint32_t i = 0; i < 6; ++i) {
    auto loss = at::zeros({});
    for (auto& p : all) loss = loss + p.mul(numbers(p.sizes(), 200 + i)).sum();
    optimizer.backward(scaler.scale(ga::Loss(loss, 3 + 2 * (i % 2))));
    optimizer.clip_grad_norm_(0.5);
    scaler.step(optimizer);
    scaler.update();
    optimizer.zero_grad();
  }
  return checksum(all);
}

/// The bits of the norms of fixed gradients.
std::uint32_t norms() {
  std::uint32_t crc = 0;
  for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
    std::vector<inner::SquaredNumbers> all;
    for (auto& p : parameters(dtype)) all.push_back({p.detach()});
    for (const double sum : inner::sums_of_squares(all)) crc = inner::crc32(&sum, sizeof sum, crc);
  }
  return crc;
}

struct Row {
  const char* what;
  std::function<std::uint32_t()> run;
  std::uint32_t portable, fused;  ///< fused: NEON, AVX2 and AVX-512
  std::uint32_t avx512 = fused;   ///< where it matters that its vectors are longer
};

const std::vector<Row>& rows() {
  using namespace ga::optim;  // NOLINT
  static const std::vector<Row> all{
      {"SGD", [] { return stepped<SGD>(at::kFloat, SGDOptions(0.1).momentum(0.9).nesterov(true)); }, 0xfc7e49e6,
       0x9e00a8eb},
      {"SGD, bfloat16", [] { return stepped<SGD>(at::kBFloat16, SGDOptions(0.1).momentum(0.9).weight_decay(0.1)); },
       0x87adf4a2, 0x87adf4a2},
      {"Adam", [] { return stepped<Adam>(at::kFloat, AdamOptions(0.01).amsgrad(true).weight_decay(0.1)); }, 0xecd1a275,
       0xa8214d88},
      {"Adam, float64", [] { return stepped<Adam>(at::kDouble, AdamOptions(0.01)); }, 0xad461850, 0x1bedf75a},
      {"AdamW", [] { return stepped<AdamW>(at::kFloat, AdamWOptions(0.01)); }, 0xb85b0dbb, 0x8a6799db},
      {"AdamW, bfloat16", [] { return stepped<AdamW>(at::kBFloat16, AdamWOptions(0.01)); }, 0x5d7abac3, 0xa9471333},
      {"AdamW, float16", [] { return stepped<AdamW>(at::kHalf, AdamWOptions(0.01)); }, 0xab0cb2d3, 0xab0cb2d3},
      {"Adam8bit", [] { return stepped<Adam8bit>(at::kFloat, Adam8bitOptions(0.01)); }, 0x7a0da9a0, 0xf9015d63},
      {"Adam8bit, beta1 0.4",
       [] { return stepped<Adam8bit>(at::kFloat, Adam8bitOptions(0.01).betas(std::make_tuple(0.4, 0.9))); }, 0x7e01948d,
       0xf802a985},
      {"AdamW8bit", [] { return stepped<AdamW8bit>(at::kFloat, AdamW8bitOptions(0.01)); }, 0xa4bf8b8c, 0xb28648e7},
      {"AdamW8bit, bfloat16", [] { return stepped<AdamW8bit>(at::kBFloat16, AdamW8bitOptions(0.01)); }, 0x218b09f5,
       0x92d48c29},
      {"Adafactor", [] { return stepped<Adafactor>(at::kFloat, AdafactorOptions(0.01).beta1(0.9)); }, 0xfcf373bd,
       0x57f4e795, 0xaf1ac9d5},
      {"Lion", [] { return stepped<Lion>(at::kFloat, LionOptions(0.01).weight_decay(0.1)); }, 0xfcd25949, 0x8eebfd9e},
      {"Lion, bfloat16", [] { return stepped<Lion>(at::kBFloat16, LionOptions(0.01).weight_decay(0.1)); }, 0x19d9729c,
       0xb5471672},
      {"norms", [] { return norms(); }, 0x0b9f7da0, 0x0b9f7da0, 0xf1ac8568},
      {"scaled windows", [] { return scaled_windows(); }, 0x24c23d86, 0xbf7b14fb},
  };
  return all;
}

}  // namespace

TEST_CASE("equal bits: fixed steps on fixed gradients have the checksums of all processors with these kernels") {
  const auto set = inner::instruction_set();
  for (auto& [what, run, portable, fused, avx512] : rows()) {
    const auto expected = set == InstructionSet::portable ? portable : set == InstructionSet::avx512 ? avx512 : fused;
    const auto sum = run();
    INFO(what << ": " << std::hex << sum << ", not " << expected);
    CHECK(sum == expected);
  }
  const auto other = stepped<ga::optim::SGD>(at::kFloat, ga::optim::SGDOptions(0.1).momentum(0.9));  // control
  CHECK(other != (set == InstructionSet::portable ? rows().front().portable : rows().front().fused));
}
