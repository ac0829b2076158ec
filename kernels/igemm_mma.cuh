// igemm_mma: forward convolution in NHWC as an implicit matrix product with mma.sync, for sm_75 and newer.
//
// Within a group, gemm_m = N*P*Q output pixels, gemm_n = K/groups filters, gemm_k = R*S*C/groups in the filter's own order
// (r, s, c). A block computes a cta_m x cta_n tile; gemm_k passes through shared memory in slices of cta_k, rows swizzled in
// 16-byte chunks so that ldmatrix has no bank conflicts. Padding and every ragged edge are zeros written on the way in.
//
// Config:  cta_m, cta_n, cta_k, warp_m, warp_n, stages, staging (1: cp.async, 0: through registers), split_k, raster_group.
// Problem: the layer's extents, `Element` (f16, bf16, s8), `Output`, and `wide` (offsets beyond 31 bits).
#pragma once
#include "epilogue.cuh"

template <class Config, class Problem>
struct IgemmMma {
  using Element = typename Problem::Element;
  using Output = typename Problem::Output;
  using Accumulator = typename AccumulatorOf<Element>::type;
  template <bool wide, class Unused = void>
  struct IndexOf {
    using type = int;
  };
  template <class Unused>
  struct IndexOf<true, Unused> {
    using type = s64;
  };
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

  static constexpr int output_bytes = int(sizeof(Output));
  static constexpr int tile_pitch = cta_n * output_bytes + 16;  // 16 more: rows start in different banks
  static constexpr int store_bytes = vector_bytes(filters * output_bytes) < cta_n * output_bytes
                                         ? vector_bytes(filters * output_bytes)
                                         : vector_bytes(cta_n * output_bytes);
  // whether any tap of any output pixel lies outside the image
  static constexpr bool padded = Problem::pad_top || Problem::pad_left || Problem::pad_bottom || Problem::pad_right;

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
    const Element* filter;
    Index pixel[passes_a];       // offset of the tap (0, 0) of this thread's rows
    int top[passes_a], left[passes_a];
    int k, r, s, c;              // position of this thread's column in gemm_k
    int row, target;             // first row served, and its place in a slice

    __device__ Loader(const Element* activation_, const Element* filter_, Index m0, int n0, int group, int first_slice) {
      const int column = int(threadIdx.x) % columns;
      row = int(threadIdx.x) / columns;
      activation = activation_ + group * channels;
      filter = filter_ + (Index(group) * filters + n0) * gemm_k;
      filters_left = filters - n0;
      const int chunk = column * load_bytes / 16;
      target = column * load_bytes % 16;
      target_chunk = chunk;
#pragma unroll
      for (int i = 0; i < passes_a; ++i) {
        const Index m = m0 + row + i * rows_per_pass;
        const Index image = m / (Problem::P * Problem::Q);
        const int position = int(m - image * (Problem::P * Problem::Q));
        const int p = position / Problem::Q, q = position % Problem::Q;
        top[i] = p * Problem::stride_h - Problem::pad_top;
        left[i] = q * Problem::stride_w - Problem::pad_left;
        pixel[i] = ((image * Problem::H + top[i]) * Problem::W + left[i]) * Problem::C;
        // rows beyond the last pixel: no tap is inside
        if (m >= gemm_m) top[i] = outside;
      }
      k = first_slice * cta_k + column * load_elements;
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

    __device__ __forceinline__ bool inside(int i) const {
      if constexpr (padded) {
        return k < gemm_k && unsigned(top[i] + r * Problem::dilation_h) < unsigned(Problem::H) &&
               unsigned(left[i] + s * Problem::dilation_w) < unsigned(Problem::W);
      } else {
        return k < gemm_k && top[i] != outside;
      }
    }

    __device__ __forceinline__ int place(int i) const {
      return swizzled(row + i * rows_per_pass, target_chunk) + target;
    }

    // Calls visit(source, inside, place in the slice) for every vector of the current slice that this thread serves.
    template <class Visit>
    __device__ __forceinline__ void each(Visit visit) const {
      const Index tap = (Index(r * Problem::dilation_h) * Problem::W + s * Problem::dilation_w) * Problem::C + c;
#pragma unroll
      for (int i = 0; i < passes_a; ++i) {
        if (cta_m % rows_per_pass && row + i * rows_per_pass >= cta_m) continue;
        const bool in = inside(i);
        visit(i, in ? activation + (pixel[i] + tap) : activation, in, place(i));
      }
#pragma unroll
      for (int i = 0; i < passes_b; ++i) {
        const int n = row + i * rows_per_pass;
        if (cta_n % rows_per_pass && n >= cta_n) continue;
        const bool in = k < gemm_k && n < filters_left;
        visit(passes_a + i, in ? filter + (Index(n) * gemm_k + k) : filter, in, cta_m * row_bytes + place(i));
      }
    }

   private:
    static constexpr int outside = -(1 << 30);
    int filters_left, target_chunk;
  };

  // acc += one slice in shared memory; fragments of the next 32 bytes are read while the present ones are multiplied.
  __device__ static __forceinline__ void multiply(Accumulator (&acc)[fragments_m][fragments_n][4], u32 slice, int warp_row,
                                                  int warp_column) {
    const int lane = int(threadIdx.x) % 32;
    u32 a[2][fragments_m][4], b[2][fragments_n][2];
    auto fetch = [&](int step) {
#pragma unroll
      for (int i = 0; i < fragments_m; ++i)
        ptx::ldmatrix_x4(a[step & 1][i], slice + swizzled(warp_row + i * 16 + lane % 16, step * 2 + lane / 16));
      if constexpr (fragments_n % 2 == 0) {
#pragma unroll
        for (int j = 0; j < fragments_n; j += 2) {
          u32 pair[4];
          const int row = warp_column + j * 8 + lane % 8 + lane / 16 * 8;
          ptx::ldmatrix_x4(pair, slice + cta_m * row_bytes + swizzled(row, step * 2 + lane / 8 % 2));
          b[step & 1][j][0] = pair[0], b[step & 1][j][1] = pair[1];
          b[step & 1][j + 1][0] = pair[2], b[step & 1][j + 1][1] = pair[3];
        }
      } else {
#pragma unroll
        for (int j = 0; j < fragments_n; ++j)
          ptx::ldmatrix_x2(b[step & 1][j],
                           slice + cta_m * row_bytes + swizzled(warp_column + j * 8 + lane % 8, step * 2 + lane / 8 % 2));
      }
    };
    fetch(0);
#pragma unroll
    for (int step = 0; step < k_steps; ++step) {
      if (step + 1 < k_steps) fetch(step + 1);
#pragma unroll
      for (int i = 0; i < fragments_m; ++i)
#pragma unroll
        for (int j = 0; j < fragments_n; ++j) ptx::Mma<Element>::run(acc[i][j], a[step & 1][i], b[step & 1][j]);
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

  // Converts the tile, turns it in shared memory, and stores whole rows of adjacent filters.
  __device__ static __forceinline__ void store(const Accumulator (&acc)[fragments_m][fragments_n][4], char* shared, Output* output,
                                               Index m0, int n0, int group, int warp_row, int warp_column) {
    const int lane = int(threadIdx.x) % 32;
    struct Pair {
      Output x[2];
    };
#pragma unroll
    for (int i = 0; i < fragments_m; ++i)
#pragma unroll
      for (int j = 0; j < fragments_n; ++j)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = warp_row + i * 16 + half * 8 + lane / 4, column = warp_column + j * 8 + lane % 4 * 2;
          const Pair pair{{converted<Output>(acc[i][j][half * 2]), converted<Output>(acc[i][j][half * 2 + 1])}};
          Vector<2 * output_bytes> v;
          memcpy(&v, &pair, sizeof v);
          *reinterpret_cast<Vector<2 * output_bytes>*>(shared + row * tile_pitch + column * output_bytes) = v;
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
                                             char* shared) {
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

    Loader loader(activation, filter, m0, n0, group, first_slice);
    Accumulator acc[fragments_m][fragments_n][4];
#pragma unroll
    for (int i = 0; i < fragments_m; ++i)
#pragma unroll
      for (int j = 0; j < fragments_n; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) acc[i][j][e] = 0;

    if constexpr (Config::staging == 1) {
      auto load = [&](int stage) {
        const u32 slice = base + stage * stage_bytes;
        loader.each([&](int, const Element* source, bool in, int place) {
          ptx::cp_async<load_bytes>(slice + place, source, in);
        });
        loader.advance();
      };
#pragma unroll
      for (int i = 0; i < Config::stages - 1; ++i) {
        if (i < count) load(i);
        ptx::cp_async_commit();
      }
      int read = 0, write = Config::stages - 1;
#pragma unroll 1
      for (int i = 0; i < count; ++i) {
        ptx::cp_async_wait<Config::stages - 2>();
        __syncthreads();
        if (i + Config::stages - 1 < count) load(write);
        ptx::cp_async_commit();
        multiply(acc, base + read * stage_bytes, warp_row, warp_column);
        read = read + 1 == Config::stages ? 0 : read + 1;
        write = write + 1 == Config::stages ? 0 : write + 1;
      }
      ptx::cp_async_wait<0>();
    } else {
      Vector<load_bytes> held[passes_a + passes_b];
      auto fetch = [&] {
        loader.each([&](int i, const Element* source, bool in, int) {
          Vector<load_bytes> v{};
          if (in) v = *reinterpret_cast<const Vector<load_bytes>*>(source);
          held[i] = v;
        });
      };
      auto deposit = [&](int stage) {
        loader.each([&](int i, const Element*, bool, int place) {
          *reinterpret_cast<Vector<load_bytes>*>(shared + stage * stage_bytes + place) = held[i];
        });
      };
      if (count > 0) {
        fetch();
        deposit(0);
      }
      __syncthreads();
#pragma unroll 1
      for (int i = 0; i < count; ++i) {
        if (i + 1 < count) {
          loader.advance();
          fetch();
        }
        multiply(acc, base + (i & 1) * stage_bytes, warp_row, warp_column);
        if (i + 1 < count) deposit((i + 1) & 1);
        __syncthreads();
      }
    }
    if constexpr (Config::split_k > 1) {
      const Index tiles = per_group * Problem::groups;
      if (!reduce(acc, workspace, block, tiles, split)) return;
    }
    __syncthreads();
    store(acc, shared, output, m0, n0, group, warp_row, warp_column);
  }
};
