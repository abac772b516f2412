// SPDX-License-Identifier: Apache-2.0
//
// Stochastic rounding. Included by kernels.ipp for each instruction set.

/// A few numbers of a bfloat16 array, as float32 to compute with; when it ends, written back rounded up or down at
/// random, each way as often as it is near. The random bits are a hash of `key` and of each number's place.
class RoundedChunk {
 public:
  static constexpr std::int64_t size = 256;

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
    Bits bits, random;
    for (int i = 0; i < lanes; ++i) random[i] = static_cast<std::uint32_t>(i);
    random += static_cast<std::uint32_t>(place) + static_cast<std::uint32_t>(key_);
    // A bijection in which each bit depends on all: so each of the 2^16 fractions comes equally often.
    random = (random ^ (random >> 16)) * 0x7feb352du;
    random += static_cast<std::uint32_t>((key_ >> 32) + static_cast<std::uint64_t>(place >> 32));
    random = (random ^ (random >> 15)) * 0x846ca68bu;
    random ^= random >> 16;
    std::memcpy(&bits, from, sizeof(bits));
    const Bits is_nan = (Bits)((bits & 0x7fffffffu) > 0x7f800000u);
    const Bits carried = bits + (random & 0xffffu);  // carries into the upper half as often as the lower half is large
    const Bits upper = ((carried & ~is_nan) | (0x7fc00000u & is_nan)) >> 16;
    const Halves halves = __builtin_convertvector(upper, Halves);
    std::memcpy(static_cast<void*>(to), &halves, sizeof(halves));
  }

  at::BFloat16* array_;
  std::int64_t place_, count_;
  std::uint64_t key_;
  alignas(64) float floats_[size] = {};
};
