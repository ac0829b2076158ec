// Every PTX instruction that the kernels use, one wrapper each; replacing this header moves the kernels to another machine.
#pragma once
#include "types.cuh"

namespace ptx {

__device__ __forceinline__ u32 shared_address(const void* pointer) {
  return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// Four 8x8 matrices of 16-bit elements; lane i gives the address of row i % 8 of matrix i / 8.
__device__ __forceinline__ void ldmatrix_x4(u32 (&d)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(address)
               : "memory");
}

// Two 8x8 matrices; the addresses of lanes 16 to 31 are not used.
__device__ __forceinline__ void ldmatrix_x2(u32 (&d)[2], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];" : "=r"(d[0]), "=r"(d[1]) : "r"(address) : "memory");
}

// d += a * b for a 16 x (32 bytes) fragment a and a (32 bytes) x 8 fragment b.
template <class Element>
struct Mma;

template <>
struct Mma<f16> {
  __device__ static __forceinline__ void run(f32 (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
#if __CUDA_ARCH__ >= 800
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
#pragma unroll
    for (int half = 0; half < 2; ++half)
      asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
                   : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                   : "r"(a[2 * half]), "r"(a[2 * half + 1]), "r"(b[half]));
#endif
  }
};

#if __CUDA_ARCH__ >= 800
template <>
struct Mma<bf16> {
  __device__ static __forceinline__ void run(f32 (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
};
#endif

template <>
struct Mma<s8> {
  __device__ static __forceinline__ void run(s32 (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
#if __CUDA_ARCH__ >= 800
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
#pragma unroll
    for (int rows = 0; rows < 2; ++rows)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        asm volatile("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0,%1}, {%2}, {%3}, {%0,%1};"
                     : "+r"(d[2 * rows]), "+r"(d[2 * rows + 1])
                     : "r"(a[rows + 2 * half]), "r"(b[half]));
#endif
  }
};

// Asynchronous copy of `bytes` (4, 8 or 16) to shared memory; zeros are written where `inside` is false.
template <int bytes>
__device__ __forceinline__ void cp_async(u32 target, const void* source, bool inside) {
#if __CUDA_ARCH__ >= 800
  const int present = inside ? bytes : 0;
  if constexpr (bytes == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(source), "r"(present) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %3, %2;" ::"r"(target), "l"(source), "r"(present), "n"(bytes) : "memory");
#endif
}

__device__ __forceinline__ void cp_async_commit() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Wait until at most `pending` of this thread's committed groups are unfinished.
template <int pending>
__device__ __forceinline__ void cp_async_wait() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
#endif
}

__device__ __forceinline__ u16 to_f16(f32 x) {
  u16 bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
}

__device__ __forceinline__ u16 to_bf16(f32 x) {
#if __CUDA_ARCH__ >= 800
  u16 bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
#else
  const u32 word = __float_as_uint(x);
  if ((word & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
  return static_cast<u16>((word + 0x7fffu + ((word >> 16) & 1)) >> 16);
#endif
}

__device__ __forceinline__ f32 from_f16(u16 bits) {
  f32 x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
  return x;
}

__device__ __forceinline__ f32 from_bf16(u16 bits) { return __uint_as_float(static_cast<u32>(bits) << 16); }

// x * y + z, rounded once.
__device__ __forceinline__ f32 multiply_add(f32 x, f32 y, f32 z) {
  f32 d;
  asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(d) : "f"(x), "f"(y), "f"(z));
  return d;
}

// The larger one; NaN when either is.
__device__ __forceinline__ f32 maximum(f32 x, f32 y) {
#if __CUDA_ARCH__ >= 800
  f32 d;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(d) : "f"(x), "f"(y));
  return d;
#else
  return x < y ? y : x;
#endif
}

// Two elements in a word, the first in its lower half; with `relu` negative ones become zero.
template <bool relu>
__device__ __forceinline__ u32 to_f16x2(f32 low, f32 high) {
#if __CUDA_ARCH__ >= 800
  u32 word;
  if constexpr (relu)
    asm("cvt.rn.relu.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
#else
  return to_f16(relu ? maximum(low, 0) : low) | static_cast<u32>(to_f16(relu ? maximum(high, 0) : high)) << 16;
#endif
}

template <bool relu>
__device__ __forceinline__ u32 to_bf16x2(f32 low, f32 high) {
#if __CUDA_ARCH__ >= 800
  u32 word;
  if constexpr (relu)
    asm("cvt.rn.relu.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  else
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
#else
  return to_bf16(relu ? maximum(low, 0) : low) | static_cast<u32>(to_bf16(relu ? maximum(high, 0) : high)) << 16;
#endif
}

// The nearest integer, ties to even, saturating.
__device__ __forceinline__ s32 to_s32(f32 x) {
  s32 d;
  asm("cvt.rni.s32.f32 %0, %1;" : "=r"(d) : "f"(x));
  return d;
}

// Two integers as saturated bytes in the lower half of a word, the first lowest; the upper half is the lower one of `above`.
__device__ __forceinline__ u32 pack_s8(s32 low, s32 high, u32 above) {
  u32 word;
  asm("cvt.pack.sat.s8.s32.b32 %0, %1, %2, %3;" : "=r"(word) : "r"(high), "r"(low), "r"(above));
  return word;
}

// A word of these four of eight bytes, from the lowest on: each digit of the selector is an index.
__device__ __forceinline__ u32 permute(u32 low, u32 high, u32 selector) {
  u32 word;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(word) : "r"(low), "r"(high), "r"(selector));
  return word;
}

// A 16-byte load that bypasses the first-level cache: sees what other blocks wrote before a fence.
template <class T>
__device__ __forceinline__ void load_l2(T (&d)[4], const T* source) {
  u32 w[4];
  asm volatile("ld.global.cg.v4.b32 {%0,%1,%2,%3}, [%4];" : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3]) : "l"(source) : "memory");
#pragma unroll
  for (int i = 0; i < 4; ++i) memcpy(&d[i], &w[i], 4);
}

// Brings the line of global memory at this address into the second-level cache.
__device__ __forceinline__ void prefetch(const void* at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at) : "memory"); }

#if __CUDA_ARCH__ >= 900
// A descriptor of the tensor copy engine, encoded by the host and passed by value.
struct alignas(64) TensorMap {
  u64 word[16];
};

// Barriers in shared memory: an arrival count, and bytes that copies have still to write, per phase of alternating parity.
__device__ __forceinline__ void barrier_init(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void barrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// One arrival, after which `bytes` more bytes complete the phase.
__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void barrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives at the barrier that lies at the same address in a block of the cluster. What the threads wrote is not passed on
// beyond their block: a release for the cluster waits for every store to global memory that they have begun.
__device__ __forceinline__ void barrier_arrive(u32 barrier, u32 block) {
  asm volatile(
      "{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}" ::"r"(barrier), "r"(block)
      : "memory");
}

// Waits for all threads of the cluster that have not ended.
__device__ __forceinline__ void sync_cluster() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

// Wait until the phase of this parity is complete; the caller may be at most one phase behind.
__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
  asm volatile(
      "{\n.reg .pred done;\nretry_%=:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra end_%=;\nbra retry_%=;\nend_%=:\n}" ::"r"(barrier), "r"(parity)
      : "memory");
}

__device__ __forceinline__ void prefetch_map(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Copies of a box to shared memory, coordinates innermost first; what lies outside the tensor becomes zero.
__device__ __forceinline__ void copy_box(u32 target, const TensorMap* map, u32 barrier, int c0, int c1, int c2) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3,%4,%5}], [%2];" ::"r"(target),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2)
      : "memory");
}

__device__ __forceinline__ void copy_box(u32 target, const TensorMap* map, u32 barrier, int c0, int c1, int c2, int c3, int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3,%4,%5,%6,%7}], [%2];" ::"r"(
          target),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}

// The same to these blocks of the cluster (a bit each): to the same address in each, whose barrier there is told.
__device__ __forceinline__ void multicast_box(u32 target, const TensorMap* map, u32 barrier, u16 blocks, int c0, int c1, int c2) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
      "[%1, {%3,%4,%5}], [%2], %6;" ::"r"(target),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "h"(blocks)
      : "memory");
}

__device__ __forceinline__ void multicast_box(u32 target, const TensorMap* map, u32 barrier, u16 blocks, int c0, int c1, int c2,
                                              int c3, int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
      "[%1, {%3,%4,%5,%6,%7}], [%2], %8;" ::"r"(target),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "h"(blocks)
      : "memory");
}

// A copy of one column of pixels for an implicit matrix product: the pixels that follow (w, h, n) in the order of the
// output, each shifted by a tap's offset.
__device__ __forceinline__ void copy_pixels(u32 target, const TensorMap* map, u32 barrier, int c, int w, int h, int n,
                                            int offset_w, int offset_h) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes [%0], [%1, {%3,%4,%5,%6}], [%2], "
      "{%7,%8};" ::"r"(target),
      "l"(map), "r"(barrier), "r"(c), "r"(w), "r"(h), "r"(n), "h"(static_cast<u16>(offset_w)), "h"(static_cast<u16>(offset_h))
      : "memory");
}

// Brings what copy_pixels would copy into the second-level cache; neither shared memory nor a barrier need be ready.
__device__ __forceinline__ void prefetch_pixels(const TensorMap* map, int c, int w, int h, int n) {
  asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global.im2col [%0, {%1,%2,%3,%4}], {%5,%5};" ::"l"(map), "r"(c), "r"(w), "r"(h),
               "r"(n), "h"(static_cast<u16>(0))
               : "memory");
}

// A copy of a box of data that is read once: it is the first to leave the second-level cache.
constexpr u64 evict_first = 0x12F0000000000000ull;

__device__ __forceinline__ void stream_box(u32 target, const TensorMap* map, u32 barrier, int c0, int c1, int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3,%4,%5,%6}], "
      "[%2], %7;" ::"r"(target),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "l"(evict_first)
      : "memory");
}

__device__ __forceinline__ void stream_box(u32 target, const TensorMap* map, u32 barrier, int c0, int c1, int c2, int c3, int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
      "[%1, {%3,%4,%5,%6,%7}], [%2], %8;" ::"r"(target),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "l"(evict_first)
      : "memory");
}

// A warpgroup's matrix product: Wgmma<Element, n>::run(d, a, b, accumulate) adds (or, without `accumulate`, stores) the
// product of a 64 x (32 bytes) operand and a (32 bytes) x n operand, both described by `matrix_descriptor`. The
// specialisations for the values of n that a kernel needs come with its source text: their register lists cannot be
// written as a template.
template <class Element, int n>
struct Wgmma;

// Rows of `swizzle_bytes` (32, 64, 128), groups of eight rows `group_bytes` apart.
template <int swizzle_bytes>
__device__ __forceinline__ u64 matrix_descriptor(u32 address, u32 group_bytes) {
  constexpr u64 mode = swizzle_bytes == 128 ? 1 : swizzle_bytes == 64 ? 2 : 3;
  return u64((address & 0x3ffff) >> 4) | u64(1) << 16 | u64(group_bytes >> 4) << 32 | mode << 62;
}

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }

// Wait for all products but those of the last committed group.
__device__ __forceinline__ void wgmma_wait_previous() { asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory"); }

// A barrier among the 128 threads of a warpgroup; `id` from 1 to 15 tells warpgroups apart.
__device__ __forceinline__ void sync_warpgroup(int id) { asm volatile("bar.sync %0, 128;" ::"r"(id) : "memory"); }

// Keeps the compiler from reading an accumulator before the wait that precedes this.
__device__ __forceinline__ void pin(f32& x) { asm volatile("" : "+f"(x)::"memory"); }
__device__ __forceinline__ void pin(s32& x) { asm volatile("" : "+r"(x)::"memory"); }

template <int registers>
__device__ __forceinline__ void release_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}
template <int registers>
__device__ __forceinline__ void claim_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
}
#endif

// A store of data that is not read again soon.
__device__ __forceinline__ void store_streaming(void* target, Vector<16> v) {
  asm volatile("st.global.cs.v4.b32 [%0], {%1,%2,%3,%4};" ::"l"(target), "r"(v.word[0]), "r"(v.word[1]), "r"(v.word[2]),
               "r"(v.word[3])
               : "memory");
}
__device__ __forceinline__ void store_streaming(void* target, Vector<8> v) {
  asm volatile("st.global.cs.v2.b32 [%0], {%1,%2};" ::"l"(target), "r"(v.word[0]), "r"(v.word[1]) : "memory");
}
__device__ __forceinline__ void store_streaming(void* target, Vector<4> v) {
  asm volatile("st.global.cs.b32 [%0], %1;" ::"l"(target), "r"(v.word[0]) : "memory");
}
__device__ __forceinline__ void store_streaming(void* target, Vector<2> v) {
  asm volatile("st.global.cs.b16 [%0], %1;" ::"l"(target), "h"(v.word[0]) : "memory");
}

}  // namespace ptx
