// SPDX-License-Identifier: Apache-2.0
//
// The 8-bit codes of a DynamicMap. Included by kernels.inl.

/// Decodes and encodes one vector at a time. Numbers are in [-1, 1] or [0, 1].
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
    const auto k = Ints::load(codes) + Ints::all(is_signed ? -127 : 1);
    const auto number = to_floats(k);  // carries the sign of the result
    const auto entry = exponent_of(number);
    if constexpr (!is_signed) return multiply_add(slope_[entry], number, base_[entry]);
    return only_where(k, multiply_add(slope_[entry], number, times_sign_of(base_[entry], number)));
  }

  /// Finds the code of the nearest number in the map, or of the smaller one in a tie.
  GRADACCUM_ON_DEVICE void encode(Floats numbers, std::uint8_t* codes) const {
    const auto x = is_signed ? magnitude(numbers) : numbers;
    const auto decade = decade_of(x);
    auto code = rounded_down(multiply_add(x, scale_[decade], offset_[decade]));  // the code or the one below
    code = plus_one_where_less(code, multiply_add(spread_[decade], code, middle_[decade]), x);
    code = larger(smaller(code, last_[decade]), first_[decade]);
    if constexpr (is_signed) code = larger(times_sign_of(code, numbers) + Floats::all(127), Floats::all(0));
    truncated(code).store(codes);
  }

 private:
  /// Counts the edges below `x`, of 8. A float's bits approximate its logarithm, which gives the count or one less.
  GRADACCUM_ON_DEVICE Ints decade_of(Floats x) const {
    const auto log_2 = Floats::all(0.30103 / (1 << 23)), ones = Floats::all(7.1 - 127 * 0.30103);
    const auto guess = larger(truncated(multiply_add(to_floats(bits_of(x)), log_2, ones)), Ints::all(0));
    return plus_one_where_less(guess, edge_[guess], x);
  }

  Table base_, slope_, edge_, first_, last_, scale_, offset_, middle_, spread_;
};

/// Finds the largest magnitude in a block; NaN if one of its numbers is not finite. Compares bits, which have the same
/// order as magnitudes: a comparison of floats may miss NaN.
class Largest {
 public:
  GRADACCUM_ON_DEVICE Largest() : most_(Ints::all(0)) {}  // g++ compiles an implicit one for the program's target
  GRADACCUM_ON_DEVICE void see(Floats number) { most_ = larger(bits_of(magnitude(number)), most_); }
  GRADACCUM_ON_DEVICE float number() const {
    std::int32_t bits[Floats::width];
    std::memcpy(bits, &most_, sizeof(bits));
    for (int i = 1; i < Floats::width; ++i) bits[0] = bits[0] < bits[i] ? bits[i] : bits[0];
    if (bits[0] >= 0x7f800000) bits[0] = 0x7fc00000;
    float number;
    std::memcpy(&number, bits, sizeof(number));
    return number;
  }

 private:
  Ints most_;
};

/// Returns the factor for numbers before encoding, given the largest of them.
GRADACCUM_ON_DEVICE inline Floats scale_to_codes(float largest) {
  return Floats::all(largest < std::numeric_limits<float>::min() ? 0 : 1 / largest);
}
