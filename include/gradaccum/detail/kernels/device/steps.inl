// SPDX-License-Identifier: Apache-2.0
//
// The blocks of threads that step tensors. A block begins, and then has some rounds of some phases, between all of
// which its threads wait for one another; each has an object of the class, which keeps what is the thread's own. Who
// includes it has `run_blocks<Block>(arguments, blocks, stream)`.

/// In the order of `Multiplier::on`.
GRADACCUM_ON_DEVICE inline double product_of(const DeviceMultiplier& by) {
  double product = by.device_denominator ? by.numerator : by.numerator / by.denominator;
  if (by.device_numerator) product *= *by.device_numerator;
  if (by.device_denominator) product /= by.denominator * *by.device_denominator;
  return product;
}

GRADACCUM_ON_DEVICE inline bool leaves_out(const DeviceMultiplier& by) { return by.found_inf && *by.found_inf != 0; }

/// What an optimizer's kernel is given of a table.
struct SgdOfTable {
  using Settings = SgdSettings;
  using Operand = SgdOperand;
  GRADACCUM_ON_DEVICE static SgdNumbers numbers_after(const StepLaunch<SgdSettings>& launch) { return launch.numbers; }
  GRADACCUM_ON_DEVICE static SgdOperand operand(const SgdNumbers& by, const TensorTable::Entry& of) {
    return {by, of.arrays[0], of.arrays[1], of.arrays[2], of.rounding_key};
  }
};

/// At least the first step, also of a state that was replaced since the host last knew.
GRADACCUM_ON_DEVICE inline AdamNumbers adam_numbers_after(AdamSettings settings, float left_out) {
  settings.step -= static_cast<std::int64_t>(left_out);
  if (settings.step < 1) settings.step = 1;
  return numbers_of(settings, 1.0);
}

struct AdamOfTable {
  using Settings = AdamSettings;
  using Operand = AdamOperand;
  GRADACCUM_ON_DEVICE static AdamNumbers numbers_after(const StepLaunch<AdamSettings>& launch) {
    return adam_numbers_after(launch.settings, *launch.by.left_out);
  }
  GRADACCUM_ON_DEVICE static AdamOperand operand(const AdamNumbers& by, const TensorTable::Entry& of) {
    return {by, of.arrays[0], of.arrays[1], of.arrays[2], of.arrays[3], of.arrays[4], of.rounding_key};
  }
};

struct Adam8bitOfTable {
  using Settings = Adam8bitSettings;
  using Operand = Adam8bitOperand;
  GRADACCUM_ON_DEVICE static AdamNumbers numbers_after(const StepLaunch<Adam8bitSettings>& launch) {
    return adam_numbers_after(launch.settings.adam, *launch.by.left_out);
  }
  GRADACCUM_ON_DEVICE static Adam8bitOperand operand(const AdamNumbers& by, const TensorTable::Entry& of) {
    return {by,
            of.arrays[0],
            of.arrays[1],
            static_cast<std::uint8_t*>(of.arrays[2]),
            static_cast<std::uint8_t*>(of.arrays[3]),
            static_cast<float*>(of.arrays[4]),
            static_cast<float*>(of.arrays[5]),
            of.rounding_key};
  }
};

/// What the threads of a block share that steps a part of a tensor.
template <class Operand>
struct SharedStep {
  Operand operand;
  std::int64_t from, count;
};

/// Parameters are of type `P`, gradients of `G`.
template <class P, class G, class Optimizer, class Operand>
GRADACCUM_ON_DEVICE void begin_step(const StepLaunch<typename Optimizer::Settings>& launch, std::int64_t block,
                                    SharedStep<Operand>& shared) {
  if (this_thread() != 0) return;
  const auto& tensor = entry_of(launch.tensors, block);
  auto numbers = launch.by.left_out ? Optimizer::numbers_after(launch) : launch.numbers;
  numbers.multiplier = product_of(launch.by);
  auto& o = shared.operand = Optimizer::operand(numbers, tensor);
  o.parameter = static_cast<P*>(o.parameter) - tensor.from;
  o.gradient = static_cast<const G*>(o.gradient) - tensor.from;
  const auto first = (block - tensor.first_block) * elements_of_block;
  shared.from = tensor.from + first;
  shared.count = leaves_out(launch.by) ? 0 : elements_from(first, tensor.count);
}

/// Each element by itself.
template <class P, class G, class Optimizer, class Step>
class StepBlock {
 public:
  using Arguments = StepLaunch<typename Optimizer::Settings>;
  using Shared = SharedStep<typename Optimizer::Operand>;
  static constexpr int rounds = 1, phases = 1;

  GRADACCUM_ON_DEVICE void begin(const Arguments& launch, std::int64_t block, Shared& shared) {
    begin_step<P, G, Optimizer>(launch, block, shared);
  }
  template <int phase>
  GRADACCUM_ON_DEVICE void run(int /*round*/, Shared& shared) {
    Step::run(shared.operand, shared.from, shared.count);
  }
};

/// Each of its warps a block of moments of 8 bits: see BlockStep, which does it for processors.
template <class P, class G, bool rounded>
class Adam8bitBlock {
 public:
  using Arguments = StepLaunch<Adam8bitSettings>;
  static constexpr int threads_of_codes = 32, codes_of_thread = eight_bit_block / threads_of_codes;
  static constexpr int rounds = elements_of_block / (threads_of_block * codes_of_thread), phases = 2;

  struct Shared : SharedStep<Adam8bitOperand> {
    DynamicTables maps[2];
    float largest_m[threads_of_block], largest_v[threads_of_block];
  };

  GRADACCUM_ON_DEVICE void begin(const Arguments& launch, std::int64_t block, Shared& shared) {
    begin_step<P, G, Adam8bitOfTable>(launch, block, shared);
    const auto* const from = reinterpret_cast<const float*>(launch.settings.maps);
    auto* const to = reinterpret_cast<float*>(shared.maps);
    constexpr int numbers = 2 * sizeof(DynamicTables) / sizeof(float);
    for (int i = this_thread(); i < numbers; i += threads_of_block) to[i] = from[i];
  }

  template <int phase>
  GRADACCUM_ON_DEVICE void run(int round, Shared& shared) {
    // Of the tensor; the block of codes begins at `first_`.
    first_ = shared.from + (round * threads_of_block + this_thread()) / threads_of_codes * eight_bit_block;
    count_ = shared.from + shared.count - first_;
    if (count_ <= 0) return;
    if constexpr (phase == 0)
      step(shared);
    else
      encode(shared);
  }

 private:
  static constexpr int packs = codes_of_thread / pack_size;
  /// Of the thread's pack, in the block of codes.
  GRADACCUM_ON_DEVICE static std::int64_t place_of(int pack) {
    return (pack * threads_of_codes + this_thread() % threads_of_codes) * pack_size;
  }

  GRADACCUM_ON_DEVICE void step(Shared& shared) {
    const auto& o = shared.operand;
    const AdamVectors<Floats> vectors(o.numbers);
    const DynamicCodes<true> signed_codes(shared.maps[0]);
    const DynamicCodes<false> unsigned_codes(shared.maps[1]);
    const auto m_scale = Floats::all(o.exp_avg_scale[first_ / eight_bit_block]);
    const auto v_scale = Floats::all(o.exp_avg_sq_scale[first_ / eight_bit_block]);
    Largest largest_m, largest_v;
    GRADACCUM_UNROLL
    for (int i = 0; i < packs; ++i) {
      const auto place = place_of(i), rest = count_ - place;
      ParameterPack<P, rounded> parameters(parameters_of<P, rounded>(o), first_ + place, rest);
      Pack<const G*> gradients(static_cast<const G*>(o.gradient), first_ + place, rest);
      Pack<const std::uint8_t*> m_codes(o.exp_avg, first_ + place, rest), v_codes(o.exp_avg_sq, first_ + place, rest);
      GRADACCUM_UNROLL
      for (int k = 0; k < pack_size; ++k) {
        auto m = signed_codes.decode(m_codes.element(k)) * m_scale;
        auto v = unsigned_codes.decode(v_codes.element(k)) * v_scale;
        const auto p = Floats::load(parameters.element(k));
        vectors.advance(m, v, vectors.decayed(p, Floats::load(gradients.element(k)) * vectors.multiplier));
        vectors.stepped(p, m, v).store(parameters.element(k));
        m_[i][k] = m;
        v_[i][k] = v;
        if (k >= rest) continue;  // beyond the end of the tensor
        largest_m.see(m);
        largest_v.see(v);
      }
    }
    shared.largest_m[this_thread()] = largest_m.number();
    shared.largest_v[this_thread()] = largest_v.number();
  }

  GRADACCUM_ON_DEVICE void encode(Shared& shared) const {
    const auto& o = shared.operand;
    encode(DynamicCodes<true>(shared.maps[0]), shared.largest_m, m_, o.exp_avg, o.exp_avg_scale);
    encode(DynamicCodes<false>(shared.maps[1]), shared.largest_v, v_, o.exp_avg_sq, o.exp_avg_sq_scale);
  }
  template <class Codes>
  GRADACCUM_ON_DEVICE void encode(const Codes& map, const float* largest_of_threads,
                                  const Floats (&numbers)[packs][pack_size], std::uint8_t* codes, float* scales) const {
    Largest all;
    const auto first_thread = this_thread() - this_thread() % threads_of_codes;
    for (int i = 0; i < threads_of_codes; ++i) all.see(Floats::load(largest_of_threads + first_thread + i));
    const float largest = all.number();
    const auto by = scale_to_codes(largest);
    GRADACCUM_UNROLL
    for (int i = 0; i < packs; ++i) {
      AlignedPack<std::uint8_t> pack;
      GRADACCUM_UNROLL
      for (int k = 0; k < pack_size; ++k) map.encode(numbers[i][k] * by, pack.numbers + k);
      store_pack(codes, first_ + place_of(i), count_ - place_of(i), pack);
    }
    if (this_thread() == first_thread) scales[first_ / eight_bit_block] = largest;
  }

  std::int64_t first_, count_;
  Floats m_[packs][pack_size], v_[packs][pack_size];
};

/// Launches a kernel for the types of its operands.
template <class Launch, template <class P, class G, bool rounded> class Block>
struct LaunchOf {
  using Function = void(const Launch&, void* stream);
  template <class P, class G, bool rounded>
  struct OfTypes {
    static void run(const Launch& launch, void* stream) {
      run_blocks<Block<P, G, rounded>>(launch, launch.tensors.blocks, stream);
    }
  };
};

template <class P, class G, bool rounded>
using SgdBlock = StepBlock<P, G, SgdOfTable, SgdOfTypes<P, G, rounded>>;
template <class P, class G, bool rounded>
using AdamBlock = StepBlock<P, G, AdamOfTable, AdamOfTypes<P, G, rounded>>;

inline void run_sgd(const StepLaunch<SgdSettings>& launch, const OperandTypes& types, void* stream) {
  using Of = LaunchOf<StepLaunch<SgdSettings>, SgdBlock>;
  of_types<Of::Function, Of::OfTypes>(types.parameter, types.gradient, types.rounded)(launch, stream);
}
inline void run_adam(const StepLaunch<AdamSettings>& launch, const OperandTypes& types, void* stream) {
  using Of = LaunchOf<StepLaunch<AdamSettings>, AdamBlock>;
  of_types<Of::Function, Of::OfTypes>(types.parameter, types.gradient, types.rounded)(launch, stream);
}
inline void run_adam8bit(const StepLaunch<Adam8bitSettings>& launch, const OperandTypes& types, void* stream) {
  using Of = LaunchOf<StepLaunch<Adam8bitSettings>, Adam8bitBlock>;
  of_narrow_types<Of::Function, Of::OfTypes>(types.parameter, types.gradient, types.rounded)(launch, stream);
}
