// How a page stores K and V of a token, and how that becomes operands of products.
//
//   fp16       halves
//   TL_INT8    levels −127 … 127, and a scale in fp16 for each (token, head): value = level · scale
//
// Decoded tokens multiply levels by levels (level_products.cuh).  Prompt tokens multiply halves by levels, which are
// exact in fp16.  A token's scales multiply in fp32: that of K its column of scores, that of V its column of weights
// before these are rounded to fp16:
//
//   score = (Σ q·level) · K scale        mix: fp16(w · V scale) · level        sum: w
//
// V scales are small, and fp16 is coarse below 2^-14.  So these weights are taken relative to an exponent 6 below the
// largest one: they reach 64, a power of two that is the same for every page, and cancels where o is divided by the sum.
// The largest scale is 65504/127, so fp16 holds each product.
//
// In fp16 nothing has a scale: structs are empty, functions give back what they got.
//
// A piece is 8 elements that a product sums over: of K 8 dims of a token, of V 8 tokens, an octet, of a dim.  An
// octet's pieces lie side by side, dim after dim, so that a token's V is D elements in D·8 neighbouring ones:
//
//   K   [64 tokens][D]        V   [8 octets][D][8 tokens]
#pragma once

#include "ptx.cuh"

#ifndef TL_HEAD_DIM
#define TL_HEAD_DIM 128
#endif

constexpr int kHeadDim = TL_HEAD_DIM;  // D
constexpr int kPageTokens = 64;
constexpr int kPieceElements = 8;
constexpr int kOctets = kPageTokens / kPieceElements;
constexpr int kScalePieces = kPageTokens / 8;  // of a head in a page, 16 bytes each

#ifdef TL_INT8

typedef signed char Stored;
typedef uint2 Piece;                      // 8 levels
constexpr int kScaleBytes = sizeof(u16);  // of K, and of V, of a token and head
constexpr float kWeightBits = 6.0f;       // a prompt's weight's largest exponent of 2

// Of a lane's columns 2t and 2t + 1 of the two tiles of a step (attention.cuh): two scales a tile.
struct StepScales {
  u32 of[2];
};

// Four levels as halves: level + 128 is the low end of 1024's mantissa.
DEVICE void widen_levels(u32 (&pairs)[2], u32 levels) {
  constexpr u32 kThousands = 0x64646464, kOffset = 0x64806480;  // 1024 + 128
  const u32 biased = levels ^ 0x80808080;
  pairs[0] = half2_sub(permute_bytes(biased, kThousands, 0x4140), kOffset);
  pairs[1] = half2_sub(permute_bytes(biased, kThousands, 0x4342), kOffset);
}

DEVICE uint4 halves_of(const Piece& piece) {
  u32 low[2], high[2];
  widen_levels(low, piece.x);
  widen_levels(high, piece.y);
  return make_uint4(low[0], low[1], high[0], high[1]);
}

// Where a head's scales of a page have those of the lane's columns of step s.
DEVICE const uint2* columns_of_step(const uint4* scales, int s) {
  return reinterpret_cast<const uint2*>(scales) + 8 * (s / 2) + 2 * (threadIdx.x % 4) + s % 2;
}

// Out of memory; zeros where not wanted.
DEVICE StepScales load_scales(const uint4* scales, int s, bool wanted) {
  const uint2 columns = load_stream_if(columns_of_step(scales, s), wanted);
  return {{columns.x, columns.y}};
}

// A head's scales of a page, in shared memory.
struct SharedScales {
  uint4 of_keys[kScalePieces], of_values[kScalePieces];

  DEVICE StepScales of_step(const uint4 (&scales)[kScalePieces], int s) const {
    const uint2 columns = *columns_of_step(scales, s);
    return {{columns.x, columns.y}};
  }
  DEVICE StepScales key_scales(int s) const { return of_step(of_keys, s); }
  DEVICE StepScales value_scales(int s) const { return of_step(of_values, s); }

  // Of two pairs of tokens, each from an even one on.
  DEVICE StepScales of_pairs(const uint4 (&scales)[kScalePieces], int first, int second) const {
    const u32* pairs = reinterpret_cast<const u32*>(scales);
    return {{pairs[first / 2], pairs[second / 2]}};
  }
  DEVICE StepScales key_scales(int first, int second) const { return of_pairs(of_keys, first, second); }
  DEVICE StepScales value_scales(int first, int second) const { return of_pairs(of_values, first, second); }

  // copy(to, from, token): the scales of 8 tokens.
  template <class Copy>
  DEVICE void copy_scales(const uint4* keys, const uint4* values, Copy copy) {
    const int i = threadIdx.x % kScalePieces;
    if (threadIdx.x < kScalePieces) copy(of_keys + i, keys + i, 8 * i);
    else if (threadIdx.x < 2 * kScalePieces) copy(of_values + i, values + i, 8 * i);
  }
};

// Of column 2t + i of tile u.
DEVICE float scale_of(const StepScales& scales, int u, int i) {
  return half_to_float(static_cast<u16>(scales.of[u] >> 16 * i));
}

DEVICE float times_scale(float value, const StepScales& scales, int u, int i) { return value * scale_of(scales, u, i); }

#else

typedef u16 Stored;
typedef uint4 Piece;  // 8 halves
constexpr int kScaleBytes = 0;
constexpr float kWeightBits = 0.0f;

struct StepScales {};

DEVICE const uint4& halves_of(const Piece& piece) { return piece; }
DEVICE StepScales load_scales(const uint4*, int, bool) { return {}; }

struct SharedScales {
  DEVICE StepScales key_scales(int) const { return {}; }
  DEVICE StepScales value_scales(int) const { return {}; }
  DEVICE StepScales key_scales(int, int) const { return {}; }
  DEVICE StepScales value_scales(int, int) const { return {}; }
  template <class Copy>
  DEVICE void copy_scales(const uint4*, const uint4*, Copy) {}
};

DEVICE float times_scale(float value, const StepScales&, int, int) { return value; }

#endif

constexpr int kCopyPieces = 16 / sizeof(Piece);  // that an asynchronous copy takes

// Which of a head's pieces of V in a page a dim's of an octet is.
DEVICE constexpr int value_piece(int dim, int octet) { return octet * kHeadDim + dim; }

// V in shared memory, in pieces as they are stored or in halves: octets are so far apart that what lanes read at once,
// 128 bytes of neighbouring dims of 4 octets, lies in banks of its own.
template <class Held = Piece>
constexpr int kSharedOctet = kHeadDim + 32 / sizeof(Held);

template <class Held = Piece>
struct SharedValues {
  alignas(16) Held pieces[kOctets * kSharedOctet<Held>];

  DEVICE Held& of(int dim, int octet) { return pieces[octet * kSharedOctet<Held> + dim]; }
  DEVICE const Held& of(int dim, int octet) const { return pieces[octet * kSharedOctet<Held> + dim]; }
  DEVICE Held& of_piece(int nth) { return of(nth % kHeadDim, nth / kHeadDim); }
};
