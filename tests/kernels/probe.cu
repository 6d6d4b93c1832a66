// Every instruction of ptx.cuh once, for tests/kernels/test_ptx.py.  One warp a block unless said otherwise.
#include "ptx.cuh"

// c[16][8] = a[16][16] · b[8][16]ᵀ, fp16 → fp32: both operands by ldmatrix out of shared memory.
extern "C" __global__ void __launch_bounds__(32) multiply(const uint4* a, const uint4* b, float* c) {
  DYNAMIC_SHARED(shared);
  uint4* tile = reinterpret_cast<uint4*>(shared);  // a: 16 rows of 2 pieces, then b: 8 rows of 2
  const int lane = threadIdx.x, g = lane / 4, t = lane % 4;
  cp_async16(&tile[lane], &a[lane], true);
  if (lane < 16) cp_async16(&tile[32 + lane], &b[lane], true);
  cp_async_commit();
  cp_async_wait<0>();
  __syncwarp();
  u32 rows[4], columns[4];
  ldmatrix_x4(rows, &tile[(lane % 16) * 2 + lane / 16]);
  ldmatrix_x4(columns, &tile[32 + (lane % 8) * 2 + lane / 8 % 2]);
  float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  mma_m16n8k16(sums, rows, columns[0], columns[1]);
  for (int i = 0; i < 4; ++i) c[(g + 8 * (i / 2)) * 8 + 2 * t + i % 2] = sums[i];
}

// c[signed or not][16][8] = a[16][32] · b[8][32]ᵀ, bytes → int32, added to what c has.
extern "C" __global__ void __launch_bounds__(32) multiply_bytes(const u32* a, const u32* b, i32* c) {
  const int lane = threadIdx.x, g = lane / 4, t = lane % 4;
  const u32 rows[4] = {a[g * 8 + t], a[(g + 8) * 8 + t], a[g * 8 + t + 4], a[(g + 8) * 8 + t + 4]};
  for (int kind = 0; kind < 2; ++kind) {
    i32 sums[4];
    for (int i = 0; i < 4; ++i) sums[i] = c[kind * 128 + (g + 8 * (i / 2)) * 8 + 2 * t + i % 2];
    if (kind == 0) mma_m16n8k32_s8(sums, rows, b[g * 8 + t], b[g * 8 + t + 4]);
    else mma_m16n8k32_u8(sums, rows, b[g * 8 + t], b[g * 8 + t + 4]);
    for (int i = 0; i < 4; ++i) c[kind * 128 + (g + 8 * (i / 2)) * 8 + 2 * t + i % 2] = sums[i];
  }
}

// out[8][8] = in[8][8]ᵀ, halves.
extern "C" __global__ void __launch_bounds__(32) transpose(const uint4* in, u32* out) {
  DYNAMIC_SHARED(shared);
  uint4* rows = reinterpret_cast<uint4*>(shared);
  if (threadIdx.x < 8) rows[threadIdx.x] = load_stream(&in[threadIdx.x]);
  __syncwarp();
  u32 r[4];
  ldmatrix_x4_trans(r, &rows[threadIdx.x % 8]);
  out[threadIdx.x] = r[0];
}

// out[i] = in[i] of odd lanes, else 0, by 8-byte loads; then all of in.
extern "C" __global__ void __launch_bounds__(32) load_pairs(const uint2* in, uint2* out) {
  const int i = threadIdx.x;
  out[i] = load_stream_if(&in[i], i % 2);
  out[32 + i] = load_stream(&in[i]);
}

// Bit and half arithmetic on one pair a lane: out[operation][lane].
extern "C" __global__ void __launch_bounds__(32) arithmetic(const u32* a, const u32* b, const u32* c, u32* out) {
  const int i = threadIdx.x;
  out[i] = lop3_and_or(a[i], b[i], c[i]);
  out[32 + i] = half2_add(a[i], b[i]);
  out[64 + i] = half2_sub(a[i], b[i]);
  out[96 + i] = half2_mul(a[i], b[i]);
  out[128 + i] = half2_fma(a[i], b[i], c[i]);
  out[160 + i] = pack_half2(half_to_float(a[i] & 0xffff), half_to_float(a[i] >> 16));
  out[192 + i] = permute_bytes(a[i], b[i], 0x5140);
  out[224 + i] = __float_as_uint(exp2_fast(half_to_float(a[i] & 0xffff)));
  out[256 + i] = half2_max_nan(a[i], b[i]);
}

// Of two floats a lane the lesser and the greater one: out[operation][lane].
extern "C" __global__ void __launch_bounds__(32) extremes(const float* a, const float* b, float* out) {
  const int i = threadIdx.x;
  out[i] = min_nan(a[i], b[i]);
  out[32 + i] = max_nan(a[i], b[i]);
}

// Lane exchanges: out[operation][lane].
extern "C" __global__ void __launch_bounds__(32) exchanges(const float* in, u32* out) {
  const int i = threadIdx.x;
  const float value = in[i];
  out[i] = __float_as_uint(shuffle_xor(value, 5));
  out[32 + i] = __float_as_uint(shuffle_down(value, 3));
  out[64 + i] = __float_as_uint(shuffle_from(value, 7));
  out[96 + i] = ballot(value > 0.0f);
}

// Blocks count themselves; the last to arrive writes how many there were.  Any number of warps.
extern "C" __global__ void last_arriver(i32* counter, i32* out) {
  __shared__ i32 before;
  if (threadIdx.x == 0) {
    thread_fence();
    before = atomic_add(counter, 1);
  }
  __syncthreads();
  if (before == static_cast<i32>(gridDim.x) - 1) out[threadIdx.x] = before + 1;
}

// out[i] = in[i] · scale + offset, where null is zeros: scalars of every kind, a null pointer, a dependent launch.
extern "C" __global__ void scale_add(const float* in, float* out, float scale, i32 offset, long long n) {
  dependency_wait();
  const long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  dependency_launch();
  if (i < n) out[i] = fmaf(in ? in[i] : 0.0f, scale, static_cast<float>(offset));
}
