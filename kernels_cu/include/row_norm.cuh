// rms(v) · gain of a row by a block of 256 threads, four columns at a time; which columns a thread has is the caller's.
//
//   rms(v) = v / sqrt(mean(v²) + eps), in fp32 to about 2 ulp
//
// Squares are summed over a thread's columns in order, then over its warp's lanes and the warps as balanced trees: the
// order follows from the columns that a thread has, and from nothing else.
#pragma once
#include "ptx.cuh"

constexpr int kRowThreads = 256, kRowWarps = kRowThreads / 32;

DEVICE float add_squares(float squares, float4 c) {
  return fmaf(c.w, c.w, fmaf(c.z, c.z, fmaf(c.y, c.y, fmaf(c.x, c.x, squares))));
}

// sums[warp] = Σ over the warp's lanes, for everybody after the next barrier.
DEVICE void share_squares(float squares, float* sums) {
  for (int mask = 16; mask; mask /= 2) squares += shuffle_xor(squares, mask);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = squares;
}

// 1 / sqrt(mean + eps) of what share_squares left, the same bits in every thread.
DEVICE float inverse_of(const float* s, float inverse_width, float eps) {
  const float sum = ((s[0] + s[1]) + (s[2] + s[3])) + ((s[4] + s[5]) + (s[6] + s[7]));
  return rsqrtf(fmaf(sum, inverse_width, eps));
}

// v · inverse · gain, which is halves.
DEVICE float4 scaled(float4 v, float inverse, uint2 gain) {
  return make_float4(v.x * inverse * half_to_float(gain.x & 0xffff), v.y * inverse * half_to_float(gain.x >> 16),
                     v.z * inverse * half_to_float(gain.y & 0xffff), v.w * inverse * half_to_float(gain.y >> 16));
}

DEVICE uint2 pack_half4(float4 v) { return make_uint2(pack_half2(v.x, v.y), pack_half2(v.z, v.w)); }
