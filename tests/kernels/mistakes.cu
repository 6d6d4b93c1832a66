// What a GPU leaves undefined and the emulator must catch, for tests/kernels/test_emulator.py.  Two warps a block.
#include "ptx.cuh"

// The neighbour's value without a barrier between.
extern "C" __global__ void missing_barrier(float* out) {
  DYNAMIC_SHARED(shared);
  float* values = reinterpret_cast<float*>(shared);
  values[threadIdx.x] = 1.0f;
  out[threadIdx.x] = values[(threadIdx.x + 32) % 64];
}

// An asynchronous copy that nobody waits for.
extern "C" __global__ void missing_wait(const uint4* in, uint4* out) {
  DYNAMIC_SHARED(shared);
  uint4* tile = reinterpret_cast<uint4*>(shared);
  cp_async16(&tile[threadIdx.x], &in[threadIdx.x], true);
  cp_async_commit();
  cp_async_wait<1>();
  out[threadIdx.x] = tile[threadIdx.x];
}

extern "C" __global__ void divergent_shuffle(float* out) {
  if (threadIdx.x < 16) out[threadIdx.x] = shuffle_xor(1.0f, 1);
}

extern "C" __global__ void divergent_barrier(float* out) {
  if (threadIdx.x < 48) __syncthreads();
  else __syncwarp();
  out[threadIdx.x] = 1.0f;
}

extern "C" __global__ void shared_overrun(float* out) {
  DYNAMIC_SHARED(shared);
  reinterpret_cast<float*>(shared)[threadIdx.x] = 1.0f;
  out[threadIdx.x] = 1.0f;
}

extern "C" __global__ void misaligned(const u8* in, uint4* out) {
  out[threadIdx.x] = load_global(reinterpret_cast<const uint4*>(in + 4));
}
