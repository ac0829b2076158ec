/* What the CPU sustains on all its threads: independent float32 multiply-adds, and a copy larger than its caches. */

#ifndef vector_bytes /* values for reading this file by itself */
#define vector_bytes 32
#define threads 1
#endif

#define SUMS 12 /* hides a latency of up to 6 clocks at two multiply-adds a clock, and fits 16 registers */

typedef __INT64_TYPE__ i64;
typedef float vector __attribute__((vector_size(vector_bytes)));

#ifdef __clang__
#define UNROLL_ALL _Pragma("clang loop unroll(full)")
#else
#define UNROLL_ALL _Pragma("GCC unroll 64")
#endif

/* 2 * SUMS * vector_bytes / 4 operations an iteration and thread; returns them. results: 16 floats a thread. */
i64 multiply_add(i64 iterations, float *results) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int thread = 0; thread < threads; thread++) {
    /* read from memory, so that nothing is known at compile time */
    const vector factor = (vector){0} + results[16 * thread];
    vector sum[SUMS];
    UNROLL_ALL for (int i = 0; i < SUMS; i++) sum[i] = factor + (float)i;
    for (i64 n = 0; n < iterations; n++) {
      UNROLL_ALL for (int i = 0; i < SUMS; i++) sum[i] = sum[i] * factor + factor;
    }
    UNROLL_ALL for (int i = 1; i < SUMS; i++) sum[0] += sum[i];
    results[16 * thread] = sum[0][0];
  }
  return iterations * threads * (2 * SUMS * vector_bytes / 4);
}

/* Each thread copies its part; returns the bytes read and written. */
i64 copy(i64 bytes, const char *from, char *to) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int thread = 0; thread < threads; thread++) {
    const i64 first = bytes / threads * thread, end = thread + 1 < threads ? first + bytes / threads : bytes;
    __builtin_memcpy(to + first, from + first, end - first);
  }
  return 2 * bytes;
}
