// h = silu(gate) · up, silu(g) = g / (1 + e^−g)
//
//   gu  f16 [T][2·ff]   gate then up of a token, 16-byte aligned
//   h   f16 [T][ff]     16-byte aligned
//
// ff is a multiple of 8: a thread makes 8 neighbouring elements of TL_TOKENS tokens, all loads in flight at once; blocks
// in x cover ff, in y the tokens.  gu is read for the last time: it is the first to leave L2.
// Arithmetic in fp32, one rounding to fp16.  Bytes: 6·T·ff.
#include "ptx.cuh"

#ifndef TL_TOKENS
#define TL_TOKENS 2
#endif

constexpr int kThreads = 256;
constexpr int kTokens = TL_TOKENS;  // of a thread
constexpr float kLog2E = 1.44269504f;

DEVICE float swiglu_of(float gate, float up) {
  return gate * reciprocal_fast(1.0f + exp2_fast(-kLog2E * gate)) * up;
}

DEVICE u32 swiglu_of_pair(u32 gate, u32 up) {
  const float low = swiglu_of(half_to_float(gate & 0xffff), half_to_float(up & 0xffff));
  const float high = swiglu_of(half_to_float(gate >> 16), half_to_float(up >> 16));
  return pack_half2(low, high);
}

DEVICE uint4 swiglu_of_vector(const uint4& gate, const uint4& up) {
  return {swiglu_of_pair(gate.x, up.x), swiglu_of_pair(gate.y, up.y), swiglu_of_pair(gate.z, up.z),
          swiglu_of_pair(gate.w, up.w)};
}

extern "C" __global__ void __launch_bounds__(kThreads) swiglu(const uint4* gu, uint4* h, i32 d_ff, i32 num_tokens) {
  dependency_wait();
  dependency_launch();
  const int vectors = d_ff / 8, vector = blockIdx.x * kThreads + threadIdx.x;
  if (vector >= vectors) return;
  const int first = blockIdx.y * kTokens;
  uint4 gate[kTokens], up[kTokens];
#pragma unroll
  for (int i = 0; i < kTokens; ++i) {
    const u64 token = min(first + i, num_tokens - 1);
    gate[i] = load_stream(gu + 2 * token * vectors + vector);
    up[i] = load_stream(gu + (2 * token + 1) * vectors + vector);
  }
#pragma unroll
  for (int i = 0; i < kTokens; ++i)
    if (first + i < num_tokens) h[static_cast<u64>(first + i) * vectors + vector] = swiglu_of_vector(gate[i], up[i]);
}
