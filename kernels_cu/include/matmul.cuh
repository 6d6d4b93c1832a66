// The one product of all decode linears: sums[n][r] = Σ_k weight[n][k] · x[r][k], for 1 to 64 rows r.
//
// A block of 256 threads is kWarpsM × kWarpsK warps.  Warps along M take kTiles weight tiles each (the same ones for
// all warps along K), warps along K take kWarpParts neighbouring parts of K each; blockIdx.y counts what is left:
//
//            K:   part 0 | part 1 | … | part P−1           P = gridDim.y · kWarpsK · kWarpParts, a power of two
//    tiles 0 …    warp 0   warp 1                          part p: units ⌊p·U/P⌋ … ⌊(p+1)·U/P⌋ of K = U units of
//    tiles kTiles … warp kWarpsK …                         max(64, group) inputs
//
// Order of every sum, which nothing but K, the group and P decides: within a group the tensor core's, from zero (integer
// weights: the products are exact); within a part acc = fma(group sum, scale, acc), ascending; parts as a balanced
// binary tree, of which a block sums its own aligned stretch.  So neither the number of rows, nor the shape of blocks,
// nor other rows change a row's bits.
//
// Memory: weights and activations come through rings in shared memory by asynchronous copies, kDepth − 1 stages (of one
// tile along k) ahead.  A warp's weights are its own, and each lane reads only what it copied itself.  Activations are
// shared by the warps along M, in the order in which lanes read them (no bank conflicts):
//
//    weights [warp][slot][part][tile][piece][lane] 16 B      scales [warp][part][tile][group][g] 4 B
//    x       [warp k][part][slot][half h][row][t] 16 B       kResident: a slot per stage, all loaded at once
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
#ifndef TL_DEPTH
#define TL_DEPTH 4
#endif
#ifndef TL_RESIDENT
#define TL_RESIDENT 0
#endif

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kRowTiles = TL_ROW_TILES;  // tiles of 8 rows of the batch
constexpr int kGroup = TL_GROUP;         // 0: fp16 weights
constexpr int kTiles = TL_TILES;
constexpr int kWarpsM = TL_WARPS_M, kWarpsK = kWarps / kWarpsM;
constexpr int kWarpParts = TL_WARP_PARTS;
constexpr int kDepth = TL_DEPTH;
constexpr bool kResident = TL_RESIDENT;
constexpr int kPieces = pieces_per_tile(kGroup);
constexpr int kUnitBlocks = blocks_per_unit(kGroup);
constexpr int kBlockTiles = kWarpsM * kTiles;  // weight tiles of a block
static_assert(kRowTiles >= 1 && kRowTiles <= 8);
static_assert(kGroup == kFp16 || kGroup == 32 || kGroup == 64 || kGroup == 128);
static_assert(kWarpsM * kWarpsK == kWarps);
static_assert(kWarpParts == 1 || kWarpParts == 2);
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
  int lane, warp_m, slice;        // warps along M and along K
  int begin[kWarpParts];          // first tile along k of each part
  int count[kWarpParts];          // tiles along k of each part
  int num_stages;                 // of the longest part of all
  int num_slots;                  // of the ring of weights
  int num_x_slots;
  uint4* x;                       // of the slice
  uint4* weights;                 // of the warp
  u32* scales;                    // of the warp
};

DEVICE int part_begin(int part, int num_parts, int num_units) { return num_units * part / num_parts * kUnitBlocks; }

DEVICE int x_slot_size(const Product& p) { return p.rows * (kBlockInputs / 8); }  // in 16-byte pieces

constexpr int kWeightSlotSize = kWarpParts * kTiles * kPieces * 32;  // of one warp, in 16-byte pieces

DEVICE int scales_size(const Share& s) {  // of one warp, in pairs
  return kGroup == kFp16 ? 0 : kWarpParts * kTiles * (s.num_stages * kBlockInputs / max(kGroup, 1)) * 8;
}

DEVICE Share take_share(const Product& p, unsigned char* shared) {
  Share s;
  const int warp = threadIdx.x / 32;
  s.lane = threadIdx.x % 32;
  s.warp_m = warp % kWarpsM;
  s.slice = warp / kWarpsM;
  const int num_units = p.num_inputs / (kBlockInputs * kUnitBlocks);
  const int num_parts = gridDim.y * kWarpsK * kWarpParts;
  for (int i = 0; i < kWarpParts; ++i) {
    const int part = (blockIdx.y * kWarpsK + s.slice) * kWarpParts + i;
    s.begin[i] = part_begin(part, num_parts, num_units);
    s.count[i] = part_begin(part + 1, num_parts, num_units) - s.begin[i];
  }
  s.num_stages = (num_units + num_parts - 1) / num_parts * kUnitBlocks;
  s.num_slots = min(kDepth, s.num_stages);
  s.num_x_slots = kResident ? s.num_stages : s.num_slots;
  const int x_size = kWarpParts * s.num_x_slots * x_slot_size(p), weights_size = s.num_slots * kWeightSlotSize;
  uint4* base = reinterpret_cast<uint4*>(shared);
  s.x = base + s.slice * x_size;
  s.weights = base + kWarpsK * x_size + warp * weights_size;
  s.scales = reinterpret_cast<u32*>(base + kWarpsK * x_size + kWarps * weights_size) + warp * scales_size(s);
  return s;
}

// The weight tile i of this warp; the last block's tiles beyond the matrix repeat its last one, and are not stored.
DEVICE int tile_of(const Product& p, const Share& s, int i) {
  return min(static_cast<int>(blockIdx.x) * kBlockTiles + s.warp_m * kTiles + i, p.num_tiles - 1);
}

DEVICE void copy_weights(const Product& p, const Share& s, int stage, int slot, u64 policy) {
  const int num_blocks = p.num_inputs / kBlockInputs;
  uint4* target = s.weights + slot * kWeightSlotSize + s.lane;
#pragma unroll
  for (int part = 0; part < kWarpParts; ++part) {
    if (stage >= s.count[part]) continue;
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      const long long block = static_cast<long long>(tile_of(p, s, i)) * num_blocks + s.begin[part] + stage;
      const uint4* source = p.weights + block * (kPieces * 32) + s.lane;
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece)
        cp_async16(target + ((part * kTiles + i) * kPieces + piece) * 32, source + piece * 32, policy);
    }
  }
}

// All scales of the warp: few, so they need no ring.
DEVICE void copy_scales(const Product& p, const Share& s, u64 policy) {
  if constexpr (kGroup != kFp16) {
    const int num_groups = p.num_inputs / kGroup, room = s.num_stages * kBlockInputs / kGroup;
    for (int part = 0; part < kWarpParts; ++part) {
      const int first = s.begin[part] * kBlockInputs / kGroup, pieces = s.count[part] * kBlockInputs / kGroup * 2;
      for (int i = 0; i < kTiles; ++i) {
        const u32* source = p.scales + (static_cast<long long>(tile_of(p, s, i)) * num_groups + first) * 8;
        u32* target = s.scales + (part * kTiles + i) * room * 8;
        for (int piece = s.lane; piece < pieces; piece += 32) cp_async16(target + piece * 4, source + piece * 4, policy);
      }
    }
  }
}

// Eight neighbouring lanes copy the 64 inputs of one row.
DEVICE void copy_x(const Product& p, const Share& s, int stage, int slot) {
  constexpr int kRowsAtOnce = kWarpsM * 4, kRounds = (kRowTiles * 8 + kRowsAtOnce - 1) / kRowsAtOnce;
  const int member = s.warp_m * 32 + s.lane, first_row = member / 8, column = member % 8;
  const int half = column / 4, t = column % 4;
#pragma unroll
  for (int part = 0; part < kWarpParts; ++part) {
    if (stage >= s.count[part]) continue;
    const u16* source = p.x + (s.begin[part] + stage) * kBlockInputs + column * 8;
    uint4* target = s.x + (part * s.num_x_slots + slot) * x_slot_size(p) + half * p.rows * 4 + t;
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
      const int row = first_row + round * kRowsAtOnce;
      if (row < p.rows) cp_async16(target + row * 4, source + static_cast<long long>(row) * p.num_inputs, true);
    }
  }
}

// Stages 0 … kDepth−2; the weights before the kernel that makes x has finished.
DEVICE void fill_rings(const Product& p, const Share& s, u64 policy) {
  copy_scales(p, s, policy);
  for (int stage = 0; stage < kDepth - 1; ++stage)
    if (stage < s.num_stages) copy_weights(p, s, stage, stage, policy);
  dependency_launch();
  dependency_wait();
  if (kResident)
    for (int stage = 0; stage < s.num_stages; ++stage) copy_x(p, s, stage, stage);
  for (int stage = 0; stage < kDepth - 1; ++stage) {
    if (!kResident && stage < s.num_stages) copy_x(p, s, stage, stage);
    cp_async_commit();
  }
}

// sums += weights · x over one half (32 inputs) of a tile along k.
DEVICE void multiply_half(Sums& sums, const uint4* weights, const uint4* x, const int (&row_offset)[2], int half) {
  u32 fragments[2][kTiles][4];
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
    load_fragment<kGroup>(fragments[0][i], weights + i * kPieces * 32, 2 * half);
    load_fragment<kGroup>(fragments[1][i], weights + i * kPieces * 32, 2 * half + 1);
  }
#pragma unroll
  for (int n = 0; n < kRowTiles; ++n) {
    const uint4 v = n < kRowTiles - 1 ? x[row_offset[0] + n * 32] : x[row_offset[1]];
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

// Where a lane finds the activations of its columns: rows g, g+8, …, and the last, which may be beyond the batch (then
// it reads another row, and its sums are nobody's).
DEVICE void place_rows(int (&row_offset)[2], const Product& p, int lane) {
  const int g = lane / 4, t = lane % 4;
  row_offset[0] = g * 4 + t;
  row_offset[1] = min((kRowTiles - 1) * 8 + g, p.rows - 1) * 4 + t;
}

// One tile along k of one part.  `last`: its group ends here.
DEVICE void multiply_block(Sums& sums, Sums& group, const uint4* weights, const uint4* x, const u32* scales,
                           int scales_stride, const int (&row_offset)[2], int rows, bool last) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    multiply_half(kGroup == kFp16 ? sums : group, weights, x + half * rows * 4, row_offset, half);
    if (kGroup == 32) fold_group(sums, group, scales + half * 8, scales_stride);
  }
  if ((kGroup == 64 || kGroup == 128) && last) fold_group(sums, group, scales, scales_stride);
}

DEVICE void wait_for_stage(const Share&, int stage) {
  cp_async_wait<kDepth - 2>();
  if (kWarpsM == 1) {
    __syncwarp();
  } else if (!kResident || stage == 0) {
    __syncthreads();
  }
}

// sums[part]: this warp's parts of its tiles.
DEVICE void multiply(Sums (&sums)[kWarpParts], const Product& p, const Share& s, u64 policy) {
  Sums group[kWarpParts] = {};
  int row_offset[2];
  place_rows(row_offset, p, s.lane);
  const int scales_stride = s.num_stages * kBlockInputs / (kGroup == kFp16 ? 1 : kGroup) * 8;
  int slot = 0, free_slot = kDepth - 1 < s.num_slots ? kDepth - 1 : 0;
  for (int unit = 0; unit < s.num_stages; unit += kUnitBlocks) {
#pragma unroll
    for (int block = 0; block < kUnitBlocks; ++block) {
      const int stage = unit + block, next = stage + kDepth - 1;
      wait_for_stage(s, stage);
      if (next < s.num_stages) {
        copy_weights(p, s, next, free_slot, policy);
        if (!kResident) copy_x(p, s, next, free_slot);
      }
      cp_async_commit();
#pragma unroll
      for (int part = 0; part < kWarpParts; ++part) {
        if (stage >= s.count[part]) continue;
        const uint4* weights = s.weights + slot * kWeightSlotSize + part * kTiles * kPieces * 32 + s.lane;
        const uint4* x = s.x + (part * s.num_x_slots + (kResident ? stage : slot)) * x_slot_size(p);
        const u32* scales = s.scales + part * kTiles * scales_stride + s.lane / 4;
        if (kGroup != kFp16) scales += stage * kBlockInputs / max(kGroup, 1) * 8;
        multiply_block(sums[part], group[part], weights, x, scales, scales_stride, row_offset, p.rows,
                       block == kUnitBlocks - 1);
      }
      slot = slot + 1 == s.num_slots ? 0 : slot + 1;
      free_slot = free_slot + 1 == s.num_slots ? 0 : free_slot + 1;
    }
  }
}

DEVICE float4 add(const float4& a, const float4& b) { return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); }

// Balanced binary tree over kCount values, `stride` apart.
template <int kCount>
DEVICE float4 sum_tree(const float4* values, int stride) {
  if constexpr (kCount == 1) return *values;
  else return add(sum_tree<kCount / 2>(values, stride), sum_tree<kCount / 2>(values + kCount / 2 * stride, stride));
}

// The block's parts summed, and store(tile, g, row, low, high) called once for each tile, g and row of the batch:
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
