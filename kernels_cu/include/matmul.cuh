// The one product of all decode linears: sums[n][r] = Σ_k weight[n][k] · x[r][k], for 1 to 64 rows r.
//
// A block of 256 threads is kWarpsM × kWarpsK warps.  Warps along M take kTiles weight tiles each (the same ones for
// all warps along K), warps along K take kWarpParts neighbouring parts of K each; blockIdx.y counts what is left:
//
//            K:       part 0 | part 1 | … | part P−1       P = gridDim.y · kWarpsK · kWarpParts, a power of two
//    tiles 0 …        warp 0   warp m                      part p: units ⌊p·U/P⌋ … ⌊(p+1)·U/P⌋ − 1 of the U units
//    tiles kTiles …   warp 1   warp m+1                    of max(64, group) inputs that K has
//
// Order of every sum, which nothing but K, the group and P decides: within a group the tensor core's, from zero
// (integer weights: the products are exact); within a part acc = fma(group sum, scale, acc), ascending; parts as a
// balanced binary tree, of which a block sums its own aligned stretch.  So neither the number of rows, nor the shape of
// blocks, nor other rows change a row's bits.
//
// Memory: weights and activations come through rings in shared memory by asynchronous copies, kDepth − 1 stages ahead.
// A stage is kStageBlocks blocks (of 64 k) of each part.  A warp's weights are its own, and each lane reads only what
// it copied itself.  The warps along M share activations, in the order in which lanes read them (no bank conflicts):
//
//    weights [warp][slot][part][block][tile][piece][lane] 16 B      scales [warp][part][tile][group][g] 4 B
//    x       [warp k][slot][part][block][half h][row][t] 16 B       or, kResident, all of the thread block's K at once:
//            [block][half h][row][t] 16 B
//
// Everything of weights that fits is under way before dependency_wait().  Few rows do without rings: held.cuh.
#pragma once
#include "rings.cuh"

// sums += weights · x over half a block (32 inputs).  rows: where a lane finds the activations of its columns.
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
#pragma unroll 1
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

DEVICE float4 add(const float4& a, const float4& b) { return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); }

// Balanced binary tree over kCount values, `stride` apart.
template <int kCount>
DEVICE float4 sum_tree(const float4* values, int stride) {
  if constexpr (kCount == 1) return *values;
  else return add(sum_tree<kCount / 2>(values, stride), sum_tree<kCount / 2>(values + kCount / 2 * stride, stride));
}

// A warp's parts of its tile i, row tile n.
DEVICE float4 warp_total(const Sums (&sums)[kWarpParts], int i, int n) {
  const float(&first)[4] = sums[0][i][n];
  const float4 total = make_float4(first[0], first[1], first[2], first[3]);
  if constexpr (kWarpParts == 1) return total;
  const float(&second)[4] = sums[kWarpParts - 1][i][n];
  return add(total, make_float4(second[0], second[1], second[2], second[3]));
}

// values: of the first slice, the others kStride apart.
template <int kStride, class Epilogue>
DEVICE void store_total(const float4* values, const Product& p, int tile, int lane, int n, Epilogue& epilogue) {
  const int row = n * 8 + lane % 4 * 2;
  if (tile >= p.num_tiles || row >= p.rows) return;
  const float4 total = sum_tree<kWarpsK>(values, kStride);
  epilogue.store(tile, lane / 4, row, total.x, total.z);
  if (row + 1 < p.rows) epilogue.store(tile, lane / 4, row + 1, total.y, total.w);
}

// The thread block's parts summed, and epilogue.store(tile, g, row, low, high) called once for each tile, g and row of
// the batch: low is the sum of tile row g, high of tile row g+8.
template <class Epilogue>
DEVICE void reduce_and_store(Sums (&sums)[kWarpParts], const Product& p, const Share& s, unsigned char* shared,
                             Epilogue& epilogue) {
  constexpr int kSlice = kBlockTiles * kRowTiles * 32;
  float4* values = reinterpret_cast<float4*>(shared);  // [slice][tile][row tile][lane], over the rings
  cp_async_wait<0>();  // of the epilogue
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n)
      values[s.slice * kSlice + ((s.warp_m * kTiles + i) * kRowTiles + n) * 32 + s.lane] = warp_total(sums, i, n);
  }
  __syncthreads();
#pragma unroll 1
  for (int item = threadIdx.x; item < kSlice; item += kThreads) {
    const int lane = item % 32, n = item / 32 % kRowTiles, tile = blockIdx.x * kBlockTiles + item / 32 / kRowTiles;
    store_total<kSlice>(values + item, p, tile, lane, n, epilogue);
  }
}
