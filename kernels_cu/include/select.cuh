// Finding elements of a row by rank or by running sum, without sorting the row.
//
// Scores are ordered by a 32-bit key.  `descend` walks the digits of the keys from the highest one: one histogram of
// 64-bit integer sums a digit, in shared memory.  Integer sums are exact, so neither the order in which threads add
// nor the way the elements were found can show in a result.  All functions are called by a whole block of
// kSelectThreads threads, with the same arguments, unless they say otherwise.
#pragma once

#include "ptx.cuh"

constexpr int kSelectThreads = 512;
constexpr int kSelectWarps = kSelectThreads / 32;
constexpr int kDigitBits = 11;
constexpr int kListCapacity = 1024;
constexpr int kListPerThread = kListCapacity / kSelectThreads;
constexpr int kGroup = 32;  // elements under one maximum

constexpr u32 kNoKey = 0;  // below the key of every number, −inf's included
constexpr u32 kKeyMinusInf = 0x007fffffu;
constexpr u32 kKeyPlusInf = 0xff800000u;

// In shared memory: sums of 64 bits in halves, as it adds 32 bits natively.
template <int kBins>
struct Histogram {
  u32 low[kBins], high[kBins];

  DEVICE void clear() {
    __syncthreads();
    for (int bin = threadIdx.x; bin < kBins; bin += kSelectThreads) low[bin] = high[bin] = 0;
    __syncthreads();
  }

  DEVICE void add(int bin, u64 value) {
    const u32 part = static_cast<u32>(value);
    const u32 before = static_cast<u32>(atomic_add(reinterpret_cast<i32*>(&low[bin]), static_cast<i32>(part)));
    const u32 up = static_cast<u32>(value >> 32) + (before + part < before);
    if (up) atomic_add(reinterpret_cast<i32*>(&high[bin]), static_cast<i32>(up));
  }

  DEVICE u64 sum(int bin) const { return static_cast<u64>(high[bin]) << 32 | low[bin]; }
};

struct SelectMemory {
  Histogram<1 << kDigitBits> digits;
  u64 list[kListCapacity];     // entries of `entry_of`, largest first once sorted
  u64 running[kListCapacity];  // sums of the list's weights up to and with each entry
  u64 warp_sums[kSelectWarps];
  u64 above;
  u32 bin;
  i32 count;
};

__shared__ SelectMemory block;  // the block's working memory, of kernels that call any of these functions

// ---- keys -----------------------------------------------------------------------------------------------------

// Rises with the score; −0 and +0 are equal; not-a-number is above +inf, so that a row's largest key shows it.
DEVICE u32 key_of(u32 bits) {
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0xffffffffu;
  if (bits == 0x80000000u) bits = 0;
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

DEVICE float score_of(u32 key) { return __uint_as_float(key >> 31 ? key & 0x7fffffffu : ~key); }

DEVICE bool key_is_finite(u32 key) { return key > kKeyMinusInf && key < kKeyPlusInf; }

// A key and its id as one number: larger scores are larger, of equal scores the lower id is.
DEVICE u64 entry_of(u32 key, u32 id) { return static_cast<u64>(key) << 32 | ~id; }
DEVICE u32 entry_key(u64 entry) { return static_cast<u32>(entry >> 32); }
DEVICE i32 entry_id(u64 entry) { return static_cast<i32>(~static_cast<u32>(entry)); }

// ---- 64-bit integers over a warp and a block ------------------------------------------------------------------

DEVICE u64 shuffle_wide(u64 value, int lane) {
  const u32 low = shuffle_from(static_cast<u32>(value), lane);
  const u32 high = shuffle_from(static_cast<u32>(value >> 32), lane);
  return static_cast<u64>(high) << 32 | low;
}

DEVICE u64 shuffle_xor_wide(u64 value, int mask) { return shuffle_wide(value, (threadIdx.x & 31) ^ mask); }

DEVICE u64 warp_max(u64 value) {
  for (int mask = 16; mask > 0; mask /= 2) {
    const u64 other = shuffle_xor_wide(value, mask);
    value = other > value ? other : value;
  }
  return value;
}

DEVICE u64 warp_sum(u64 value) {
  for (int mask = 16; mask > 0; mask /= 2) value += shuffle_xor_wide(value, mask);
  return value;
}

// The sum, or the largest, of one value a thread, for every thread of the block.  warps: shared memory, an entry each.
DEVICE u64 block_sum(u64* warps, u64 value) {
  value = warp_sum(value);
  __syncthreads();
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = value;
  __syncthreads();
  u64 sum = 0;
  for (int warp = 0; warp < static_cast<int>(blockDim.x / 32); ++warp) sum += warps[warp];
  return sum;
}

DEVICE u64 block_max(u64* warps, u64 value) {
  value = warp_max(value);
  __syncthreads();
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = value;
  __syncthreads();
  u64 largest = 0;
  for (int warp = 0; warp < static_cast<int>(blockDim.x / 32); ++warp)
    if (warps[warp] > largest) largest = warps[warp];
  return largest;
}

// The sum over all threads below this one.
DEVICE u64 block_sum_before(u64* warps, u64 value) {
  const int lane = threadIdx.x % 32, own_warp = threadIdx.x / 32;
  u64 through = value;
  for (int delta = 1; delta < 32; delta *= 2) {
    const u64 other = shuffle_wide(through, (lane - delta) & 31);
    if (lane >= delta) through += other;
  }
  __syncthreads();
  if (lane == 31) warps[own_warp] = through;
  __syncthreads();
  u64 before = through - value;
  for (int warp = 0; warp < own_warp; ++warp) before += warps[warp];
  return before;
}

// ---- a row ----------------------------------------------------------------------------------------------------

// visit(word, index) for every 32-bit word of a row, by all threads, in no order; four loads of 16 bytes in flight.
// words: 16-byte aligned and readable up to a multiple of 4.
template <class Visit>
DEVICE void for_each_word(const uint4* words, int size, Visit visit) {
  constexpr int kInFlight = 4;
  const int vectors = (size + 3) / 4;
  for (int first = threadIdx.x; first < vectors; first += kInFlight * kSelectThreads) {
    uint4 batch[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i)
      if (first + i * kSelectThreads < vectors) batch[i] = load_global(words + first + i * kSelectThreads);
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const int index = 4 * (first + i * kSelectThreads);
      if (index + 0 < size) visit(batch[i].x, index + 0);
      if (index + 1 < size) visit(batch[i].y, index + 1);
      if (index + 2 < size) visit(batch[i].z, index + 2);
      if (index + 3 < size) visit(batch[i].w, index + 3);
    }
  }
}

// ---- descending -----------------------------------------------------------------------------------------------

struct Crossing {
  u32 key;    // a bin; or the leading digits of a key, zeros below them
  u64 above;  // the sum of everything larger
};

// The first bin, from the highest down, at which the running sum exceeds `target`; the whole sum does.
template <int kBins>
DEVICE_CALL Crossing find_bin(const Histogram<kBins>& histogram, u64 target) {
  constexpr int kBinsPerThread = kBins / kSelectThreads;
  const int top = kBins - 1 - kBinsPerThread * threadIdx.x;  // this thread's highest bin
  u64 sum = 0;
#pragma unroll
  for (int i = 0; i < kBinsPerThread; ++i) sum += histogram.sum(top - i);
  u64 before = block_sum_before(block.warp_sums, sum);
#pragma unroll
  for (int i = 0; i < kBinsPerThread; ++i) {
    const u64 through = before + histogram.sum(top - i);
    if (before <= target && target < through) {
      block.bin = top - i;
      block.above = before;
    }
    before = through;
  }
  __syncthreads();
  return {block.bin, block.above};
}

// The key at which the sum of values, from the largest key down, first exceeds `target`.
//
// elements: a functor whose for_each(visit) calls visit(key, a function that gives the value); the sum of all values
// must exceed target.  num_digits: 3 for the exact key, 2 for its upper 22 bits, 1 for its upper 11.
template <class Elements>
DEVICE_CALL Crossing descend(const Elements& elements, u64 target, int num_digits) {
  Crossing found = {0, 0};
  int shift = 32;
  for (int digit = 0; digit < num_digits; ++digit) {
    const u32 decided = shift == 32 ? 0 : ~0u << shift;
    shift = max(shift - kDigitBits, 0);
    block.digits.clear();
    elements.for_each([&](u32 key, auto value_of) {
      if ((key & decided) != found.key) return;
      const u64 value = value_of();
      if (value) block.digits.add((key & ~decided) >> shift, value);
    });
    __syncthreads();
    const Crossing bin = find_bin(block.digits, target - found.above);
    found.key |= bin.key << shift;
    found.above += bin.above;
  }
  return found;
}

// ---- a list ---------------------------------------------------------------------------------------------------

// block.list, `count` entries, in falling order; what is behind them becomes 0 as far as sorting needs it.
DEVICE_CALL void sort_list(int count) {
  int padded = 2;
  while (padded < count) padded *= 2;
  for (int i = count + threadIdx.x; i < padded; i += kSelectThreads) block.list[i] = 0;
  __syncthreads();
  for (int size = 2; size <= padded; size *= 2)  // Batcher's bitonic network
    for (int stride = size / 2; stride > 0; stride /= 2) {
      for (int pair = threadIdx.x; pair < padded / 2; pair += kSelectThreads) {
        const int low = 2 * pair - (pair & (stride - 1));
        const u64 a = block.list[low], b = block.list[low + stride];
        const bool falling = (low & size) == 0;
        if ((a < b) == falling) {
          block.list[low] = b;
          block.list[low + stride] = a;
        }
      }
      __syncthreads();
    }
}

// Index of the first entry whose running sum exceeds target; the last of `count` does.
DEVICE_CALL int find_in_list(int count, u64 target) {
  __syncthreads();
  for (int i = threadIdx.x; i < count; i += kSelectThreads)
    if (target < block.running[i] && (i == 0 || block.running[i - 1] <= target)) block.bin = i;
  __syncthreads();
  return block.bin;
}

// ---- the head of a row ---------------------------------------------------------------------------------------

// The numbers that are drawn from, or ranked: a row's logits or its scores.
struct Source {
  const uint4* words;   // fp32 [vocab]
  const uint4* maxima;  // keys [num_groups]
  i32 vocab;
  i32 num_groups;  // with those behind the vocabulary, whose key is kNoKey
  float largest;
};

struct Maxima {  // elements for `descend`
  const uint4* words;
  i32 size;
  template <class Visit>
  DEVICE void for_each(Visit visit) const {
    for_each_word(words, size, [&](u32 key, i32) { visit(key, [] { return u64{1}; }); });
  }
};

// To block.list, by eight lanes: every element of a group that is at least `bound`.
DEVICE void list_group(const Source& source, i32 group, u32 bound) {
  const i32 id = group * kGroup + threadIdx.x % 8 * 4;
  if (id >= source.vocab) return;
  const uint4 bits = load_global(source.words + id / 4);
  const u32 words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const u32 key = key_of(words[i]);
    if (key < bound || id + i >= source.vocab) continue;
    const int place = atomic_add(&block.count, 1);
    if (place < kListCapacity) block.list[place] = entry_of(key, id + i);
  }
}

// All elements of the groups whose largest is at least that of the rank-th group: at least `rank` elements, and every
// one as large as the smallest of them.  Leaves them sorted in block.list.  Their number, or −1 if there is no room.
DEVICE_CALL int list_head(const Source& source, int rank) {
  const bool bounded = rank < (source.vocab + kGroup - 1) / kGroup;
  const u32 bound = bounded ? descend(Maxima{source.maxima, source.num_groups}, rank - 1, 2).key : kNoKey + 1;
  __syncthreads();
  if (threadIdx.x == 0) block.count = 0;
  __syncthreads();
  const int lane = threadIdx.x % 32;
  const u32* maxima = reinterpret_cast<const u32*>(source.maxima);
  for (int first = threadIdx.x - lane; first < source.num_groups; first += kSelectThreads) {
    u32 chosen = ballot(maxima[first + lane] >= bound);
    while (chosen) {  // four groups at a time
      u32 mine = chosen;
      for (int i = 0; i < lane / 8; ++i) mine &= mine - 1;
      if (mine) list_group(source, first + __ffs(mine) - 1, bound);
      for (int i = 0; i < 4; ++i) chosen &= chosen - 1;
    }
  }
  __syncthreads();
  const int count = block.count;
  if (count > kListCapacity) return -1;
  sort_list(count);
  return count;
}

// The same for any number of equals: the largest `count`, one after the other.
DEVICE_CALL void list_largest(const Source& source, int count) {
  u64 previous = ~u64{0};
  for (int i = 0; i < count; ++i) {
    u64 largest = 0;
    for_each_word(source.words, source.vocab, [&](u32 bits, i32 id) {
      const u64 entry = entry_of(key_of(bits), id);
      if (entry < previous && entry > largest) largest = entry;
    });
    previous = block_max(block.warp_sums, largest);
    if (threadIdx.x == 0) block.list[i] = previous;
  }
  __syncthreads();
}
