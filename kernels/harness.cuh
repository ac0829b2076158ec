// What measurement needs on the device: random operands, the convolution as its definition reads, and comparisons.
//
// One translation unit per pair of `Element` and `Output` types, which the including text defines; extents are arguments.
#pragma once
#include "ptx.cuh"

template <class T>
__device__ __forceinline__ double value_of(T x) {
  return static_cast<double>(x);
}
template <>
__device__ __forceinline__ double value_of<f16>(f16 x) {
  return ptx::from_f16(x.bits);
}
template <>
__device__ __forceinline__ double value_of<bf16>(bf16 x) {
  return ptx::from_bf16(x.bits);
}

// A well-mixed word for every counter value: the finaliser of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014).
__device__ __forceinline__ u64 mixed(u64 x) {
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

// Standard normal by Box and Muller's transform.
__device__ __forceinline__ f32 normal(u64 word) {
  const f32 u = (static_cast<u32>(word >> 32) + 0.5f) * 0x1p-32f, v = static_cast<u32>(word) * 0x1p-32f;
  return sqrtf(-2.0f * logf(fminf(u, 0.99999994f))) * cospif(2.0f * v);
}

__device__ __forceinline__ void draw(f32& x, u64 word, f32 deviation, f32 mean) { x = normal(word) * deviation + mean; }
__device__ __forceinline__ void draw(f16& x, u64 word, f32 deviation, f32 mean) { x.bits = ptx::to_f16(normal(word) * deviation + mean); }
__device__ __forceinline__ void draw(bf16& x, u64 word, f32 deviation, f32 mean) { x.bits = ptx::to_bf16(normal(word) * deviation + mean); }
__device__ __forceinline__ void draw(s32& x, u64 word, f32 deviation, f32 mean) { x = static_cast<s32>(normal(word) * deviation + mean); }
__device__ __forceinline__ void draw(s8& x, u64 word, f32, f32) { x = static_cast<s8>(word >> 56); }

__device__ __forceinline__ s64 thread_index() { return s64(blockIdx.x) * blockDim.x + threadIdx.x; }
__device__ __forceinline__ s64 thread_count() { return s64(gridDim.x) * blockDim.x; }

extern "C" __global__ void randomize(Element* data, s64 count, u64 seed, f32 deviation, f32 mean) {
  for (s64 i = thread_index(); i < count; i += thread_count()) draw(data[i], mixed(mixed(seed) + i), deviation, mean);
}

// A float32 as an output stores it: rounded to nearest even, integers saturating.
__device__ __forceinline__ double stored(f32 x, const f32*) { return x; }
__device__ __forceinline__ double stored(f32 x, const f16*) { return ptx::from_f16(ptx::to_f16(x)); }
__device__ __forceinline__ double stored(f32 x, const bf16*) { return ptx::from_bf16(ptx::to_bf16(x)); }
__device__ __forceinline__ double stored(f32 x, const s32*) { return fmin(fmax(rint(double(x)), -2147483648.0), 2147483647.0); }
__device__ __forceinline__ double stored(f32 x, const s8*) { return fmin(fmax(rint(double(x)), -128.0), 127.0); }

__device__ __forceinline__ bool holds_sums(const s32*) { return true; }
__device__ __forceinline__ bool holds_sums(const void*) { return false; }

// `function`: an index of problem.ACTIVATIONS.
template <class Real>
__device__ __forceinline__ Real activated(int function, Real x) {
  return function == 1 && x < 0 ? Real(0) : x;
}

// value: what the layer's output is before it is rounded, in float64 (every product of f16, bf16 or s8 is exact in it; s8
// sums stay below 2^53); for s8 what must be stored, by the float32 steps of problem.Epilogue. magnitude: the value for the
// absolute values of all terms, which scales the error that rounding may cause. scale, bias and residual may be null.
extern "C" __global__ void reference(const Element* activation, const Element* filter, const f32* scale, const f32* bias,
                                     const Output* residual, int per_channel, int function, double* value, f32* magnitude, s64 N,
                                     s64 C, s64 H, s64 W, s64 K, s64 R, s64 S, s64 P, s64 Q, s64 groups, s64 stride_h,
                                     s64 stride_w, s64 pad_top, s64 pad_left, s64 dilation_h, s64 dilation_w) {
  const s64 channels = C / groups, filters = K / groups;
  for (s64 i = thread_index(); i < N * P * Q * K; i += thread_count()) {
    const s64 k = i % K, q = i / K % Q, p = i / (K * Q) % P, n = i / (K * Q * P);
    double sum = 0;
    f32 size = 0;
    for (s64 r = 0; r < R; ++r)
      for (s64 s = 0; s < S; ++s) {
        const s64 h = p * stride_h - pad_top + r * dilation_h, w = q * stride_w - pad_left + s * dilation_w;
        if (h < 0 || h >= H || w < 0 || w >= W) continue;
        const Element* x = activation + ((n * H + h) * W + w) * C + k / filters * channels;
        const Element* y = filter + ((k * R + r) * S + s) * channels;
        for (int c = 0; c < int(channels); ++c) {
          const double product = value_of(x[c]) * value_of(y[c]);
          sum += product;
          size += fabsf(f32(product));
        }
      }
    const f32 factor = scale ? scale[per_channel ? k : 0] : 1, addend = bias ? bias[k] : 0;
    const double added = residual ? value_of(residual[i]) : 0;
    if constexpr (sizeof(Element) == 1) {
      const bool untouched = !scale && !bias && !residual && function == 0 && holds_sums(residual);
      f32 y = __fmaf_rn(__double2float_rn(sum), factor, addend);
      if (residual) y = __fadd_rn(y, __double2float_rn(added));
      value[i] = untouched ? sum : stored(activated(function, y), residual);
      // no error is allowed, and 0 times what was there before may be NaN
      magnitude[i] = 0;
    } else {
      value[i] = activated(function, sum * factor + addend + added);
      magnitude[i] = size * fabsf(factor) + fabsf(addend) + fabsf(f32(added));
    }
  }
}

// Counts elements further from the reference than relative*|value| + slack*magnitude + absolute, NaN included;
// `worst` is the largest error's bits (errors are not negative, so that their bits order like the numbers).
extern "C" __global__ void compare(const Output* output, const double* value, const f32* magnitude, s64 count, double relative,
                                   double slack, double absolute, u64* mismatches, u64* worst) {
  u64 bad = 0;
  double largest = 0;
  for (s64 i = thread_index(); i < count; i += thread_count()) {
    const double error = fabs(value_of(output[i]) - value[i]);
    const bool right = error <= relative * fabs(value[i]) + slack * magnitude[i] + absolute;
    bad += !right;
    largest = !(error <= 1.7e308) ? __longlong_as_double(0x7ff0000000000000ll) : fmax(largest, error);
  }
  if (bad) atomicAdd(mismatches, bad);
  if (largest > 0) atomicMax(worst, u64(__double_as_longlong(largest)));
}

extern "C" __global__ void count_differences(const u8* one, const u8* other, s64 count, u64* differences) {
  u64 found = 0;
  const s64 words = count / 16;
  for (s64 i = thread_index(); i < words; i += thread_count()) {
    const Vector<16> a = reinterpret_cast<const Vector<16>*>(one)[i], b = reinterpret_cast<const Vector<16>*>(other)[i];
    found += a.word[0] != b.word[0] || a.word[1] != b.word[1] || a.word[2] != b.word[2] || a.word[3] != b.word[3];
  }
  for (s64 i = words * 16 + thread_index(); i < count; i += thread_count()) found += one[i] != other[i];
  if (found) atomicAdd(differences, found);
}

extern "C" __global__ void count_other_bytes(const u8* data, s64 count, int byte, u64* others) {
  u64 found = 0;
  for (s64 i = thread_index(); i < count; i += thread_count()) found += data[i] != byte;
  if (found) atomicAdd(others, found);
}
