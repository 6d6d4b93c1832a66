// The one product of all decode linears: sums[n][r] = Σ_k weight[n][k] · x[r][k], for 1 to 64 rows r.
//
// A block of 256 threads is kWarpsM × kWarpsK warps.  Warps along M take kTiles weight tiles each (the same ones for
// all warps along K), warps along K take kWarpParts neighbouring parts of K each; blockIdx.y counts what is left:
//
//            K:       part 0 | part 1 | … | part P−1       P = gridDim.y · kWarpsK · kWarpParts, a power of two
//    tiles 0 …        warp 0   warp m                      part p: units ⌊p·U/P⌋ … ⌊(p+1)·U/P⌋ − 1 of K = U units of
//    tiles kTiles …   warp 1   warp m+1                    max(64, group) inputs
//
// Order of every sum, which nothing but K, the group and P decides: within a group the tensor core's, from zero (integer
// weights: the products are exact); within a part acc = fma(group sum, scale, acc), ascending; parts as a balanced
// binary tree, of which a block sums its own aligned stretch.  So neither the number of rows, nor the shape of blocks,
// nor other rows change a row's bits.
//
// Memory: weights and activations come through rings in shared memory by asynchronous copies, kDepth − 1 stages ahead.
// A stage is kStageBlocks blocks (of 64 k) of each part.  A warp's weights are its own, and each lane reads only what it
// copied itself.  Activations are shared by the warps along M, in the order in which lanes read them (no bank conflicts):
//
//    weights [warp][slot][part][block][tile][piece][lane] 16 B      scales [warp][part][tile][group][g] 4 B
//    x       [warp k][slot][part][block][half h][row][t] 16 B       or, kResident, all of the thread block's K at once:
//            [block][half h][row][t] 16 B
//
// Everything of weights that fits is under way before dependency_wait().
#pragma once
#include "weight_tiles.cuh"

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

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kRowTiles = TL_ROW_TILES;  // tiles of 8 rows of the batch
constexpr int kGroup = TL_GROUP;         // 0: fp16 weights
constexpr int kTiles = TL_TILES;
constexpr int kWarpsM = TL_WARPS_M, kWarpsK = kWarps / kWarpsM;
constexpr int kWarpParts = TL_WARP_PARTS;
constexpr int kStageBlocks = TL_STAGE_BLOCKS;
constexpr int kDepth = TL_DEPTH;
constexpr bool kResident = TL_RESIDENT;
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

struct Product {
  const uint4* weights;  // tiles, weight_tiles.cuh
  const u32* scales;     // null: fp16
  const u16* x;          // half [rows][num_inputs]
  int rows;
  int num_tiles;
  int num_inputs;
  bool keep;  // weights stay in L2
};

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

// Parts of K: begin(p) … begin(p+1), in units.
DEVICE int part_begin(int part, int num_parts, int num_units) { return num_units * part / num_parts; }

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

// ---- copies -----------------------------------------------------------------------------------------------------------

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
        for (int piece = s.lane; piece < pieces; piece += 32) cp_async16(target + piece * 4, source + piece * 4, policy);
      }
    }
  }
}

// Block `block` of 64 k (absolute) of all rows, by the warps along M.  Eight neighbouring lanes copy one row's.
DEVICE void copy_x_block(const Product& p, const Share& s, int block, uint4* to) {
  constexpr int kRowsAtOnce = kWarpsM * 4, kRounds = (kRowTiles * 8 + kRowsAtOnce - 1) / kRowsAtOnce;
  const int member = s.warp_m * 32 + s.lane, first_row = member / 8, column = member % 8;
  const u16* source = p.x + static_cast<long long>(first_row) * p.num_inputs + block * kBlockInputs + column * 8;
  uint4* target = to + (column / 4 * p.rows + first_row) * 4 + column % 4;
#pragma unroll
  for (int round = 0; round < kRounds; ++round)
    if (first_row + round * kRowsAtOnce < p.rows)
      cp_async16(target + round * kRowsAtOnce * 4, source + static_cast<long long>(round * kRowsAtOnce) * p.num_inputs, true);
}

DEVICE void copy_x_stage(const Product& p, const Share& s, int stage, int slot) {
#pragma unroll
  for (int part = 0; part < kWarpParts; ++part) {
    if (stage >= s.units[part] * kUnitStages) continue;
#pragma unroll
    for (int b = 0; b < kStageBlocks; ++b)
      copy_x_block(p, s, s.begin[part] + stage * kStageBlocks + b,
                   s.x + ((slot * kWarpParts + part) * kStageBlocks + b) * x_block(p));
  }
}

// All that the slice needs, into the thread block's x.
DEVICE void copy_x(const Product& p, const Share& s) {
  const int first = first_block(p);
  for (int part = 0; part < kWarpParts; ++part)
    for (int block = s.begin[part]; block < s.begin[part] + s.units[part] * kUnitBlocks; ++block)
      copy_x_block(p, s, block, s.x + (block - first) * x_block(p));
}

// Weights of stages 0 … kDepth−2 and scales.
DEVICE void start_weights(const Product& p, const Share& s, u64 policy) {
  copy_scales(p, s, policy);
  for (int stage = 0; stage < min(kDepth - 1, s.num_slots); ++stage) copy_weights(s, stage, stage, policy);
}

// The activations to go with them: call after dependency_wait.  One group of copies a stage, the first one with all
// that was started before.
DEVICE void start_x(const Product& p, const Share& s) {
  if (kResident) copy_x(p, s);
  for (int stage = 0; stage < kDepth - 1; ++stage) {
    if (!kResident && stage < s.num_slots) copy_x_stage(p, s, stage, stage);
    cp_async_commit();
  }
}

// ---- the product ------------------------------------------------------------------------------------------------------

// sums += weights · x over one half (32 inputs) of a block.  `rows`: where a lane finds the activations of its columns.
DEVICE void multiply_half(Sums& sums, const uint4* weights, const uint4* x, const int (&rows)[2], int half) {
  u32 fragments[2][kTiles][4];
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
    load_fragment<kGroup>(fragments[0][i], weights + i * kPieces * 32, 2 * half);
    load_fragment<kGroup>(fragments[1][i], weights + i * kPieces * 32, 2 * half + 1);
  }
#pragma unroll
  for (int n = 0; n < kRowTiles; ++n) {
    const uint4 v = n < kRowTiles - 1 ? x[rows[0] + n * 32] : x[rows[1]];
#pragma unroll
    for (int i = 0; i < kTiles; ++i) mma_m16n8k16(sums[i][n], fragments[0][i], v.x, v.y);
#pragma unroll
    for (int i = 0; i < kTiles; ++i) mma_m16n8k16(sums[i][n], fragments[1][i], v.z, v.w);
  }
}

// sums += group · scale; group = 0.
DEVICE void fold_group(Sums& sums, Sums& group, const u32* scales, int stride) {
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
    const u32 pair = scales[i * stride];
    const float low = half_to_float(pair & 0xffff), high = half_to_float(pair >> 16);
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        sums[i][n][j] = fmaf(group[i][n][j], j < 2 ? low : high, sums[i][n][j]);
        group[i][n][j] = 0.0f;
      }
    }
  }
}

// A block of one part, the `in_unit`th of its unit.  scales: of the block's first group.
DEVICE void multiply_block(Sums& sums, Sums& group, const uint4* weights, const uint4* x, int x_half,
                           const int (&rows)[2], const u32* scales, int scales_stride, int in_unit) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    multiply_half(kGroup == kFp16 ? sums : group, weights, x + half * x_half, rows, half);
    if (kGroup == 32) fold_group(sums, group, scales + half * 8, scales_stride);
  }
  if (kGroup == 64 || (kGroup == 128 && in_unit == 1)) fold_group(sums, group, scales, scales_stride);
}

// kSharedX: warps of other slices, too, wrote what this warp reads of x.
template <bool kSharedX>
DEVICE void wait_for_stage(int stage) {
  cp_async_wait<kDepth - 2>();
  if ((kWarpsM > 1 || kSharedX) && (!kResident || stage == 0)) {
    __syncthreads();
  } else {
    __syncwarp();
  }
}

// sums[part]: this warp's parts of its tiles.
template <bool kSharedX>
DEVICE void multiply(Sums (&sums)[kWarpParts], const Product& p, const Share& s, u64 policy) {
  Sums group[kWarpParts] = {};
  const int g = s.lane / 4, t = s.lane % 4, x_half = p.rows * 4, scales_stride = num_scales(s);
  // A last row tile may reach beyond the batch; its lanes read some other row, and their sums are nobody's.
  const int rows[2] = {g * 4 + t, min((kRowTiles - 1) * 8 + g, p.rows - 1) * 4 + t};
  const u32* scales = s.scales + g;
  const uint4* resident_x = s.x + (s.begin[0] - first_block(p)) * x_block(p);
  int slot = 0, free_slot = kDepth - 1 < s.num_slots ? kDepth - 1 : 0;
  for (int unit = 0; unit < s.most_units; ++unit) {
#pragma unroll
    for (int in_unit = 0; in_unit < kUnitStages; ++in_unit) {
      const int stage = unit * kUnitStages + in_unit, next = stage + kDepth - 1;
      wait_for_stage<kSharedX>(stage);
      if (next < s.most_units * kUnitStages) {
        copy_weights(s, next, free_slot, policy);
        if (!kResident) copy_x_stage(p, s, next, free_slot);
      }
      cp_async_commit();
#pragma unroll
      for (int part = 0; part < kWarpParts; ++part) {
        if (unit >= s.units[part]) continue;
#pragma unroll
        for (int b = 0; b < kStageBlocks; ++b) {
          const int in_slot = part * kStageBlocks + b, block = in_unit * kStageBlocks + b;  // of the slot, of the unit
          const uint4* ring_x = s.x + (slot * kWarpParts * kStageBlocks + in_slot) * x_block(p);
          const uint4* whole_x = resident_x + (s.begin[part] - s.begin[0] + unit * kUnitBlocks + block) * x_block(p);
          const int first_group = (unit * kUnitBlocks + block) * kBlockInputs / kGroupInputs;
          multiply_block(sums[part], group[part], s.weights + slot * kWeightSlot + in_slot * kWeightBlock,
                         kResident ? whole_x : ring_x, x_half, rows,
                         scales + part * kTiles * scales_stride + first_group * 8, scales_stride, block);
        }
      }
      slot = slot + 1 == s.num_slots ? 0 : slot + 1;
      free_slot = free_slot + 1 == s.num_slots ? 0 : free_slot + 1;
    }
  }
}

// ---- what becomes of the sums -----------------------------------------------------------------------------------------

DEVICE float4 add(const float4& a, const float4& b) { return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); }

// Balanced binary tree over kCount values, `stride` apart.
template <int kCount>
DEVICE float4 sum_tree(const float4* values, int stride) {
  if constexpr (kCount == 1) return *values;
  else return add(sum_tree<kCount / 2>(values, stride), sum_tree<kCount / 2>(values + kCount / 2 * stride, stride));
}

// The thread block's parts summed, and store(tile, g, row, low, high) called once for each tile, g and row of the batch:
// low is the sum of tile row g, high of tile row g+8.
template <class Store>
DEVICE void reduce_and_store(Sums (&sums)[kWarpParts], const Product& p, const Share& s, unsigned char* shared,
                             Store store) {
  constexpr int kSlice = kBlockTiles * kRowTiles * 32;
  float4* values = reinterpret_cast<float4*>(shared);  // [slice][tile][row tile][lane], over the rings
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n) {
      const float(&first)[4] = sums[0][i][n];
      float4 total = make_float4(first[0], first[1], first[2], first[3]);
      if constexpr (kWarpParts == 2) {
        const float(&second)[4] = sums[1][i][n];
        total = add(total, make_float4(second[0], second[1], second[2], second[3]));
      }
      values[s.slice * kSlice + ((s.warp_m * kTiles + i) * kRowTiles + n) * 32 + s.lane] = total;
    }
  }
  __syncthreads();
  for (int item = threadIdx.x; item < kSlice; item += kThreads) {
    const int lane = item % 32, n = item / 32 % kRowTiles, tile = blockIdx.x * kBlockTiles + item / 32 / kRowTiles;
    const int row = n * 8 + lane % 4 * 2;
    if (tile >= p.num_tiles || row >= p.rows) continue;
    const float4 total = sum_tree<kWarpsK>(values + item, kSlice);
    store(tile, lane / 4, row, total.x, total.z);
    if (row + 1 < p.rows) store(tile, lane / 4, row + 1, total.y, total.w);
  }
}
