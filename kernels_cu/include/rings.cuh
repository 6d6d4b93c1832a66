// The copies that keep a product fed: weights and scales ahead of the wait for the kernel before, activations after it.
#pragma once
#include "cut.cuh"

DEVICE void copy_weights(const Share& s, int stage, int slot, u64 policy) {
  const uint4* stage_source = s.source + stage * kStageBlocks * kPieces * 32;
  uint4* target = s.weights + slot * kWeightSlot;
#pragma unroll
  for (int part = 0; part < kWarpParts; ++part) {
    if (stage >= s.units[part] * kUnitStages) continue;
    const uint4* part_source = stage_source + (s.begin[part] - s.begin[0]) * kPieces * 32;
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      const uint4* source = part_source + min(i, s.last_tile) * s.tile_stride;
#pragma unroll
      for (int b = 0; b < kStageBlocks; ++b) {
#pragma unroll
        for (int piece = 0; piece < kPieces; ++piece)
          cp_async16(target + (part * kStageBlocks + b) * kWeightBlock + (i * kPieces + piece) * 32,
                     source + (b * kPieces + piece) * 32, policy);
      }
    }
  }
}

// All scales of the warp: few, so they need no ring.
DEVICE void copy_scales(const Product& p, const Share& s, u64 policy) {
  if constexpr (kGroup != kFp16) {
    const int first_tile = min(static_cast<int>(blockIdx.x) * kBlockTiles + s.warp_m * kTiles, p.num_tiles - 1);
    const int groups = p.num_inputs / kGroup;
    for (int part = 0; part < kWarpParts; ++part) {
      const int first = s.begin[part] * kBlockInputs / kGroup;
      const int pieces = s.units[part] * kUnitBlocks * kBlockInputs / kGroup * 2;
      for (int i = 0; i < kTiles; ++i) {
        const int tile = first_tile + min(i, s.last_tile);
        const u32* source = p.scales + (static_cast<long long>(tile) * groups + first) * 8;
        u32* target = s.scales + (part * kTiles + i) * num_scales(s);
#pragma unroll 1
        for (int j = s.lane; j < pieces; j += 32) cp_async16(target + j * 4, source + j * 4, policy);
      }
    }
  }
}

// The next stage's activations, by the warps along M: eight neighbouring lanes copy one row's 64 k.
DEVICE void copy_x_stage(const Product& p, const Share& s, int stage, int slot) {
  constexpr int kRowsAtOnce = kWarpsM * 4, kRounds = (kRowTiles * 8 + kRowsAtOnce - 1) / kRowsAtOnce;
  const int member = s.warp_m * 32 + s.lane, first_row = member / 8, column = member % 8;
  const u16* row_source = p.x + first_row * p.num_inputs + column * 8;
  const int step = kRowsAtOnce * p.num_inputs;
  uint4* row_target = s.x + (column / 4 * p.rows + first_row) * 4 + column % 4;
#pragma unroll
  for (int i = 0; i < kWarpParts * kStageBlocks; ++i) {
    const int part = i / kStageBlocks;
    if (stage >= s.units[part] * kUnitStages) continue;
    const int block = s.begin[part] + stage * kStageBlocks + i % kStageBlocks;
    const u16* source = row_source + block * kBlockInputs;
    uint4* target = row_target + (slot * kWarpParts * kStageBlocks + i) * x_block(p);
#pragma unroll
    for (int round = 0; round < kRounds; ++round, source += step) {
      const bool surely = (round + 1) * kRowsAtOnce <= (kRowTiles - 1) * 8;  // all but the last row tile is full
      if (surely || first_row + round * kRowsAtOnce < p.rows) cp_async16(target + round * kRowsAtOnce * 4, source, true);
    }
  }
}

// All that the slice needs, row by row, into the thread block's x.
DEVICE void copy_x(const Product& p, const Share& s) {
  for (int part = 0; part < kWarpParts; ++part) {
    const int pieces = s.units[part] * kUnitBlocks * 8;
#pragma unroll 1
    for (int row = 0; row < p.rows; ++row) {
      const u16* source = p.x + static_cast<long long>(row) * p.num_inputs + s.begin[part] * kBlockInputs;
#pragma unroll 1
      for (int i = s.warp_m * 32 + s.lane; i < pieces; i += kWarpsM * 32) {
        const int half_block = (s.begin[part] - first_block(p)) * 2 + i / 4;
        cp_async16(s.x + (half_block * p.rows + row) * 4 + i % 4, source + i * 8, true);
      }
    }
  }
}

// Weights of stages 0 … kDepth−2 and scales.
DEVICE void start_weights(const Product& p, const Share& s, u64 policy) {
  copy_scales(p, s, policy);
#pragma unroll 1
  for (int stage = 0; stage < min(kDepth - 1, s.num_slots); ++stage) copy_weights(s, stage, stage, policy);
}

// The activations to go with them: call after dependency_wait.  One group of copies a stage, the first one with all
// that was started before.
DEVICE void start_x(const Product& p, const Share& s) {
  if (kResident) copy_x(p, s);
#pragma unroll 1
  for (int stage = 0; stage < kDepth - 1; ++stage) {
    if (!kResident && stage < s.num_slots) copy_x_stage(p, s, stage, stage);
    cp_async_commit();
  }
}
