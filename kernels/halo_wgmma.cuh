// halo_wgmma: forward convolution in NHWC for few filters on sm_90a; each input pixel reaches shared memory once per block.
//
// A block keeps the weights of cta_n filters in shared memory and walks over tiles of 8 x 8*stack output pixels. One copy
// of the tensor engine brings a tile's halo; a tap of the filter is then only another start address of the same tile. The 64
// rows of a wgmma are 8 groups of 8 pixels adjacent on the fast axis, and the groups lie `stack` pixels apart on the slow
// axis, so that a warpgroup owns 8 x 8*stack pixels with `stack` sets of accumulators. An input row meets up to `stack`
// output rows: the weights of the slow taps concerned are adjacent in shared memory and form one wgmma of that many times
// cta_n columns. One producer warp fills a ring of tiles, consumer warpgroups take them in turn.
//
// With stack_fast the taps of the fast axis are stacked too: one wgmma multiplies an input row by all taps that it meets, and
// an output is the sum of what adjacent pixels, which other threads of the warp hold, contribute by their taps. Of eight
// adjacent pixels the last ones only contribute.
//
// With `slabs` the lines of a tile are copied in an order of their own, and multiplied as they arrive: first those that the
// groups' first input rows meet, which lie as far apart as the groups, then those of their second ones.
//
// Weights that do not fit beside two tiles are streamed: an entry of the ring then holds one chunk of channels of a tile and
// of all weights, and a consumer adds up a tile's chunks one after the other.
//
// Weights are copied with their filters permuted such that each thread ends up with adjacent filters in its registers:
// thread q of a quad holds filters q * lane_filters ... of every block of 4 * lane_filters.
//
// Config:  orient (0: the fast axis is W, 1: H), stack, cta_n, chunk_bytes (channels in one row of shared memory),
//          consumers (warpgroups), stages, grouped (1: wgmmas of one shape in a row), turns (1: warpgroups issue in turn),
//          reassign (1: the producer's registers go to the consumers), streamed (1: weights come with each chunk of channels),
//          stack_fast (1: taps of both axes are stacked), slabs (1: a tile's lines come in several copies).
// Problem: the layer's extents, `Element` (f16, bf16, s8), what the family derives, and what epilogue.cuh reads.
#pragma once
#include "epilogue.cuh"

template <class Config, class Problem>
struct HaloWgmma {
  using Element = typename Problem::Element;
  using Output = typename Problem::Output;
  using Accumulator = typename AccumulatorOf<Element>::type;

  static constexpr bool across = Config::orient == 0;
  static constexpr int stack = Config::stack, cta_n = Config::cta_n;
  // output extents, taps, strides, padding before and dilations of the fast and the slow axis
  static constexpr int fast = across ? Problem::Q : Problem::P, slow = across ? Problem::P : Problem::Q;
  static constexpr int taps_f = across ? Problem::S : Problem::R, taps_s = across ? Problem::R : Problem::S;
  static constexpr int stride_f = across ? Problem::stride_w : Problem::stride_h;
  static constexpr int stride_s = across ? Problem::stride_h : Problem::stride_w;
  static constexpr int pad_f = across ? Problem::pad_left : Problem::pad_top;
  static constexpr int pad_s = across ? Problem::pad_top : Problem::pad_left;
  static constexpr int dilation_f = across ? Problem::dilation_w : Problem::dilation_h;
  static constexpr int dilation_s = across ? Problem::dilation_h : Problem::dilation_w;

  static constexpr int columns_f = Config::stack_fast ? taps_f : 1;  // fast taps of one product
  static constexpr int tile_f = 8 - (columns_f - 1) * dilation_f, tile_s = 8 * stack;
  static constexpr int tiles_f = ceil_div(fast, tile_f), tiles_s = ceil_div(slow, tile_s);
  static constexpr int tiles = tiles_f * tiles_s * Problem::N;
  static constexpr int blocks_n = ceil_div(Problem::K, cta_n);

  static constexpr int row_bytes = Config::chunk_bytes, k_steps = row_bytes / 32;
  static constexpr int chunk_elements = row_bytes / int(sizeof(Element));
  static constexpr int chunks = ceil_div(Problem::C, chunk_elements);

  // With stride 2 on the fast axis adjacent outputs must read adjacent rows of shared memory. Where W is fast and a pixel's
  // channels fill one row, a row holds the pair of an even and an odd pixel, as it lies in memory; else a halo row holds its
  // even pixels first, then its odd ones. `start` is the first pixel (of each parity) of tile 0.
  __host__ __device__ static constexpr int floor_half(int x) { return x >= 0 ? x / 2 : -((1 - x) / 2); }
  static constexpr int start = stride_f == 1 ? -pad_f : floor_half(-pad_f);
  static constexpr bool paired = Problem::paired;
  static constexpr int pixel_bytes = paired ? 2 * row_bytes : row_bytes;  // of a row of the tile
  static constexpr int pitch = Problem::halo_fast;                        // pixels of a halo row (of each parity)
  static constexpr int line_bytes = (paired ? 1 : stride_f) * pitch * pixel_bytes;
  static constexpr int halo_slow = (tile_s - 1) * stride_s + (taps_s - 1) * dilation_s + 1;
  // Where the pixel that output 0 meets at this tap lies, from the beginning of its halo row.
  __host__ __device__ static constexpr int offset_of(int tap) {
    if (stride_f == 1) return tap * dilation_f * row_bytes;
    const int x = tap * dilation_f - pad_f, half = floor_half(x), odd = x - 2 * half;
    return (half - start) * pixel_bytes + odd * (paired ? row_bytes : pitch * row_bytes);
  }
  // Input row i of a group lies in line i of its slab, or in line i / spread of slab i % spread.
  static constexpr int input_rows = (stack - 1) * stride_s + (taps_s - 1) * dilation_s + 1;
  static constexpr int spread = stack * stride_s;  // from a group's to the next one's
  static constexpr int slabs = Config::slabs ? (spread < input_rows ? spread : input_rows) : 1;
  static constexpr int slab_lines = Config::slabs ? 7 + ceil_div(input_rows, spread) : halo_slow;
  __host__ __device__ static constexpr int slab_of(int i) { return Config::slabs ? i % spread : 0; }
  static constexpr int box_bytes = line_bytes * slab_lines;  // one chunk of channels of a slab
  static constexpr int slab_bytes = (box_bytes + 127) / 128 * 128;
  static constexpr int plane_bytes = (slabs * slab_bytes + 1023) / 1024 * 1024;
  static constexpr bool streamed = Config::streamed;
  static constexpr int parts = streamed ? chunks : 1, chunks_of_part = chunks / parts;  // of a tile: entries of the ring
  static constexpr int tap_bytes = cta_n * row_bytes;
  static constexpr int weight_bytes = chunks_of_part * taps_f * taps_s * tap_bytes;  // resident, or of a part
  static constexpr int padded_weight_bytes = (weight_bytes + 1023) / 1024 * 1024;
  static constexpr int part_bytes = chunks_of_part * plane_bytes;
  static constexpr int stage_bytes = part_bytes + (streamed ? padded_weight_bytes : 0);

  static constexpr int consumers = Config::consumers, stages = Config::stages;
  __host__ __device__ static constexpr int gcd(int a, int b) { return b ? gcd(b, a % b) : a; }
  // a full barrier belongs to one consumer: one that skipped a phase would misread the parity
  static constexpr int turn_parts = consumers * parts;
  static constexpr int full_barriers = stages * turn_parts / gcd(stages, turn_parts);
  static constexpr int threads = consumers * 128 + (Config::reassign ? 128 : 32);
  static constexpr int ring_offset = streamed ? 0 : padded_weight_bytes;
  // finished pixels of each consumer's warp, where they begin anywhere
  static constexpr bool collected = !Problem::permuted && cta_n >= 64;
  using Finished = Collected<Output, cta_n, (across ? 1ll : Problem::Q) * Problem::K,
                             across && sizeof(Output) == 2 && tile_f == 8 && Problem::Q % 8 == 0>;
  static constexpr int collected_offset = ring_offset + stages * stage_bytes;
  static constexpr int barrier_offset = collected_offset + (collected ? consumers * 4 * Finished::bytes : 0);
  static constexpr int smem_bytes = barrier_offset + 8 * (full_barriers * slabs + stages + 1 + consumers);

  // Filters of a thread: `lane_filters` adjacent ones of each block of 4 * lane_filters.
  static constexpr int lane_filters = Problem::lane_filters, block_filters = 4 * lane_filters;
  // What belongs to them: the same for all tiles of a block.
  using Filters = typename Epilogue<Problem>::template Filters<lane_filters>[cta_n / block_filters];

  // Input row i of a tile meets the outputs first(i) ... last(i) of each group's stack.
  __host__ __device__ static constexpr int first(int i) {
    for (int o = 0; o < stack; ++o)
      if (i >= o * stride_s && (i - o * stride_s) % dilation_s == 0 && (i - o * stride_s) / dilation_s < taps_s) return o;
    return stack;
  }
  __host__ __device__ static constexpr int count(int i) {
    int n = 0;
    for (int o = 0; o < stack; ++o)
      n += i >= o * stride_s && (i - o * stride_s) % dilation_s == 0 && (i - o * stride_s) / dilation_s < taps_s;
    return n;
  }
  // Place of slow tap r in the stack of weights: one input row meets ascending outputs with taps that descend by stride_s.
  __host__ __device__ static constexpr int place(int r) {
    int at = 0;
    for (int residue = 0; residue < stride_s; ++residue)
      for (int tap = taps_s - 1; tap >= 0; --tap)
        if (tap % stride_s == residue) {
          if (tap == r) return at;
          ++at;
        }
    return -1;
  }
  // Place of a chunk's tap among the weights: what one product multiplies by is adjacent.
  __host__ __device__ static constexpr int place(int chunk, int f, int r) {
    return Config::stack_fast ? (chunk * taps_s + place(r)) * taps_f + f : (chunk * taps_f + f) * taps_s + place(r);
  }
  // Rows with the same outputs share accumulators; others need their own, since the ranges of wgmmas must not overlap.
  __host__ __device__ static constexpr bool opens(int i) {
    for (int j = 0; j < i; ++j)
      if (count(i) && first(j) == first(i) && count(j) == count(i)) return false;
    return count(i) > 0;
  }
  static constexpr int registers_per_output = columns_f * cta_n / 2;
  __host__ __device__ static constexpr int base(int i) {
    int at = 0;
    for (int j = 0; j < input_rows; ++j) {
      if (count(i) && first(j) == first(i) && count(j) == count(i)) return at;
      if (opens(j)) at += count(j) * registers_per_output;
    }
    return at;
  }
  static constexpr int accumulators = base(-1);

  // The order of a part's wgmmas. `fresh`: the first on its accumulators, in the tile's first part; `waits`: the first that
  // needs its slab.
  struct Step {
    int f, chunk, k, row;
    bool fresh, waits;
  };
  static constexpr int steps_at_most = taps_f / columns_f * chunks_of_part * k_steps * input_rows;
  struct Program {
    Step step[steps_at_most];
    int size;
  };
  __host__ __device__ static constexpr Program make_program() {
    Program p{};
    p.size = 0;
    bool begun[accumulators] = {};
    for (int slab = 0; slab < slabs; ++slab) {
      bool waits = slab > 0;
      for (int shape = Config::grouped ? stack : 1; shape >= 1; --shape)
        for (int f = 0; f < taps_f; f += columns_f)
          for (int chunk = 0; chunk < chunks_of_part; ++chunk)
            for (int k = 0; k < k_steps; ++k)
              for (int n = stack; n >= 1; --n)
                for (int i = 0; i < input_rows; ++i) {
                  if (slab_of(i) != slab || count(i) != n || (Config::grouped && n != shape)) continue;
                  p.step[p.size++] = Step{f, chunk, k, i, !begun[base(i)], waits};
                  begun[base(i)] = true;
                  waits = false;
                }
    }
    return p;
  }
  static constexpr Program program = make_program();

  // Halves the steps that are left: compilers nest templates only so deep.
  template <bool begins, int from = 0, int end = program.size>
  __device__ static __forceinline__ void issue(Accumulator (&acc)[accumulators], u64 a, u64 b, u32 full, u32 parity) {
    if constexpr (end - from > 1) {
      issue<begins, from, (from + end) / 2>(acc, a, b, full, parity);
      issue<begins, (from + end) / 2, end>(acc, a, b, full, parity);
    } else {
      constexpr Step s = program.step[from];
      if constexpr (s.waits) ptx::barrier_wait(full + slab_of(s.row) * 8, parity);
      constexpr int n = count(s.row) * columns_f * cta_n, tap = (s.row - first(s.row) * stride_s) / dilation_s;
      constexpr int line = slab_of(s.row) * slab_bytes + (Config::slabs ? s.row / spread : s.row) * line_bytes;
      constexpr int from_a = s.chunk * plane_bytes + line + offset_of(s.f) + s.k * 32;
      constexpr int from_b = place(s.chunk, s.f, tap) * tap_bytes + s.k * 32;
      ptx::Wgmma<Element, n>::template run<!(begins && s.fresh)>(&acc[base(s.row)], a + from_a / 16, b + from_b / 16);
    }
  }

  // Issues the products of what lies, or arrives, at `stage`, with the weights there, or the resident ones.
  template <bool begins>
  __device__ static __forceinline__ void multiply(Accumulator (&acc)[accumulators], u32 stage, u32 weights, u32 full, u32 parity) {
    ptx::barrier_wait(full, parity);
    const u64 a = ptx::matrix_descriptor<pixel_bytes>(stage, (Config::slabs ? 1 : spread) * line_bytes);
    const u64 b = ptx::matrix_descriptor<row_bytes>(streamed ? stage + part_bytes : weights, 8 * row_bytes);
    ptx::wgmma_fence();
    issue<begins>(acc, a, b, full, parity);
    ptx::wgmma_commit();
  }

  // Register x of output o of the stack: the sum over all accumulators that hold a part of it.
  template <int i>
  __device__ static __forceinline__ Accumulator sum(const Accumulator (&acc)[accumulators], int o, int x) {
    if constexpr (i < input_rows) {
      const Accumulator others = sum<i + 1>(acc, o, x);
      if constexpr (opens(i)) {
        if (o >= first(i) && o < first(i) + count(i)) return acc[base(i) + (o - first(i)) * registers_per_output + x] + others;
      }
      return others;
    } else {
      return static_cast<Accumulator>(-0.0f);  // changes nothing, not even the sign of a zero: it costs no addition
    }
  }

  struct Tile {
    int f, s, n;
    __device__ explicit Tile(int index) : f(index % tiles_f * tile_f), s(index / tiles_f % tiles_s * tile_s), n(index / (tiles_f * tiles_s)) {}
  };

  // A part's weights, of which a barrier expects weight_bytes: in the order of their places, so that no copy waits for the
  // computation of one.
  __device__ static __forceinline__ void load_weights(const ptx::TensorMap* map, u32 weights, u32 barrier, int n0, int part) {
    u32 target = weights;
    auto load = [&](int c, int f, int s) {
      const int tap = across ? s * taps_f + f : f * taps_s + s;
      if constexpr (Problem::permuted)
        ptx::copy_box(target, map, barrier, c, 0, n0 / lane_filters, 0, tap);
      else
        ptx::copy_box(target, map, barrier, c, n0, tap);
      target += tap_bytes;
    };
#pragma unroll 1
    for (int chunk = part * chunks_of_part; chunk < (part + 1) * chunks_of_part; ++chunk)
#pragma unroll 1
      for (int f = 0; f < taps_f; f += columns_f)
#pragma unroll 1
        for (int residue = 0; residue < stride_s; ++residue)
#pragma unroll 1
          for (int s = taps_s - 1; s >= 0; --s) {
            if (s % stride_s != residue) continue;
#pragma unroll 1
            for (int x = 0; x < columns_f; ++x) load(chunk * chunk_elements, f + x, s);
          }
  }

  // A slab of a part of a tile, of which a barrier expects chunks_of_part * box_bytes.
  __device__ static __forceinline__ void load_slab(const ptx::TensorMap* map, u32 stage, u32 barrier, Tile tile, int part, int slab) {
    const int line = tile.s * stride_s - pad_s + slab;
#pragma unroll 1
    for (int chunk = 0; chunk < chunks_of_part; ++chunk) {
      const u32 target = stage + chunk * plane_bytes + slab * slab_bytes;
      const int c = (part * chunks_of_part + chunk) * chunk_elements;
      if constexpr (stride_f == 1 || paired)
        ptx::stream_box(target, map, barrier, c, tile.f + start, line, tile.n);
      else
        ptx::stream_box(target, map, barrier, c, tile.f + start, 0, line, tile.n);
    }
  }

  // rows: of this warp, where its pixels are collected.
  __device__ static __forceinline__ void store(const Accumulator (&acc)[accumulators], const Epilogue<Problem>& epilogue,
                                               const Filters& filters, Output* output, char* rows, Tile tile, int n0) {
    const int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32 % 4, quad = lane % 4;
    const int f = tile.f + lane / 4;
    constexpr int bytes = lane_filters * int(sizeof(Output)), vector = vector_bytes(bytes);
    constexpr s64 pixel_f = across ? 1 : Problem::Q, pixel_s = across ? Problem::Q : 1;
    const s64 first = s64(tile.n) * Problem::P * Problem::Q * Problem::K + n0, image = first + quad * lane_filters;
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int o = 0; o < stack; ++o) {
        const int s = tile.s + (warp * 2 + half) * stack + o;
        const bool inside = f < fast && s < slow && lane / 4 < tile_f;
        // the others still hand their part to them
        if (!Config::stack_fast && !collected && !inside) continue;
        const s64 at = image + (f * pixel_f + s * pixel_s) * Problem::K;
        Output* const pixel = output + at;
        const Finished finished{rows, first + (tile.f * pixel_f + s * pixel_s) * Problem::K};
        char* const place = finished.place(lane / 4, quad * lane_filters);
#pragma unroll
        for (int n = 0; n < cta_n; n += block_filters) {
          Accumulator sums[lane_filters];
#pragma unroll
          for (int j = 0; j < lane_filters; ++j) {
            const int x = (n / block_filters + cta_n / block_filters * (j / 2)) * 4 + half * 2 + j % 2;
            sums[j] = sum<0>(acc, o, x);
#pragma unroll
            for (int tap = 1; tap < columns_f; ++tap)
              sums[j] += __shfl_down_sync(0xffffffffu, sum<0>(acc, o, tap * cta_n / 2 + x), 4 * tap * dilation_f);
          }
          if ((Config::stack_fast || collected) && !inside) continue;
          Output y[lane_filters];
          epilogue.template finish<Problem::permuted>(y, sums, filters[n / block_filters], at + n,
                                                      Problem::K - n0 - n - quad * lane_filters);
          if constexpr (collected) {
            Finished::leave(place + n * int(sizeof(Output)), y);
          } else if constexpr (Problem::permuted) {
            if (Problem::K % cta_n && n0 + n + quad * lane_filters >= Problem::K) continue;
#pragma unroll
            for (int i = 0; i < bytes / vector; ++i) {
              Vector<vector> v;
              memcpy(&v, reinterpret_cast<const char*>(y) + i * vector, vector);
              ptx::store_streaming(reinterpret_cast<char*>(pixel + n) + i * vector, v);
            }
          } else {
#pragma unroll
            for (int j = 0; j < lane_filters; ++j)
              if (n0 + n + quad * lane_filters + j < Problem::K) pixel[n + j] = y[j];
          }
        }
        if constexpr (collected) {
          __syncwarp();
          const int pixels = s < slow ? (fast - tile.f < tile_f ? fast - tile.f : tile_f) : 0;
          const int columns = blocks_n == 1 ? Problem::K : Problem::K - n0 < cta_n ? Problem::K - n0 : cta_n;
          finished.write(output, pixels, columns);
          __syncwarp();
        }
      }
  }

  __device__ static __forceinline__ void run(const ptx::TensorMap* activation, const ptx::TensorMap* filter, Output* output,
                                             const Epilogue<Problem>& epilogue, char* shared) {
    const u32 weights = ptx::shared_address(shared), ring = weights + ring_offset;
    const u32 full = weights + barrier_offset, empty = full + full_barriers * slabs * 8, loaded = empty + stages * 8, turn = loaded + 8;
    // the compiler must know that all threads of a warp agree
    const int warp = __shfl_sync(0xffffffffu, int(threadIdx.x) / 32, 0), lane = int(threadIdx.x) % 32;
    const int n0 = int(blockIdx.x) % blocks_n * cta_n;
    const int stride = int(gridDim.x) / blocks_n, begin = int(blockIdx.x) / blocks_n;
    const int count = begin < tiles ? (tiles - begin + stride - 1) / stride : 0;

    auto load = [&](int i, int slab) {
      const int stage = i % stages, part = i % parts;
      const bool with_weights = streamed && slab == 0;
      const u32 target = ring + stage * stage_bytes, barrier = full + (i % full_barriers * slabs + slab) * 8;
      ptx::barrier_expect(barrier, chunks_of_part * box_bytes + (with_weights ? weight_bytes : 0));
      load_slab(activation, target, barrier, Tile(begin + i / parts * stride), part, slab);
      if (with_weights) load_weights(filter, target + part_bytes, barrier, n0, part);
    };

    // the first lines, which take longest, are asked for before anyone waits, and before the other barriers are there
    if (threadIdx.x == consumers * 128) {
      ptx::prefetch_map(activation);
      ptx::barrier_init(full, 1);
      ptx::barrier_init_fence();
      load(0, 0);
      ptx::prefetch_map(filter);
    }
    if (threadIdx.x == 0) {
      for (int i = 1; i < full_barriers * slabs; ++i) ptx::barrier_init(full + i * 8, 1);
      for (int i = 0; i < stages; ++i) ptx::barrier_init(empty + i * 8, 4);
      for (int i = 0; i < consumers; ++i) ptx::barrier_init(turn + i * 8, 4);
      ptx::barrier_init(loaded, 1);
      ptx::barrier_init_fence();
    }
    __syncthreads();

    if (warp >= consumers * 4) {
      if constexpr (Config::reassign) ptx::release_registers<24>();
      if (warp > consumers * 4 || lane != 0) return;
      // then the weights: more tiles at once would only make all blocks wait longer for their first one
      constexpr int before = slabs < 2 ? slabs : 2;  // slabs of the first tile
      if constexpr (!streamed) {
        if constexpr (before > 1) load(0, 1);
        ptx::barrier_expect(loaded, weight_bytes);
        load_weights(filter, weights, loaded, n0, 0);
      }
#pragma unroll 1
      for (int i = 0; i < count * parts; ++i) {
        if (i >= stages) ptx::barrier_wait(empty + i % stages * 8, (i / stages - 1) & 1);
#pragma unroll 1
        for (int slab = i ? 0 : streamed ? 1 : before; slab < slabs; ++slab) load(i, slab);
      }
    } else {
      if constexpr (Config::reassign) ptx::claim_registers<Problem::consumer_registers>();
      const int group = warp / 4;
      Filters filters;
#pragma unroll
      for (int i = 0; i < cta_n / block_filters; ++i)
        filters[i] = epilogue.template filters<Problem::permuted, lane_filters>(n0 + i * block_filters + lane % 4 * lane_filters, Problem::K);
      if (!streamed && count > group) ptx::barrier_wait(loaded, 0);
      auto full_of = [&](int part) { return full + part % full_barriers * slabs * 8; };
      auto parity_of = [&](int part) { return u32(part / full_barriers) & 1; };
      auto release = [&](int part) {
        if (lane == 0) ptx::barrier_arrive(empty + part % stages * 8);
      };
#pragma unroll 1
      for (int i = group; i < count; i += consumers) {
        const int round = i / consumers;
        int part = i * parts;
        Accumulator acc[accumulators];
        // group 0 waits for the last group's turn of the round before
        if (Config::turns && i) ptx::barrier_wait(turn + group * 8, group ? round & 1 : (round - 1) & 1);
        multiply<true>(acc, ring + part % stages * stage_bytes, weights, full_of(part), parity_of(part));
        if (Config::turns && lane == 0) ptx::barrier_arrive(turn + (group + 1) % consumers * 8);
#pragma unroll 1
        for (int end = part + parts - 1; part < end;) {
          ++part;
          multiply<false>(acc, ring + part % stages * stage_bytes, weights, full_of(part), parity_of(part));
          ptx::wgmma_wait_previous();
          release(part - 1);
        }
        ptx::wgmma_wait();
#pragma unroll
        for (int j = 0; j < accumulators; ++j) ptx::pin(acc[j]);
        release(part);
        store(acc, epilogue, filters, output, shared + collected_offset + warp * Finished::bytes, Tile(begin + i * stride), n0);
      }
    }
  }
};
