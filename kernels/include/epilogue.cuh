// From accumulators to stored elements: the one place that knows what an epilogue does.
//
//   y = Activation(fma(float32(accumulator), scale, bias) + float32(residual)), rounded once
//
// as problem.Epilogue defines it to the bit. A family's text states it in the Problem struct (families/epilogue.py):
// `scale` (0: none, 1: one of the tensor, 2: one of each filter), `bias`, `residual`, and `Activation`, a struct like those
// below. The identity is a conversion and costs nothing more.
//
// A kernel hands its Epilogue<Problem> down to where a thread holds the accumulators of n adjacent filters (n even) of one
// pixel. There `filters<n>(first, end)` reads what belongs to these filters, once for all pixels that the thread holds of
// them, and `finish` turns each pixel's accumulators into elements.
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
  template <int n>
  __device__ __forceinline__ Filters<n> filters(int first, int end) const {
    Filters<n> f;
    if constexpr (Problem::scale == 1) f.scale[0] = *scale;
#pragma unroll
    for (int i = 0; i < n; ++i) {
      if constexpr (Problem::scale == 2) f.scale[i] = first + i < end ? scale[first + i] : 0;
      if constexpr (Problem::bias) f.bias[i] = first + i < end ? bias[first + i] : 0;
    }
    return f;
  }

  // The elements of n adjacent filters, of which the first `present` exist, `at` elements into the output. `whole`: all or
  // none of them exist, and the residual's are read at once.
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
        read<whole>(r, at, present);
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
  template <bool whole, int n, class Index>
  __device__ __forceinline__ void read(Output (&r)[n], Index at, int present) const {
    if constexpr (whole) {
      constexpr int bytes = vector_bytes(n * int(sizeof(Output)));
#pragma unroll
      for (int i = 0; i < n * int(sizeof(Output)) / bytes; ++i) {
        Vector<bytes> v{};
        if (present > 0) v = reinterpret_cast<const Vector<bytes>*>(residual + at)[i];
        memcpy(reinterpret_cast<char*>(r) + i * bytes, &v, bytes);
      }
    } else {
#pragma unroll
      for (int i = 0; i < n; ++i) r[i] = i < present ? residual[at + i] : Output{};
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

// Writes elements of one pixel, which lie in shared memory, to `at` elements into the output, by the 32 lanes of a warp: as whole
// words wherever the pixel begins, and one by one before the first of them and after the last. capacity: the most elements.
template <int capacity, class Output>
__device__ __forceinline__ void write_pixel(const Output* from, Output* output, long long at, int elements) {
  constexpr int each = sizeof(Output) < 4 ? 4 / int(sizeof(Output)) : 1;
  const int lane = int(threadIdx.x) % 32, head = int(-at & (each - 1)), words = (elements - head) / each;
  Output* const to = output + at;
#pragma unroll
  for (int round = 0; round < ceil_div(capacity, 32 * each); ++round) {
    const int i = round * 32 + lane;
    if (i >= words) continue;
    Output y[each];
#pragma unroll
    for (int j = 0; j < each; ++j) y[j] = from[head + i * each + j];
    Vector<each * int(sizeof(Output))> v;
    memcpy(&v, y, sizeof y);
    ptx::store_streaming(to + head + i * each, v);
  }
  const int rest = lane < 16 ? lane : head + words * each + lane - 16;
  if (rest < (lane < 16 && head < elements ? head : elements)) to[rest] = from[rest];
}

// Leaves a thread's n elements in shared memory: never byte by byte, since ptxas 13.0 stores the byte of an f16 that it has just
// converted as its truncated value.
template <int n, class Output>
__device__ __forceinline__ void leave(char* to, const Output (&y)[n]) {
  Vector<n * int(sizeof(Output))> v;
  memcpy(&v, y, sizeof v);
  *reinterpret_cast<Vector<n * int(sizeof(Output))>*>(to) = v;
}
