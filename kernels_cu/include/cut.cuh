// How a thread block's share of a product is cut: compile-time parameters, parts of K, where the rings lie.
// matmul.cuh draws what the names mean; kernels/cut.py chooses the parameters and computes the same sizes.
#pragma once
#include "product.cuh"

#ifndef TL_ROW_TILES
#define TL_ROW_TILES 1
#endif
#ifndef TL_GROUP
#define TL_GROUP 128
#endif
#ifndef TL_TILES
#define TL_TILES 1
#endif
#ifndef TL_WARPS_M
#define TL_WARPS_M 1
#endif
#ifndef TL_WARP_PARTS
#define TL_WARP_PARTS 1
#endif
#ifndef TL_STAGE_BLOCKS
#define TL_STAGE_BLOCKS 1
#endif
#ifndef TL_DEPTH
#define TL_DEPTH 4
#endif
#ifndef TL_RESIDENT
#define TL_RESIDENT 1
#endif
#ifndef TL_HELD_BLOCKS
#define TL_HELD_BLOCKS 0
#endif

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kRowTiles = TL_ROW_TILES;  // tiles of 8 rows of the batch
constexpr int kGroup = TL_GROUP;         // 0: fp16 weights
constexpr int kTiles = TL_TILES;
constexpr int kWarpsM = TL_WARPS_M, kWarpsK = kWarps / kWarpsM;
constexpr int kWarpParts = TL_WARP_PARTS;
constexpr int kStageBlocks = TL_STAGE_BLOCKS;
constexpr int kDepth = TL_DEPTH;
constexpr bool kResident = TL_RESIDENT;
constexpr int kHeldBlocks = TL_HELD_BLOCKS;  // of each part, where all of them lie in shared memory (held.cuh); else 0
constexpr int kPieces = pieces_per_tile(kGroup);
constexpr int kUnitBlocks = blocks_per_unit(kGroup);
constexpr int kUnitStages = kUnitBlocks / kStageBlocks;
constexpr int kBlockTiles = kWarpsM * kTiles;  // weight tiles of a thread block
constexpr int kGroupInputs = kGroup == kFp16 ? kBlockInputs : kGroup;
constexpr int kWeightBlock = kTiles * kPieces * 32;  // of one warp along 64 k, in 16-byte pieces
constexpr int kWeightSlot = kWarpParts * kStageBlocks * kWeightBlock;
static_assert(kRowTiles >= 1 && kRowTiles <= 8);
static_assert(kGroup == kFp16 || kGroup == 32 || kGroup == 64 || kGroup == 128);
static_assert(kWarpsM * kWarpsK == kWarps);
static_assert(kWarpParts == 1 || kWarpParts == 2);
static_assert(kStageBlocks == 1 || kStageBlocks == kUnitBlocks);
static_assert(kDepth >= 2);

typedef float Sums[kTiles][kRowTiles][4];  // C fragments: rows g and g+8 of a tile, batch rows 2t and 2t+1

// What this warp has to do, and where its rings are.
struct Share {
  int lane, warp_m, slice;  // slice: warp along K
  int begin[kWarpParts];    // first block of 64 k of each part
  int units[kWarpParts];    // length of each part
  int most_units;           // of any part
  int num_slots;
  const uint4* source;      // block begin[0] of this lane's first tile
  int tile_stride;          // from one tile to the next, in pieces; blocks are kPieces · 32 apart
  int last_tile;            // of the warp's tiles, the last one that is in the matrix: those after it repeat it
  uint4* weights;           // this lane's pieces of its warp's ring
  uint4* x;                 // of the slice, or of the thread block
  u32* scales;              // of the warp
};

DEVICE int x_block(const Product& p) { return p.rows * (kBlockInputs / 8); }  // 64 k of all rows, in 16-byte pieces

DEVICE int num_scales(const Share& s) {  // of one tile and part, in pairs
  return kGroup == kFp16 ? 0 : s.most_units * kUnitBlocks * kBlockInputs / kGroupInputs * 8;
}

DEVICE void take_parts(Share& s, const Product& p) {
  const int num_units = p.num_inputs / (kBlockInputs * kUnitBlocks);
  const int num_parts = gridDim.y * kWarpsK * kWarpParts;
  for (int i = 0; i < kWarpParts; ++i) {
    const int part = (blockIdx.y * kWarpsK + s.slice) * kWarpParts + i;
    const int first = part_begin(part, num_parts, num_units);
    s.begin[i] = first * kUnitBlocks;
    s.units[i] = part_begin(part + 1, num_parts, num_units) - first;
  }
  s.most_units = (num_units + num_parts - 1) / num_parts;
  s.num_slots = min(kDepth, s.most_units * kUnitStages);
}

// First block of 64 k of this thread block.
DEVICE int first_block(const Product& p) {
  return part_begin(blockIdx.y, gridDim.y, p.num_inputs / (kBlockInputs * kUnitBlocks)) * kUnitBlocks;
}

// Blocks of 64 k of the thread block that has most of them.
DEVICE int most_blocks(const Product& p) {
  const int num_units = p.num_inputs / (kBlockInputs * kUnitBlocks);
  return (num_units + gridDim.y - 1) / gridDim.y * kUnitBlocks;
}

DEVICE Share take_share(const Product& p, unsigned char* shared) {
  Share s;
  const int warp = threadIdx.x / 32;
  s.lane = threadIdx.x % 32;
  s.warp_m = warp % kWarpsM;
  s.slice = warp / kWarpsM;
  take_parts(s, p);
  const int first_tile = blockIdx.x * kBlockTiles + s.warp_m * kTiles;
  s.tile_stride = p.num_inputs / kBlockInputs * kPieces * 32;
  s.last_tile = max(0, p.num_tiles - 1 - first_tile);
  const long long start = static_cast<long long>(min(first_tile, p.num_tiles - 1)) * s.tile_stride;
  s.source = p.weights + start + s.begin[0] * kPieces * 32 + s.lane;
  uint4* base = reinterpret_cast<uint4*>(shared);
  const int slice_x = s.num_slots * kWarpParts * kStageBlocks * x_block(p);
  s.x = base + (kResident ? 0 : s.slice * slice_x);
  base += kResident ? most_blocks(p) * x_block(p) : kWarpsK * slice_x;
  s.weights = base + warp * s.num_slots * kWeightSlot + s.lane;
  base += kWarps * s.num_slots * kWeightSlot;
  s.scales = reinterpret_cast<u32*>(base) + warp * kWarpParts * kTiles * num_scales(s);
  return s;
}
