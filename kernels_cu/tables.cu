// tables: what a plan changes in the per-sequence tables of the device.
//
//   write_words   words[index] = value                     for every (index, value); an index comes once, or with one value
//   copy_rows     table[target] = table[source]            for every (target, source); no target is a source
//
//   words     int32  [W]        any table of 32-bit integers, flat
//   updates   int32  [n][2]     (index, value)
//   table     int32  [S][E]     the page tables of all sequences, a row each
//   rows      int32  [n][2]     (target, source)
//
// One thread a word: write_words in blocks of 256, copy_rows with a block of 256 for every row, striding over its words.
// Bytes: 12 a word written, 8 a word copied.
#include "ptx.cuh"

constexpr int kThreads = 256;

extern "C" __global__ void __launch_bounds__(kThreads) write_words(i32* words, const i32* updates, i32 n) {
  const int i = blockIdx.x * kThreads + threadIdx.x;
  if (i < n) words[updates[2 * i]] = updates[2 * i + 1];
}

extern "C" __global__ void __launch_bounds__(kThreads) copy_rows(i32* table, const i32* rows, i32 row_words) {
  i32* target = table + static_cast<long long>(rows[2 * blockIdx.x]) * row_words;
  const i32* source = table + static_cast<long long>(rows[2 * blockIdx.x + 1]) * row_words;
  for (int i = threadIdx.x; i < row_words; i += kThreads) target[i] = source[i];
}
