// What rope.cu and rope_int8.cu have in common: where tokens go, and the rotation of heads of q and K.
//
// A thread takes 8 pairs of a token in 4 heads; a token's threads are neighbours, so that its cos and sin are read
// once.  V goes 64 tokens of a head at a time.
#pragma once

#include "attention.cuh"

#ifndef TL_INTERLEAVED
#define TL_INTERLEAVED 0
#endif
#ifndef TL_QUERIES_ONLY
#define TL_QUERIES_ONLY 0
#endif

constexpr int kThreads = 256;
constexpr int kTokens = 64;                                    // whose V a block transposes
constexpr int kHeads = 4;                                      // that a thread turns
constexpr int kPairs = 8;                                      // of a thread
constexpr int kTokenThreads = kHeadDim / (2 * kPairs);         // threads that turn one token
constexpr int kRowPieces = kHeadDim / 8;                       // 16-byte pieces of a token's head
constexpr int kValuePieces = kTokens * kRowPieces / kThreads;  // of a thread

struct Shape {
  int num_heads, num_kv_heads;
};

// Where in its sequence a token is.
struct Token {
  int index, position, page;
};

DEVICE Token read_token(int index, int num_tokens, const i32* token_slot, const i32* token_position, const i32* tables,
                        int layer, int max_layers, int max_blocks) {
  const int slot = index < num_tokens ? token_slot[index] : -1;
  if (slot < 0) return {index, -1, -1};
  const int position = token_position[index];
  if constexpr (TL_QUERIES_ONLY) return {index, position, -1};
  return {index, position, tables[(slot * max_layers + layer) * max_blocks + position / kPageTokens]};
}

DEVICE const u16* head_of(const u16* qkv, int token, int head, const Shape& shape) {
  return qkv + (static_cast<u64>(token) * (shape.num_heads + 2 * shape.num_kv_heads) + head) * kHeadDim;
}

// Elements 2i and 2i + 1 of a piece, i = 0..3.
DEVICE u32 word_of(const uint4& piece, int i) {
  return i == 0 ? piece.x : i == 1 ? piece.y : i == 2 ? piece.z : piece.w;
}

DEVICE float half_of(const uint4& piece, int i) {
  return half_to_float(static_cast<u16>(word_of(piece, i / 2) >> 16 * (i % 2)));
}

DEVICE uint4 pack_piece(const float (&values)[8]) {
  return {pack_half2(values[0], values[1]), pack_half2(values[2], values[3]), pack_half2(values[4], values[5]),
          pack_half2(values[6], values[7])};
}

// The thread's 8 pairs of a head lie in two pieces, this one and the one `other_piece()` further on.
DEVICE int first_piece(int chunk) { return TL_INTERLEAVED ? 2 * chunk : chunk; }
DEVICE int other_piece() { return TL_INTERLEAVED ? 1 : kHeadDim / 16; }

DEVICE void turn_pair(float& x, float& y, float cos, float sin) {
  const float turned = x * cos - y * sin;
  y = y * cos + x * sin;
  x = turned;
}

// 16 elements of a head as they lie in its two pieces, turned.
DEVICE void turn_pieces(float (&values)[2][8], const uint4& first, const uint4& second, const float (&cos)[kPairs],
                        const float (&sin)[kPairs]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) values[0][i] = half_of(first, i), values[1][i] = half_of(second, i);
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    float& x = TL_INTERLEAVED ? values[i / 4][2 * (i % 4)] : values[0][i];
    float& y = TL_INTERLEAVED ? values[i / 4][2 * (i % 4) + 1] : values[1][i];
    turn_pair(x, y, cos[i], sin[i]);
  }
}

DEVICE void read_angles(float (&angles)[kPairs], const float* table, int position, int chunk) {
  const float* first = table + static_cast<u64>(position) * (kHeadDim / 2) + kPairs * chunk;
  const float4* row = reinterpret_cast<const float4*>(first);
#pragma unroll
  for (int i = 0; i < kPairs / 4; ++i) {
    const float4 four = row[i];
    angles[4 * i] = four.x, angles[4 * i + 1] = four.y, angles[4 * i + 2] = four.z, angles[4 * i + 3] = four.w;
  }
}

// A thread's part of its heads; those beyond the last are not read.
struct Pieces {
  uint4 first[kHeads], second[kHeads];
};

DEVICE void load_pieces(Pieces& pieces, const u16* qkv, int token, int first_head, const Shape& shape) {
#pragma unroll
  for (int i = 0; i < kHeads; ++i) {
    if (first_head + i >= shape.num_heads + shape.num_kv_heads) return;
    const u16* head = head_of(qkv, token, first_head + i, shape);
    const uint4* source = reinterpret_cast<const uint4*>(head) + first_piece(threadIdx.x % kTokenThreads);
    pieces.first[i] = load_global(source);
    pieces.second[i] = load_global(source + other_piece());
  }
}

// Where a q head goes.
DEVICE u16* query_target(const Token& token, int head, u16* q, const Shape& shape) {
  return q + (static_cast<u64>(token.index) * shape.num_heads + head) * kHeadDim;
}

// Where each of 64 tokens goes, in shared memory.
struct Places {
  alignas(16) int page[kTokens];   // −1: nowhere
  alignas(16) int place[kTokens];  // in the page
};

// By the first 64 threads.
DEVICE void read_places(Places& places, int first_token, int num_tokens, const i32* token_slot,
                        const i32* token_position, const i32* tables, int layer, int max_layers, int max_blocks) {
  if (threadIdx.x >= kTokens) return;
  const Token token = read_token(first_token + threadIdx.x, num_tokens, token_slot, token_position, tables, layer,
                                 max_layers, max_blocks);
  places.page[threadIdx.x] = token.page;
  places.place[threadIdx.x] = token.position % kPageTokens;
}
