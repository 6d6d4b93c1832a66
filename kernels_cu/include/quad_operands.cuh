// What pages of a quad have in common in shared memory, halves or levels.
#pragma once

#include "decode_many.cuh"
#include "ptx_sm90.cuh"

constexpr int kKeyRowBytes = 128;
constexpr int kStripBytes = kHeadDim * 16;  // 16 bytes of tokens of all dims
static_assert(kThreads == 128, "a block is a warpgroup");

// The bytes of piece `piece` of a row of K, rows in their places.
DEVICE int place_of_key_piece(int row, int piece) { return row * kKeyRowBytes + (piece ^ row % 8) * 16; }
