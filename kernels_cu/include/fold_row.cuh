// Rows of the residual stream between two linears, kRows at a time by a block of 256 threads; each row by itself:
//
//   s = Σ partials                      balanced binary tree, in order; no partials: no sum
//   x += post ? rms(s) · post : s
//   x = rms(x) · loop                   if there is a loop gain
//   x += injected                       mode add; mode store: injected = x first
//   y = half(out ? rms(x) · out : x)    rms(v) = v / sqrt(mean(v²) + eps)
//
// Everything is fp32 but gains and y.  A thread's columns, and so every sum's order, follow from the width alone:
// chunk j of thread i is columns 4·(256·j + i) … + 3.  Rows at a time change nothing but the number of barriers.
#pragma once
#include "row_norm.cuh"

#ifndef TL_CHUNKS
#define TL_CHUNKS 2
#endif
#ifndef TL_FOLD_PARTIALS
#define TL_FOLD_PARTIALS 0
#endif

constexpr int kFoldThreads = kRowThreads, kFoldWarps = kRowWarps;
constexpr int kChunks = TL_CHUNKS;               // 1024 columns each, the last one partly idle
constexpr int kFoldPartials = TL_FOLD_PARTIALS;  // how many there are, if any; 0: looked up
constexpr int kFoldScratch = 3 * kFoldWarps;     // floats of shared memory for each row at a time

enum Inject { kInjectNone, kInjectStore, kInjectAdd };

struct Fold {
  const float* x;         // [rows][width]
  float* x_out;           // [rows][width], may be x; null: not stored (nor is injected)
  const float* partials;  // [num_partials][rows][width]; num_partials 0, 1, 2, 4, 8 or 16
  int num_partials;
  const u16* post_gain;   // half [width] or null, like the other gains
  const u16* loop_gain;
  const u16* out_gain;
  int inject;
  float* injected;        // [rows][width]
  int rows, width;
  float eps, inverse_width;  // 1 / width
};

typedef float4 Columns[kChunks];  // of one row, this thread's

struct Gains {  // halves, this thread's columns
  uint2 post[kChunks], loop[kChunks], out[kChunks];
};

DEVICE float4 combine(float4 a, float4 b) { return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); }

template <class Visit>
DEVICE void for_columns(int width, Visit visit) {
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    const int column = (chunk * kFoldThreads + threadIdx.x) * 4;
    if (column < width) visit(chunk, column);
  }
}

DEVICE void load_gain(uint2 (&gain)[kChunks], const u16* from, int width) {
  if (from)
    for_columns(width, [&](int chunk, int column) { gain[chunk] = *reinterpret_cast<const uint2*>(from + column); });
}

// Constant: may come before dependency_wait.
DEVICE Gains load_gains(const Fold& f) {
  Gains gains;
  load_gain(gains.post, f.post_gain, f.width);
  load_gain(gains.loop, f.loop_gain, f.width);
  load_gain(gains.out, f.out_gain, f.width);
  return gains;
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
  if constexpr (kFoldPartials > 0) return load_sums<kFoldPartials>(sums, f, row);
  switch (f.num_partials) {
    case 1: return load_sums<1>(sums, f, row);
    case 2: return load_sums<2>(sums, f, row);
    case 4: return load_sums<4>(sums, f, row);
    case 8: return load_sums<8>(sums, f, row);
    default: return load_sums<16>(sums, f, row);
  }
}

// inverse[r] = 1 / sqrt(mean(v[r]²) + eps), the same bits in every thread.  `scratch`: kFoldWarps floats a row, not in
// use since the last barrier but one.
template <int kRows>
DEVICE void inverse_rms(float (&inverse)[kRows], const Columns (&v)[kRows], const Fold& f, float* scratch) {
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    float squares = 0.0f;
    for_columns(f.width, [&](int chunk, int) { squares = add_squares(squares, v[r][chunk]); });
    share_squares(squares, scratch + r * kFoldWarps);
  }
  __syncthreads();
#pragma unroll
  for (int r = 0; r < kRows; ++r) inverse[r] = inverse_of(scratch + r * kFoldWarps, f.inverse_width, f.eps);
}

// v = rms(v) · gain.
template <int kRows>
DEVICE void normalise(Columns (&v)[kRows], const uint2 (&gain)[kChunks], const Fold& f, float* scratch) {
  float inverse[kRows];
  inverse_rms(inverse, v, f, scratch);
#pragma unroll
  for (int r = 0; r < kRows; ++r)
    for_columns(f.width, [&](int chunk, int) { v[r][chunk] = scaled(v[r][chunk], inverse[r], gain[chunk]); });
}

DEVICE void inject(Columns& x, const Fold& f, long long start) {
  for_columns(f.width, [&](int chunk, int column) {
    float4* injected = reinterpret_cast<float4*>(f.injected + start + column);
    if (f.inject == kInjectStore && f.x_out) *injected = x[chunk];
    x[chunk] = combine(x[chunk], f.inject == kInjectStore ? x[chunk] : *injected);
  });
}

// Rows first_row … + kRows − 1.  store(r, column, four halves) is called for every fourth column of each.  All 256
// threads take part.  `scratch`: kRows · kFoldScratch floats.
template <int kRows, class Store>
DEVICE void fold_rows(const Fold& f, const Gains& gains, int first_row, float* scratch, Store store) {
  Columns x[kRows], sums[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const float* from = f.x + static_cast<long long>(first_row + r) * f.width;
    for_columns(f.width, [&](int chunk, int column) { x[r][chunk] = *reinterpret_cast<const float4*>(from + column); });
    if (f.num_partials) load_sums(sums[r], f, first_row + r);
  }
  if (f.num_partials && f.post_gain) normalise<kRows>(sums, gains.post, f, scratch);
#pragma unroll
  for (int r = 0; r < kRows; ++r)
    if (f.num_partials)
      for_columns(f.width, [&](int chunk, int) { x[r][chunk] = combine(x[r][chunk], sums[r][chunk]); });
  if (f.loop_gain) normalise<kRows>(x, gains.loop, f, scratch + kRows * kFoldWarps);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const long long start = static_cast<long long>(first_row + r) * f.width;
    if (f.inject != kInjectNone) inject(x[r], f, start);
    if (f.x_out)
      for_columns(f.width, [&](int chunk, int column) {
        *reinterpret_cast<float4*>(f.x_out + start + column) = x[r][chunk];
      });
  }
  if (f.out_gain) normalise<kRows>(x, gains.out, f, scratch + 2 * kRows * kFoldWarps);
#pragma unroll
  for (int r = 0; r < kRows; ++r)
    for_columns(f.width, [&](int chunk, int column) { store(r, column, pack_half4(x[r][chunk])); });
}
