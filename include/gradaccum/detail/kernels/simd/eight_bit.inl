// SPDX-License-Identifier: Apache-2.0
//
// Codes of 8 bits for numbers of a DynamicMap. Included by kernels.ipp for each instruction set.

/// Decodes and encodes a vector at a time. The numbers are in [-1, 1] or [0, 1].
template <bool is_signed>
class DynamicCodes {
 public:
  GRADACCUM_ON_DEVICE explicit DynamicCodes(const DynamicTables& map)
      : base_(map.base.data()),
        slope_(map.slope.data()),
        edge_(map.edge.data()),
        first_(map.first.data()),
        last_(map.last.data()),
        scale_(map.scale.data()),
        offset_(map.offset.data()),
        middle_(map.middle.data()),
        spread_(map.spread.data()) {}

  GRADACCUM_ON_DEVICE Floats decode(const std::uint8_t* codes) const {
    if constexpr (is_signed) {
      const auto k = Ints::load(codes) + Ints::all(-127);
      const auto number = to_floats(k);  // whose sign is that of all
      const auto entry = exponent_of(number);
      return only_where(k, multiply_add(slope_[entry], number, times_sign_of(base_[entry], number)));
    } else {
      const auto number = to_floats(Ints::load(codes) + Ints::all(1));
      const auto entry = exponent_of(number);
      return multiply_add(slope_[entry], number, base_[entry]);
    }
  }

  /// The code of the nearest number of the map; of the smaller one where both are as near.
  GRADACCUM_ON_DEVICE void encode(Floats numbers, std::uint8_t* codes) const {
    const auto x = is_signed ? magnitude(numbers) : numbers;
    const auto decade = decade_of(x);
    auto code = rounded_down(multiply_add(x, scale_[decade], offset_[decade]));  // it, or the one below
    code = plus_one_where_less(code, multiply_add(spread_[decade], code, middle_[decade]), x);
    code = larger(smaller(code, last_[decade]), first_[decade]);
    if constexpr (is_signed) code = larger(times_sign_of(code, numbers) + Floats::all(127), Floats::all(0));
    truncated(code).store(codes);
  }

 private:
  /// How many edges are below `x`, of 8. A float's bits are its logarithm, nearly: they give that number or one less.
  GRADACCUM_ON_DEVICE Ints decade_of(Floats x) const {
    const auto log_2 = Floats::all(0.30103 / (1 << 23)), ones = Floats::all(7.1 - 127 * 0.30103);
    const auto guess = larger(truncated(multiply_add(to_floats(bits_of(x)), log_2, ones)), Ints::all(0));
    return plus_one_where_less(guess, edge_[guess], x);
  }

  Table base_, slope_, edge_, first_, last_, scale_, offset_, middle_, spread_;
};
