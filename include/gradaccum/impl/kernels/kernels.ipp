// SPDX-License-Identifier: Apache-2.0
// Compiles the processor's kernels for each instruction set, chooses between them, and runs them on threads.
#pragma once

#include <gradaccum/detail/build/libtorch.hpp>
#include <gradaccum/detail/kernels/dense.hpp>
#include <gradaccum/detail/kernels/device_kernels.hpp>
#include <gradaccum/detail/kernels/dynamic_map.hpp>
#include <gradaccum/detail/kernels/kernel_loop.hpp>

#include <ATen/MemoryOverlap.h>
#include <ATen/OpMathType.h>
#include <ATen/TensorIterator.h>
#include <ATen/Version.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/zero.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#if defined(GRADACCUM_LINKS_CUDA) && TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 11
#include <c10/cuda/CUDAStream.h>
#endif

#ifdef __x86_64__
#include <immintrin.h>
#elif defined(__aarch64__) && defined(__GNUC__)
#include <arm_neon.h>
#endif

#include <atomic>
#include <cmath>
#include <limits>
#include <type_traits>
#include <utility>

#include <gradaccum/detail/kernels/on_device.hpp>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum::detail {

GRADACCUM_INLINE bool same_order(const at::Tensor& a, const at::Tensor& b) {
  for (std::int64_t i = 0; i < a.dim(); ++i)
    if (a.size(i) != 1 && a.stride(i) != b.stride(i)) return false;
  return true;
}

GRADACCUM_INLINE bool is_plain(const at::Tensor& t) {
  return t.is_non_overlapping_and_dense() && !t._is_zerotensor() && !t.is_neg() && !t.is_conj();
}

GRADACCUM_INLINE at::Tensor plain_layout_of(const at::Tensor& t) {
  return is_plain(t) ? t : at::empty_like(t, t.options().device(at::kMeta));
}

GRADACCUM_INLINE at::Tensor in_order_of(const at::Tensor& like, const at::Tensor& t, at::ScalarType dtype) {
  if (t.scalar_type() == dtype && is_plain(t) && same_order(like, t)) return t;
  return at::empty_strided(like.sizes(), like.strides(), t.options().dtype(dtype)).copy_(t);
}

GRADACCUM_INLINE at::Tensor row_major(const at::Tensor& t, at::ScalarType dtype) {
  if (t.scalar_type() == dtype && is_plain(t) && t.is_contiguous()) return t;
  return at::empty(t.sizes(), t.options().dtype(dtype)).copy_(t);
}

GRADACCUM_INLINE bool has_kernels(at::ScalarType dtype) {
  return dtype == at::kDouble || dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16;
}

GRADACCUM_INLINE at::ScalarType state_type(const at::Tensor& parameter) {
  return at::toOpMathType(parameter.scalar_type());
}

GRADACCUM_INLINE at::ScalarType gradient_type(const at::Tensor& parameter, const at::Tensor& gradient) {
  return gradient.scalar_type() == parameter.scalar_type() ? gradient.scalar_type() : state_type(parameter);
}

GRADACCUM_INLINE at::Tensor in_reach(const at::Tensor& gradient, const at::Tensor& parameter, double& multiplier) {
  if (at::elementSize(gradient.scalar_type()) <= at::elementSize(state_type(parameter))) return gradient;
  return gradient.mul(std::exchange(multiplier, 1.0));
}

GRADACCUM_INLINE at::Tensor checked_state(const at::Tensor& state, const at::Tensor& parameter, const char* name) {
  const auto like = plain_layout_of(parameter);
  if (!state.defined()) {
    const auto options = parameter.options().dtype(state_type(parameter));
    return at::empty_strided(like.sizes(), like.strides(), options).zero_();
  }
  TORCH_CHECK(state.layout() == at::kStrided && state.sizes() == parameter.sizes() &&
                  state.device() == parameter.device() && state.is_complex() == parameter.is_complex(),
              "optimizer state: ", name, " must have the shape and device of its parameter, ", parameter.sizes(),
              " on ", parameter.device(), ", got ", state.sizes(), " on ", state.device(), " (", state.scalar_type(),
              "); the state was loaded for another model");
  return in_order_of(like, state, state_type(parameter));
}

GRADACCUM_INLINE void check_can_be_stepped(const char* optimizer, const at::Tensor& parameter,
                                           const at::Tensor& gradient) {
  TORCH_CHECK(gradient.sizes() == parameter.sizes() && gradient.device() == parameter.device(), optimizer,
              ": a gradient must have the shape and device of its parameter, ", parameter.sizes(), " on ",
              parameter.device(), ", got ", gradient.sizes(), " on ", gradient.device());
  TORCH_CHECK(parameter.layout() == at::kStrided && (gradient.layout() == at::kStrided || gradient.is_sparse()),
              optimizer, ": a parameter must be dense, and its gradient dense or sparse COO, got layouts ",
              parameter.layout(), " and ", gradient.layout());
  const auto number = at::toRealValueType(parameter.scalar_type());
  TORCH_CHECK(has_kernels(number), optimizer,
              ": a parameter's dtype must be floating or complex, of 16 bits or more, got ", parameter.scalar_type());
  TORCH_CHECK(!parameter._is_zerotensor() && (!parameter.is_inference() || c10::InferenceMode::is_enabled()), optimizer,
              ": a parameter must be writable, got an inference tensor or a ZeroTensor");
  if (!is_plain(parameter)) at::assert_no_internal_overlap(parameter);  // expanded: several elements share one number
}

GRADACCUM_INLINE at::Tensor as_real(const at::Tensor& t) { return t.is_complex() ? at::view_as_real(t) : t; }

GRADACCUM_INLINE void write_back(const at::Tensor& parameter, const at::Tensor& stepped) {
  if (!stepped.is_same(parameter))
    parameter.copy_(stepped);
  else if (!parameter.is_inference())
    parameter.unsafeGetTensorImpl()->bump_version();
}

GRADACCUM_INLINE DynamicMap make_dynamic_map(bool is_signed) {
  DynamicMap map;
  const int shift = is_signed ? 0 : 1;  // the unsigned map has twice as many numbers per decade
  const auto entry = [](int i) { return static_cast<std::size_t>(i + 127) % 16; };
  for (int i = 0; i < DynamicMap::decades; ++i) {
    const double size = std::ldexp(1.0, i + shift), ten = std::pow(10.0, i - DynamicMap::decades + 1);
    const double slope = 0.9 * ten / size, digit = std::ldexp(1.0, std::ilogb(ten) - 22);
    const double rounded = std::round(slope / digit) * digit, middle = 1.5 * size;  // the point without rounding error
    const double base = (0.45 / size - 0.8) * ten + (slope - rounded) * middle;
    map.slope[entry(i + shift)] = static_cast<float>(rounded);
    map.base[entry(i + shift)] = static_cast<float>(std::round(base / digit) * digit);
  }
  // k = 1 of the unsigned map is 0, as in its tables. The last k, beyond all decades, is 1.
  map.base[entry(DynamicMap::decades + shift)] = 1;
  const auto number = [&](int k) {
    if (k == 0) return 0.0f;
    const auto in = entry(std::ilogb(static_cast<float>(k)));
    return map.base[in] + map.slope[in] * static_cast<float>(k);
  };

  for (std::size_t decade = 0; decade <= DynamicMap::decades + 1; ++decade) {
    const int first = (1 << (static_cast<int>(decade) + shift)) / 2, last = 2 * first - (first > 0);
    const bool even = decade > 0 && decade <= DynamicMap::decades;
    const auto in = even ? entry(std::ilogb(static_cast<float>(first))) : 0;
    const auto code = [&](int k) { return static_cast<float>(k - shift); };
    map.first[decade] = code(first);
    map.last[decade] = even ? code(last) : code(first);
    map.scale[decade] = even ? 1 / map.slope[in] : 0;
    map.offset[decade] = even ? -map.base[in] / map.slope[in] - static_cast<float>(shift) : code(first);
    map.spread[decade] = even ? map.slope[in] : 0;
    map.middle[decade] = even ? map.base[in] + map.slope[in] * (0.5f + static_cast<float>(shift))
                              : std::numeric_limits<float>::infinity();
    if (decade <= DynamicMap::decades) {
      const int next = first == 0 ? 1 : 2 * first;
      map.edge[decade] = number(next - 1) + (number(next) - number(next - 1)) / 2;
    }
  }
  if (!is_signed) map.edge[0] = 0;
  for (int code = 0; code < 256; ++code)
    map.values[static_cast<std::size_t>(code)] = !is_signed   ? number(code + 1)
                                                 : code < 127 ? -number(127 - code)
                                                              : number(code - 127);
  return map;
}

GRADACCUM_INLINE const DynamicMap& signed_map() {
  static const DynamicMap map = make_dynamic_map(true);
  return map;
}
GRADACCUM_INLINE const DynamicMap& second_moment_map() {
  static const DynamicMap map = make_dynamic_map(false);
  return map;
}

GRADACCUM_INLINE std::atomic<const DeviceKernels*>& kernels_in_use() {
#ifdef GRADACCUM_CUDA_KERNELS
  static std::atomic<const DeviceKernels*> kernels = &cuda_kernels;
#else
  static std::atomic<const DeviceKernels*> kernels = nullptr;
#endif
  return kernels;
}

GRADACCUM_INLINE const DeviceKernels* device_kernels() { return kernels_in_use(); }
GRADACCUM_INLINE void set_device_kernels(const DeviceKernels* kernels) { kernels_in_use() = kernels; }

GRADACCUM_INLINE void* native_stream(c10::Device device) {
  [[maybe_unused]] const auto stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 11
  return stream.native_handle();
#elif defined(GRADACCUM_LINKS_CUDA)
  return c10::cuda::CUDAStream(stream).stream();
#elif defined(GRADACCUM_CUDA_KERNELS)
#error \
    "gradaccum: with a LibTorch older than 2.11 CUDA kernels need the toolkit's headers (cublas, cusparse and cusolver, too)"
#else
  return nullptr;  // only tests have kernels here
#endif
}

GRADACCUM_INLINE bool can_be_normed_on_device(const at::Tensor& tensor) {
  return device_kernels() && tensor.is_cuda() && tensor.is_non_overlapping_and_dense() && !tensor._is_zerotensor() &&
         has_kernels(tensor.scalar_type());
}

GRADACCUM_INLINE at::Tensor StreamMemory::take(std::int64_t numbers, at::Device device) {
  auto* const stream = native_stream(device);
  const bool fits = memory_.defined() && memory_.numel() >= numbers && memory_.device() == device &&
                    stream_ == stream && memory_.use_count() == 1 && memory_.storage().use_count() == 1;
  if (!fits) {
    memory_ = at::empty({numbers}, at::TensorOptions(at::kDouble).device(device));
    stream_ = stream;
  }
  return memory_;
}

GRADACCUM_INLINE at::Tensor l2_norms_on_device(const std::vector<at::Tensor>& tensors, StreamMemory& memory) {
  const auto device = tensors.front().device();
  const c10::DeviceGuard guard(device);
  std::int64_t blocks = 0;
  for (auto& tensor : tensors) blocks += blocks_of_elements(tensor.numel());
  const auto count = static_cast<std::int64_t>(tensors.size());
  const auto norms = memory.take(count + blocks, device).narrow(0, 0, count);
  auto* const numbers = norms.mutable_data_ptr<double>();
  SquaresLaunch launch(numbers + count, numbers);
  const auto run = [&] {
    device_kernels()->l2_norms(launch, tensors.front().scalar_type(), native_stream(device));
    launch = SquaresLaunch(launch.partial_sums + launch.tensors.blocks, launch.norms + launch.tensors.size);
  };
  for (auto& tensor : tensors) {
    if (launch.tensors.full()) run();
    launch.tensors.add({tensor.const_data_ptr(), tensor.numel()});
  }
  run();
  return norms;
}

GRADACCUM_INLINE at::Tensor window_norm_on_device(const at::Tensor& norms, const DeviceMultiplier& by,
                                                  double max_norm) {
  static_assert(sizeof(WindowNorm) == 3 * sizeof(double) && offsetof(WindowNorm, clip_coefficient) == sizeof(double) &&
                offsetof(WindowNorm, found_inf) == 4 * sizeof(float));
  const c10::DeviceGuard guard(norms.device());
  auto result = at::empty({3}, norms.options());
  device_kernels()->window_norm({norms.const_data_ptr<double>(), norms.numel(), by, max_norm,
                                 static_cast<WindowNorm*>(result.mutable_data_ptr())},
                                native_stream(norms.device()));
  return result;
}

/// Uses a TensorIterator over one byte per task: at::parallel_for is serial in programs built without -fopenmp.
GRADACCUM_INLINE void parallel_for(std::int64_t count, c10::function_ref<void(std::int64_t)> body) {
  const auto tasks = at::empty({count}, at::TensorOptions(at::kByte));
  const auto* const first = static_cast<const char*>(tasks.const_data_ptr());
  auto iterator = at::TensorIteratorConfig()
                      .check_all_same_dtype(false)
                      .declare_static_dtype_and_device(at::kByte, at::kCPU)
                      .resize_outputs(false)
                      .declare_static_shape(tasks.sizes())
                      .add_output(tasks)
                      .build();
  iterator.for_each(
      [&](char** data, const std::int64_t* strides, std::int64_t inner, std::int64_t outer) {
        for (std::int64_t j = 0; j < outer; ++j)
          for (std::int64_t i = 0; i < inner; ++i) body(data[0] + j * strides[1] + i * strides[0] - first);
      },
      /*grain_size=*/1);
}

GRADACCUM_INLINE InstructionSet instruction_set() {
  static const auto found = [] {
#ifdef __x86_64__
    const auto capability = at::get_cpu_capability();
    if (capability == "AVX512") return InstructionSet::avx512;
    if (capability == "AVX2") return InstructionSet::avx2;
#elif defined(__aarch64__) && defined(__GNUC__)
    if (c10::utils::get_env("ATEN_CPU_CAPABILITY") != "default") return InstructionSet::neon;
#endif
    return InstructionSet::portable;
  }();
  return found;
}

namespace portable {
#include <gradaccum/detail/kernels/simd/portable.inl>
// files that use those above:
#include <gradaccum/detail/kernels/simd/kernels.inl>
}  // namespace portable

#if defined(__aarch64__) && defined(__GNUC__)
namespace neon {
#include <gradaccum/detail/kernels/simd/neon.inl>
// files that use those above:
#include <gradaccum/detail/kernels/simd/kernels.inl>
}  // namespace neon
#else
namespace neon = portable;
#endif

#ifdef __x86_64__

#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif
namespace avx2 {
#include <gradaccum/detail/kernels/simd/avx2.inl>
#include <gradaccum/detail/kernels/simd/kernels.inl>
}  // namespace avx2
#ifdef __clang__
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma,f16c"))), \
                             apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,fma,f16c")
#endif
namespace avx512 {
#include <gradaccum/detail/kernels/simd/avx512.inl>
#include <gradaccum/detail/kernels/simd/kernels.inl>
}  // namespace avx512
#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#else  // aliases, unused
namespace avx2 = portable;
namespace avx512 = portable;
#endif

/// Calls `select` with the kernels of an instruction set.
template <class Select>
auto kernels_in(InstructionSet set, const OperandTypes& types, const Select& select) {
  if (set == InstructionSet::avx512) return select(avx512::Kernels{types});
  if (set == InstructionSet::avx2) return select(avx2::Kernels{types});
  if (set == InstructionSet::neon) return select(neon::Kernels{types});
  return select(portable::Kernels{types});
}

template <class Step>
Kernel* kernel_of(const OperandTypes& types, InstructionSet set) {
  return kernels_in(set, types, [](const auto& of) { return of.template step<Step>(); });
}

GRADACCUM_INLINE AdafactorKernels adafactor_kernels(const OperandTypes& types, InstructionSet set) {
  return kernels_in(set, types, [](const auto& of) { return of.adafactor(); });
}

GRADACCUM_INLINE AdafactorKernels narrow_adafactor_kernels(const OperandTypes& types) {
  using Narrow = portable::AdafactorIn<portable::Lanes<float, 1>, portable::Lanes<double, 1>>;
  return portable::of_types<AdafactorKernels(), Narrow::OfTypes>(types)();
}

GRADACCUM_INLINE SumOfSquares sum_of_squares_of(at::ScalarType dtype, InstructionSet set) {
  return kernels_in(set, {dtype, dtype, false}, [](const auto& of) { return of.sum_of_squares(); });
}

GRADACCUM_INLINE bool can_be_summed_here(const at::Tensor& tensor) {
  return tensor.device().is_cpu() && tensor.is_non_overlapping_and_dense() && !tensor._is_zerotensor() &&
         has_kernels(tensor.scalar_type());
}

/// Places the table's rows among zeros first, so that the sum equals the dense table's to the bit.
GRADACCUM_INLINE double sum_of_squares_of_rows(const SquaredNumbers& of, std::int64_t from, std::int64_t count) {
  const auto width = of.values.numel() / of.rows.numel(), size = static_cast<std::int64_t>(of.values.element_size());
  const auto* const begin = of.rows.const_data_ptr<std::int64_t>();
  const auto* const end = begin + of.rows.numel();
  const auto* const values = static_cast<const char*>(of.values.const_data_ptr());
  std::vector<char> numbers;
  for (const auto* row = std::lower_bound(begin, end, from / width); row != end && *row * width < from + count; ++row) {
    if (numbers.empty()) numbers.resize(static_cast<std::size_t>(count * size));
    const auto first = std::max(*row * width, from), last = std::min((*row + 1) * width, from + count);
    std::copy_n(values + ((row - begin) * width + first - *row * width) * size, (last - first) * size,
                numbers.data() + (first - from) * size);
  }
  return numbers.empty() ? 0 : sum_of_squares_of(of.values.scalar_type())(numbers.data(), count);
}

GRADACCUM_INLINE double sum_of_squares_of_part(const SquaredNumbers& of, std::int64_t from, std::int64_t count) {
  if (of.rows.defined()) return sum_of_squares_of_rows(of, from, count);
  const auto* const begin = static_cast<const char*>(of.values.const_data_ptr());
  const auto* const first = begin + from * static_cast<std::int64_t>(of.values.element_size());
  return sum_of_squares_of(of.values.scalar_type())(first, count);
}

GRADACCUM_INLINE std::vector<double> sums_of_squares(const std::vector<SquaredNumbers>& all) {
  ElementLoop loop;
  for (auto& of : all)
    loop.add(of.rows.defined() ? of.values.numel() / of.rows.numel() * of.rows_of_table : of.values.numel());
  // Every slice and every array adds at most one part, so that array + slice is unique for each part.
  std::vector<double> parts(all.size() + static_cast<std::size_t>(loop.slices())), sums(all.size());
  std::vector<std::size_t> owners(parts.size());
  loop.run([&](std::size_t array, std::int64_t from, std::int64_t count, std::int64_t slice) {
    const auto part = array + static_cast<std::size_t>(slice);
    parts[part] = sum_of_squares_of_part(all[array], from, count);
    owners[part] = array;
  });
  for (std::size_t i = 0; i < parts.size(); ++i) sums[owners[i]] += parts[i];
  return sums;
}

}  // namespace gradaccum::detail

#undef GRADACCUM_ON_DEVICE
#undef GRADACCUM_UNROLL

#undef GRADACCUM_INLINE
