// Weight tiles: 16 output rows × 64 k, stored so that a lane's 16-byte loads are its mma_m16n8k16 A fragments.
//
// Lane 4·g + t owns tile rows g and g+8.  Step s = 0..3 of a tile multiplies these four k of every lane:
//
//   k(s, t) = 32·(s/2) + 8·t + 4·(s%2) + 0..3          first two: fragment columns 2t, 2t+1; last two: 2t+8, 2t+9
//
// Activations are permuted alike: the eight k of steps 2h and 2h+1 are one 16-byte load at 32·h + 8·t.
//
//   INT4   uint4 [N/16][K/64][lane]        word s: k(s, t) of row g in nibbles 0, 4, 2, 6; of row g+8 in 1, 5, 3, 7
//          scales half [N/16][K/group][8 g][2]       of rows g and g+8: one 4-byte load
//   fp16   uint4 [N/16][K/64][s][lane]     words: row g first pair, row g+8 first pair, row g last pair, row g+8 last
#pragma once
#include "ptx.cuh"

constexpr int kTileRows = 16;
constexpr int kBlockInputs = 64;   // k of one tile
constexpr int kFp16 = 0;           // as a group size: weights are fp16 and have no scales

// 16-byte pieces that a lane holds of one tile.
constexpr int pieces_per_tile(int group) { return group == kFp16 ? 4 : 1; }

// Tiles along k that a group of 128 spans, so that parts of K never cut a group.
constexpr int blocks_per_unit(int group) { return group == 128 ? 2 : 1; }

// Eight nibbles to four pairs of the integers −8 … 7 as halves, exactly: 0x6400 | v is 1024 + v, 0x6400 | v << 4 is
// 1024 + 16·v.
DEVICE void unpack_nibbles(u32 (&fragment)[4], u32 word) {
  const u32 upper = word >> 8;
  fragment[0] = half2_sub(lop3_and_or(word, 0x000f000f, 0x64006400), 0x64086408);               // − 1032
  fragment[1] = half2_fma(lop3_and_or(word, 0x00f000f0, 0x64006400), 0x2c002c00, 0xd480d480);   // / 16 − 72
  fragment[2] = half2_sub(lop3_and_or(upper, 0x000f000f, 0x64006400), 0x64086408);
  fragment[3] = half2_fma(lop3_and_or(upper, 0x00f000f0, 0x64006400), 0x2c002c00, 0xd480d480);
}

DEVICE u32 word_of(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

// The A fragment of one step, from this lane's pieces of a tile (32 lanes apart).
template <int kGroup>
DEVICE void load_fragment(u32 (&fragment)[4], const uint4* pieces, int step) {
  if constexpr (kGroup == kFp16) {
    const uint4 piece = pieces[step * 32];
    fragment[0] = piece.x, fragment[1] = piece.y, fragment[2] = piece.z, fragment[3] = piece.w;
  } else {
    unpack_nibbles(fragment, word_of(*pieces, step));
  }
}
