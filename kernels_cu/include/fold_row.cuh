// One row of the residual stream between two linears, by a block of 256 threads:
//
//   s = Σ partials                      balanced binary tree, in order; no partials: no sum
//   x += post ? rms(s) · post : s
//   x = rms(x) · loop                   if there is a loop gain
//   x += injected                       mode add; mode store: injected = x first
//   y = half(out ? rms(x) · out : x)    rms(v) = v / sqrt(mean(v²) + eps)
//
// Everything is fp32 but gains and y.  A thread's columns, and so every sum's order, follow from the width alone:
// chunk j of thread i is columns 4·(256·j + i) … + 3.
#pragma once
#include "ptx.cuh"

#ifndef TL_CHUNKS
#define TL_CHUNKS 2
#endif

constexpr int kFoldThreads = 256, kFoldWarps = kFoldThreads / 32;
constexpr int kChunks = TL_CHUNKS;      // 1024 columns each, the last one partly idle
constexpr int kFoldScratch = 3 * kFoldWarps;  // floats of shared memory

enum Inject { kInjectNone, kInjectStore, kInjectAdd };

struct Fold {
  const float* x;         // [rows][width]
  float* x_out;           // [rows][width], may be x; null: not stored
  const float* partials;  // [num_partials][rows][width]; num_partials 0, 1, 2, 4, 8 or 16
  int num_partials;
  const u16* post_gain;   // half [width] or null, like the other gains
  const u16* loop_gain;
  const u16* out_gain;
  int inject;
  float* injected;        // [rows][width]
  int rows, width;
  float eps;
};

typedef float4 Columns[kChunks];

DEVICE float4 combine(float4 a, float4 b) { return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); }

template <class Visit>
DEVICE void for_columns(int width, Visit visit) {
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    const int column = (chunk * kFoldThreads + threadIdx.x) * 4;
    if (column < width) visit(chunk, column);
  }
}

template <int kCount>
DEVICE float4 sum_partials(const float* partials, long long stride) {
  if constexpr (kCount == 1) {
    return *reinterpret_cast<const float4*>(partials);
  } else {
    const float4 first = sum_partials<kCount / 2>(partials, stride);
    return combine(first, sum_partials<kCount / 2>(partials + kCount / 2 * stride, stride));
  }
}

template <int kCount>
DEVICE void load_sums(Columns& sums, const Fold& f, int row) {
  const float* partials = f.partials + static_cast<long long>(row) * f.width;
  const long long stride = static_cast<long long>(f.rows) * f.width;
  for_columns(f.width, [&](int chunk, int column) { sums[chunk] = sum_partials<kCount>(partials + column, stride); });
}

DEVICE void load_sums(Columns& sums, const Fold& f, int row) {
  switch (f.num_partials) {
    case 1: return load_sums<1>(sums, f, row);
    case 2: return load_sums<2>(sums, f, row);
    case 4: return load_sums<4>(sums, f, row);
    case 8: return load_sums<8>(sums, f, row);
    default: return load_sums<16>(sums, f, row);
  }
}

// The same bits in every thread.  `scratch`: one float a warp, not used since the last barrier but one.
DEVICE float sum_over_block(float value, float* scratch) {
  for (int mask = 16; mask; mask /= 2) value += shuffle_xor(value, mask);
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = value;
  __syncthreads();
  return ((scratch[0] + scratch[1]) + (scratch[2] + scratch[3])) + ((scratch[4] + scratch[5]) + (scratch[6] + scratch[7]));
}

// 1 / sqrt(mean(v²) + eps).
DEVICE float inverse_rms(const Columns& v, const Fold& f, float* scratch) {
  float squares = 0.0f;
  for_columns(f.width, [&](int chunk, int) {
    const float4 c = v[chunk];
    squares = fmaf(c.w, c.w, fmaf(c.z, c.z, fmaf(c.y, c.y, fmaf(c.x, c.x, squares))));
  });
  const float mean = sum_over_block(squares, scratch) / static_cast<float>(f.width);
  return 1.0f / sqrtf(mean + f.eps);
}

DEVICE float4 load_gain(const u16* gain, int column) {
  const uint2 bits = *reinterpret_cast<const uint2*>(gain + column);
  return make_float4(half_to_float(bits.x & 0xffff), half_to_float(bits.x >> 16), half_to_float(bits.y & 0xffff),
                     half_to_float(bits.y >> 16));
}

// v = rms(v) · gain.
DEVICE void normalise(Columns& v, const u16* gain, const Fold& f, float* scratch) {
  const float inverse = inverse_rms(v, f, scratch);
  for_columns(f.width, [&](int chunk, int column) {
    const float4 g = load_gain(gain, column), c = v[chunk];
    v[chunk] = make_float4(c.x * inverse * g.x, c.y * inverse * g.y, c.z * inverse * g.z, c.w * inverse * g.w);
  });
}

DEVICE void inject(Columns& x, const Fold& f, long long start) {
  for_columns(f.width, [&](int chunk, int column) {
    float4* injected = reinterpret_cast<float4*>(f.injected + start + column);
    if (f.inject == kInjectStore) *injected = x[chunk];
    x[chunk] = combine(x[chunk], f.inject == kInjectStore ? x[chunk] : *injected);
  });
}

// store(column, four halves) is called for every fourth column.  All 256 threads take part.
template <class Store>
DEVICE void fold_row(const Fold& f, int row, float* scratch, Store store) {
  const long long start = static_cast<long long>(row) * f.width;
  Columns x;
  for_columns(f.width, [&](int chunk, int column) { x[chunk] = *reinterpret_cast<const float4*>(f.x + start + column); });
  if (f.num_partials) {
    Columns sums;
    load_sums(sums, f, row);
    if (f.post_gain) normalise(sums, f.post_gain, f, scratch);
    for_columns(f.width, [&](int chunk, int) { x[chunk] = combine(x[chunk], sums[chunk]); });
  }
  if (f.loop_gain) normalise(x, f.loop_gain, f, scratch + kFoldWarps);
  if (f.inject != kInjectNone) inject(x, f, start);
  if (f.x_out)
    for_columns(f.width, [&](int chunk, int column) { *reinterpret_cast<float4*>(f.x_out + start + column) = x[chunk]; });
  if (f.out_gain) normalise(x, f.out_gain, f, scratch + 2 * kFoldWarps);
  for_columns(f.width, [&](int chunk, int column) {
    const float4 c = x[chunk];
    store(column, make_uint2(pack_half2(c.x, c.y), pack_half2(c.z, c.w)));
  });
}
