// Tiles of grouped.cu: which there are, and how their rows of x come to shared memory.
#pragma once

struct alignas(16) Tile { int expert, first, rows, row_tile; };

// Whether small tiles are faster: if there are few more of them than of large ones. Each takes 0.86 of the time (experts of one tile of either, on an H200),
// as decoding the weights once more costs more than anything else. By all threads of the block.
__device__ __forceinline__ bool small_are_faster(const int* ends, int n_experts) {
  __shared__ int small, large;
  if (threadIdx.x == 0) small = large = 0;
  __syncthreads();
  for (int e = threadIdx.x; e < n_experts; e += blockDim.x) {
    const int n = ends[e] - (e ? ends[e - 1] : 0);
    if (n) atomicAdd(&small, (n + SMALL_TILE - 1) / SMALL_TILE), atomicAdd(&large, (n + LARGE_TILE - 1) / LARGE_TILE);
  }
  __syncthreads();
  return 20 * small <= 23 * large;
}

// The places of tiles: before[e] = tiles of tokens before expert e. Filled by all threads of the block.
__device__ __forceinline__ int count_tiles(const int* ends, int n_experts, uint16_t* before) {
  for (int e = threadIdx.x; e < n_experts; e += blockDim.x) before[e] = uint16_t((ends[e] - (e ? ends[e - 1] : 0) + LARGEST - 1) / LARGEST);
  __syncthreads();
  if (threadIdx.x < 32) {
    int total = 0;
    for (int start = 0; start < n_experts; start += 32) {
      const int e = start + threadIdx.x, n = e < n_experts ? before[e] : 0;
      int scan = n;
#pragma unroll
      for (int step = 1; step < 32; step <<= 1) {
        const int other = __shfl_up_sync(0xffffffffu, scan, step);
        if (int(threadIdx.x) >= step) scan += other;
      }
      if (e < n_experts) before[e] = total + scan - n;
      total += __shfl_sync(0xffffffffu, scan, 31);
    }
    if (threadIdx.x == 0) before[n_experts] = total;
  }
  __syncthreads();
  return before[n_experts];
}

// Tile number `t`: all rows of weights for some tokens, then for the next ones. An expert's tokens
// are divided evenly, in multiples of 8.
__device__ __forceinline__ Tile find_tile(int t, int row_tiles, const int* ends, int n_experts, const uint16_t* before) {
  const int token_tile = t / row_tiles;
  int low = 0, high = n_experts - 1;
  while (low < high) {  // the last expert whose first tile is not after this one and that has any
    const int middle = (low + high + 1) / 2;
    if (before[middle] <= token_tile) low = middle; else high = middle - 1;
  }
  const int start = low ? ends[low - 1] : 0, count = ends[low] - start, n = before[low + 1] - before[low];
  const int share = ((count + n - 1) / n + 7) / 8 * 8, at = (token_tile - before[low]) * share;
  return {low, start + at, min(share, count - at), t % row_tiles};
}

// Rows of x (through `sources` where given: row sources[i] / n_slots) to the ring, 128 k at a time. `turn` counts stages over all tiles.
__device__ __forceinline__ void produce(const Tile& tile, const uint4* x, const int* sources, int n_slots, int cols, uint32_t ring,
                                        uint32_t full, uint32_t empty, Turn& turn) {
  const int thread = threadIdx.x - CONSUMERS * 128, chunk = thread % 16, lane_row = thread / 16;
  uint32_t from[LARGEST / 8];
#pragma unroll
  for (int i = 0; i < LARGEST / 8; ++i) {
    const int row = tile.first + min(lane_row + 8 * i, tile.rows - 1);
    const int source = sources == nullptr ? row : sources[row] / n_slots;
    from[i] = source * (steps_of(cols) * 16) + chunk;
  }
  const uint32_t to = ring + (chunk / 8) * (LARGEST * 128) + lane_row * 128 + ((chunk % 8) ^ lane_row) * 16;
  int before = 0;
  for (int k = 0; k < steps_of(cols); ++k, turn.next()) {
    const int stage = turn.stage;
    barrier_wait(empty + 8 * stage, turn.round ^ 1);
#pragma unroll
    for (int i = 0; i < LARGEST / 8; ++i)
      if (8 * i < tile.rows)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to + stage * STAGE_BYTES + i * 1024), "l"(x + (from[i] + k * 16))
                     : "memory");
    asm volatile("cp.async.commit_group;" ::: "memory");
    if (k) {  // the copy before this one has to have ended, and to be seen by the tensor cores
      asm volatile("cp.async.wait_group 1;\nfence.proxy.async.shared::cta;" ::: "memory");
      barrier_arrive(full + 8 * before);
    }
    before = stage;
  }
  asm volatile("cp.async.wait_group 0;\nfence.proxy.async.shared::cta;" ::: "memory");
  barrier_arrive(full + 8 * before);
}

// Where the element at place p of a permuted row is in the row itself.
__device__ __forceinline__ int unpermuted(int p) {
  const int s = p % 16;
  return p / 128 * 128 + s % 8 / 2 * 32 + p % 128 / 16 * 4 + s % 2 + s / 8 * 2;
}
