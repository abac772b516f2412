// SPDX-License-Identifier: Apache-2.0
//
// Which of a table's tensors a block of threads works on.

/// The tensor to which a block belongs; of blocks that are numbered by `first_block`, or otherwise.
template <class Table>
GRADACCUM_ON_DEVICE const typename Table::Entry& entry_of(const Table& tensors, std::int64_t block,
                                                          std::int64_t Table::Entry::*first_block) {
  std::int64_t first = 0, end = tensors.size;
  while (end - first > 1) {
    const auto middle = (first + end) / 2;
    (tensors.entries[static_cast<std::size_t>(middle)].*first_block <= block ? first : end) = middle;
  }
  return tensors.entries[static_cast<std::size_t>(first)];
}
template <class Table>
GRADACCUM_ON_DEVICE const typename Table::Entry& entry_of(const Table& tensors, std::int64_t block) {
  return entry_of(tensors, block, &Table::Entry::first_block);
}
