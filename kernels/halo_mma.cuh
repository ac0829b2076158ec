// halo_mma: forward convolution in NHWC for few filters with mma.sync, for sm_75 and newer.
//
// A block brings the halo of its output tile to shared memory, chunk by chunk of channels, together with the chunk's
// weights: each input pixel is fetched once, not once a tap. The 16 rows of a product are 16 output pixels adjacent along W;
// a tap of the filter is another start address in the same halo. A warp owns `rows` output rows of 16 pixels and cta_n
// filters: the fragments of one input row serve every output row that the row meets, R of them with stride 1.
//
// Config:  rows, warps_p, warps_q (warps along H and W), cta_n, chunk_bytes, stages (halos in shared memory), staging
//          (1: cp.async, 0: through registers).
// Problem: the layer's extents, `Element` (f16, bf16, s8), `wide` (offsets beyond 31 bits), and what epilogue.cuh reads.
#pragma once
#include "epilogue.cuh"

template <class Config, class Problem>
struct HaloMma {
  using Element = typename Problem::Element;
  using Output = typename Problem::Output;
  using Accumulator = typename AccumulatorOf<Element>::type;
  using Index = typename IndexOf<Problem::wide>::type;

  static constexpr int rows = Config::rows, cta_n = Config::cta_n, warps = Config::warps_p * Config::warps_q;
  static constexpr int threads = 32 * warps, fragments_n = cta_n / 8;
  static constexpr int tile_p = Config::warps_p * rows, tile_q = Config::warps_q * 16;
  static constexpr int tiles_p = ceil_div(Problem::P, tile_p), tiles_q = ceil_div(Problem::Q, tile_q);
  static constexpr int tiles_n = ceil_div(Problem::K, cta_n);

  static constexpr int row_bytes = Config::chunk_bytes, k_steps = row_bytes / 32;
  static constexpr int chunk_elements = row_bytes / int(sizeof(Element)), chunks = ceil_div(Problem::C, chunk_elements);
  static constexpr int reach_h = (Problem::R - 1) * Problem::dilation_h, reach_w = (Problem::S - 1) * Problem::dilation_w;
  static constexpr int halo_h = (tile_p - 1) * Problem::stride_h + reach_h + 1;
  static constexpr int halo_w = (tile_q - 1) * Problem::stride_w + reach_w + 1;
  static constexpr int weight_rows = Problem::R * Problem::S * cta_n;
  // eight rows are the period of the swizzle: all rows of a halo then lie at constant distances
  static constexpr int pitch = (halo_w + 7) / 8 * 8;
  static constexpr int halo_bytes = halo_h * pitch * row_bytes, stage_bytes = halo_bytes + weight_rows * row_bytes;

  static constexpr int load_bytes = vector_bytes((long long)(Problem::C) * int(sizeof(Element)));
  static constexpr int load_elements = load_bytes / int(sizeof(Element)), columns = row_bytes / load_bytes;
  static constexpr int output_bytes = int(sizeof(Output)), pixel_pitch = cta_n * output_bytes + 16;
  // divides both a pixel's filters and the tile's
  static constexpr int store_bytes =
      vector_bytes((long long)(Problem::K) * output_bytes) < vector_bytes(cta_n * output_bytes)
          ? vector_bytes((long long)(Problem::K) * output_bytes)
          : vector_bytes(cta_n * output_bytes);
  static_assert(row_bytes % 32 == 0 && row_bytes <= 128 && cta_n % 8 == 0, "tile");
  static_assert(Config::staging == 0 || load_bytes >= 4, "staging");

  // Where chunk `chunk` (16 bytes) of row `row` lies: rows that share a bank line get different chunks.
  __device__ static __forceinline__ int swizzled(int row, int chunk) {
    constexpr int chunks_of_row = row_bytes / 16, rows_per_line = 128 / row_bytes;
    return row * row_bytes + ((chunk ^ (row / rows_per_line)) & (chunks_of_row - 1)) * 16;
  }

  template <int bytes>
  __device__ static __forceinline__ void bring(char* shared, int place, const Element* source, bool inside) {
    if constexpr (Config::staging == 1) {
      ptx::cp_async<bytes>(ptx::shared_address(shared) + place, source, inside);
    } else {
      Vector<bytes> v{};
      if (inside) v = *reinterpret_cast<const Vector<bytes>*>(source);
      *reinterpret_cast<Vector<bytes>*>(shared + place) = v;
    }
  }

  // One chunk of channels of the halo and of the weights; what lies outside image or tensor becomes zero.
  __device__ static __forceinline__ void load(char* stage, const Element* image, const Element* filter, int chunk, int h0, int w0,
                                              int n0) {
    const int c0 = chunk * chunk_elements;
#pragma unroll 4
    for (int i = int(threadIdx.x); i < halo_h * halo_w * columns; i += threads) {
      const int pixel = i / columns, column = i % columns, c = c0 + column * load_elements;
      const int y = pixel / halo_w, x = pixel % halo_w, h = h0 + y, w = w0 + x;
      const bool inside = unsigned(h) < unsigned(Problem::H) && unsigned(w) < unsigned(Problem::W) && c < Problem::C;
      const int byte = column * load_bytes;
      bring<load_bytes>(stage, swizzled(y * pitch + x, byte / 16) + byte % 16, image + ((Index(h) * Problem::W + w) * Problem::C + c), inside);
    }
#pragma unroll 4
    for (int i = int(threadIdx.x); i < weight_rows * columns; i += threads) {
      const int row = i / columns, column = i % columns, c = c0 + column * load_elements;
      const int tap = row / cta_n, n = n0 + row % cta_n, byte = column * load_bytes;
      bring<load_bytes>(stage, halo_bytes + swizzled(row, byte / 16) + byte % 16,
                        filter + ((Index(n) * (Problem::R * Problem::S) + tap) * Problem::C + c), n < Problem::K && c < Problem::C);
    }
  }

  // acc += one chunk. For each 32 bytes of channels and filter column: the weights of all R taps, then input row by row.
  // Addresses are few registers and constants: 16-byte chunk 2k + i of a row lies at that of chunk i with 32k flipped, and
  // weights and halo rows begin at multiples of eight rows, the period of the swizzle.
  __device__ static __forceinline__ void multiply(Accumulator (&acc)[rows][fragments_n][4], u32 stage, int warp_p, int warp_q) {
    const int lane = int(threadIdx.x) % 32;
    const int first = warp_p * rows * Problem::stride_h * pitch + (warp_q * 16 + lane % 16) * Problem::stride_w;
    const u32 weights = stage + halo_bytes + swizzled(lane % 8 + lane / 16 * 8, lane / 8 % 2);
    constexpr int unrolled = Problem::S <= 3 ? Problem::S : 1;
#pragma unroll unrolled
    for (int s = 0; s < Problem::S; ++s) {
      const u32 pixels = stage + swizzled(first + s * Problem::dilation_w, lane / 16);
#pragma unroll
      for (int k = 0; k < k_steps; ++k) {
        u32 b[Problem::R][fragments_n][2];
#pragma unroll
        for (int r = 0; r < Problem::R; ++r) {
          const u32 tap = (weights ^ (k * 32)) + (r * Problem::S + s) * cta_n * row_bytes;
          if constexpr (fragments_n % 2 == 0) {
#pragma unroll
            for (int j = 0; j < fragments_n; j += 2) {
              u32 pair[4];
              ptx::ldmatrix_x4(pair, tap + j * 8 * row_bytes);
              b[r][j][0] = pair[0], b[r][j][1] = pair[1], b[r][j + 1][0] = pair[2], b[r][j + 1][1] = pair[3];
            }
          } else {
#pragma unroll
            for (int j = 0; j < fragments_n; ++j) ptx::ldmatrix_x2(b[r][j], tap + j * 8 * row_bytes);
          }
        }
#pragma unroll
        for (int i = 0; i < (rows - 1) * Problem::stride_h + reach_h + 1; ++i) {
          bool met = false;
#pragma unroll
          for (int r = 0; r < Problem::R; ++r) met = met || meets(i, r);
          if (!met) continue;
          u32 a[4];
          ptx::ldmatrix_x4(a, (pixels ^ (k * 32)) + i * pitch * row_bytes);
#pragma unroll
          for (int r = 0; r < Problem::R; ++r)
            if (meets(i, r)) {
              const int o = (i - r * Problem::dilation_h) / Problem::stride_h;
#pragma unroll
              for (int j = 0; j < fragments_n; ++j) ptx::Mma<Element>::run(acc[o][j], a, b[r][j]);
            }
        }
      }
    }
  }

  // Whether input row i of a warp meets an output row with filter row r.
  __host__ __device__ static constexpr bool meets(int i, int r) {
    const int from = i - r * Problem::dilation_h;
    return from >= 0 && from % Problem::stride_h == 0 && from / Problem::stride_h < rows;
  }

  // Finishes the tile, turns it in shared memory, and stores whole pixels of adjacent filters.
  __device__ static __forceinline__ void store(const Accumulator (&acc)[rows][fragments_n][4], char* shared,
                                               const Epilogue<Problem>& epilogue, Output* output, s64 image, int p0, int q0, int n0,
                                               int warp_p, int warp_q) {
    const int lane = int(threadIdx.x) % 32;
#pragma unroll
    for (int j = 0; j < fragments_n; ++j) {
      const int n = j * 8 + lane % 4 * 2;
      const auto of = epilogue.template filters<false, 2>(n0 + n, Problem::K);
#pragma unroll
      for (int o = 0; o < rows; ++o)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = warp_p * rows + o, column = warp_q * 16 + half * 8 + lane / 4, p = p0 + row, q = q0 + column;
          const Accumulator sums[2] = {acc[o][j][half * 2], acc[o][j][half * 2 + 1]};
          Output pair[2];
          epilogue.template finish<Problem::K % 2 == 0>(pair, sums, of, image + (Index(p) * Problem::Q + q) * Problem::K + n0 + n,
                                                        p < Problem::P && q < Problem::Q ? Problem::K - n0 - n : 0);
          Vector<2 * output_bytes> v;
          memcpy(&v, &pair, sizeof v);
          *reinterpret_cast<Vector<2 * output_bytes>*>(shared + (row * tile_q + column) * pixel_pitch + n * output_bytes) = v;
        }
    }
    __syncthreads();
    constexpr int vectors = cta_n * output_bytes / store_bytes, elements = store_bytes / output_bytes;
#pragma unroll 4
    for (int i = int(threadIdx.x); i < tile_p * tile_q * vectors; i += threads) {
      const int pixel = i / vectors, n = i % vectors * elements, p = p0 + pixel / tile_q, q = q0 + pixel % tile_q;
      if (p < Problem::P && q < Problem::Q && n0 + n < Problem::K)
        *reinterpret_cast<Vector<store_bytes>*>(output + image + ((Index(p) * Problem::Q + q) * Problem::K + n0 + n)) =
            *reinterpret_cast<const Vector<store_bytes>*>(shared + pixel * pixel_pitch + n * output_bytes);
    }
  }

  __device__ static __forceinline__ void run(const Element* activation, const Element* filter, Output* output,
                                             const Epilogue<Problem>& epilogue, char* shared) {
    // filters fastest: neighbouring blocks then share a halo in the second-level cache
    const int block = int(blockIdx.x), n0 = block % tiles_n * cta_n, tile = block / tiles_n;
    const int q0 = tile % tiles_q * tile_q, p0 = tile / tiles_q % tiles_p * tile_p, n = tile / (tiles_q * tiles_p);
    const int h0 = p0 * Problem::stride_h - Problem::pad_top, w0 = q0 * Problem::stride_w - Problem::pad_left;
    const Element* const image = activation + s64(n) * Problem::H * Problem::W * Problem::C;
    const int warp = int(threadIdx.x) / 32, warp_p = warp / Config::warps_q, warp_q = warp % Config::warps_q;

    Accumulator acc[rows][fragments_n][4];
#pragma unroll
    for (int o = 0; o < rows; ++o)
#pragma unroll
      for (int j = 0; j < fragments_n; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) acc[o][j][e] = 0;

    constexpr bool overlap = Config::stages == 2;
    auto commit = [] {
      if constexpr (Config::staging == 1) ptx::cp_async_commit();
    };
    load(shared, image, filter, 0, h0, w0, n0);
    commit();
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; ++chunk) {
      const int stage = overlap ? (chunk & 1) * stage_bytes : 0;
      if (overlap && chunk + 1 < chunks) load(shared + (stage ? 0 : stage_bytes), image, filter, chunk + 1, h0, w0, n0);
      commit();
      if constexpr (Config::staging == 1) ptx::cp_async_wait<1>();
      __syncthreads();
      multiply(acc, ptx::shared_address(shared) + stage, warp_p, warp_q);
      __syncthreads();
      if (!overlap && chunk + 1 < chunks) {
        load(shared, image, filter, chunk + 1, h0, w0, n0);
        commit();
      }
    }
    store(acc, shared, epilogue, output, s64(n) * Problem::P * Problem::Q * Problem::K, p0, q0, n0, warp_p, warp_q);
  }
};
