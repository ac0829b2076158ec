// Stands for kernels/include/ptx.cuh where kernels run on the host: the same wrappers, executed by the machine.
#pragma once
#include "types.cuh"

namespace host {

unsigned shared_address(const void* pointer);
void ldmatrix(unsigned* registers, int matrices, unsigned address);
// d += a * b of a warp, d and its elements' type as that of `multiply_f16` and the others
void multiply_f16(float* d, const unsigned* a, const unsigned* b);
void multiply_bf16(float* d, const unsigned* a, const unsigned* b);
void multiply_s8(int* d, const unsigned* a, const unsigned* b);
void copy_async(unsigned target, const void* source, int bytes, bool inside);
void copy_async_commit();
void copy_async_wait(int pending);
void load_l2(void* target, const void* source, int bytes);
unsigned short to_f16(float x);
unsigned short to_bf16(float x);
float from_f16(unsigned short bits);

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

template <class T>
inline void load_l2(T (&d)[4], const T* source) {
  host::load_l2(d, source, 16);
}

}  // namespace ptx
