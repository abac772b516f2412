// SPDX-License-Identifier: Apache-2.0

// Dropout, which is one kernel on CUDA and three on the CPU: one kernel here, with the bits of the three.

#include "fallback.hpp"
#include "generator.hpp"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/ones_like.h>
#include <torch/library.h>

#include <tuple>

namespace emulated_cuda {
namespace {

using at::Tensor;
using torch::jit::Stack;

/// Returns the result on the CPU, and the mask of kept elements.
std::tuple<Tensor, Tensor> some_of(const Tensor& input, double dropped, const at::Generator& numbers) {
  const auto noise = at::empty_like(input).bernoulli_(1 - dropped, numbers);
  const auto mask = noise.to(at::kBool);
  return {dropped == 1 ? input.mul(noise) : input.mul(noise.div_(1 - dropped)), mask};
}

void dropout(const c10::OperatorHandle& operation, Stack* stack) {
  const auto device = torch::jit::peek(*stack, 0, 3).toTensor().device().index();
  run(operation, stack, [device](Stack* host) {
    const auto train = torch::jit::pop(*host).toOptional<bool>();
    const auto dropped = torch::jit::pop(*host).toDouble();
    const auto input = torch::jit::pop(*host).toTensor();
    const auto numbers = DeviceGenerator::of(device).get<DeviceGenerator>()->numbers();
    const auto [output, mask] = train.value_or(true) ? some_of(input, dropped, numbers)
                                                     : std::tuple(input.clone(), at::ones_like(input, at::kBool));
    torch::jit::push(*host, output, mask);
  });
}

/// The last argument is the factor of kept elements.
void dropout_backward(const c10::OperatorHandle& operation, Stack* stack) {
  run(operation, stack, [](Stack* host) {
    const auto scale = torch::jit::pop(*host).toDouble();
    const auto mask = torch::jit::pop(*host).toTensor();
    const auto gradient = torch::jit::pop(*host).toTensor();
    const auto noise = mask.to(gradient.scalar_type());
    host->emplace_back(scale == 0 ? gradient.mul(noise) : gradient.mul(noise.div_(1 / scale)));
  });
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("native_dropout", torch::CppFunction::makeFromBoxedFunction<&dropout>());
  library.impl("native_dropout_backward", torch::CppFunction::makeFromBoxedFunction<&dropout_backward>());
}

}  // namespace
}  // namespace emulated_cuda
