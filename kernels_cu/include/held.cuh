// The product of matmul.cuh for up to 8 rows, where a thread block holds all that it multiplies in shared memory: INT4
// weights, parts of K of one length that is known when this is compiled.  Same parts, same order, same bits.
//
// Nothing is looked up and nothing is refilled: every lane asks for all its weights with one instruction each, before
// the kernel in front has finished, and the product is a plain loop over units of max(64, group) inputs.  That loop is
// bound by unpacking: an H200's scheduler needs 19 cycles for an mma and its operand, of which the mma takes 7.  Where
// the fragments of all weights are few enough to stay in registers, they are unpacked before the kernel in front has
// finished, too.
//
//    x        [block][half h][row][t] 16 B       all of the thread block's K
//    weights  [warp][part][tile][block][lane] 16 B, each lane reads only what it copied itself
//    scales   [warp][part][tile][group][g] 4 B
#pragma once
#include "matmul.cuh"

constexpr int kStrands = kWarpParts * kTiles;  // a warp's (part, tile): accumulators that do not wait for each other
constexpr int kHeldUnits = kHeldBlocks / kUnitBlocks;
constexpr int kSliceBlocks = kWarpParts * kHeldBlocks;      // along K, of a warp
constexpr int kThreadBlockBlocks = kWarpsK * kSliceBlocks;  // of a thread block
constexpr int kWarpWeights = kStrands * kHeldBlocks * 32;   // 16-byte pieces
constexpr int kUnitGroups = kUnitBlocks * kBlockInputs / kGroupInputs;
constexpr int kStrandScales = kHeldUnits * kUnitGroups * 8;  // pairs
constexpr bool kUnpacksAhead = kHeldBlocks > 0 && kStrands * kHeldBlocks <= 4;  // all fragments: at most 64 registers
static_assert(kHeldBlocks == 0 || (kGroup != kFp16 && kRowTiles == 1 && kHeldBlocks % kUnitBlocks == 0));

struct Held {
  int lane, warp_m, slice;
  uint4* x;        // of the thread block
  uint4* weights;  // of the warp
  u32* scales;     // of the warp
};

DEVICE Held take_held(const Product& p, unsigned char* shared) {
  const int warp = threadIdx.x / 32;
  uint4* x = reinterpret_cast<uint4*>(shared);
  uint4* weights = x + kThreadBlockBlocks * x_block(p);
  u32* scales = reinterpret_cast<u32*>(weights + kWarps * kWarpWeights);
  return {static_cast<int>(threadIdx.x) % 32, warp % kWarpsM, warp / kWarpsM, x, weights + warp * kWarpWeights,
          scales + warp * kStrands * kStrandScales};
}

// Weights and scales: all of the warp's.
DEVICE void hold_weights(const Product& p, const Held& h, u64 policy) {
  constexpr int kPairs = 4, kScalePieces = kStrandScales / kPairs;  // pairs to a copy of 16 bytes
  const int first_tile = blockIdx.x * kBlockTiles + h.warp_m * kTiles;
  const int first_block = (blockIdx.y * kWarpsK + h.slice) * kSliceBlocks;
  const int blocks = p.num_inputs / kBlockInputs, groups = p.num_inputs / kGroupInputs;
#pragma unroll
  for (int strand = 0; strand < kStrands; ++strand) {
    const int tile = min(first_tile + strand % kTiles, p.num_tiles - 1), part = strand / kTiles;
    const int block = first_block + part * kHeldBlocks;
    const uint4* source = p.weights + (static_cast<long long>(tile) * blocks + block) * 32 + h.lane;
    uint4* target = h.weights + strand * kHeldBlocks * 32 + h.lane;
#pragma unroll
    for (int b = 0; b < kHeldBlocks; ++b) cp_async16(target + b * 32, source + b * 32, policy);
    const u32* pairs = p.scales + (static_cast<long long>(tile) * groups + block * kBlockInputs / kGroupInputs) * 8;
#pragma unroll
    for (int i = h.lane; i < kScalePieces; i += 32)
      cp_async16(h.scales + strand * kStrandScales + i * kPairs, pairs + i * kPairs, policy);
  }
}

// All fragments, where they are unpacked ahead: of each strand, block and step.
struct Unpacked {
  u32 fragments[kStrands][kUnpacksAhead ? kHeldBlocks : 1][4][4];
};

// From this lane's own copies: nobody else is waited for.
DEVICE void unpack_all(Unpacked& unpacked, const Held& h) {
  cp_async_commit();
  cp_async_wait<0>();
#pragma unroll
  for (int strand = 0; strand < kStrands; ++strand) {
#pragma unroll
    for (int b = 0; b < kHeldBlocks; ++b) {
      const uint4 piece = h.weights[(strand * kHeldBlocks + b) * 32 + h.lane];
#pragma unroll
      for (int step = 0; step < 4; ++step) unpack_nibbles(unpacked.fragments[strand][b][step], word_of(piece, step));
    }
  }
}

// Neighbours begin with different rows, so that not all of them ask for the same lines at the same time.
DEVICE void hold_x(const Product& p, const Held& h) {
  const u16* first = p.x + blockIdx.y * kThreadBlockBlocks * kBlockInputs;
  int row = min(static_cast<int>(blockIdx.x) % 8, p.rows - 1);
#pragma unroll 1
  for (int rows = 0; rows < p.rows; ++rows, row = row + 1 == p.rows ? 0 : row + 1) {
    const u16* source = first + row * p.num_inputs;
#pragma unroll
    for (int i = threadIdx.x; i < kThreadBlockBlocks * 8; i += kThreads)
      cp_async16(h.x + (i / 4 * p.rows + row) * 4 + i % 4, source + i * 8, true);
  }
}

// What a lane needs of one unit.
struct Unit {
  uint4 weights[kStrands][kUnitBlocks];
  uint4 x[kWarpParts][kUnitBlocks * 2];
  u32 scales[kStrands][kUnitGroups];
};

// weights, x, scales: of this lane, of the warp's first unit.
DEVICE void load_unit(Unit& u, const uint4* weights, const uint4* x, const u32* scales, int x_half, int unit) {
#pragma unroll
  for (int strand = 0; strand < kStrands; ++strand) {
#pragma unroll
    for (int b = 0; b < kUnitBlocks; ++b)
      u.weights[strand][b] = weights[(strand * kHeldBlocks + unit * kUnitBlocks + b) * 32];
#pragma unroll
    for (int i = 0; i < kUnitGroups; ++i)
      u.scales[strand][i] = scales[strand * kStrandScales + (unit * kUnitGroups + i) * 8];
  }
#pragma unroll
  for (int part = 0; part < kWarpParts; ++part) {
#pragma unroll
    for (int i = 0; i < kUnitBlocks * 2; ++i)
      u.x[part][i] = x[((part * kHeldBlocks + unit * kUnitBlocks) * 2 + i) * x_half];
  }
}

// acc += group · scale.
DEVICE void fold_strand(float (&acc)[4], const float (&group)[4], u32 pair) {
  const float low = half_to_float(pair & 0xffff), high = half_to_float(pair >> 16);
#pragma unroll
  for (int j = 0; j < 4; ++j) acc[j] = fmaf(group[j], j < 2 ? low : high, acc[j]);
}

// The fragment of one step of block `b` of a unit.
DEVICE void take_fragment(u32 (&fragment)[4], const Unpacked& unpacked, const Unit& u, int unit, int strand, int b,
                          int step) {
  if constexpr (kUnpacksAhead) {
#pragma unroll
    for (int i = 0; i < 4; ++i) fragment[i] = unpacked.fragments[strand][unit * kUnitBlocks + b][step][i];
  } else {
    unpack_nibbles(fragment, word_of(u.weights[strand][b], step));
  }
}

// Half blocks first … first + count − 1 of a unit, which are one group.
template <int kCount>
DEVICE void multiply_group(Sums (&sums)[kWarpParts], const Unpacked& unpacked, const Unit& u, int unit, int first,
                           int group) {
  float parts[kStrands][4] = {};
#pragma unroll
  for (int i = first; i < first + kCount; ++i) {
#pragma unroll
    for (int step = 0; step < 2; ++step) {
#pragma unroll
      for (int strand = 0; strand < kStrands; ++strand) {
        u32 fragment[4];
        take_fragment(fragment, unpacked, u, unit, strand, i / 2, i % 2 * 2 + step);
        const uint4& v = u.x[strand / kTiles][i];
        mma_m16n8k16(parts[strand], fragment, step == 0 ? v.x : v.z, step == 0 ? v.y : v.w);
      }
    }
  }
#pragma unroll
  for (int strand = 0; strand < kStrands; ++strand)
    fold_strand(sums[strand / kTiles][strand % kTiles][0], parts[strand], u.scales[strand][group]);
}

DEVICE void multiply_unit(Sums (&sums)[kWarpParts], const Unpacked& unpacked, const Unit& u, int unit) {
  constexpr int kHalves = kUnitBlocks * 2 / kUnitGroups;
#pragma unroll
  for (int group = 0; group < kUnitGroups; ++group)
    multiply_group<kHalves>(sums, unpacked, u, unit, group * kHalves, group);
}

// sums[part]: this warp's parts of its tiles.  The next unit is on its way to registers while one is multiplied.
DEVICE void multiply_held(Sums (&sums)[kWarpParts], const Product& p, const Held& h, const Unpacked& unpacked) {
  const int g = h.lane / 4, t = h.lane % 4, x_half = p.rows * 4;
  // Lanes of rows beyond the batch read its last row, and their sums are nobody's.
  const uint4* x = h.x + h.slice * kSliceBlocks * x_block(p) + min(g, p.rows - 1) * 4 + t;
  const uint4* weights = h.weights + h.lane;
  const u32* scales = h.scales + g;
  Unit now, next;
  load_unit(now, weights, x, scales, x_half, 0);
#pragma unroll(kHeldUnits <= 4 ? kHeldUnits : 2)
  for (int unit = 1; unit < kHeldUnits; ++unit) {
    load_unit(next, weights, x, scales, x_half, unit);
    multiply_unit(sums, unpacked, now, unit - 1);
    now = next;
  }
  multiply_unit(sums, unpacked, now, kHeldUnits - 1);
}

// As reduce_and_store.  A warp's sums come over its own weights, so nobody is waited for before they do.
template <class Epilogue>
DEVICE void reduce_held(Sums (&sums)[kWarpParts], const Product& p, const Held& h, Epilogue& epilogue) {
  float4* mine = reinterpret_cast<float4*>(h.weights) + h.lane;
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kTiles; ++i) mine[i * 32] = warp_total(sums, i, 0);
  __syncthreads();
  const int first_warp = h.slice * kWarpsM + h.warp_m;
  const float4* all = reinterpret_cast<const float4*>(h.weights) - first_warp * kWarpWeights;
#pragma unroll 1
  for (int item = threadIdx.x; item < kBlockTiles * 32; item += kThreads) {
    const int lane = item % 32, tile = item / 32;
    const float4* values = all + tile / kTiles * kWarpWeights + tile % kTiles * 32 + lane;
    store_total<kWarpsM * kWarpWeights>(values, p, blockIdx.x * kBlockTiles + tile, lane, 0, epilogue);
  }
}
