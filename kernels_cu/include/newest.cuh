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
constexpr bool kCodesNewest = sizeof(Stored) == 1;

#ifdef TL_INT8

#include "int8_pages.cuh"

// Four neighbouring elements; lanes behind the last have zeros.
struct NewestPart {
  float2 halves;
};

// The same, coded.
struct CodedPart {
  u32 levels;
  u16 scale;
};

// A vector K and a vector V as they are stored, in shared memory.
struct Newest {
  alignas(16) Stored levels[2][kHeadDim];
  u16 scales[2];
};

DEVICE bool has_part() { return 4 * (threadIdx.x % 32) < kHeadDim; }

// Where in a page that a row sees so much of its token is; −1: in another.
DEVICE int place_of_newest(Sight sight) { return sight.end > 0 && sight.end <= kPageTokens ? sight.end - 1 : -1; }

// Asks for K or V of a row's token.
DEVICE NewestPart load_newest(const u16* newest, int which, int row, const Lists& lists) {
  const int vector = (2 * row + which) * lists.num_kv_heads + static_cast<int>(blockIdx.x);
  const float2* parts = reinterpret_cast<const float2*>(newest + static_cast<u64>(vector) * kHeadDim);
  return {load_l2(parts + threadIdx.x % 32, has_part())};
}

// By a warp.
DEVICE CodedPart code(const NewestPart& part) {
  const u32 pairs[2] = {__float_as_uint(part.halves.x), __float_as_uint(part.halves.y)};
  float x[4];
  u32 largest = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    x[i] = half_to_float(static_cast<u16>(pairs[i / 2] >> 16 * (i % 2)));
    largest = max(largest, magnitude_of(x[i]));
  }
  const Scale scale = int8_scale(static_cast<u32>(reduce_max(static_cast<int>(largest))));
  return {int8_levels_of(x, scale), scale.half};
}

// A key; or of a value its scale.
DEVICE void store_newest(const PageHead& page, const CodedPart& coded, int which, int place) {
  u32* key = reinterpret_cast<u32*>(const_cast<Stored*>(page.keys) + place * kHeadDim);
  const uint4* scales = which == kKey ? page.key_scales : page.value_scales;
  if (which == kKey && has_part()) key[threadIdx.x % 32] = coded.levels;
  if (threadIdx.x % 32 == 0) reinterpret_cast<u16*>(const_cast<uint4*>(scales))[place] = coded.scale;
}

// A piece of V with its byte of a token.
DEVICE void put_level(u32& low, u32& high, u32 level, int place) {
  const u32 shift = 8 * (place % 4), others = ~(0xffu << shift);
  if (place % kPieceElements < 4) low = (low & others) | level << shift;
  else high = (high & others) | level << shift;
}

// All of a row's token, by a warp, out of the way of what it does next: nothing stays in registers.
DEVICE void put_in_page(const PageHead& page, const u16* newest, int row, const Lists& lists, int place) {
  Piece* values = reinterpret_cast<Piece*>(const_cast<Stored*>(page.values)) + 4 * (threadIdx.x % 32);
  uint4* octets = reinterpret_cast<uint4*>(values + value_piece(0, place / kPieceElements));
  const NewestPart key = load_newest(newest, kKey, row, lists), value = load_newest(newest, kValue, row, lists);
  uint4 pieces[2] = {};
  if (has_part()) pieces[0] = load_global(octets), pieces[1] = load_global(octets + 1);
  store_newest(page, code(key), kKey, place);
  const CodedPart coded = code(value);
  store_newest(page, coded, kValue, place);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    put_level(pieces[i].x, pieces[i].y, coded.levels >> 16 * i & 0xff, place);
    put_level(pieces[i].z, pieces[i].w, coded.levels >> (16 * i + 8) & 0xff, place);
    if (has_part()) octets[i] = pieces[i];
  }
}

// By a warp: into shared memory, a key into the page as well.
DEVICE void share_newest(Newest& shared, const PageHead& page, const NewestPart& part, int which, int place) {
  const CodedPart coded = code(part);
  store_newest(page, coded, which, place);
  if (has_part()) reinterpret_cast<u32*>(shared.levels[which])[threadIdx.x % 32] = coded.levels;
  if (threadIdx.x % 32 == 0) shared.scales[which] = coded.scale;
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
  put_level(piece.x, piece.y, static_cast<unsigned char>(coded.levels[kValue][dim]), place);
  *const_cast<Piece*>(in_page) = piece;
}

#else

struct Newest {};
struct NewestPart {};

DEVICE int place_of_newest(Sight) { return -1; }
DEVICE NewestPart load_newest(const u16*, int, int, const Lists&) { return {}; }
DEVICE void put_in_page(const PageHead&, const u16*, int, const Lists&, int) {}
DEVICE void share_newest(Newest&, const PageHead&, const NewestPart&, int, int) {}
DEVICE void put_scale(StepScales&, const Newest&, int, int, int) {}
DEVICE void put_key(StepKeys&, const Newest&, int, int) {}
DEVICE void put_value(Piece&, const Piece*, const Newest&, int, int) {}

#endif
