/* What one core of the CPU sustains: independent float32 multiply-adds, and a copy. */

#ifndef vector_bytes /* a value for reading this file by itself */
#define vector_bytes 32
#endif

#define SUMS 12 /* hides a latency of 6 clocks at two multiply-adds a clock, and fits 16 registers */

#ifdef __clang__
#define UNROLL_ALL _Pragma("clang loop unroll(full)")
#else
#define UNROLL_ALL _Pragma("GCC unroll 64")
#endif

typedef __INT64_TYPE__ i64;
typedef float vector __attribute__((vector_size(vector_bytes)));

/* Returns the operations done, a multiply-add counted as two. value: 0.5, where the sums converge to 1. */
i64 multiply_add(i64 iterations, float *value) {
  const vector factor = (vector){0} + *value;
  vector sum[SUMS];
  UNROLL_ALL for (int i = 0; i < SUMS; i++) sum[i] = factor + (float)i;
  for (i64 n = 0; n < iterations; n++) {
    UNROLL_ALL for (int i = 0; i < SUMS; i++) sum[i] = sum[i] * factor + factor;
  }
  UNROLL_ALL for (int i = 1; i < SUMS; i++) sum[0] += sum[i];
  /* stored, so that the loop is not deleted */
  value[1] = sum[0][0];
  return iterations * (2 * SUMS * vector_bytes / 4);
}

/* Returns the bytes moved, read plus write. */
i64 copy(i64 bytes, const char *from, char *to) {
  __builtin_memcpy(to, from, bytes);
  return 2 * bytes;
}
