// SPDX-License-Identifier: Apache-2.0

// Dropout, which on CUDA is one kernel and on the CPU three. Here it is one that gives the bits of the three.

#include "counts.hpp"
#include "generator.hpp"
#include "host_kernel_scope.hpp"
#include "host_views.hpp"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/ones_like.h>
#include <torch/library.h>

#include <optional>
#include <tuple>

namespace emulated_cuda {
namespace {

using at::Tensor;

/// On the CPU; what is left and what was left.
std::tuple<Tensor, Tensor> some_of(const Tensor& input, double dropped, const at::Generator& numbers) {
  const auto noise = at::empty_like(input).bernoulli_(1 - dropped, numbers);
  const auto mask = noise.to(at::kBool);
  return {dropped == 1 ? input.mul(noise) : input.mul(noise.div_(1 - dropped)), mask};
}

std::tuple<Tensor, Tensor> dropout(const Tensor& input, double dropped, std::optional<bool> train) {
  const auto device = input.device().index();
  HostViews views(device);
  Tensor output, mask;
  {
    const HostKernelScope scope;
    const auto host = views.host(input);
    const auto numbers = DeviceGenerator::of(device).get<DeviceGenerator>()->numbers();
    std::tie(output, mask) = train.value_or(true) ? some_of(host, dropped, numbers)
                                                  : std::tuple(host.clone(), at::ones_like(host, at::kBool));
  }
  ++counts().launches;
  return {views.device(output), views.device(mask)};
}

/// `scale`: by which what was left was multiplied.
Tensor dropout_backward(const Tensor& gradient, const Tensor& mask, double scale) {
  HostViews views(gradient.device().index());
  Tensor result;
  {
    const HostKernelScope scope;
    const auto host = views.host(gradient);
    const auto noise = views.host(mask).to(host.scalar_type());
    result = scale == 0 ? host.mul(noise) : host.mul(noise.div_(1 / scale));
  }
  ++counts().launches;
  return views.device(result);
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("native_dropout", &dropout);
  library.impl("native_dropout_backward", &dropout_backward);
}

}  // namespace
}  // namespace emulated_cuda
