// SPDX-License-Identifier: Apache-2.0
//
// Loops over arrays, a vector at a time. Included by kernels.ipp for each instruction set, like all kernels: written once
// for the vectors `Floats` and `Doubles`. No lambdas: g++ compiles them for the instruction set of the program around.

/// Numbers of this type are computed with in these vectors.
template <class T>
using VectorOf = std::conditional_t<std::is_same_v<T, double>, Doubles, Floats>;

/// The last elements of an array, which do not fill a vector, in memory that does; written back at the end.
template <class T, int width>
class Rest {
 public:
  Rest(T* array, std::int64_t count) : array_(array), bytes_(array ? static_cast<std::size_t>(count) * sizeof(T) : 0) {
    if (array) std::memcpy(elements_, array, bytes_);
  }
  ~Rest() {
    if constexpr (!std::is_const_v<T>)
      if (array_) std::memcpy(array_, elements_, bytes_);
  }
  T* vector() { return array_ ? elements_ : nullptr; }

 private:
  T* array_;
  std::size_t bytes_;
  std::remove_const_t<T> elements_[width] = {};
};

template <class Update, class... Rests>
void update_rest(const Update& update, Rests... rests) {
  update(rests.vector()...);
}

/// Calls `update` with pointers to one vector after another of each array; an array that is not there stays nullptr.
template <int width, class Update, class... T>
void for_each_vector(const Update& update, std::int64_t count, T*... arrays) {
  std::int64_t i = 0;
  for (; i + width <= count; i += width) update((arrays ? arrays + i : nullptr)...);
  if (i < count) update_rest(update, Rest<T, width>(arrays ? arrays + i : nullptr, count - i)...);
}
