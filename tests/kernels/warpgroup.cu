// Products of a warpgroup, for tests/kernels/test_warpgroup.py: beside those of single warps, and used wrongly.
#include "ptx_sm90.cuh"

#ifndef TL_TILES
#define TL_TILES 2
#endif
#ifndef TL_SWIZZLED
#define TL_SWIZZLED 0
#endif

constexpr int kTiles = TL_TILES, kRows = 8 * kTiles, kInputs = 64, kColumn = kRows * 16 + 16;

// Where in shared memory 8 inputs of a row are: [k8][row][16 bytes], columns kColumn bytes apart; or swizzled rows.
DEVICE int place_of(int row, int k8) {
  return TL_SWIZZLED ? row * 128 + (k8 ^ row % 8) * 16 : k8 * kColumn + row * 16;
}

// The inputs of a step.
DEVICE SharedMatrix step_of(const unsigned char* shared, int step) {
  if (TL_SWIZZLED) return swizzled_matrix(shared) + step * 32;
  return shared_matrix(shared + place_of(0, 2 * step), kColumn, 128);
}

// x half [kRows][kInputs] to shared memory.
DEVICE void load_x(unsigned char* shared, const uint4* x) {
  for (int i = threadIdx.x; i < kRows * kInputs / 8; i += 128)
    *reinterpret_cast<uint4*>(shared + place_of(i / (kInputs / 8), i % (kInputs / 8))) = x[i];
}

// A fragment of w half [64][kInputs]: this warp's 16 rows, inputs 16 · step … + 15.
DEVICE void load_w(u32 (&a)[4], const u32* w, int step) {
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4, pair = step * 8 + lane % 4;
  for (int i = 0; i < 4; ++i) a[i] = w[(row + i % 2 * 8) * (kInputs / 2) + pair + i / 2 * 4];
}

// sums of both kinds, float [kind][64][kRows]: one warpgroup.
extern "C" __global__ void __launch_bounds__(128) both(const u32* w, const uint4* x, float* sums) {
  DYNAMIC_SHARED_ALIGNED(shared);
  load_x(shared, x);
  fence_for_wgmma();
  __syncthreads();
  float together[kTiles][4], apart[kTiles][4] = {};
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  for (int step = 0; step < kInputs / 16; ++step) {
    u32 a[4];
    load_w(a, w, step);
    wgmma_fence();
    wgmma(together, a, step_of(shared, step), step > 0);
    wgmma_commit();
    wgmma_wait<0>();
    for (int n = 0; n < kTiles; ++n) {
      const unsigned char* low = shared + place_of(n * 8 + g, 2 * step) + t * 4;
      const unsigned char* high = shared + place_of(n * 8 + g, 2 * step + 1) + t * 4;
      mma_m16n8k16(apart[n], a, *reinterpret_cast<const u32*>(low), *reinterpret_cast<const u32*>(high));
    }
  }
  for (int n = 0; n < kTiles; ++n)
    for (int i = 0; i < 4; ++i) {
      const int at = (threadIdx.x / 32 * 16 + g + i / 2 * 8) * kRows + n * 8 + 2 * t + i % 2;
      sums[at] = together[n][i];
      sums[64 * kRows + at] = apart[n][i];
    }
}

#if TL_TILES == 4 || TL_TILES == 8
// Of bytes, w [64][128] and x [kRows][128]: sums int32 [w signed or not][64][kRows].
extern "C" __global__ void __launch_bounds__(128) of_bytes(const u32* w, const uint4* x, i32* sums) {
  DYNAMIC_SHARED_ALIGNED(shared);
  load_x(shared, x);  // 8 halves and 16 bytes lie alike
  fence_for_wgmma();
  __syncthreads();
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  for (int kind = 0; kind < 2; ++kind) {
    i32 together[kTiles][4];
    for (int step = 0; step < kInputs / 16; ++step) {
      u32 a[4];
      load_w(a, w, step);
      wgmma_fence();
      if (kind == 0) wgmma_s8(together, a, step_of(shared, step), step > 0);
      else wgmma_u8(together, a, step_of(shared, step), step > 0);
      wgmma_commit();
      wgmma_wait<0>();
    }
    for (int n = 0; n < kTiles; ++n)
      for (int i = 0; i < 4; ++i)
        sums[(kind * 64 + threadIdx.x / 32 * 16 + g + i / 2 * 8) * kRows + n * 8 + 2 * t + i % 2] = together[n][i];
  }
}
#endif

// mistake 1: no wgmma_fence; 2: no fence of shared memory; 3: a wait before the commit; 4: no wait at all.
extern "C" __global__ void __launch_bounds__(128) mistaken(const uint4* x, float* out, i32 mistake) {
  DYNAMIC_SHARED(shared);
  load_x(shared, x);
  if (mistake != 2) fence_for_wgmma();
  __syncthreads();
  float sums[kTiles][4] = {};
  const u32 a[4] = {};
  if (mistake != 1) wgmma_fence();
  wgmma(sums, a, shared_matrix(shared, kColumn, 128), false);
  if (mistake != 3) wgmma_commit();
  if (mistake != 4) wgmma_wait<0>();
  out[threadIdx.x] = sums[0][0];
}

#ifdef TL_CLUSTER
// out[block][i] = in[the block after it in the cluster][i], TL_CLUSTER blocks of 32 threads, 4 floats each.
extern "C" __global__ void CLUSTER_ALONG_Y(TL_CLUSTER) __launch_bounds__(32)
    hand_on(const float4* in, float4* out, i32 rounds) {
  DYNAMIC_SHARED(shared);
  Arrivals* arrivals = reinterpret_cast<Arrivals*>(shared);
  float4* received = reinterpret_cast<float4*>(shared + 16) + threadIdx.x;
  const int rank = blockIdx.y % TL_CLUSTER, before = (rank + TL_CLUSTER - 1) % TL_CLUSTER;
  if (threadIdx.x == 0) start_arrivals(arrivals);
  cluster_arrive();
  for (int round = 0; round < rounds; ++round) {
    const int at = (round * gridDim.y + blockIdx.y) * 32 + threadIdx.x;
    cluster_wait();
    if (threadIdx.x == 0) expect_bytes(arrivals, 32 * sizeof(float4));
    store_in_cluster(received, arrivals, before, in[at]);
    wait_for_bytes(arrivals, round);
    out[at] = *received;
    cluster_arrive();
  }
  cluster_wait();
}
#endif
