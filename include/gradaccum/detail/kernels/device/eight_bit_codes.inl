// SPDX-License-Identifier: Apache-2.0
//
// The 8-bit codes of a DynamicMap, one number at a time in few instructions, since on a device they take longer than a
// step's memory accesses. Codes and numbers equal those of DynamicCodes to the bit, where all numbers of a block are
// finite.

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
/// computing several at a time. The steps are those of the compiler's own code between its branches. x: 0, or at least
/// 2^-101 and finite.
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

  /// Called by all threads of a block, which synchronise before they use the tables. Small codes have the most cells:
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
