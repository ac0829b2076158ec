// From accumulators to stored elements: the one place that knows what an epilogue does.
//
//   y = Activation(fma(float32(accumulator), scale, bias) + float32(residual)), rounded once
//
// as problem.Epilogue defines it to the bit. A family's text states it in the Problem struct (families/epilogue.py):
// `scale` (0: none, 1: one of the tensor, 2: one of each filter), `bias`, `residual`, and `Activation`, a struct like those
// below. The identity is a conversion and costs nothing more.
//
// A kernel hands its Epilogue<Problem> down to where a thread holds the accumulators of n adjacent filters (n even) of one
// pixel. There `filters<whole, n>(first, end)` reads what belongs to these filters, once for all pixels that the thread holds
// of them, and `finish` turns each pixel's accumulators into elements. `whole`: all or none of the n filters exist, and what
// belongs to them is read at once, from addresses that are multiples of its size up to 16 bytes.
#pragma once
#include "ptx.cuh"

// Rounds once, to nearest even; an s32 output keeps the accumulator.
template <class Output, class Accumulator>
__device__ __forceinline__ Output converted(Accumulator x) {
  return static_cast<Output>(x);
}
template <>
__device__ __forceinline__ f16 converted<f16, f32>(f32 x) {
  return f16{ptx::to_f16(x)};
}
template <>
__device__ __forceinline__ bf16 converted<bf16, f32>(f32 x) {
  return bf16{ptx::to_bf16(x)};
}

__device__ __forceinline__ f32 widened(f16 x) { return ptx::from_f16(x.bits); }
__device__ __forceinline__ f32 widened(bf16 x) { return ptx::from_bf16(x.bits); }
__device__ __forceinline__ f32 widened(f32 x) { return x; }
__device__ __forceinline__ f32 widened(s32 x) { return static_cast<f32>(x); }

// Activations, by the names in problem.ACTIVATIONS. `rounded`: the conversion of two elements to 16 bits does it.
struct Identity {
  static constexpr bool rounded = true;
  __device__ static __forceinline__ f32 of(f32 x) { return x; }
};
struct Relu {
  static constexpr bool rounded = true;
  __device__ static __forceinline__ f32 of(f32 x) { return ptx::maximum(x, 0); }
};

template <class A, class B>
constexpr bool same_type = false;
template <class A>
constexpr bool same_type<A, A> = true;

template <class Problem>
struct Epilogue {
  using Output = typename Problem::Output;
  using Accumulator = typename AccumulatorOf<typename Problem::Element>::type;
  using Activation = typename Problem::Activation;

  const f32* scale;
  const f32* bias;
  const Output* residual;

  static constexpr bool per_filter = Problem::scale == 2 || Problem::bias;
  // whether an accumulator is only converted; an integer too long for its output must also saturate
  static constexpr bool converts = !Problem::scale && !Problem::bias && !Problem::residual && same_type<Activation, Identity> &&
                                   !(same_type<Accumulator, s32> && sizeof(Output) < 4);
  static constexpr bool halves = same_type<Output, f16> || same_type<Output, bf16>;

  // What belongs to n adjacent filters.
  template <int n>
  struct Filters {
    f32 scale[Problem::scale == 2 ? n : 1], bias[n];

    __device__ __forceinline__ f32 scaled(int i, Accumulator accumulator) const {
      const f32 x = static_cast<f32>(accumulator);
      if constexpr (Problem::scale != 0)
        return ptx::multiply_add(x, scale[Problem::scale == 2 ? i : 0], Problem::bias ? bias[i] : 0.0f);
      else
        return Problem::bias ? x + bias[i] : x;
    }
  };

  // Those of the filters from `first` on; nothing is read from `end` on.
  template <bool whole, int n>
  __device__ __forceinline__ Filters<n> filters(int first, int end) const {
    Filters<n> f;
    if constexpr (Problem::scale == 1) f.scale[0] = *scale;
    if constexpr (Problem::scale == 2) read<whole>(f.scale, scale, first, end - first);
    if constexpr (Problem::bias) read<whole>(f.bias, bias, first, end - first);
    return f;
  }

  // Lets these threads bring what belongs to the first `end` filters into the second-level cache.
  __device__ __forceinline__ void prefetch(int thread, int threads, int end) const {
    if constexpr (per_filter) {
      for (int i = thread * 32; i < end; i += threads * 32) {
        if constexpr (Problem::scale == 2) ptx::prefetch(scale + i);
        if constexpr (Problem::bias) ptx::prefetch(bias + i);
      }
    }
  }

  // The elements of n adjacent filters, of which the first `present` exist, `at` elements into the output.
  template <bool whole, int n, class Index>
  __device__ __forceinline__ void finish(Output (&y)[n], const Accumulator (&x)[n], const Filters<n>& f, Index at, int present) const {
    if constexpr (converts) {
#pragma unroll
      for (int i = 0; i < n; ++i) y[i] = converted<Output>(x[i]);
    } else {
      f32 t[n];
#pragma unroll
      for (int i = 0; i < n; ++i) t[i] = f.scaled(i, x[i]);
      if constexpr (Problem::residual) {
        Output r[n];
        read<whole>(r, residual, at, present);
#pragma unroll
        for (int i = 0; i < n; ++i) t[i] += widened(r[i]);
      }
      if constexpr (!(halves && Activation::rounded)) {
#pragma unroll
        for (int i = 0; i < n; ++i) t[i] = Activation::of(t[i]);
      }
      round(y, t);
    }
  }

 private:
  // The first `present` of n elements, and zeros after them.
  template <bool whole, class T, int n, class Index>
  __device__ static __forceinline__ void read(T (&r)[n], const T* from, Index at, int present) {
    if constexpr (whole) {
      constexpr int bytes = vector_bytes(n * int(sizeof(T)));
#pragma unroll
      for (int i = 0; i < n * int(sizeof(T)) / bytes; ++i) {
        Vector<bytes> v{};
        if (present > 0) v = reinterpret_cast<const Vector<bytes>*>(from + at)[i];
        memcpy(reinterpret_cast<char*>(r) + i * bytes, &v, bytes);
      }
    } else {
#pragma unroll
      for (int i = 0; i < n; ++i) r[i] = i < present ? from[at + i] : T{};
    }
  }

  template <int n>
  __device__ static __forceinline__ void round(f32 (&y)[n], const f32 (&t)[n]) {
#pragma unroll
    for (int i = 0; i < n; ++i) y[i] = t[i];
  }
  template <int n>
  __device__ static __forceinline__ void round(s32 (&y)[n], const f32 (&t)[n]) {
#pragma unroll
    for (int i = 0; i < n; ++i) y[i] = ptx::to_s32(t[i]);
  }
  template <int n>
  __device__ static __forceinline__ void round(f16 (&y)[n], const f32 (&t)[n]) {
#pragma unroll
    for (int i = 0; i < n; i += 2) put(&y[i], ptx::to_f16x2<same_type<Activation, Relu>>(t[i], t[i + 1]));
  }
  template <int n>
  __device__ static __forceinline__ void round(bf16 (&y)[n], const f32 (&t)[n]) {
#pragma unroll
    for (int i = 0; i < n; i += 2) put(&y[i], ptx::to_bf16x2<same_type<Activation, Relu>>(t[i], t[i + 1]));
  }
  template <int n>
  __device__ static __forceinline__ void round(s8 (&y)[n], const f32 (&t)[n]) {
    if constexpr (n % 4 == 0) {
#pragma unroll
      for (int i = 0; i < n; i += 4)
        put(&y[i], ptx::pack_s8(ptx::to_s32(t[i]), ptx::to_s32(t[i + 1]), ptx::pack_s8(ptx::to_s32(t[i + 2]), ptx::to_s32(t[i + 3]), 0)));
    } else {
#pragma unroll
      for (int i = 0; i < n; i += 2) put(&y[i], u16(ptx::pack_s8(ptx::to_s32(t[i]), ptx::to_s32(t[i + 1]), 0)));
    }
  }
  template <class Element, class Word>
  __device__ static __forceinline__ void put(Element* y, Word word) {
    memcpy(y, &word, sizeof word);
  }
};

// Shared memory in which a warp collects eight pixels, wherever they begin in memory, and from which it writes them as whole
// vectors of 16 bytes, and element by element only before the first vector of a pixel and after its last. capacity: filters of a
// pixel. stride: elements from a pixel to the next. aligned: whether the first of the eight begins at a vector.
template <class Output, int capacity, long long stride, bool aligned>
struct Collected {
  static constexpr int size = sizeof(Output), each = 16 / size;  // elements of a vector
  // an odd number of vectors, without bank conflicts, and room for what precedes the first element
  static constexpr int row_bytes = ((ceil_div(capacity * size, 16) + 1) | 1) * 16, bytes = 8 * row_bytes;

  char* rows;
  s64 at;  // in the output, of the first pixel's first element

  // Where in a vector a pixel begins.
  __device__ __forceinline__ int start(int pixel) const {
    return int((aligned ? 0 : u32(at)) + u32(pixel) * u32(stride)) & (each - 1);
  }

  // The place of an element. A row begins where its pixel does in a vector, or an element earlier: two adjacent ones are a word.
  __device__ __forceinline__ char* place(int pixel, int column) const {
    return rows + pixel * row_bytes + ((start(pixel) & -2) + column) * size;
  }

  // Leaves two elements. Never byte by byte, since ptxas 13.0 stores the byte of an f16 that it has just converted as its
  // truncated value.
  __device__ static __forceinline__ void leave(char* place, const Output (&y)[2]) {
    Vector<2 * size> v;
    memcpy(&v, y, sizeof v);
    *reinterpret_cast<Vector<2 * size>*>(place) = v;
  }

  // Writes the first `columns` elements of the first `present` pixels, by the 32 lanes of the warp.
  __device__ __forceinline__ void write(Output* output, int present, int columns) const {
    using Offset = typename IndexOf<(8 * stride >= 1ll << 30)>::type;
    constexpr int vectors = ceil_div(capacity, each), lanes = vectors > 16 ? 32 : vectors > 8 ? 16 : 8;  // of a pixel
    constexpr int at_once = 32 / lanes, rounds = ceil_div(vectors, 32);
    const int lane = int(threadIdx.x) % 32;
    Output* const to = output + at;
#pragma unroll
    for (int step = 0; step < 8 / at_once; ++step)
#pragma unroll
      for (int round = 0; round < rounds; ++round) {
        // two apart, so that with an odd stride they begin all at an odd element of a vector, or all at an even one
        const int pixel = step / 2 * 2 * at_once + lane / lanes * 2 + step % 2, begin = start(pixel);
        const bool odd = aligned && stride % 2 ? step % 2 : begin % 2;
        const int index = (begin ? 1 : 0) + lane % lanes + round * 32;
        if (pixel < present && index < (begin + columns) / each)
          ptx::store_streaming(to + (pixel * Offset(stride) - begin + index * each), vector(pixel, index, odd));
      }
    // up to a vector less one element at either end of each pixel
#pragma unroll
    for (int round = 0; round < 8 * 2 * each / 32; ++round) {
      const int slot = round * 32 + lane, pixel = slot / (2 * each), begin = start(pixel), end = begin + columns;
      const bool head = slot % (2 * each) < each;
      const int element = (head ? 0 : end & -each) + slot % each - begin;
      const bool exists = head ? begin && element >= 0 : end >= each || !begin;
      if (pixel < present && exists && element < columns)
        to[pixel * Offset(stride) + element] = *reinterpret_cast<const Output*>(place(pixel, element));
    }
  }

 private:
  // A vector of memory, counted from the one where the pixel begins, at an odd element of it or at an even one.
  __device__ __forceinline__ Vector<16> vector(int pixel, int index, bool odd) const {
    const char* const from = rows + pixel * row_bytes + index * 16;
    Vector<16> v = *reinterpret_cast<const Vector<16>*>(from);
    if (odd) {
      u32 before = u32(reinterpret_cast<const Vector<size>*>(from - size)->word[0]) << (32 - 8 * size);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const u32 word = v.word[j];
        v.word[j] = ptx::permute(before, word, size == 1 ? 0x6543 : size == 2 ? 0x5432 : 0x3210);
        before = word;
      }
    }
    return v;
  }
};
