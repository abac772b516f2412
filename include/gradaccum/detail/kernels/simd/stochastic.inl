// SPDX-License-Identifier: Apache-2.0
//
// Stochastic rounding. Included by kernels.ipp for each instruction set.

/// A few numbers of a bfloat16 array, as float32 to compute with; when it ends, written back rounded up or down at
/// random, each way as often as it is near. The random bits are a hash of `key` and of each number's place.
class RoundedChunk {
 public:
  static constexpr std::int64_t size = 256;
  /// How many of so many it takes.
  static std::int64_t part_of(std::int64_t count) { return std::min(size, count); }

  /// `count` numbers, at most `size`, from `array[place]` on.
  RoundedChunk(at::BFloat16* array, std::int64_t place, std::int64_t count, std::uint64_t key)
      : array_(array + place), place_(place), count_(count), key_(key) {
    std::int64_t i = 0;
    for (; i + Floats::width <= count; i += Floats::width) Floats::load(array_ + i).store(floats_ + i);
    for (; i < count; ++i) floats_[i] = static_cast<float>(array_[i]);
  }
  RoundedChunk(const RoundedChunk&) = delete;
  ~RoundedChunk() {
    at::BFloat16 rounded[size];
    for (std::int64_t i = 0; i < count_; i += lanes) round(floats_ + i, place_ + i, rounded + i);
    std::memcpy(static_cast<void*>(array_), rounded, static_cast<std::size_t>(count_) * sizeof(at::BFloat16));
  }

  float* floats() { return floats_; }

 private:
  // Vectors of the compiler's own: one of theirs or several of the processor's.
  static constexpr int lanes = 16;
  typedef std::uint32_t Bits __attribute__((vector_size(4 * lanes)));
  typedef std::uint16_t Halves __attribute__((vector_size(2 * lanes)));

  void round(const float* from, std::int64_t place, at::BFloat16* to) const {
    Bits bits, places;
    for (int i = 0; i < lanes; ++i) places[i] = static_cast<std::uint32_t>(i);
    places += static_cast<std::uint32_t>(place);
    std::memcpy(&bits, from, sizeof(bits));
    round_stochastically(bits, places, static_cast<std::uint32_t>(place >> 32), key_);
    const Halves halves = __builtin_convertvector(bits, Halves);
    std::memcpy(static_cast<void*>(to), &halves, sizeof(halves));
  }

  at::BFloat16* array_;
  std::int64_t place_, count_;
  std::uint64_t key_;
  alignas(64) float floats_[size] = {};
};
