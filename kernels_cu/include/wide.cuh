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

// Everything, the weights first.  Epilogue: load(tile) and prepare() look things up, the second what hangs on the
// first; finish() when they must be there; store() as above.
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
