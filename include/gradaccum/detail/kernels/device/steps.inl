// SPDX-License-Identifier: Apache-2.0
//
// Thread blocks that step tensors. A block runs `begin`, and then several rounds of several phases. Its threads
// synchronize after each; with `warps_are_independent`, only the threads of a warp do after a phase. Each thread has
// its own object of the class. The including file defines `run_blocks<Block>(arguments, blocks, stream)`.

/// Multiplies in the order of `Multiplier::on`.
GRADACCUM_ON_DEVICE inline double product_of(const DeviceMultiplier& by) {
  double product = by.device_denominator ? by.numerator : by.numerator / by.denominator;
  if (by.device_numerator) product *= *by.device_numerator;
  if (by.device_denominator) product /= by.denominator * *by.device_denominator;
  return product;
}

GRADACCUM_ON_DEVICE inline bool leaves_out(const DeviceMultiplier& by) { return by.found_inf && *by.found_inf != 0; }

/// Sets the numbers of this step. If steps were skipped that the settings have counted, it is an earlier one, but at
/// least the first, even if the state was replaced without the host's knowledge.
template <class Step>
GRADACCUM_ON_DEVICE void set_numbers(Operand& o, const StepLaunch& launch) {
  if constexpr (requires(Step by) { by.step; })
    if (launch.by.skipped_steps) {
      auto settings = launch.settings.as<Step>();
      settings.step -= static_cast<std::int64_t>(*launch.by.skipped_steps);
      if (settings.step < 1) settings.step = 1;
      o.numbers.set(numbers_of(settings));
      return;
    }
  o.numbers.set(launch.numbers.as<NumbersOf<Step>>());
}

/// The data shared by the threads of a block that steps a part of a tensor.
struct SharedStep {
  Operand operand;
  std::int64_t from, count;
};

/// `P` and `G` are the types of parameters and gradients.
template <class Step, class P, class G>
GRADACCUM_ON_DEVICE void begin_step(const StepLaunch& launch, std::int64_t block, SharedStep& shared) {
  if (this_thread() != 0) return;
  const auto place = place_of_block(launch.tensors.first_blocks, launch.tensors.size, block);
  const auto& tensor = launch.tensors.entries[place];
  auto& o = shared.operand;
  set_numbers<Step>(o, launch);
  o.multiplier = product_of(launch.by);
  o.parameter = static_cast<P*>(tensor.parameter) - tensor.from;
  o.gradient = static_cast<const G*>(tensor.gradient) - tensor.from;
  o.state = tensor.state;
  o.rounding_key = tensor.rounding_key;
  const auto first = (block - launch.tensors.first_blocks[place]) * elements_of_block;
  shared.from = tensor.from + first;
  shared.count = leaves_out(launch.by) ? 0 : elements_from(first, tensor.count);
}

/// Steps each element independently.
template <class Step, class P, class G, bool rounded>
class StepBlock {
 public:
  using Arguments = StepLaunch;
  using Shared = SharedStep;
  static constexpr int rounds = 1, phases = 1, blocks_together = std::is_same_v<Step, AdamStep> ? 0 : 1;

  static void run(const Arguments& launch, void* stream) {
    run_blocks<StepBlock>(launch, launch.tensors.blocks, stream);
  }

  GRADACCUM_ON_DEVICE void begin(const Arguments& launch, std::int64_t block, Shared& shared) {
    begin_step<Step, P, G>(launch, block, shared);
  }
  template <int phase>
  GRADACCUM_ON_DEVICE void run_phase(int /*round*/, Shared& shared) {
    ElementsOf<Step>::template OfTypes<P, G, rounded>::run(shared.operand, shared.from, shared.count);
  }
};

// The 8-bit codes of a DynamicMap, one number at a time in few instructions, since on a device they take longer than a
// step's memory accesses. Codes and numbers are bitwise equal to DynamicCodes' if all numbers of a block are finite.

GRADACCUM_ON_DEVICE inline std::uint32_t bits_of(float number) { return std::bit_cast<std::uint32_t>(number); }
GRADACCUM_ON_DEVICE inline float number_of(std::uint32_t bits) { return std::bit_cast<float>(bits); }

/// The magnitude of a float as an integer of the same order: infinity is above all numbers, NaN above infinity.
GRADACCUM_ON_DEVICE inline std::uint32_t magnitude_bits(float number) { return bits_of(number) & 0x7FFFFFFF; }
/// Returns the largest magnitude as Largest does: NaN if one of the numbers is not finite.
GRADACCUM_ON_DEVICE inline float finite_or_nan(std::uint32_t bits) {
  return number_of(bits < 0x7F800000 ? bits : 0x7FC00000);
}
/// The largest of the numbers that the threads of this warp have stored in `numbers`, each at its own place.
GRADACCUM_ON_DEVICE inline std::uint32_t largest_of_warp(const std::uint32_t* numbers) {
#if !defined(__CUDA_ARCH__)
  const auto* const first = numbers + this_thread() / 32 * 32;
  return *std::max_element(first, first + 32);
#elif __CUDA_ARCH__ >= 800
  return __reduce_max_sync(0xFFFFFFFF, numbers[this_thread()]);
#else
  auto most = numbers[this_thread()];
  for (int distance = 16; distance > 0; distance /= 2) {
    const auto other = __shfl_xor_sync(0xFFFFFFFF, most, distance);
    most = most < other ? other : most;
  }
  return most;
#endif
}

/// The bits of sqrt() and `/`, for ordinary numbers: without branches for extreme ones, which would keep a thread from
/// computing several at a time. The steps are the same as in the compiler's code between its branches. x: 0, or at
/// least 2^-101 and finite.
GRADACCUM_ON_DEVICE inline float root_of_ordinary(float x) {
#ifdef __CUDA_ARCH__
  float inverse;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(x));
  inverse = std::fmin(inverse, 0x1p64f);  // of 0
  const float root = x * inverse;
  return std::fma(std::fma(-root, root, x), 0.5f * inverse, root);
#else
  return std::sqrt(x);
#endif
}
/// a: 0, or of 2^-94 to 2^60; b: of 2^-60 to 2^31. Not even a residual is then below the smallest normal number, and
/// the sign of a 0 remains.
GRADACCUM_ON_DEVICE inline float quotient_of_ordinary(float a, float b) {
#ifdef __CUDA_ARCH__
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(b));
  inverse = std::fma(inverse, std::fma(-b, inverse, 1.0f), inverse);
  const float quotient = a * inverse;
  return std::fma(-inverse, std::fma(b, quotient, -a), quotient);
#else
  return a / b;
#endif
}

/// A map's tables in the shared memory of a thread block; the unsigned map must be that of second moments.
///
/// The numbers from 2^-22 to 1 are divided into cells, each with the same upper bits, so narrow that a cell has at most
/// one boundary between two codes. A cell's upper bits are the lower ones of its boundary, and its lowest 8 bits the
/// code of numbers that are not above the boundary; for numbers above, the code is one more.
template <bool is_signed>
struct SharedCodes {
  static constexpr int binades = 22, log_cells_of_binade = is_signed ? 6 : 7,
                       bits_of_boundary = 23 - log_cells_of_binade;
  static constexpr int first_cell = (127 - binades) << log_cells_of_binade;
  static constexpr int number_of_cells = (binades << log_cells_of_binade) + 1;  // the last begins at 1
  static constexpr int last_code = is_signed ? 128 : 255;                       // that of 1; signed codes begin at 0

  float numbers[256];
  std::uint32_t cells[number_of_cells];
  float lowest;  ///< below it there are no codes: -1 has none

  /// Called by all threads of a block, which synchronize before they use the tables. Small codes have the most cells:
  /// `first` says which thread has the first code.
  GRADACCUM_ON_DEVICE void fill(const DynamicTables& map, int first) {
    static_assert(threads_of_block == 256);
    const int i = (this_thread() + threads_of_block - first) % threads_of_block;
    const auto code = static_cast<std::uint8_t>(i);
    DynamicCodes<is_signed>(map).decode(&code).store(numbers + i);
    if (i == 0) lowest = -map.edge[DynamicMap::decades];
    if (i > last_code) return;
    const auto coded = static_cast<std::uint32_t>(is_signed ? i + zero_code : i);
    const auto boundary = bits_of(boundary_above(map, i));
    const int end = i == last_code ? number_of_cells : cell_of(boundary);
    GRADACCUM_UNROLL
    for (int cell = i == 0 ? 0 : cell_of(bits_of(boundary_above(map, i - 1))) + 1; cell < end; ++cell)
      cells[cell] = ~0u << (32 - bits_of_boundary) | coded;
    if (0 <= end && end < number_of_cells) cells[end] = boundary << (32 - bits_of_boundary) | coded;
  }

  /// Returns the code of a number in [-1, 1] or [0, 1].
  GRADACCUM_ON_DEVICE std::uint8_t encode(float number) const {
    if constexpr (is_signed) number = std::fmax(number, lowest);
    const auto bits = bits_of(std::fmax(std::abs(number), number_of(first_cell << bits_of_boundary)));
    const auto cell = cells[(bits >> bits_of_boundary) - first_cell];
    auto code = cell + (bits << (32 - bits_of_boundary) > cell);
    if constexpr (is_signed) {
      const auto sign = bits_of(number) >> 31;
      return static_cast<std::uint8_t>((code + sign) ^ (0 - sign));  // 254 - code
    }
    return static_cast<std::uint8_t>(number > 0 ? code : 0);
  }

 private:
  /// The largest number that has this code, counted from that of 0.
  GRADACCUM_ON_DEVICE static float boundary_above(const DynamicTables& map, int code) {
    const auto k = static_cast<float>(is_signed ? code : code + 1);
    const auto decade = code == 0 ? 0 : static_cast<std::size_t>((bits_of(k) >> 23) - 127 + (is_signed ? 1 : 0));
    const auto number = static_cast<float>(code);
    if (number == map.last[decade]) return map.edge[decade];
    return std::fma(map.spread[decade], number, map.middle[decade]);
  }
  /// The cell of a number, -1 if it is before the first.
  GRADACCUM_ON_DEVICE static int cell_of(std::uint32_t bits) {
    const int cell = static_cast<int>(bits >> bits_of_boundary) - first_cell;
    return cell < 0 ? -1 : cell;
  }
};

/// Steps 8-bit moments: each warp handles one block of codes per round, like BlockStep on processors, and does not wait
/// for the other warps.
template <class P, class G, bool rounded>
class Adam8bitBlock {
 public:
  using Arguments = StepLaunch;
  static constexpr int threads_of_codes = 32, codes_of_thread = eight_bit_block / threads_of_codes;
  static constexpr int rounds = elements_of_block / (threads_of_block * codes_of_thread), phases = 2;
  static constexpr bool warps_are_independent = true;
  static constexpr int blocks_together = 3;

  static void run(const Arguments& launch, void* stream) {
    run_blocks<Adam8bitBlock>(launch, launch.tensors.blocks, stream);
  }

  struct Shared : SharedStep {
    SharedCodes<true> m_codes;
    SharedCodes<false> v_codes;
    Arithmetic<AdamStep, Floats> adam;
    Floats multiplier;
    std::uint32_t largest_m[threads_of_block], largest_v[threads_of_block];  ///< of each thread: magnitudes as bits
    std::uint32_t least_m, most_m, end_v;  ///< bits of the ordinary moments, apart from 0
    bool aligned;
  };

  GRADACCUM_ON_DEVICE void begin(const Arguments& launch, std::int64_t block, Shared& shared) {
    begin_step<Adam8bitStep, P, G>(launch, block, shared);
    if (this_thread() == 0) {
      shared.aligned = is_aligned(shared.operand, shared.from);
      const auto& by = shared.operand.numbers.template as<AdamNumbers>();
      shared.adam = Arithmetic<AdamStep, Floats>(by);
      shared.multiplier = Floats::all(shared.operand.multiplier);
      find_ordinary_moments(by, shared);
    }
    shared.m_codes.fill(launch.maps[0], threads_of_block / 2);
    shared.v_codes.fill(launch.maps[1], threads_of_block / 4 * 3);
  }

  template <int phase>
  GRADACCUM_ON_DEVICE void run_phase(int round, Shared& shared) {
    // The block of codes begins at element `first_` of the tensor.
    first_ = shared.from + (round * threads_of_block + this_thread()) / threads_of_codes * eight_bit_block;
    count_ = shared.from + shared.count - first_;
    if (count_ <= 0) return;
    const bool whole = shared.aligned && count_ >= eight_bit_block;
    if constexpr (phase == 0) whole ? step<true>(shared) : step<false>(shared);
    if constexpr (phase == 1) whole ? encode<true>(shared) : encode<false>(shared);
  }

 private:
  static constexpr int packs = codes_of_thread / pack_size;
  static constexpr std::uint32_t least_v = (127 - 101) << 23;  ///< 2^-101, for root_of_ordinary()

  GRADACCUM_ON_DEVICE static bool is_aligned(const Operand& o, std::int64_t from) {
    return is_one_pack(static_cast<const P*>(o.parameter) + from, pack_size) &&
           is_one_pack(static_cast<const G*>(o.gradient) + from, pack_size) &&
           is_one_pack(codes(o, 0) + from, pack_size) && is_one_pack(codes(o, 1) + from, pack_size);
  }

  GRADACCUM_ON_DEVICE static std::uint8_t* codes(const Operand& o, int moment) {
    return static_cast<std::uint8_t*>(o.state[static_cast<std::size_t>(moment)]);
  }
  GRADACCUM_ON_DEVICE static float* scales(const Operand& o, int moment) {
    return static_cast<float*>(o.state[static_cast<std::size_t>(2 + moment)]);
  }

  /// Finds the moments whose steps need no more than root_of_ordinary() and quotient_of_ordinary().
  GRADACCUM_ON_DEVICE static void find_ordinary_moments(const AdamNumbers& by, Shared& shared) {
    const double size = std::abs(by.step_size);
    shared.least_m = bits_of(static_cast<float>(0x1p-94 / size));
    shared.most_m = bits_of(static_cast<float>(0x1p60 / size));
    const bool ordinary =
        size <= 0x1p60 && by.eps >= 0x1p-60 && by.eps <= 0x1p20 && by.correction >= 0 && by.correction <= 0x1p10;
    shared.end_v = ordinary ? bits_of(0x1p40f) : 0;
  }

  /// The offset of one of the thread's packs in the block of codes.
  GRADACCUM_ON_DEVICE static std::int64_t place_of(int pack) {
    return (pack * threads_of_codes + this_thread() % threads_of_codes) * pack_size;
  }

  /// Treats elements beyond the end of the tensor as zeros, which they remain.
  template <bool whole>
  GRADACCUM_ON_DEVICE void step(Shared& shared) {
    static_assert(packs == 2);
    const auto& o = shared.operand;
    const auto& adam = shared.adam;
    constexpr int next = threads_of_codes * pack_size;
    const auto from0 = first_ + place_of(0), from1 = from0 + next, rest0 = count_ - place_of(0), rest1 = rest0 - next;
    const auto arrays = parameters_of<P, rounded>(o);
    const auto* const gradient = static_cast<const G*>(o.gradient);
    ParameterPack<P, rounded, whole> parameters[packs] = {{arrays, from0, rest0}, {arrays, from1, rest1}};
    Pack<const G*, whole> gradients[packs] = {{gradient, from0, rest0}, {gradient, from1, rest1}};
    const AlignedPack<std::uint8_t> m_codes[packs] = {load_pack<whole>(codes(o, 0), from0, rest0, zero_code),
                                                      load_pack<whole>(codes(o, 0), from1, rest1, zero_code)},
                                    v_codes[packs] = {load_pack<whole>(codes(o, 1), from0, rest0),
                                                      load_pack<whole>(codes(o, 1), from1, rest1)};
    const auto m_scale = Floats::all(scales(o, 0)[first_ / eight_bit_block]);
    const auto v_scale = Floats::all(scales(o, 1)[first_ / eight_bit_block]);
    std::uint32_t most_m = 0, most_v = 0, least_m = ~0u, least_v_bits = ~0u;  // least: the bits - 1, which leaves out 0
    GRADACCUM_UNROLL
    for (int i = 0; i < packs; ++i) {
      GRADACCUM_UNROLL
      for (int k = 0; k < pack_size; ++k) {
        auto &m = m_[i][k], &v = v_[i][k];
        m = Floats::load(shared.m_codes.numbers + m_codes[i].numbers[k]) * m_scale;
        v = Floats::load(shared.v_codes.numbers + v_codes[i].numbers[k]) * v_scale;
        const auto p = Floats::load(parameters[i].element(k));
        adam.advance(m, v, adam.decayed(p, Floats::load(gradients[i].element(k)) * shared.multiplier));
        const auto m_bits = magnitude_bits(m.parts[0]), v_bits = bits_of(v.parts[0]);
        most_m = std::max(most_m, m_bits);
        most_v = std::max(most_v, v_bits);
        least_m = std::min(least_m, m_bits - 1);
        least_v_bits = std::min(least_v_bits, v_bits - 1);
      }
    }
    const bool ordinary =
        least_m >= shared.least_m && most_m <= shared.most_m && least_v_bits >= least_v && most_v < shared.end_v;
    if (ordinary)
      move(parameters, [&](float p, int i, int k) {
        const float root = root_of_ordinary(v_[i][k].parts[0]);
        const auto bound = multiply_add(Floats::all(root), adam.correction, adam.eps);
        const auto numerator = adam.minus_step_size * m_[i][k];
        const float quotient = quotient_of_ordinary(numerator.parts[0], bound.parts[0]);
        return multiply_add(Floats::all(p), adam.kept, Floats::all(quotient));
      });
    else
      move(parameters, [&](float p, int i, int k) {
        most_v = std::max(most_v & 0x7FFFFFFF, magnitude_bits(v_[i][k].parts[0]));
        return adam.stepped(Floats::all(p), m_[i][k], v_[i][k]);
      });
    shared.largest_m[this_thread()] = most_m;
    shared.largest_v[this_thread()] = most_v;
  }

  template <class Packs, class Step>
  GRADACCUM_ON_DEVICE static void move(Packs (&parameters)[packs], const Step& step) {
    GRADACCUM_UNROLL
    for (int i = 0; i < packs; ++i) {
      GRADACCUM_UNROLL
      for (int k = 0; k < pack_size; ++k)
        step(static_cast<float>(*parameters[i].element(k)), i, k).store(parameters[i].element(k));
    }
  }

  template <bool whole>
  GRADACCUM_ON_DEVICE void encode(const Shared& shared) const {
    const auto& o = shared.operand;
    encode<whole>(shared.m_codes, shared.largest_m, m_, codes(o, 0), scales(o, 0), zero_code);
    encode<whole>(shared.v_codes, shared.largest_v, v_, codes(o, 1), scales(o, 1), 0);
  }
  /// All codes are `zero` if a number of the block is not finite.
  template <bool whole, class Codes>
  GRADACCUM_ON_DEVICE void encode(const Codes& map, const std::uint32_t* largest_of_threads,
                                  const Floats (&numbers)[packs][pack_size], std::uint8_t* of_block,
                                  float* scales_of_blocks, std::uint8_t zero) const {
    const float largest = finite_or_nan(largest_of_warp(largest_of_threads));
    const auto by = scale_to_codes(largest);
    const bool finite = largest == largest;
    GRADACCUM_UNROLL
    for (int i = 0; i < packs; ++i) {
      AlignedPack<std::uint8_t> pack{zero, zero, zero, zero};
      if (finite) {
        GRADACCUM_UNROLL
        for (int k = 0; k < pack_size; ++k) pack.numbers[k] = map.encode((numbers[i][k] * by).parts[0]);
      }
      store_pack<whole>(of_block, first_ + place_of(i), count_ - place_of(i), pack);
    }
    if (this_thread() % threads_of_codes == 0) scales_of_blocks[first_ / eight_bit_block] = largest;
  }

  std::int64_t first_, count_;
  Floats m_[packs][pack_size], v_[packs][pack_size];
};

template <class Step>
struct StepBlocks {
  template <class P, class G, bool rounded>
  using OfTypes = StepBlock<Step, P, G, rounded>;
};

template <class Step>
void run_step(const StepLaunch& launch, const OperandTypes& types, void* stream) {
  using Function = void(const StepLaunch&, void*);
  if constexpr (std::is_same_v<Step, Adam8bitStep>)
    of_narrow_types<Function, Adam8bitBlock>(types)(launch, stream);
  else
    of_types<Function, StepBlocks<Step>::template OfTypes>(types)(launch, stream);
}
template <class... Step>
constexpr std::array<DeviceKernels::Step*, sizeof...(Step)> run_steps(std::type_identity<std::tuple<Step...>>) {
  return {run_step<Step>...};
}
