// A row's newest token, where pages hold int8: `linear_qkv` leaves its K and V in fp16, for a scale belongs to a whole
// vector, of which a block of that kernel has but a part.  Who attends the page that the token belongs to codes it, puts
// it into the page, and multiplies by it; nobody else reads or writes that page meanwhile.
//
//   newest   fp16   [R][2][G][D]   K of each row's token, and V
//
// In fp16 the token is in its page already: there is no place for it, and nothing here does anything.
#pragma once

#include "decode_work.cuh"
#include "page_sums.cuh"

constexpr int kKey = 0, kValue = 1;

#ifdef TL_INT8

#include "int8_pages.cuh"

// As it is stored, in shared memory.
struct Newest {
  alignas(16) Stored levels[2][kHeadDim];
  u16 scales[2];
};

// Four neighbouring elements; lanes behind the last have zeros.
struct NewestPart {
  float2 halves;
};

// Where in a page that a row sees so much of its token is; −1: in another.
DEVICE int place_of_newest(Sight sight) { return sight.end > 0 && sight.end <= kPageTokens ? sight.end - 1 : -1; }

// Asks for K or V of a row's token.
DEVICE NewestPart load_newest(const u16* newest, int which, int row, const Lists& lists) {
  const int vector = (2 * row + which) * lists.num_kv_heads + static_cast<int>(blockIdx.x), lane = threadIdx.x % 32;
  const float2* parts = reinterpret_cast<const float2*>(newest + static_cast<u64>(vector) * kHeadDim);
  return {load_l2(parts + lane, 4 * lane < kHeadDim)};
}

// By a warp.  K and the scale go to the page, too.
DEVICE void code_newest(Newest& coded, const NewestPart& part, int which, const PageHead& page, int place) {
  const int lane = threadIdx.x % 32;
  const u32 pairs[2] = {__float_as_uint(part.halves.x), __float_as_uint(part.halves.y)};
  float x[4];
  u32 largest = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    x[i] = half_to_float(static_cast<u16>(pairs[i / 2] >> 16 * (i % 2)));
    largest = max(largest, magnitude_of(x[i]));
  }
  const Scale scale = int8_scale(static_cast<u32>(reduce_max(static_cast<int>(largest))));
  const u32 levels = int8_levels_of(x, scale);
  if (4 * lane < kHeadDim) {
    reinterpret_cast<u32*>(coded.levels[which])[lane] = levels;
    Stored* key = const_cast<Stored*>(page.keys) + place * kHeadDim;
    if (which == kKey) reinterpret_cast<u32*>(key)[lane] = levels;
  }
  if (lane == 0) {
    const uint4* scales = which == kKey ? page.key_scales : page.value_scales;
    coded.scales[which] = reinterpret_cast<u16*>(const_cast<uint4*>(scales))[place] = scale.half;
  }
}

// Into a lane's columns of step s.
DEVICE void put_scale(StepScales& scales, const Newest& coded, int which, int s, int place) {
#pragma unroll
  for (int u = 0; u < 2; ++u)
    if (token_of_column(s, u, 2 * (threadIdx.x % 4)) == place / 2 * 2) {
      const u32 shift = 16 * (place % 2);
      scales.of[u] = (scales.of[u] & ~(0xffffu << shift)) | static_cast<u32>(coded.scales[which]) << shift;
    }
}

DEVICE void put_key(StepKeys& keys, const Newest& coded, int s, int place) {
  const Piece* pieces = reinterpret_cast<const Piece*>(coded.levels[kKey]) + threadIdx.x % 4;
#pragma unroll
  for (int u = 0; u < 2; ++u)
    if (token_of_column(s, u, threadIdx.x % 32 / 4) == place) {
#pragma unroll
      for (int j = 0; j < kDimPieces; ++j) keys.of[u][j] = pieces[4 * j];
    }
  put_scale(keys.scales, coded, kKey, s, place);
}

// Into a dim's piece of the token's octet, of the page as well.
DEVICE void put_value(Piece& piece, const Piece* in_page, const Newest& coded, int dim, int place) {
  const u32 shift = 8 * (place % 4), others = ~(0xffu << shift);
  const u32 level = static_cast<u32>(static_cast<unsigned char>(coded.levels[kValue][dim])) << shift;
  if (place % kPieceElements < 4) piece.x = (piece.x & others) | level;
  else piece.y = (piece.y & others) | level;
  *const_cast<Piece*>(in_page) = piece;
}

#else

struct Newest {};
struct NewestPart {};

DEVICE int place_of_newest(Sight) { return -1; }
DEVICE NewestPart load_newest(const u16*, int, int, const Lists&) { return {}; }
DEVICE void code_newest(Newest&, const NewestPart&, int, const PageHead&, int) {}
DEVICE void put_scale(StepScales&, const Newest&, int, int, int) {}
DEVICE void put_key(StepKeys&, const Newest&, int, int) {}
DEVICE void put_value(Piece&, const Piece*, const Newest&, int, int) {}

#endif
