// hidden: the input h of a block is stored in place of its keys and values, which are made of what is read of it.
//
//   h = decode(encode(x))         hidden_codes.cuh: halves, or levels of 8 or 4 bits        TL_CODING
//   y = half(rms(h) · gain)       row_norm.cuh: the input of the linear for K and V
//
//   store_hidden    x → codes in the token's place, and y      tokens of a prompt
//   round_hidden    x → y                                      rows of requests, which store nothing
//   load_hidden     places → y of all 64 tokens of each        keys and values are made again
//   clone_hidden    a place's first tokens → another's
//
//   x               fp32   [T][d]
//   token_slot      int32  [T]            negative: nothing is stored
//   token_position  int32  [T]
//   places          int32  [slots][max_layers][max_blocks]   of a sequence's 64-token block; −1: nothing is stored
//   pages           int32  [n]            places
//   triples         int32  [n][3]         (source place, target place, num_tokens 0 … 64); no target is a source
//   pool            bytes  [slabs][slab_bytes]   place p is page p % per_slab, of page_bytes each, of slab p / per_slab
//   gain            fp16   [d]            eps, inverse_width = 1 / d: fp32
//   y               fp16   [T][d]; of load_hidden [n·64][d]; of round_hidden with TL_COLUMNS in columns (columns.cuh),
//                                        block_rows at a time, which divides T
//   d a multiple of 64 (h-fp16: 8) and at most 2048 · TL_CHUNKS; everything 16-byte aligned.
//
// A block of 256 threads for a row; of load_hidden for up to four neighbouring rows, so that more loads are under way.
// y comes out of the codes in all three, not of the numbers that they were made of, and a row's sums have one order
// (row_norm.cuh): so y has the same bits whoever makes it.
//
// fp32; rounded: codes, then y.  Bytes a row: x 4·d, y 2·d, codes 2·d, d + d/16 or d/2 + d/16.
// Gains are read before the kernel that makes x has finished; slots, positions and places are not.
#include "columns.cuh"
#include "hidden_codes.cuh"

#ifndef TL_COLUMNS
#define TL_COLUMNS 0
#endif

constexpr int kThreads = kRowThreads;
constexpr int kLoadRows = kChunks < 4 ? 4 / kChunks : 1;  // of a block of load_hidden
constexpr int kBatch = 4;                                 // 16-byte pieces that a thread copies at a time
static_assert(kPageTokens % kLoadRows == 0);

struct Norm {
  const u16* gain;
  float eps, inverse_width;  // 1 / width
  int width;
};

typedef uint2 Gain[kChunks][2];  // four halves each

DEVICE void load_gain(Gain& gain, const Norm& norm) {
  for_fours(norm.width, [&](int chunk, int half, int column) {
    gain[chunk][half] = *reinterpret_cast<const uint2*>(norm.gain + column);
  });
}

DEVICE void load_x(Channels& x, const float* row, int width) {
  for_fours(width, [&](int chunk, int half, int column) {
    x[chunk][half] = *reinterpret_cast<const float4*>(row + column);
  });
}

// x becomes what is read where it is stored; store(chunk, code) sees the codes.  Lanes without a group take part.
template <class Store>
DEVICE void round_row(Channels& x, int width, Store store) {
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    const Code code = encode(x[chunk][0], x[chunk][1]);
    if (has_four(chunk, 0, width)) store(chunk, code);
    x[chunk][0] = decode(code, 0);
    x[chunk][1] = decode(code, 1);
  }
}

// write(row, column, four halves of y).  `sums`: kRowWarps floats a row, shared.
template <int kRows, class Write>
DEVICE void norm_rows(const Channels (&h)[kRows], const Gain& gain, const Norm& norm, float* sums, Write write) {
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    float squares = 0.0f;
    for_fours(norm.width, [&](int chunk, int half, int) { squares = add_squares(squares, h[r][chunk][half]); });
    share_squares(squares, sums + r * kRowWarps);
  }
  __syncthreads();
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const float inverse = inverse_of(sums + r * kRowWarps, norm.inverse_width, norm.eps);
    for_fours(norm.width, [&](int chunk, int half, int column) {
      write(r, column, pack_half4(scaled(h[r][chunk][half], inverse, gain[chunk][half])));
    });
  }
}

DEVICE void write_halves(u16* to, uint2 halves) { *reinterpret_cast<uint2*>(to) = halves; }

extern "C" __global__ void __launch_bounds__(kThreads)
    store_hidden(const float* x, const i32* token_slot, const i32* token_position, const i32* places, i32 layer,
                 i32 max_layers, i32 max_blocks, u8* pool, i32 slab_bytes, i32 per_slab, i32 page_bytes,
                 const u16* gain_of, float eps, float inverse_width, u16* y, i32 width) {
  __shared__ float sums[kRowWarps];
  const Norm norm = {gain_of, eps, inverse_width, width};
  const int token = blockIdx.x;
  const long long start = static_cast<long long>(token) * width;
  Gain gain;
  load_gain(gain, norm);
  dependency_launch();
  dependency_wait();
  Channels rows[1] = {};
  load_x(rows[0], x + start, width);
  const int slot = token_slot[token], position = token_position[token];
  const int place = slot < 0 ? -1 : places[(slot * max_layers + layer) * max_blocks + position / kPageTokens];
  round_row(rows[0], width, [&](int chunk, const Code& code) {
    if (place < 0) return;
    u8* page = page_of({pool, slab_bytes, per_slab, page_bytes}, place);
    write_code(code, code_place(page, position % kPageTokens, chunk, width), chunk, width);
  });
  norm_rows(rows, gain, norm, sums, [&](int, int column, uint2 halves) { write_halves(y + start + column, halves); });
}

extern "C" __global__ void __launch_bounds__(kThreads)
    round_hidden(const float* x, const u16* gain_of, float eps, float inverse_width, u16* y, i32 width, i32 block_rows) {
  __shared__ float sums[kRowWarps];
  const Norm norm = {gain_of, eps, inverse_width, width};
  const int row = blockIdx.x;
  const InColumns y_columns = in_columns(y, row, width, block_rows);
  const long long start = static_cast<long long>(row) * width;
  Gain gain;
  load_gain(gain, norm);
  dependency_launch();
  dependency_wait();
  Channels rows[1] = {};
  load_x(rows[0], x + start, width);
  round_row(rows[0], width, [](int, const Code&) {});
  norm_rows(rows, gain, norm, sums, [&](int, int column, uint2 halves) {
    if constexpr (TL_COLUMNS) store_columns(y_columns, column, halves);
    else write_halves(y + start + column, halves);
  });
}

extern "C" __global__ void __launch_bounds__(kThreads, 4 / kChunks > 0 ? 4 / kChunks : 1)
    load_hidden(u8* pool, i32 slab_bytes, i32 per_slab, i32 page_bytes, const i32* pages, const u16* gain_of, float eps,
                float inverse_width, u16* y, i32 width) {
  __shared__ float sums[kLoadRows * kRowWarps];
  constexpr int kPageBlocks = kPageTokens / kLoadRows;
  const Norm norm = {gain_of, eps, inverse_width, width};
  const int first = blockIdx.x % kPageBlocks * kLoadRows;
  u8* page = page_of({pool, slab_bytes, per_slab, page_bytes}, pages[blockIdx.x / kPageBlocks]);
  u16* y_rows = y + static_cast<long long>(blockIdx.x) * kLoadRows * width;
  Code codes[kLoadRows][kChunks];
#pragma unroll
  for (int r = 0; r < kLoadRows; ++r)
    for_chunks(width, [&](int chunk) {
      codes[r][chunk] = read_code(code_place(page, first + r, chunk, width), chunk, width);
    });
  Gain gain;
  load_gain(gain, norm);
  Channels rows[kLoadRows];
#pragma unroll
  for (int r = 0; r < kLoadRows; ++r)
    for_fours(width, [&](int chunk, int half, int) { rows[r][chunk][half] = decode(codes[r][chunk], half); });
  norm_rows(rows, gain, norm, sums, [&](int r, int column, uint2 halves) {
    write_halves(y_rows + r * width + column, halves);
  });
}

// Bytes 16 at a time, several under way: this block's kBatch · kThreads pieces.
DEVICE void copy_pieces(uint4* target, const uint4* source, int num_pieces) {
  const int first = blockIdx.x * kBatch * kThreads + threadIdx.x;
  uint4 held[kBatch];
#pragma unroll
  for (int b = 0; b < kBatch; ++b)
    if (first + b * kThreads < num_pieces) held[b] = load_global(source + first + b * kThreads);
#pragma unroll
  for (int b = 0; b < kBatch; ++b)
    if (first + b * kThreads < num_pieces) target[first + b * kThreads] = held[b];
}

DEVICE void copy_halves(u16* target, const u16* source, int count) {
  for (int i = threadIdx.x; i < count; i += kThreads) target[i] = source[i];
}

// A field's first tokens are one run.  Blocks along x share the levels; the last has the scales and minima as well.
extern "C" __global__ void __launch_bounds__(kThreads)
    clone_hidden(u8* pool, i32 slab_bytes, i32 per_slab, i32 page_bytes, const i32* triples, i32 width) {
  const i32* triple = triples + 3 * blockIdx.y;
  const Slabs slabs = {pool, slab_bytes, per_slab, page_bytes};
  u8 *source = page_of(slabs, triple[0]), *target = page_of(slabs, triple[1]);
  const int num_tokens = triple[2];
  copy_pieces(reinterpret_cast<uint4*>(target), reinterpret_cast<const uint4*>(source),
              num_tokens * row_bytes(width) / 16);
  if (blockIdx.x + 1 < gridDim.x) return;
  copy_halves(scales_of(target, width), scales_of(source, width), num_tokens * num_groups(width));
  copy_halves(minima_of(target, width), minima_of(source, width), num_tokens * num_groups(width));
}
