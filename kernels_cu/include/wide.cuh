// The product of all decode linears for many rows on sm_90a: sums[n][r] = Σ_k weight[n][k] · x[r][k], 1 to 64 rows r,
// by wgmma, with the bits of matmul.cuh.
//
// A warpgroup multiplies 64 outputs (a weight tile a warp) by a slice of K: kParts neighbouring parts.  A block is
// kWarpgroups of them over one slice, whose activations it keeps in shared memory; a cluster is kCluster neighbouring
// slices of the same outputs.  Blocks go over the outputs in rounds.
//
//               K:      slice 0 | slice 1 | … | slice S−1        S = gridDim.y, S · kParts parts in all
//    outputs 0 … 63     block (0, 0), warpgroup 0 | block (0, 1), warpgroup 0 …
//    outputs 64 … 127   block (1, 0), warpgroup 0 | …
//    outputs 64 · gridDim.x …                     block (0, 0), warpgroup 1 …
//    outputs 64 · gridDim.x · kWarpgroups …       round 1 of block (0, 0), warpgroup 0 …
//
// Order of every sum: matmul.cuh.  The parts of a cluster are summed as a tree by the blocks of the cluster, every
// block for its own row tiles (rank = tile % kCluster), which the others send to its shared memory.
//
// Memory: weights come through a ring in shared memory by asynchronous copies, kDepth − 1 stages ahead; a stage is a
// unit of max(64, group) inputs; each lane reads only what it copied itself.  Activations come all at once, through
// registers, word by word into the places where wgmma wants them:
//
//    x  [k8][row][t] 4 B, k8 = 8·block + 4·half + c       word c of the 16 bytes at k = 64·block + 32·half + 8·t
//
// so that step s of a block multiplies k8 = 2·s and 2·s + 1 (weight_tiles.cuh), each of which is a column of 8x8
// matrices; kColumnBytes apart, an odd number of 16 bytes, so that a warp's stores meet no bank twice.
#pragma once
#include "ptx_sm90.cuh"
#include "weight_tiles.cuh"

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
#ifndef TL_X_AT_ONCE
#define TL_X_AT_ONCE 4
#endif

constexpr int kRowTiles = TL_ROW_TILES;  // tiles of 8 rows of the batch
constexpr int kGroup = TL_GROUP;         // 0: fp16 weights
constexpr int kWarpgroups = TL_WARPGROUPS;
constexpr int kParts = TL_PARTS;
constexpr int kCluster = TL_CLUSTER;
constexpr int kDepth = TL_DEPTH;
constexpr int kThreads = 128 * kWarpgroups, kWarps = kThreads / 32;
constexpr int kPieces = pieces_per_tile(kGroup);
constexpr int kUnitBlocks = blocks_per_unit(kGroup);
constexpr int kUnitGroups = kGroup == 0 ? 0 : kGroup == 32 ? 2 : 1;
constexpr int kColumnBytes = kRowTiles * 128 + 16;         // 8 k of all rows
constexpr int kBlockBytes = kColumnBytes * 8;              // 64 k
constexpr int kStepPieces = kUnitBlocks * kPieces;         // that a lane copies of a stage
constexpr int kOwnTiles = (kRowTiles + kCluster - 1) / kCluster;  // row tiles that a block of the cluster finishes
constexpr int kReceiveBytes = (kCluster - 1) * kOwnTiles * kThreads * 16;
constexpr int kArrivalBytes = 64;
constexpr int kXAtOnce = TL_X_AT_ONCE;  // 16-byte loads of activations under way, a thread's
constexpr int kItemRows = 4;  // that a warp loads at a time
static_assert(kRowTiles >= 1 && kRowTiles <= 8);
static_assert(kGroup == kFp16 || kGroup == 32 || kGroup == 64 || kGroup == 128);
static_assert(kParts == 1 || kParts == 2);
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

typedef float Sums[kRowTiles][4];  // C fragments: tile rows g and g+8, batch rows 2t and 2t+1

// What this thread has to do, and where in shared memory things lie.
struct Share {
  int lane, warp, rank;
  int first_unit;    // of the slice
  int num_units;     // of the slice
  int first_part;    // units of its first part
  int num_rounds;
  unsigned char* x;
  Arrivals* arrivals;  // of the warpgroup
  float4* receive;   // [source][own row tile][thread], this thread's
  uint4* weights;    // [stage][piece][thread], this thread's
  u32* scales;       // [stage][group][thread], this thread's
};

// Parts of K: begin(p) … begin(p+1), in units.
DEVICE int part_begin(int part, int num_parts, int num_units) { return num_units * part / num_parts; }

DEVICE int tile_of(const Share& s, int round) {
  const int outputs = (round * kWarpgroups + s.warp / 4) * static_cast<int>(gridDim.x) + static_cast<int>(blockIdx.x);
  return outputs * 4 + s.warp % 4;
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
  s.arrivals = reinterpret_cast<Arrivals*>(shared) + s.warp / 4;
  shared += kArrivalBytes;
  s.x = shared;
  shared += most_units * kUnitBlocks * kBlockBytes;
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
  const long long tile = min(tile_of(s, feed.round), p.num_tiles - 1);
  feed.weights = p.weights + (tile * (p.num_inputs / kBlockInputs) + s.first_unit * kUnitBlocks) * kPieces * 32 + s.lane;
  if constexpr (kGroup != kFp16)
    feed.scales = p.scales + (tile * (p.num_inputs / kGroup) + s.first_unit * kUnitGroups) * 8 + s.lane / 4;
}

// The next stage's weights, if there is one.
DEVICE void copy_weights(Feed& feed, const Product& p, const Share& s, u64 policy) {
  if (feed.round >= s.num_rounds) return;
#pragma unroll
  for (int i = 0; i < kStepPieces; ++i)
    cp_async16(s.weights + (feed.slot * kStepPieces + i) * kThreads, feed.weights + i * 32, policy);
#pragma unroll
  for (int i = 0; i < kUnitGroups; ++i)
    cp_async4(s.scales + (feed.slot * kUnitGroups + i) * kThreads, feed.scales + i * 8);
  feed.weights += kStepPieces * 32;
  feed.scales += kUnitGroups * 8;
  feed.slot = feed.slot + 1 == kDepth ? 0 : feed.slot + 1;
  if (++feed.unit == s.num_units) {
    feed.unit = 0;
    ++feed.round;
    aim(feed, p, s);
  }
}

// All activations of the slice: lane = row · kItemLanes + piece of 8 k.
DEVICE void copy_x(const Product& p, const Share& s) {
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

// sums += group · scale.
DEVICE void fold_group(Sums& sums, const Sums& group, u32 scale_pair) {
  const float low = half_to_float(scale_pair & 0xffff), high = half_to_float(scale_pair >> 16);
#pragma unroll
  for (int n = 0; n < kRowTiles; ++n)
#pragma unroll
    for (int j = 0; j < 4; ++j) sums[n][j] = fmaf(group[n][j], j < 2 ? low : high, sums[n][j]);
}

// The four fragments of a block, from this thread's pieces.
DEVICE void load_block(u32 (&fragments)[4][4], const uint4* pieces) {
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    if constexpr (kGroup == kFp16) {
      const uint4 piece = pieces[step * kThreads];
      fragments[step][0] = piece.x, fragments[step][1] = piece.y;
      fragments[step][2] = piece.z, fragments[step][3] = piece.w;
    } else {
      unpack_nibbles(fragments[step], word_of(*pieces, step));
    }
  }
}

// What a thread has of the weights ahead: the fragments of the next unit's first block.
struct Ahead {
  u32 fragments[4][4];
  int slot;  // of the ring, where the next unit is
};

// The next unit's first block, once at most kDepth − 2 stages are under way.
DEVICE void look_ahead(Ahead& ahead, const Share& s) {
  cp_async_wait<kDepth - 2>();
  load_block(ahead.fragments, s.weights + ahead.slot * kStepPieces * kThreads);
}

// Starts group += a block (of fp16: sums += a block).
DEVICE void start_block(Sums& sums, const u32 (&fragments)[4][4], SharedMatrix x, bool starts_group) {
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < 4; ++step)
    wgmma(sums, fragments[step], x + step * 2 * kColumnBytes, step > 0 || !starts_group);
  wgmma_commit();
}

// The same of a block of two groups.
DEVICE void multiply_groups(Sums& sums, Sums& group, const u32 (&fragments)[4][4], SharedMatrix x, const u32* scales) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    wgmma_fence();
    wgmma(group, fragments[half * 2], x + half * 4 * kColumnBytes, false);
    wgmma(group, fragments[half * 2 + 1], x + (half * 4 + 2) * kColumnBytes, true);
    wgmma_commit();
    wgmma_wait<0>();
    fold_group(sums, group, scales[half * kThreads]);
  }
}

// sums += a unit, while the weights after it come.
DEVICE void multiply_unit(Sums& sums, Sums& group, Ahead& ahead, Feed& feed, const Product& p, const Share& s,
                          SharedMatrix x, u64 policy) {
  const int slot = ahead.slot;
  const u32* scales = s.scales + slot * kUnitGroups * kThreads;
  ahead.slot = slot + 1 == kDepth ? 0 : slot + 1;
  if constexpr (kUnitBlocks == 2) {
    start_block(group, ahead.fragments, x, true);
    u32 fragments[4][4];
    load_block(fragments, s.weights + (slot * kStepPieces + kPieces) * kThreads);
    start_block(group, fragments, x + kBlockBytes, false);
    const u32 scale_pair = scales[0];
    copy_weights(feed, p, s, policy);
    cp_async_commit();
    wgmma_wait<1>();
    look_ahead(ahead, s);
    wgmma_wait<0>();
    fold_group(sums, group, scale_pair);
  } else {
    copy_weights(feed, p, s, policy);
    cp_async_commit();
    if constexpr (kGroup == 32) multiply_groups(sums, group, ahead.fragments, x, scales);
    else start_block(kGroup == kFp16 ? sums : group, ahead.fragments, x, kGroup != kFp16);
    wgmma_wait<0>();
    if constexpr (kGroup == 64) fold_group(sums, group, scales[0]);
    look_ahead(ahead, s);
  }
}

// sums: this warp's tile over the slice.
DEVICE void multiply_round(Sums& sums, Ahead& ahead, Feed& feed, const Product& p, const Share& s, u64 policy) {
  Sums group = {}, first = {};
  SharedMatrix x = shared_matrix(s.x, kColumnBytes, 128);
#pragma unroll 1
  for (int unit = 0; unit < s.num_units; ++unit) {
    if (kParts == 2 && unit == s.first_part) {
#pragma unroll
      for (int n = 0; n < kRowTiles; ++n)
#pragma unroll
        for (int j = 0; j < 4; ++j) first[n][j] = sums[n][j], sums[n][j] = 0.0f;
    }
    multiply_unit(sums, group, ahead, feed, p, s, x, policy);
    x = x + kUnitBlocks * kBlockBytes;
  }
  if constexpr (kParts == 2) {
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n)
#pragma unroll
      for (int j = 0; j < 4; ++j) sums[n][j] = first[n][j] + sums[n][j];
  }
}

DEVICE float4 add(const float4& a, const float4& b) { return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); }

// The sums of ranks first … + kCount − 1 as a balanced tree.  received: where the slices of others are.
template <int kCount>
DEVICE float4 sum_ranks(const float4& own, const float4* received, int rank, int first) {
  if constexpr (kCount == 1) {
    if (first == rank) return own;
    return received[((first - rank) & (kCluster - 1)) * kOwnTiles * kThreads];
  } else {
    const float4 left = sum_ranks<kCount / 2>(own, received, rank, first);
    return add(left, sum_ranks<kCount / 2>(own, received, rank, first + kCount / 2));
  }
}

// Sends the sums of others' row tiles to them.
DEVICE void send_sums(const Sums& sums, const Share& s, int round) {
  const int own_tiles = (kRowTiles + kCluster - 1 - s.rank) / kCluster;
  cluster_wait();  // what was received before has been read
  if (threadIdx.x % 128 == 0 && own_tiles > 0)
    expect_bytes(s.arrivals, (kCluster - 1) * own_tiles * 128 * static_cast<int>(sizeof(float4)));
#pragma unroll
  for (int n = 0; n < kRowTiles; ++n) {
    const int owner = n % kCluster;
    if (owner == s.rank) continue;
    const int place = ((s.rank - owner) & (kCluster - 1)) - 1;  // of this block among those that send to the owner
    store_in_cluster(s.receive + (place * kOwnTiles + n / kCluster) * kThreads, s.arrivals, owner,
                     make_float4(sums[n][0], sums[n][1], sums[n][2], sums[n][3]));
  }
  if (own_tiles > 0) wait_for_bytes(s.arrivals, round);
}

// The cluster's slices summed, and epilogue.store(tile, g, row, low, high) called once for each tile, g and row of the
// batch: low is the sum of tile row g, high of tile row g+8.
template <class Epilogue>
DEVICE void reduce_and_store(const Sums& sums, const Product& p, const Share& s, int round, Epilogue& epilogue) {
  const int tile = tile_of(s, round), g = s.lane / 4, t = s.lane % 4;
  if constexpr (kCluster > 1) send_sums(sums, s, round);
#pragma unroll
  for (int n = 0; n < kRowTiles; ++n) {
    const int row = n * 8 + t * 2;
    if (n % kCluster != s.rank || tile >= p.num_tiles || row >= p.rows) continue;
    const float4 own = make_float4(sums[n][0], sums[n][1], sums[n][2], sums[n][3]);
    const float4* received = s.receive + (n / kCluster - kOwnTiles) * kThreads;
    const float4 total = sum_ranks<kCluster>(own, received, s.rank, 0);
    epilogue.store(tile, g, row, total.x, total.z);
    if (row + 1 < p.rows) epilogue.store(tile, g, row + 1, total.y, total.w);
  }
  if (kCluster > 1 && round + 1 < s.num_rounds) cluster_arrive();
}

// Everything, the weights first.  Epilogue: load(tile) and prepare() look things up, the second what hangs on the first,
// finish() when they must be there; store() as above.
template <class Epilogue>
DEVICE void multiply_wide(const Product& p, unsigned char* shared, Epilogue& epilogue) {
  const u64 policy = cache_policy(p.keep);
  const Share s = take_share(p, shared);
  Feed feed = {nullptr, nullptr, s.num_units ? 0 : s.num_rounds, 0, 0};
  aim(feed, p, s);
#pragma unroll 1
  for (int stage = 0; stage < kDepth - 1; ++stage) {
    copy_weights(feed, p, s, policy);
    cp_async_commit();
  }
  if constexpr (kCluster > 1) {
    if (threadIdx.x % 128 == 0) start_arrivals(s.arrivals);
    cluster_arrive();
  }
  dependency_launch();
  dependency_wait();
  epilogue.load(tile_of(s, 0));
  copy_x(p, s);
  epilogue.prepare();
  fence_for_wgmma();
  __syncthreads();
  Ahead ahead = {};
  look_ahead(ahead, s);
#pragma unroll 1
  for (int round = 0; round < s.num_rounds; ++round) {
    Sums sums = {};
    multiply_round(sums, ahead, feed, p, s, policy);
    if (round == 0) epilogue.finish();
    reduce_and_store(sums, p, s, round, epilogue);
  }
}
