// h = silu(gate) · up, silu(g) = g / (1 + e^−g)
//
//   gu  f16 [T][2·ff]   gate then up of a token, 16-byte aligned
//   h   f16 [T][ff]     16-byte aligned
//
// ff is a multiple of 8: a thread makes 8 neighbouring elements of one token; blocks in x cover ff, in y the tokens.
// Arithmetic in fp32, one rounding to fp16.  Bytes: 6·T·ff.
#include "ptx.cuh"

constexpr int kThreads = 256;
constexpr float kLog2E = 1.44269504f;

DEVICE float swiglu_of(float gate, float up) { return gate / (1.0f + exp2_fast(-kLog2E * gate)) * up; }

DEVICE u32 swiglu_of_pair(u32 gate, u32 up) {
  const float low = swiglu_of(half_to_float(gate & 0xffff), half_to_float(up & 0xffff));
  const float high = swiglu_of(half_to_float(gate >> 16), half_to_float(up >> 16));
  return pack_half2(low, high);
}

extern "C" __global__ void __launch_bounds__(kThreads) swiglu(const uint4* gu, uint4* h, i32 d_ff) {
  dependency_wait();
  dependency_launch();
  const int vectors = d_ff / 8, vector = blockIdx.x * kThreads + threadIdx.x;
  if (vector >= vectors) return;
  const u64 token = blockIdx.y;
  const uint4 gate = load_global(gu + 2 * token * vectors + vector);
  const uint4 up = load_global(gu + (2 * token + 1) * vectors + vector);
  h[token * vectors + vector] = uint4{swiglu_of_pair(gate.x, up.x), swiglu_of_pair(gate.y, up.y),
                                      swiglu_of_pair(gate.z, up.z), swiglu_of_pair(gate.w, up.w)};
}
