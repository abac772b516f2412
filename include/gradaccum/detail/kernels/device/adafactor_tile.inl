// SPDX-License-Identifier: Apache-2.0
//
// What blocks of threads are given of the tensors that Adafactor steps.

static_assert(AdafactorShape::threads == threads_of_block && AdafactorShape::pack == pack_size);

/// Of a step whose count the device alone may know.
GRADACCUM_ON_DEVICE inline AdafactorSettings settings_of(const AdafactorLaunch& launch) {
  if (!launch.by.left_out) return launch.settings;
  return at_step(launch.settings, at_least(1, launch.settings.step - static_cast<double>(*launch.by.left_out)));
}

/// The sum of 256 numbers, one of each thread, takes two phases: after the first there are 16.
inline constexpr int numbers_of_fold = 16;
GRADACCUM_ON_DEVICE inline double strided_sum(const double* numbers, int count, int stride) {
  double sum = 0;
  for (int i = 0; i < count; ++i) sum += numbers[i * stride];
  return sum;
}
GRADACCUM_ON_DEVICE inline void fold(double* numbers) {
  if (this_thread() < numbers_of_fold)
    numbers[this_thread()] = strided_sum(numbers + this_thread(), threads_of_block / numbers_of_fold, numbers_of_fold);
}
GRADACCUM_ON_DEVICE inline double folded(const double* numbers) { return strided_sum(numbers, numbers_of_fold, 1); }

/// What a block of threads is given of its tensor: a tile of a vector or of a large matrix, or small matrices.
struct AdafactorTile {
  AdafactorOperand of;
  AdafactorMemory memory;
  AdafactorShape shape;
  std::int64_t block;                ///< of the tensor's
  std::int64_t matrix, row, column;  ///< the first
  std::int64_t row_tile, column_tile;
  int rows;            ///< of the tile, less what is beyond the end
  int threads_of_row;  ///< of the tile
  bool left_out;
};

GRADACCUM_ON_DEVICE inline AdafactorOperand operand_of(const AdafactorTable::Entry& tensor,
                                                       const AdafactorMemory& memory, std::size_t size_of_state,
                                                       const AdafactorNumbers& numbers) {
  const auto& shape = tensor.shape;
  const auto row_sums = static_cast<std::size_t>(shape.row_sums());
  return {.numbers = numbers,
          .parameter = tensor.parameter,
          .gradient = tensor.gradient,
          .row_var = shape.is_vector() ? nullptr : tensor.row_var,
          .col_var = tensor.col_var,
          .variance = shape.is_vector() ? tensor.row_var : nullptr,
          .exp_avg = tensor.exp_avg,
          .row_factors = memory.row_sums,
          .column_factors = static_cast<unsigned char*>(memory.row_sums) + row_sums * size_of_state,
          .matrices = shape.matrices(),
          .rows = shape.rows(),
          .columns = shape.columns(),
          .parts = 1,
          .rounding_key = tensor.rounding_key};
}

/// Where the `block`-th tile of a tensor is; the divisions are of 32 bits, which take devices less time.
GRADACCUM_ON_DEVICE inline void place_tile(AdafactorTile& tile, std::uint32_t block) {
  const auto& shape = tile.shape;
  const auto row_tiles = static_cast<std::uint32_t>(shape.row_tiles());
  const auto column_tiles = static_cast<std::uint32_t>(shape.column_tiles());
  tile.matrix = block / column_tiles / row_tiles;
  tile.row_tile = block / column_tiles % row_tiles;
  tile.column_tile = block % column_tiles;
  tile.row = tile.row_tile * shape.rows_of_tile();
  tile.column = tile.column_tile * shape.columns_of_tile();
  const auto rows = shape.rows() - tile.row;
  tile.rows = static_cast<int>(rows < shape.rows_of_tile() ? rows : shape.rows_of_tile());
  tile.threads_of_row = shape.threads_of_row();
}

/// By one thread, for all.
template <class S>
GRADACCUM_ON_DEVICE void begin_tile(const AdafactorLaunch& launch, std::int64_t block, AdafactorTile& tile) {
  if (this_thread() != 0) return;
  const auto place = place_of_block(launch.tensors.first_blocks, launch.tensors.size, block);
  const auto& tensor = launch.tensors.entries[place];
  const AdafactorMemory memory(tensor.shape, tensor.memory);
  tile.of = operand_of(tensor, memory, sizeof(S), numbers_of(settings_of(launch), product_of(launch.by)));
  tile.memory = memory;
  tile.shape = tensor.shape;
  tile.left_out = leaves_out(launch.by);
  tile.block = block - launch.tensors.first_blocks[place];
  tile.row_tile = tile.column_tile = tile.row = tile.column = 0;
  tile.matrix = tile.block * threads_of_block;
  if (tensor.shape.is_small()) return;
  place_tile(tile, static_cast<std::uint32_t>(tile.block));
}

inline constexpr int rounds_of_tile = AdafactorShape::rounds_of_tile;

/// The packs of a tile that are a thread's, one below another in rounds.
template <bool of_vector>
class AdafactorPacks {
 public:
  GRADACCUM_ON_DEVICE explicit AdafactorPacks(const AdafactorTile& tile)
      : row_(this_thread() / tile.threads_of_row), stride_(threads_of_block / tile.threads_of_row) {
    const auto columns = tile.of.columns;
    column_ = tile.column + this_thread() % tile.threads_of_row * pack_size;
    first_ = (tile.matrix * tile.of.rows + tile.row + row_) * columns + column_;
    step_ = stride_ * columns;
    of_row_ = columns - column_ < pack_size ? static_cast<int>(columns - column_) : pack_size;
    numel_ = tile.shape.numel();
    rounds_ = of_row_ > 0 && row_ < tile.rows ? (tile.rows - row_ + stride_ - 1) / stride_ : 0;
  }

  GRADACCUM_ON_DEVICE int rounds() const { return rounds_; }
  GRADACCUM_ON_DEVICE int row(int round) const { return row_ + round * stride_; }  ///< of the tile
  GRADACCUM_ON_DEVICE std::int64_t column() const { return column_; }              ///< of the matrix
  GRADACCUM_ON_DEVICE std::int64_t place(int round) const { return first_ + round * step_; }
  /// Elements from there on, of a pack's; those of a vector may end before the row does.
  GRADACCUM_ON_DEVICE int count(int round) const {
    if constexpr (!of_vector) return of_row_;
    const auto left = numel_ - place(round);
    return left < of_row_ ? static_cast<int>(left) : of_row_;
  }

 private:
  int row_, stride_, rounds_, of_row_;
  std::int64_t column_, first_, step_, numel_;
};

/// Calls `body(round, pack)` for all of a thread's packs of an array. Some are on their way from memory at a time:
/// there are too few threads for one each to keep it busy.
template <bool of_vector, class T, class Body>
GRADACCUM_ON_DEVICE void for_each_pack_of(const AdafactorPacks<of_vector>& packs, const T* array, const Body& body) {
  constexpr int ahead = 4;
  for (int first = 0; first < packs.rounds(); first += ahead) {
    AlignedPack<T> loaded[ahead];
    GRADACCUM_UNROLL
    for (int i = 0; i < ahead; ++i)
      loaded[i] = load_pack(array, packs.place(first + i), first + i < packs.rounds() ? packs.count(first + i) : 0);
    GRADACCUM_UNROLL
    for (int i = 0; i < ahead; ++i)
      if (first + i < packs.rounds()) body(first + i, loaded[i]);
  }
}

/// All elements of some small matrices, which lie one after another.
struct AdafactorRange {
  GRADACCUM_ON_DEVICE explicit AdafactorRange(const AdafactorTile& tile)
      : first(tile.matrix * tile.of.rows * tile.of.columns) {
    const auto left = tile.of.matrices - tile.matrix;
    const int matrices = left < threads_of_block ? static_cast<int>(left) : threads_of_block;
    count = matrices * static_cast<int>(tile.of.rows * tile.of.columns);
  }
  std::int64_t first;
  int count;
};
