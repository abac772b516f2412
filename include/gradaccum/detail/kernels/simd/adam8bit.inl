// SPDX-License-Identifier: Apache-2.0
//
// One step of Adam or AdamW with 8-bit state. Included by kernels.inl.

/// Encodes a block of numbers. Returns `largest`, which is the block's scale.
template <bool is_signed>
[[gnu::flatten]] float encode_block(const DynamicCodes<is_signed>& map, const float* numbers, float largest,
                                    std::uint8_t* codes) {
  const auto by = scale_to_codes(largest);
  for (int i = 0; i < eight_bit_block; i += Floats::width) map.encode(Floats::load(numbers + i) * by, codes + i);
  return largest;
}

/// The last block of an array, possibly short, in memory of full size; written back on destruction.
template <class T>
using LastBlock = Rest<T, static_cast<int>(eight_bit_block)>;

/// Steps one whole block: `parameter`, `gradient` and codes have `eight_bit_block` elements.
class BlockStep {
 public:
  explicit BlockStep(const Operand& o)
      : adam_(o.numbers.as<AdamNumbers>()),
        multiplier_(Floats::all(o.multiplier)),
        signed_codes_(signed_map()),
        unsigned_codes_(second_moment_map()) {}

  template <class P, class G>
  [[gnu::flatten]] void operator()(P* parameter, const G* gradient, std::uint8_t* exp_avg, std::uint8_t* exp_avg_sq,
                                   float* exp_avg_scale, float* exp_avg_sq_scale) const {
    alignas(64) float ms[eight_bit_block], vs[eight_bit_block];
    Largest largest_m, largest_v;
    const auto m_scale = Floats::all(*exp_avg_scale), v_scale = Floats::all(*exp_avg_sq_scale);
    for (int i = 0; i < eight_bit_block; i += Floats::width) {
      __builtin_prefetch(parameter + i + eight_bit_block, /*for writing=*/1);  // hides the next block's memory latency,
      __builtin_prefetch(gradient + i + eight_bit_block);                      // as coding a block takes long
      const auto p = Floats::load(parameter + i);
      const auto g = adam_.decayed(p, Floats::load(gradient + i) * multiplier_);
      auto m = signed_codes_.decode(exp_avg + i) * m_scale, v = unsigned_codes_.decode(exp_avg_sq + i) * v_scale;
      adam_.advance(m, v, g);
      adam_.stepped(p, m, v).store(parameter + i);
      m.store(ms + i);
      v.store(vs + i);
      largest_m.see(m);
      largest_v.see(v);
    }
    *exp_avg_scale = encode_block(signed_codes_, ms, largest_m.number(), exp_avg);
    *exp_avg_sq_scale = encode_block(unsigned_codes_, vs, largest_v.number(), exp_avg_sq);
  }

 private:
  Arithmetic<AdamStep, Floats> adam_;
  Floats multiplier_;
  DynamicCodes<true> signed_codes_;
  DynamicCodes<false> unsigned_codes_;
};

/// Steps the block that begins at `from`. `parameter` has the memory of a whole block.
template <class G, class P>
void step_block(const BlockStep& step, P* parameter, const Operand& o, std::int64_t from, std::int64_t size) {
  const auto* const gradient = static_cast<const G*>(o.gradient) + from;
  auto *const m = elements<std::uint8_t>(o.state[0], from), *const v = elements<std::uint8_t>(o.state[1], from);
  auto* const m_scale = elements<float>(o.state[2], from / eight_bit_block);
  auto* const v_scale = elements<float>(o.state[3], from / eight_bit_block);
  if (size == eight_bit_block) return step(parameter, gradient, m, v, m_scale, v_scale);
  LastBlock<const G> last_gradient(gradient, size);
  LastBlock<std::uint8_t> last_m(m, size), last_v(v, size);
  std::fill(last_m.vector() + size, last_m.vector() + eight_bit_block, zero_code);
  step(parameter, last_gradient.vector(), last_m.vector(), last_v.vector(), m_scale, v_scale);
}

template <class P, class G, bool rounded>
struct Adam8bitOfTypes {
  static void run(const Operand& o, std::int64_t from, std::int64_t count) {
    static_assert(RoundedChunk::size == eight_bit_block);
    const BlockStep step(o);
    auto* const parameters = static_cast<P*>(o.parameter);
    for (const auto end = from + count; from < end; from += eight_bit_block) {
      const auto size = std::min(eight_bit_block, end - from);
      if constexpr (rounded)
        step_block<G>(step, RoundedChunk(parameters, from, size, o.rounding_key).floats(), o, from, size);
      else if (size == eight_bit_block)
        step_block<G>(step, parameters + from, o, from, size);
      else
        step_block<G>(step, LastBlock<P>(parameters + from, size).vector(), o, from, size);
    }
  }
};
