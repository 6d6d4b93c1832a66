// A draw from a row: exact weights, noise that is a function of (seed, choice, position), and the filters' kept head.
//
// A weight is an integer in units of 2^-44, 1.0 at most: the sum over 2^19 elements fits 64 bits, and is the same in
// any order.  No fused or reordered operation but those written here, so every device computes the same bits.
#pragma once

#include "select.cuh"

constexpr int kMaxTop = 20;  // logprobs
constexpr int kMaxStops = 15;
constexpr int kHead = 512;   // groups that make the list, at most
constexpr int kCoarseBins = 1024;
constexpr int kWeightBits = 44;
constexpr double kWeightUnit = 5.684341886080802e-14;  // 2^-44
constexpr float kLog2E = 1.44269502f, kLog2ELow = 1.92596303e-8f;

// 2^((score − largest) · (scale + scale_low)) in units of 2^-44, rounded down.  score ≤ largest.
//
// The exponent is kept to about 48 bits, so that the weight is as good as its 24.
DEVICE u64 weight_of(float score, float largest, float scale, float scale_low) {
  const float difference = score - largest;
  const float part = difference - score;  // what of −largest got into the difference
  const float lost = (score - (difference - part)) + (-largest - part);
  const float exponent = difference * scale;
  if (!(exponent > -46.0f)) return 0;  // also where a product of infinities is no number
  const float whole = rintf(exponent);
  const float fraction =
      (exponent - whole) + (fmaf(difference, scale, -exponent) + fmaf(difference, scale_low, lost * scale));
  float power = 1.54614478e-4f;  // 2^fraction on [−1/2, 1/2] by Chebyshev's nodes: error below 2^-27 before rounding
  power = fmaf(power, fraction, 1.33908668e-3f);
  power = fmaf(power, fraction, 9.61805694e-3f);
  power = fmaf(power, fraction, 5.55035695e-2f);
  power = fmaf(power, fraction, 2.40226507e-1f);
  power = fmaf(power, fraction, 6.93147182e-1f);
  power = fmaf(power, fraction, 1.0f);
  const u64 mantissa = static_cast<u32>(power * 16777216.0f);  // 24 bits, or 25: exact
  const int shift = kWeightBits - 24 + static_cast<int>(whole);
  return shift >= 0 ? mantissa << shift : mantissa >> -shift;
}

// Rises with the score; 21 bins an octave of weight, so that neighbours in a row seldom meet.
DEVICE int coarse_bin(float score, float largest, float scale) {
  const float octaves = (largest - score) * scale;
  return kCoarseBins - 1 - static_cast<int>(fminf(octaves * (kCoarseBins / 48.0f), kCoarseBins - 1.0f));
}

// ⌊value · mass / 2^53⌋: value a number in [0, 1) in units of 2^-53, mass below 2^63.
DEVICE u64 scale_mass(u64 value, u64 mass) {
  const u64 value_low = value & 0xffffffffu, value_high = value >> 32;
  const u64 mass_low = mass & 0xffffffffu, mass_high = mass >> 32;
  const u64 middle = value_high * mass_low + (value_low * mass_low >> 32);
  const u64 carried = value_low * mass_high + (middle & 0xffffffffu);
  const u64 high = value_high * mass_high + (middle >> 32) + (carried >> 32);
  return high << 11 | (carried & 0xffffffffu) >> 21;
}

// engine/noise.py: Philox4x32-10 of key = seed, counter = (position, choice); 53 bits.
DEVICE u64 noise(u64 seed, u32 choice, u32 position) {
  u32 c0 = position, c1 = 0, c2 = choice, c3 = 0;
  u32 k0 = static_cast<u32>(seed), k1 = static_cast<u32>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const u64 product0 = static_cast<u64>(0xd2511f53u) * c0, product1 = static_cast<u64>(0xcd9e8d57u) * c2;
    c0 = static_cast<u32>(product1 >> 32) ^ c1 ^ k0;
    c1 = static_cast<u32>(product1);
    c2 = static_cast<u32>(product0 >> 32) ^ c3 ^ k1;
    c3 = static_cast<u32>(product0);
    k0 += 0x9e3779b9u;
    k1 += 0xbb67ae85u;
  }
  return static_cast<u64>(c0 >> 5) << 26 | c1 >> 6;
}

// ---- a slot ---------------------------------------------------------------------------------------------------

// The sampling parameters of a slot, as the host packs them (kernels/sample.py).
struct Record {
  u64 seed;
  double top_p;                            // 1: off
  double penalty, inverse_penalty;         // 1: off
  u64 min_weight;                          // ⌈min_p · 2^44⌉
  float inverse_temperature, inverse_low;  // log2(e) / T as a sum of two; 0 and 0: argmax
  i32 top_k;                               // 0: off; below V
  u32 choice;
  i32 num_logprobs;  // at most kMaxTop, and V
  i32 num_bias;
  i32 end;           // the position of its last token
  i32 stops[kMaxStops];  // or the token is one of these; −3: none
};
static_assert(sizeof(Record) == 128, "kernels/sample.py packs this");

DEVICE bool is_argmax(const Record& record) { return record.inverse_temperature == 0; }
DEVICE bool adjusts(const Record& record) { return record.penalty != 1 || record.num_bias > 0; }

// ---- a draw ---------------------------------------------------------------------------------------------------

struct Masses {
  u64 kept_by_top_k;
  u64 kept_by_min_p;  // of that
};

__shared__ Histogram<kCoarseBins> by_weight;  // the weights that top_k keeps, where the list does not decide

DEVICE u64 weight_of_key(u32 key, const Source& source, const Record& record) {
  return weight_of(score_of(key), source.largest, record.inverse_temperature, record.inverse_low);
}

DEVICE int coarse_bin_of_key(u32 key, const Source& source, const Record& record) {
  return coarse_bin(score_of(key), source.largest, record.inverse_temperature);
}

struct Counts {  // elements for `descend`: every score once
  Source source;
  template <class Visit>
  DEVICE void for_each(Visit visit) const {
    for_each_word(source.words, source.vocab, [&](u32 bits, i32) { visit(key_of(bits), [] { return u64{1}; }); });
  }
};

struct WeightsOfBin {  // the scores of one coarse bin with their weights
  Source source;
  const Record& record;
  int bin;
  template <class Visit>
  DEVICE void for_each(Visit visit) const {
    for_each_word(source.words, source.vocab, [&](u32 bits, i32) {
      const u32 key = key_of(bits);
      if (coarse_bin_of_key(key, source, record) != bin) return;
      visit(key, [&] { return weight_of_key(key, source, record); });
    });
  }
};

struct IdsOfKey {  // the ids of one key, the lowest first: id = ~key >> 13
  Source source;
  u32 wanted;
  template <class Visit>
  DEVICE void for_each(Visit visit) const {
    for_each_word(source.words, source.vocab, [&](u32 bits, i32 id) {
      if (key_of(bits) == wanted) visit(~(static_cast<u32>(id) << 13), [] { return u64{1}; });
    });
  }
};

// By a pass over the row, after three more if there is a top_k.  Leaves the weights in by_weight.
DEVICE Masses masses_of_row(const Source& source, const Record& record) {
  Crossing last = {kNoKey, 0};
  if (record.top_k) last = descend(Counts{source}, record.top_k - 1, 3);
  by_weight.clear();
  u64 all = 0, likely = 0;
  const auto add = [&](u32 key, u64 times) {
    const u64 weight = weight_of_key(key, source, record);
    if (weight == 0) return;
    by_weight.add(coarse_bin_of_key(key, source, record), times * weight);
    all += times * weight;
    if (weight >= record.min_weight) likely += times * weight;
  };
  for_each_word(source.words, source.vocab, [&](u32 bits, i32) {
    if (key_of(bits) > last.key) add(key_of(bits), 1);
  });
  if (record.top_k && threadIdx.x == 0) add(last.key, record.top_k - last.above);
  all = block_sum(block.warp_sums, all);
  return {all, block_sum(block.warp_sums, likely)};
}

// Of the first `count` entries of the list, whose running sums it leaves in block.running.
DEVICE Masses masses_of_list(int count, const Source& source, const Record& record) {
  const int first = kListPerThread * threadIdx.x;
  u64 weights[kListPerThread], all = 0, likely = 0;
#pragma unroll
  for (int i = 0; i < kListPerThread; ++i) {
    weights[i] = first + i < count ? weight_of_key(entry_key(block.list[first + i]), source, record) : 0;
    all += weights[i];
    if (weights[i] >= record.min_weight) likely += weights[i];
  }
  u64 through = block_sum_before(block.warp_sums, all);
#pragma unroll
  for (int i = 0; i < kListPerThread; ++i) block.running[first + i] = through += weights[i];
  __syncthreads();
  return {count > 0 ? block.running[count - 1] : 0, block_sum(block.warp_sums, likely)};
}

// Where a running sum of weights, in falling order, first exceeds a target: from the list as far as that goes.
struct Order {
  const Source& source;
  const Record& record;
  int listed;  // entries of the list with running sums
  u64 listed_mass;

  // The running sum, that element's weight included.
  DEVICE u64 mass_through(u64 target) const {
    if (target < listed_mass) return block.running[find_in_list(listed, target)];
    const Crossing found = descend_weights(target);
    const u64 weight = weight_of_key(found.key, source, record);
    return found.above + ((target - found.above) / weight + 1) * weight;
  }

  DEVICE i32 id_at(u64 target) const {
    if (target < listed_mass) return entry_id(block.list[find_in_list(listed, target)]);
    const Crossing found = descend_weights(target);
    const u64 equals_before = (target - found.above) / weight_of_key(found.key, source, record);
    return ~descend(IdsOfKey{source, found.key}, equals_before, 2).key >> 13;
  }

  DEVICE Crossing descend_weights(u64 target) const {
    const Crossing coarse = find_bin(by_weight, target);
    const WeightsOfBin elements = {source, record, static_cast<int>(coarse.key)};
    const Crossing fine = descend(elements, target - coarse.above, 3);
    return {fine.key, coarse.above + fine.above};
  }
};

// How many groups to list: the whole row, or all that top_k needs, or what is likely to decide.
DEVICE int head_rank(i32 top_k, i32 vocab) {
  if (vocab <= kListCapacity) return vocab;
  const int num_groups = vocab / kGroup;
  return top_k > 0 && top_k <= kHead && top_k < num_groups ? top_k : min(kHead, num_groups / 2);
}

// The mass that top_p keeps: what the likelier ones leave below its share, and the one that reaches it.
DEVICE u64 kept_by_top_p(const Order& order, double top_p, u64 mass) {
  const double share = ceil(top_p * static_cast<double>(mass));
  const u64 reached = share < static_cast<double>(mass) ? static_cast<u64>(share) : mass;
  return order.mass_through(reached > 0 ? reached - 1 : 0);
}

// listed: entries of the sorted list, the head of the falling order; −1: none.
DEVICE i32 draw(const Source& source, const Record& record, int listed, u32 position) {
  const bool list_decides = record.top_k ? record.top_k <= listed : source.vocab == listed;
  if (list_decides && record.top_k) listed = record.top_k;
  const Masses of_row = list_decides ? Masses{0, 0} : masses_of_row(source, record);
  const Masses of_list = masses_of_list(listed, source, record);
  const Masses masses = list_decides ? of_list : of_row;

  const Order order = {source, record, listed, of_list.kept_by_top_k};
  u64 kept = masses.kept_by_min_p;
  if (record.top_p < 1) {
    const u64 by_top_p = kept_by_top_p(order, record.top_p, masses.kept_by_top_k);
    kept = by_top_p < kept ? by_top_p : kept;  // of two heads, the shorter
  }
  return order.id_at(scale_mass(noise(record.seed, record.choice, position), kept));
}
