// A page of a K/V head in shared memory, as it is stored: whole for the tiles of a shared item, or as far as rows have
// copies of it.
#pragma once

#include "decode_work.cuh"
#include "query_tiles.cuh"

constexpr int kHeadPieces = kHeadElements / kPieceElements;  // of K, and of V
constexpr int kGroupTiles = kHeadDim / 16;                   // tiles of 8 output dims mixed at once: two groups

struct SharedPage : SharedScales {
  alignas(16) Piece keys[kPageTokens][kRowPieces];
  SharedValues<> values;
};

// Where a token has a piece.  Lanes read four pieces of several tokens at once, which must not meet in a bank: of halves
// those of two neighbours, of levels those of tokens n, n + 1, n + 8 and n + 9.
DEVICE int place_of_key(int token, int piece) {
  if (kCopyPieces == 1) return piece ^ (token % 2 * 4);
  const int nth = token % 2 + token / 8 % 2 * 2;
  return piece ^ ((kHeadDim == 128 ? nth : nth / 2) * 4);  // two rows of 64 bytes lie apart anyway
}

// 16 bytes.
DEVICE void copy_if(void* shared, const void* global, bool wanted, u64 policy) {
  if (wanted)
    cp_async16(shared, global, policy);
  else
    *static_cast<uint4*>(shared) = no_piece();
}

// Asks for tokens first ≤ token < end of a page, both multiples of 8; what nobody sees becomes zeros.
DEVICE void copy_page(SharedPage& page, const PageHead& from, Sight any, int first, int end) {
  const u64 policy = cache_policy(false);
#pragma unroll
  for (int i = threadIdx.x; i < kHeadPieces / kCopyPieces; i += kThreads) {
    const int at = i * kCopyPieces, token = at / kRowPieces;
    if (token >= first && token < end)
      copy_if(&page.keys[token][place_of_key(token, at % kRowPieces)], from.keys + 8 * at, sees(any, token), policy);
  }
#pragma unroll
  for (int i = threadIdx.x; i < kHeadPieces / kCopyPieces; i += kThreads) {
    const int at = i * kCopyPieces, token = at / kHeadDim * kPieceElements;
    if (token >= first && token < end)
      copy_if(&page.values.of_piece(at), from.values + 8 * at, sees_some(any, token, 8), policy);
  }
  page.copy_scales(from.key_scales, from.value_scales, [&](uint4* shared, const uint4* scales, int token) {
    if (token >= first && token < end) cp_async16(shared, scales, sees_some(any, token, 8));  // ptx.cuh says why
  });
  cp_async_commit();
}

// The same of the first `end` tokens, a multiple of 8, which are all there: small code.
DEVICE void copy_first(SharedPage& page, const PageHead& from, int end) {
#pragma unroll 4
  for (int i = threadIdx.x; i < end * kRowPieces / kCopyPieces; i += kThreads) {
    const int at = i * kCopyPieces, token = at / kRowPieces;
    cp_async16(&page.keys[token][place_of_key(token, at % kRowPieces)], from.keys + 8 * at, true);
  }
#pragma unroll 4
  for (int i = threadIdx.x; i < end / kPieceElements * kHeadDim / kCopyPieces; i += kThreads)
    cp_async16(&page.values.of_piece(i * kCopyPieces), from.values + 8 * i * kCopyPieces, true);
  page.copy_scales(from.key_scales, from.value_scales, [&](uint4* shared, const uint4* scales, int token) {
    if (token < end) cp_async16(shared, scales, true);
  });
  cp_async_commit();
}

DEVICE const Piece& value_piece(const SharedPage& page, int group, int n, int j) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, dim = 8 * (group * kGroupTiles + n) + g;
  return page.values.of(dim, 4 * j + t);
}

