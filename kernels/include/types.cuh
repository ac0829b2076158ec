// Element types and small vectors for every kernel; no other header is needed.
#pragma once

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using s8 = signed char;
using s32 = int;
using s64 = long long;
using f32 = float;

struct f16 {
  u16 bits;
};
struct bf16 {
  u16 bits;
};

// What an element type is accumulated in.
template <class Element>
struct AccumulatorOf {
  using type = f32;
};
template <>
struct AccumulatorOf<s8> {
  using type = s32;
};

// What offsets in elements are counted in: `wide` beyond 31 bits.
template <bool wide>
struct IndexOf {
  using type = int;
};
template <>
struct IndexOf<true> {
  using type = s64;
};

// A vector of `bytes` bytes that is loaded and stored at once.
template <int bytes>
struct Vector;
template <>
struct alignas(16) Vector<16> {
  u32 word[4];
};
template <>
struct alignas(8) Vector<8> {
  u32 word[2];
};
template <>
struct alignas(4) Vector<4> {
  u32 word[1];
};
template <>
struct Vector<2> {
  u16 word[1];
};
template <>
struct Vector<1> {
  u8 word[1];
};

// The widest vector, at most 16 bytes, whose size divides `bytes`.
__host__ __device__ constexpr int vector_bytes(long long bytes) {
  return bytes % 16 == 0 ? 16 : bytes % 8 == 0 ? 8 : bytes % 4 == 0 ? 4 : bytes % 2 == 0 ? 2 : 1;
}

__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
