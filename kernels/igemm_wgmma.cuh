// igemm_wgmma: forward convolution in NHWC as an implicit matrix product with warpgroup products, for sm_90a.
//
// gemm_m = N*P*Q output pixels, gemm_n = K filters, gemm_k = R*S*C, walked in slices: a tap and chunk_bytes of channels.
// Persistent blocks walk over tiles. One producer warp keeps a ring of slices filled: the tensor engine gathers a slice's
// pixels in im2col mode, padding and ragged edges as zeros, and brings the filters. Consumers either share a tile
// (cooperative: each takes its own rows) or take tiles in turn, one multiplying while the other stores (ping-pong).
//
// The blocks of a cluster walk in step over tiles of the same filters and adjacent pixels. They take turns in bringing a
// slice's filters to all of them, so that a stage is empty only when the consumers of all blocks have released it.
//
// Filters are copied permuted such that thread q of a quad ends with adjacent ones: `lane_filters` of each block of four
// times as many. Where their number is no multiple of eight they are not, and pixels begin anywhere: of many filters each
// warp collects eight pixels in shared memory and writes out each as adjacent vectors.
//
// With split_k > 1 several items share one tile's gemm_k; the last to arrive adds up, in order. With `even` a tile is smaller
// than what its rows could hold: the last ones are multiplied too, and not stored, but all blocks end together. With `resident`
// all filters come with a block's first tile and stay in shared memory; the ring then brings pixels only.
//
// Config:  rows (of 64 pixels a consumer), cta_n, chunk_bytes, consumers, pingpong, stages, split_k, cluster, even, resident.
// Problem: the layer's extents, `Element` (f16, bf16, s8), what the family derives (lane_filters, permuted, tile_m: pixels
// from a tile to the next), and what epilogue.cuh reads.
#pragma once
#include "epilogue.cuh"

template <class Config, class Problem>
struct IgemmWgmma {
  using Element = typename Problem::Element;
  using Output = typename Problem::Output;
  using Accumulator = typename AccumulatorOf<Element>::type;

  static constexpr int consumers = Config::consumers, stages = Config::stages, split_k = Config::split_k;
  static constexpr int sharing = Config::pingpong ? 1 : consumers;  // consumers of one tile
  static constexpr int consumer_m = 64 * Config::rows, cta_m = consumer_m * sharing, cta_n = Config::cta_n;
  static constexpr s64 gemm_m = s64(Problem::N) * Problem::P * Problem::Q;
  static constexpr int cluster = Config::cluster;  // blocks; their last tiles may lie beyond all pixels
  static constexpr int tile_m = Problem::tile_m;
  static constexpr int tiles_m = int((gemm_m + cluster * tile_m - 1) / (cluster * tile_m)) * cluster;
  static constexpr int tiles_n = ceil_div(Problem::K, cta_n), tiles = tiles_m * tiles_n;
  static constexpr int items = tiles / cluster * split_k;  // of a cluster

  static constexpr int row_bytes = Config::chunk_bytes, k_steps = row_bytes / 32;
  static constexpr int chunk_elements = row_bytes / int(sizeof(Element));
  static constexpr int chunks = ceil_div(Problem::C, chunk_elements);
  static constexpr int taps = Problem::R * Problem::S, slices = taps * chunks, slices_per_item = slices / split_k;
  static_assert(slices % split_k == 0, "split_k");

  static constexpr bool resident = Config::resident;
  static_assert(!resident || (tiles_n == 1 && split_k == 1 && cluster == 1), "resident");

  static constexpr int a_bytes = cta_m * row_bytes, b_bytes = cta_n * row_bytes;
  // a swizzle pattern repeats after at most 1024 bytes, where every operand starts
  static constexpr int padded_b_bytes = (b_bytes + 1023) / 1024 * 1024;
  static constexpr int stage_bytes = a_bytes + (resident ? 0 : padded_b_bytes);
  // finished pixels of each consumer's warp, where they begin anywhere
  static constexpr bool collected = !Problem::permuted && cta_n >= 64;
  using Finished = Collected<Output, cta_n, Problem::K, sizeof(Output) == 2>;
  static constexpr int filters_offset = stages * stage_bytes;  // of all slices, where they are resident
  static constexpr int collected_offset = filters_offset + (resident ? slices * padded_b_bytes : 0);
  static constexpr int barrier_offset = collected_offset + (collected ? consumers * 4 * Finished::bytes : 0);
  static constexpr int smem_bytes = barrier_offset + 8 * (2 * stages + consumers);
  static constexpr int threads = consumers * 128 + 128;
  static constexpr int registers_per_row = cta_n / 2, accumulators = Config::rows * registers_per_row;
  static constexpr int lane_filters = Problem::lane_filters, block_filters = 4 * lane_filters;
  static constexpr int blocks = cta_n / block_filters;
  static_assert(cta_n % block_filters == 0 && stage_bytes % 1024 == 0 && a_bytes % 1024 == 0, "tile");

  __device__ static int rank() { return int(blockIdx.x) % cluster; }

  // Where the filters of an item's slice i lie, whose pixels are in this stage.
  __device__ static __forceinline__ u32 filters_at(u32 ring, int stage, int i) {
    return resident ? ring + filters_offset + i * padded_b_bytes : ring + stage * stage_bytes + a_bytes;
  }

  // What one item is: a tile's share of gemm_k.
  struct Item {
    s64 m0;
    int n0, tile, split;
    __device__ explicit Item(int index)
        : m0(s64(index / split_k / tiles_n * cluster + rank()) * tile_m),
          n0(index / split_k % tiles_n * cta_n),
          tile(index / split_k * cluster + rank()),
          split(index % split_k) {}
  };

  // The pixel of the input that a tile's first output meets at the filter's first tap.
  struct Corner {
    int image, h, w;
    __device__ explicit Corner(s64 m) {
      image = int(m / (Problem::P * Problem::Q));
      const int pixel = int(m - s64(image) * (Problem::P * Problem::Q));
      h = pixel / Problem::Q * Problem::stride_h - Problem::pad_top;
      w = pixel % Problem::Q * Problem::stride_w - Problem::pad_left;
    }
  };

  // A slice of gemm_k. All taps of a chunk of channels follow each other, and among them those that meet the same pixels: of
  // equal remainders by the strides. Each reads from the second-level cache what the first of them brought there, and new
  // pixels are asked for all along an item rather than all at its beginning.
  struct Slice {
    int chunk, r = 0, s = 0;

    __device__ explicit Slice(int index) : chunk(index / taps) {
      for (int i = index % taps; i > 0; --i) advance();
    }

    __device__ __forceinline__ void advance() {
      constexpr int columns = Problem::stride_w < Problem::S ? Problem::stride_w : Problem::S;  // remainders of s, of r
      constexpr int lines = Problem::stride_h < Problem::R ? Problem::stride_h : Problem::R;
      s += Problem::stride_w;
      if (s < Problem::S) return;
      s %= Problem::stride_w;
      r += Problem::stride_h;
      if (r < Problem::R) return;
      r %= Problem::stride_h;
      if (++s < columns) return;
      s = 0;
      if (++r < lines) return;
      r = 0;
      ++chunk;
    }
  };

  template <bool fresh>
  __device__ static __forceinline__ void multiply(Accumulator (&acc)[accumulators], u64 a, u64 b) {
#pragma unroll
    for (int k = 0; k < k_steps; ++k)
#pragma unroll
      for (int row = 0; row < Config::rows; ++row) {
        const u64 from_a = a + (row * 64 * row_bytes + k * 32) / 16, from_b = b + k * 32 / 16;
        if (fresh && k == 0)
          ptx::Wgmma<Element, cta_n>::template run<false>(&acc[row * registers_per_row], from_a, from_b);
        else
          ptx::Wgmma<Element, cta_n>::template run<true>(&acc[row * registers_per_row], from_a, from_b);
      }
  }

  __device__ static __forceinline__ void produce(const ptx::TensorMap* activation, const ptx::TensorMap* filter, u32 ring, u32 full,
                                                 u32 empty) {
    int stage = 0;
    u32 parity = 1;  // the first round finds every stage empty
    bool brings = rank() == 0;
    for (int index = int(blockIdx.x) / cluster; index < items; index += int(gridDim.x) / cluster) {
      const Item item(index);
      const Corner corner(item.m0);
      Slice slice(item.split * slices_per_item);
#pragma unroll 1
      for (int i = 0; i < slices_per_item; ++i) {
        const u32 a = ring + stage * stage_bytes, b = filters_at(ring, stage, i), barrier = full + stage * 8;
        const bool brings_filters = !resident || index == int(blockIdx.x);
        ptx::barrier_wait(empty + stage * 8, parity);
        ptx::barrier_expect(barrier, a_bytes + (brings_filters ? b_bytes : 0));
        const int c = slice.chunk * chunk_elements, tap = slice.r * Problem::S + slice.s;
        ptx::copy_pixels(a, activation, barrier, c, corner.w, corner.h, corner.image, slice.s * Problem::dilation_w,
                         slice.r * Problem::dilation_h);
        if constexpr (cluster > 1) {
          constexpr u16 all = (1 << cluster) - 1;
          if (brings) {
            if constexpr (Problem::permuted)
              ptx::multicast_box(b, filter, barrier, all, c, 0, item.n0 / lane_filters, 0, tap);
            else
              ptx::multicast_box(b, filter, barrier, all, c, item.n0, tap);
          }
          brings = !brings;
        } else if (brings_filters) {
          if constexpr (Problem::permuted)
            ptx::copy_box(b, filter, barrier, c, 0, item.n0 / lane_filters, 0, tap);
          else
            ptx::copy_box(b, filter, barrier, c, item.n0, tap);
        }
        slice.advance();
        if (++stage == stages) {
          stage = 0;
          parity ^= 1;
        }
      }
    }
  }

  // This warp is done with a stage, whatever block brings what comes next.
  __device__ static __forceinline__ void release(u32 empty, int lane) {
    if constexpr (cluster > 1) {
      if (lane < cluster) ptx::barrier_arrive(empty, u32(lane));
    } else {
      if (lane == 0) ptx::barrier_arrive(empty);
    }
  }

  // The sum of a tile's splits for this consumer's rows, in the order of the splits; false unless it arrives last.
  __device__ static __forceinline__ bool reduce(Accumulator (&acc)[accumulators], void* workspace, const Item& item, int group) {
    __shared__ int arrived[consumers];
    const int lane = int(threadIdx.x) % 128, part = Config::pingpong ? 0 : group;
    int* const counter = static_cast<int*>(workspace) + item.tile * sharing + part;
    constexpr s64 counters = (s64(tiles) * sharing * 4 + 255) / 256 * 256;
    Accumulator* const sums = reinterpret_cast<Accumulator*>(static_cast<char*>(workspace) + counters) +
                              s64(item.tile * sharing + part) * split_k * (accumulators * 128) + lane * 4;
#pragma unroll
    for (int i = 0; i < accumulators; i += 4) {
      Vector<16> v;
      memcpy(&v, &acc[i], 16);
      *reinterpret_cast<Vector<16>*>(sums + s64(item.split) * (accumulators * 128) + i * 128) = v;
    }
    __threadfence();
    ptx::sync_warpgroup(1 + group);
    if (lane == 0) arrived[group] = atomicAdd(counter, 1);
    ptx::sync_warpgroup(1 + group);
    if (arrived[group] != split_k - 1) return false;
    __threadfence();
    if (lane == 0) *counter = 0;
    // of two summands the order does not matter: only the other one is read
    const int first = split_k == 2 ? 1 - item.split : 0, end = split_k == 2 ? first + 1 : split_k;
#pragma unroll
    for (int i = 0; i < accumulators; i += 4) {
      Accumulator sum[4] = {0, 0, 0, 0};
      if (split_k == 2) memcpy(sum, &acc[i], 16);
      for (int z = first; z < end; ++z) {
        Accumulator one[4];
        ptx::load_l2(one, sums + s64(z) * (accumulators * 128) + i * 128);
#pragma unroll
        for (int e = 0; e < 4; ++e) sum[e] += one[e];
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) acc[i + e] = sum[e];
    }
    return true;
  }

  using Filters = typename Epilogue<Problem>::template Filters<lane_filters>;

  // What belongs to this thread's filters of a block of an item's.
  __device__ static __forceinline__ Filters filters(const Epilogue<Problem>& epilogue, const Item& item, int block) {
    const int n = item.n0 + block * block_filters + int(threadIdx.x) % 4 * lane_filters;
    return epilogue.template filters<Problem::permuted, lane_filters>(n, Problem::K);
  }

  // The first pixel after an item's.
  __device__ static __forceinline__ s64 end(const Item& item) {
    return tile_m < cta_m && item.m0 + tile_m < gemm_m ? item.m0 + tile_m : gemm_m;
  }

  // Finishes and stores this thread's filters of one block of a pixel, of which the first block begins at `at` and filter n.
  __device__ static __forceinline__ void store(const Accumulator (&acc)[accumulators], const Epilogue<Problem>& epilogue,
                                               const Filters& filters, Output* output, s64 at, int n, int row, int half, int block) {
    constexpr int bytes = lane_filters * int(sizeof(Output)), vector = vector_bytes(bytes);
    const int skipped = block * block_filters;
    Output* const target = output + at + skipped;
    Accumulator sums[lane_filters];
#pragma unroll
    for (int j = 0; j < lane_filters; ++j)
      sums[j] = acc[row * registers_per_row + (block + blocks * (j / 2)) * 4 + half * 2 + j % 2];
    Output y[lane_filters];
    epilogue.template finish<Problem::permuted>(y, sums, filters, at + skipped, Problem::K - n - skipped);
    if constexpr (Problem::permuted) {
      if (Problem::K % cta_n && n + skipped >= Problem::K) return;
#pragma unroll
      for (int i = 0; i < bytes / vector; ++i) {
        Vector<vector> v;
        memcpy(&v, reinterpret_cast<const char*>(y) + i * vector, vector);
        ptx::store_streaming(reinterpret_cast<char*>(target) + i * vector, v);
      }
    } else {
#pragma unroll
      for (int j = 0; j < lane_filters; ++j)
        if (n + skipped + j < Problem::K) target[j] = y[j];
    }
  }

  // Finishes and stores eight pixels of a warp, from pixel m on, through the warp's `rows` of shared memory.
  __device__ static __forceinline__ void store_collected(const Accumulator (&acc)[accumulators], const Epilogue<Problem>& epilogue,
                                                         Output* output, char* rows, const Item& item, s64 m, int row, int half) {
    const int lane = int(threadIdx.x) % 32, pixel = lane / 4, n0 = item.n0;
    const s64 present = end(item) - m;
    const int pixels = present > 8 ? 8 : present > 0 ? int(present) : 0;
    const int columns = tiles_n == 1 ? Problem::K : Problem::K - n0 < cta_n ? Problem::K - n0 : cta_n;
    const Finished finished{rows, m * Problem::K + n0};
    char* const place = finished.place(pixel, lane % 4 * lane_filters);
#pragma unroll
    for (int block = 0; block < blocks; ++block) {
      const int n = n0 + block * block_filters + lane % 4 * lane_filters;
      Accumulator sums[lane_filters];
#pragma unroll
      for (int j = 0; j < lane_filters; ++j) sums[j] = acc[row * registers_per_row + block * 4 + half * 2 + j];
      Output y[lane_filters];
      epilogue.template finish<false>(y, sums, filters(epilogue, item, block), (m + pixel) * Problem::K + n,
                                      pixel < pixels ? Problem::K - n : 0);
      Finished::leave(place + block * block_filters * int(sizeof(Output)), y);
    }
    __syncwarp();
    finished.write(output, pixels, columns);
    __syncwarp();
  }

  // of_block: what belongs to this thread's filters of the first block.
  __device__ static __forceinline__ void store(const Accumulator (&acc)[accumulators], const Epilogue<Problem>& epilogue,
                                               Filters of_block, Output* output, char* shared, const Item& item, int group) {
    const int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32 % 4, n = item.n0 + lane % 4 * lane_filters;
    const s64 of_warp = item.m0 + (Config::pingpong ? 0 : group * consumer_m) + warp * 16, first = of_warp + lane / 4;
    if constexpr (collected) {
      char* const rows = shared + collected_offset + (group * 4 + warp) * Finished::bytes;
#pragma unroll
      for (int x = 0; x < 2 * Config::rows; ++x)
        store_collected(acc, epilogue, output, rows, item, of_warp + x / 2 * 64 + x % 2 * 8, x / 2, x % 2);
    } else if constexpr (Epilogue<Problem>::per_filter) {
      // block by block: what belongs to its filters is read once for all pixels, while those of the block before are stored
#pragma unroll
      for (int block = 0; block < blocks; ++block) {
        const Filters now = of_block;
        if (block + 1 < blocks) of_block = filters(epilogue, item, block + 1);
#pragma unroll
        for (int x = 0; x < 2 * Config::rows; ++x) {
          const s64 m = first + x / 2 * 64 + x % 2 * 8;
          if (m < end(item)) store(acc, epilogue, now, output, m * Problem::K + n, n, x / 2, x % 2, block);
        }
      }
    } else {
#pragma unroll
      for (int x = 0; x < 2 * Config::rows; ++x) {
        const s64 m = first + x / 2 * 64 + x % 2 * 8;
        if (m >= end(item)) continue;
#pragma unroll
        for (int block = 0; block < blocks; ++block)
          store(acc, epilogue, of_block, output, m * Problem::K + n, n, x / 2, x % 2, block);
      }
    }
  }

  __device__ static __forceinline__ void consume(Output* output, void* workspace, const Epilogue<Problem>& epilogue, char* shared,
                                                 u32 ring, u32 full, u32 empty, u32 turn, int group) {
    const int lane = int(threadIdx.x) % 32;
    int stage = 0, round = 0;
    u32 parity = 0;
    auto skip = [&](int count) {
      stage += count;
      parity ^= (stage / stages) & 1;
      stage %= stages;
    };
    if (Config::pingpong) skip(group * slices_per_item);
    const int clusters = int(gridDim.x) / cluster;
    const int begin = int(blockIdx.x) / cluster + (Config::pingpong ? group * clusters : 0);
    const int stride = clusters * (Config::pingpong ? consumers : 1);
#pragma unroll 1
    for (int index = begin; index < items; index += stride, ++round) {
      const Item item(index);
      Accumulator acc[accumulators];
      // in turn, so that no consumer is more than a phase behind on a stage's barrier
      if (Config::pingpong && (group || round)) ptx::barrier_wait(turn + group * 8, group ? round & 1 : (round - 1) & 1);
      int previous = stage;
      auto slice = [&](int i) {
        const u32 a = ring + stage * stage_bytes + (Config::pingpong ? 0 : group * consumer_m * row_bytes);
        const u64 from_a = ptx::matrix_descriptor<row_bytes>(a, 8 * row_bytes);
        const u64 from_b = ptx::matrix_descriptor<row_bytes>(filters_at(ring, stage, i), 8 * row_bytes);
        ptx::barrier_wait(full + stage * 8, parity);
        ptx::wgmma_fence();
        if (i == 0)
          multiply<true>(acc, from_a, from_b);
        else
          multiply<false>(acc, from_a, from_b);
        ptx::wgmma_commit();
      };
      slice(0);
      skip(1);
#pragma unroll 1
      for (int i = 1; i < slices_per_item; ++i) {
        slice(i);
        ptx::wgmma_wait_previous();
        release(empty + previous * 8, lane);
        previous = stage;
        skip(1);
      }
      if (Config::pingpong && lane == 0) ptx::barrier_arrive(turn + (group + 1) % consumers * 8);
      // asked for before the last products are waited for
      Filters of_block{};
      if constexpr (!collected) of_block = filters(epilogue, item, 0);
      ptx::wgmma_wait();
#pragma unroll
      for (int j = 0; j < accumulators; ++j) ptx::pin(acc[j]);
      release(empty + previous * 8, lane);
      if (Config::pingpong) skip((consumers - 1) * slices_per_item);
      if constexpr (split_k > 1) {
        if (!reduce(acc, workspace, item, group)) continue;
      }
      store(acc, epilogue, of_block, output, shared, item, group);
    }
  }

  __device__ static __forceinline__ void run(const ptx::TensorMap* activation, const ptx::TensorMap* filter, Output* output,
                                             void* workspace, const Epilogue<Problem>& epilogue, char* shared) {
    const u32 ring = ptx::shared_address(shared), full = ring + barrier_offset, empty = full + stages * 8, turn = empty + stages * 8;
    // the compiler must know that all threads of a warp agree
    const int warp = __shfl_sync(0xffffffffu, int(threadIdx.x) / 32, 0), lane = int(threadIdx.x) % 32;
    if (threadIdx.x == 0) {
      for (int i = 0; i < stages; ++i) {
        ptx::barrier_init(full + i * 8, 1);
        ptx::barrier_init(empty + i * 8, 4 * sharing * cluster);
      }
      for (int i = 0; i < consumers; ++i) ptx::barrier_init(turn + i * 8, 4);
      ptx::barrier_init_fence();
    }
    if (threadIdx.x == consumers * 128) {
      // the first pixels, which take longest, are asked for before barriers are there to be told of their arrival
      const Item first(int(blockIdx.x) / cluster);
      const Corner corner(first.m0);
      ptx::prefetch_pixels(activation, first.split * slices_per_item / taps * chunk_elements, corner.w, corner.h, corner.image);
      ptx::prefetch_map(filter);
    }
    if constexpr (cluster > 1)
      ptx::sync_cluster();
    else
      __syncthreads();
    if (warp >= consumers * 4) {
      ptx::release_registers<24>();
      if (warp == consumers * 4 && lane == 0) produce(activation, filter, ring, full, empty);
    } else {
      epilogue.prefetch(int(threadIdx.x), consumers * 128, Problem::K);
      ptx::claim_registers<Problem::consumer_registers>();
      consume(output, workspace, epilogue, shared, ring, full, empty, turn, warp / 4);
    }
    // no block ends while another may still arrive at its barriers
    if constexpr (cluster > 1) ptx::sync_cluster();
  }
};
