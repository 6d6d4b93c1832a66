// The product of all decode linears for many rows on sm_90a: sums[n][r] = Σ_k weight[n][k] · x[r][k], for 1 to 64
// rows r, by wgmma, with the bits of matmul.cuh.
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
// Memory: weights come through a ring in shared memory by asynchronous copies, kDepth stages of a unit of max(64,
// group) inputs; each lane reads only what it copied itself.  Activations of the slice are there all at once, in
// columns (columns.cuh), so that step s of a block multiplies columns 2·s and 2·s + 1, each of which is a column of 8x8
// matrices.  Given in columns, they come by bulk copies of a unit each and are multiplied as they come.  Given in rows,
// they go through registers, word by word; columns are then an odd number of 16 bytes apart, so that a warp's stores
// meet no bank twice.
#pragma once
#include "wide_feed.cuh"

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

// The fragments of a unit's first block: where kLooksAhead, of the next unit.
struct Ahead {
  u32 fragments[4][4];
  int slot;  // of the ring, where the next unit is
};

// The next unit's first block, once at most kDepth − 1 stages are under way.
DEVICE void look_ahead(Ahead& ahead, const Share& s) {
  cp_async_wait<kDepth - 1>();
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

// sums += a block of two groups.
DEVICE void multiply_groups(Sums& sums, Sums& group, const u32 (&fragments)[4][4], SharedMatrix x,
                            const u32 (&scales)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    wgmma_fence();
    wgmma(group, fragments[half * 2], x + half * 4 * kColumnBytes, false);
    wgmma(group, fragments[half * 2 + 1], x + (half * 4 + 2) * kColumnBytes, true);
    wgmma_commit();
    wgmma_wait<0>();
    fold_group(sums, group, scales[half]);
  }
}

// group = a unit of two blocks.  The second is unpacked while the first is multiplied; where kLooksAhead, the next
// unit's first while the second is.
DEVICE void multiply_two_blocks(Sums& group, Ahead& ahead, Feed& feed, const Product& p, const Share& s, SharedMatrix x,
                                const uint4* second, u64 policy) {
  start_block(group, ahead.fragments, x, true);
  if constexpr (kLooksAhead) {
    u32 fragments[4][4];
    load_block(fragments, second);
    start_block(group, fragments, x + kBlockBytes, false);
    copy_weights(feed, p, s, policy);
    wgmma_wait<1>();
    look_ahead(ahead, s);
  } else {
    wgmma_wait<0>();
    load_block(ahead.fragments, second);
    start_block(group, ahead.fragments, x + kBlockBytes, false);
    copy_weights(feed, p, s, policy);
  }
  wgmma_wait<0>();
}

// sums += a unit, whose stage is refilled as soon as it has been read.
DEVICE void multiply_unit(Sums& sums, Sums& group, Ahead& ahead, Feed& feed, const Product& p, const Share& s,
                          SharedMatrix x, u64 policy) {
  if constexpr (!kLooksAhead) look_ahead(ahead, s);
  const uint4* weights = s.weights + ahead.slot * kStepPieces * kThreads;
  u32 scales[2] = {};
#pragma unroll
  for (int i = 0; i < kUnitGroups; ++i) scales[i] = s.scales[(ahead.slot * kUnitGroups + i) * kThreads];
  ahead.slot = ahead.slot + 1 == kDepth ? 0 : ahead.slot + 1;
  if constexpr (kUnitBlocks == 2) {
    multiply_two_blocks(group, ahead, feed, p, s, x, weights + kPieces * kThreads, policy);
  } else {
    copy_weights(feed, p, s, policy);
    if constexpr (kGroup == 32) multiply_groups(sums, group, ahead.fragments, x, scales);
    else start_block(kGroup == kFp16 ? sums : group, ahead.fragments, x, kGroup != kFp16);
    wgmma_wait<0>();
    if constexpr (kLooksAhead) look_ahead(ahead, s);
  }
  if constexpr (kGroup >= 64) fold_group(sums, group, scales[0]);
}

// sums: this warp's tile over the slice, its parts one after the other.
DEVICE void multiply_round(Sums& sums, Ahead& ahead, Feed& feed, const Product& p, const Share& s, u64 policy) {
  Sums group = {}, part_sums = {};
  SharedMatrix x = shared_matrix(s.x, kColumnBytes, 128);
  int unit = 0;
#pragma unroll 1
  for (int part = 0; part < kParts; ++part) {
    const int end = part + 1 == kParts ? s.num_units : s.first_part;
#pragma unroll 1
    for (; unit < end; ++unit) {
      if constexpr (kColumns) wait_for_bytes(s.x_landed + unit, 0);
      multiply_unit(part_sums, group, ahead, feed, p, s, x, policy);
      x = x + kUnitBytes;
    }
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        sums[n][j] = part == 0 ? part_sums[n][j] : sums[n][j] + part_sums[n][j];
        part_sums[n][j] = 0.0f;
      }
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

DEVICE float4 tile_sums(const float (&sums)[4]) { return make_float4(sums[0], sums[1], sums[2], sums[3]); }

// Of this block's own row tiles the ith.
DEVICE float4 own_sums(const Sums& sums, int rank, int i) {
  float4 own = tile_sums(sums[i * kCluster]);
#pragma unroll
  for (int n = i * kCluster + 1; n < min(kRowTiles, (i + 1) * kCluster); ++n)
    if (n == i * kCluster + rank) own = tile_sums(sums[n]);
  return own;
}

// Sends the sums of others' row tiles to them.
DEVICE void send_sums(const Sums& sums, const Share& s, int round) {
  const int own_tiles = (kRowTiles + kCluster - 1 - s.rank) / kCluster;
  cluster_wait();  // what was received before has been read
  if (threadIdx.x % 128 == 0 && own_tiles > 0)
    expect_bytes(s.received, (kCluster - 1) * own_tiles * 128 * static_cast<int>(sizeof(float4)));
#pragma unroll
  for (int n = 0; n < kRowTiles; ++n) {
    const int owner = n % kCluster;
    if (owner == s.rank) continue;
    const int place = ((s.rank - owner) & (kCluster - 1)) - 1;  // of this block among those that send to the owner
    store_in_cluster(s.receive + (place * kOwnTiles + n / kCluster) * kThreads, s.received, owner, tile_sums(sums[n]));
  }
  if (own_tiles > 0) wait_for_bytes(s.received, round);
}

// The cluster's slices summed, and epilogue.store(tile, g, row, sums) called for each tile, g and even row of this
// block's row tiles: x and y are the sums of tile row g for row and row + 1, z and w those of tile row g+8.
template <class Epilogue>
DEVICE void reduce_and_store(const Sums& sums, const Product& p, const Share& s, int round, Epilogue& epilogue) {
  const int tile = tile_of(s.warp, round), g = s.lane / 4, t = s.lane % 4;
  if constexpr (kCluster > 1) send_sums(sums, s, round);
#pragma unroll
  for (int i = 0; i < kOwnTiles; ++i) {
    const int n = i * kCluster + s.rank;
    if (n >= kRowTiles || tile >= p.num_tiles) continue;
    const float4* received = s.receive + (i - kOwnTiles) * kThreads;
    epilogue.store(tile, g, n * 8 + t * 2, sum_ranks<kCluster>(own_sums(sums, s.rank, i), received, s.rank, 0));
  }
  if (kCluster > 1 && round + 1 < s.num_rounds) cluster_arrive();
}

// From weights and activations on their way to activations that are there, or, in columns, on their way.
template <class Epilogue>
DEVICE void start(Feed& feed, const Product& p, const Share& s, u64 policy, Epilogue& epilogue) {
  aim(feed, p, s);
  start_barriers(s);
#pragma unroll 1
  for (int stage = 0; stage < kDepth; ++stage) copy_weights(feed, p, s, policy);
  if constexpr (kCluster > 1) cluster_arrive();
  epilogue.load();
  dependency_launch();
  dependency_wait();
  if constexpr (!kColumns) copy_rows(p, s);
  else if (threadIdx.x == 0) copy_columns(p, s);
  fence_for_wgmma();
  __syncthreads();
}

// Everything, the weights first.  Epilogue: load() looks up what is older than the kernel before; store() as above.
template <class Epilogue>
DEVICE void multiply_wide(const Product& p, unsigned char* shared, Epilogue& epilogue) {
  const u64 policy = cache_policy(p.keep);
  const Share s = take_share(p, shared);
  Feed feed = {nullptr, nullptr, s.num_units ? 0 : s.num_rounds, 0, 0};
  start(feed, p, s, policy, epilogue);
  Ahead ahead = {};
  if constexpr (kLooksAhead) look_ahead(ahead, s);
#pragma unroll 1
  for (int round = 0; round < s.num_rounds; ++round) {
    Sums sums = {};
    multiply_round(sums, ahead, feed, p, s, policy);
    reduce_and_store(sums, p, s, round, epilogue);
  }
}
