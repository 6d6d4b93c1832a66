// What becomes of the sums of query, key and value heads: turned by RoPE, rounded to half, stored to q and to pages.
//
// A page is K [G][64 tokens][D], then V [G][8 octets][D][8 tokens].  With TL_KV_ROWS every row has a page of its own
// and of one token, so that K and V of a row lie side by side, [R][2][G][D]; nothing is looked up then but positions.
#pragma once
#include "weight_tiles.cuh"

#ifndef TL_KV_ROWS
#define TL_KV_ROWS 0
#endif

constexpr int kPageTokens = TL_KV_ROWS ? 1 : 64;
constexpr int kOctetTokens = TL_KV_ROWS ? 1 : 8;  // whose V lies side by side, dim after dim

struct Target {  // of one row of the batch
  u16* page;     // null: a padding row, which stores nothing
  int position;  // absolute
};

struct Pages {
  const i32* position;  // [rows], −1: a padding row
  const i32* row_slot;  // [rows], −1: likewise; not read with TL_KV_ROWS
  const i32* tables;    // [slots][max_layers][max_blocks], page ids; likewise
  int layer, max_layers, max_blocks;
  u16* pool;            // [pages][2·G·kPageTokens·D]
};

struct Heads {
  int num_heads, num_kv_heads;
  int log2_tiles;    // D = 16 << log2_tiles
  bool interleaved;  // which dimensions are a pair: 2i and 2i+1, or i and i + D/2
  u16* q;            // [rows][H·D]
};

DEVICE int head_dim(const Heads& h) { return kTileRows << h.log2_tiles; }

// Of a tile: its head among query, key and value heads, and which tile of the head it is.
DEVICE int head_of(const Heads& h, int tile) { return tile >> h.log2_tiles; }
DEVICE int tile_in_head(const Heads& h, int tile) { return tile & ((1 << h.log2_tiles) - 1); }
DEVICE bool is_turned(const Heads& h, int tile) { return head_of(h, tile) < h.num_heads + h.num_kv_heads; }

// Those of the rows from `first` on.
DEVICE Pages pages_from(const Pages& pages, const Heads& heads, int first) {
  Pages from = pages;
  from.position += first;
  if (!TL_KV_ROWS) from.row_slot += first;
  else from.pool += static_cast<long long>(first) * 2 * heads.num_kv_heads * head_dim(heads);
  return from;
}

DEVICE Heads heads_from(const Heads& heads, int first) {
  Heads from = heads;
  from.q += static_cast<long long>(first) * heads.num_heads * head_dim(heads);
  return from;
}

DEVICE int slot_of(const Pages& pages, int row) { return TL_KV_ROWS ? 0 : pages.row_slot[row]; }

// The id of the page of a row; −1: a row of padding, which has none.
DEVICE i32 page_of(const Pages& pages, int row, int at, int slot) {
  if (at < 0 || slot < 0) return -1;
  if (TL_KV_ROWS) return row;
  const long long table = static_cast<long long>(slot) * pages.max_layers + pages.layer;
  return pages.tables[table * pages.max_blocks + at / kPageTokens];
}

DEVICE Target target_of(const Pages& pages, const Heads& heads, i32 page, int at) {
  const int page_size = 2 * heads.num_kv_heads * kPageTokens * head_dim(heads);
  return {page < 0 ? nullptr : pages.pool + static_cast<long long>(page) * page_size, at};
}

// Pair g of a tile of a query or key head, turned by the angle whose cosine is c and sine s.
DEVICE void store_turned(const Heads& heads, const Target& target, int tile, int g, int row, float low, float high,
                         float c, float s) {
  const int d = head_dim(heads), token = target.position % kPageTokens, head = head_of(heads, tile);
  const int i = tile_in_head(heads, tile) * 8 + g;
  u16* query = heads.q + (static_cast<long long>(row) * heads.num_heads + head) * d;
  u16* key = target.page + ((head - heads.num_heads) * kPageTokens + token) * d;
  u16* to = head < heads.num_heads ? query : key;
  to[heads.interleaved ? 2 * i : i] = float_to_half(fmaf(low, c, -(high * s)));
  to[heads.interleaved ? 2 * i + 1 : i + d / 2] = float_to_half(fmaf(high, c, low * s));
}

// Dimensions g and g + 8 of a tile of a value head.
DEVICE void store_value(const Heads& heads, const Target& target, int tile, int g, float low, float high) {
  const int head = head_of(heads, tile) - heads.num_heads - heads.num_kv_heads;
  const int dim = tile_in_head(heads, tile) * kTileRows + g, token = target.position % kPageTokens;
  const int octet = (heads.num_kv_heads + head) * (kPageTokens / kOctetTokens) + token / kOctetTokens;
  u16* to = target.page + (octet * head_dim(heads) + dim) * kOctetTokens + token % kOctetTokens;
  to[0] = float_to_half(low);
  to[8 * kOctetTokens] = float_to_half(high);
}
