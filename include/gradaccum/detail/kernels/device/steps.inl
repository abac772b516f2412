// SPDX-License-Identifier: Apache-2.0
//
// The blocks of threads that step tensors. A block runs in phases: all its threads wait for one another between two of
// them. Who includes it has `run_blocks<Block>(arguments, blocks, stream)`.

/// What an optimizer's kernel is given of a table.
struct SgdOfTable {
  using Settings = SgdSettings;
  GRADACCUM_ON_DEVICE static SgdOperand operand(const SgdNumbers& by, const TensorTable::Entry& of) {
    return {by, of.arrays[0], of.arrays[1], of.arrays[2], of.rounding_key};
  }
};
struct AdamOfTable {
  using Settings = AdamSettings;
  GRADACCUM_ON_DEVICE static AdamOperand operand(const AdamNumbers& by, const TensorTable::Entry& of) {
    return {by, of.arrays[0], of.arrays[1], of.arrays[2], of.arrays[3], of.arrays[4], of.rounding_key};
  }
};

GRADACCUM_ON_DEVICE inline SgdSettings settings_after(const SgdSettings& by, const float* /*left_out*/) { return by; }
/// At least the first step, also of a state that was replaced since the host last knew.
GRADACCUM_ON_DEVICE inline AdamSettings settings_after(AdamSettings by, const float* left_out) {
  if (left_out) by.step = by.step - static_cast<std::int64_t>(*left_out);
  if (by.step < 1) by.step = 1;
  return by;
}

/// In the order of `Multiplier::on`.
GRADACCUM_ON_DEVICE inline double product_of(const DeviceMultiplier& by) {
  double product = by.device_denominator ? by.numerator : by.numerator / by.denominator;
  if (by.device_numerator) product *= *by.device_numerator;
  if (by.device_denominator) product /= by.denominator * *by.device_denominator;
  return product;
}

/// The tensor to which a block belongs.
GRADACCUM_ON_DEVICE inline const TensorTable::Entry& entry_of(const TensorTable& tensors, std::int64_t block) {
  std::int64_t first = 0, end = tensors.size;
  while (end - first > 1) {
    const auto middle = (first + end) / 2;
    (tensors.entries[static_cast<std::size_t>(middle)].first_block <= block ? first : end) = middle;
  }
  return tensors.entries[static_cast<std::size_t>(first)];
}

/// Steps a part of a tensor, each element by itself.
template <class Optimizer, class Step>
class StepBlock {
 public:
  using Arguments = StepLaunch<typename Optimizer::Settings>;
  static constexpr int phases = 2;

  /// What the threads of a block share.
  struct Shared {
    decltype(Optimizer::operand(numbers_of(typename Optimizer::Settings(), 1.0), TensorTable::Entry())) operand;
    std::int64_t from, count;
  };

  template <int phase>
  GRADACCUM_ON_DEVICE void run(const Arguments& launch, std::int64_t block, Shared& shared) const {
    if constexpr (phase == 0) {
      if (this_thread() == 0) begin(launch, block, shared);
    } else if (shared.count > 0) {
      Step::run(shared.operand, shared.from, shared.count);
    }
  }

 private:
  GRADACCUM_ON_DEVICE static void begin(const Arguments& launch, std::int64_t block, Shared& shared) {
    const auto& tensor = entry_of(launch.tensors, block);
    const auto settings = settings_after(launch.settings, launch.by.left_out);
    shared.operand = Optimizer::operand(numbers_of(settings, product_of(launch.by)), tensor);
    shared.from = (block - tensor.first_block) * TensorTable::elements_of_block;
    const bool leaves_out = launch.by.found_inf && *launch.by.found_inf != 0;
    const auto rest = tensor.numel - shared.from;
    shared.count = leaves_out ? 0 : rest < TensorTable::elements_of_block ? rest : TensorTable::elements_of_block;
  }
};

/// Launches the kernel of an optimizer.
template <class Optimizer, template <class P, class G, bool rounded> class Step>
struct Launch {
  using Function = void(const StepLaunch<typename Optimizer::Settings>&, void* stream);
  template <class P, class G, bool rounded>
  struct OfTypes {
    static void run(const StepLaunch<typename Optimizer::Settings>& launch, void* stream) {
      run_blocks<StepBlock<Optimizer, Step<P, G, rounded>>>(launch, launch.tensors.blocks, stream);
    }
  };
};

template <class Optimizer, template <class P, class G, bool rounded> class Step>
void run_step(const StepLaunch<typename Optimizer::Settings>& launch, const OperandTypes& types, void* stream) {
  using Of = Launch<Optimizer, Step>;
  of_types<typename Of::Function, Of::template OfTypes>(types.parameter, types.gradient, types.rounded)(launch, stream);
}

inline void run_sgd(const StepLaunch<SgdSettings>& launch, const OperandTypes& types, void* stream) {
  run_step<SgdOfTable, SgdOfTypes>(launch, types, stream);
}
inline void run_adam(const StepLaunch<AdamSettings>& launch, const OperandTypes& types, void* stream) {
  run_step<AdamOfTable, AdamOfTypes>(launch, types, stream);
}
