// SPDX-License-Identifier: Apache-2.0
//
// The 8-bit codes of a DynamicMap, one number at a time in few instructions, since on a device they take longer than a
// step's memory accesses. Codes and numbers equal those of DynamicCodes to the bit.

GRADACCUM_ON_DEVICE inline std::uint32_t bits_of(float number) {
  std::uint32_t bits;
  std::memcpy(&bits, &number, sizeof(bits));
  return bits;
}
GRADACCUM_ON_DEVICE inline float number_of(std::uint32_t bits) {
  float number;
  std::memcpy(&number, &bits, sizeof(number));
  return number;
}

/// The magnitude of a float as an integer of the same order: infinity is above all numbers, NaN above infinity.
GRADACCUM_ON_DEVICE inline std::uint32_t magnitude_bits(float number) { return bits_of(number) & 0x7FFFFFFF; }
template <int count>
GRADACCUM_ON_DEVICE std::uint32_t largest_of(const std::uint32_t* numbers) {
  std::uint32_t most = 0;
  GRADACCUM_UNROLL
  for (int i = 0; i < count; ++i) most = most < numbers[i] ? numbers[i] : most;
  return most;
}
/// Returns the largest magnitude as Largest does: NaN if one of the numbers is not finite.
GRADACCUM_ON_DEVICE inline float finite_or_nan(std::uint32_t bits) {
  return number_of(bits < 0x7F800000 ? bits : 0x7FC00000);
}

/// A map's tables in the shared memory of a thread block.
template <bool is_signed>
struct SharedCodes {
  /// Numbers with one exponent: they belong to `decade`, or to the next one if above `edge`.
  struct alignas(8) Binade {
    float edge;
    std::int32_t decade;
  };
  /// A decade of DynamicTables, but with `offset` reduced by 1/2, and `first` and `last` increased by `shift`.
  struct alignas(16) Decade {
    float scale, offset, spread, middle, first, last;
  };
  static constexpr int binades_of_map = 32, decades_of_map = 9;  // the last binade begins at 1, the first at 0

  float numbers[256];
  Binade binades[binades_of_map];
  Decade decades[decades_of_map];

  /// Called by all threads of a block, which synchronise before they use the tables.
  GRADACCUM_ON_DEVICE void fill(const DynamicTables& map) {
    static_assert(threads_of_block == 256 && binades_of_map + decades_of_map <= threads_of_block);
    const int i = this_thread();
    const auto code = static_cast<std::uint8_t>(i);
    DynamicCodes<is_signed>(map).decode(&code).store(numbers + i);
    if (i < binades_of_map) binades[i] = binade(map, i);
    if (i >= binades_of_map && i < binades_of_map + decades_of_map) fill_decade(map, i - binades_of_map);
  }

  /// Returns the code of a number in [-1, 1] or [0, 1]; for NaN the code of 0.
  GRADACCUM_ON_DEVICE std::uint8_t encode(float number) const {
    const float x = std::abs(number);
    const auto& binade = binades[(bits_of(std::fmax(x, least_of_binades)) >> 23) - least_exponent];
    const auto decade = binade.decade + (binade.edge < x);
    const auto& in = decades[decade];
    float code = std::fma(x, in.scale, in.offset) + shift;  // the code or the one below
    if (std::fma(in.spread, code - shift, in.middle) < x) code += 1;
    code = std::fmin(code, in.last);
    if constexpr (is_signed)
      code = std::fmax(std::copysign(code - shift, number) + (shift + zero_code), shift);
    else
      code = std::fmax(code, in.first);  // for the smallest second moments
    return static_cast<std::uint8_t>(bits_of(code));
  }

 private:
  static constexpr std::uint32_t least_exponent = 127 - (binades_of_map - 1);
  static constexpr float least_of_binades = 1.0f / (1u << (binades_of_map - 1));
  /// Adding this to a number rounds it to an integer, which is then in the lowest bits.
  static constexpr float shift = 3 << 22;

  GRADACCUM_ON_DEVICE static Binade binade(const DynamicTables& map, int i) {
    const auto from = i == 0 ? 0 : number_of((least_exponent + static_cast<std::uint32_t>(i)) << 23);
    std::int32_t decade = 0;
    while (decade < decades_of_map - 1 && map.edge[static_cast<std::size_t>(decade)] < from) ++decade;
    return {decade < decades_of_map - 1 ? map.edge[static_cast<std::size_t>(decade)] : 2.0f, decade};
  }
  GRADACCUM_ON_DEVICE void fill_decade(const DynamicTables& map, int i) {
    const auto at = static_cast<std::size_t>(i);
    const bool one_code = map.scale[at] == 0;
    decades[i] = {map.scale[at],         one_code ? map.offset[at] : map.offset[at] - 0.5f,
                  map.spread[at],        map.middle[at],
                  map.first[at] + shift, map.last[at] + shift};
  }
};
