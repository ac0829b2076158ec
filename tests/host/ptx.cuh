// Stands for kernels/include/ptx.cuh where kernels run on the host: the same wrappers, executed by the machine.
#pragma once
#include "types.cuh"

// calls of memcpy that stay calls are not instrumented
#define memcpy(target, source, bytes) (host::check_copy(target, source, bytes), __builtin_memcpy(target, source, bytes))

namespace host {

u32 shared_address(const void* pointer);
void ldmatrix(u32* registers, int matrices, u32 address);
void multiply_f16(f32* d, const u32* a, const u32* b);
void multiply_bf16(f32* d, const u32* a, const u32* b);
void multiply_s8(s32* d, const u32* a, const u32* b);
void copy_async(u32 target, const void* source, int bytes, bool inside);
void copy_async_commit();
void copy_async_wait(int pending);
void load_l2(void* target, const void* source, int bytes);
void store_streaming(void* target, const void* source, int bytes);
u16 to_f16(f32 x);
u16 to_bf16(f32 x);
f32 from_f16(u16 bits);
s32 to_s32(f32 x);

void barrier_init(u32 address, u32 arrivals);
void barrier_init_fence();
void barrier_expect(u32 address, u32 bytes);
void barrier_arrive(u32 address);
void barrier_arrive_remote(u32 address, u32 block);
void barrier_wait(u32 address, u32 parity);
void synchronize_warpgroup(int id);
void synchronize_cluster();
void reassign_registers(int registers, bool more);

void use_map(const void* map);
void copy_box(u32 target, const void* map, u32 barrier, const int* coordinates, int rank);
void multicast_box(u32 target, const void* map, u32 barrier, u32 mask, const int* coordinates, int rank);
void copy_pixels(u32 target, const void* map, u32 barrier, int c, int w, int h, int n, int offset_w, int offset_h);

void wgmma(Number type, int columns, bool accumulate, void* d, unsigned long a, unsigned long b);
void wgmma_fence();
void wgmma_commit();
void wgmma_wait(int pending);

}  // namespace host

namespace ptx {

inline u32 shared_address(const void* pointer) { return host::shared_address(pointer); }

inline void ldmatrix_x4(u32 (&d)[4], u32 address) { host::ldmatrix(d, 4, address); }
inline void ldmatrix_x2(u32 (&d)[2], u32 address) { host::ldmatrix(d, 2, address); }

template <class Element>
struct Mma;

template <>
struct Mma<f16> {
  static void run(f32 (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) { host::multiply_f16(d, a, b); }
};

#if __CUDA_ARCH__ >= 800
template <>
struct Mma<bf16> {
  static void run(f32 (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) { host::multiply_bf16(d, a, b); }
};
#endif

template <>
struct Mma<s8> {
  static void run(s32 (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) { host::multiply_s8(d, a, b); }
};

template <int bytes>
inline void cp_async(u32 target, const void* source, bool inside) {
  static_assert(bytes == 4 || bytes == 8 || bytes == 16, "cp.async copies 4, 8 or 16 bytes");
  host::copy_async(target, source, bytes, inside);
}

inline void cp_async_commit() { host::copy_async_commit(); }

template <int pending>
inline void cp_async_wait() {
  host::copy_async_wait(pending);
}

inline u16 to_f16(f32 x) { return host::to_f16(x); }
inline u16 to_bf16(f32 x) { return host::to_bf16(x); }
inline f32 from_f16(u16 bits) { return host::from_f16(bits); }
inline f32 from_bf16(u16 bits) { return __uint_as_float(u32(bits) << 16); }

inline f32 multiply_add(f32 x, f32 y, f32 z) { return __builtin_fmaf(x, y, z); }

inline f32 maximum(f32 x, f32 y) { return x != x || y != y ? __builtin_nanf("") : x < y ? y : x; }

template <bool relu>
inline u32 to_f16x2(f32 low, f32 high) {
  return to_f16(relu ? maximum(low, 0) : low) | u32(to_f16(relu ? maximum(high, 0) : high)) << 16;
}
template <bool relu>
inline u32 to_bf16x2(f32 low, f32 high) {
  return to_bf16(relu ? maximum(low, 0) : low) | u32(to_bf16(relu ? maximum(high, 0) : high)) << 16;
}

inline s32 to_s32(f32 x) { return host::to_s32(x); }

inline u32 pack_s8(s32 low, s32 high, u32 above) {
  const auto saturated = [](s32 x) { return u32(u8(x < -128 ? -128 : x > 127 ? 127 : x)); };
  return saturated(low) | saturated(high) << 8 | above << 16;
}

inline u32 permute(u32 low, u32 high, u32 selector) {
  u32 word = 0;
  for (int i = 0; i < 4; ++i) word |= u32((u64(high) << 32 | low) >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
  return word;
}

template <class T>
inline void load_l2(T (&d)[4], const T* source) {
  host::load_l2(d, source, 16);
}

inline void prefetch(const void*) {}

#if __CUDA_ARCH__ >= 900
struct alignas(64) TensorMap {
  u64 word[16];
};

inline void barrier_init(u32 barrier, u32 arrivals) { host::barrier_init(barrier, arrivals); }
inline void barrier_init_fence() { host::barrier_init_fence(); }
inline void barrier_expect(u32 barrier, u32 bytes) { host::barrier_expect(barrier, bytes); }
inline void barrier_arrive(u32 barrier) { host::barrier_arrive(barrier); }
inline void barrier_arrive(u32 barrier, u32 block) { host::barrier_arrive_remote(barrier, block); }
inline void sync_cluster() { host::synchronize_cluster(); }
inline void barrier_wait(u32 barrier, u32 parity) { host::barrier_wait(barrier, parity); }

inline void prefetch_map(const TensorMap* map) { host::use_map(map); }
inline void prefetch_pixels(const TensorMap* map, int, int, int, int) { host::use_map(map); }

template <class... Coordinates>
inline void copy_box(u32 target, const TensorMap* map, u32 barrier, Coordinates... coordinates) {
  const int all[] = {coordinates...};
  host::copy_box(target, map, barrier, all, sizeof...(coordinates));
}

template <class... Coordinates>
inline void multicast_box(u32 target, const TensorMap* map, u32 barrier, u16 blocks, Coordinates... coordinates) {
  const int all[] = {coordinates...};
  host::multicast_box(target, map, barrier, blocks, all, sizeof...(coordinates));
}

template <class... Coordinates>
inline void stream_box(u32 target, const TensorMap* map, u32 barrier, Coordinates... coordinates) {
  const int all[] = {coordinates...};
  host::copy_box(target, map, barrier, all, sizeof...(coordinates));
}

inline void copy_pixels(u32 target, const TensorMap* map, u32 barrier, int c, int w, int h, int n, int offset_w, int offset_h) {
  host::copy_pixels(target, map, barrier, c, w, h, n, offset_w, offset_h);
}

template <class Element>
constexpr host::Number number_of = host::Number::s8;
template <>
constexpr host::Number number_of<f16> = host::Number::f16;
template <>
constexpr host::Number number_of<bf16> = host::Number::bf16;

template <class Element, int n>
struct Wgmma {
  template <bool accumulate>
  static void run(typename AccumulatorOf<Element>::type* d, u64 a, u64 b) {
    host::wgmma(number_of<Element>, n, accumulate, d, a, b);
  }
};

template <int swizzle_bytes>
inline u64 matrix_descriptor(u32 address, u32 group_bytes) {
  constexpr u64 mode = swizzle_bytes == 128 ? 1 : swizzle_bytes == 64 ? 2 : 3;
  return u64((address & 0x3ffff) >> 4) | u64(1) << 16 | u64(group_bytes >> 4) << 32 | mode << 62;
}

inline void wgmma_fence() { host::wgmma_fence(); }
inline void wgmma_commit() { host::wgmma_commit(); }
inline void wgmma_wait() { host::wgmma_wait(0); }
inline void wgmma_wait_previous() { host::wgmma_wait(1); }

inline void sync_warpgroup(int id) { host::synchronize_warpgroup(id); }

// the compiler of the host cannot move an access across a call
inline void pin(f32&) {}
inline void pin(s32&) {}

template <int registers>
inline void release_registers() {
  host::reassign_registers(registers, false);
}
template <int registers>
inline void claim_registers() {
  host::reassign_registers(registers, true);
}
#endif

template <int bytes>
inline void store_streaming(void* target, Vector<bytes> v) {
  host::store_streaming(target, &v, bytes);
}

}  // namespace ptx
