// prefill_attention's work: which queries a block takes, and which pages they go through in which order.
//
// The layouts of tiles and tables are in prefill_attention.cu.
#pragma once

#include "attention.cuh"

constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;
constexpr int kTileRows = 16 * kWarps;
constexpr int kNoBlock = 1 << 24, kFarPosition = 1 << 30;

struct Tile {
  int slot, first_row, num_rows, position, window, shared;
};

// The tile's rows, in shared memory.
struct Rows {
  int slot[kTileRows], position[kTileRows];
};

// The rows first .. end − 1 attend a block of a slot's table; the blocks before end_block follow.
struct Step {
  int first, end, slot, block, end_block;
};

// Which (tile, head) a block takes, from the one with most pages on.  An SM gets its first block out of the first
// num_sms, its second out of the next: these in reverse, so that the pages of the two add up alike everywhere.
DEVICE int rank_of_block(int num_sms) {
  const int n = blockIdx.x, end = min(static_cast<int>(gridDim.x), 2 * num_sms);
  return n < num_sms || n >= end ? n : num_sms + end - 1 - n;
}

DEVICE Tile read_tile(const i32* tiles, int n) {
  const i32* tile = tiles + 6 * n;
  return {tile[0], tile[1], tile[2], tile[3], tile[4], tile[5]};
}

DEVICE void read_rows(Rows& rows, const Tile& tile, const i32* token_slot, const i32* token_position) {
  const int i = threadIdx.x;
  if (i >= tile.num_rows) return;
  rows.slot[i] = tile.shared > 0 ? token_slot[tile.first_row + i] : tile.slot;
  rows.position[i] = tile.shared > 0 ? token_position[tile.first_row + i] : tile.position + i;
}

// The blocks from first_block on that any of the rows first .. end − 1 sees, and none from end_block on.
DEVICE Step step_of(const Rows& rows, int first, int end, int first_block, int end_block, int window) {
  const int lane = threadIdx.x % 32;
  int lowest = rows.position[first], highest = lowest;
#pragma unroll 1
  for (int i = first + lane; i < end; i += 32) {
    lowest = min(lowest, rows.position[i]);
    highest = max(highest, rows.position[i]);
  }
  lowest = reduce_min(lowest);
  if (window > 0) first_block = max(first_block, (lowest - window + 1) / kPageTokens);
  return {first, end, rows.slot[first], first_block, min(end_block, reduce_max(highest) / kPageTokens + 1)};
}

// One past the last row of the sequence that row `first` is of.
DEVICE int end_of_sequence(const Rows& rows, const Tile& tile, int first) {
  const int lane = threadIdx.x % 32;
  u32 differ = 0;
  int end = first;
  do {
    const int i = end + lane;
    differ = ballot(i >= tile.num_rows || rows.slot[i] != rows.slot[first]);
    end += differ ? __ffs(static_cast<int>(differ)) - 1 : 32;
  } while (!differ);
  return end;
}

// The own pages of the sequence of row `first`.
DEVICE Step own_step(const Rows& rows, const Tile& tile, int first) {
  return step_of(rows, first, end_of_sequence(rows, tile, first), tile.shared, kNoBlock, tile.window);
}

// All pages of a tile of one sequence: what step_of would say, known without its rows.
DEVICE Step only_step(const Tile& tile) {
  const int first_block = tile.window > 0 ? max(0, (tile.position - tile.window + 1) / kPageTokens) : 0;
  return {0, tile.num_rows, tile.slot, first_block, (tile.position + tile.num_rows - 1) / kPageTokens + 1};
}

DEVICE Step first_step(const Rows& rows, const Tile& tile) {
  if (tile.shared == 0) return only_step(tile);
  const Step shared = step_of(rows, 0, tile.num_rows, 0, tile.shared, tile.window);
  return shared.block < shared.end_block ? shared : own_step(rows, tile, 0);
}

// The next page; false: that was the last.  Own pages come after the shared ones, sequence by sequence.
DEVICE bool advance(Step& step, const Rows& rows, const Tile& tile) {
  if (++step.block < step.end_block) return true;
  if (tile.shared == 0) return false;
  const int first = step.end_block <= tile.shared ? 0 : step.end;
  if (first == tile.num_rows) return false;
  step = own_step(rows, tile, first);
  return true;
}

// The positions that all 16 queries of the warp see, and those that at least one does, as [begin, end).
struct WarpSight {
  int any_begin, any_end, all_begin, all_end;
};

// Where this lane's two queries are, −1 where they are not among the rows of the step.
DEVICE WarpSight select_rows(int (&positions)[2], const Step& step, const Rows& rows, const Tile& tile) {
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4;
  int lowest = kFarPosition, highest = -1, least = kFarPosition;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int i = 16 * warp + g + 8 * half;
    const bool attends = i >= step.first && i < step.end;
    const int position = attends ? rows.position[i] : -1;
    positions[half] = position;
    highest = max(highest, position);
    if (attends) lowest = min(lowest, position);
    if (i < tile.num_rows) least = min(least, position);
  }
  lowest = reduce_min(lowest), highest = reduce_max(highest), least = reduce_min(least);
  const int any_begin = tile.window > 0 ? lowest - tile.window + 1 : 0;
  return {any_begin, highest + 1, tile.window > 0 ? highest - tile.window + 1 : 0, least + 1};
}
