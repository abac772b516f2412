// SPDX-License-Identifier: Apache-2.0
//
// Which of a table's tensors a block of threads works on.

/// The place of the last of `size` tensors whose first block is `block`, or comes before it.
template <std::size_t capacity>
GRADACCUM_ON_DEVICE std::size_t place_of_block(const FirstBlocks<capacity>& first_blocks, std::int64_t size,
                                               std::int64_t block) {
  std::size_t first = 0, end = static_cast<std::size_t>(size);
  while (end - first > 1) {
    const auto middle = (first + end) / 2;
    (first_blocks[middle] <= block ? first : end) = middle;
  }
  return first;
}
