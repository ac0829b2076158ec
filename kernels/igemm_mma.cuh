// igemm_mma: forward convolution in NHWC as an implicit matrix product with mma.sync, for sm_75 and newer.
//
// Within a group, gemm_m = N*P*Q output pixels, gemm_n = K/groups filters, gemm_k = R*S*C/groups in the filter's own order
// (r, s, c). A block computes a cta_m x cta_n tile; gemm_k passes through shared memory in slices of cta_k, rows swizzled in
// 16-byte chunks so that ldmatrix has no bank conflicts. Padding and every ragged edge are zeros written on the way in.
//
// Config:  cta_m, cta_n, cta_k, warp_m, warp_n, stages, ahead, staging (0: through registers, 1: cp.async), split_k, raster_group.
// Problem: the layer's extents, `Element` (f16, bf16, s8), `wide` (offsets beyond 31 bits), and what epilogue.cuh reads.
#pragma once
#include "epilogue.cuh"

template <class Config, class Problem>
struct IgemmMma {
  using Element = typename Problem::Element;
  using Output = typename Problem::Output;
  using Accumulator = typename AccumulatorOf<Element>::type;
  using Index = typename IndexOf<Problem::wide>::type;

  static constexpr int cta_m = Config::cta_m, cta_n = Config::cta_n, cta_k = Config::cta_k;
  static constexpr int warps_m = cta_m / Config::warp_m, warps_n = cta_n / Config::warp_n;
  static constexpr int threads = 32 * warps_m * warps_n;
  static constexpr int fragments_m = Config::warp_m / 16, fragments_n = Config::warp_n / 8;

  static constexpr int channels = Problem::C / Problem::groups, filters = Problem::K / Problem::groups;
  static constexpr Index gemm_m = Index(Problem::N) * Problem::P * Problem::Q;
  static constexpr int gemm_k = Problem::R * Problem::S * channels;
  static constexpr int tiles_n = ceil_div(filters, cta_n), slices = ceil_div(gemm_k, cta_k);
  static constexpr Index tiles_m = (gemm_m + cta_m - 1) / cta_m;
  static constexpr int slices_per_split = ceil_div(slices, Config::split_k);

  static constexpr int row_bytes = cta_k * int(sizeof(Element)), k_steps = row_bytes / 32;
  static constexpr int stage_bytes = (cta_m + cta_n) * row_bytes;
  // one vector of a slice's row is read at once: it lies within one tap, since its size divides the channels' bytes
  static constexpr int load_bytes = vector_bytes(channels * int(sizeof(Element)));
  static constexpr int load_elements = load_bytes / int(sizeof(Element));
  static constexpr int columns = row_bytes / load_bytes, rows_per_pass = threads / columns;
  static constexpr int passes_a = ceil_div(cta_m, rows_per_pass), passes_b = ceil_div(cta_n, rows_per_pass);
  static constexpr int passes = passes_a + passes_b;

  static constexpr bool ahead = Config::ahead;

  static constexpr int output_bytes = int(sizeof(Output));
  static constexpr int tile_pitch = cta_n * output_bytes + 16;  // 16 more: rows start in different banks
  static constexpr int store_bytes = vector_bytes(filters * output_bytes) < cta_n * output_bytes
                                         ? vector_bytes(filters * output_bytes)
                                         : vector_bytes(cta_n * output_bytes);
  // one word a row tells which taps lie inside the image; the tap with both top bits would read as `none`
  static constexpr bool masked = Problem::R < 16 && Problem::S < 16;

  static_assert(cta_m % Config::warp_m == 0 && cta_n % Config::warp_n == 0, "warps");
  static_assert(threads % columns == 0 && cta_k % load_elements == 0 && row_bytes % 32 == 0 && row_bytes <= 128, "tile");
  static_assert(Config::staging == 0 ? Config::stages == 2 : load_bytes >= 4, "staging");

  // Where chunk `chunk` (16 bytes) of row `row` lies in a slice: rows that share a bank line get different chunks.
  __device__ static __forceinline__ int swizzled(int row, int chunk) {
    constexpr int chunks = row_bytes / 16, rows_per_line = 128 / row_bytes;
    return row * row_bytes + ((chunk ^ (row / rows_per_line)) & (chunks - 1)) * 16;
  }

  // Brings slices of the activation and the filter into shared memory; each thread serves one column of each slice.
  struct Loader {
    const Element* activation;
    const Element* filter;       // at this thread's first row and column
    Index pixel[passes_a];       // offset of the tap (0, 0) of this thread's rows
    u32 taps[masked ? passes_a : 1];        // bit r and bit 16 + s: whether filter row r and column s fall inside the image
    int top[masked ? 1 : passes_a], left[masked ? 1 : passes_a];  // image row and column of the tap (0, 0)
    int k, k_end, r, s, c;       // position of this thread's column in gemm_k
    int filters_left;            // filters from this thread's first row on
    int place_a, place_b;        // of the first row served, when the others lie at constant distances

    __device__ Loader(const Element* activation_, const Element* filter_, Index m0, int n0, int group, int first_slice, int count) {
      const int column = int(threadIdx.x) % columns, row = int(threadIdx.x) / columns;
      activation = activation_ + group * channels;
      k = first_slice * cta_k + column * load_elements;
      k_end = (first_slice + count) * cta_k < gemm_k ? (first_slice + count) * cta_k : gemm_k;
      filter = filter_ + (Index(group) * filters + n0 + row) * gemm_k + k;
      filters_left = filters - n0 - row;
#pragma unroll
      for (int i = 0; i < passes_a; ++i) {
        const Index m = m0 + row + i * rows_per_pass;
        const Index image = m / (Problem::P * Problem::Q);
        const int position = int(m - image * (Problem::P * Problem::Q));
        const int p = position / Problem::Q, q = position % Problem::Q;
        const int h = p * Problem::stride_h - Problem::pad_top, w = q * Problem::stride_w - Problem::pad_left;
        pixel[i] = ((image * Problem::H + h) * Problem::W + w) * Problem::C;
        // no tap of a row beyond the last pixel is inside
        const bool present = m < gemm_m && (cta_m % rows_per_pass == 0 || row + i * rows_per_pass < cta_m);
        if constexpr (masked) {
          taps[i] = 0;
#pragma unroll
          for (int y = 0; y < Problem::R; ++y)
            taps[i] |= u32(present && unsigned(h + y * Problem::dilation_h) < unsigned(Problem::H)) << y;
#pragma unroll
          for (int x = 0; x < Problem::S; ++x) taps[i] |= u32(unsigned(w + x * Problem::dilation_w) < unsigned(Problem::W)) << (16 + x);
        } else {
          top[i] = present ? h : -(1 << 30);
          left[i] = w;
        }
      }
      const int chunk = column * load_bytes / 16, within = column * load_bytes % 16;
      place_a = swizzled(row, chunk) + within;
      place_b = cta_m * row_bytes + place_a;
      locate();
    }

    __device__ __forceinline__ void locate() {
      const int tap = k / channels;
      c = k - tap * channels;
      r = tap / Problem::S;
      s = tap - r * Problem::S;
    }

    __device__ __forceinline__ void advance() {
      k += cta_k;
      filter += cta_k;
      if constexpr (channels >= cta_k) {
        c += cta_k;
        if (c >= channels) {
          c -= channels;
          if (++s == Problem::S) {
            s = 0;
            ++r;
          }
        }
      } else {
        locate();
      }
    }

    // Rows of later passes: at a constant distance where a pass is a whole number of swizzle periods.
    __device__ __forceinline__ int later(int i) const {
      if constexpr (rows_per_pass % 8 == 0) return i * rows_per_pass * row_bytes;
      const int column = int(threadIdx.x) % columns, row = int(threadIdx.x) / columns, chunk = column * load_bytes / 16;
      return swizzled(row + i * rows_per_pass, chunk) - swizzled(row, chunk);
    }

    // Calls visit(index, source, inside, place in the slice) for this thread's vectors of the current slice, portion
    // `portion` of `portions` of them. The source is valid only where it is inside.
    template <int portions, class Visit>
    __device__ __forceinline__ void each(int portion, Visit visit) const {
      const Element* const at = activation + ((Index(r * Problem::dilation_h) * Problem::W + s * Problem::dilation_w) * Problem::C + c);
      const u32 tap = k < k_end ? 1u << (r & 15) | 0x10000u << (s & 15) : 0xffffffffu;
#pragma unroll
      for (int i = 0; i < passes; ++i) {
        if (i * portions / passes != portion) continue;
        if (i < passes_a) {
          bool in;
          if constexpr (masked)
            in = (taps[i] & tap) == tap;
          else
            in = k < k_end && unsigned(top[i] + r * Problem::dilation_h) < unsigned(Problem::H) &&
                 unsigned(left[i] + s * Problem::dilation_w) < unsigned(Problem::W);
          if (cta_m % rows_per_pass && int(threadIdx.x) / columns + i * rows_per_pass >= cta_m) continue;
          visit(i, at + pixel[i], in, place_a + later(i));
        } else {
          const int n = (i - passes_a) * rows_per_pass;
          if (cta_n % rows_per_pass && int(threadIdx.x) / columns + n >= cta_n) continue;
          const bool in = k < k_end && (filters % cta_n == 0 || n < filters_left);
          visit(i, filter + Index(n) * gemm_k, in, place_b + later(i - passes_a));
        }
      }
    }
  };

  // A warp's operands of one step: 32 bytes of gemm_k.
  struct Fragments {
    u32 a[fragments_m][4], b[fragments_n][2];

    __device__ __forceinline__ void fetch(u32 slice, int step, int warp_row, int warp_column) {
      const int lane = int(threadIdx.x) % 32;
#pragma unroll
      for (int i = 0; i < fragments_m; ++i)
        ptx::ldmatrix_x4(a[i], slice + swizzled(warp_row + i * 16 + lane % 16, step * 2 + lane / 16));
      const u32 filters_slice = slice + cta_m * row_bytes;
      if constexpr (fragments_n % 2 == 0) {
#pragma unroll
        for (int j = 0; j < fragments_n; j += 2) {
          u32 pair[4];
          const int row = warp_column + j * 8 + lane % 8 + lane / 16 * 8;
          ptx::ldmatrix_x4(pair, filters_slice + swizzled(row, step * 2 + lane / 8 % 2));
          b[j][0] = pair[0], b[j][1] = pair[1], b[j + 1][0] = pair[2], b[j + 1][1] = pair[3];
        }
      } else {
#pragma unroll
        for (int j = 0; j < fragments_n; ++j)
          ptx::ldmatrix_x2(b[j], filters_slice + swizzled(warp_column + j * 8 + lane % 8, step * 2 + lane / 8 % 2));
      }
    }

    __device__ __forceinline__ void multiply(Accumulator (&acc)[fragments_m][fragments_n][4]) const {
#pragma unroll
      for (int i = 0; i < fragments_m; ++i)
#pragma unroll
        for (int j = 0; j < fragments_n; ++j) ptx::Mma<Element>::run(acc[i][j], a[i], b[j]);
    }
  };

  // acc += `count` slices. Within a step, copies of a later slice are started, the next step's fragments are read (`ahead`:
  // also across the boundary of slices), and the present fragments are multiplied. `start(portion, i)` starts one of k_steps
  // portions of the copies that belong to slice i's iteration, `arrive()` waits until the next slice is in shared memory,
  // `slice_at(i)` is where slice i lies.
  template <class Start, class Arrive, class SliceAt>
  __device__ static __forceinline__ void accumulate(Accumulator (&acc)[fragments_m][fragments_n][4], int count, int warp_row,
                                                    int warp_column, Start start, Arrive arrive, SliceAt slice_at) {
    Fragments fragments[2];
    if (ahead) fragments[0].fetch(slice_at(0), 0, warp_row, warp_column);
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      if (!ahead) fragments[0].fetch(slice_at(i), 0, warp_row, warp_column);
#pragma unroll
      for (int step = 0; step < k_steps; ++step) {
        start(step, i);
        if (step + 1 < k_steps) {
          fragments[(step + 1) & 1].fetch(slice_at(i), step + 1, warp_row, warp_column);
        } else if (ahead) {
          arrive(i);
          // beyond the last slice: read and not used
          fragments[(step + 1) & 1].fetch(slice_at(i + 1), 0, warp_row, warp_column);
        }
        fragments[step & 1].multiply(acc);
      }
      if (!ahead) arrive(i);
      if (ahead && k_steps % 2) fragments[0] = fragments[1];
    }
  }

  // Adds up the partial sums of a tile's splits, in the order of the splits, in the block that arrives last.
  __device__ static __forceinline__ bool reduce(Accumulator (&acc)[fragments_m][fragments_n][4], void* workspace, Index tile,
                                                Index tiles, int split) {
    __shared__ bool last;
    int* const counter = static_cast<int*>(workspace) + tile;
    Accumulator* const partial =
        reinterpret_cast<Accumulator*>(static_cast<char*>(workspace) + (tiles * 4 + 255) / 256 * 256) + threadIdx.x * 4;
    constexpr s64 split_elements = s64(cta_m) * cta_n;
    Accumulator* const mine = partial + (s64(tile) * Config::split_k + split) * split_elements;
#pragma unroll
    for (int i = 0; i < fragments_m; ++i)
#pragma unroll
      for (int j = 0; j < fragments_n; ++j) {
        Vector<16> v;
        memcpy(&v, acc[i][j], 16);
        *reinterpret_cast<Vector<16>*>(mine + (i * fragments_n + j) * threads * 4) = v;
      }
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) last = atomicAdd(counter, 1) == Config::split_k - 1;
    __syncthreads();
    if (!last) return false;
    __threadfence();
    if (threadIdx.x == 0) *counter = 0;
#pragma unroll
    for (int i = 0; i < fragments_m; ++i)
#pragma unroll
      for (int j = 0; j < fragments_n; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) acc[i][j][e] = 0;
        for (int z = 0; z < Config::split_k; ++z) {
          Accumulator part[4];
          ptx::load_l2(part, partial + (s64(tile) * Config::split_k + z) * split_elements + (i * fragments_n + j) * threads * 4);
#pragma unroll
          for (int e = 0; e < 4; ++e) acc[i][j][e] += part[e];
        }
      }
    return true;
  }

  // Finishes the tile, turns it in shared memory, and stores whole rows of adjacent filters.
  __device__ static __forceinline__ void store(const Accumulator (&acc)[fragments_m][fragments_n][4], char* shared,
                                               const Epilogue<Problem>& epilogue, Output* output, Index m0, int n0, int group,
                                               int warp_row, int warp_column) {
    const int lane = int(threadIdx.x) % 32;
#pragma unroll
    for (int j = 0; j < fragments_n; ++j) {
      const int column = warp_column + j * 8 + lane % 4 * 2, n = n0 + column, present = filters - n;
      const auto of = epilogue.template filters<false, 2>(group * filters + n, (group + 1) * filters);
#pragma unroll
      for (int i = 0; i < fragments_m; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = warp_row + i * 16 + half * 8 + lane / 4;
          const Accumulator sums[2] = {acc[i][j][half * 2], acc[i][j][half * 2 + 1]};
          Output pair[2];
          epilogue.template finish<filters % 2 == 0>(pair, sums, of, (m0 + row) * Problem::K + group * filters + n,
                                                     m0 + row < gemm_m ? present : 0);
          Vector<2 * output_bytes> v;
          memcpy(&v, &pair, sizeof v);
          *reinterpret_cast<Vector<2 * output_bytes>*>(shared + row * tile_pitch + column * output_bytes) = v;
        }
    }
    __syncthreads();
    constexpr int vectors = cta_n * output_bytes / store_bytes, elements = store_bytes / output_bytes;
#pragma unroll 4
    for (int i = int(threadIdx.x); i < cta_m * vectors; i += threads) {
      const int row = i / vectors, column = i % vectors * elements;
      if (m0 + row < gemm_m && n0 + column < filters) {
        Output* const target = output + ((m0 + row) * Problem::K + group * filters + n0 + column);
        *reinterpret_cast<Vector<store_bytes>*>(target) =
            *reinterpret_cast<const Vector<store_bytes>*>(shared + row * tile_pitch + column * output_bytes);
      }
    }
  }

  __device__ static __forceinline__ void run(const Element* activation, const Element* filter, Output* output, void* workspace,
                                             const Epilogue<Problem>& epilogue, char* shared) {
    // block -> (group, tile_m, tile_n, split): raster_group rows of tiles are walked column by column
    const Index per_group = tiles_m * tiles_n;
    const Index block = Index(blockIdx.x) / Config::split_k;
    const int split = int(blockIdx.x) % Config::split_k;
    const int group = int(block / per_group);
    const Index in_group = block % per_group;
    const Index band = in_group / (Config::raster_group * tiles_n), first = band * Config::raster_group;
    const int height = tiles_m - first < Config::raster_group ? int(tiles_m - first) : Config::raster_group;
    const int in_band = int(in_group - band * (Config::raster_group * tiles_n));
    const Index m0 = (first + in_band % height) * cta_m;
    const int n0 = in_band / height * cta_n;

    const int first_slice = split * slices_per_split;
    const int count = slices - first_slice < slices_per_split ? slices - first_slice : slices_per_split;
    const int warp = int(threadIdx.x) / 32;
    const int warp_row = warp % warps_m * Config::warp_m, warp_column = warp / warps_m * Config::warp_n;
    const u32 base = ptx::shared_address(shared);

    Loader loader(activation, filter, m0, n0, group, first_slice, count);
    Accumulator acc[fragments_m][fragments_n][4];
#pragma unroll
    for (int i = 0; i < fragments_m; ++i)
#pragma unroll
      for (int j = 0; j < fragments_n; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) acc[i][j][e] = 0;

    if constexpr (Config::staging == 1) {
      u32 read = base, write = base;
      auto copy = [&](int, const Element* source, bool in, int place) {
        ptx::cp_async<load_bytes>(write + place, source, in);
      };
#pragma unroll
      for (int i = 0; i < Config::stages - 1; ++i) {
        loader.template each<1>(0, copy);
        loader.advance();
        write += stage_bytes;
        ptx::cp_async_commit();
      }
      ptx::cp_async_wait<Config::stages - 2>();
      __syncthreads();
      constexpr u32 end = Config::stages * stage_bytes;
      auto following = [&](u32 slice) { return slice + stage_bytes == base + end ? base : slice + stage_bytes; };
      accumulate(
          acc, count, warp_row, warp_column,
          // beyond the last slice nothing is read and zeros are written
          [&](int portion, int) { loader.template each<k_steps>(portion, copy); },
          [&](int) {
            loader.advance();
            ptx::cp_async_commit();
            ptx::cp_async_wait<Config::stages - 2>();
            __syncthreads();
            read = following(read);
            write = following(write);
          },
          [&](int) { return read; });
      ptx::cp_async_wait<0>();
    } else {
      Vector<load_bytes> held[passes];
      auto fetch = [&] {
        loader.template each<1>(0, [&](int i, const Element* source, bool in, int) {
          Vector<load_bytes> v{};
          if (in) v = *reinterpret_cast<const Vector<load_bytes>*>(source);
          held[i] = v;
        });
      };
      auto deposit = [&](int stage) {
        loader.template each<1>(0, [&](int i, const Element*, bool, int place) {
          *reinterpret_cast<Vector<load_bytes>*>(shared + stage * stage_bytes + place) = held[i];
        });
      };
      fetch();
      deposit(0);
      __syncthreads();
      accumulate(
          acc, count, warp_row, warp_column,
          [&](int portion, int i) {
            if (portion == 0 && i + 1 < count) {
              loader.advance();
              fetch();
            }
          },
          [&](int i) {
            if (i + 1 < count) deposit((i + 1) & 1);
            __syncthreads();
          },
          [&](int i) { return base + (i & 1) * stage_bytes; });
    }
    if constexpr (Config::split_k > 1) {
      const Index tiles = per_group * Problem::groups;
      if (!reduce(acc, workspace, block, tiles, split)) return;
    }
    __syncthreads();
    store(acc, shared, epilogue, output, m0, n0, group, warp_row, warp_column);
  }
};
