// A thread's share of a product as wide.cuh cuts it, and the copies that feed it: weights ahead of the wait for the
// kernel before, activations after it.  kernels/linear_wide.py chooses the parameters and computes the same sizes.
#pragma once
#include "product.cuh"
#include "ptx_sm90.cuh"

#ifndef TL_ROW_TILES
#define TL_ROW_TILES 2
#endif
#ifndef TL_GROUP
#define TL_GROUP 128
#endif
#ifndef TL_WARPGROUPS
#define TL_WARPGROUPS 4
#endif
#ifndef TL_PARTS
#define TL_PARTS 1
#endif
#ifndef TL_CLUSTER
#define TL_CLUSTER 1
#endif
#ifndef TL_DEPTH
#define TL_DEPTH 4
#endif
#ifndef TL_COLUMNS
#define TL_COLUMNS 0
#endif
#ifndef TL_X_AT_ONCE
#define TL_X_AT_ONCE 4
#endif

constexpr int kRowTiles = TL_ROW_TILES;  // tiles of 8 rows of the batch
constexpr int kGroup = TL_GROUP;         // 0: fp16 weights
constexpr int kWarpgroups = TL_WARPGROUPS;
constexpr int kParts = TL_PARTS;
constexpr int kCluster = TL_CLUSTER;
constexpr int kDepth = TL_DEPTH;
constexpr bool kColumns = TL_COLUMNS;    // x is given in columns (columns.cuh), else in rows
constexpr int kThreads = 128 * kWarpgroups, kWarps = kThreads / 32;
constexpr int kPieces = pieces_per_tile(kGroup);
constexpr int kUnitBlocks = blocks_per_unit(kGroup);
constexpr int kUnitGroups = kGroup == 0 ? 0 : kGroup == 32 ? 2 : 1;
constexpr int kColumnBytes = kRowTiles * 128 + (kColumns ? 0 : 16);  // 8 k of all rows
constexpr int kBlockBytes = kColumnBytes * 8;              // 64 k
constexpr int kUnitBytes = kBlockBytes * kUnitBlocks;      // of x
constexpr int kStepPieces = kUnitBlocks * kPieces;         // that a lane copies of a stage
constexpr int kOwnTiles = (kRowTiles + kCluster - 1) / kCluster;  // row tiles that a block of the cluster finishes
constexpr int kReceiveBytes = (kCluster - 1) * kOwnTiles * kThreads * 16;
constexpr int kXAtOnce = TL_X_AT_ONCE;  // 16-byte loads of activations under way, a thread's
constexpr int kItemRows = 4;  // that a warp loads at a time
constexpr bool kLooksAhead = kParts == 1 || kRowTiles < 8;  // else registers are short
static_assert(kRowTiles >= 1 && kRowTiles <= 8);
static_assert(kGroup == kFp16 || kGroup == 32 || kGroup == 64 || kGroup == 128);
static_assert(kParts == 1 || kParts == 2);
static_assert(kDepth >= 2);

typedef float Sums[kRowTiles][4];  // C fragments: tile rows g and g+8, batch rows 2t and 2t+1

// What this thread has to do, and where in shared memory things lie.
struct Share {
  int lane, warp, rank;
  int first_unit;    // of the slice
  int num_units;     // of the slice
  int first_part;    // units of its first part
  int num_rounds;
  unsigned char* x;
  Arrivals* received;   // by the warpgroup
  Arrivals* x_landed;   // [unit]
  float4* receive;      // [source][own row tile][thread], this thread's
  uint4* weights;       // [stage][piece][thread], this thread's
  u32* scales;          // [stage][group][thread], this thread's
};

DEVICE int tile_of(int warp, int round) {
  const int outputs = (round * kWarpgroups + warp / 4) * static_cast<int>(gridDim.x) + static_cast<int>(blockIdx.x);
  return outputs * 4 + warp % 4;
}

DEVICE Share take_share(const Product& p, unsigned char* shared) {
  Share s;
  s.lane = threadIdx.x % 32;
  s.warp = threadIdx.x / 32;
  s.rank = blockIdx.y % kCluster;
  const int num_units = p.num_inputs / (kBlockInputs * kUnitBlocks), num_parts = gridDim.y * kParts;
  const int part = blockIdx.y * kParts;
  s.first_unit = part_begin(part, num_parts, num_units);
  s.num_units = part_begin(part + kParts, num_parts, num_units) - s.first_unit;
  s.first_part = part_begin(part + 1, num_parts, num_units) - s.first_unit;
  const int round_tiles = gridDim.x * kWarps;
  s.num_rounds = (p.num_tiles + round_tiles - 1) / round_tiles;
  const int most_units = (num_units + gridDim.y - 1) / gridDim.y;
  s.received = reinterpret_cast<Arrivals*>(shared) + s.warp / 4;
  s.x_landed = reinterpret_cast<Arrivals*>(shared) + kWarpgroups;
  shared += (kWarpgroups + most_units + 1) / 2 * 16;
  s.x = shared;
  shared += most_units * kUnitBytes;
  s.receive = reinterpret_cast<float4*>(shared) + threadIdx.x;
  shared += kReceiveBytes;
  s.weights = reinterpret_cast<uint4*>(shared) + threadIdx.x;
  shared += kDepth * kStepPieces * kThreads * 16;
  s.scales = reinterpret_cast<u32*>(shared) + threadIdx.x;
  return s;
}

// Where the copies of weights are: one stage after the other, round after round.
struct Feed {
  const uint4* weights;  // of the next stage
  const u32* scales;
  int round, unit;       // of the next stage
  int slot;
};

DEVICE void aim(Feed& feed, const Product& p, const Share& s) {
  const long long tile = min(tile_of(s.warp, feed.round), p.num_tiles - 1);
  const long long block = tile * (p.num_inputs / kBlockInputs) + s.first_unit * kUnitBlocks;
  feed.weights = p.weights + block * kPieces * 32 + s.lane;
  if constexpr (kGroup != kFp16)
    feed.scales = p.scales + (tile * (p.num_inputs / kGroup) + s.first_unit * kUnitGroups) * 8 + s.lane / 4;
}

DEVICE void copy_stage(Feed& feed, const Product& p, const Share& s, u64 policy) {
#pragma unroll
  for (int i = 0; i < kStepPieces; ++i)
    cp_async16(s.weights + (feed.slot * kStepPieces + i) * kThreads, feed.weights + i * 32, policy);
#pragma unroll
  for (int i = 0; i < kUnitGroups; ++i)
    cp_async4(s.scales + (feed.slot * kUnitGroups + i) * kThreads, feed.scales + i * 8);
  feed.weights += kStepPieces * 32;
  feed.scales += kUnitGroups * 8;
  feed.slot = feed.slot + 1 == kDepth ? 0 : feed.slot + 1;
  if (++feed.unit < s.num_units) return;
  feed.unit = 0;
  ++feed.round;
  aim(feed, p, s);
}

// The next stage's weights, if there is one.
DEVICE void copy_weights(Feed& feed, const Product& p, const Share& s, u64 policy) {
  if (feed.round < s.num_rounds) copy_stage(feed, p, s, policy);
  cp_async_commit();
}

// A warpgroup's first thread starts its own, the first thread of all those of x.
DEVICE void start_barriers(const Share& s) {
  if (kCluster > 1 && threadIdx.x % 128 == 0) start_arrivals(s.received);
  if (!kColumns || threadIdx.x > 0) return;
#pragma unroll 1
  for (int unit = 0; unit < s.num_units; ++unit) start_arrivals(s.x_landed + unit);
}

// All activations of the slice, given in columns.  By the first thread.
DEVICE void copy_columns(const Product& p, const Share& s) {
  const unsigned char* source = reinterpret_cast<const unsigned char*>(p.x) +
                                static_cast<long long>(s.first_unit) * kUnitBytes;
#pragma unroll 1
  for (int unit = 0; unit < s.num_units; ++unit) {
    expect_bytes(s.x_landed + unit, kUnitBytes);
    copy_bulk(s.x + unit * kUnitBytes, source + unit * kUnitBytes, kUnitBytes, s.x_landed + unit);
  }
}

// The same given in rows, by all threads: lane = row · kItemLanes + piece of 8 k.
DEVICE void copy_rows(const Product& p, const Share& s) {
  constexpr int kItemLanes = 32 / kItemRows, kItemInputs = kItemLanes * 8;
  const int row = s.lane / kItemLanes, piece = s.lane % kItemLanes;
  const int columns = s.num_units * kUnitBlocks * (kBlockInputs / kItemInputs);
  if (columns == 0) return;
  const int skip_rows = kWarps / columns, skip_columns = kWarps % columns;
  const u16* source = p.x + static_cast<long long>(row) * p.num_inputs +
                      s.first_unit * kUnitBlocks * kBlockInputs + piece * 8;
  unsigned char* target = s.x + piece / 4 * 4 * kColumnBytes + row * 16 + piece % 4 * 4;
  int row_block = s.warp / columns, column = s.warp % columns;
  while (row_block * kItemRows < p.rows) {
    uint4 pieces[kXAtOnce];
    int places[kXAtOnce];
#pragma unroll
    for (int i = 0; i < kXAtOnce; ++i) {
      const bool there = row_block * kItemRows + row < p.rows;
      places[i] = there ? column * (kItemInputs / 8) * kColumnBytes + row_block * kItemRows * 16 : -1;
      if (there)
        pieces[i] = load_global(reinterpret_cast<const uint4*>(source + row_block * kItemRows * p.num_inputs +
                                                               column * kItemInputs));
      row_block += skip_rows;
      column += skip_columns;
      if (column >= columns) column -= columns, ++row_block;
    }
#pragma unroll
    for (int i = 0; i < kXAtOnce; ++i) {
      if (places[i] < 0) continue;
#pragma unroll
      for (int c = 0; c < 4; ++c)
        *reinterpret_cast<u32*>(target + places[i] + c * kColumnBytes) = word_of(pieces[i], c);
    }
  }
}
