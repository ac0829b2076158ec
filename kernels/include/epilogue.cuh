// From accumulators to stored elements: the one place that knows what an epilogue does.
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
