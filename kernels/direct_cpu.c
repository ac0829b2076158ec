/* float32 convolution in NHWC on the CPU: register tiles of `pixels` outputs of a row by `k_vectors` filter vectors.
 *
 * The including source defines the layer (N C H W K R S P Q, strides, ...), the knobs of families/direct_cpu.py by the
 * same names, `threads`, and `row_pixels`, the outputs of a row that one task computes. Filters (KRSC) are transposed
 * into the workspace first; a task then takes some output rows and some tiles of filters. Where filters reach beyond the
 * sides of the image, a task computes from a padded copy of its input rows in the workspace, so that all tiles run the
 * same loop and nothing outside the activation is read. The epilogue (problem.Epilogue) is applied where the sum over all
 * channels is stored. No header is included: names like N and C are macros here.
 */

#ifndef lanes /* values for reading this file by itself */
#define N 16
#define C 64
#define H 92
#define W 160
#define K 32
#define R 3
#define S 3
#define P 92
#define Q 160
#define stride_h 1
#define stride_w 1
#define padding_top 1
#define padding_left 1
#define dilation_h 1
#define dilation_w 1
#define groups 1
#define pixels 14
#define k_vectors 2
#define lanes 8
#define c_block 0
#define rows 4
#define k_tiles 0
#define threads 1
#define row_pixels Q
#define scale_mode 0 /* 1: one scale, 2: one of each filter */
#define has_bias 0
#define has_residual 0
#define activated activated_identity
#define has_epilogue 0
#define epilogue_parameters
#define epilogue_operands {0}
#endif

#ifdef __clang__
#define UNROLL_ALL _Pragma("clang loop unroll(full)")
#define UNROLL_4 _Pragma("clang loop unroll_count(4)")
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define UNROLL_ALL _Pragma("GCC unroll 64")
#define UNROLL_4 _Pragma("GCC unroll 4")
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (quad_index){__VA_ARGS__})
#endif
#define INLINE static inline __attribute__((always_inline))

typedef __INT64_TYPE__ i64; /* tensors pass 2^31 elements */
typedef float vector __attribute__((vector_size(lanes * 4)));
typedef float quad __attribute__((vector_size(16)));
typedef int lane_index __attribute__((vector_size(lanes * 4)));
typedef int quad_index __attribute__((vector_size(16)));

#ifdef _OPENMP
int omp_get_thread_num(void);
#else
static int omp_get_thread_num(void) { return 0; }
#endif

/* one filter a channel: lanes run over channels, as if there were one group */
#define DEPTHWISE (groups > 1 && groups == C && groups == K)
#define K_GROUPS (DEPTHWISE ? 1 : groups)
#define GROUP_C (C / groups)
#define GROUP_K (K / K_GROUPS)
#define TAPS (R * S * GROUP_C)

/* a group's filters in tiles of k_vectors vectors; the last tile may have fewer vectors, its last vector fewer lanes */
#define TILE_K (k_vectors * lanes)
#define FULL_TILES (GROUP_K / TILE_K)
#define TAIL_K (GROUP_K % TILE_K)
#define TAIL_VECTORS ((TAIL_K + lanes - 1) / lanes)
#define TILES (FULL_TILES + (TAIL_K > 0))
#define GROUP_PACKED ((i64)(FULL_TILES * k_vectors + TAIL_VECTORS) * lanes * TAPS)

/* the taps of one filter row lie one after another in memory, so that one loop can run over (s, c) */
#define FOLDED (c_block == 0 && dilation_w == 1 && groups == 1)
#define BLOCK_C (c_block ? c_block : GROUP_C)

/* the input that a task's rows need; staged where it reaches beyond the sides of the image */
#define TASK_ROWS (rows < P ? rows : P)
#define IN_ROWS ((TASK_ROWS - 1) * stride_h + (R - 1) * dilation_h + 1)
#define IN_W ((i64)(Q - 1) * stride_w + (S - 1) * dilation_w + 1)
#define STAGED (padding_left > 0 || IN_W > W)

#define PACK_TAPS 64
#define PACK_BLOCKS ((TAPS + PACK_TAPS - 1) / PACK_TAPS)

INLINE i64 smaller(i64 a, i64 b) { return a < b ? a : b; }
INLINE i64 larger(i64 a, i64 b) { return a > b ? a : b; }

INLINE vector load(const float *from, const int count) {
  vector v = {0};
  __builtin_memcpy(&v, from, count * sizeof(float));
  return v;
}

/* Activations, by the names in problem.ACTIVATIONS; NaN stays NaN. */
INLINE vector activated_identity(vector v) { return v; }
INLINE vector activated_relu(vector v) { return (vector)((lane_index)v & ~(v < (vector){0})); }

INLINE quad load_quad(const float *from) {
  quad v;
  __builtin_memcpy(&v, from, sizeof v);
  return v;
}

/* Transposes up to PACK_TAPS taps of one tile of filters, [filter][tap] to [tap][filter]; missing filters are zero. */
static void pack(const float *filter, float *packed, i64 index) {
  const i64 block = index % PACK_BLOCKS, t = index / PACK_BLOCKS % TILES, g = index / PACK_BLOCKS / TILES;
  const i64 first = block * PACK_TAPS, end = smaller(TAPS, first + PACK_TAPS);
  const int filters = t < FULL_TILES ? TILE_K : TAIL_K, width = t < FULL_TILES ? TILE_K : TAIL_VECTORS * lanes;
  const float *from = filter + (g * GROUP_K + t * TILE_K) * TAPS;
  float *to = packed + g * GROUP_PACKED + t * TILE_K * TAPS;
  for (i64 k = 0; k < width; k += 4) {
    i64 tap = first;
    if (k + 4 <= filters)
      for (; tap + 4 <= end; tap += 4) {
        const quad a = load_quad(from + k * TAPS + tap), b = load_quad(from + (k + 1) * TAPS + tap);
        const quad c = load_quad(from + (k + 2) * TAPS + tap), d = load_quad(from + (k + 3) * TAPS + tap);
        const quad ab_low = SHUFFLE(a, b, 0, 4, 1, 5), ab_high = SHUFFLE(a, b, 2, 6, 3, 7);
        const quad cd_low = SHUFFLE(c, d, 0, 4, 1, 5), cd_high = SHUFFLE(c, d, 2, 6, 3, 7);
        *(quad *)(to + tap * width + k) = SHUFFLE(ab_low, cd_low, 0, 1, 4, 5);
        *(quad *)(to + (tap + 1) * width + k) = SHUFFLE(ab_low, cd_low, 2, 3, 6, 7);
        *(quad *)(to + (tap + 2) * width + k) = SHUFFLE(ab_high, cd_high, 0, 1, 4, 5);
        *(quad *)(to + (tap + 3) * width + k) = SHUFFLE(ab_high, cd_high, 2, 3, 6, 7);
      }
    for (; tap < end; tap++)
      for (i64 j = k; j < k + 4; j++) to[tap * width + j] = j < filters ? from[j * TAPS + tap] : 0;
  }
}

/* Copies the input rows, from row h0 on, that `count` output rows need, between zeros for the padding at the sides. */
static void stage(const float *image, float *staged, i64 h0, i64 count) {
  const i64 end = smaller(H, h0 + (count - 1) * stride_h + (R - 1) * dilation_h + 1);
  const i64 before = smaller(padding_left, IN_W), copied = smaller(W, IN_W - before);
  for (i64 h = larger(0, h0); h < end; h++) {
    int used = 0;
    for (int r = 0; r < R; r++) {
      const i64 d = h - h0 - (i64)r * dilation_h;
      used |= d >= 0 && d % stride_h == 0 && d / stride_h < count;
    }
    if (!used) continue;
    float *to = staged + (h - h0) * IN_W * C;
    __builtin_memset(to, 0, before * C * sizeof(float));
    __builtin_memcpy(to + before * C, image + h * W * C, copied * C * sizeof(float));
    __builtin_memset(to + (before + copied) * C, 0, (IN_W - before - copied) * C * sizeof(float));
  }
}

/* What the epilogue reads; 0 for what it does not. */
typedef struct {
  const float *scale, *bias, *residual;
} Operands;

/* What the tiles of one row have in common. x: the row's first input at tap r = 0, of which rows r0..r1 exist. */
typedef struct {
  const float *x, *packed;
  float *y;
  Operands epilogue; /* from this row's first filter and output on */
  i64 pitch; /* elements from one input row to the next */
  i64 count; /* outputs */
  int r0, r1;
  int channels; /* of this c_block */
} Row;

/* The epilogue of one vector: filters b * lanes ... of pixel u, which are `count`. */
INLINE vector finished(vector sum, Row row, i64 u, const int b, const int count) {
  if (scale_mode == 1) sum *= *row.epilogue.scale;
  if (scale_mode == 2) sum *= load(row.epilogue.scale + b * lanes, count);
  if (has_bias) sum += load(row.epilogue.bias + b * lanes, count);
  if (has_residual) sum += load(row.epilogue.residual + u * K + b * lanes, count);
  return activated(sum);
}

/* n_pixels outputs from the q-th on; all but row and q are constants once inlined, so that sum stays in registers. A
 * block of channels that is not the first adds to the output, the final one applies the epilogue. */
INLINE void tile(const int n_pixels, const int n_vectors, const int last, const int first, const int final, Row row, i64 q) {
  vector sum[pixels][k_vectors];
  float *y = row.y + q * K;
  const float *x = row.x + q * stride_w * C;
  UNROLL_ALL for (int u = 0; u < n_pixels; u++)
    UNROLL_ALL for (int b = 0; b < n_vectors; b++)
      sum[u][b] = first ? (vector){0} : load(y + (i64)u * K + b * lanes, b == n_vectors - 1 ? last : lanes);
  for (int r = row.r0; r < row.r1; r++)
    for (int s = 0; s < (FOLDED ? 1 : S); s++) {
      /* else compilers keep in registers what two taps read, and spill sums for it: up to 2x slower (gcc 12, AVX-512) */
      if (!DEPTHWISE && !FOLDED) __asm__ volatile("" ::: "memory");
      const float *xs = x + (i64)r * dilation_h * row.pitch + (i64)s * dilation_w * C;
      const float *f = row.packed + ((i64)r * S + s) * GROUP_C * n_vectors * lanes;
      UNROLL_4 for (int c = 0; c < (DEPTHWISE ? 1 : FOLDED ? S * C : row.channels); c++) {
        vector fs[k_vectors];
        UNROLL_ALL for (int b = 0; b < n_vectors; b++) fs[b] = *(const vector *)(f + ((i64)c * n_vectors + b) * lanes);
        UNROLL_ALL for (int u = 0; u < n_pixels; u++) {
          const float *xu = xs + (i64)u * stride_w * C + c;
          UNROLL_ALL for (int b = 0; b < n_vectors; b++)
            if (DEPTHWISE)
              sum[u][b] += fs[b] * load(xu + b * lanes, b == n_vectors - 1 ? last : lanes);
            else
              sum[u][b] += fs[b] * *xu;
        }
      }
    }
  UNROLL_ALL for (int u = 0; u < n_pixels; u++)
    UNROLL_ALL for (int b = 0; b < n_vectors; b++) {
      const int count = b == n_vectors - 1 ? last : lanes;
      if (final) sum[u][b] = finished(sum[u][b], row, q + u, b, count);
      __builtin_memcpy(y + (i64)u * K + b * lanes, &sum[u][b], count * sizeof(float));
    }
}

INLINE void tiles(const int n_vectors, const int last, const int first, const int final, Row row) {
  i64 q = 0;
  for (; q + pixels <= row.count; q += pixels) tile(pixels, n_vectors, last, first, final, row, q);
  /* row_pixels is Q or a multiple of pixels */
  if (Q % pixels && q < row.count) tile(Q % pixels, n_vectors, last, first, final, row, q);
}

/* One row, one tile of filters, one block of channels; a tile's code is made for the blocks that there are. */
INLINE void blocks(const int n_vectors, const int last, Row row, int is_first, int is_final) {
  if (!c_block)
    tiles(n_vectors, last, 1, 1, row);
  else if (is_first)
    tiles(n_vectors, last, 1, 0, row);
  else if (has_epilogue && is_final)
    tiles(n_vectors, last, 0, 1, row);
  else
    tiles(n_vectors, last, 0, 0, row);
}

static void compute(Row row, int is_tail, int is_first, int is_final) {
  if (TAIL_K && is_tail)
    blocks(TAIL_VECTORS, TAIL_K - (TAIL_VECTORS - 1) * lanes, row, is_first, is_final);
  else if (FULL_TILES)
    blocks(k_vectors, lanes, row, is_first, is_final);
}

/* Output rows p0..p1 of image n, outputs q0..q1 of each, tiles of filters t0..t1 (counted through the groups). */
static void task(const float *activation, const float *packed, float *staged, float *output, Operands epilogue, i64 n,
                 i64 p0, i64 p1, i64 q0, i64 q1, i64 t0, i64 t1) {
  const float *image = activation + n * H * W * C;
  const i64 h0 = p0 * stride_h - padding_top;
  if (STAGED) stage(image, staged, h0, p1 - p0);
  for (int c0 = 0; c0 < GROUP_C; c0 += BLOCK_C)
    for (i64 t = t0; t < t1; t++) {
      const i64 g = t / TILES, k0 = t % TILES * TILE_K;
      const int is_tail = t % TILES == FULL_TILES, width = is_tail ? TAIL_VECTORS * lanes : TILE_K;
      for (i64 p = p0; p < p1; p++) {
        const i64 h = p * stride_h - padding_top;
        const i64 from = STAGED ? (h - h0) * IN_W : h * W + q0 * stride_w;
        const i64 k = g * GROUP_K + k0, to = ((n * P + p) * Q + q0) * K + k;
        Row row = {
            .x = (STAGED ? staged : image) + from * C + (DEPTHWISE ? k0 : g * GROUP_C + c0),
            .packed = packed + g * GROUP_PACKED + k0 * TAPS + (i64)c0 * width,
            .y = output + to,
            .epilogue = {.scale = scale_mode == 2 ? epilogue.scale + k : epilogue.scale,
                         .bias = has_bias ? epilogue.bias + k : 0,
                         .residual = has_residual ? epilogue.residual + to : 0},
            .pitch = (STAGED ? IN_W : W) * (i64)C,
            .count = q1 - q0,
            .r0 = 0,
            .r1 = R,
            .channels = smaller(BLOCK_C, GROUP_C - c0),
        };
        while (row.r0 < R && h + (i64)row.r0 * dilation_h < 0) row.r0++;
        while (row.r1 > row.r0 && h + (i64)(row.r1 - 1) * dilation_h >= H) row.r1--;
        compute(row, is_tail, c0 == 0, c0 + BLOCK_C >= GROUP_C);
      }
    }
}

/* the operands that the epilogue reads follow, in the launch's order */
void direct_cpu(const float *activation, const float *filter, float *output, float *workspace epilogue_parameters) {
  const Operands epilogue = epilogue_operands;
  const i64 all = (i64)K_GROUPS * TILES, per_task = k_tiles ? k_tiles : all;
  const i64 t_tasks = (all + per_task - 1) / per_task, p_tasks = (P + TASK_ROWS - 1) / TASK_ROWS;
  const i64 q_tasks = (Q + row_pixels - 1) / row_pixels;
#pragma omp parallel num_threads(threads)
  {
#pragma omp for schedule(static)
    for (i64 index = 0; index < all * PACK_BLOCKS; index++) pack(filter, workspace, index);
    float *staged = workspace + K_GROUPS * GROUP_PACKED + omp_get_thread_num() * IN_ROWS * IN_W * C;
    /* dynamic: a core that is busy elsewhere takes fewer tasks */
#pragma omp for schedule(dynamic)
    for (i64 index = 0; index < N * p_tasks * q_tasks * t_tasks; index++) {
      const i64 t0 = index % t_tasks * per_task, q0 = index / t_tasks % q_tasks * row_pixels;
      const i64 p0 = index / t_tasks / q_tasks % p_tasks * TASK_ROWS, n = index / t_tasks / q_tasks / p_tasks;
      const i64 p1 = smaller(P, p0 + TASK_ROWS), q1 = smaller(Q, q0 + row_pixels), t1 = smaller(all, t0 + per_task);
      task(activation, workspace, staged, output, epilogue, n, p0, p1, q0, q1, t0, t1);
    }
  }
}
