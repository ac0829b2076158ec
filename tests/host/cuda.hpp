// The CUDA language for a host compiler: qualifiers, built-in variables and functions; included before a kernel's text.
//
// Kernels are compiled with the compiler's instrumentation of memory accesses (-fsanitize=thread without its library), so
// that the machine sees every access that is not a wrapped instruction.
#pragma once

#define __global__ __attribute__((noinline))
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __grid_constant__
#define __align__(bytes) __attribute__((aligned(bytes)))
// the one storage class that is right both for `extern __shared__ char x[]` and for a block's own variables: all shared
// memory of a kernel is then one thread-local block, which the machine knows as such
#define __shared__ thread_local

namespace host {

struct Index3 {
  unsigned x, y, z;
};

// What the elements of matrix operands are.
enum class Number { f16, bf16, s8 };

void synchronize();
void synchronize_warp(unsigned mask);
unsigned shuffle(unsigned mask, unsigned value, int source_lane);
void fence();
void check_copy(void* target, const void* source, unsigned long bytes);
unsigned atomic_add(void* address, unsigned value);

}  // namespace host

extern "C" {
// constant as a thread sees them
extern const host::Index3 threadIdx, blockIdx, blockDim, gridDim;
}

inline void __syncthreads() { host::synchronize(); }
inline void __syncwarp(unsigned mask = 0xffffffffu) { host::synchronize_warp(mask); }
inline void __threadfence() { host::fence(); }
inline int __shfl_sync(unsigned mask, int value, int lane) { return int(host::shuffle(mask, unsigned(value), lane)); }
inline int __shfl_down_sync(unsigned mask, int value, unsigned delta) {
  const unsigned lane = threadIdx.x % 32;
  return __shfl_sync(mask, value, int(lane + delta < 32 ? lane + delta : lane));
}
inline int atomicAdd(int* address, int value) { return int(host::atomic_add(address, unsigned(value))); }
inline unsigned atomicAdd(unsigned* address, unsigned value) { return host::atomic_add(address, value); }

inline unsigned __float_as_uint(float x) {
  unsigned bits;
  __builtin_memcpy(&bits, &x, 4);
  return bits;
}

inline float __uint_as_float(unsigned bits) {
  float x;
  __builtin_memcpy(&x, &bits, 4);
  return x;
}

inline float __shfl_down_sync(unsigned mask, float value, unsigned delta) {
  return __uint_as_float(unsigned(__shfl_down_sync(mask, int(__float_as_uint(value)), delta)));
}

namespace host {

template <int... places>
struct Places {};
template <int count, int... places>
struct PlacesUpTo : PlacesUpTo<count - 1, count - 1, places...> {};
template <int... places>
struct PlacesUpTo<0, places...> {
  using type = Places<places...>;
};

template <int... places, class... Parameters>
__attribute__((no_sanitize("thread"))) void call(void (*kernel)(Parameters...), void* const* arguments, Places<places...>) {
  kernel(*static_cast<Parameters*>(arguments[places])...);
}

// Calls a kernel with the arguments that lie at these addresses.
template <class... Parameters>
void call(void (*kernel)(Parameters...), void* const* arguments) {
  call(kernel, arguments, typename PlacesUpTo<sizeof...(Parameters)>::type{});
}

}  // namespace host
